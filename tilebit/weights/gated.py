"""A gate's weight and that of what it gates as one, whose product applies the gate itself."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..schedules.gemm.parts import GATE_ROWS
from .mixed_tensor import same_numbers
from .packed import PackedWeight, pack


def interleaved(gate: PackedWeight, up: PackedWeight) -> PackedWeight:
    """The weight [2 n, k] of ``tilebit.gemm(x, weight, gate="silu")`` of two [n, k]: eight rows of
    ``gate``, eight of ``up``, and so on, so that a thread of an MMA's result holds a gate and what it
    gates. ``in_turn`` makes one bias of two.

    Codes, scales and zero points are those of the two, packed anew: nothing is rounded. Raises
    ``ValueError`` where they differ in n, k, format, dtype, device, order of columns or factors of x, n is
    no multiple of 8, or the format has codebooks.
    """
    for name in ("n", "k", "format_name", "dtype", "device", "arch"):
        if getattr(gate, name) != getattr(up, name):
            raise ValueError(f"{name} of gate is {getattr(gate, name)} and of up {getattr(up, name)}; accepted: the same")
    if not same_numbers([gate.smooth, up.smooth]):
        raise ValueError("gate and up multiply the columns of x by different factors (smooth); accepted: the same factors, or none")
    if not same_numbers([gate.perm, up.perm]):
        raise ValueError("gate and up read the columns of x in different orders (perm); accepted: the same order, or none")
    both, parts = gate.unpack(), up.unpack()
    found = {name: (getattr(both, name), getattr(parts, name)) for name in ("codes", "scales", "zeros", "row_scales")}
    rows = {name: in_turn(*two) for name, two in found.items() if two[0] is not None}
    return pack(replace(both, **rows), gate.dtype, arch=gate.arch)


def in_turn(gate: Tensor, up: Tensor) -> Tensor:
    """Eight rows of ``gate`` [n, ...], eight of ``up``, and so on. Raises ``ValueError`` where shapes
    differ or n is no multiple of 8."""
    if gate.shape != up.shape or gate.shape[0] % GATE_ROWS:
        raise ValueError(
            f"gate has shape {list(gate.shape)} and up {list(up.shape)}; accepted: the same, of a multiple of {GATE_ROWS} rows"
        )
    return torch.stack([part.unflatten(0, (-1, GATE_ROWS)) for part in (gate, up)], 1).flatten(0, 2)
