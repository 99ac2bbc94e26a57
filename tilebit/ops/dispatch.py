"""From a call to a launch: one ``Plan`` per (device, shape, format, dtype), which holds one loaded kernel per m-bucket."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import packs
from ..kernels import KernelUnavailable, build, find_kernel
from ..layouts.formats import QuantFormat
from ..layouts.packing import gemm_layout
from ..runtime import LoadedKernel
from ..schedules.gemm import rules as rules
from ..schedules.gemm.workload import M_BUCKETS, Workload, m_bucket
from ..schedules.schedule import Schedule
from ..schedules.target import Target, detect_target
from .workspace import LIMIT_BYTES, workspace

DTYPE_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
ALIGNMENT = 16  # bytes; kernels load 128 bits at a time
X_COLUMNS = 8  # CUDA kernels read rows of x of whole 16 bytes
MOST_ROWS = 1 << 20  # of x in one launch: block and element counts stay far below 2^31
SLICE_ROWS = 8  # slices of y that start at multiples of it are aligned, whatever n

# (x, weight, scales, zeros, bias, y) -> None
Launcher = Callable[[Tensor, Tensor, Tensor, "Tensor | None", "Tensor | None", Tensor], None]


class Plan:
    """Everything about a call that does not depend on the values of x or on m.

    ``weight_shape`` and ``columns`` are the shapes the packed tensors must have ([tiles_n, tiles_k, words] and [groups, n_pad]); ``kx``
    is the width of x as the kernel reads it (k, on CUDA rounded up to 8); ``dependent`` asks for dependent launch, where the kernel has
    it; ``guarded`` says that a launch must first make ``device`` the current one, because there are several; ``launchers`` holds those
    found so far, by m.
    """

    __slots__ = (
        "_launchers",
        "_lock",
        "bias",
        "columns",
        "dependent",
        "device",
        "dtype",
        "guarded",
        "kx",
        "launchers",
        "target",
        "weight_shape",
        "workload",
    )

    def __init__(
        self, device: torch.device, n: int, k: int, format: QuantFormat, dtype: torch.dtype, bias: bool, dependent: bool = False
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.bias = bias
        self.dependent = dependent
        self.target = device_target(device)
        self.workload = Workload(1, n, k, format, DTYPE_NAMES[dtype], bias)
        layout = gemm_layout(self.target.arch, format.bits)
        self.weight_shape = layout.storage_shape(n, k)
        self.columns = (format.groups(k), layout.padded(n, k)[0])
        self.kx = -(-k // X_COLUMNS) * X_COLUMNS if self.target.is_cuda else k
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
    bits: int,
    group_size: int,
    dtype: torch.dtype,
    asymmetric: bool,
    bias: bool,
    dependent: bool = False,
) -> Plan:
    """The plan of such calls, made and checked on first use. Raises ``ValueError`` for a format, shape, dtype or device that is not
    supported."""
    key = (n, k, bits, group_size, asymmetric, bias, dtype, device, dependent)
    plan = plans.get(key)
    if plan is None:
        plan = plans[key] = Plan(device, n, k, QuantFormat(bits, group_size, not asymmetric), dtype, bias, dependent)
    return plan


def forget() -> None:
    """Drop every plan, so that the next calls look their kernels up again (after tuning, or after loading a pack)."""
    plans.clear()
    checked.clear()


def _bind(kernel: LoadedKernel, plan: Plan, rows: int | None) -> Launcher:
    """A call of ``kernel`` with its parameters in order, for up to ``rows`` rows of x (None: any number); on CUDA with its workspace, where
    it takes one."""
    params = kernel.params
    scratch = plan.target.is_cuda and "workspace" in params
    expected = ("x", "weight", "scales")
    expected += () if plan.workload.format.symmetric else ("zeros",)
    expected += ("bias",) if plan.bias else ()
    expected += ("workspace",) if scratch else ()
    if params != (*expected, "y"):
        raise KernelUnavailable(
            f"the kernel in {kernel.path} takes {params}; this call needs {(*expected, 'y')}: delete that directory and compile it again"
        )
    run = kernel.run_dependent if plan.dependent and kernel.run_dependent is not None else kernel.run
    if scratch:
        return _bind_workspace(run, Schedule.from_json(kernel.manifest["schedule"]), plan, rows)
    # One function per set of operands: deciding at each call would cost host time.
    if plan.workload.format.symmetric:
        if plan.bias:
            return lambda x, weight, scales, zeros, bias, y: run(x, weight, scales, bias, y)
        return lambda x, weight, scales, zeros, bias, y: run(x, weight, scales, y)
    if plan.bias:
        return run  # it takes just these, in this order
    return lambda x, weight, scales, zeros, bias, y: run(x, weight, scales, zeros, y)


def _bind_workspace(run: Callable[..., None], schedule: Schedule, plan: Plan, rows: int | None) -> Launcher:
    """A call of a kernel that takes a workspace: one long enough for every call that it serves, so that nothing is computed from m."""
    device, most = plan.device, _rows_at_once(schedule, plan, rows)
    words = rules.workspace_words(plan.workload.with_m(most), schedule, plan.target)

    # Written out, case by case: every line of it is host time. ``space`` keeps the memory until the kernel is launched.
    def launch(x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, y: Tensor) -> None:
        space = workspace(device, words)
        if zeros is None:
            if bias is None:
                run(x, weight, scales, space[0], y)
            else:
                run(x, weight, scales, bias, space[0], y)
        elif bias is None:
            run(x, weight, scales, zeros, space[0], y)
        else:
            run(x, weight, scales, zeros, bias, space[0], y)

    def launch_slices(x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, y: Tensor) -> None:
        for start in range(0, x.shape[0], most):
            launch(x[start : start + most], weight, scales, zeros, bias, y[start : start + most])

    return launch if rows is not None and rows <= most else launch_slices


def _rows_at_once(schedule: Schedule, plan: Plan, rows: int | None) -> int:
    """How many of ``rows`` rows (None: any number) one launch may take. With stream-k any number: sums belong to blocks. Else as many
    as there are tickets for and as ``LIMIT_BYTES`` holds the sums of. Raises ``KernelUnavailable``."""
    if schedule.stream_k:
        return MOST_ROWS if rows is None else rows
    tiles_n = -(-plan.columns[1] // schedule.block_n)
    step = max(schedule.block_m, SLICE_ROWS)
    steps = rules.TICKETS // (tiles_n * (step // schedule.block_m))
    if steps == 0:
        if rows is None or tiles_n * -(-rows // schedule.block_m) > rules.TICKETS:
            raise KernelUnavailable(
                f"the schedule {schedule} makes {tiles_n} tiles of a row of n = {plan.workload.n}; accepted where k is split: up to "
                f"{rules.TICKETS * schedule.block_m // step}; compile the kernel with a larger block_n"
            )
        return rows
    sums = rules.workspace_words(plan.workload.with_m(step), schedule, plan.target) - rules.TICKETS
    steps = min(steps, max(1, LIMIT_BYTES // 4 // max(1, sums)))
    return min(steps * step, rows) if rows is not None else steps * step
