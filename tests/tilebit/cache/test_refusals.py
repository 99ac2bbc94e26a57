"""What a cache is given and does not fit is refused before anything changes: numbers, queries, rows, batches, states."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cache_rows import DIM, HEADS, cache_of, rows
from torch import Tensor

from tilebit import attention
from tilebit.cache.batch import Batch
from tilebit.cache.kvcache import KVCache
from tilebit.layouts.kv_formats import KVFormat
from tilebit.ops import plans
from tilebit.schedules.attention.workload import AttentionWorkload

BAD_NUMBERS = (1.5, 1.0, float("nan"), float("inf"), True, None, "1", np.float32(1), torch.tensor(1.0), -1)


def snapshot(cache: KVCache) -> tuple[Any, ...]:
    return copy.deepcopy({**cache.table.__getstate__(), "version": 0}), cache.memory.clone()


def unchanged(cache: KVCache, before: tuple[Any, ...]) -> bool:
    table, memory = snapshot(cache)
    return table == before[0] and torch.equal(memory, before[1])


# ---- numbers ----

CALLS: dict[str, Callable[[KVCache, int, Any], Any]] = {
    "sequences": lambda c, h, n: c.allocate(n),
    "reserved tokens": lambda c, h, n: c.allocate(1, n),
    "advance all": lambda c, h, n: c.advance([h], n),
    "advance each": lambda c, h, n: c.advance([h], [n]),
    "advance a batch": lambda c, h, n: c.advance(c.batch([h]), [n]),
    "truncate": lambda c, h, n: c.truncate(h, n),
    "size of a batch": lambda c, h, n: c.batch([h], n),
    "bounds": lambda c, h, n: c.append([h], *rows(1), cu_seqlens=[0, n]),
    "layer": lambda c, h, n: c.append([h], *rows(1), layer=n),
    "layer to attend": lambda c, h, n: c.attend([h], torch.zeros(1, 1, 4, DIM).half(), layer=n),
    "layer to gather": lambda c, h, n: c.gather([h], layer=n),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("number", BAD_NUMBERS, ids=repr)
def test_what_is_no_whole_number_is_refused_and_changes_nothing(kernels, call, number):
    cache = cache_of()
    (a,) = cache.allocate()
    cache.append([a], *rows(130))
    before = snapshot(cache)
    if call == "size of a batch" and number is None:
        return  # as many as there are sequences
    with pytest.raises(ValueError, match=r"accepted: (\d|for each a )?(.*whole number|.*numbers|.*0 to)|up to|cannot be cut"):
        CALLS[call](cache, a, number)
    assert unchanged(cache, before)


def test_numbers_of_numpy_and_torch_are_numbers(kernels):
    cache = cache_of()
    (a,) = cache.allocate(np.int64(1), torch.tensor(128))  # type: ignore[arg-type]
    for counts in (np.int32(3), torch.tensor(3), np.array([3]), torch.tensor([3]), (np.uint8(3),)):
        cache.append(cache.advance([a], counts), *rows(3))  # type: ignore[arg-type]
    cache.append([a], *rows(2), cu_seqlens=torch.tensor([0, 2]))
    cache.truncate(a, np.int64(16))  # type: ignore[arg-type]
    assert cache.length(a) == 16 and all(type(n) is int for s in cache.table.sequences.values() for n in (s.length, s.slot, *s.pages))


@pytest.mark.parametrize("name", ["num_pages", "slots", "heads_kv", "head_dim", "page_size", "num_layers", "max_tokens"])
@pytest.mark.parametrize("number", [1.5, 4.0, math.nan, True, 0, -1, "4"], ids=repr)
def test_sizes_of_a_cache_are_whole_numbers(name, number):
    with pytest.raises(ValueError, match=f"{name} is .*; accepted: whole numbers from 1"):
        KVCache(**{"num_pages": 4, "slots": 2, "heads_kv": 2, "head_dim": 64, name: number})
    with pytest.raises(ValueError, match="accepted: whole numbers from 1"):
        KVCache.contiguous(2, number, 2, 64)


def test_sizes_of_numpy_make_a_cache_whose_state_loads(kernels):
    sizes: dict[str, Any] = {
        "num_pages": 4,
        "slots": 2,
        "heads_kv": 2,
        "head_dim": 64,
        "page_size": 128,
        "num_layers": 1,
        "max_tokens": 300,
    }
    given: dict[str, Any] = {name: np.int64(size) for name, size in sizes.items()}
    cache = KVCache(**given)
    cache.append(cache.allocate(), *rows(130))
    assert all(type(value) is not np.int64 for held in (cache.config(), vars(cache), vars(cache.table)) for value in held.values())
    other = KVCache(**sizes)
    other.load_state(cache.state())
    cache.load_state(other.state())


@pytest.mark.parametrize("handles", [[[0]], [0.0, 1.0], [False, True], ["0"], [None], [-1]])
def test_handles_are_whole_numbers(kernels, handles):
    cache = cache_of()
    cache.allocate(2)
    before = snapshot(cache)
    calls = [
        lambda: cache.batch(handles),
        lambda: cache.advance(handles),
        lambda: cache.append(handles, *rows(2)),
        lambda: cache.gather(handles),
    ]
    for call in (*calls, lambda: cache.free(handles[0]), lambda: cache.fork(handles[0]), lambda: cache.length(handles[0])):
        with pytest.raises(ValueError, match="is no handle of this cache; accepted: handles that allocate or fork returned"):
            call()
    assert unchanged(cache, before)
    assert cache.batch([np.int64(1), 0]).handles == (1, 0)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="each once"):
        cache.batch([np.int64(1), 1])  # type: ignore[list-item]


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 1e-39])
def test_head_scales_are_finite_and_above_zero(scale):
    scales = torch.ones(2, HEADS)
    scales[1, 0] = scale
    with pytest.raises(ValueError, match=r"head_scales are .*accepted: finite numbers above 0"):
        cache_of("kvfp8", head_scales=scales)


def test_head_scales_are_the_cache_s_own(kernels):
    scales = torch.ones(1, 2, HEADS)
    cache = cache_of("kvfp8", head_scales=scales)
    scales.zero_()
    assert cache.head_scales is not None and (cache.head_scales == 1).all()


@pytest.mark.parametrize("cap", [math.inf, math.nan, -1.0])
def test_a_soft_cap_is_finite(kernels, cap):
    with pytest.raises(ValueError, match=r"soft_cap is .*finite"):
        AttentionWorkload("decode", 1, 1, 1, 2, 2, 64, KVFormat(), soft_cap=cap)
    cache = cache_of()
    with pytest.raises(ValueError, match=r"soft_cap is .*finite"):
        cache.attend(cache.allocate(), torch.zeros(1, 1, 4, DIM).half(), soft_cap=cap)


def test_sinks_are_a_tensor(kernels):
    cache, sinks = cache_of(), [1.0] * 4
    sequences = cache.allocate(2)
    key = rows(2)[0].view(2, 1, HEADS, DIM).transpose(1, 2)
    calls: list[Callable[[], Any]] = [
        lambda: cache.attend(sequences, torch.zeros(2, 1, 4, DIM).half(), sinks=sinks),  # type: ignore[arg-type]
        lambda: cache.prefill(sequences, torch.zeros(2, 4, DIM).half(), *rows(2), sinks=sinks),  # type: ignore[arg-type]
        lambda: attention.scaled_dot_product_decode(torch.zeros(2, 4, 1, DIM).half(), cache, sequences, key, key, sinks=sinks),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"sinks is list .*; accepted: a torch.Tensor or None"):
            call()
    assert cache.length(sequences[0]) == 0 and not kernels.calls


@pytest.mark.parametrize("bounds", [2, None, "x"])
def test_bounds_are_numbers(kernels, bounds):
    cache = cache_of()
    sequences = cache.allocate(2)
    with pytest.raises(ValueError, match=r"k has 3 rows|cu_seqlens is|a number of cu_seqlens is"):
        cache.append(sequences, *rows(3), cu_seqlens=bounds)
    assert cache.length(sequences[0]) == 0


# ---- queries and rows of another cache ----


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_queries_are_of_the_cache_s_dtype_and_shape(kernels, dtype):
    """The other 16-bit type is as wide, so that nothing but its name tells."""
    cache = cache_of(dtype=dtype)
    sequences = cache.allocate(2)
    cache.append(sequences, *rows(8, dtype=dtype))
    other = torch.bfloat16 if dtype == torch.float16 else torch.float16
    good = torch.randn(2, 1, 4, DIM).to(dtype)
    key, value = (x.view(2, 2, HEADS, DIM).transpose(1, 2) for x in rows(4, dtype=dtype))
    cache.attend(sequences, good)
    before, launched = snapshot(cache), list(kernels.calls)
    for q in (good.to(other), good.float(), good[:1], good[..., :32], good[0], good.to("meta")):
        for sequences_ in (sequences, cache.batch(sequences)):
            with pytest.raises(ValueError, match=r"q is .*; accepted: torch\.b?float16 \[2, q_len, heads_q, 64\] on cpu"):
                cache.attend(sequences_, q)
        if q.ndim == 4:
            doubled = torch.cat((q, q), dim=1).transpose(1, 2)
            with pytest.raises(ValueError, match="q is "):
                attention.scaled_dot_product_decode(doubled, cache, sequences, key, value)
        rows_ = q.flatten(0, -3) if q.ndim == 4 and q.shape[0] == 2 else q.view(-1, 4, DIM)[:1] if q.shape[-1] == DIM else q
        with pytest.raises(ValueError, match=r"q is .*accepted: torch"):
            cache.prefill(sequences, rows_, *rows(2, dtype=dtype))
    assert unchanged(cache, before) and kernels.calls == launched, "before a launch, and before the new tokens join"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sinks": torch.ones(3)}, r"sinks is float32 \[3\]"),
        ({"sinks": torch.ones(4).half()}, r"sinks is float16 \[4\]"),
        ({"window": -1}, "window is -1"),
        ({"window": 2.5}, "window is 2.5"),
        ({"window": 2**31}, "window is 2147483648; accepted: whole numbers from 0 to 2147483647"),
        ({"window": True}, "window is True"),
        ({"window": "3"}, "window is '3'"),
        ({"sink_tokens": 1.5}, "sink_tokens is 1.5"),
        ({"sink_tokens": 2**31}, "sink_tokens is 2147483648"),
        ({"soft_cap": None}, "soft_cap is None; accepted: numbers"),
        ({"soft_cap": True}, "soft_cap is True"),
        ({"soft_cap": 1e-40}, "soft_cap is 1e-40; accepted: 0, or finite numbers from"),
        ({"soft_cap": 1e39}, r"soft_cap is 1e\+39"),
        ({"scale": "x"}, "scale is 'x'"),
        ({"scale": 1e-40}, "scale is 1e-40"),
        ({"scale": math.nan}, "scale is nan"),
        ({"sink_tokens": -1}, "sink_tokens is -1"),
        ({"soft_cap": -2.0}, "soft_cap is -2.0"),
        ({"scale": 0.0}, "scale is 0.0"),
        ({"layer": 1}, "layer is 1"),
    ],
)
def test_options_are_refused_before_tokens_join(kernels, options, says):
    cache = cache_of()
    sequences = cache.allocate(2)
    cache.append(sequences, *rows(260))
    before, launched = snapshot(cache), list(kernels.calls)
    key = rows(2)[0].view(2, 1, HEADS, DIM).transpose(1, 2)
    with pytest.raises(ValueError, match=says):
        attention.scaled_dot_product_decode(torch.zeros(2, 4, 1, DIM).half(), cache, sequences, key, key, **options)
    with pytest.raises(ValueError, match=says):
        cache.prefill(sequences, torch.zeros(2, 4, DIM).half(), *rows(2), **options)
    with pytest.raises(ValueError, match=says):
        cache.attend(sequences, torch.zeros(2, 1, 4, DIM).half(), **options)
    assert unchanged(cache, before) and kernels.calls == launched


def test_options_of_numpy_are_numbers(kernels):
    cache, q = cache_of(), torch.randn(2, 1, 4, DIM).half()
    sequences = cache.allocate(2)
    cache.append(sequences, *rows(260))
    options: dict[str, Any] = {"window": np.int64(5), "sink_tokens": np.uint8(2), "soft_cap": np.float32(2), "scale": np.float32(0.5)}
    plain = {"window": 5, "sink_tokens": 2, "soft_cap": 2.0, "scale": 0.5}
    expected = cache.attend(sequences, q, **plain)[0]
    batch = cache.batch(sequences)
    raw = (q, cache.pages[0], cache.windows[0], batch.block_tables, batch.slots, batch.lengths, None, None, cache.format.name, 128)
    kernels.asked.clear()
    plans.forget()
    assert torch.equal(cache.attend(sequences, q, **options)[0], expected)
    assert torch.equal(attention.decode(*raw, **options)[0], expected)
    assert [w.to_json() for w in kernels.asked] == [{**kernels.asked[0].to_json(), **plain}] and type(kernels.asked[0].window) is int
    key = rows(2)[0].view(2, 1, HEADS, DIM).transpose(1, 2)
    attention.scaled_dot_product_decode(q.transpose(1, 2), cache, sequences, key, key, **options)
    bounds = torch.tensor([0, 2], dtype=torch.int32)
    attention.prefill(torch.zeros(2, 4, DIM).half(), *rows(2), bounds, bounds, **options)
    cache.prefill(sequences, torch.zeros(2, 4, DIM).half(), *rows(2), **options)
    assert [cache.length(h) for h in sequences] == [132, 132]


def test_a_decode_that_fails_says_that_its_tokens_have_joined(kernels, monkeypatch):
    cache = cache_of()
    sequences = cache.allocate(2)
    key = rows(2)[0].view(2, 1, HEADS, DIM).transpose(1, 2)
    monkeypatch.setattr(KVCache, "attend", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError) as raised:
        attention.scaled_dot_product_decode(torch.zeros(2, 4, 1, DIM).half(), cache, sequences, key, key)
    assert "have joined the cache" in raised.value.__notes__[0] and cache.length(sequences[0]) == 1


@pytest.mark.parametrize("call", ["append", "prefill"])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"cos_sin": torch.zeros(500, DIM).half()},
            r"float16 .*accepted: float32 \[134 positions or more, 64, or fewer in steps of 32\] on cpu",
        ),
        ({"cos_sin": torch.zeros(500, DIM).double()}, "cos_sin is float64"),
        ({"cos_sin": torch.zeros(500, DIM, device="meta")}, "on meta"),
        ({"cos_sin": torch.zeros(133, DIM)}, "134 positions or more"),
        ({"cos_sin": torch.zeros(500, DIM - 16)}, r"cos_sin is float32 \[500, 48\]"),
        ({"cos_sin": torch.zeros(500, DIM), "rotary": "neox"}, "rotary is 'neox'"),
        ({"rotary": "interleaved"}, "rotary is 'interleaved' and cos_sin is None"),
    ],
)
def test_rotary_tables_are_refused_in_the_same_words(kernels, call, options, says):
    cache = cache_of()
    (a,) = cache.allocate()
    cache.append([a], *rows(130))
    before, launched = snapshot(cache), list(kernels.calls)
    given = (*([torch.zeros(4, 4, DIM).half()] if call == "prefill" else []), *rows(4))
    with pytest.raises(ValueError, match=says):
        getattr(cache, call)([a], *given, **options)
    for table in ((torch.zeros(500, DIM), torch.zeros(500, DIM)), np.zeros((500, DIM), dtype=np.float32)):
        with pytest.raises(TypeError, match=r"cos_sin is .*; accepted: a torch.Tensor or None"):
            getattr(cache, call)([a], *given, cos_sin=table)
    assert unchanged(cache, before) and kernels.calls == launched


def test_rows_in_a_grid_are_one_line_for_each_sequence(kernels):
    cache = cache_of()
    sequences = cache.allocate(3)
    k, v = (x.view(2, 3, HEADS, DIM) for x in rows(6))
    with pytest.raises(ValueError, match=r"k is \[2, 3, 2, 64\] and the sequences get \[2, 2, 2\] rows"):
        cache.append(sequences, k, v)
    with pytest.raises(ValueError, match=r"get \[1, 2, 3\] rows"):
        cache.append(sequences, k.view(3, 2, HEADS, DIM), v.view(3, 2, HEADS, DIM), cu_seqlens=[0, 1, 3, 6])
    assert all(cache.length(h) == 0 for h in sequences)
    cache.append(sequences, k.view(3, 2, HEADS, DIM), v.view(3, 2, HEADS, DIM))
    assert torch.equal(cache.gather(sequences)[1][0], k.view(6, HEADS, DIM)[2:4])


@pytest.mark.parametrize("call", ["append", "prefill"])
def test_values_in_another_order_than_keys_are_refused(kernels, call):
    """Flattened, both have the same shape."""
    cache = cache_of()
    sequences = cache.allocate(2)
    before, launched = snapshot(cache), list(kernels.calls)
    k, v = (x.view(2, 3, HEADS, DIM) for x in rows(6))
    q = [torch.zeros(6, 4, DIM).half()] if call == "prefill" else []
    for key, value, name in ((k, v.transpose(0, 1), "v"), (k.flatten(0, 1), v.transpose(0, 1), "v"), (k.transpose(0, 1), v, "k")):
        with pytest.raises(ValueError, match=rf"{name} is \[3, 2, 2, 64\] and the sequences get \[3, 3\] rows"):
            getattr(cache, call)(sequences, *q, key, value)
    assert unchanged(cache, before) and kernels.calls == launched
    getattr(cache, call)(sequences, *q, k, v.flatten(0, 1))


# ---- batches ----


def late(*changes: Callable[[KVCache, Batch, int], Any]) -> Callable[[KVCache, Batch, int], None]:
    def apply(cache: KVCache, batch: Batch, a: int) -> None:
        for change in changes:
            change(cache, batch, a)

    return apply


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (late(), "was not advanced"),
        (late(lambda c, b, a: c.advance(b, 3), lambda c, b, a: b.assign([a])), "was not advanced"),
        (late(lambda c, b, a: c.advance(b, 3), lambda c, b, a: c.truncate(a, 130)), "was not advanced"),
        (late(lambda c, b, a: c.advance(b, 3), lambda c, b, a: c.append([a], *rows(1))), "was not advanced"),
        (
            late(lambda c, b, a: c.advance(b, 3), lambda c, b, a: c.truncate(a, 131), lambda c, b, a: c.append([a], *rows(2))),
            "not advanced",
        ),
        (late(lambda c, b, a: c.advance(b, 3), lambda c, b, a: c.load_state(c.state())), "was not advanced"),
        (late(lambda c, b, a: c.append(c.advance(b, 3), *rows(3))), "layer 0 were written .* would be overwritten"),
        (late(lambda c, b, a: c.prefill(c.advance(b, 3), torch.zeros(3, 4, DIM).half(), *rows(3))), "layer 0 were written"),
    ],
)
def test_rows_of_a_batch_have_a_place_of_their_own(kernels, change, says):
    """Else they would be dropped, or would overwrite others."""
    cache = cache_of()
    (a,) = cache.allocate()
    cache.append([a], *rows(130))
    batch = cache.batch([a])
    change(cache, batch, a)
    before, launched = snapshot(cache), list(kernels.calls)
    for call in (lambda: cache.append(batch, *rows(3)), lambda: cache.prefill(batch, torch.zeros(3, 4, DIM).half(), *rows(3))):
        with pytest.raises(ValueError, match=says):
            call()
    assert unchanged(cache, before) and kernels.calls == launched
    length = cache.length(a)
    cache.append(cache.advance(batch, 3), *rows(3))
    assert cache.length(a) == length + 3


def test_gather_asks_for_no_default_device(kernels):
    cache = cache_of()
    sequences = cache.allocate(2)
    k, v = rows(6)
    cache.append(sequences, k, v)
    with torch.device("meta"):
        held = cache.gather(sequences)
    assert torch.equal(held[1][0], k[3:])


def test_each_layer_s_rows_are_written_once(kernels):
    cache = cache_of(num_layers=2)
    batch = cache.advance(cache.allocate(2), 1)
    for layer in (1, 0):
        cache.append(batch, *rows(2), layer=layer)
        cache.fork(batch.handles[0])  # changes no length
    with pytest.raises(ValueError, match="layer 1 were written"):
        cache.append(batch, *rows(2), layer=1)
    cache.advance(batch, 0)
    for _ in range(2):  # a warm-up: all rows are padding
        cache.append(batch, *rows(2), layer=1)


def test_a_batch_says_at_once_what_is_so(kernels):
    """So that the raw ops agree with ``attend``."""
    cache = cache_of()
    a, b = cache.allocate(2)
    cache.append([a, b], *rows(400), cu_seqlens=[0, 150, 400])
    q = torch.randn(2, 1, 4, DIM).half()

    def raw(batch: Batch) -> Tensor:
        tensors = (cache.pages[0], cache.windows[0], batch.block_tables, batch.slots, batch.lengths)
        return attention.decode(q, *tensors, None, None, cache.format.name, cache.page_size)[0]

    batch = cache.batch([b, a])
    assert batch.lengths.tolist() == [250, 150] and batch.cu_kv.tolist() == [0, 250, 400]
    assert torch.equal(raw(batch), cache.attend([b, a], q)[0])
    batch.assign([a, b])
    assert batch.lengths.tolist() == [150, 250] and torch.equal(raw(batch), cache.attend([a, b], q)[0])


# ---- states ----


def with_(state: Any, path: str, value: Any) -> Any:
    """``state`` with another value at ``path`` ("table.next"); ``DROP`` leaves it out."""
    first, _, rest = path.partition(".")
    made: Any = list(state) if isinstance(state, (list, tuple)) else dict(state)
    key: Any = int(first) if isinstance(made, list) else first
    if value is DROP and not rest:
        del made[key]
    else:
        made[key] = with_(made[key], rest, value) if rest else value
    return made


DROP = object()
WRONG_STATES = [
    ("config", DROP), ("config", None), ("config.dtype", "torch.bfloat16"), ("config.head_dim", 128), ("table", DROP), ("table", 3),
    ("table.next", DROP), ("table.next", 1), ("table.next", 2.5), ("table.next", -1), ("table.sequences", DROP), ("table.sequences", 1),
    ("table.sequences.0", [0, 0, 1]), ("table.sequences.0.0", 1), ("table.sequences.0.0", -1), ("table.sequences.0.0", "a"),
    ("table.sequences.0.1", -1), ("table.sequences.0.1", 1), ("table.sequences.0.1", 99), ("table.sequences.0.1", 0.0),
    ("table.sequences.0.2", -1), ("table.sequences.0.2", 384), ("table.sequences.0.2", 10**9), ("table.sequences.0.2", math.nan),
    ("table.sequences.0.3", [0]), ("table.sequences.0.3", [0, -1]), ("table.sequences.0.3", [0, 0]), ("table.sequences.0.3", [0, 1.0]),
    ("table.sequences.0.3", [0, 4096]), ("table.sequences.0.3", [0, 5]), ("table.sequences.0.3", None),
    ("table.sequences.0.3", list(range(40))),
    ("pages", DROP), ("pages", None), ("pages.0", []), ("pages.0.0", -1), ("pages.0.0", 1.0), ("pages.0.0", 99), ("pages.1", None),
    ("pages.1", torch.zeros(1, 3, 2, 4, dtype=torch.int32)), ("windows", DROP), ("windows.0", [0, 0]), ("windows.0", [0]),
    ("windows.1", torch.zeros(1, 2, 2, 8192)), ("head_scales", DROP), ("head_scales", torch.zeros(1, 2, 2)), ("head_scales", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value"), WRONG_STATES, ids=lambda x: x if isinstance(x, str) else "")
def test_a_wrong_state_is_refused_whole(kernels, path, value):
    cache = cache_of("kvfp8")
    sequences = cache.allocate(2)
    cache.append(sequences, *rows(520))
    state = cache.state()
    assert state["table"]["sequences"][0][2:] == [260, [0, 1]] and state["pages"][0] == [0, 1, 2, 3]
    other = cache_of("kvfp8")
    other.append(other.allocate(1), *rows(300))
    before = snapshot(other)
    with pytest.raises(ValueError, match=r"accepted|make it as large"):
        other.load_state(with_(state, path, value))
    assert unchanged(other, before)
    other.load_state(state)
    assert other.sequences == sequences


def test_a_state_of_pages_that_would_be_written_twice_is_refused(kernels):
    cache = cache_of(page_size=256)
    a, b = cache.allocate(2)
    cache.append([a, b], *rows(256))
    state = cache.state()
    state["table"]["sequences"][1][3] = list(state["table"]["sequences"][0][3])
    with pytest.raises(ValueError, match="shares page 0, which is not full"):
        cache.load_state(state)


def test_no_state_makes_a_handle_mean_another_sequence(kernels):
    cache = cache_of()
    empty = cache.state()
    used = cache.allocate(3)
    batch = cache.batch(used)
    cache.load_state(empty)
    assert not set(cache.allocate(3)) & set(used)
    with pytest.raises(ValueError, match="was freed"):
        cache.attend(batch, torch.zeros(3, 1, 4, DIM).half())
    for wrong in (None, [], 3):
        with pytest.raises(ValueError, match="the state is of a cache None"):
            cache.load_state(wrong)  # type: ignore[arg-type]
