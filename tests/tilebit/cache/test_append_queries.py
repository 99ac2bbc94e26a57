"""An append that turns the new tokens' queries too: what the kernel is handed, what comes back, and what is refused before anything
changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_rows import DIM, HEADS, cache_of, rows
from torch import Tensor

from tilebit.cache.rotary import rotated
from tilebit.tiles.attention import reference

HEADS_Q = 3 * HEADS
TABLE = torch.randn(400, DIM, generator=torch.Generator().manual_seed(1))


NORMS = [1 + torch.randn(DIM, generator=torch.Generator().manual_seed(seed)).half() / 4 for seed in (2, 3)]


def projected(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as slices of one product [*shape, heads, DIM]."""
    fused = torch.randn(*shape, HEADS_Q + 2 * HEADS, DIM).half()
    q, k, v = fused.split((HEADS_Q, HEADS, HEADS), dim=-2)
    return q, k, v


@pytest.mark.parametrize("rotary", ["half", "interleaved"])
@pytest.mark.parametrize("counts", [(1, 1, 1), (129, 0, 3)])
def test_queries_are_turned_where_their_keys_are(kernels, rotary, counts):
    """The cache is the one of an append without queries, and no row is copied."""
    cache, plain = cache_of(), cache_of()
    sequences, others = cache.allocate(3), plain.allocate(3)
    past = (5, 127, 300)
    for one, handles in ((cache, sequences), (plain, others)):
        torch.manual_seed(2)
        one.append(handles, *rows(sum(past)), cu_seqlens=[0, 5, 132, 432])
    q, k, v = projected(sum(counts))
    bounds = [0, counts[0], counts[0] + counts[1], sum(counts)]
    turned = cache.append(sequences, k, v, bounds, TABLE.repeat(2, 1), rotary, q=q)
    assert all(kernels.given[name].data_ptr() == tensor.data_ptr() for name, tensor in (("q", q), ("k", k), ("v", v)))
    plain.append(others, k.contiguous(), v.contiguous(), bounds, TABLE.repeat(2, 1), rotary)
    positions = torch.cat([torch.arange(n, n + count) for n, count in zip(past, counts, strict=True)])
    assert torch.equal(turned, rotated(q, positions, TABLE.repeat(2, 1), rotary))
    for got, expected in zip((*cache.pages, *cache.windows), (*plain.pages, *plain.windows), strict=True):
        assert torch.equal(got, expected)


def test_shapes_of_a_step_and_memory_of_the_caller_s_own(kernels):
    cache = cache_of()
    batch = cache.batch(cache.allocate(2), size=3)  # a row of padding
    out = torch.full((3, 2, HEADS_Q, DIM), torch.nan).half()
    for given in (None, out):
        q, k, v = projected(3, 2)
        cache.advance(batch, 2)
        turned = cache.append(batch, k, v, cos_sin=TABLE, q=q, out=given)
        assert turned.shape == q.shape and turned.is_contiguous()
        positions = torch.arange(cache.length(batch.handles[0]) - 2, cache.length(batch.handles[0])).repeat(2)
        assert torch.equal(turned[:2].flatten(0, 1), rotated(q[:2].flatten(0, 1), positions, TABLE, "half"))
    assert turned.data_ptr() == out.data_ptr() and bool(out[2].isnan().all())


@pytest.mark.parametrize("table", [TABLE, TABLE[:, :32].contiguous(), None], ids=["all", "half of the channels", "none"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_heads_are_normalized_first(kernels, table, offset):
    """As Qwen3 and Gemma do it: q and k by weights of their own, all in fp32 rounded once, whatever is turned then."""
    cache = cache_of("kv16")
    sequences, (q, k, v) = cache.allocate(2), projected(2, 3)
    turned = cache.append(sequences, k, v, cos_sin=table, q=q, q_norm=NORMS[0], k_norm=NORMS[1], norm_eps=0.25, norm_offset=offset)

    def expected(rows: Tensor, weight: Tensor) -> Tensor:
        rows = reference.normalize(rows, weight, 0.25, offset)
        return (rows if table is None else reference.rotate(rows, torch.arange(3), table, "half")).half()

    assert all(torch.equal(turned[b], expected(q[b], NORMS[0])) for b in range(2))
    assert all(torch.equal(held, expected(k[b], NORMS[1])) for b, (held, _) in enumerate(cache.gather(sequences)))


def test_rows_that_no_kernel_takes_are_copied(kernels):
    """Rows of 8 bytes too much, rows inside out, an address past a boundary: right all the same."""
    cache = cache_of()
    sequences = cache.allocate(4)
    whole = torch.randn(4, (HEADS_Q + 2 * HEADS) * DIM + 4).half()
    parts = whole[:, : (HEADS_Q + 2 * HEADS) * DIM].unflatten(1, (-1, DIM)).split((HEADS_Q, HEADS, HEADS), dim=1)
    turned_around = [torch.randn(4, DIM, heads).half().transpose(1, 2) for heads in (HEADS_Q, HEADS, HEADS)]
    shifted = [torch.randn(4 * heads * DIM + 1).half()[1:].view(4, heads, DIM) for heads in (HEADS_Q, HEADS, HEADS)]
    for step, (q, k, v) in enumerate((parts, turned_around, shifted)):
        turned = cache.append(sequences, k, v, cos_sin=TABLE, q=q)
        assert torch.equal(turned, rotated(q, torch.full((4,), step), TABLE, "half"))
        assert all(torch.equal(held[-1], row) for (_, held), row in zip(cache.gather(sequences), v, strict=True))


def bad_calls() -> list[tuple[dict[str, Any], str]]:
    q = projected(2)[0]
    return [
        ({"out": torch.empty(2, HEADS_Q, DIM).half()}, "out is given and q is not; accepted: with q"),
        ({"q_norm": NORMS[0], "k_norm": NORMS[1]}, "q_norm is given and q is not; accepted: with q"),
        ({"q": q, "cos_sin": None}, "q is given without cos_sin and without norms; accepted: with cos_sin, q_norm and k_norm, or all"),
        ({"q": q, "k_norm": NORMS[1]}, "one of q_norm and k_norm is missing; accepted: both or neither"),
        ({"q": q, "q_norm": NORMS[0], "k_norm": NORMS[1].float()}, "k_norm is float32"),
        ({"q": q, "q_norm": NORMS[0][:32], "k_norm": NORMS[1]}, rf"q_norm is float16 \[32\].*accepted: torch.float16 \[{DIM}\]"),
        ({"q": q, "q_norm": NORMS[0], "k_norm": NORMS[1], "norm_eps": -1.0}, "norm_eps is -1.0.*accepted"),
        ({"q": q, "q_norm": NORMS[0], "k_norm": NORMS[1], "norm_eps": "x"}, "norm_eps is 'x'; accepted: numbers"),
        ({"q": q, "q_norm": NORMS[0], "k_norm": NORMS[1], "norm_eps": 1e39}, r"norm_eps is 1e\+39.*accepted"),
        ({"q": q, "q_norm": NORMS[0], "k_norm": NORMS[1], "norm_offset": None}, "norm_offset is None; accepted: numbers"),
        ({"q": q[:1]}, rf"q is float16 \[1, {HEADS_Q}, {DIM}\].*accepted: torch.float16 \[2, heads_q, {DIM}\]"),
        ({"q": q[:, :3]}, f"heads_q a multiple of {HEADS}"),
        ({"q": q.float()}, "q is float32"),
        ({"q": q[..., :32]}, f"heads_q, {DIM}"),
        ({"q": q[None]}, f"heads_q, {DIM}"),
        ({"q": q, "out": torch.empty(2, HEADS, DIM).half()}, rf"out is float16 \[2, {HEADS}, {DIM}\].*accepted.*\[2, {HEADS_Q}, {DIM}\]"),
        ({"q": q, "out": torch.empty(2, DIM, HEADS_Q).half().transpose(1, 2)}, "out is .*contiguous"),
        ({"q": q, "rotary": "quarter"}, "rotary is 'quarter'"),
        ({"q": q, "cos_sin": TABLE[:, :48]}, rf"cos_sin is float32 .*{DIM}, or fewer in steps of 32"),
    ]


@pytest.mark.parametrize(("changed", "words"), bad_calls(), ids=range(len(bad_calls())))
def test_what_does_not_fit_is_refused_before_anything_changes(kernels, changed, words):
    cache = cache_of()
    sequences, (_, k, v) = cache.allocate(2), projected(2)
    before = [t.clone() for t in (*cache.pages, *cache.windows)]
    with pytest.raises(ValueError, match=words):
        cache.append(sequences, k, v, **{"cos_sin": TABLE, **changed})
    assert [cache.length(h) for h in sequences] == [0, 0] and not kernels.calls
    assert all(torch.equal(a, b) for a, b in zip(before, (*cache.pages, *cache.windows), strict=True))


def test_queries_that_are_no_tensor(kernels):
    cache = cache_of()
    sequences, (q, k, v) = cache.allocate(2), projected(2)
    wrong: list[dict[str, Any]] = [{"q": q.tolist()}, {"q": q, "out": 1}]
    for given in wrong:
        with pytest.raises(TypeError, match=list(given)[-1]):
            cache.append(sequences, k, v, cos_sin=TABLE, **given)


@pytest.mark.parametrize("place", ["q", "behind q", "k", "v"])
def test_queries_are_turned_into_other_memory(kernels, place):
    """Rows would be read when others have been written over them."""
    cache = cache_of()
    sequences, flat = cache.allocate(2), torch.randn(4 * 2 * HEADS_Q * DIM).half()
    size = 2 * HEADS_Q * DIM
    q = flat[:size].view(2, HEADS_Q, DIM)
    k, v = (flat[n * size :][: 2 * HEADS * DIM].view(2, HEADS, DIM) for n in (2, 3))
    start = {"q": 0, "behind q": DIM, "k": 2 * size - DIM, "v": 3 * size}[place]
    out, before = flat[start : start + size].view_as(q), flat.clone()
    with pytest.raises(ValueError, match=f"out lies in the memory of {place[-1]}, which .*; accepted: other memory"):
        cache.append(sequences, k, v, cos_sin=TABLE, q=q, out=out)
    assert torch.equal(flat, before) and [cache.length(h) for h in sequences] == [0, 0] and not kernels.calls
    beside = flat[size : 2 * size].view_as(q)
    assert torch.equal(cache.append(sequences, k, v, cos_sin=TABLE, q=q, out=beside), rotated(q, torch.zeros(2).long(), TABLE, "half"))
