"""From a call to a launch: one ``Plan`` per (device, shape, format, dtype), which holds the shape's kernels as they are needed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import packs
from ..kernels import KernelUnavailable, find_kernel
from ..layouts.formats import GemmFormat
from ..runtime import LoadedKernel
from ..schedules.gemm import rules as rules
from ..schedules.gemm.workload import Workload
from ..schedules.operands import WORKSPACE
from ..schedules.operations import workspace_words
from ..schedules.portfolio import Portfolio
from ..schedules.schedule import Schedule
from ..schedules.select import portfolio
from ..schedules.target import Target, detect_target
from .launchers import Launcher, bind
from .workspace import LIMIT_BYTES

DTYPE_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
MOST_ROWS = 1 << 20  # of x in one launch: block and element counts stay far below 2^31
MOST_REMEMBERED = 1 << 14  # rows; the kernel of more is looked up in the portfolio at each call
SLICE_ROWS = 8  # slices of y that start at multiples of it are aligned, whatever n


class Plan:
    """Everything about a call that does not depend on the values of x or on m.

    ``operands`` are what its calls are given, in call order; ``kx`` is the width of x as the kernel reads it (k, on CUDA rounded up to
    8); ``dependent`` asks for dependent launch, where the kernel has it; ``guarded`` says that a launch must first make ``device`` the
    current one, because there are several; ``launchers`` holds those found so far, by m.
    """

    __slots__ = (
        "_launchers",
        "_lock",
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
        self, device: torch.device, n: int, k: int, format: GemmFormat, dtype: torch.dtype, bias: bool, dependent: bool = False
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.bias = bias
        self.dependent = dependent
        self.target = device_target(device)
        self.workload = Workload(1, n, k, format, DTYPE_NAMES[dtype], bias)
        self.operands = self.workload.operands(self.target.arch)
        self.kx = int(self.operands[0].shape[1])
        self.guarded = self.target.is_cuda and torch.cuda.device_count() > 1
        self._launchers: dict[int, Launcher] = {}  # by part of the portfolio
        self._lock = threading.Lock()
        self.launchers: dict[int, Launcher] = {}

    def launcher(self, m: int) -> Launcher:
        """The kernel for ``m`` >= 1 rows, ready to call; resolved once for each part of the shape's portfolio. Raises
        ``KernelUnavailable``."""
        part = self.parts.index(m)
        found = self._launchers.get(part) or self._resolve(part, m)
        if m <= MOST_REMEMBERED:
            self.launchers[m] = found
        return found

    @property
    def parts(self) -> Portfolio:
        """Which of the shape's kernels serves which m."""
        shape = portfolio(self.workload, self.target)
        assert shape is not None
        return shape

    def missing(self, ms: Sequence[int] | None) -> list[Workload]:
        """What must be built before calls with ``ms`` rows (None: any number) find their kernels: a workload for each part of the portfolio
        that no pack serves and that was not asked for yet; equal schedules once."""
        parts = self.parts
        wanted = range(len(parts.bounds)) if ms is None else sorted({parts.index(m) for m in ms})
        asked = {parts.serving[i]: self.workload.with_m(parts.bounds[i]) for i in wanted if i not in self._launchers}
        return [workload for workload in asked.values() if packs.find(workload, self.target) is None]

    def _resolve(self, part: int, m: int) -> Launcher:
        with self._lock:
            found = self._launchers.get(part)
            if found is None:
                if self.target.is_cuda and torch.cuda.is_current_stream_capturing():
                    options = ", bias=True" * self.bias + ", dependent=True" * self.dependent
                    raise KernelUnavailable(
                        f"the first call with about {m} rows happens while a CUDA graph is captured, and loading a kernel is not allowed "
                        f"there; call tilebit.prepare(packed, m=[{m}]{options}) or run the model once before the capture"
                    )
                bounds = self.parts.bounds
                kernel = find_kernel(self.workload.with_m(bounds[part]), self.target)
                if self.target.is_cuda:
                    kernel.prepare(self.device.index)
                found = self._launchers[part] = _bind(kernel, self, bounds[part] if part + 1 < len(bounds) else None)
        return found


@cache
def device_target(device: torch.device) -> Target:
    """The target of ``device`` (CUDA devices with an index). Raises ``ValueError`` for devices and GPUs that no kernel runs on."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {str(device)!r}; accepted: 'cpu' and 'cuda'; move the tensors there")
    return detect_target(str(device))


plans: dict[tuple[Any, ...], Plan] = {}  # by the key of ``plan_for``
checked: dict[tuple[Any, ...], Plan] = {}  # by the id of a weight that fits, and what else a call says


def plan_for(
    device: torch.device,
    n: int,
    k: int,
    format: str,
    dtype: torch.dtype,
    bias: bool,
    dependent: bool = False,
) -> Plan:
    """The plan of such calls, made and checked on first use. Raises ``ValueError`` for a format, shape, dtype or device that is not
    supported."""
    key = (n, k, format, bias, dtype, device, dependent)
    plan = plans.get(key)
    if plan is None:
        plan = plans[key] = Plan(device, n, k, GemmFormat.parse(format), dtype, bias, dependent)
    return plan


def forget() -> None:
    """Drop every plan, so that the next calls look their kernels up again (after tuning, or after loading a pack)."""
    plans.clear()
    checked.clear()


def _bind(kernel: LoadedKernel, plan: Plan, rows: int | None) -> Launcher:
    """A call of ``kernel`` for up to ``rows`` rows of x (None: any number). Its workspace, where it takes one, is long enough for every
    call that it serves, so that nothing is computed from m; more rows than it holds sums for are launched in slices."""
    if WORKSPACE not in kernel.params or not plan.target.is_cuda:
        return bind(kernel, plan.operands, plan.device, 0, early=plan.dependent)
    schedule = Schedule.from_json(kernel.manifest["schedule"])
    most = _rows_at_once(schedule, plan, rows)
    words = workspace_words(plan.workload.with_m(most), schedule, plan.target)
    launch = bind(kernel, plan.operands, plan.device, words, early=plan.dependent)
    if rows is not None and rows <= most:
        return launch

    def launch_slices(x: Tensor, *rest: Tensor | None) -> None:
        *weights, y = rest
        assert y is not None
        for start in range(0, x.shape[0], most):
            launch(x[start : start + most], *weights, y[start : start + most])

    return launch_slices


def _rows_at_once(schedule: Schedule, plan: Plan, rows: int | None) -> int:
    """How many of ``rows`` rows (None: any number) one launch may take. With stream-k any number: sums belong to blocks. Else as many
    as there are tickets for and as ``LIMIT_BYTES`` holds the sums of. Raises ``KernelUnavailable``."""
    if schedule.stream_k:
        return MOST_ROWS if rows is None else rows
    scales = plan.operands[2]
    tiles_n = -(-int(scales.shape[1]) // schedule.block_n)
    step = max(schedule.block_m, SLICE_ROWS)
    steps = rules.TICKETS // (tiles_n * (step // schedule.block_m))
    if steps == 0:
        if rows is None or tiles_n * -(-rows // schedule.block_m) > rules.TICKETS:
            raise KernelUnavailable(
                f"the schedule {schedule} makes {tiles_n} tiles of a row of n = {plan.workload.n}; accepted where k is split: up to "
                f"{rules.TICKETS * schedule.block_m // step}; compile the kernel with a larger block_n"
            )
        return rows
    sums = workspace_words(plan.workload.with_m(step), schedule, plan.target) - rules.TICKETS
    steps = min(steps, max(1, LIMIT_BYTES // 4 // max(1, sums)))
    return min(steps * step, rows) if rows is not None else steps * step
