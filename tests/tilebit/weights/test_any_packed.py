"""Weights of any precision: packed once, every width a view that computes what its codebook says."""

from __future__ import annotations

import pytest
import torch

import tilebit
from tilebit.layouts.formats import GemmFormat
from tilebit.layouts.packing import CUDA_ARCHES
from tilebit.weights.any_packed import AnyPrecisionWeight, any_format, pack_any
from tilebit.weights.quantize import QuantizedTensor, quantize
from tilebit.weights.quantize_any import AnyPrecisionTensor

N, K = 37, 300


def weight(n: int = N, k: int = K, widths: range = range(3, 9)) -> AnyPrecisionTensor:
    """Integers as codebooks, no two channels alike."""
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 1 << widths[-1], (n, k), generator=generator, dtype=torch.uint8)
    return AnyPrecisionTensor(codes, {b: torch.randint(-8, 9, (n, 1 << b), generator=generator).half() for b in widths})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_width_is_a_view_and_multiplies_exactly(dtype: torch.dtype) -> None:
    q = weight()
    packed = pack_any(q, dtype)
    for bits in packed.widths:
        view = packed.view(bits)
        assert view.weight.data_ptr() == packed.planes.data_ptr() and view.format == any_format(bits)
        assert view.nbytes == bits * packed.planes[0].numel() * 4 + packed.codebooks[bits].numel() * 2
        x = torch.randint(-4, 5, (3, K), generator=torch.Generator().manual_seed(bits)).to(dtype)
        bias = torch.arange(N).to(dtype)
        expected = x.double() @ q.dequantize(bits, torch.float64).T + bias.double()
        assert torch.equal(tilebit.gemm(x, view, bias), expected.to(dtype))


@pytest.mark.parametrize("arch", ["cpu", *CUDA_ARCHES])
@pytest.mark.parametrize("widths", [range(2, 5), range(3, 9)])
def test_unpack_is_the_inverse_of_pack(arch: str, widths: range) -> None:
    q = weight(70, 130, widths)
    back = pack_any(q, torch.float16, arch=arch).unpack()
    assert torch.equal(back.codes, q.codes) and back.widths == q.widths
    assert all(torch.equal(back.codebooks[b], q.codebooks[b]) for b in widths)


def test_what_does_not_fit_is_refused() -> None:
    q = weight()
    packed = pack_any(q, torch.float16)
    books = dict(packed.codebooks)
    for bits in (2, 9):
        with pytest.raises(ValueError, match=f"bits is {bits}; accepted: 3 to 8"):
            packed.view(bits)
    with pytest.raises(TypeError, match="bits is bool True; accepted: an int from 3 to 8"):
        packed.view(True)
    with pytest.raises(TypeError, match="q is Tensor"):
        pack_any(q.codes, torch.float16)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"dtype is torch\.float32; accepted: torch\.float16, torch\.bfloat16"):
        pack_any(q, torch.float32)
    with pytest.raises(ValueError, match=r"codebooks are of \[3, 4, 5, 7, 8\] bits, of 8 planes; accepted: each width"):
        AnyPrecisionWeight(packed.planes, {b: book for b, book in books.items() if b != 6}, N, K, "cpu")
    with pytest.raises(ValueError, match="of 7 planes"):
        AnyPrecisionWeight(packed.planes[:7], books, N, K, "cpu")
    with pytest.raises(ValueError, match=r"scales is torch\.float16 \[37, 16\]"):
        AnyPrecisionWeight(packed.planes, {**books, 5: books[4]}, N, K, "cpu")
    with pytest.raises(ValueError, match=r"weight is torch\.int32 \[3, 37, 2, 8\]"):
        AnyPrecisionWeight(packed.planes, books, N, K + 256, "cpu")
    broken = AnyPrecisionTensor(q.codes, {**q.codebooks, 4: q.codebooks[4] / 0})
    with pytest.raises(ValueError, match="codebook of 4 bits holds NaN or infinite numbers"):
        pack_any(broken, torch.float16)


def test_what_rounds_to_scales_names_what_makes_codebooks() -> None:
    form, words = GemmFormat.parse("w4a16_any"), "format is w4a16_any, whose channels have codebooks; accepted here: formats with scales"
    view = pack_any(weight(), torch.float16).view(4)
    linear = torch.nn.Linear(64, 64)
    calls = (
        lambda: quantize(linear.weight, form),
        lambda: QuantizedTensor(torch.zeros(4, 4, dtype=torch.uint8), torch.ones(4, 1), None, form),
        lambda: tilebit.quantize_model(torch.nn.Sequential(linear), "w4a16_any"),
        lambda: tilebit.QuantLinear(view),
        view.unpack,
    )
    for call in calls:
        with pytest.raises(ValueError, match=words):
            call()
