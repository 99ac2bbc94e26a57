"""What follows a product, as values: a list of parts, which every program applies without knowing
which they are.

A part changes the fp32 sums before they are rounded and stored: each is multiplied by, or increased
by, the number of an operand that belongs to its output channel, to its row of x, or to it alone (the
residual stream, to which y is added: it may lie where y is written); or it says where
they are stored: in which column of y, by the index of its output channel. So is what
precedes a product and is the same for a whole row: a norm, whose weights are folded into those of
the product, is ``token_scales``, 1 / rms of each row. A new part is a line of ``_known``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ...layouts.formats import PER_CHANNEL
from ..operands import Operand

if TYPE_CHECKING:
    from .workload import Workload

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")  # of a gate: GELU approximated by tanh, and exact
GATE_ROWS = 8  # of the weight that are gates, which are followed by as many that they gate: a thread of an MMA's result holds a row of both
HALVES = 64  # of such rows is n a multiple where gates are its first half: each half is whole tiles of 32 rows, or two of 16
TOKEN_SCALES = "token_scales"  # those of rows are a part; those of groups of x are applied to the groups' sums
CHANNELS = "channels"  # of products that store by an index: the column of y of each output channel, or one of these two
ADDED = -1  # of a row GATE_ROWS behind another of its 16: what it makes is added to what that one makes, in fp32
NIBBLE = 16  # what a high nibble counts
NOWHERE = -2  # of a row that pads: it is not stored (nor is any other number that is no column of y)
RESIDUAL = "residual"  # of products that are added to what has y's shape
SCALES = "scales"  # per-channel ones are a part; those of groups, and codebooks, are the weight's own, and the same operand


@dataclass(frozen=True, slots=True)
class Part:
    """``operand``, of ``dtype``: what each sum is to be done with ("multiply", "add"), or where it is
    to be stored ("place").

    ``axis`` says which index of y [m, n] is that of the operand: "n", the output channel, "m", the
    row of x, or "mn", both. ``packed``: it belongs to the packed weight and is padded as that is.
    """

    operand: str
    does: str
    dtype: str
    axis: str = "n"
    packed: bool = True


def _known(w: Workload) -> tuple[tuple[Part, bool], ...]:
    """All parts in the order in which they are applied, and whether products of ``w`` have them."""
    return (
        (Part(SCALES, "multiply", w.format.parameter_dtype(w.dtype)), w.format.group_size == PER_CHANNEL and not w.format.codebook),
        (Part("row_scales", "multiply", "float32"), w.format.row_scaled),
        (Part(TOKEN_SCALES, "multiply", "float32", axis="m", packed=False), w.token_scales),
        (Part("bias", "add", w.dtype, packed=False), w.bias),
        (Part(RESIDUAL, "add", w.dtype, axis="mn", packed=False), w.residual),
        (Part(CHANNELS, "place", "int32", packed=False), w.width > 0),
    )


def parts(workload: Workload, applied: Collection[str] = ()) -> tuple[Part, ...]:
    """What follows a product of ``workload``, in order, but for the parts whose operands are
    ``applied`` in the program's loop."""
    return _parts(workload, tuple(applied))


@lru_cache(maxsize=4096)
def _parts(workload: Workload, applied: tuple[str, ...]) -> tuple[Part, ...]:
    grouped = (TOKEN_SCALES,) if workload.format.x_grouped else ()
    return tuple(part for part, there in _known(workload) if there and part.operand not in (*applied, *grouped))


def part_operands(w: Workload, n_pad: int, packing: str) -> tuple[Operand, ...]:
    """The operands that only parts read, in call order, absent ones too, but for token scales, a
    residual and channels: those are operands of the workloads that have them. ``n_pad``: n of the
    packed weight; ``packing`` is advice on what belongs to it."""
    return tuple(
        Operand(part.operand, part.dtype, _shape(part, w, n_pad), optional=True, absent=not there, advice=_advice(part, w, packing))
        for part, there in _known(w)
        if part.operand != SCALES and (there or (part.axis == "n" and part.does != "place"))
    )


def _shape(part: Part, w: Workload, n_pad: int) -> tuple[int | str, ...]:
    if part.axis == "mn":
        return ("m", w.columns)
    if part.axis == "m":
        return (w.format.groups(w.k), "m") if w.format.x_grouped else ("m",)
    return (n_pad if part.packed else w.n,)


def _advice(part: Part, w: Workload, packing: str) -> str:
    if part.axis == "m" and w.format.x_grouped:
        group = w.format.x_group
        return f"pass a value for each group of {group} of each row of x: tilebit.quantize_activations(x, group={group})"
    if part.does == "place":
        return f"pass the column of y, 0 to {w.width - 1}, of each row of the weight, or {ADDED} or {NOWHERE}, in {part.dtype}"
    if part.axis == "mn":
        return f"pass what y is added to, of y's shape, in {part.dtype}"
    whose = "a value for each row of x" if part.axis == "m" else "a value for each output channel"
    return packing if part.packed else f"pass {whose} in {part.dtype}"
