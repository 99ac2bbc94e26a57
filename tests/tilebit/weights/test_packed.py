"""Packing on the device follows ``PackedLayout`` exactly, in pieces or whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tilebit.layouts.checkpoints import checkpoint_layout, qserve_layout
from tilebit.layouts.formats import BITS, GROUP_SIZES, GemmFormat, QuantFormat
from tilebit.layouts.packing import PackedLayout, gemm_layout
from tilebit.weights.packed import PackedWeight, arch_of, pack, pack_codes, unpack_words
from tilebit.weights.quantize import QuantizedTensor, quantize

LAYOUTS = [
    *(gemm_layout(arch, bits) for arch in ("cpu", "sm_80", "sm_90a") for bits in BITS),
    *(checkpoint_layout(storage, bits).weight for storage in ("gptq", "compressed-tensors") for bits in BITS),
    checkpoint_layout("awq", 4).weight,
    qserve_layout(),
    checkpoint_layout("gptq", 8).zeros,
    *(
        PackedLayout(f"random.{outer}", bits, 4, 8, np.random.default_rng(0).permutation(32).reshape(-1, 32 // bits), outer)
        for bits, outer in ((4, "n_major"), (4, "k_major"), (8, "k_major"))
    ),
]
SHAPES = [(64, 64), (1, 1), (70, 33), (129, 200), (8, 300), (200, 7)]


def _codes(n: int, k: int, bits: int) -> torch.Tensor:
    return torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(n * 1000 + k))


@pytest.mark.parametrize("chunk", [1 << 25, 600])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_agrees_with_the_layout(layout: PackedLayout, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilebit.weights.packed._CHUNK_CODES", chunk)
    for n, k in SHAPES:
        codes = _codes(n, k, layout.bits)
        words = pack_codes(codes, layout)
        assert words.dtype == torch.int32
        assert np.array_equal(words.numpy().view(np.uint32), layout.pack(codes.numpy()))
        assert torch.equal(unpack_words(words, layout, n, k), codes)
        assert torch.equal(pack_codes(codes.t().contiguous().t(), layout), words)


def _quantized(format: GemmFormat, n: int, k: int) -> QuantizedTensor:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(7)) * 0.02 + 0.005
    return quantize(weight, format)


@pytest.mark.parametrize("arch", ["cpu", "sm_90a"])
def test_zero_points_of_int8_products_are_bytes(arch: str) -> None:
    q = _quantized(GemmFormat.parse("w4a8_channel_asym"), 75, 150)
    packed = pack(q, torch.bfloat16, arch=arch)
    back = packed.unpack()
    assert packed.zeros is not None and packed.zeros.dtype is torch.uint8 and packed.scales.dtype is torch.bfloat16
    assert not packed.zeros[:, 75:].any() and not packed.scales[:, 75:].any()  # padding codes are 0, too
    assert back.zeros is not None and q.zeros is not None and torch.equal(back.zeros, q.zeros) and torch.equal(back.codes, q.codes)
    with pytest.raises(ValueError, match=r"zeros is torch\.bfloat16 \[1, \d+\] .*needs contiguous torch\.uint8"):
        replace(packed, zeros=packed.zeros.bfloat16())


@pytest.mark.parametrize("arch", ["cpu", "sm_86", "sm_90a"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_pack_then_unpack_is_the_identity(bits: int, group: int, symmetric: bool, arch: str) -> None:
    format = QuantFormat(bits, group, symmetric)
    q = _quantized(format, 75, 150)
    packed = pack(q, torch.float16, arch=arch)
    layout = gemm_layout(arch, bits)
    n_pad, groups = layout.padded(75, 150)[0], format.groups(150)
    assert tuple(packed.weight.shape) == layout.storage_shape(75, 150)
    assert tuple(packed.scales.shape) == (groups, n_pad) and packed.scales.dtype == torch.float16
    assert torch.equal(packed.scales[:, :75], q.scales.t()) and not packed.scales[:, 75:].any()
    padding = unpack_words(packed.weight, layout, *layout.padded(75, 150))
    assert not padding[75:].any() and not padding[:, 150:].any()
    back = packed.unpack()
    assert torch.equal(back.codes, q.codes) and torch.equal(back.scales, q.scales) and back.format == format
    if q.zeros is None:
        assert packed.zeros is None and back.zeros is None
    else:
        assert packed.zeros is not None and back.zeros is not None and packed.zeros.dtype == torch.float16
        assert torch.equal(back.zeros, q.zeros) and torch.equal(packed.zeros[:, :75], q.zeros.t().half())
    assert packed.nbytes >= 75 * 150 * bits // 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_zero_point_survives_the_activation_dtype(dtype: torch.dtype) -> None:
    zeros = torch.arange(256, dtype=torch.uint8)[:, None]
    q = QuantizedTensor(torch.zeros(256, 40, dtype=torch.uint8), torch.ones(256, 1, dtype=dtype), zeros, QuantFormat(8, -1, False))
    back = pack(q, dtype).unpack()
    assert back.zeros is not None and torch.equal(back.zeros, zeros)


def test_perm_goes_along() -> None:
    perm = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    q = _quantized(QuantFormat(4, 32), 8, 64)
    packed = pack(QuantizedTensor(q.codes, q.scales, None, q.format, perm), torch.bfloat16)
    assert packed.perm is not None and torch.equal(packed.perm, perm)
    assert torch.equal(packed.unpack().dequantize()[:, perm], pack(q, torch.bfloat16).unpack().dequantize())


def test_bad_packing() -> None:
    q = _quantized(QuantFormat(4, 32), 8, 64)
    with pytest.raises(ValueError, match=r"accepted: torch\.float16, torch\.bfloat16"):
        pack(q, torch.float32)
    for value in (float("nan"), float("inf")):
        for format in ("w4a16_g32", "w8a8_fp8", "w4a16_nvfp4"):
            bad = quantize(torch.ones(8, 64), QuantFormat.parse(format))
            bad.scales[1, 0] = value
            with pytest.raises(ValueError, match="scales hold NaN or infinite values; accepted: finite ones"):
                pack(bad, torch.float16)
    with pytest.raises(ValueError, match="unknown arch 'sm_70'"):
        pack(q, torch.float16, arch="sm_70")
    huge = QuantizedTensor(q.codes, torch.full_like(q.scales, 1e6, dtype=torch.float32), None, q.format)
    with pytest.raises(ValueError, match=r"16 of the torch.float32 scales do not fit torch.float16, the first at \[0, 0\]: 1e\+06"):
        pack(huge, torch.float16)
    tiny = QuantizedTensor(q.codes, torch.full_like(q.scales, 1e-12, dtype=torch.bfloat16), None, q.format)
    with pytest.raises(ValueError, match="do not fit"):
        pack(tiny, torch.float16)
    with pytest.raises(ValueError, match=r"accepted: int32 \[1, 2, 128\]"):
        unpack_words(torch.zeros(5, dtype=torch.int32), gemm_layout("cpu", 4), 8, 64)
    with pytest.raises(ValueError, match="accepted: int32"):
        unpack_words(torch.zeros(256, dtype=torch.int64), gemm_layout("cpu", 4), 8, 64)
    with pytest.raises(ValueError, match="accepted: 'cpu', 'cuda'"):
        arch_of(torch.device("meta"))
    assert arch_of(torch.device("cpu")) == "cpu"


@pytest.mark.parametrize(
    "field,value,words",
    [
        ("weight", torch.zeros(1, 1, 128, dtype=torch.int32), r"weight is torch.int32 \[1, 1, 128\]"),
        ("weight", torch.zeros(1, 2, 128, dtype=torch.int64), "weight is torch.int64"),
        ("scales", torch.zeros(2, 8, dtype=torch.float16), r"needs contiguous torch.float16 \[2, 32\]"),
        ("scales", torch.zeros(2, 32, dtype=torch.bfloat16), "scales is torch.bfloat16"),
        ("scales", torch.zeros(32, 2, dtype=torch.float16).t(), "not contiguous"),
        ("scales", torch.zeros(2, 32, dtype=torch.float16, device="meta"), "on meta"),
        ("zeros", None, "zeros are absent"),
        ("format", QuantFormat(4, 32), "zeros are given"),
        ("row_scales", torch.ones(32), "row_scales are given"),
        ("perm", torch.arange(3), "perm is torch.int64"),
        ("perm", torch.zeros(64, dtype=torch.int64), "perm does not hold each of the columns 0..63 once"),
        ("perm", torch.arange(64) + 1, "perm does not hold each of the columns"),
        ("smooth", torch.ones(64), "smooth is given; w4a16_g32_asym multiplies 16-bit x"),
    ],
)
def test_bad_operands(field: str, value: object, words: str) -> None:
    packed = pack(_quantized(QuantFormat(4, 32, False), 8, 64), torch.float16)
    assert isinstance(packed, PackedWeight)
    with pytest.raises(ValueError, match=words):
        replace(packed, **{field: value})


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_factors_are_positive_and_finite(value: float) -> None:
    packed = pack(quantize(torch.ones(8, 64), QuantFormat.parse("w8a8_channel")), torch.float16)
    with pytest.raises(ValueError, match="smooth has factors that are zero, negative, infinite or NaN"):
        replace(packed, smooth=torch.full((64,), value))
    with pytest.raises(ValueError, match=r"smooth is torch\.float32 .*not contiguous"):
        replace(packed, smooth=torch.ones(128)[::2])
