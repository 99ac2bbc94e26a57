"""The fp64 reference against torch's own attention, and its corners one by one."""

from __future__ import annotations

import math

import pytest
import torch

from tilebit.tiles.attention.reference import attend, decode, prefill, rotate, visible


def problem(rows: int = 3, length: int = 37, heads_q: int = 6, heads_kv: int = 2, head_dim: int = 64):
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64)

    return random(rows, heads_q, head_dim), random(length, heads_kv, head_dim), random(length, heads_kv, head_dim)


def torchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """torch's attention of one sequence, in fp64."""
    operands = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(*operands, attn_mask=seen, enable_gqa=True, scale=scale)
    return out[0].transpose(0, 1)


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (1, 130), (3, 37), (16, 16), (37, 37)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_causal_attention_is_torchs(rows, length, scale):
    q, k, v = problem(rows, length)
    seen = torch.ones(rows, length, dtype=torch.bool).tril(length - rows)
    out, lse = attend(q, k, v, scale=scale)
    torch.testing.assert_close(out, torchs(q, k, v, seen, scale), rtol=1e-12, atol=1e-12)
    assert out.dtype == lse.dtype == torch.float64 and lse.shape == (rows, 6)


def test_log_sum_exp_is_natural_and_of_the_visible_scores():
    q, k, v = problem(2, 5, heads_q=1, heads_kv=1)
    _, lse = attend(q, k, v)
    for row, tokens in ((0, 4), (1, 5)):
        scores = [float(q[row, 0] @ k[j, 0]) / 8 for j in range(tokens)]
        assert math.isclose(float(lse[row, 0]), math.log(sum(map(math.exp, scores))), rel_tol=1e-12)


def test_a_window_and_its_sink_tokens():
    assert visible(2, 6, window=2).tolist() == [[False, False, False, True, True, False], [False, False, False, False, True, True]]
    assert visible(1, 6, window=2, sink_tokens=1).tolist() == [[True, False, False, False, True, True]]
    assert visible(3, 2).tolist() == [[False, False], [True, False], [True, True]], "a query before the first token sees nothing"
    assert visible(2, 2, window=1, sink_tokens=4).tolist() == [[True, False], [True, True]], "sink tokens are no look into the future"
    q, k, v = problem()
    seen = visible(3, 37, window=9, sink_tokens=4)
    assert seen.sum(dim=1).tolist() == [13, 13, 13]
    torch.testing.assert_close(attend(q, k, v, window=9, sink_tokens=4)[0], torchs(q, k, v, seen), rtol=1e-12, atol=1e-12)


def test_a_learned_sink_is_one_more_score_without_a_value():
    q, k, v = problem(1, 4, heads_q=2, heads_kv=2)
    sinks = torch.tensor([0.5, -1.0])
    plain, lse = attend(q, k, v)
    out, with_sink = attend(q, k, v, sinks=sinks)
    share = torch.exp(lse) / (torch.exp(lse) + torch.exp(sinks))
    torch.testing.assert_close(out, plain * share[..., None])
    torch.testing.assert_close(with_sink, torch.log(torch.exp(lse) + torch.exp(sinks)))


def test_a_soft_cap_bounds_the_scores():
    q, k, v = problem(1, 2, heads_q=1, heads_kv=1)
    _, lse = attend(q * 1e6, k * 0 + q * 1e6, v, soft_cap=3.0)
    assert math.isclose(float(lse), 3.0 + math.log(2), rel_tol=1e-9)


def test_nothing_visible_gives_zero_and_minus_infinity():
    q, k, v = problem(3, 0)
    out, lse = attend(q, k, v)
    assert not out.any() and (lse == -torch.inf).all()
    out, lse = attend(q, k, v, sinks=torch.arange(6.0))
    assert not out.any() and torch.equal(lse, torch.arange(6.0).double().expand(3, 6))
    q, k, v = problem(3, 1)
    out, lse = attend(q, k, v)
    assert not out[:2].any() and (lse[:2] == -torch.inf).all() and torch.equal(out[2], v[0].repeat_interleave(3, dim=0))


def test_decode_and_prefill_are_the_same_per_sequence():
    lengths = (0, 5, 130)
    queries = torch.randn(3, 2, 6, 64)
    keys, values = ([torch.randn(n, 2, 64) for n in lengths] for _ in range(2))
    out, lse = decode(queries, keys, values, window=7, soft_cap=2.0)
    cu_q, cu_kv = torch.arange(0, 8, 2), torch.tensor((0, *lengths)).cumsum(0)
    flat, flat_lse = prefill(queries.flatten(0, 1), torch.cat(keys), torch.cat(values), cu_q, cu_kv, window=7, soft_cap=2.0)
    assert torch.equal(out.flatten(0, 1), flat) and torch.equal(lse.flatten(0, 1), flat_lse)
    empty, nothing = decode(queries[:0], [], [])
    assert empty.shape == (0, 2, 6, 64) and nothing.shape == (0, 2, 6)


@pytest.mark.parametrize("kind", ["half", "interleaved"])
def test_a_rotation_is_multiplication_by_a_phase(kind):
    k, positions = torch.randn(5, 2, 64), torch.tensor([0, 3, 1, 1, 7])
    angle = torch.arange(8.0)[:, None] * torch.logspace(0, -3, 32)
    turned = rotate(k, positions, torch.cat((angle.cos(), angle.sin()), dim=1), kind)
    real, imaginary = (slice(0, 32), slice(32, 64)) if kind == "half" else (slice(0, None, 2), slice(1, None, 2))
    phase = torch.polar(torch.ones(5, 1, 32), angle[positions][:, None])
    expected = torch.complex(k[..., real], k[..., imaginary]) * phase
    torch.testing.assert_close(turned[..., real], expected.real.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(turned[..., imaginary], expected.imag.double(), rtol=1e-5, atol=1e-5)
    assert torch.equal(turned[0], k[0].double()), "position 0 is not turned"
    with pytest.raises(ValueError, match="'half' and 'interleaved'"):
        rotate(k, positions, angle, "neox")
