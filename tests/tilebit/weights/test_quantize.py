"""Round-to-nearest quantization: its definition, its bounds, and what it refuses."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from tilebit.layouts.formats import BITS, GROUP_SIZES, GemmFormat, QuantFormat
from tilebit.weights.quantize import CLIP_FACTORS, QuantizedTensor, quantize

FORMATS = [QuantFormat(bits, group, symmetric) for bits in BITS for group in GROUP_SIZES for symmetric in (True, False)]
FORMATS += map(GemmFormat.parse, ("w4a8_channel_asym", "w8a8_g128", "w4a8_g128_asym"))


def _weight(n: int, k: int, seed: int = 0, offset: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, k, generator=generator) * 0.05 + offset


@pytest.mark.parametrize("n,k,offset", [(4, 256, 0.01), (3, 100, -0.01), (1, 1, 0.0), (5, 33, 0.5), (2, 129, -0.5)])
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_every_weight_is_within_half_a_step(format: GemmFormat, n: int, k: int, offset: float) -> None:
    weight = _weight(n, k, offset=offset)
    q = quantize(weight, format, scale_dtype=torch.float32)
    assert q.codes.shape == (n, k) and q.scales.shape == (n, format.groups(k))
    group = k if format.group_size == -1 else format.group_size
    for row, g in itertools.product(range(n), range(q.scales.shape[1])):
        part = slice(g * group, (g + 1) * group)
        step = float(q.scales[row, g])
        error = (q.dequantize()[row, part] - weight[row, part]).abs().max()
        # An asymmetric zero point is rounded too, which can cost the range's ends another half step.
        assert float(error) <= step * (0.5 if format.symmetric else 1.0) * 1.0001
        if format.symmetric:
            assert step == pytest.approx(float(weight[row, part].abs().max()) * 2 / format.max_code)


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_codes_are_the_nearest_under_the_stored_scale(format: GemmFormat, scale_dtype: torch.dtype) -> None:
    weight = _weight(6, 160, seed=1)
    q = quantize(weight, format, scale_dtype=scale_dtype)
    assert q.scales.dtype == scale_dtype
    group = 160 if format.group_size == -1 else format.group_size
    index = torch.arange(160) // group
    step = q.scales.double()[:, index]
    zero = torch.full_like(step, format.symmetric_zero_point) if q.zeros is None else q.zeros.double()[:, index]
    levels = torch.arange(format.max_code + 1, dtype=torch.float64)
    distance = ((levels - zero[..., None]) * step[..., None] - weight.double()[..., None]).abs()
    chosen = distance.gather(-1, q.codes.long()[..., None])[..., 0]
    # fp32 division decides ties at code 127.5 with a relative error of 2**-24 x 255.
    assert bool((chosen <= distance.amin(-1) * (1 + 1e-4)).all())
    assert torch.equal(q.dequantize(torch.float64), ((q.codes.double() - zero) * step).float().double())


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_clip_search_never_loses_and_wins_with_outliers(format: GemmFormat) -> None:
    weight = _weight(8, 300, seed=2)
    weight[:, 0] = 0.4
    plain, searched = quantize(weight, format), quantize(weight, format, clip_search=True)
    group = 300 if format.group_size == -1 else format.group_size
    columns = torch.arange(300) // group

    def errors(q: QuantizedTensor) -> torch.Tensor:
        return torch.zeros(8, format.groups(300)).index_add_(1, columns, (q.dequantize() - weight).square())

    assert bool((errors(searched) <= errors(plain) * (1 + 1e-5) + 1e-12).all())
    if format.bits == 4 and format.group_size in (128, -1):
        assert float(errors(searched).sum()) < 0.95 * float(errors(plain).sum())
    assert CLIP_FACTORS[0] == 1.0


@pytest.mark.parametrize("clip_search", [False, True])
@pytest.mark.parametrize("format", [f for f in FORMATS if f.group_size != -1], ids=lambda f: f.name)
def test_groups_are_independent_and_the_last_may_be_short(format: GemmFormat, clip_search: bool) -> None:
    weight, group = _weight(3, 2 * format.group_size + 5, seed=3), format.group_size
    whole = quantize(weight, format, clip_search)
    for g in range(3):
        part = quantize(weight[:, g * group : (g + 1) * group], format, clip_search)
        assert torch.equal(part.codes, whole.codes[:, g * group : (g + 1) * group])
        assert torch.equal(part.scales, whole.scales[:, g : g + 1])


def test_pieces_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, format = _weight(37, 70, seed=4), QuantFormat(4, 32, False)
    whole = quantize(weight, format, clip_search=True)
    monkeypatch.setattr("tilebit.weights.quantize._CHUNK_ELEMENTS", 500)
    pieces = quantize(weight, format, clip_search=True)
    assert torch.equal(whole.codes, pieces.codes) and torch.equal(whole.scales, pieces.scales)
    assert whole.zeros is not None and pieces.zeros is not None and torch.equal(whole.zeros, pieces.zeros)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_strides_and_dtypes(dtype: torch.dtype) -> None:
    weight = _weight(64, 32, seed=5).to(dtype)
    q = quantize(weight.t().contiguous().t(), QuantFormat(4, 32))
    assert torch.equal(q.codes, quantize(weight, QuantFormat(4, 32)).codes)
    assert q.scales.dtype == (dtype if dtype in (torch.float16, torch.bfloat16) else torch.float16)


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_zero_and_tiny_groups(format: GemmFormat) -> None:
    weight = torch.zeros(3, 128)
    weight[1] = 1e-9
    weight[2] = torch.linspace(0.25, 0.5, 128)
    q = quantize(weight, format)
    assert bool((q.scales > 0).all()) and bool(torch.isfinite(q.scales).all())
    assert torch.equal(q.dequantize()[0], torch.zeros(128))
    assert float(q.dequantize()[1].abs().max()) <= 1e-7
    if q.zeros is not None:
        assert bool((q.zeros[2] == 0).all())  # the range of a one-sided group still begins at 0


@pytest.mark.parametrize("name", ["w4a16_g128", "w4a16_g64_asym", "w8a8_channel", "w4a16_mxfp4"])
def test_a_weight_of_which_nothing_would_be_left_is_refused(name: str) -> None:
    format, weight = GemmFormat.parse(name), _weight(4, 256)
    with pytest.raises(ValueError, match=r"w has magnitudes up to .*, which scales of torch.float16, from 5.96046e-08 on, make 0, all"):
        quantize(weight * 1e-9, format)
    for scale_dtype in (torch.bfloat16, torch.float32):
        q = quantize(weight * 1e-9, format, scale_dtype=scale_dtype)
        assert float((q.dequantize() * 1e9 - weight).norm()) < 0.2 * float(weight.norm())
    assert bool(quantize(weight * 1e-6, format).dequantize().any())
    assert not bool(quantize(weight * 0, format).dequantize().any())


def test_a_parameter_leaves_no_graph() -> None:
    for name in ("w4a16_g64_asym", "w4a8_lqq_g64", "w4a16_nvfp4", "w8a8_fp8"):
        format, weight = GemmFormat.parse(name), torch.nn.Parameter(_weight(4, 128))
        q, expected = quantize(weight, format), quantize(weight.detach(), format)
        held = [tensor for tensor in (q.codes, q.scales, q.zeros, q.row_scales) if tensor is not None]
        assert not any(tensor.requires_grad for tensor in held)
        assert torch.equal(copy.deepcopy(q).dequantize(), expected.dequantize())


def test_perm_restores_the_column_order() -> None:
    weight, perm = _weight(4, 64, seed=6), torch.randperm(64, generator=torch.Generator().manual_seed(0))
    q = quantize(weight[:, perm], QuantFormat(8, 32))
    moved = QuantizedTensor(q.codes, q.scales, None, q.format, perm)
    x = torch.randint(-4, 5, (5, 64)).double()
    assert torch.equal(moved.dequantize()[:, perm], q.dequantize())
    assert torch.allclose(x @ moved.dequantize(torch.float64).t(), x[:, perm] @ q.dequantize(torch.float64).t())


@pytest.mark.parametrize(
    "weight,words",
    [
        (torch.tensor([[1.0, float("nan")]]), r"1 NaN or infinite values in rows 0\.\.0, the first at \[0, 1\]"),
        (torch.tensor([[1.0, 2.0], [float("-inf"), 0.0]]), r"the first at \[1, 0\]"),
        (torch.zeros(0, 4), "n >= 1"),
        (torch.zeros(4, 0), "n >= 1"),
        (torch.zeros(4), r"float32 \[4\]"),
        (torch.zeros(2, 2, 2), "accepted"),
        (torch.zeros(2, 2, dtype=torch.int32), "int32"),
        (torch.full((1, 32), 1e7), "scale above 65504"),
    ],
)
def test_bad_weights(weight: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        quantize(weight, QuantFormat(4, 32))


def test_bad_scale_dtype() -> None:
    with pytest.raises(ValueError, match=r"accepted: torch\.float16"):
        quantize(torch.ones(2, 2), QuantFormat(), scale_dtype=torch.float64)
    assert quantize(torch.full((1, 32), 1e7), QuantFormat(4, 32), scale_dtype=torch.bfloat16).scales.dtype == torch.bfloat16


def _parts(**changes: object) -> dict[str, object]:
    parts: dict[str, object] = {
        "codes": torch.zeros(2, 64, dtype=torch.uint8),
        "scales": torch.ones(2, 2, dtype=torch.float16),
        "zeros": torch.zeros(2, 2, dtype=torch.uint8),
        "format": QuantFormat(4, 32, False),
        "perm": None,
    }
    return parts | changes


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"codes": torch.zeros(2, 64, dtype=torch.int8)}, "codes are int8"),
        ({"codes": torch.zeros(0, 64, dtype=torch.uint8)}, "n >= 1"),
        ({"codes": torch.full((2, 64), 16, dtype=torch.uint8)}, "codes reach 16; 4 bits hold 0 to 15"),
        ({"scales": torch.ones(2, 3, dtype=torch.float16)}, r"scales are float16 \[2, 3\]"),
        ({"scales": torch.ones(2, 2, dtype=torch.float64)}, "scales are float64"),
        ({"zeros": None}, "zeros are absent"),
        ({"format": QuantFormat(4, 32, True)}, "zeros are given"),
        ({"zeros": torch.zeros(2, 1, dtype=torch.uint8)}, "zeros are uint8"),
        ({"zeros": torch.full((2, 2), 16, dtype=torch.uint8)}, "zeros reach 16"),
        ({"zeros": torch.zeros(2, 2)}, "zeros are float32"),
        ({"perm": torch.arange(63)}, r"perm is int64 \[63\]"),
        ({"perm": torch.zeros(64, dtype=torch.int64)}, "once"),
        ({"perm": torch.arange(64, dtype=torch.int32)}, "perm is int32"),
        ({"scales": torch.ones(2, 2, dtype=torch.float16, device="meta")}, "one device"),
    ],
)
def test_bad_parts(changes: dict[str, object], words: str) -> None:
    QuantizedTensor(**_parts())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=words):
        QuantizedTensor(**_parts(**changes))  # type: ignore[arg-type]
