"""4-bit floats: quantizer laws, exact numbers, packs and modules, and what is refused."""

from __future__ import annotations

import pytest
import torch

import tilebit
from tilebit.layouts.formats import GemmFormat
from tilebit.weights.modules import QuantLinear
from tilebit.weights.packed import pack
from tilebit.weights.quantize import QuantizedTensor, quantize

MXFP4, NVFP4 = GemmFormat.parse("w4a16_mxfp4"), GemmFormat.parse("w4a16_nvfp4")
BOTH = pytest.mark.parametrize("format", [MXFP4, NVFP4], ids=lambda f: f.name)
VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def _weight(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.05


def _all_scales(format: GemmFormat) -> torch.Tensor:
    """fp32: every e8m0 number up to 2^124 (under which 6 is finite), every positive finite e4m3 number / 256."""
    if format is MXFP4:
        return torch.tensor([2.0**e for e in range(-127, 125)], dtype=torch.float64).float()
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return numbers[torch.isfinite(numbers) & (numbers > 0)] / 256


@BOTH
def test_every_code_under_every_scale_is_exact(format: GemmFormat) -> None:
    scales = _all_scales(format)[:, None]
    codes = torch.arange(format.group_size, dtype=torch.uint8).remainder(16).repeat(len(scales), 1)
    rows = torch.linspace(0.25, 300, len(scales)) if format.row_scaled else None
    got = QuantizedTensor(codes, scales, None, format, row_scales=rows).dequantize(torch.float64)
    exact = VALUES[codes.long()] * scales.double()
    if rows is not None:
        exact = (exact * rows.double()[:, None]).float().double()
    assert torch.equal(got, exact)


@BOTH
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_codes_are_the_nearest_under_the_stored_scale(format: GemmFormat, scale_dtype: torch.dtype) -> None:
    weight = _weight(7, 100, seed=1)
    q = quantize(weight, format, scale_dtype=scale_dtype)
    step = q.scales.double().repeat_interleave(format.group_size, 1)[:, :100]
    if q.row_scales is not None:
        step = step * q.row_scales.double()[:, None]
    distance = (VALUES * step[..., None] - weight.double()[..., None]).abs()
    chosen = distance.gather(-1, q.codes.long()[..., None])[..., 0]
    assert bool((chosen <= distance.amin(-1) + 1e-7 * step).all())


def test_mxfp4_takes_the_better_of_two_powers() -> None:
    weight = torch.zeros(2, 32)
    weight[0, :3] = torch.tensor([7.5, 0.5, -0.5]) / 4  # 8 - 0.5: under the standard's scale it saturates at 6
    weight[1, :3] = torch.tensor([6.0, 0.5, -1.5]) / 4
    q = quantize(weight, MXFP4, scale_dtype=torch.float32)
    assert q.scales[:, 0].tolist() == [0.5, 0.25]
    assert torch.equal(q.dequantize()[1], weight[1])
    for seed in range(3):
        weight = _weight(5, 96, seed)
        groups = weight.view(5, 3, 32)
        scales = quantize(weight, MXFP4, scale_dtype=torch.float32).scales
        standard = torch.exp2(groups.abs().amax(-1).log2().floor() - 2)
        errors = [
            ((VALUES * s.double()[..., None, None]) - groups.double()[..., None]).abs().amin(-1).square().sum(-1)
            for s in (standard, standard * 2)
        ]
        assert torch.equal(scales, torch.where(errors[1] < errors[0], standard * 2, standard))


def test_nvfp4_scales_are_e4m3_numbers_and_one_factor() -> None:
    weight = _weight(6, 64, seed=2)
    q = quantize(weight, NVFP4, scale_dtype=torch.float16)
    assert q.row_scales is not None
    factor = weight.abs().max() / (6 * 448)
    assert torch.equal(q.row_scales, torch.full((6,), float(factor)) * 256)
    numbers = q.scales.float() * 256
    assert torch.equal(numbers.to(torch.float8_e4m3fn).float(), numbers) and numbers.max() == 448
    expected = (weight.view(6, 4, 16).abs().amax(-1) / (6 * factor)).to(torch.float8_e4m3fn).float()
    assert float(((numbers - expected).abs() / expected).max()) <= 0.13  # fp32's last bit may decide a tie


@BOTH
def test_ties_go_to_even_codes_and_zero_has_no_sign(format: GemmFormat) -> None:
    weight = torch.zeros(1, 16)
    weight[0, :8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    weight[0, 8:] = -weight[0, :8]
    weight = weight * (448 if format.row_scaled else 1)
    codes = quantize(weight, format, scale_dtype=torch.float32).codes[0].tolist()
    assert codes == [0, 2, 2, 4, 4, 6, 6, 7, 0, 10, 10, 12, 12, 14, 14, 15]


@BOTH
def test_representable_weights_come_back(format: GemmFormat) -> None:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (9, 128), generator=generator)
    codes[:, :: format.group_size] = 7  # the largest of each group
    groups = format.groups(128)
    scales = torch.exp2(torch.randint(-7, 0, (9, groups), generator=generator).float())
    if format.row_scaled:
        scales = torch.tensor([256.0, 448.0, 7.0, 30.0, 0.5])[torch.randint(0, 5, (9, groups), generator=generator)] / 256
        scales[0, 0] = 1.75
    weight = (VALUES[codes].float() * scales.repeat_interleave(format.group_size, 1)).half()
    for clip_search in (False, True):
        assert torch.equal(quantize(weight, format, clip_search).dequantize(), weight.float())


@BOTH
def test_clip_search_never_loses(format: GemmFormat) -> None:
    weight = _weight(8, 300, seed=4)
    weight[:, 0] = 0.4
    error = [float((quantize(weight, format, clip).dequantize() - weight).square().sum()) for clip in (False, True)]
    assert error[1] < error[0] if format is NVFP4 else error[1] <= error[0]  # a power of two less is rarely better


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_zero_groups_and_tiny_weights(format: GemmFormat, dtype: torch.dtype) -> None:
    weight = _weight(3, 64)
    weight[1] = 0
    weight[2, : format.group_size] *= 1e-9
    q = quantize(weight, format, scale_dtype=dtype)
    assert bool((q.scales[1] == 1).all()) and bool((q.codes[1] == 0).all())
    assert bool(torch.isfinite(q.dequantize()).all()) and bool((q.scales > 0).all())
    assert torch.equal(quantize(torch.zeros(2, 40), format).dequantize(), torch.zeros(2, 40))


@BOTH
@pytest.mark.parametrize("arch", ["cpu", "sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_pack_and_unpack(format: GemmFormat, dtype: torch.dtype, arch: str) -> None:
    q = quantize(_weight(70, 200), format, scale_dtype=dtype)
    packed = pack(q, dtype, arch=arch)
    back = packed.unpack()
    assert torch.equal(back.codes, q.codes) and torch.equal(back.scales, q.scales)
    assert torch.equal(back.dequantize(), q.dequantize())
    assert (packed.row_scales is not None) == format.row_scaled
    if packed.row_scales is not None:
        assert packed.row_scales.dtype == torch.float32 and bool((packed.row_scales[70:] == 0).all())
        assert packed.nbytes == sum(t.nbytes for t in (packed.weight, packed.scales, packed.row_scales))


def test_scales_that_kernels_cannot_take_are_refused() -> None:
    codes = torch.full((2, 64), 3, dtype=torch.uint8)
    scales = torch.tensor([[1.0, 2.0], [2.0, 1.0]])
    assert torch.equal(pack(QuantizedTensor(codes, scales, None, MXFP4), torch.float16).unpack().scales.float(), scales)
    scales[1, 0] = 4.0
    with pytest.raises(ValueError, match=r"1 of the scales are above 2, the first at \[1, 0\]: 4; .*divide the scales"):
        pack(QuantizedTensor(codes, scales, None, MXFP4), torch.bfloat16)
    scales[1, 0] = 2.0**-30
    with pytest.raises(ValueError, match=r"do not fit torch\.float16.*use torch\.bfloat16"):
        pack(QuantizedTensor(codes, scales, None, MXFP4), torch.float16)
    assert pack(QuantizedTensor(codes, scales, None, MXFP4), torch.bfloat16).unpack().scales[1, 0] == 2.0**-30
    codes[1, :32] = 8  # minus zero
    for scale in (2.0**-30, 2.0**40):
        scales[1, 0] = scale
        assert pack(QuantizedTensor(codes, scales, None, MXFP4), torch.float16).unpack().scales[1, 0] == 1
    scales[1, 0] = 1.001  # no number of 8 bits
    codes[1, 0] = 1
    with pytest.raises(ValueError, match=r"do not fit torch\.bfloat16"):
        pack(QuantizedTensor(codes, scales, None, MXFP4), torch.bfloat16)


def test_row_scales_belong_to_two_levels() -> None:
    codes, scales, rows = torch.zeros(2, 32, dtype=torch.uint8), torch.ones(2, 2), torch.ones(2)
    with pytest.raises(ValueError, match="row_scales are absent but the format is w4a16_nvfp4, which needs them"):
        QuantizedTensor(codes, scales, None, NVFP4)
    with pytest.raises(ValueError, match="row_scales are given but the format is w4a16_mxfp4, which has none"):
        QuantizedTensor(codes, scales[:, :1], None, MXFP4, row_scales=rows)
    with pytest.raises(ValueError, match=r"row_scales are float16 \[2\]; accepted: float32 \[2\]"):
        QuantizedTensor(codes, scales, None, NVFP4, row_scales=rows.half())
    rows[1] = float("nan")
    with pytest.raises(ValueError, match="row_scales hold NaN"):
        pack(QuantizedTensor(codes, scales, None, NVFP4, row_scales=rows), torch.float16)


@BOTH
def test_a_module_keeps_its_weight_through_state_dicts_layouts_and_casts(format: GemmFormat) -> None:
    linear = torch.nn.Linear(96, 40)
    layer = QuantLinear.from_float(linear, format, dtype=torch.bfloat16)
    expected = layer.unpack().dequantize()
    assert format.name in repr(layer)
    fresh = QuantLinear.from_float(torch.nn.Linear(96, 40), format, dtype=torch.bfloat16)
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh.unpack().dequantize(), expected)
    other = QuantLinear(pack(layer.unpack(), torch.bfloat16, arch="sm_90a"), linear.bias)
    fresh = QuantLinear.from_float(torch.nn.Linear(96, 40), format, dtype=torch.bfloat16)
    fresh.load_state_dict(other.state_dict())
    assert torch.equal(fresh.unpack().dequantize(), expected)
    layer.half()
    assert layer.scales.dtype == torch.float16 and torch.equal(layer.unpack().dequantize(), expected)


def test_a_cast_that_would_change_scales_is_refused_and_changes_nothing() -> None:
    linear = torch.nn.Linear(32, 8)
    torch.nn.init.constant_(linear.weight, 2.0**-40)
    layer = QuantLinear.from_float(linear, MXFP4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"do not fit torch\.float16"):
        layer.half()
    assert layer.scales.dtype == torch.bfloat16 and bool((layer.unpack().dequantize() == 2.0**-40).all())


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("m", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_products_on_a_cpu(format: GemmFormat, dtype: torch.dtype, m: int) -> None:
    weight, x = _weight(72, 160, seed=5), _weight(m, 160, seed=6).to(dtype)
    q = quantize(weight, format, scale_dtype=dtype)
    exact = x.double() @ q.dequantize(torch.float64).t()
    sums = x.double().abs() @ q.dequantize(torch.float64).abs().t()
    layer = QuantLinear(pack(q, dtype))
    for y in (tilebit.gemm(x, layer.packed), layer(x)):
        assert bool(((y.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 2.0**-16 * sums).all())


@pytest.mark.parametrize("name", ["w8a8_fp8", "w8a8_fp8_g128"])
def test_e4m3_codes_are_torch_s_under_fp32_scales(name: str) -> None:
    w = torch.randn(40, 300, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 40)[:, None]
    w[3] = 0
    q = quantize(w, GemmFormat.parse(name), scale_dtype=torch.float16)
    group = 300 if name == "w8a8_fp8" else 128
    largest = torch.nn.functional.pad(w.abs(), (0, -300 % group)).view(40, -1, group).amax(-1)
    assert q.scales.dtype is torch.float32 and torch.equal(q.scales, torch.where(largest > 0, largest / 448, 1.0))
    columns = q.scales.repeat_interleave(group, 1)[:, :300]
    expected = (w / columns).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(q.codes, torch.where(expected == 0x80, 0, expected))  # zero has no sign
    assert torch.equal(q.dequantize(), q.codes.view(torch.float8_e4m3fn).float() * columns)


def test_fp32_scales_are_no_matter_of_a_module_s_dtype() -> None:
    w = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * 1e-5  # scales that float16 does not hold
    layer = QuantLinear(pack(quantize(w, GemmFormat.parse("w8a8_fp8")), torch.float16))
    before, state = layer.scales.clone(), layer.state_dict()
    layer.to(torch.bfloat16)
    assert layer.dtype is torch.bfloat16 and torch.equal(layer.scales, before) and layer.scales.dtype is torch.float32
    for cast in (torch.float16, torch.bfloat16):
        with pytest.raises(RuntimeError, match=r"scales is .*float16 \[1, 64\]; this module needs float32"):
            layer.load_state_dict({**state, "scales": state["scales"].to(cast)})
    moved = QuantLinear(pack(layer.unpack(), torch.bfloat16, arch="sm_90a"))
    layer.load_state_dict(moved.state_dict())  # another layout is repacked
    assert torch.equal(layer.scales[:, :64], before[:, :64]) and torch.equal(layer.unpack().codes, moved.unpack().codes)
