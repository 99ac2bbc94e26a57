"""A problem: operands of a GEMM on the device, packed as the kernels read them, and the answer that it
must give. ``gemm_drawn.py`` makes them.

Weights are random words of the packed layout (random words are random codes), unpacked tile by tile
for the reference: so a problem of any size is made on its device in one pass and nothing of the
size of an unpacked weight is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...layouts.formats import PER_CHANNEL
from ...layouts.packing import PackedLayout
from ...layouts.planes import layout_of
from ...schedules.gemm import rules as rules
from ...schedules.gemm.parts import ADDED, CHANNELS, GATE_ROWS, RESIDUAL, TOKEN_SCALES
from ...schedules.gemm.workload import Workload
from ...schedules.operations import AnyWorkload, workspace_words
from ...schedules.schedule import Schedule
from ...schedules.target import Target

NORM_WEIGHT, NORM_WEIGHTS = "norm_weight", 2  # its largest number in the exact problem
# Relative, of a sum of e4m3 on tensor cores, times the root of k: of 33 numbers at a time each loses what is below
# 2^-13 of the largest one (k = 4096: 0.0020; a Hopper's, measured on other libraries' kernels: 0.0021).
SHORT_SUM_ERROR = 2.0**-15
_NAN_BITS = 0x7FFFFFFF  # of a float32
_BEHIND = 1 << 16  # words behind a workspace that no kernel may write
CHUNK_ELEMENTS = 1 << 24  # weights dequantized at once for a reference (128 MiB in fp64)


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """One GEMM with its operands on a device.

    ``x`` is [m, k] in the workload's dtype, or int8 codes where the format says so; ``operands``
    holds ``weight`` int32 (packed), ``scales`` [groups, n_pad] (or codebooks [n_pad, 2^bits]), ``zeros`` [groups, n_pad]
    (asymmetric formats; of two integer levels the offsets), ``row_scales`` fp32
    [n_pad] (formats of two levels of scales), ``token_scales`` fp32 [m], or [groups, m]
    where groups of x have scales, ``bias`` [n], ``residual`` [m, n], ``norm_weight`` as wide as kernels
    read x, and ``channels`` int32 [n], some columns of y in
    any order, ADDED and NOWHERE (if the workload has them), as the kernels take them. Padding codes and scales are 0.
    """

    workload: Workload
    layout: PackedLayout
    x: Tensor
    operands: dict[str, Tensor]

    def named(self, y: Tensor) -> dict[str, Tensor]:
        """The tensors of a call on the first ``len(y)`` rows of x, which writes to ``y``, by the
        names of a kernel's parameters."""
        rows = {TOKEN_SCALES: (..., slice(y.shape[0])), RESIDUAL: (slice(y.shape[0]),)}
        held = {name: self.operands[name][of].contiguous() for name, of in rows.items() if name in self.operands}
        return {**self.operands, **held, "x": self.x[: y.shape[0]], "y": y}

    def outputs(self) -> Tensor:
        """A new y [m, n], or as wide as the workload says, to write to."""
        return torch.empty(self.workload.m, self.workload.columns, dtype=self._dtype, device=self.x.device)

    @property
    def units(self) -> int:
        """In the last place that a right kernel's y may be off, of sums that are exact."""
        return 1 if self.workload.gate else 0

    @property
    def sums_error(self) -> float:
        """Relative error of sums that a right kernel may make, beyond what rounding y is."""
        return SHORT_SUM_ERROR * self.workload.k**0.5 if self.workload.format.short_sums else 0.0

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self.workload.dtype)

    def reference(self) -> Tensor:
        """y = (x @ w^T) * token_scales (or a norm's factors) + bias + residual in fp64, [m, n], or of a gate [m, n / 2], or as
        wide as the workload says: then NaN where nothing is written."""
        return self._placed(self._gated(self._product(torch.float64)))

    def torch_result(self) -> Tensor:
        """The same product as torch computes it in the workload's dtype on the dequantized weight
        (of int8 x in fp32, and rounded), as ``reference``."""
        product = self._product(torch.float32) if self.workload.format.x else self._product(self._dtype)
        if self.workload.gate or self.workload.width:  # which are computed of unrounded sums
            return self._placed(self._gated(product.float())).to(self._dtype)
        return product.to(self._dtype)

    def dequantized(self) -> Tensor:
        """The weight [n, k] in the workload's dtype, as an unquantized model would hold it."""
        return self._weight_rows(0, self.workload.n, torch.float32).to(self._dtype)

    def copied(self) -> Problem:
        """The same problem in other memory: rotating over copies keeps caches from holding the
        operands."""
        return Problem(self.workload, self.layout, self.x.clone(), {name: t.clone() for name, t in self.operands.items()})

    def floats(self, dtype: torch.dtype) -> Tensor:
        """x [m, k] in ``dtype``, of codes what they stand for."""
        x, w = self.x.to(dtype), self.workload
        if not w.format.x:
            return x
        scales = self.operands[TOKEN_SCALES].to(dtype)
        return x * (_per_column(scales, w.format.x_group, w.k, dtype) if w.format.x_grouped else scales[:, None])

    def _gated(self, product: Tensor) -> Tensor:
        """Of the product [m, n] activation(gate) * up [m, n / 2], in its dtype."""
        w = self.workload
        if not w.gate:
            return product
        gate, up = product.chunk(2, -1) if w.gate_halves else product.view(len(product), -1, 2, GATE_ROWS).unbind(2)
        return (activated(gate, w.gate) * up).reshape(len(product), w.columns)

    def _placed(self, product: Tensor) -> Tensor:
        if not self.workload.width:
            return product
        channels = self.operands[CHANNELS].long()
        added = (channels == ADDED).nonzero().flatten()
        product[:, added - GATE_ROWS] += product[:, added]
        stored = ((channels >= 0) & (channels < self.workload.width)).nonzero().flatten()
        y = product.new_full((len(product), self.workload.width), float("nan"))
        return y.index_copy_(1, channels[stored], product[:, stored])

    def _product(self, dtype: torch.dtype) -> Tensor:
        w = self.workload
        x = self.floats(dtype) if w.format.x_grouped else self.x.to(dtype)
        if w.norm:
            x = (self.x * self.operands[NORM_WEIGHT][: w.k]).to(dtype)
        y = torch.empty(w.m, w.n, dtype=dtype, device=x.device)
        rows = max(1, CHUNK_ELEMENTS // (self.layout.tile_n * w.k)) * self.layout.tile_n
        for start in range(0, w.n, rows):
            stop = min(start + rows, w.n)
            y[:, start:stop] = x @ self._weight_rows(start, stop, dtype).t()
        if w.token_scales and not w.format.x_grouped:
            y *= self.operands[TOKEN_SCALES][:, None].to(dtype)
        if w.norm:
            square = self.x.double().square().mean(-1, keepdim=True).float() + w.eps
            y *= square.double().rsqrt().float().to(dtype)
        if "bias" in self.operands:
            y += self.operands["bias"].to(dtype)
        if RESIDUAL in self.operands:
            y += self.operands[RESIDUAL].to(dtype)
        return y

    def _weight_rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """(number of q - z) * s (* row scale) of rows ``start`` (a multiple of tile_n) to ``stop``,
        [stop - start, k], in ``dtype``."""
        w, first = self.workload, start // self.layout.tile_n
        last = -(-stop // self.layout.tile_n)
        if w.format.codebook:
            codes = unpack_planes(self.operands["weight"][:, first:last], self.layout)[: stop - start, : w.k]
            return self.operands["scales"][start:stop].to(dtype).gather(1, codes.long())
        codes = unpack_tiles(self.operands["weight"][first:last], self.layout)[: stop - start, : w.k]
        numbers = codes.to(dtype) if w.format.integer else codes.new_tensor(w.format.weight.values, dtype=dtype)[codes.int()]
        group = w.k if w.format.group_size == PER_CHANNEL else w.format.group_size
        scales = _per_column(self.operands["scales"][:, start:stop], group, w.k, dtype)
        zeros = None if w.format.symmetric else _per_column(self.operands["zeros"][:, start:stop], group, w.k, dtype)
        rows = self.operands["row_scales"][start:stop, None] if w.format.row_scaled else None
        return w.format.weight_of(numbers, scales, zeros, rows).to(dtype)


def activated(gate: Tensor, activation: str) -> Tensor:
    """``activation`` of ``gate``, in its dtype."""
    if activation == "gelu":
        return gate * (0.5 * torch.erfc(gate * -(0.5**0.5)))
    inner = gate if activation == "silu" else 2 * (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)  # 1 + tanh(..) would cancel
    return gate * torch.sigmoid(inner)


def _per_column(parameters: Tensor, group: int, k: int, dtype: torch.dtype) -> Tensor:
    """[groups, rows] -> [rows, k], each group's value repeated over its columns."""
    return parameters.t().to(dtype).repeat_interleave(group, dim=1)[:, :k]


def unpack_tiles(words: Tensor, layout: PackedLayout) -> Tensor:
    """int32 [tiles_n, tiles_k, words] of an n-major layout -> uint8 [tiles_n * tile_n, tiles_k *
    tile_k]."""
    if layout.outer != "n_major":
        raise ValueError(f"{layout.name}: tiles are stored {layout.outer}; accepted here: n_major")
    tiles_n, tiles_k, _ = words.shape
    shifts = torch.arange(0, 32, layout.bits, dtype=torch.int32, device=words.device)
    codes = (words.unsqueeze(-1) >> shifts & ((1 << layout.bits) - 1)).to(torch.uint8).view(tiles_n, tiles_k, -1)
    inverse = torch.from_numpy(layout.inverse_order()).to(words.device, torch.int64)
    codes = codes.index_select(2, inverse).view(tiles_n, tiles_k, layout.tile_n, layout.tile_k)
    return codes.transpose(1, 2).reshape(tiles_n * layout.tile_n, tiles_k * layout.tile_k)


def unpack_planes(planes: Tensor, layout: PackedLayout) -> Tensor:
    """int32 [bits, tiles_n, tiles_k, words], the highest bits first -> uint8 codes [tiles_n *
    tile_n, tiles_k * tile_k]."""
    codes = unpack_tiles(planes[0], layout)
    for number, plane in enumerate(planes[1:], 1):
        codes = codes << 1 | unpack_tiles(plane, layout_of(layout, number))
    return codes


def split_workspace(workload: AnyWorkload, schedule: Schedule, target: Target, device: str) -> dict[str, Tensor]:
    """``workspace`` int32 [words] for a kernel whose blocks share a sum: zero tickets, then partial
    sums, which start as NaN: one that is read before it is written shows. Memory behind it is its
    own, too (``strayed``). Empty for a kernel that takes none."""
    words = workspace_words(workload, schedule, target)
    if words == 0:
        return {}
    memory = torch.full((words + _BEHIND,), _NAN_BITS, dtype=torch.int32, device=device)
    memory[: rules.TICKETS] = 0
    return {"workspace": memory[:words]}


def strayed(workspace: dict[str, Tensor]) -> bool:
    """Whether something was written behind what ``split_workspace`` gave."""
    behind = [tensor.as_strided((_BEHIND,), (1,), tensor.numel()) for tensor in workspace.values()]
    return any(bool((memory != _NAN_BITS).any()) for memory in behind)
