"""Weights of any precision as the kernels read them: one store of bit planes, of which every width
is a view."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..accepted import expect, expect_tensors
from ..layouts.formats import GemmFormat
from ..layouts.packing import PackedLayout
from ..layouts.planes import pack_planes, plane_layout, unpack_planes
from .packed import DTYPES, PackedWeight, arch_of
from .quantize_any import AnyPrecisionTensor


def any_format(bits: int) -> GemmFormat:
    """``w{bits}a16_any``."""
    return GemmFormat.parse(f"w{bits}a16_any")


@dataclass(frozen=True, slots=True, eq=False)
class AnyPrecisionWeight:
    """A weight [n, k] in every width of ``codebooks``, as the GEMM kernels of ``arch`` read it.

    ``planes`` int32 [max_bits, tiles_n, tiles_k, words], the highest bits first, each in
    ``plane_layout(arch)``; ``codebooks``: by width b, fp16 or bf16 [n_pad, 2^b], all in one dtype,
    that of the activations. n_pad is n rounded up to whole tiles; padding is 0. All on one device.
    Raises ``ValueError`` for anything else.
    """

    planes: Tensor
    codebooks: Mapping[int, Tensor]
    n: int
    k: int
    arch: str

    def __post_init__(self) -> None:
        expect_tensors(planes=self.planes, **{f"codebooks_{bits}": book for bits, book in self.codebooks.items()})
        object.__setattr__(self, "codebooks", MappingProxyType(dict(sorted(self.codebooks.items()))))
        widths = tuple(self.codebooks)
        if not widths or widths != tuple(range(widths[0], widths[-1] + 1)) or len(self.planes) != widths[-1]:
            raise ValueError(
                f"codebooks are of {list(widths)} bits, of {len(self.planes)} planes; accepted: each width from the least to the number "
                f"of planes, none left out"
            )
        for bits in widths:
            self.view(bits)
            if self.codebooks[bits].dtype != self.dtype:
                raise ValueError(f"codebooks are {self.codebooks[bits].dtype} of {bits} bits and {self.dtype}; accepted: one dtype")

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles come here: a ``MappingProxyType`` can be neither."""
        return type(self), (self.planes, dict(self.codebooks), self.n, self.k, self.arch)

    @property
    def layout(self) -> PackedLayout:
        return plane_layout(self.arch)

    @property
    def dtype(self) -> torch.dtype:
        return self.codebooks[self.max_bits].dtype

    @property
    def device(self) -> torch.device:
        return self.planes.device

    @property
    def max_bits(self) -> int:
        return max(self.codebooks)

    @property
    def widths(self) -> range:
        return range(min(self.codebooks), self.max_bits + 1)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, padding included."""
        return sum(t.numel() * t.element_size() for t in (self.planes, *self.codebooks.values()))

    def view(self, bits: int) -> PackedWeight:
        """The weight in ``bits`` bits, as ``tilebit.gemm`` takes it, sharing the store's memory.
        Raises ``ValueError`` for a width that is not held."""
        check_width(bits, self.widths)
        book = self.codebooks[bits]
        return PackedWeight(self.planes[:bits], book, None, self.n, self.k, any_format(bits), book.dtype, self.arch)

    def cast(self, dtype: torch.dtype) -> AnyPrecisionWeight:
        """The weight with codebooks rounded to ``dtype``, fp16 or bf16; planes are shared. Raises
        ``ValueError`` for numbers that are not finite then."""
        books = {bits: book.to(dtype) for bits, book in self.codebooks.items()}
        if not all(bool(book.isfinite().all()) for book in books.values()):
            raise ValueError(f"a codebook does not fit {dtype}; accepted: finite numbers: take the dtype that it was saved in")
        return AnyPrecisionWeight(self.planes, books, self.n, self.k, self.arch)

    def unpack(self) -> AnyPrecisionTensor:
        """The inverse of ``pack_any``; codebooks of fp16 come back as they were."""
        words = self.planes.cpu().numpy()
        codes = torch.from_numpy(unpack_planes(words, self.layout, self.n, self.k)).to(self.device)
        return AnyPrecisionTensor(codes, {bits: book[: self.n].to(torch.float16) for bits, book in self.codebooks.items()})


def check_width(bits: int, widths: range) -> None:
    """Raise ``TypeError`` for what is no int, ``ValueError`` for a width that is none of ``widths``."""
    if type(bits) is not int:
        raise TypeError(f"bits is {type(bits).__name__} {bits!r}; accepted: an int from {widths[0]} to {widths[-1]}")
    if bits not in widths:
        raise ValueError(f"bits is {bits}; accepted: {widths[0]} to {widths[-1]}, the widths of this weight")


def pack_any(
    q: AnyPrecisionTensor, dtype: torch.dtype, device: torch.device | str | None = None, arch: str | None = None
) -> AnyPrecisionWeight:
    """``q`` as the kernels read it, on ``device`` (default: where ``q`` is).

    ``dtype`` (fp16 or bf16) is that of the activations; codebooks are rounded to it. ``arch``
    defaults to the device's; name one to pack for another. Raises ``TypeError`` and ``ValueError``
    for anything else, and ``ValueError`` for a codebook with NaN or infinite numbers.
    """
    expect("q", q, AnyPrecisionTensor, "an AnyPrecisionTensor: quantize_any(w)")
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype}; accepted: {', '.join(map(str, DTYPES))}")
    where = q.codes.device if device is None else torch.device(device)
    arch = arch or arch_of(where)
    layout = plane_layout(arch)
    for bits, book in q.codebooks.items():
        if not bool(book.isfinite().all()):
            raise ValueError(f"codebook of {bits} bits holds NaN or infinite numbers; accepted: finite ones: quantize the weight again")
    planes = torch.from_numpy(pack_planes(q.codes.cpu().numpy(), q.max_bits, layout).view(np.int32)).to(where)
    more = layout.padded(q.n, q.k)[0] - q.n
    books = {bits: torch.nn.functional.pad(book.to(where, dtype), (0, 0, 0, more)).contiguous() for bits, book in q.codebooks.items()}
    return AnyPrecisionWeight(planes, books, q.n, q.k, arch)
