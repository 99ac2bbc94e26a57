"""Layers of a fused step whose product does by itself what stands before and behind it, where it is asked
to and can: one kernel instead of two or three."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ..ops.dispatch import Plan, plan_for
from ..ops.gemm import gemm
from ..ops.prepare import Preparation, prepare
from ..schedules.gemm.parts import GATE_ROWS
from ..schedules.gemm.stream import MAX_M
from ..weights.gated import in_turn, interleaved, rows_of
from ..weights.mixed import MixedLinear
from ..weights.modules import QuantLinear
from .anatomy import Norm

Part = Literal["residual", "gate", "norm"]
PARTS: tuple[Part, ...] = get_args(Part)
Rows = Tensor | tuple[Tensor, Tensor]  # of x, or codes of it with their scales


class Parted(nn.Module):
    """The product of ``layer``, launched before its predecessor ends, that ``does`` one part or several: adds to
    a residual, applies the gate ``activation`` (then the rows of its weight lie in turn), norms x by
    ``norm``."""

    def __init__(self, layer: QuantLinear, does: Collection[Part], norm: Norm | None, activation: str) -> None:
        super().__init__()
        self.layer, self.does = layer, frozenset(does)
        self.norm, self.activation = norm, activation if "gate" in self.does else ""
        self._packed = layer.packed

    @property
    def x_group(self) -> int | None:
        """As the layer's."""
        return self.layer.x_group

    def norms(self, rows: int) -> bool:
        """Whether it norms so many rows of x: of more, every 16 would read the weight again."""
        return "norm" in self.does and rows <= MAX_M

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
        norm = self.norm if self.norms(len(x)) else None
        return gemm(
            x, self._packed, self.layer.bias, True, token_scales, residual=residual, inplace=residual is not None,
            gate=self.activation or None, norm_weight=None if norm is None else norm.weight, eps=0.0 if norm is None else norm.eps,
        )  # fmt: skip

    def plan(self, rows: int) -> Plan | None:
        """Of calls with so many rows; None where these are the layer's own."""
        p, norm = self._packed, {"norm": True, "eps": float(self.norm.eps)} if self.norm is not None and self.norms(rows) else {}
        if not norm and self.does <= {"norm"}:
            return None
        return plan_for(
            p.device, p.n, p.k, p.format_name, p.dtype, self.layer.bias is not None, True, residual="residual" in self.does,
            gate=self.activation, **norm,
        )  # fmt: skip


def parted(layer: nn.Module, asked: Collection[Part], norm: Norm | None = None) -> nn.Module:
    """``layer`` with those of the parts ``asked`` that it allows ("residual", "norm"): each those of a ``QuantLinear``,
    a norm of one with x of 16 bits in its own order, whose weight is added to nothing."""
    if type(layer) is not QuantLinear:
        return layer
    unable = layer.packed.takes_codes or layer.packed.perm is not None or norm is None or norm.offset
    does = [part for part in asked if part == "residual" or (part == "norm" and not unable)]
    return Parted(layer, does, norm, "") if does else layer


def gated(layers: Sequence[nn.Module], asked: Collection[Part], norm: Norm, activation: str) -> nn.Module | None:
    """Gate and up, ``layers``, or one layer of both, as one product that applies the gate, and norms x where it
    is asked to and can. None where they do not make one. Its weight is a copy of theirs."""
    layer = _in_turn(layers)
    if layer is None:
        return None
    also = parted(layer, asked, norm)
    return Parted(layer, {"gate", *(also.does if isinstance(also, Parted) else ())}, norm, activation)


def prepared(products: Iterable[nn.Module], sizes: Sequence[int]) -> None:
    """Have the kernels of calls with ``sizes`` rows ready. Raises ``KernelUnavailable``."""
    products = list(products)
    for few in (True, False):
        rows = [m for m in sizes if (m <= MAX_M) == few]
        if not rows:
            continue
        plans = {product: product.plan(rows[0]) for product in products if isinstance(product, Parted)}
        own = [product for product in products if plans.get(product) is None]
        quantized = nn.ModuleList(p for p in own if any(isinstance(layer, QuantLinear | MixedLinear) for layer in p.modules()))
        if len(quantized):
            prepare(quantized, rows)
        Preparation(list(dict.fromkeys(plan for plan in plans.values() if plan is not None)), rows).wait()


def _in_turn(layers: Sequence[nn.Module]) -> QuantLinear | None:
    """Gate and up as one layer whose rows lie in turn."""
    held = [layer for layer in layers if type(layer) is QuantLinear]
    if len(held) != len(layers) or len({layer.bias is None for layer in held}) > 1 or len(held) > 2:
        return None
    packed = [layer.packed for layer in held]
    n = sum(p.n for p in packed) // 2
    if n % GATE_ROWS:
        return None
    biases = [bias for layer in held if (bias := layer.bias) is not None]
    if len(held) == 1:
        order = in_turn(*torch.arange(2 * n, device=packed[0].device).chunk(2))
        return QuantLinear(rows_of(packed[0], order), *(bias[order] for bias in biases), dependent=True)
    try:
        weight = interleaved(*packed)
    except ValueError:  # of two formats, or orders of x
        return None
    return QuantLinear(weight, in_turn(*biases) if biases else None, True)
