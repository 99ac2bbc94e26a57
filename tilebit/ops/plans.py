"""From a call of an operation to a launch: a plan for each kind of call, its checks, and what is
copied when a kernel refuses.

A plan is found by a tuple of what a call says without looking at the device (the operation, shapes
as buckets, dtype, options), so that there are few. It holds a loaded kernel and the order of its
operands. (Products have plans of their own, one for all numbers of rows: ``dispatch.py``.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import packs
from ..kernels import KernelUnavailable, find_kernel
from ..schedules.operands import Operand
from ..schedules.operations import AnyWorkload
from ..schedules.target import Target
from .dispatch import device_target
from .launchers import bind
from .operands import ALIGNMENT, check, rows_apart
from .workspace import words_of

Operands = tuple["Tensor | None", ...]
Key = tuple[Any, ...]  # the operation's name first, the device last
Launch = Callable[..., None]  # (key, operands, dependent=False)


class OperationPlan:
    """A loaded kernel for one kind of call of ``workload.op`` on ``device``: ``launch`` takes the
    workload's ``operands`` in call order, and so does ``dependent``, which is ``launch`` with
    programmatic dependent launch, where the kernel has it. Both are one plan's: which of them a
    call takes may differ between a warm-up and a capture, where no kernel can be loaded.

    Raises ``KernelUnavailable`` when there is no kernel, or when it would have to be loaded while a
    CUDA graph is captured.
    """

    __slots__ = ("dependent", "device", "guarded", "kernel", "launch", "operands", "target", "workload")

    def __init__(self, workload: AnyWorkload, device: torch.device) -> None:
        self.device, self.workload, self.target = device, workload, device_target(device)
        self.guarded = self.target.is_cuda and torch.cuda.device_count() > 1
        if self.target.is_cuda and torch.cuda.is_current_stream_capturing():
            raise KernelUnavailable(
                f"the first call of this kind ({workload}) happens while a CUDA graph is captured, and loading a kernel is not allowed "
                f"there; make the same call once before the capture"
            )
        self.kernel = find_kernel(workload.bucketed(), self.target)
        if self.target.is_cuda:
            self.kernel.prepare(device.index)
        self.operands = workload.operands(self.target.arch)
        words = words_of(self.kernel, workload.bucketed())
        self.launch, self.dependent = (bind(self.kernel, self.operands, device, words, early=early) for early in (False, True))


_lock = threading.Lock()
held: dict[Key, OperationPlan] = {}


class _Rehearsal(threading.local):
    """What a thread's calls would have needed, while it rehearses."""

    wanted: dict[tuple[AnyWorkload, Target], None] | None = None


_rehearsal = _Rehearsal()


def rehearsed(call: Callable[[], object]) -> list[tuple[AnyWorkload, Target]]:
    """Run ``call`` without the launches for which no kernel is loaded, and say which kernels those
    need that no pack has: what they write is left as it is, and results mean nothing. Products are launched
    (``prepare`` is for them)."""
    wanted: dict[tuple[AnyWorkload, Target], None] = {}
    _rehearsal.wanted = wanted
    try:
        call()
    finally:
        _rehearsal.wanted = None
    return list(wanted)


def forget() -> None:
    """Drop every plan, so that the next calls look their kernels up again (after tuning, or after
    loading a pack)."""
    held.clear()


def launcher(workload_of: Callable[[Key], AnyWorkload], words: Callable[[Any], str]) -> Launch:
    """The launch of an operation's calls: ``launch(key, operands, dependent=False)``, operands in
    call order.

    ``workload_of(key)`` is what calls with ``key`` ask for (it raises ``ValueError`` for what no
    kernel supports), ``words(workload)`` what a message says that needs its operands. A call runs
    the kernel of the plan ``key``; where there is none yet, it checks the operands and makes one.
    Kernels check in C what they are given, at no cost that shows; when one refuses, the operands
    are checked here, which says it in the ops' own words. Read-only operands that are not
    contiguous or not aligned are copied then, and the launch is a plain one.
    """

    def launch(key: Key, operands: Operands, dependent: bool = False) -> None:
        plan = held.get(key)
        if plan is None:
            plan = made(key, operands)
            if plan is None:
                return
        run = plan.dependent if dependent else plan.launch
        try:
            if plan.guarded:
                with torch.cuda.device(plan.device):
                    run(*operands)
            else:
                run(*operands)
        except Exception:
            check(plan.operands, operands, plan.device, words(plan.workload))
            ready = _ready(plan.operands, operands)
            if all(a is b for a, b in zip(ready, operands, strict=True)):
                raise
            launch(key, ready)  # the preceding kernel is a copy's now, and a dependent launch might read what it writes before it has

    def made(key: Key, operands: Operands) -> OperationPlan | None:
        workload, device = workload_of(key), key[-1]
        check(workload.operands(device_target(device).arch), operands, device, words(workload))
        if _rehearsal.wanted is not None:
            target = device_target(device)
            if not packs.entries(workload, target):
                _rehearsal.wanted[workload.bucketed(), target] = None
            return None
        with _lock:
            plan = held.get(key)
            if plan is None:
                plan = held[key] = OperationPlan(workload, device)
        return plan

    return launch


def bucket(count: int) -> int:
    """The power of two that stands for ``count`` in a key."""
    return 1 << (count - 1).bit_length() if count > 0 else 0


def _ready(operands: Sequence[Operand], given: Operands) -> Operands:
    """What is given, read-only tensors copied where a kernel cannot read them as they are."""
    ready = []
    for o, tensor in zip(operands, given, strict=True):
        if tensor is not None and not o.written:
            tensor = tensor if o.apart and rows_apart(tensor) else tensor.contiguous()
            tensor = tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor
        ready.append(tensor)
    return tuple(ready)
