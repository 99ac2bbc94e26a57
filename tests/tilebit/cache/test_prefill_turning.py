"""A prompt whose queries and keys come side by side and unturned: attention, the cache and what is refused are ``prefill``'s."""

from __future__ import annotations

import pytest
import torch
from cache_rows import DIM, HEADS, cache_of, rows

from tilebit.cache.rotary import rotated

HEADS_Q = 3 * HEADS
TABLE = torch.randn(800, DIM, generator=torch.Generator().manual_seed(1))


def projected(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(qk, v) as slices of one product."""
    fused = torch.randn(tokens, HEADS_Q + 2 * HEADS, DIM).half()
    return fused[:, : HEADS_Q + HEADS], fused[:, HEADS_Q + HEADS :]


@pytest.mark.parametrize("window", [0, 150])
@pytest.mark.parametrize("past", [(0, 0, 0), (100, 0, 300)], ids=["a first prompt", "a chunk behind others"])
def test_results_are_those_of_turned_rows(kernels, past, window):
    """What a window held is read before it fills: 100 tokens lie there, 130 more come."""
    new = (130, 40, 1)
    one, other = cache_of(), cache_of()
    batches = []
    for cache in (one, other):
        batch = cache.batch(cache.allocate(3))
        torch.manual_seed(2)
        cache.append(cache.advance(batch, past), *rows(sum(past))) if any(past) else None
        batches.append(cache.advance(batch, new))
    qk, v = projected(sum(new))
    positions = torch.cat([torch.arange(first, first + count) for first, count in zip(past, new, strict=True)])
    turned = rotated(qk, positions, TABLE, "half")
    expected, _ = other.prefill(batches[1], turned[:, :HEADS_Q], turned[:, HEADS_Q:], v, window=window, scale=0.2)
    found = one.prefill_turning(batches[0], qk, v, TABLE, window=window, scale=0.2)
    assert found.shape == (sum(new), HEADS_Q, DIM) and torch.equal(found, expected)
    for (k, v), (k_expected, v_expected) in zip(one.gather(batches[0]), other.gather(batches[1]), strict=True):
        assert torch.equal(k, k_expected) and torch.equal(v, v_expected)


def test_a_first_prompt_takes_two_launches(kernels):
    cache = cache_of()
    qk, v = projected(20)
    cache.prefill_turning(cache.advance(cache.allocate(2), 10), qk, v, TABLE)
    assert kernels.calls == ["append", "prefill"] and kernels.given["k"].data_ptr() != qk.data_ptr()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda qk, v: (qk[:, :HEADS], v, TABLE), "heads_q"),
        (lambda qk, v: (qk[:, :-1], v, TABLE), "heads"),
        (lambda qk, v: (qk[1:], v, TABLE), "qk is"),
        (lambda qk, v: (qk, v[:, :1], TABLE), "the same shape"),
        (lambda qk, v: (qk, v, TABLE[:5]), "cos_sin is"),
        (lambda qk, v: (qk.float(), v, TABLE), "qk is"),
        (lambda qk, v: (qk, v.tolist(), TABLE), "v is"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(kernels, change, message):
    cache = cache_of()
    batch = cache.advance(cache.allocate(2), 10)
    with pytest.raises((ValueError, TypeError), match=message):
        cache.prefill_turning(batch, *change(*projected(20)))
    assert kernels.calls == [] and not batch.written
