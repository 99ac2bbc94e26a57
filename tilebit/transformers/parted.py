"""Layers of a fused step whose product does by itself what stands before and behind it, where it is asked
to and can: one kernel instead of two or three."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal, get_args

from torch import Tensor, nn

from ..ops.dispatch import DTYPE_NAMES, Plan, plan_for
from ..ops.gemm import gemm
from ..ops.prepare import Preparation, prepare
from ..schedules.gemm.parts import HALVES
from ..schedules.gemm.stream import MAX_M
from ..schedules.gemm.workload import Workload
from ..schedules.operations import candidates
from ..schedules.target import target_from_name
from ..weights.any_modules import AnyPrecisionLinear
from ..weights.mixed import MixedLinear
from ..weights.modules import QuantLinear
from .anatomy import Norm

Part = Literal["residual", "gate", "norm"]
PARTS: tuple[Part, ...] = get_args(Part)
# What a step's products do where nothing else is asked for, up to MAX_M rows of x: the streaming programs serve
# those. A step of an 8B model with the gate takes 1.61 and 2.47 ms at 1 and 16 sequences, without 1.69 and
# 2.54, but at 64, where tiles are larger, 5.45 and 5.38 (4 bits, a 4-bit cache of 4096 tokens, H200, by weights
# whose rows of gate and up lay in turn; as they are now 1.63 and 2.52, not beside the same without). The other
# parts save nothing that shows (results/notes/step-parts.md).
BY_DEFAULT: tuple[Part, ...] = ("gate",)
Rows = Tensor | tuple[Tensor, Tensor]  # of x, or codes of it with their scales


class Parted(nn.Module):
    """The product of ``layer``, launched before its predecessor ends, that ``does`` one part or several: adds to
    a residual, applies the gate ``activation`` to the first half of its channels, norms x by ``norm``: the last
    two of up to 16 rows of x."""

    def __init__(self, layer: QuantLinear, does: Collection[Part], norm: Norm | None, activation: str) -> None:
        super().__init__()
        self.layer, self.does = layer, frozenset(does)
        self.norm, self.activation = norm, activation if "gate" in self.does else ""
        self._packed = layer.packed

    @property
    def x_group(self) -> int | None:
        """As the layer's."""
        return self.layer.x_group

    @property
    def smooth(self) -> Tensor | None:
        """As the layer's."""
        return self.layer.smooth

    def norms(self, rows: int) -> bool:
        """Whether it norms so many rows of x: of more, every 16 would read the weight again."""
        return "norm" in self.does and rows <= MAX_M

    def gates(self, rows: int) -> bool:
        """Whether it applies the gate to what so many rows of x make: as ``norms``."""
        return "gate" in self.does and rows <= MAX_M

    def forward(self, x: Tensor) -> Tensor:
        """y of x, which is normed here where ``norms`` says so."""
        return self._product(x)

    def of_codes(self, codes: Tensor, token_scales: Tensor) -> Tensor:
        return self._product((codes, token_scales))

    def add(self, rows: Rows, residual: Tensor) -> None:
        """Add y to ``residual`` where it lies."""
        self._product(rows, residual)

    def _product(self, rows: Rows, residual: Tensor | None = None) -> Tensor:
        x, token_scales = (rows, None) if isinstance(rows, Tensor) else rows
        norm, gates = self.norm if self.norms(len(x)) else None, self.gates(len(x))
        return gemm(
            x, self._packed, self.layer.bias, True, token_scales, residual=residual, inplace=residual is not None,
            gate=self.activation if gates else None, gate_halves=gates, norm_weight=None if norm is None else norm.weight,
            eps=0.0 if norm is None else norm.eps,
        )  # fmt: skip

    def plan(self, rows: int) -> Plan | None:
        """Of calls with so many rows; None where these are the layer's own."""
        p, w = self._packed, self.workload(rows)
        if not w.residual and not w.gate and not w.norm:
            return None
        norm = {"norm": True, "eps": w.eps} if w.norm else {}
        return plan_for(
            p.device, p.n, p.k, p.format_name, p.dtype, w.bias, True, residual=w.residual, gate=w.gate, gate_halves=w.gate_halves, **norm
        )

    def workload(self, rows: int) -> Workload:
        """Of calls with so many rows."""
        p, gates, norm = self._packed, self.gates(rows), self.norm if self.norms(rows) else None
        return Workload(
            rows, p.n, p.k, p.format, DTYPE_NAMES[p.dtype], self.layer.bias is not None, residual="residual" in self.does,
            gate=self.activation if gates else "", gate_halves=gates, norm=norm is not None, eps=0.0 if norm is None else float(norm.eps),
            dependent=True,
        )  # fmt: skip


def parts_of(products: Iterable[nn.Module], rows: int) -> tuple[Part, ...]:
    """Those that some of ``products`` does of so many rows of x."""
    done = {part for product in products if isinstance(product, Parted) for part in product.does if part == "residual" or rows <= MAX_M}
    return tuple(part for part in PARTS if part in done)


def parted(layer: nn.Module, asked: Collection[Part], norm: Norm | None = None) -> nn.Module:
    """``layer`` with those of the parts ``asked`` that it allows ("residual", "norm"): each those of a ``QuantLinear``,
    a norm of one with x of 16 bits in its own order, whose weight is added to nothing."""
    if type(layer) is not QuantLinear:
        return layer
    unable = layer.packed.takes_codes or layer.packed.perm is not None or norm is None or norm.offset
    does = [part for part in asked if part == "residual" or (part == "norm" and not unable)]
    return Parted(layer, does, norm, "") if does else layer


def gated(layer: nn.Module, asked: Collection[Part], norm: Norm, activation: str) -> nn.Module:
    """``layer``, gate and up side by side, that applies the gate where it can, and norms x where it is asked to
    and can: its weight is the layer's own."""
    found = parted(layer, asked, norm)
    if type(layer) is not QuantLinear or not _gates(layer, activation):
        return found
    return Parted(layer, {"gate", *(found.does if isinstance(found, Parted) else ())}, norm, activation)


def prepared(products: Iterable[nn.Module], sizes: Sequence[int]) -> None:
    """Have the kernels of calls with ``sizes`` rows ready, of layers of any precision those of the widths that
    they are set to. Raises ``KernelUnavailable``."""
    products = list(products)
    for few in (True, False):
        rows = [m for m in sizes if (m <= MAX_M) == few]
        if not rows:
            continue
        plans = {product: product.plan(rows[0]) for product in products if isinstance(product, Parted)}
        own = [product for product in products if plans.get(product) is None]
        kinds = (QuantLinear, MixedLinear, AnyPrecisionLinear)
        quantized = nn.ModuleList(p for p in own if any(isinstance(layer, kinds) for layer in p.modules()))
        if len(quantized):
            prepare(quantized, rows)
        Preparation(list(dict.fromkeys(plan for plan in plans.values() if plan is not None)), rows).wait()


def _gates(layer: QuantLinear, activation: str) -> bool:
    """Whether a program gates the second half of its weight by the first."""
    p = layer.packed
    if p.n % HALVES:
        return False
    workload = Workload(1, p.n, p.k, p.format, DTYPE_NAMES[p.dtype], layer.bias is not None, gate=activation, gate_halves=True)
    return bool(candidates(workload, target_from_name(p.arch)))
