"""Packed weights: the operand a kernel reads, and the code that writes it on the weight's own
device.

Everything follows ``PackedLayout.order``; nothing here knows a kernel. Words are assembled as bytes
(slot pairs of a 4-bit word share a byte), so no step widens codes beyond uint8; the hosts and GPUs
supported are little-endian.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import torch
from torch import Tensor

from ..accepted import expect, expect_tensors, scaled
from ..layouts.formats import OFFSET_ZERO, GemmFormat
from ..layouts.packing import PackedLayout
from ..layouts.planes import unpack_planes
from ..schedules.gemm.codecs import codec_of, packed_layout
from ..schedules.gemm.workload import Workload
from ..schedules.operands import present
from ..schedules.target import target_from_capability
from .quantize import QuantizedTensor, expect_factors, expect_order
from .quantize_float import numbers

DTYPES = (torch.float16, torch.bfloat16)
WEIGHTS = ("weight", "scales", "zeros", "row_scales")  # operands of a product that are a weight's
# Codes handled at once. Every temporary is uint8, at most four of them live: peak extra memory is 4
# x this (128 MiB), or four rows of tiles if that is more.
_CHUNK_CODES = 1 << 25


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight [n, k] as the GEMM kernels of ``arch`` read it.

    ``weight`` int32 [tiles_n, tiles_k, words], the storage of ``packed_layout(arch, format)``, of a
    format with codebooks [bits, tiles_n, tiles_k, words]: planes, the highest bit first;
    ``scales`` [groups, n_pad] in ``dtype`` (fp16 or bf16; fp32 of e4m3 weights), ``zeros`` [groups, n_pad] in ``dtype``
    holding integers, or None for a symmetric format; uint8 where the format says so; codebooks are
    ``scales`` [n_pad, 2^bits]. n_pad is
    n rounded up to whole tiles; padding codes and scales are 0. ``perm`` int64 [k] or None: gather the columns of x with it first, y =
    x[:, perm] @ w'^T. ``row_scales`` fp32 [n_pad] of a format whose scales have two levels, else
    None. ``smooth`` fp32 [k], contiguous, or None: factors of the columns of x (after ``perm``), which it is
    multiplied by before it is quantized; of formats with 8-bit x alone, positive and finite. Raises
    ``ValueError`` for anything else.
    """

    weight: Tensor
    scales: Tensor
    zeros: Tensor | None
    n: int
    k: int
    format: GemmFormat
    dtype: torch.dtype
    arch: str
    perm: Tensor | None = None
    row_scales: Tensor | None = None
    smooth: Tensor | None = None
    format_name: str = field(init=False, repr=False, default="")  # found once: calls pass it
    takes_codes: bool = field(init=False, repr=False, default=False)  # the format's x is of 8 bits; likewise

    def __post_init__(self) -> None:
        optional = {"zeros": self.zeros, "perm": self.perm, "row_scales": self.row_scales, "smooth": self.smooth}
        expect_tensors(tuple(optional), weight=self.weight, scales=self.scales, **optional)
        expect("format", self.format, GemmFormat, "a QuantFormat, for example QuantFormat.parse('w4a16_g128')")
        object.__setattr__(self, "format_name", self.format.name)
        object.__setattr__(self, "takes_codes", self.format.x != "")
        workload = Workload(0, self.n, self.k, self.format, str(self.dtype).removeprefix("torch."))
        stated = [o for o in workload.operands(self.arch) if o.name in WEIGHTS]
        for o in stated:
            if (getattr(self, o.name) is None) != o.absent:
                raise ValueError(
                    f"{o.name} are {'given' if o.absent else 'absent'}; {self.format.name} {'has none' if o.absent else 'needs them'}"
                )
        expected = [(o.name, getattr(self, o.name), getattr(torch, o.dtype), o.shape) for o in present(stated)]
        if self.perm is not None:
            expected.append(("perm", self.perm, torch.int64, (self.k,)))
        if self.smooth is not None:
            expect_factors(self.smooth, self.k, self.format)
            expected.append(("smooth", self.smooth, torch.float32, (self.k,)))
        for name, tensor, dtype, shape in expected:
            if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous() or tensor.device != self.weight.device:
                raise ValueError(
                    f"{name} is {tensor.dtype} {list(tensor.shape)} on "
                    f"{tensor.device}{'' if tensor.is_contiguous() else ', not contiguous'}; {self.format.name} "
                    f"[{self.n}, {self.k}] for {self.arch} needs contiguous {dtype} {list(shape)} on {self.weight.device}"
                )
        if self.perm is not None:
            expect_order(self.perm, self.k)

    @property
    def layout(self) -> PackedLayout:
        return packed_layout(self.arch, self.format)

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, padding included."""
        held = (self.weight, self.scales, self.zeros, self.perm, self.row_scales, self.smooth)
        return sum(t.numel() * t.element_size() for t in held if t is not None)

    def unpack(self) -> QuantizedTensor:
        """The inverse of ``pack`` (scales stay in ``dtype``). Raises ``ValueError`` for a format with
        codebooks."""
        scaled(self.format)
        codes = unpack_words(self.weight, self.layout, self.n, self.k)
        zeros = None if self.zeros is None else self.zeros[:, : self.n].t().to(torch.uint8).contiguous()
        rows = None if self.row_scales is None else self.row_scales[: self.n].clone()
        return QuantizedTensor(codes, self.scales[:, : self.n].t().contiguous(), zeros, self.format, self.perm, rows, self.smooth)

    def dequantize(self) -> Tensor:
        """The weight [n, k] in ``dtype``, y = x @ w^T."""
        if not self.format.codebook:
            return self.unpack().dequantize(self.dtype)
        planes = self.weight.cpu().numpy()
        codes = torch.from_numpy(unpack_planes(planes, self.layout, self.n, self.k)).to(self.device)
        return self.scales[: self.n].gather(1, codes.long())


def pack(q: QuantizedTensor, dtype: torch.dtype, device: torch.device | str | None = None, arch: str | None = None) -> PackedWeight:
    """``q`` as the kernels read it, packed on ``device`` (default: where ``q`` is).

    ``dtype`` (fp16 or bf16) is that of the activations; scales are rounded to it. ``arch`` defaults
    to the device's ("cpu", or the GPU's "sm_..."); name one to pack for another. Peak extra memory
    beside the result: 128 MiB (see ``_CHUNK_CODES``). Raises ``ValueError`` if ``dtype`` is another
    one, or a scale is not finite, overflows or vanishes in it; of 4-bit floats, too, if rounding
    changes a scale or it is above the codec's ``largest_scale`` (a group whose weights are all zero
    gets scale 1 instead).
    """
    expect("q", q, QuantizedTensor, "a QuantizedTensor: quantize(w, format), or a checkpoint's quantized(name)")
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype}; accepted: {', '.join(map(str, DTYPES))}")
    if device is not None:
        q = q.to(device)
    layout = packed_layout(arch or arch_of(q.device), q.format)
    n_pad = layout.padded(q.n, q.k)[0]
    scales = fitting_scales(q.scales, q.format, dtype, lambda: q.codes)
    if q.row_scales is not None and not bool(torch.isfinite(q.row_scales).all()):
        raise ValueError("row_scales hold NaN or infinite values; accepted: finite ones: quantize the weight again")
    zeros = None
    if q.zeros is not None:
        held = q.zeros.to(getattr(torch, q.format.zero_dtype(str(dtype).removeprefix("torch."))))
        zeros = by_group(held, n_pad, OFFSET_ZERO if q.format.offset else 0)
    rows = None if q.row_scales is None else torch.nn.functional.pad(q.row_scales, (0, n_pad - q.n))
    return PackedWeight(
        weight=pack_codes(q.codes, layout),
        scales=by_group(scales, n_pad),
        zeros=zeros,
        n=q.n,
        k=q.k,
        format=q.format,
        dtype=dtype,
        arch=arch or arch_of(q.device),
        perm=q.perm,
        row_scales=rows,
        smooth=None if q.smooth is None else q.smooth.contiguous(),
    )


def fitting_scales(scales: Tensor, format: GemmFormat, dtype: torch.dtype, codes: Callable[[], Tensor]) -> Tensor:
    """``scales`` [n, groups] as kernels of ``dtype`` take them; ``codes`` [n, k] are asked for
    where some do not fit and their groups may be empty. Raises ``ValueError`` where kernels cannot
    take them."""
    if format.offset:
        return scales
    if not bool(torch.isfinite(scales).all()):
        raise ValueError("scales hold NaN or infinite values; accepted: finite ones: quantize the weight again")
    cast, largest = scales.to(getattr(torch, format.parameter_dtype(str(dtype).removeprefix("torch.")))), codec_of(format).largest_scale
    exact = format.weight.scales[0].of != ""
    if cast.dtype == scales.dtype and largest == inf:
        return cast
    lost = ~torch.isfinite(cast) | ((cast == 0) & (scales != 0))
    if exact:
        lost |= cast.float() != scales.float()
    large = cast.abs() > largest
    if exact and bool((lost | large).any()):
        nonzero = (numbers(codes(), format) != 0).float()
        n, groups = scales.shape
        padded = torch.nn.functional.pad(nonzero, (0, groups * format.group_size - nonzero.shape[1]))
        empty = padded.view(n, -1, format.group_size).amax(-1) == 0
        cast = torch.where(empty & (lost | large), 1.0, cast)
        lost, large = lost & ~empty, large & ~empty
    if bool(lost.any()):
        row, group = lost.nonzero()[0].tolist()
        raise ValueError(
            f"{int(lost.sum())} of the {scales.dtype} scales do not fit {dtype}, the first at [{row}, {group}]: "
            f"{float(scales[row, group]):g}; use "
            f"{torch.bfloat16 if dtype == torch.float16 else torch.float16} or quantize again with scale_dtype={dtype}"
        )
    if bool(large.any()):
        row, group = large.nonzero()[0].tolist()
        raise ValueError(
            f"{int(large.sum())} of the scales are above {largest:g}, the first at [{row}, {group}]: {float(scales[row, group]):g}; "
            f"kernels of {format.name} take scales up to {largest:g}: divide the scales by a power of two, and multiply y by it"
        )
    return cast


def arch_of(device: torch.device) -> str:
    """The arch whose kernels run on ``device``; raises ``ValueError`` for devices without one."""
    if device.type == "cpu":
        return "cpu"
    if device.type == "cuda":
        return target_from_capability(*torch.cuda.get_device_capability(device)).arch
    raise ValueError(f"device is {str(device)!r}; accepted: 'cpu', 'cuda'")


def pack_codes(codes: Tensor, layout: PackedLayout) -> Tensor:
    """uint8 [n, k] codes (below ``2 ** bits``) -> int32 ``layout.storage_shape(n, k)`` on the same
    device; 4 and 8 bits. Equals ``PackedLayout.pack``."""
    n, k = codes.shape
    storage = torch.empty(layout.storage_shape(n, k), dtype=torch.int32, device=codes.device)
    order = torch.from_numpy(layout.order.astype("int64").ravel()).to(codes.device)
    for part, rows, columns in _chunks(layout, n, k):
        block = codes[rows, columns]
        pad_n, pad_k = layout.padded(*block.shape)
        block = torch.nn.functional.pad(block, (0, pad_k - block.shape[1], 0, pad_n - block.shape[0]))
        block = block.view(pad_n // layout.tile_n, layout.tile_n, pad_k // layout.tile_k, layout.tile_k)
        block = block.permute(*((0, 2, 1, 3) if layout.outer == "n_major" else (2, 0, 1, 3))).reshape(-1, order.numel())
        if layout.bits == 4:
            data = block.index_select(1, order[1::2]).bitwise_left_shift_(4).bitwise_or_(block.index_select(1, order[0::2]))
        else:
            data = block.index_select(1, order)
        storage[part] = data.view(torch.int32).view(storage[part].shape)
    return storage


def unpack_words(words: Tensor, layout: PackedLayout, n: int, k: int) -> Tensor:
    """The inverse of ``pack_codes``: int32 words (any shape of the storage's size) -> uint8 [n, k]
    on the same device. Equals ``PackedLayout.unpack``."""
    shape = layout.storage_shape(n, k)
    if words.dtype != torch.int32 or words.numel() != shape[0] * shape[1] * shape[2]:
        raise ValueError(f"{layout.name}: got {words.dtype} {list(words.shape)} for a [{n}, {k}] weight; accepted: int32 {list(shape)}")
    words = words.contiguous().view(shape)
    inverse = torch.from_numpy(layout.inverse_order().astype("int64")).to(words.device)
    codes = torch.empty(n, k, dtype=torch.uint8, device=words.device)
    for part, rows, columns in _chunks(layout, n, k):
        data = words[part].reshape(-1, layout.words).view(torch.uint8)
        if layout.bits == 4:
            data = torch.stack((data & 15, data >> 4), dim=-1).view(len(data), -1)
        data = data.index_select(1, inverse).view(*words[part].shape[:2], layout.tile_n, layout.tile_k)
        data = data.permute(*((0, 2, 1, 3) if layout.outer == "n_major" else (1, 2, 0, 3)))
        target = codes[rows, columns]
        data = data.reshape(data.shape[0] * layout.tile_n, data.shape[2] * layout.tile_k)
        target.copy_(data[: target.shape[0], : target.shape[1]])
    return codes


def row_places(layout: PackedLayout) -> Tensor:
    """int64 [tile_n, tile_k]: in which slot of a tile the codes of each of its rows lie."""
    return torch.from_numpy(layout.inverse_order().astype("int64")).view(layout.tile_n, layout.tile_k)


def unpack_rows(words: Tensor, layout: PackedLayout, places: Tensor, rows: Tensor, k: int) -> Tensor:
    """uint8 [len(rows), k]: of what ``unpack_words`` gives those with the numbers ``rows`` int64, and nothing else
    is read. ``words`` int32 in ``layout.storage_shape``, ``places`` as ``row_places(layout)``, all on one device.
    4 and 8 bits; nothing is checked."""
    data, count = words.view(torch.uint8), rows.shape[0]
    across = torch.arange(-(-k // layout.tile_k), device=words.device)[:, None]
    tile, place = (rows // layout.tile_n)[:, None, None], places[rows % layout.tile_n][:, None]
    byte = place if layout.bits == 8 else place >> 1
    codes = data[tile, across, byte] if layout.outer == "n_major" else data[across, tile, byte]
    if layout.bits == 4:
        codes = torch.where(place & 1 == 1, codes >> 4, codes & 15)
    return codes.reshape(count, across.shape[0] * layout.tile_k)[:, :k]


def _chunks(layout: PackedLayout, n: int, k: int) -> list[tuple[slice, slice, slice]]:
    """(storage rows, code rows, code columns) of pieces of about ``_CHUNK_CODES`` codes, cut along
    the storage's first axis; 4 and 8 bits only."""
    if layout.bits not in (4, 8):
        raise ValueError(f"{layout.name} has {layout.bits} bits; accepted here: 4, 8")
    pad_n, pad_k = layout.padded(n, k)
    tile, across = (layout.tile_n, pad_k) if layout.outer == "n_major" else (layout.tile_k, pad_n)
    step = max(1, _CHUNK_CODES // (tile * across))
    pieces = []
    for start in range(0, layout.storage_shape(n, k)[0], step):
        inside, whole = slice(start * tile, (start + step) * tile), slice(None)
        pieces.append((slice(start, start + step), *((inside, whole) if layout.outer == "n_major" else (whole, inside))))
    return pieces


def by_group(values: Tensor, n_pad: int, fill: int = 0) -> Tensor:
    """[n, groups] -> contiguous [groups, n_pad], padded with ``fill``."""
    padded = torch.full((values.shape[1], n_pad), fill, dtype=values.dtype, device=values.device)
    padded[:, : values.shape[0]] = values.t()
    return padded
