"""LiquidGEMM's two integer levels: no byte overflows, errors are bounded, and what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch

import tilebit
from tilebit.layouts.formats import GemmFormat
from tilebit.weights.quantize import CLIP_FACTORS, QuantizedTensor, quantize
from tilebit.weights.quantize_lqq import CODES, LARGEST, row_scales, two_levels

LQQ = [GemmFormat.parse(name) for name in ("w4a8_lqq_g64", "w4a8_lqq_g128")]


def test_no_group_overflows_a_byte():
    """Every least and largest first-level weight of a group that there can be: all 16 codes of it stay in a byte."""
    pairs = [(low, high) for low in range(-LARGEST, LARGEST + 1) for high in range(low, LARGEST + 1)]
    block = torch.tensor(pairs, dtype=torch.float32)[None]
    codes, scale, offset = two_levels(block, (1.0,))
    assert float(row_scales(block)[0]) == 1.0 and len(pairs) == 239 * 240 // 2
    top = offset.int() + CODES * scale.int()
    assert int(scale.min()) == 1 and int(scale.max()) == 16 and int(offset.min()) >= 2 and int(top.max()) <= 255
    restored = codes.int() * scale[..., None] + offset[..., None].int() - 128
    assert int(restored.min()) >= -128 and int(restored.max()) <= 127
    # the ends of a range are met to half of what the scale is short of or over a fifteenth of it, and rounding
    assert int((restored - block.int()).abs().max()) <= 8


@pytest.mark.parametrize("factors", [(1.0,), CLIP_FACTORS])
def test_levels_beyond_the_row_s_own_do_not_overflow_a_byte(factors: tuple[float, ...]):
    """What makes up for the errors of other columns may exceed the largest weight of its row, by any amount."""
    generator = torch.Generator().manual_seed(0)
    sizes, places = torch.logspace(-1, 4, 20)[:, None], 300 * torch.randn(100, 20, 1, generator=generator)
    levels = torch.randn(100, 20, 64, generator=generator) * sizes + places
    codes, scale, offset = two_levels(levels, factors, torch.rand(64, generator=generator))
    assert int(scale.min()) >= 1 and int(offset.min()) >= 2 and int((offset.int() + CODES * scale.int()).max()) <= 255
    restored = codes * scale[..., None].float() + offset[..., None].float() - 128
    for beyond, sign in ((levels.amin(-1) > LARGEST, 1), (levels.amax(-1) < -LARGEST, -1)):
        assert int(beyond.sum()) > 50
        # as near as bytes come, at least where no other range was searched for
        assert bool((sign * restored[beyond] >= (LARGEST - 8 if len(factors) == 1 else LARGEST / 2)).all())


@pytest.mark.parametrize("weighted", [False, True])
def test_the_search_is_near_the_best_of_every_scale_and_offset(weighted: bool):
    """Brute force over every scale and offset that a byte holds: the nearest codes of each are known."""
    generator = torch.Generator().manual_seed(1)
    levels = torch.randn(12, 8, generator=generator) * torch.linspace(2, 50, 12)[:, None]
    counts = torch.rand(8, generator=generator) if weighted else torch.ones(8)
    scales, offsets = torch.meshgrid(torch.arange(1.0, 17), torch.arange(256.0), indexing="ij")
    legal = offsets + 15 * scales <= 255
    grid = (offsets - 128)[..., None] + scales[..., None] * torch.arange(16.0)

    def error(group: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return (((values[..., None, :] - group[:, None]) ** 2).amin(-1) * counts).sum(-1)

    best = torch.stack([error(group, grid)[legal].amin() for group in levels])
    found = {}
    for factors in ((1.0,), CLIP_FACTORS):
        codes, scale, offset = (t[:, 0].float() for t in two_levels(levels[:, None], factors, counts))
        values = offset[:, None] - 128 + scale[:, None] * torch.arange(16.0)
        errors = torch.stack([error(group, own) for group, own in zip(levels, values, strict=True)])
        restored = codes * scale[:, None] + offset[:, None] - 128
        assert torch.allclose(((restored - levels) ** 2 * counts).sum(-1), errors)  # codes are the nearest
        found[factors] = errors
    assert bool((found[CLIP_FACTORS] <= found[(1.0,)]).all()) and bool((found[CLIP_FACTORS] >= best * 0.9999).all())
    assert float(found[CLIP_FACTORS].sum()) < 0.9 * float(found[(1.0,)].sum())
    assert float(found[CLIP_FACTORS].sum()) < 2 * float(best.sum())


@pytest.mark.parametrize("format", LQQ, ids=lambda f: f.name)
@pytest.mark.parametrize(("n", "k"), [(3, 256), (5, 100), (1, 1), (2, 576)])
def test_weights_are_within_half_a_step(format: GemmFormat, n: int, k: int):
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(n)) * torch.tensor([0.02, 3.0, 1e-4, 1.0, 100.0])[:n, None]
    q = quantize(w, format)
    assert q.scales.dtype == torch.uint8 and q.zeros is not None and q.row_scales is not None
    error = (q.dequantize() - w).abs()
    for row, group in itertools.product(range(n), range(q.scales.shape[1])):
        part = slice(group * format.group_size, (group + 1) * format.group_size)
        scale = float(q.scales[row, group])
        # half a step, and at a range's ends half of what 15 steps fall short of it
        assert float(error[row, part].max()) <= (scale / 2 + 4) * float(q.row_scales[row])
    again = quantize(w, format)
    assert again.zeros is not None
    assert torch.equal(q.codes, again.codes) and torch.equal(q.zeros, again.zeros)


@pytest.mark.parametrize("format", LQQ, ids=lambda f: f.name)
def test_it_errs_about_as_little_as_four_bits_with_16_bit_scales(format: GemmFormat):
    w = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    plain = quantize(w, GemmFormat.parse(f"w4a16_g{format.group_size}_asym"))

    def error(q: QuantizedTensor) -> float:
        return float((q.dequantize() - w).norm() / w.norm())

    clipped = quantize(w, format, clip_search=True)
    assert error(quantize(w, format)) < 1.02 * error(plain)
    assert error(clipped) < error(quantize(w, format))


def test_rows_of_zeros_and_the_smallest_and_largest_weights():
    w = torch.zeros(4, 64)
    w[1, 3], w[2], w[3, 0] = 6e-8, 65504.0, -1e-30
    q = quantize(w, LQQ[0])
    restored = q.dequantize()
    assert torch.equal(restored[0], w[0]) and restored.isfinite().all()
    assert float(restored[2, 0]) == pytest.approx(65504.0, rel=0.01)


@pytest.mark.parametrize("arch", ["cpu", "sm_90a"])
@pytest.mark.parametrize("format", LQQ, ids=lambda f: f.name)
def test_packing_keeps_every_number(format: GemmFormat, arch: str):
    q = quantize(torch.randn(70, 300), format)
    packed = tilebit.pack(q, torch.bfloat16, arch=arch)
    back = packed.unpack()
    assert packed.dtype is torch.bfloat16 and packed.takes_codes
    for name in ("codes", "scales", "zeros", "row_scales"):
        assert torch.equal(getattr(back, name), getattr(q, name)), name
    if arch != "cpu":
        assert packed.zeros is not None
        assert (packed.zeros[:, 70:] == 128).all() and (packed.scales[:, 70:] == 0).all()  # padding is zeros


def test_what_does_not_fit_is_refused():
    w = torch.randn(2, 64)
    q = quantize(w, LQQ[0])
    with pytest.raises(ValueError, match=r"k is 131136; accepted for int32 sums: up to 131072"):
        quantize(torch.zeros(1, 131136), LQQ[0])
    with pytest.raises(ValueError, match=r"w has 1 NaN or infinite values in rows 0\.\.1"):
        quantize(torch.full((2, 64), 1.0).index_put((torch.tensor(0), torch.tensor(5)), torch.tensor(float("nan"))), LQQ[0])
    with pytest.raises(ValueError, match=r"scales are float16 \[2, 1\]; w4a8_lqq_g64 codes \[2, 64\] need uint8 \[2, 1\]"):
        QuantizedTensor(q.codes, q.scales.half(), q.zeros, LQQ[0], row_scales=q.row_scales)
    with pytest.raises(ValueError, match="make bytes up to 495; accepted: 255"):
        QuantizedTensor(q.codes, q.scales * 0 + 16, q.scales * 0 + 255, LQQ[0], row_scales=q.row_scales)
    with pytest.raises(ValueError, match="row_scales are absent"):
        QuantizedTensor(q.codes, q.scales, q.zeros, LQQ[0])
