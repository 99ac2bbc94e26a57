"""The cache object: what a serving loop does with it, against rows kept in plain lists, in every format."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
import torch
from cache_rows import DIM, HEADS, cache_of, meant, rows, same

from tilebit.cache.batch import Batch
from tilebit.cache.kvcache import KVCache
from tilebit.cache.sequences import CacheFull
from tilebit.layouts.kv_formats import KVFormat
from tilebit.ops import attention as attention_ops
from tilebit.ops import plans
from tilebit.tiles.attention import reference

FORMATS = [form.name for form in KVFormat.all()]
EDGES = (0, 1, 127, 128, 129, 255, 256, 257)


@pytest.mark.parametrize("format", FORMATS)
def test_any_history_in_every_format(kernels, format):
    """Allocate, append, prefill, fork, truncate, free at random: every sequence stays what was put into it."""
    chance = random.Random(FORMATS.index(format))
    dtype = chance.choice((torch.float16, torch.bfloat16))
    cache = cache_of(format, chance.choice((16, 64, 128, 256)), 2048, dtype=dtype)
    model = {handle: rows(0, dtype=dtype) for handle in cache.allocate(2)}
    for step in range(14):
        live = sorted(model)
        try:
            match chance.choice(("allocate", "append", "append", "append", "prefill", "fork", "truncate", "free")):
                case "append" | "prefill" as what if live:
                    chosen = chance.sample(live, chance.randint(1, len(live)))
                    counts = [chance.choice((0, 1, 100, 129)) for _ in chosen]
                    k, v = rows(sum(counts), dtype=dtype)
                    bounds = np.cumsum([0, *counts]).tolist()
                    if what == "append":
                        cache.append(chosen, k, v, cu_seqlens=bounds)
                    else:
                        cache.prefill(chosen, torch.cat((k, k), dim=1), k, v, cu_seqlens=bounds)
                    parts = zip(chosen, k.split(counts), v.split(counts), strict=True)
                    model |= {h: (torch.cat((model[h][0], a)), torch.cat((model[h][1], b))) for h, a, b in parts}
                case "fork" if live:
                    source = chance.choice(live)
                    model[cache.fork(source)] = model[source]
                case "truncate" if live:
                    handle = chance.choice(live)
                    length = len(model[handle][0])
                    length = chance.choice((length // 128 * 128, (length // 128 * 128 + length) // 2, length // 256 * 128))
                    cache.truncate(handle, length)
                    model[handle] = (model[handle][0][:length], model[handle][1][:length])
                case "free" if len(live) > 1:
                    cache.free(live[0])
                    del model[live[0]]
                case _:
                    model |= {handle: rows(0, dtype=dtype) for handle in cache.allocate()}
        except CacheFull as error:
            assert "Nothing has changed" in str(error) or "slot" in str(error)
        assert cache.sequences == sorted(model)
        if model and step % 7 == 6:
            held = cache.gather(sorted(model))
            for got, handle in zip(held, sorted(model), strict=True):
                assert same(got, meant(*model[handle], cache)), (handle, len(model[handle][0]))
    assert "append" in kernels.calls and "gather" in kernels.calls


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
def test_token_by_token_is_bulk(kernels, page_size):
    cache = cache_of(page_size=page_size)
    one, bulk, chunks = cache.allocate(3)
    k, v = rows(300)
    cache.append([bulk], k, v)
    for i in range(300):
        cache.append([one], k[i : i + 1], v[i : i + 1])
    for a, b in zip(k.split(77), v.split(77), strict=True):
        cache.append([chunks], a, b)
    packed = [torch.stack([cache.pages[0][page] for page in cache.table.sequence(h).pages]) for h in (one, bulk, chunks)]
    assert torch.equal(packed[0], packed[1]) and torch.equal(packed[1], packed[2])
    first, *others = cache.gather([one, bulk, chunks])
    assert all(same(first, other) for other in others) and same(first, meant(k, v, cache))


@pytest.mark.parametrize("page_size", [16, 128, 256])
@pytest.mark.parametrize("q_len", [1, 3])
def test_attend_is_the_reference_at_every_edge(kernels, page_size, q_len):
    cache = cache_of(page_size=page_size, slots=len(EDGES))
    sequences = cache.allocate(len(EDGES))
    k, v = rows(sum(EDGES))
    cache.append(sequences, k, v, cu_seqlens=np.cumsum([0, *EDGES]).tolist())
    held = [meant(a, b, cache) for a, b in zip(k.split(EDGES), v.split(EDGES), strict=True)]
    q = torch.randn(len(EDGES), q_len, 6, DIM).half()
    sinks = torch.randn(6)
    for options in ({}, {"window": 100, "sink_tokens": 4, "scale": 0.3}, {"soft_cap": 5.0, "sinks": sinks}):
        out, lse = cache.attend(sequences, q, return_lse=True, **options)
        expected, expected_lse = reference.decode(q, [a for a, _ in held], [b for _, b in held], **options)
        torch.testing.assert_close(out, expected.half(), rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(lse, expected_lse.float(), rtol=1e-5, atol=1e-5)
        without, nothing = cache.attend(sequences, q, **options)
        assert torch.equal(without, out) and nothing.numel() == 0
    assert not out[0].any() and torch.equal(lse[0], sinks.expand(q_len, 6))


def test_prefill_attends_to_the_quantized_history_and_the_new_rows(kernels):
    cache = cache_of()
    sequences = cache.allocate(3)
    past, new = (0, 130, 300), (5, 200, 1)
    k, v = rows(sum(past))
    cache.append(sequences, k, v, cu_seqlens=np.cumsum([0, *past]).tolist())
    held = cache.gather(sequences)
    nk, nv = rows(sum(new))
    q = torch.randn(sum(new), 4, DIM).half()
    bounds = np.cumsum([0, *new])
    out, lse = cache.prefill(sequences, q, nk, nv, bounds.tolist(), window=150, return_lse=True)
    for i, (a, b) in enumerate(zip(nk.split(new), nv.split(new), strict=True)):
        mine = slice(bounds[i], bounds[i + 1])
        keys, values = torch.cat((held[i][0], a)), torch.cat((held[i][1], b))
        expected, expected_lse = reference.attend(q[mine], keys, values, window=150)
        assert torch.equal(out[mine], expected.half()) and torch.equal(lse[mine], expected_lse.float())
    for i, got in enumerate(cache.gather(sequences)):
        whole_k, whole_v = (torch.cat((x.split(past)[i], y.split(new)[i])) for x, y in ((k, nk), (v, nv)))
        assert same(got, meant(whole_k, whole_v, cache))


def test_a_first_prefill_copies_no_rows(kernels):
    cache = cache_of()
    cache.prefill(cache.allocate(2), torch.randn(20, 4, DIM).half(), *rows(20))
    assert kernels.calls == ["prefill", "append"]


@pytest.mark.parametrize("kind", ["half", "interleaved"])
def test_rotary_at_each_sequence_s_positions(kernels, kind):
    angle = torch.arange(400.0)[:, None] * torch.logspace(0, -3, DIM // 2)
    cos_sin = torch.cat((angle.cos(), angle.sin()), dim=1)
    cache = cache_of("kv16")
    a, b, c, d = cache.allocate(4)
    k, v = rows(330)
    cache.append([a, b], k, v, cu_seqlens=[0, 300, 330], cos_sin=cos_sin, rotary=kind)
    cache.prefill([c, d], torch.randn(330, 4, DIM).half(), k, v, [0, 300, 330], cos_sin=cos_sin, rotary=kind)
    cache.append([b], k[:1], v[:1], cos_sin=cos_sin, rotary=kind)
    cache.prefill([d], torch.randn(1, 4, DIM).half(), k[:1], v[:1], cos_sin=cos_sin, rotary=kind)
    held = cache.gather([a, b, c, d])
    assert same(held[0], held[2]) and same(held[1], held[3])
    expected = reference.rotate(k[:300], torch.arange(300), cos_sin, kind)
    torch.testing.assert_close(held[0][0].double(), expected, rtol=1e-3, atol=1e-3)
    expected = reference.rotate(torch.cat((k[300:], k[:1])), torch.arange(31), cos_sin, kind)
    torch.testing.assert_close(held[1][0].double(), expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(held[0][1], v[:300])


@pytest.mark.parametrize("page_size", [16, 256])
def test_forks_do_not_disturb_each_other(kernels, page_size):
    cache = cache_of(page_size=page_size)
    (a,) = cache.allocate()
    k, v = rows(140)
    cache.append([a], k, v)
    before = cache.gather([a])[0]
    b, c = cache.fork(a), cache.fork(a)
    for i, handle in enumerate((b, c, a)):
        more = rows(250 + i)
        cache.append([handle], *more)
        assert same(cache.gather([handle])[0], meant(torch.cat((k, more[0])), torch.cat((v, more[1])), cache))
    cache.free(a)
    assert all(same([x[:128] for x in cache.gather([h])[0]], [x[:128] for x in before]) for h in (b, c))  # type: ignore[arg-type]
    for handle in (b, c):
        cache.free(handle)
    assert cache.free_pages == cache.table.num_pages and cache.free_slots == 6


def test_forks_share_packed_pages():
    cache = cache_of(page_size=64)
    (a,) = cache.allocate(1, tokens=1024)
    cache.table.extend([a], [700])
    free = cache.free_pages
    cache.fork(a)
    assert cache.free_pages == free


def test_running_full_changes_nothing(kernels):
    cache = cache_of(tokens=512)
    a, b = cache.allocate(2)
    k, v = rows(600)
    cache.append([a], k[:300], v[:300])
    before, calls = cache.state(), list(kernels.calls)
    with pytest.raises(CacheFull, match="need 4 more pages of 128 tokens and 2 of 4 are free"):
        cache.append([a, b], k, v)
    with pytest.raises(CacheFull):
        cache.prefill([b], torch.randn(600, 4, DIM).half(), k, v)
    with pytest.raises(CacheFull, match="5 sequences need as many slots"):
        cache.allocate(5)
    after = cache.state()
    assert after["table"] == before["table"] and torch.equal(after["pages"][1], before["pages"][1]) and kernels.calls == calls
    cache.append([b], k[:256], v[:256])
    assert cache.free_pages == 0 and same(cache.gather([a])[0], meant(k[:300], v[:300], cache))


def test_a_kernel_that_fails_leaves_lengths_as_they_were(kernels, monkeypatch):
    cache = cache_of()
    (a,) = cache.allocate()
    k, v = rows(200)
    cache.append([a], k, v)
    monkeypatch.setattr("tilebit.ops.attention.launch", lambda *_: 1 / 0)
    for call in (lambda: cache.append([a], k, v), lambda: cache.prefill([a], torch.randn(200, 4, DIM).half(), k, v)):
        with pytest.raises(ZeroDivisionError):
            call()
        assert cache.length(a) == 200
    monkeypatch.undo()
    monkeypatch.setattr(plans, "find_kernel", kernels.find)
    cache.append([a], k, v)
    assert same(cache.gather([a])[0], meant(torch.cat((k, k)), torch.cat((v, v)), cache))


def test_drafts_are_dropped_again(kernels):
    cache = cache_of()
    (a,) = cache.allocate()
    k, v = rows(120)
    cache.append([a], k, v)
    assert cache.revocable_tokens(a) == 7
    cache.append([a], *rows(7))
    cache.truncate(a, 122)
    assert cache.revocable_tokens(a) == 5 and cache.length(a) == 122
    cache.append([a], *rows(6))
    with pytest.raises(ValueError, match="accepted: 128 to 128, or a smaller multiple of 128"):
        cache.truncate(a, 127)
    assert cache.length(a) == 128 and cache.revocable_tokens(a) == 127


@pytest.mark.parametrize("format", ["kv2_token", "kvfp8"])
def test_state_goes_through_a_file_into_another_cache(kernels, format):
    cache = cache_of(format, page_size=32)
    a, b = cache.allocate(2)
    cache.append([a, b], *rows(300))
    cache.free(a)
    c = cache.fork(b)
    file = io.BytesIO()
    torch.save(cache.state(), file)
    file.seek(0)
    other = cache_of(format, page_size=32, slots=9, tokens=8192, head_scales=torch.ones(2, HEADS) if "fp8" in format else None)
    other.append(other.allocate(3), *rows(300))
    other.load_state(torch.load(file))
    assert other.sequences == [b, c] and same(other.gather([b])[0], cache.gather([b])[0])
    more = rows(100)
    for each in (cache, other):
        each.append([c], *more)
    assert same(other.gather([c])[0], cache.gather([c])[0]) and other.allocate() == cache.allocate()
    with pytest.raises(ValueError, match="the state is of a cache"):
        cache_of(format, page_size=64).load_state(cache.state())
    older = cache.state()
    del older["config"]["order"]  # as the first caches were saved: their pages hold parameters in another order
    with pytest.raises(ValueError, match="the state is of a cache"):
        other.load_state(older)


# ---- batches ----


def test_a_batch_changes_in_place(kernels):
    cache = cache_of()
    a, b, c = cache.allocate(3)
    batch = cache.batch([a, b], size=4)
    tensors = (batch.block_tables, batch.slots, batch.lengths, batch.past, batch.cu_seqlens, batch.cu_kv)
    addresses = [t.data_ptr() for t in tensors]
    assert all(address % 64 == 0 for address in addresses)
    cache.advance(batch, [200, 3])
    assert batch.lengths.tolist() == [200, 3, 0, 0] and batch.past.tolist() == [0] * 4
    assert batch.cu_seqlens.tolist() == [0, 200, 203, 203, 203]
    cache.append(batch, *rows(203))
    cache.advance(batch)
    assert batch.lengths.tolist() == [201, 4, 0, 0] and batch.past.tolist() == [200, 3, 0, 0]
    assert batch.cu_kv.tolist() == [0, 201, 205, 205, 205] and batch.cu_seqlens.tolist() == [0, 1, 2, 2, 2]
    assert batch.block_tables[0, 0] == cache.table.sequence(a).pages[0]
    k, v = rows(4)  # two rows of padding
    cache.append(batch, k, v)
    out, _ = cache.attend(batch, torch.randn(4, 1, 4, DIM).half())
    assert out[:2].any() and not out[2:].any()
    cache.free(b)
    batch.assign([c, a])
    cache.advance(batch, [1, 0])
    assert batch.lengths.tolist() == [1, 201, 0, 0] and batch.slots.tolist()[:2] == [cache.table.sequence(h).slot for h in (c, a)]
    assert [t.data_ptr() for t in tensors] == addresses
    with pytest.raises(ValueError, match="up to 4, each once"):
        batch.assign([a, a])


def test_a_batch_sees_what_others_did_to_its_sequences(kernels):
    cache = cache_of()
    a, b = cache.allocate(2)
    batch = cache.batch([b, a])
    k, v = rows(300)
    cache.append([a], k, v)
    q = torch.randn(2, 1, 4, DIM).half()
    assert torch.equal(cache.attend(batch, q)[0][1], cache.attend([a], q[1:])[0][0])
    cache.truncate(a, 128)
    assert torch.equal(cache.attend(batch, q)[0][1], cache.attend([a], q[1:])[0][0])
    assert batch.lengths.tolist() == [0, 128]
    cache.free(a)
    with pytest.raises(ValueError, match="was freed"):
        cache.attend(batch, q)


def test_what_a_dependent_attend_may_follow(kernels, monkeypatch):
    """The append of up to q_len tokens of each sequence; not one of more, and not what changes lengths, tables or pages."""
    cache, asked = cache_of(), []
    a, b = cache.allocate(2)
    batch = cache.batch([a, b])
    q = torch.randn(2, 2, 4, DIM).half()
    real = attention_ops.DECODE
    monkeypatch.setattr(attention_ops, "DECODE", lambda *arguments: (asked.append(arguments[-2]), real(*arguments[:-2]))[1])

    def early(on, dependent: bool = True) -> bool:
        asked.clear()
        cache.attend(on, q, dependent=dependent)
        return asked == [True]

    cache.advance(batch, [1, 2])
    cache.append(batch, *rows(3))
    assert early(batch) and early(batch) and not early(batch, dependent=False)
    cache.append([a, b], *rows(4))  # by the handles' own batch
    assert early([a, b]) and not early(batch) and early(batch), "the first call settles lengths"
    cache.advance(batch, [0, 3])
    cache.append(batch, *rows(3))
    assert not early(batch) and not early(batch)
    cache.advance(batch, 0)
    assert early(batch)
    for change in (lambda: cache.fork(a), lambda: cache.truncate(b, 5), lambda: batch.assign([b, a])):
        change()
        assert not early(batch) and early(batch)
    cache.prefill([a, b], torch.randn(10, 4, DIM).half(), *rows(10))
    assert not early([a, b])


def test_what_a_dependent_append_may_follow(kernels, monkeypatch):
    """Whatever computes its rows; not the copies of lengths and tables, which it reads early."""
    cache, asked = KVCache(8, 2, HEADS, DIM, num_layers=2), []
    batch = cache.batch(cache.allocate(2))
    real = attention_ops.APPEND
    monkeypatch.setattr(attention_ops, "APPEND", lambda *arguments: (asked.append(arguments[-2]), real(*arguments[:-2]))[1])

    def early(layer: int, dependent: bool = True) -> bool:
        asked.clear()
        cache.append(batch, *rows(2), layer=layer, dependent=dependent)
        return asked == [True]

    cache.advance(batch)
    assert [early(0), early(1)] == [False, True]
    cache.advance(batch)
    assert [early(0, dependent=False), early(1)] == [False, True], "a plain append waits for the copies"
    cache.advance(batch)
    batch.refresh()
    assert [early(1), early(0)] == [False, True]


def test_layers_share_tables_and_lengths(kernels):
    cache = cache_of(num_layers=3)
    sequences = cache.allocate(2)
    k, v = rows(3 * 260)
    batch = cache.advance(sequences, 130)
    for layer, (a, b) in enumerate(zip(k.split(260), v.split(260), strict=True)):
        cache.append(batch, a, b, layer=layer)
    fork = cache.fork(sequences[1])
    for layer, (a, b) in enumerate(zip(k.split(260), v.split(260), strict=True)):
        held = cache.gather([*sequences, fork], layer=layer)
        assert same(held[0], meant(a[:130], b[:130], cache)) and same(held[1], meant(a[130:], b[130:], cache)) and same(held[1], held[2])
    with pytest.raises(ValueError, match="3 layers"):
        cache.append(sequences, *rows(2))
    with pytest.raises(ValueError, match="layer is 3; accepted: whole numbers from 0 to 2"):
        cache.attend(batch, torch.randn(2, 1, 4, DIM).half(), layer=3)
    assert cache.length(sequences[0]) == 130
    batch = cache.advance(sequences, 5)
    out = [cache.prefill(batch, torch.randn(10, 4, DIM).half(), *rows(10), layer=layer)[0] for layer in range(3)]
    assert all(o.shape == (10, 4, DIM) for o in out) and cache.length(sequences[0]) == 135


def test_a_contiguous_cache_has_identity_tables(kernels):
    cache, sequences = KVCache.contiguous(3, 1000, HEADS, DIM, format="kv8_token", page_size=64)
    assert cache.free_pages == 0
    cache.append(sequences, *rows(3 * 1000))
    batch = cache.batch(sequences)
    batch.refresh()
    assert torch.equal(batch.block_tables, torch.arange(3 * 14, dtype=torch.int32).view(3, 14))


# ---- memory, and wrong calls ----


@pytest.mark.parametrize(("format", "page_size", "token"), [("kv16", 128, 256), ("kv4_channel", 16, 32 + 32 + 2 + 4), ("kvfp8", 256, 128)])
def test_memory_is_one_allocation_of_a_stated_size(format, page_size, token):
    cache = KVCache(10, 3, 8, DIM, format, page_size=page_size, num_layers=2)
    assert cache.memory_per_token == 2 * 8 * token and cache.memory_per_window == 2 * 8 * 128 * 256
    stated = 10 * page_size * cache.memory_per_token + 3 * cache.memory_per_window
    assert stated <= cache.memory_bytes <= stated + 2 * 256
    storage = cache.memory.untyped_storage()
    assert all(
        t.untyped_storage().data_ptr() == storage.data_ptr() and (t.data_ptr() - storage.data_ptr()) % 128 == 0
        for t in (*cache.pages, *cache.windows)
    )
    assert storage.nbytes() == cache.memory_bytes


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"head_dim": 96}, "head_dim is 96"),
        ({"page_size": 48}, "page_size is 48"),
        ({"heads_kv": 0}, "heads_kv is 0"),
        ({"num_pages": 0}, "num_pages is 0"),
        ({"format": "kv3"}, "unknown KV format 'kv3'"),
        ({"dtype": torch.float32}, "dtype is torch.float32; accepted: torch.float16 and torch.bfloat16"),
        ({"head_scales": torch.ones(2, 2)}, "kv4_channel has none"),
        ({"format": "kvfp8", "head_scales": torch.ones(2, 3)}, r"accepted: float32 \[2, 2\]"),
    ],
)
def test_caches_that_cannot_be(change, says):
    with pytest.raises(ValueError, match=says):
        KVCache(**{"num_pages": 4, "slots": 2, "heads_kv": 2, "head_dim": 64, **change})


def bad_append(k=None, v=None, **options):
    def call(cache: KVCache, a: int, b: int, batch: Batch) -> None:
        good = rows(4)
        cache.append([a, b], good[0] if k is None else k, good[1] if v is None else v, **options)

    return call


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (bad_append(k=torch.zeros(4, 2, 64)), r"k is float32 \[4, 2, 64\] on cpu; accepted: torch.float16"),
        (bad_append(v=torch.zeros(4, 3, 64).half()), r"v is float16 \[4, 3, 64\]"),
        (bad_append(v=torch.zeros(6, 2, 64).half()), "accepted: the same shape"),
        (bad_append(k=torch.zeros(4, 2, 64, device="meta").half()), "on meta; accepted"),
        (bad_append(*rows(5)), "k has 5 rows for 2 sequences"),
        (bad_append(cu_seqlens=[0, 4]), r"cu_seqlens is \[0, 4\]; accepted: 3 numbers from 0 to k's 4"),
        (bad_append(cu_seqlens=[0, 5, 4]), "none below the last"),
        (bad_append(cu_seqlens=[0, 2, 3]), "from 0 to k's 4 rows"),
        (bad_append(cos_sin=torch.zeros(1, 64)), r"accepted: float32 \[2 positions or more, 64, or fewer in steps of 32\]"),
        (bad_append(cos_sin=torch.zeros(9, 64), rotary="neox"), "rotary is 'neox'"),
        (lambda c, a, b, batch: c.append([a, 99], *rows(4)), "sequence 99 is no handle"),
        (lambda c, a, b, batch: c.append([a, a], *rows(4)), "each once"),
        (lambda c, a, b, batch: c.append(batch, *rows(2), cu_seqlens=[0, 1, 2]), "cu_seqlens is given with a Batch"),
        (lambda c, a, b, batch: c.append(cache_of().batch([]), *rows(2)), "belongs to another cache"),
        (lambda c, a, b, batch: c.attend([a, b], torch.zeros(3, 1, 4, 64).half()), r"q is float16 \[3, .*accepted: torch.float16 \[2, q"),
        (lambda c, a, b, batch: c.attend([a, b], torch.zeros(2, 1, 5, 64).half()), "heads_q is 5 and heads_kv 2"),
        (lambda c, a, b, batch: c.attend([a, b], torch.zeros(2, 1, 4, 32).half()), r"q is float16 \[2, 1, 4, 32\]"),
        (lambda c, a, b, batch: c.attend([a, b], torch.zeros(2, 1, 4, 64)), "q is float32 .* accepted: torch.float16"),
        (lambda c, a, b, batch: c.attend([a, b], torch.zeros(2, 4, 64).half()), r"q is float16 \[2, 4, 64\]"),
        (lambda c, a, b, batch: c.attend([a, b], torch.zeros(2, 1, 4, 64).half(), sinks=torch.zeros(3)), r"sinks is float32 \[3\]"),
        (lambda c, a, b, batch: c.prefill([a, b], torch.zeros(3, 4, 64).half(), *rows(4)), r"q is float16 \[3, 4, 64\]"),
    ],
)
def test_wrong_calls_say_what_is_accepted_and_change_nothing(kernels, call, says):
    cache = cache_of()
    a, b = cache.allocate(2)
    batch = cache.batch([a, b])
    with pytest.raises(ValueError, match=says):
        call(cache, a, b, batch)
    assert cache.length(a) == cache.length(b) == 0 and not kernels.calls
