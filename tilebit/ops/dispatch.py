"""From a call to a launch: one ``Plan`` per (device, shape, format, dtype), which holds the shape's
kernels as they are needed."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import packs
from ..kernels import KernelUnavailable, find_kernel
from ..layouts.formats import GemmFormat
from ..runtime import LoadedKernel
from ..schedules.gemm import rules as rules
from ..schedules.gemm.expand import ExpandWorkload, library_from
from ..schedules.gemm.workload import Workload
from ..schedules.operands import WORKSPACE
from ..schedules.operations import alone
from ..schedules.schedule import Schedule
from ..schedules.select import portfolio
from ..schedules.target import Target, detect_target
from .expanded import expanded
from .known import known
from .launchers import Launcher, bind
from .workspace import LIMIT_BYTES, words_of

DTYPE_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
MOST_ROWS = 1 << 20  # of x in one launch: block and element counts stay far below 2^31
MOST_REMEMBERED = 1 << 14  # rows; which kernel serves more is looked up at each call
SLICE_ROWS = 8  # slices of y that start at multiples of it are aligned, whatever n


@dataclass(frozen=True, slots=True)
class Part:
    """What one kernel serves: it is found as that of ``workload``, and gets up to ``rows`` rows of
    x (None: any number). One that ``expands`` the weight serves together with a library's product."""

    workload: Workload | ExpandWorkload
    rows: int | None
    expands: bool = False


class Plan:
    """Everything about a call that does not depend on the values of x or on m.

    ``operands`` are what its calls are given, in call order, and ``absent`` the places of those
    that must be None; ``kx`` is the width of x as the kernel reads it (k, on CUDA rounded up to 8);
    ``dependent`` asks for dependent launch, where the kernel has it; ``guarded`` says that a launch
    must first make ``device`` the current one, because there are several; ``launchers`` holds those
    found so far, by m.
    """

    __slots__ = (
        "_launchers",
        "_lock",
        "_served",
        "_turns",
        "absent",
        "bias",
        "dependent",
        "device",
        "dtype",
        "guarded",
        "kx",
        "launchers",
        "operands",
        "target",
        "workload",
    )

    def __init__(
        self, device: torch.device, n: int, k: int, format: GemmFormat, dtype: torch.dtype, bias: bool, dependent: bool = False,
        width: int = 0, **parts: Any,
    ) -> None:  # fmt: skip
        self.device = device
        self.dtype = dtype
        self.bias = bias
        self.dependent = dependent
        self.target = device_target(device)
        self.workload = Workload(1, n, k, format, DTYPE_NAMES[dtype], bias, width=width, dependent=dependent, **parts)
        self.operands = self.workload.operands(self.target.arch)
        self.absent = tuple(place for place, o in enumerate(self.operands) if o.absent)
        self.kx = int(self.operands[0].shape[1])
        self.guarded = self.target.is_cuda and torch.cuda.device_count() > 1
        self._served: tuple[tuple[int, ...], tuple[Part, ...]] | None = None
        self._launchers: dict[Part, Launcher] = {}
        self._turns: dict[Part, threading.Lock] = {}
        self._lock = threading.Lock()
        self.launchers: dict[int, Launcher] = {}

    def launcher(self, m: int) -> Launcher:
        """The kernel for ``m`` >= 1 rows, ready to call; resolved once for all rows that it serves.
        Raises ``KernelUnavailable``."""
        part = self._part(m)
        found = self._launchers.get(part) or self._resolve(part, m)
        if m <= MOST_REMEMBERED:
            self.launchers[m] = found
        return found

    @property
    def bounds(self) -> tuple[int, ...]:
        """The largest numbers of rows before another kernel serves; the last one's serves any more."""
        return self._parts()[0]

    def missing(self, ms: Sequence[int] | None) -> list[Workload | ExpandWorkload]:
        """What must be built before calls with ``ms`` rows (None: any number) find their kernels,
        each kernel once: those that are not loaded yet and that no pack has."""
        parts = self._parts()[1] if ms is None else [self._part(m) for m in ms]
        if packs.entries(self.workload, self.target):
            return []
        return list(dict.fromkeys(part.workload for part in parts if part not in self._launchers))

    def serving(self, m: int) -> Workload | ExpandWorkload:
        """What the kernel for ``m`` rows is found for: the product, or the expansion of its weight."""
        return self._part(m).workload

    def _part(self, m: int) -> Part:
        bounds, parts = self._parts()
        return parts[min(bisect_left(bounds, m), len(parts) - 1)]

    def _parts(self) -> tuple[tuple[int, ...], tuple[Part, ...]]:
        """(bounds, who serves up to each). Decided once, whatever is tuned later: launchers were
        made for these rows (``forget`` lets plans decide anew)."""
        if self._served is None:
            self._served = self._packed_parts() or self._portfolio_parts()
        return self._served

    def _packed_parts(self) -> tuple[tuple[int, ...], tuple[Part, ...]] | None:
        """The parts of a pack: each of its kernels serves calls with more rows than the one before
        was made for, up to its own."""
        bounds = tuple(sorted({entry.workload.m for entry in packs.entries(self.workload, self.target)}))  # type: ignore[attr-defined]
        rows = (*bounds[:-1], None)
        return (bounds, tuple(Part(self.workload.with_m(m), most) for m, most in zip(bounds, rows, strict=True))) if bounds else None

    def _portfolio_parts(self) -> tuple[tuple[int, ...], tuple[Part, ...]]:
        """The parts of the shape's portfolio. A schedule that serves several is one kernel, found
        for the most rows that it serves: should it not compile, another one for so many rows does
        not crawl. Only the last part's launcher takes any number of rows: that costs host time."""
        shape = portfolio(self.workload, self.target)
        assert shape is not None
        most = dict(zip(shape.serving, shape.bounds, strict=True))  # of each schedule the last bound
        up_to = dict(zip(shape.serving[:-1], shape.bounds[:-1], strict=True))
        itself = portfolio(alone(self.workload), self.target)
        assert itself is not None

        def found_as(schedule: Schedule) -> Workload:
            """In a step as the product alone where that has the same kernel: it is built once for both."""
            workload = self.workload.with_m(most[schedule])
            return alone(workload) if itself.at(workload.m) == schedule else workload

        parts = [Part(found_as(s), up_to[s]) for s in shape.serving[:-1]]
        parts.append(Part(found_as(shape.serving[-1]), None))
        first = library_from(self.workload, self.target)
        if first is None:
            return shape.bounds, tuple(parts)
        below = tuple(bound for bound in shape.bounds if bound < first - 1)[: len(parts) - 1]
        w = self.workload
        expand = Part(ExpandWorkload(w.n, w.k, w.format.bits, w.dtype), None, expands=True)
        return (*below, first - 1, first), (*parts[: len(below) + 1], expand)

    def _resolve(self, part: Part, m: int) -> Launcher:
        with self._lock:
            turn = self._turns.setdefault(part, threading.Lock())
        with turn:  # of this kernel alone: calls that need another one do not wait for its compilation
            found = self._launchers.get(part)
            if found is None:
                if self.target.is_cuda and torch.cuda.is_current_stream_capturing():
                    options = ", bias=True" * self.bias + ", dependent=True" * self.dependent
                    w = self.workload
                    first = "" if w.residual or w.gate or w.norm else f"call tilebit.prepare(packed, m=[{m}]{options}) or "
                    raise KernelUnavailable(
                        f"the first call with about {m} rows happens while a CUDA graph is captured, and loading a kernel is not allowed "
                        f"there; {first}run the model once before the capture"
                    )
                kernel = find_kernel(part.workload, self.target)
                if self.target.is_cuda:
                    kernel.prepare(self.device.index)
                found = expanded(kernel, part.workload, self) if part.expands else bound(kernel, self, part.rows)
                self._launchers[part] = found
        return found


@cache
def device_target(device: torch.device) -> Target:
    """The target of ``device`` (CUDA devices with an index). Raises ``ValueError`` for devices and
    GPUs that no kernel runs on."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {str(device)!r}; accepted: 'cpu' and 'cuda'; move the tensors there")
    return detect_target(str(device))


plans: dict[tuple[Any, ...], Plan] = {}  # by the key of ``plan_for``


def plan_for(
    device: torch.device,
    n: int,
    k: int,
    format: str,
    dtype: torch.dtype,
    bias: bool,
    dependent: bool = False,
    width: int = 0,
    **parts: Any,
) -> Plan:
    """The plan of such calls (with ``width`` of those that write some columns of a wider y; ``parts``:
    the workload's nibbles, residual, gate, norm, eps), made and checked on first use. Raises ``ValueError`` for
    a format, shape, dtype or device that is not supported."""
    key = (n, k, format, bias, dtype, device, dependent, width, *parts.items())
    plan = plans.get(key)
    if plan is None:
        plan = plans[key] = Plan(device, n, k, GemmFormat.parse(format), dtype, bias, dependent, width, **parts)
    return plan


def forget() -> None:
    """Drop every plan, so that the next calls look their kernels up again (after tuning, or after
    loading a pack)."""
    plans.clear()
    known.clear()


def bound(kernel: LoadedKernel, plan: Plan, rows: int | None) -> Launcher:
    """A call of ``kernel`` for up to ``rows`` rows of x (None: any number). Its workspace, where it
    takes one, is long enough for every call that it serves, so that nothing is computed from m;
    more rows than it holds sums for are launched in slices."""
    if WORKSPACE not in kernel.params or not plan.target.is_cuda:
        return bind(kernel, plan.operands, plan.device, 0, early=plan.dependent)
    most = _rows_at_once(kernel, plan, rows)
    words = words_of(kernel, plan.workload.with_m(most))
    launch = bind(kernel, plan.operands, plan.device, words, early=plan.dependent)
    if rows is not None and rows <= most:
        return launch

    cuts = [_cut(o.shape.index("m")) if "m" in o.shape else _whole for o in plan.operands]

    def launch_slices(*given: Tensor | None) -> None:
        x = given[0]
        assert x is not None
        for start in range(0, x.shape[0], most):
            launch(*(t if t is None else cut(t, start, most) for cut, t in zip(cuts, given, strict=True)))

    return launch_slices


def _whole(tensor: Tensor, start: int, most: int) -> Tensor:
    """What does not depend on the rows of x."""
    return tensor


def _cut(axis: int) -> Callable[[Tensor, int, int], Tensor]:
    """Rows from ``start`` on, up to ``most`` of them, of a tensor whose ``axis`` is that of the rows
    of x, as kernels read it: along the first axis a view, along another a copy of its own."""
    if axis == 0:
        return lambda tensor, start, most: tensor[start : start + most]
    return lambda tensor, start, most: tensor.narrow(axis, start, min(most, tensor.shape[axis] - start)).contiguous()


def _rows_at_once(kernel: LoadedKernel, plan: Plan, rows: int | None) -> int:
    """How many of ``rows`` rows (None: any number) one launch of ``kernel`` may take. With stream-k
    any number: sums belong to blocks. Else as many as there are tickets for and as ``LIMIT_BYTES``
    holds the sums of. Raises ``KernelUnavailable``."""
    schedule = Schedule.from_json(kernel.manifest["schedule"])
    if schedule.stream_k:
        return MOST_ROWS if rows is None else rows
    n_pad = -(-plan.workload.n // rules.SLAB_N) * rules.SLAB_N  # not the scales' length: of codebooks that is the codes'
    tiles_n = -(-n_pad // schedule.block_n)
    step = max(schedule.block_m, SLICE_ROWS)
    most = rules.most_tiles(schedule)
    steps = most // (tiles_n * (step // schedule.block_m))
    if steps == 0:
        if rows is None or tiles_n * -(-rows // schedule.block_m) > most:
            raise KernelUnavailable(
                f"the schedule {schedule} makes {tiles_n} tiles of a row of n = {plan.workload.n}; accepted where k is split: up to "
                f"{most * schedule.block_m // step}; compile the kernel with a larger block_n"
            )
        return rows
    sums = words_of(kernel, plan.workload.with_m(step)) - rules.TICKETS
    steps = min(steps, max(1, LIMIT_BYTES // 4 // max(1, sums)))
    return min(steps * step, rows) if rows is not None else steps * step
