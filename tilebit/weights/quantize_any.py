"""Quantization for any precision (Any-Precision LLM, arXiv:2402.10517): codes of the widest width
whose highest b bits are the codes of b bits.

A seed of few bits is clustered for each output channel by k-means, each value weighted with what
the loss says of it (SqueezeLLM's sensitivity). Every further bit cuts each cluster in two
(incremental upscaling, section 4.1 of the paper), where that is best for all widths (``nested.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..accepted import expect, expect_tensors
from ..progress import counted
from .cores import side_by_side
from .kmeans import SortedRows, segments
from .nested import nested

SEED_BITS = (2, 3, 4)
MAX_BITS = 8
_ROWS = 32  # rows clustered at once on a CPU: their fp64 temporaries stay in its caches
_GPU_ROWS, _GPU_VALUES = 4096, 1 << 24  # at most, at once on a GPU: both bound the temporaries


@dataclass(frozen=True, slots=True, eq=False)
class AnyPrecisionTensor:
    """A weight [n, k] in every width from ``seed_bits`` to ``max_bits``.

    ``codes`` uint8 [n, k] of ``max_bits`` bits; those of b bits are ``codes >> (max_bits - b)``.
    ``codebooks``: by width, fp16 [n, 2^b]: the number of each code, w[i, j] = codebook[i, code[i,
    j]]. All on one device. Raises ``ValueError`` for anything else.
    """

    codes: Tensor
    codebooks: Mapping[int, Tensor]

    def __post_init__(self) -> None:
        expect_tensors(codes=self.codes, **{f"codebooks_{bits}": book for bits, book in self.codebooks.items()})
        object.__setattr__(self, "codebooks", MappingProxyType(dict(sorted(self.codebooks.items()))))
        widths = tuple(self.codebooks)
        if not widths or widths != tuple(range(widths[0], widths[-1] + 1)) or widths[0] < min(SEED_BITS) or widths[-1] > MAX_BITS:
            raise ValueError(f"codebooks are of {list(widths)} bits; accepted: each from a seed's to at most {MAX_BITS}, none left out")
        if self.codes.dtype != torch.uint8 or self.codes.ndim != 2 or not self.codes.numel():
            raise ValueError(f"codes are {self.codes.dtype} {list(self.codes.shape)}; accepted: uint8 [n, k], at least 1 x 1")
        for bits, book in self.codebooks.items():
            if book.dtype != torch.float16 or tuple(book.shape) != (self.n, 1 << bits) or book.device != self.codes.device:
                raise ValueError(
                    f"codebook of {bits} bits is {book.dtype} {list(book.shape)} on {book.device}; accepted: torch.float16 "
                    f"[{self.n}, {1 << bits}] on {self.codes.device}"
                )
        if self.max_bits < 8 and int(self.codes.max()) >> self.max_bits:
            raise ValueError(f"codes reach {int(self.codes.max())}; accepted: {self.max_bits} bits, 0 to {(1 << self.max_bits) - 1}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles come here: a ``MappingProxyType`` can be neither."""
        return type(self), (self.codes, dict(self.codebooks))

    @property
    def n(self) -> int:
        return self.codes.shape[0]

    @property
    def k(self) -> int:
        return self.codes.shape[1]

    @property
    def seed_bits(self) -> int:
        """The least width."""
        return min(self.codebooks)

    @property
    def max_bits(self) -> int:
        return max(self.codebooks)

    @property
    def widths(self) -> range:
        return range(self.seed_bits, self.max_bits + 1)

    def codes_of(self, bits: int) -> Tensor:
        """uint8 [n, k]: codes of ``bits`` bits, the highest of the stored ones. Raises
        ``ValueError`` for a width that is not held."""
        self.check_width(bits)
        return self.codes >> (self.max_bits - bits)

    def dequantize(self, bits: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [n, k] in ``bits`` bits; raises ``ValueError`` for a width that is not held."""
        return self.codebooks_of(bits).to(dtype).gather(1, self.codes_of(bits).long())

    def codebooks_of(self, bits: int) -> Tensor:
        """fp16 [n, 2^bits]; raises ``ValueError`` for a width that is not held."""
        self.check_width(bits)
        return self.codebooks[bits]

    def check_width(self, bits: int) -> None:
        """Raise ``ValueError`` for a width that is not held."""
        if bits not in self.codebooks:
            raise ValueError(f"bits is {bits!r}; accepted: {self.seed_bits} to {self.max_bits}, the widths of this weight")

    def to(self, device: torch.device | str) -> AnyPrecisionTensor:
        return AnyPrecisionTensor(self.codes.to(device), {bits: book.to(device) for bits, book in self.codebooks.items()})


def quantize_any(
    w: Tensor, seed_bits: int = 3, max_bits: int = MAX_BITS, sensitivity: Tensor | None = None, progress: bool = False
) -> AnyPrecisionTensor:
    """``w`` (floating point [n, k]) in every width from ``seed_bits`` (2, 3, 4) to ``max_bits``, on
    its own device.

    ``sensitivity``: what a squared error of each value costs, floating point [n, k] on the same
    device and at least 0, up to a factor for each row: the diagonal of the Fisher information, the
    sum of squared gradients over calibration text. None: all values count alike. ``progress`` shows
    a bar on a terminal. A weight on a CPU is worked on by as many threads as
    ``torch.get_num_threads()`` says; the same input gives the same codes, whatever their number.

    Raises ``TypeError`` for what is no tensor, ``ValueError`` for other shapes, dtypes, devices or
    widths, for NaN and infinite values, for a sensitivity below 0, and for values that fp16, the
    codebooks' type, does not hold: above 65504, or all of them so small that they would be 0.
    """
    expect_tensors(optional=("sensitivity",), w=w, sensitivity=sensitivity)
    expect("seed_bits", seed_bits, int, f"one of {SEED_BITS}")
    expect("max_bits", max_bits, int, f"from seed_bits to {MAX_BITS}")
    if seed_bits not in SEED_BITS:
        raise ValueError(f"seed_bits is {seed_bits}; accepted: {', '.join(map(str, SEED_BITS))}")
    if not seed_bits <= max_bits <= MAX_BITS:
        raise ValueError(f"max_bits is {max_bits}; accepted: from seed_bits, {seed_bits}, to {MAX_BITS}")
    _check_values(w, sensitivity)
    w = w.detach()
    n, k = w.shape
    codes = torch.empty(n, k, dtype=torch.uint8, device=w.device)
    books = {bits: torch.empty(n, 1 << bits, dtype=torch.float16, device=w.device) for bits in range(seed_bits, max_bits + 1)}
    step = _ROWS if w.device.type == "cpu" else max(1, min(_GPU_ROWS, _GPU_VALUES // k))
    starts = range(0, n, step)

    def work(start: int) -> None:
        part = slice(start, start + step)
        rows = SortedRows.of(w[part], None if sensitivity is None else sensitivity[part].detach())
        edges = nested(rows, seed_bits, max_bits)
        means = rows.values[:, :1]
        for bits, book in books.items():
            at = edges[:, :: 1 << (max_bits - bits)]
            means = rows.means(
                at, means.repeat_interleave((at.shape[1] - 1) // means.shape[1], 1)
            )  # an empty half keeps its cluster's number
            book[part] = means
        codes[part].scatter_(1, rows.order, (segments(edges, k) % (1 << max_bits)).to(torch.uint8).view(-1, k))

    done = side_by_side(work, starts) if w.device.type == "cpu" else map(work, starts)
    for _ in counted(done, "quantizing rows", len(starts), progress):
        pass
    return AnyPrecisionTensor(codes, books)


def _check_values(w: Tensor, sensitivity: Tensor | None) -> None:
    if w.ndim != 2 or not w.is_floating_point() or not w.numel():
        raise ValueError(f"w is {w.dtype} {list(w.shape)}; accepted: floating point [n, k], at least 1 x 1")
    largest = w.detach().abs().amax()
    if not bool(largest <= torch.finfo(torch.float16).max):  # so that not-a-number is found, too
        raise ValueError(
            "w holds NaN, infinite values or some above 65504, which fp16 codebooks do not hold; accepted: finite values up to that"
        )
    if bool((largest > 0) & (largest.half() == 0)):
        raise ValueError(f"w has magnitudes up to {float(largest):g}, which fp16 codebooks make 0, all of them; rescale the weight")
    if sensitivity is None:
        return
    if sensitivity.shape != w.shape or not sensitivity.is_floating_point() or sensitivity.device != w.device:
        raise ValueError(
            f"sensitivity is {sensitivity.dtype} {list(sensitivity.shape)} on {sensitivity.device}; accepted: floating point "
            f"{list(w.shape)} on {w.device}"
        )
    if not bool(((sensitivity >= 0) & sensitivity.isfinite()).all()):
        raise ValueError("sensitivity holds values below 0, NaN or infinite ones; accepted: finite values from 0 on")
