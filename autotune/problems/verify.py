"""The gate in front of every measurement: is this kernel right?

Three checks, none of which a plausible-looking wrong kernel passes: the exact oracle
(``torch.equal`` against fp64, so wrong and rounded never mix), the worst tile on random floats (the
largest relative error of a 128 x 128 block, at most twice that of torch in the same precision: a
lost tile hides in a global norm), and NaN-poisoned outputs between guard bands (an unwritten
element stays NaN, a stray write breaks a guard)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from ...schedules.gemm.workload import Workload
from . import Verdict
from .gemm_drawn import exact_problem, random_problem

TILE = 128
TORCH_FACTOR = 2.0
GUARD_ELEMENTS = 4096
NOTHING = 1e-30  # what may as well be 0 where a number need not be exact: fp32 activations end there
# Quiet NaNs with a payload no computation makes, in integers of a type's size; of 8-bit codes those
# that quantization does not store (-128, and e4m3's NaN).
_POISON = {
    torch.float16: (torch.int16, 0x7E5A),
    torch.bfloat16: (torch.int16, 0x7FDA),
    torch.float32: (torch.int32, 0x7FDA5A5A),
    torch.int32: (torch.int32, 0x7FDA5A5A),
    torch.int8: (torch.int8, -128),
    torch.float8_e4m3fn: (torch.int8, -1),
}


@dataclass(frozen=True, slots=True, eq=False)
class GuardedOutput:
    """``y``, all NaN, inside ``buffer``, whose ends are guard bands of ``GUARD_ELEMENTS`` NaNs with
    a payload."""

    y: Tensor
    buffer: Tensor


def guarded_output(shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device = "cpu") -> GuardedOutput:
    """A contiguous NaN output of ``shape`` in fp16, bf16 or fp32 (int32: the bits of fp32's NaNs; 8-bit
    codes: one that is never stored) between guard bands; its first element is as aligned as a fresh allocation's."""
    if dtype not in _POISON:
        raise ValueError(f"dtype is {dtype}; accepted: {', '.join(map(str, _POISON))}")
    elements, (integers, poison) = prod(shape), _POISON[dtype]
    buffer = torch.full((elements + 2 * GUARD_ELEMENTS,), poison, dtype=integers, device=device)
    y = buffer[GUARD_ELEMENTS : GUARD_ELEMENTS + elements].view(dtype).view(shape)
    return GuardedOutput(y, buffer)


def check_guards(output: GuardedOutput) -> list[str]:
    """Sentences about guard elements that were written; empty when none was."""
    elements, (_, poison) = output.y.numel(), _POISON[output.y.dtype]
    bands = {"before": output.buffer[:GUARD_ELEMENTS], "after": output.buffer[GUARD_ELEMENTS + elements :]}
    return [
        f"{written} elements {where} the output were written, the nearest {_nearest(band, where, poison)} from it."
        for where, band in bands.items()
        if (written := int((band != poison).sum()))
    ]


def check_exact(y: Tensor, reference: Tensor, units: int = 0) -> list[str]:
    """Sentences about where ``y`` [m, n] is not ``reference`` (fp64) rounded once to y's dtype, or so
    many ``units`` in the last place from it, and where it was written though the reference is NaN;
    empty when every element is right."""
    expected = reference.to(y.dtype)
    if torch.equal(y, expected):
        return []
    integers, poison = _POISON[y.dtype]
    differs = torch.where(expected.isnan(), y.view(integers) != poison, y != expected)
    if units:
        differs &= ((_place(y) - _place(expected)).abs() > units) & (torch.maximum(y.abs(), expected.abs()) > NOTHING)
        differs |= y.isnan() & ~expected.isnan()
    if not bool(differs.any()):
        return []
    unwritten = int((y.isnan() & differs).sum())
    wrong = differs.nonzero()
    i, j = (int(v) for v in wrong[0])
    nan = f", {unwritten} of them NaN (not written, or computed so)" if unwritten else ""
    return [
        f"{len(wrong)} of {y.numel()} elements are wrong{nan}; "
        f"the first at [{i}, {j}] is {y[i, j].item()} and should be {expected[i, j].item()}."
    ]


def _place(numbers: Tensor) -> Tensor:
    """Of each number among all of its type, in order."""
    integers = _POISON[numbers.dtype][0]
    bits = numbers.view(integers).long()
    return torch.where(bits < 0, torch.iinfo(integers).min - bits, bits)


def worst_tile_error(y: Tensor, reference: Tensor, tile: int = TILE) -> float:
    """The largest relative Frobenius error of a ``tile`` x ``tile`` block of ``y`` [m, n] against
    ``reference``; inf when y holds NaN or inf, 0.0 for an empty y. A block whose reference is all
    zero counts its absolute error, and what is NaN in it nothing."""
    if y.numel() == 0:
        return 0.0
    left = reference.isnan()
    error, norm = (_block_norms(t.masked_fill(left, 0), tile) for t in (y.double() - reference.double(), reference.double()))
    worst = float((error / torch.where(norm > 0, norm, 1.0)).max())
    return worst if worst == worst else float("inf")


def check_worst_tile(y: Tensor, reference: Tensor, torch_result: Tensor, sums_error: float = 0.0) -> list[str]:
    """One sentence when y's worst tile is more than ``TORCH_FACTOR`` times as wrong as torch's in
    the same precision (or as one rounding, or as ``sums_error``, what the format's sums lose)."""
    ours, theirs = worst_tile_error(y, reference), worst_tile_error(torch_result, reference)
    allowed = TORCH_FACTOR * max(theirs, torch.finfo(y.dtype).eps / 4, sums_error)
    if ours <= allowed:
        return []
    return [f"the worst {TILE} x {TILE} block has a relative error of {ours:.3g}; accepted: {allowed:.3g} (torch's is {theirs:.3g})."]


class RowProblem(Protocol):
    """A problem whose answer is y [m, n] in the workload's dtype, a row of it for each row of ``x``: what
    ``Gate`` asks of one."""

    @property
    def workload(self) -> Any:
        """Has a size ``m`` and a ``dtype``: that of y."""
        ...

    @property
    def x(self) -> Tensor: ...

    @property
    def operands(self) -> dict[str, Tensor]: ...

    def outputs(self) -> Tensor: ...

    def named(self, outputs: Tensor, /) -> dict[str, Tensor]: ...

    def copied(self) -> RowProblem: ...

    def reference(self) -> Tensor:
        """y in fp64."""
        ...

    def torch_result(self) -> Tensor:
        """y as torch computes it in that dtype."""
        ...


class Gate:
    """The references of one workload, computed once, and the verdict on any number of kernels for
    it: a product's, or whatever else computes row after row.

    ``verify`` takes ``run(problem, y)``, which launches the kernel on the first ``len(y)`` rows of
    the problem into y. It runs every row count once exactly, then the random problem twice: equal
    inputs must give equal bits. ``units``: in the last place that an exact y may be off;
    ``sums_error``: as of ``check_worst_tile``.
    """

    def __init__(self, exact: RowProblem, random: RowProblem, *, units: int = 0, sums_error: float = 0.0) -> None:
        self.exact, self.random, self.units, self.sums_error = exact, random, units, sums_error
        self._exact_reference = exact.reference()
        self._random_reference = random.reference()
        self._torch_result = random.torch_result()

    def verify(self, run: Callable[[Any, Tensor], None]) -> Verdict:
        workload = self.exact.workload
        for rows in sorted({workload.m, workload.m // 2 + 1}, reverse=True):  # the second is a ragged tile for most schedules
            output = self._run(run, self.exact, rows)
            reasons = check_guards(output) + check_exact(output.y, self._exact_reference[:rows], self.units)
            if reasons:
                return Verdict(tuple(f"m = {rows}: {reason}" for reason in reasons))
        first, second = (self._run(run, self.random, workload.m) for _ in range(2))
        reasons = check_guards(first) + check_worst_tile(first.y, self._random_reference, self._torch_result, self.sums_error)
        if not reasons and not torch.equal(*(output.y.view(_POISON[output.y.dtype][0]) for output in (first, second))):
            reasons = ["two runs on the same input differ."]
        return Verdict(tuple(reasons), worst_tile_error(first.y, self._random_reference))

    @staticmethod
    def _run(run: Callable[[Any, Tensor], None], problem: RowProblem, rows: int) -> GuardedOutput:
        output = guarded_output((rows, problem.outputs().shape[1]), getattr(torch, problem.workload.dtype), problem.x.device)
        run(problem, output.y)
        if output.y.is_cuda:
            torch.cuda.synchronize(output.y.device)
        return output


def gate(workload: Workload, seed: int, arch: str, device: str) -> Gate:
    """The gate of GEMMs."""
    exact = exact_problem(workload, seed, arch, device)
    return Gate(exact, random_problem(workload, seed, arch, device), units=exact.units, sums_error=exact.sums_error)


def _block_norms(values: Tensor, tile: int) -> Tensor:
    """Frobenius norm of each ``tile`` x ``tile`` block of [m, n] (the last ones may be smaller)."""
    m, n = values.shape
    squares = torch.nn.functional.pad(values.square(), (0, -n % tile, 0, -m % tile))
    return squares.view(-(-m // tile), tile, -(-n // tile), tile).sum((1, 3)).sqrt()


def _nearest(band: Tensor, where: str, poison: int) -> int:
    at = (band != poison).nonzero().flatten()
    return GUARD_ELEMENTS - int(at[-1]) if where == "before" else int(at[0]) + 1
