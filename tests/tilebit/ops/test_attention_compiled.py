"""The cache on compiled kernels, this CPU's and a GPU's: the same bits however tokens arrive, right results, graphs that replay."""

from __future__ import annotations

import random

import pytest
import torch
from lanes import one_of_each
from torch import Tensor

from tilebit.cache.batch import Batch
from tilebit.cache.kvcache import KVCache
from tilebit.kernels import KernelUnavailable
from tilebit.layouts.kv_formats import KVFormat
from tilebit.ops import plans
from tilebit.tiles.attention import reference
from tilebit.tiles.attention.unpacked import unpack_cache

HEADS_Q, HEADS, DIM = 8, 2, 64
PAGE_SIZES = {"kv4_channel": 64, "k8_channel_v2": 256, "kv2_token": 16, "kvfp8": 128}  # one each: a kernel serves one format and page size
FORMATS = tuple(PAGE_SIZES)
EDGES = (0, 1, 127, 128, 129, 255, 256, 257)
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def make(device: str, format: str = "kv4_channel", **options) -> KVCache:
    page_size = PAGE_SIZES[format]
    scales = torch.tensor([[0.5, 0.25], [0.125, 2.0]]) if KVFormat.from_name(format).has_head_scales else None
    return KVCache(8192 // page_size, 8, HEADS, DIM, format, page_size=page_size, device=device, head_scales=scales, **options)


def rows(cache: KVCache, count: int) -> tuple[Tensor, Tensor]:
    k, v = (torch.randn(count, HEADS, DIM).to(cache.device, cache.dtype) for _ in range(2))
    return k, v


def held(cache: KVCache, sequences: list[int], layer: int = 0) -> list[tuple[Tensor, Tensor]]:
    """fp64 (k, v) of each sequence, unpacked from the pages."""
    batch = cache.batch(sequences)
    batch.refresh()
    tensors = (cache.pages[layer], cache.windows[layer], batch.block_tables, batch.slots, batch.lengths)
    return unpack_cache(*tensors, cache.layout, cache.dtype, cache.scales(layer))


def packed(cache: KVCache, handle: int) -> Tensor:
    """The sequence's pages as they are."""
    return cache.pages[0][cache.table.sequence(handle).pages]


@devices
@pytest.mark.parametrize("format", FORMATS)
def test_chunks_of_any_size_leave_the_same_bits(device, format):
    for seed in range(12):
        chance = random.Random(seed)
        cache = make(device, format)
        bulk, one, chunks = cache.allocate(3)
        length = chance.choice((129, 200, 384))
        k, v = rows(cache, length)
        cache.append([bulk], k, v)
        first = length // 128 * 128 - chance.randint(1, 30)  # token by token from here on, over the edge of the window
        cache.append([one], k[:first], v[:first])
        for i in range(first, length):
            cache.append([one], k[i : i + 1], v[i : i + 1])
        done = 0
        while done < length:
            count = min(chance.choice((1, 2, 60, 127, 128, 140)), length - done)
            cache.append([chunks], k[done : done + count], v[done : done + count])
            done += count
        assert torch.equal(packed(cache, bulk), packed(cache, one)) and torch.equal(packed(cache, bulk), packed(cache, chunks))
        for (k_held, v_held), other in zip(held(cache, [bulk]) * 2, held(cache, [one, chunks]), strict=True):
            assert torch.equal(k_held, other[0]) and torch.equal(v_held, other[1])
            assert torch.equal(k_held[length // 128 * 128 :], k[length // 128 * 128 :].double())


@devices
@pytest.mark.parametrize("format", one_of_each(FORMATS, lambda _: "a cache"))
def test_gathered_rows_are_what_the_cache_means(device, format):
    cache = make(device, format)
    sequences = cache.allocate(3)
    cache.append(sequences, *rows(cache, 429), cu_seqlens=[0, 0, 129, 429])
    for got, expected in zip(cache.gather(sequences), held(cache, sequences), strict=True):
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b.float().to(cache.dtype))


@devices
@pytest.mark.parametrize("format", one_of_each(FORMATS, lambda _: "a cache"))
def test_decode_is_right_at_every_edge_and_repeats(device, format):
    cache = make(device, format)
    sequences = cache.allocate(len(EDGES))
    for handle, length in zip(sequences, EDGES, strict=True):
        cache.append([handle], *rows(cache, length))
    q = torch.randn(len(EDGES), 2, HEADS_Q, DIM).to(device, cache.dtype)
    out, lse = cache.attend(sequences, q, return_lse=True)
    again, _ = cache.attend(sequences, q, return_lse=True)
    assert torch.equal(out, again)
    parts = held(cache, sequences)
    expected, expected_lse = reference.decode(q, [k for k, _ in parts], [v for _, v in parts])
    torch.testing.assert_close(out.double(), expected, rtol=4e-3, atol=2e-3)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-3, atol=1e-3)
    alone = torch.cat([cache.attend([handle], q[i : i + 1], return_lse=True)[0] for i, handle in enumerate(sequences)])
    torch.testing.assert_close(alone, out, rtol=4e-3, atol=2e-3)


@devices
def test_prefill_in_chunks_attends_to_the_quantized_history(device):
    cache = make(device)
    whole, chunked = cache.allocate(2)
    k, v = rows(cache, 300)
    q = torch.randn(300, HEADS_Q, DIM).to(device, cache.dtype)
    out, _ = cache.prefill([whole], q, k, v)
    torch.testing.assert_close(out.double(), reference.attend(q, k, v)[0], rtol=4e-3, atol=2e-3)
    for part in zip(q.split(140), k.split(140), v.split(140), strict=True):
        past = held(cache, [chunked])[0]
        out, _ = cache.prefill([chunked], *part)
        keys, values = (torch.cat((old, new.double())) for old, new in zip(past, part[1:], strict=True))
        torch.testing.assert_close(out.double(), reference.attend(part[0], keys, values)[0], rtol=4e-3, atol=2e-3)
    assert torch.equal(packed(cache, whole), packed(cache, chunked))


@devices
def test_forks_on_compiled_kernels_do_not_disturb_each_other(device):
    """Half of a page of 256 tokens is filled when it is forked."""
    cache = make(device, "k8_channel_v2")
    (a,) = cache.allocate()
    k, v = rows(cache, 140)
    cache.append([a], k, v)
    b = cache.fork(a)
    more = rows(cache, 200)
    cache.append([a], *more)
    (c,) = cache.allocate()
    cache.append([c], torch.cat((k, more[0])), torch.cat((v, more[1])))
    cache.append([b], *rows(cache, 200))
    assert all(torch.equal(x, y) for x, y in zip(held(cache, [a])[0], held(cache, [c])[0], strict=True))
    assert torch.equal(held(cache, [b])[0][0][:128], held(cache, [a])[0][0][:128])


@pytest.mark.slow
@devices
@pytest.mark.parametrize("format", FORMATS)
def test_a_dependent_decode_after_an_append_is_the_plain_one(device, format):
    """Over the edge of a window: the append packs what decode must not have read before."""
    early, plain = make(device, format), make(device, format)
    sequences = early.allocate(2)
    assert plain.allocate(2) == sequences
    prompts = rows(early, 120 + 500)
    for cache in (early, plain):
        cache.append(sequences, *prompts, cu_seqlens=[0, 120, 620])
    for count in (1, 3) * 5:
        k, v = rows(early, 2 * count)
        q = torch.randn(2, count, HEADS_Q, DIM).to(device, early.dtype)
        for cache in (early, plain):
            cache.append(sequences, k, v)
        got, lse = early.attend(sequences, q, return_lse=True, dependent=True)
        expected, expected_lse = plain.attend(sequences, q, return_lse=True)
        assert torch.equal(got, expected) and torch.equal(lse, expected_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("format", FORMATS)
def test_captured_dependent_decodes_are_bit_for_bit_the_plain_ones(format, q_len):
    """Of two layers in a graph, in which decode may start before its append has ended; windows fill up on the way."""
    early, plain = make("cuda", format, num_layers=2), make("cuda", format, num_layers=2)
    steps, lengths = 50, [2500, 120, 0, 700]
    sequences = early.allocate(len(lengths))
    assert plain.allocate(len(lengths)) == sequences
    prompts = rows(early, sum(lengths))
    tokens, q = rows(early, len(lengths) * q_len), torch.zeros(len(lengths), q_len, HEADS_Q, DIM, dtype=early.dtype, device="cuda")
    graphs, results = [], []
    for cache in (early, plain):
        batch = cache.advance(cache.batch(sequences), lengths)
        for layer in range(2):
            cache.append(batch, *prompts, layer=layer)
        cache.advance(batch, 0)

        def step(cache: KVCache = cache, batch: Batch = batch) -> list[Tensor]:
            outs = []
            for layer in range(2):
                cache.append(batch, *tokens, layer=layer)
                outs += cache.attend(batch, q, return_lse=True, layer=layer, dependent=cache is early)
            return outs

        step()  # loads the kernels; no row is written, since no sequence has advanced
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append(step())
        graphs.append((graph, cache, batch))
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(steps):
        for tensor in (*tokens, q):
            tensor.normal_()
        for graph, cache, batch in graphs:
            cache.advance(batch, q_len)
            graph.replay()
        wrong += sum((a != b).any() for a, b in zip(*results, strict=True))
        for out in results[0]:
            out.fill_(float("nan"))
    assert int(wrong) == 0
    assert all(torch.equal(a, b) for a, b in zip(early.pages, plain.pages, strict=True))


@pytest.mark.gpu
def test_a_graph_replays_with_changed_lengths_tables_and_sequences():
    cache = make("cuda", num_layers=2)
    twin = make("cuda", num_layers=2)
    sequences = cache.allocate(4)
    assert twin.allocate(4) == sequences
    batch = cache.batch(sequences[:3], size=4)
    k, v, q = rows(cache, 4)[0], rows(cache, 4)[0], torch.randn(4, 1, HEADS_Q, DIM).to("cuda", cache.dtype)
    cache.advance(batch, 0)

    def step() -> list[Tensor]:
        results = []
        for layer in range(2):
            cache.append(batch, k, v, layer=layer)
            results.append(cache.attend(batch, q, layer=layer)[0])
        return results

    step()  # loads the kernels; no row is written, since no sequence has advanced
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for token in range(140):
        if token == 70:
            for each in (cache, twin):
                each.truncate(sequences[0], 66)
            batch.assign([sequences[3], sequences[0]])
        live = list(batch.handles)
        for tensor in (k, v, q):
            tensor.copy_(torch.randn(tensor.shape))
        cache.advance(batch)
        graph.replay()
        twins = twin.advance(live)
        for layer in range(2):
            twin.append(twins, k[: len(live)], v[: len(live)], layer=layer)
            expected, _ = twin.attend(twins, q[: len(live)], layer=layer)
            torch.testing.assert_close(captured[layer][: len(live)], expected, rtol=4e-3, atol=2e-3)
            assert not captured[layer][len(live) :].any()
    assert all(cache.length(h) == twin.length(h) for h in sequences)


@pytest.mark.gpu
def test_what_cannot_be_captured_says_so():
    cache = make("cuda")
    sequences = cache.allocate(2)
    batch = cache.batch(sequences)
    cache.append(sequences, *rows(cache, 20))
    q = torch.randn(2, 1, HEADS_Q, DIM).to("cuda", cache.dtype)
    with pytest.raises(RuntimeError, match="before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        cache.attend(batch, q)
    batch.refresh()
    plans.forget()
    with pytest.raises(KernelUnavailable, match="once before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        cache.attend(batch, q)
