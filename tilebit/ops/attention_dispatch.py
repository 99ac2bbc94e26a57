"""From a call of an attention op to a launch: the operands every op takes, their checks, and one plan per kind of call.

A plan is found by a tuple of what a call says without looking at the device (shapes, dtype, format, options); batch, q_len and kv_len count
as their buckets, so that there are few. It holds a loaded kernel and the order of its operands.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import KernelUnavailable, find_kernel
from ..layouts.kv_formats import KVFormat
from ..schedules.attention import rules as rules
from ..schedules.attention.workload import AttentionWorkload
from ..schedules.operands import Operand
from ..schedules.operations import workspace_words
from ..schedules.schedule import Schedule
from .dispatch import DTYPE_NAMES, device_target
from .launchers import bind
from .operands import ALIGNMENT, check

Operands = tuple["Tensor | None", ...]
# The fields of an AttentionWorkload in their order (batch, q_len and kv_len as buckets, the format's name, a torch dtype), and the device.
Key = tuple[Any, ...]


class AttentionPlan:
    """A loaded kernel for one kind of call of ``workload.op`` on ``device``: ``launch`` takes the workload's ``operands`` in call order,
    and so does ``dependent``, which is ``launch`` with programmatic dependent launch, where the kernel has it. Both are one plan's: which
    of them a call takes may differ between a warm-up and a capture, where no kernel can be loaded.

    Raises ``KernelUnavailable`` when there is no kernel, or when it would have to be loaded while a CUDA graph is captured.
    """

    __slots__ = ("dependent", "device", "guarded", "kernel", "launch", "operands", "target", "workload")

    def __init__(self, workload: AttentionWorkload, device: torch.device) -> None:
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
        schedule = Schedule.from_json(self.kernel.manifest["schedule"])
        words = workspace_words(workload.bucketed(), schedule, self.target)
        self.launch, self.dependent = (bind(self.kernel, self.operands, device, words, early=early) for early in (False, True))


_lock = threading.Lock()
plans: dict[Key, AttentionPlan] = {}


def forget() -> None:
    """Drop every plan, so that the next calls look their kernels up again (after tuning, or after loading a pack)."""
    plans.clear()


def launch(key: Key, operands: Operands, dependent: bool = False) -> None:
    """Launch the kernel of the plan ``key`` on ``operands``; where there is none yet, check the operands and make one.

    Kernels check in C what they are given, at no cost that shows; when one refuses, the operands are checked here, which says it in the
    ops' own words. Read-only operands that are not contiguous or not aligned are copied then, and the launch is a plain one.
    """
    plan = plans.get(key)
    if plan is None:
        plan = _plan(key, operands)
    run = plan.dependent if dependent else plan.launch
    try:
        if plan.guarded:
            with torch.cuda.device(plan.device):
                run(*operands)
        else:
            run(*operands)
    except Exception:
        check(plan.operands, operands, plan.device, _words(plan.workload))
        ready = _ready(plan.operands, operands)
        if all(a is b for a, b in zip(ready, operands, strict=True)):
            raise
        launch(key, ready)  # the preceding kernel is a copy's now, and a dependent launch might read what it writes before it has


def workload_of(key: Key) -> AttentionWorkload:
    """What calls with ``key`` ask for. Raises ``ValueError`` for what no kernel supports."""
    op, batch, q_len, kv_len, heads_q, heads_kv, head_dim, name, dtype, *options, _ = key
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"the dtype of q, k and v is {dtype}; accepted: torch.float16 and torch.bfloat16; convert them with x.to(...)")
    return AttentionWorkload(op, batch, q_len, kv_len, heads_q, heads_kv, head_dim, KVFormat.from_name(name), DTYPE_NAMES[dtype], *options)


def bucket(count: int) -> int:
    """The power of two that stands for ``count`` in a key."""
    return 1 << (count - 1).bit_length() if count > 0 else 0


def _plan(key: Key, operands: Operands) -> AttentionPlan:
    workload, device = workload_of(key), key[-1]
    check(workload.operands(device_target(device).arch), operands, device, _words(workload))
    with _lock:
        plan = plans.get(key)
        if plan is None:
            plan = plans[key] = AttentionPlan(workload, device)
    return plan


def _words(w: AttentionWorkload) -> str:
    """What needs its operands."""
    return f"{w.op} with {w.format.name}, {w.dtype}, heads_q = {w.heads_q}, heads_kv = {w.heads_kv} and pages of {w.page_size} tokens"


def _ready(operands: Sequence[Operand], given: Operands) -> Operands:
    """What is given, read-only tensors copied where a kernel cannot read them as they are."""
    ready = []
    for o, tensor in zip(operands, given, strict=True):
        if tensor is not None and not o.written:
            tensor = tensor.contiguous()
            tensor = tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor
        ready.append(tensor)
    return tuple(ready)
