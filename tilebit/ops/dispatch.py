"""From a call to a launch: one ``Plan`` per (device, shape, format, dtype), which holds one loaded kernel per m-bucket."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import packs
from ..kernels import KernelUnavailable, build, find_kernel
from ..layouts.formats import GemmFormat
from ..runtime import LoadedKernel
from ..schedules.gemm import rules as rules
from ..schedules.gemm.workload import M_BUCKETS, Workload, m_bucket
from ..schedules.operands import WORKSPACE
from ..schedules.operations import workspace_words
from ..schedules.schedule import Schedule
from ..schedules.target import Target, detect_target
from .launchers import Launcher, bind
from .workspace import LIMIT_BYTES

DTYPE_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
MOST_ROWS = 1 << 20  # of x in one launch: block and element counts stay far below 2^31
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
        self._launchers: list[Launcher | None] = [None] * (len(M_BUCKETS) + 1)  # the last one: m above every bucket
        self._lock = threading.Lock()
        self.launchers: dict[int, Launcher] = {}

    def launcher(self, m: int) -> Launcher:
        """The kernel for ``m`` >= 1 rows, ready to call; resolved once per m-bucket. Raises ``KernelUnavailable``."""
        index = bisect_left(M_BUCKETS, m)
        found = self._launchers[index] or self._resolve(index, m)
        if index < len(M_BUCKETS):
            self.launchers[m] = found
        return found

    def prepare(self, ms: Sequence[int]) -> None:
        """Have the kernels for every number of rows in ``ms`` ready; those that must be compiled are compiled together."""
        buckets = {m_bucket(m) for m in ms if self._launchers[bisect_left(M_BUCKETS, m)] is None}
        wanted = [self.workload.with_m(bucket) for bucket in sorted(buckets)]
        missing = [workload for workload in wanted if packs.find(workload, self.target) is None]
        if len(missing) > 1:
            build(missing, self.target, jobs=None)
        for m in ms:
            self.launcher(m)

    def _resolve(self, index: int, m: int) -> Launcher:
        with self._lock:
            found = self._launchers[index]
            if found is None:
                if self.target.is_cuda and torch.cuda.is_current_stream_capturing():
                    options = ", bias=True" * self.bias + ", dependent=True" * self.dependent
                    raise KernelUnavailable(
                        f"the first call with m in the bucket of {m} rows happens while a CUDA graph is captured, and loading a kernel "
                        f"is not allowed there; "
                        f"call tilebit.prepare(packed, m=[{m}]{options}) or run the model once before the capture"
                    )
                kernel = find_kernel(self.workload.with_m(m_bucket(m)), self.target)
                if self.target.is_cuda:
                    kernel.prepare(self.device.index)
                found = self._launchers[index] = _bind(kernel, self, M_BUCKETS[index] if index < len(M_BUCKETS) else None)
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
