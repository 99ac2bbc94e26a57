"""What follows a product, as values: a list of parts, which every program applies without knowing
which they are.

A part changes the fp32 sums before they are rounded and stored: each is multiplied by, or increased
by, the number of an operand that belongs to its output channel. A new part is a line of ``_known``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...layouts.formats import PER_CHANNEL
from ..operands import Operand

if TYPE_CHECKING:
    from .workload import Workload

SCALES = "scales"  # per-channel ones are a part; those of groups are the weight's own, and the same operand


@dataclass(frozen=True, slots=True)
class Part:
    """``operand`` [n], of ``dtype``: what each sum is to be done with ("multiply", "add").

    ``axis`` says which index of y [m, n] is that of the operand: "n", the output channel (rows of x
    will be "m"). ``packed``: it belongs to the packed weight and is padded as that is.
    """

    operand: str
    does: str
    dtype: str
    axis: str = "n"
    packed: bool = True


def _known(w: Workload) -> tuple[tuple[Part, bool], ...]:
    """All parts in the order in which they are applied, and whether products of ``w`` have them."""
    return (
        (Part(SCALES, "multiply", w.dtype), w.format.group_size == PER_CHANNEL),
        (Part("row_scales", "multiply", "float32"), w.format.row_scaled),
        (Part("bias", "add", w.dtype, packed=False), w.bias),
    )


def parts(workload: Workload, applied: Collection[str] = ()) -> tuple[Part, ...]:
    """What follows a product of ``workload``, in order, but for the parts whose operands are
    ``applied`` in the program's loop."""
    return tuple(part for part, there in _known(workload) if there and part.operand not in applied)


def part_operands(workload: Workload, n_pad: int, packing: str) -> tuple[Operand, ...]:
    """The operands that only parts read, in call order, absent ones too. ``n_pad``: n of the packed
    weight; ``packing`` is advice on what belongs to it."""
    return tuple(
        Operand(
            part.operand, part.dtype, (n_pad if part.packed else workload.n,), optional=True, absent=not there,
            advice=packing if part.packed else f"pass {workload.n} values in x's dtype",
        )
        for part, there in _known(workload) if part.operand != SCALES
    )  # fmt: skip
