"""From a call of an attention op to a launch: the operands every op takes, their checks, and one plan per kind of call.

A plan is found by a tuple of what a call says without looking at the device (shapes, dtype, format, options); batch, q_len and kv_len count
as their buckets, so that there are few. It holds a loaded kernel and the order of its operands.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ..kernels import KernelUnavailable, find_kernel
from ..layouts.kv import KVLayout, window_words
from ..layouts.kv_formats import KVFormat
from ..runtime import LoadedKernel
from ..schedules.attention import rules as rules
from ..schedules.attention.workload import AttentionWorkload
from ..schedules.schedule import Schedule
from .dispatch import ALIGNMENT, DTYPE_NAMES, device_target
from .workspace import workspace

# Operands of each op in the order in which an op hands them to its plan. What a call does not have is None.
OPERANDS = {
    "decode": ("q", "pages", "windows", "block_tables", "slots", "lengths", "head_scales", "sinks", "out", "lse"),
    "append": ("k", "v", "cu_seqlens", "lengths", "block_tables", "slots", "pages", "windows", "head_scales", "cos_sin"),
    "gather": ("pages", "windows", "block_tables", "slots", "lengths", "cu_kv", "head_scales", "out_k", "out_v"),
    "prefill": ("q", "k", "v", "cu_q", "cu_kv", "sinks", "out", "lse"),
}  # fmt: skip
WRITTEN = {
    "decode": ("out", "lse"), "append": ("pages", "windows"), "gather": ("out_k", "out_v"), "prefill": ("out", "lse")
}  # fmt: skip

Operands = tuple["Tensor | None", ...]
# The fields of an AttentionWorkload in their order (batch, q_len and kv_len as buckets, the format's name, a torch dtype), and the device.
Key = tuple[Any, ...]


class AttentionPlan:
    """A loaded kernel for one kind of call of ``workload.op`` on ``device``: ``launch(operands)`` takes them in the order of ``OPERANDS``,
    and so does ``dependent``, which is ``launch`` with programmatic dependent launch, where the kernel has it. Both are one plan's: which
    of them a call takes may differ between a warm-up and a capture, where no kernel can be loaded.

    Raises ``KernelUnavailable`` when there is no kernel, or when it would have to be loaded while a CUDA graph is captured.
    """

    __slots__ = ("dependent", "device", "guarded", "kernel", "launch", "target", "workload")

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
        self.launch = _bind(self.kernel, self.kernel.run, self)
        early = self.kernel.run_dependent
        self.dependent = self.launch if early is None else _bind(self.kernel, early, self)


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
                run(operands)
        else:
            run(operands)
    except Exception:
        check(plan.workload, plan.device, operands)
        ready = _ready(plan.workload.op, operands)
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
    check(workload, device, operands)
    with _lock:
        plan = plans.get(key)
        if plan is None:
            plan = plans[key] = AttentionPlan(workload, device)
    return plan


def _ready(op: str, operands: Operands) -> Operands:
    """The operands, read-only ones copied where a kernel cannot read them as they are."""
    ready = []
    for name, tensor in zip(OPERANDS[op], operands, strict=True):
        if tensor is not None and name not in WRITTEN[op]:
            tensor = tensor.contiguous()
            tensor = tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor
        ready.append(tensor)
    return tuple(ready)


def _bind(kernel: LoadedKernel, run: Callable[..., None], plan: AttentionPlan) -> Callable[[Operands], None]:
    """A call of ``run``, one of the launches of ``kernel``, with operands in the order of ``OPERANDS``, and its workspace where it takes
    one."""
    workload = plan.workload
    names, params = OPERANDS[workload.op], kernel.params
    absent = {name for name, shape in expected(workload).items() if shape is None}
    needed = [name for name in names if name not in absent]
    if sorted(p for p in params if p != "workspace") != sorted(needed):
        raise KernelUnavailable(
            f"the kernel in {kernel.path} takes {params}; this call has {tuple(needed)}: delete that directory and compile it again"
        )
    if "workspace" not in params:
        pick = itemgetter(*(names.index(name) for name in params))
        return lambda operands: run(*pick(operands))
    schedule = Schedule.from_json(kernel.manifest["schedule"])
    words = rules.workspace_words(workload.bucketed(), schedule, plan.target)
    pick = itemgetter(*((*names, "workspace").index(name) for name in params))
    device = plan.device

    def scratch(operands: Operands) -> None:
        space = workspace(device, words)
        run(*pick((*operands, space[0])))

    return scratch


def expected(w: AttentionWorkload) -> dict[str, tuple[torch.dtype, tuple[int | str, ...]] | None]:
    """(dtype, shape) of every operand of ``w.op``, sizes that the workload leaves open by name; None: such a call has none."""
    half = next(dtype for dtype, name in DTYPE_NAMES.items() if name == w.dtype)
    fixed = _cache_shapes(w.format, w.head_dim, w.page_size, w.heads_kv)
    q_shape = ("batch", "q_len") if w.op == "decode" else ("tokens",)
    rows = "total_kv" if w.op in ("gather", "prefill") else "tokens"
    kv_rows = (half, (rows, w.heads_kv, w.head_dim))
    table = {
        **fixed,
        "q": (half, (*q_shape, w.heads_q, w.head_dim)),
        "out": (half, (*q_shape, w.heads_q, w.head_dim)),
        "lse": (torch.float32, (*q_shape, w.heads_q)) if w.lse else None,
        "sinks": (torch.float32, (w.heads_q,)) if w.sinks else None,
        "cos_sin": (torch.float32, ("max_position", w.head_dim)) if w.rotary else None,
        "k": kv_rows,
        "v": kv_rows,
        "out_k": kv_rows,
        "out_v": kv_rows,
        **{name: (torch.int32, ("batch + 1",)) for name in ("cu_seqlens", "cu_q", "cu_kv")},
    }
    return {name: table[name] for name in OPERANDS[w.op]}


@cache
def _cache_shapes(format: KVFormat, head_dim: int, page_size: int, heads_kv: int) -> dict[str, Any]:
    """The cache's own operands."""
    return {
        "pages": (torch.int32, ("num_pages", heads_kv, KVLayout(format, head_dim, page_size).page_words)),
        "windows": (torch.int32, ("slots", heads_kv, window_words(head_dim))),
        "block_tables": (torch.int32, ("batch", "max_pages")),
        "slots": (torch.int32, ("batch",)),
        "lengths": (torch.int32, ("batch",)),
        "head_scales": (torch.float32, (2, heads_kv)) if format.has_head_scales else None,
    }


ADVICE = {
    "pages": "make the cache with tilebit.KVCache, or with this format, head_dim and page_size; bytes become int32 by .view(torch.int32)",
    "windows": "make the cache with tilebit.KVCache, or with this head_dim; bytes become int32 by .view(torch.int32)",
    "head_scales": "fp8 formats need one fp32 scale for each head's keys and one for its values",
    "sinks": "pass one fp32 logit for each query head",
}


def check(w: AttentionWorkload, device: torch.device, operands: Operands) -> None:
    """Raise ``ValueError`` for the first operand that does not fit ``w`` on ``device``; reads no device memory."""
    sizes: dict[str, int] = {}
    named: Mapping[str, Tensor | None] = dict(zip(OPERANDS[w.op], operands, strict=True))
    for name, needed in expected(w).items():
        tensor = named[name]
        if (
            needed is None
        ):  # an operand that such calls have none of; whether there are head scales is no part of a key, and they do no harm
            continue
        if tensor is None:
            raise ValueError(f"{name} is missing; {w.op} with {w.format.name} needs {_text(*needed)}; {ADVICE.get(name, 'pass it')}")
        dtype, dims = needed
        fits = tensor.dtype is dtype and tensor.ndim == len(dims) and tensor.device == device
        fits = fits and all(_same(size, dim, sizes) for size, dim in zip(tensor.shape, dims, strict=False))
        fits = fits and (name not in WRITTEN[w.op] or (tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0))
        if not fits:
            known = [f"{dim} = {sizes[dim]}" for dim in dims if isinstance(dim, str) and dim in sizes]
            raise ValueError(
                f"{name} is {describe(tensor)}; {w.op} with {w.format.name}, {w.dtype}, heads_q = {w.heads_q}, heads_kv = {w.heads_kv} and "
                f"pages of {w.page_size} tokens needs {_text(dtype, dims)} on {device}"
                f"{', contiguous and aligned to ' + str(ALIGNMENT) + ' bytes' if name in WRITTEN[w.op] else ''}"
                f"{' with ' + ', '.join(known) if known else ''}; {ADVICE.get(name, 'convert it with .to(...) or pass what fits')}"
            )


def _same(size: int, dim: int | str, sizes: dict[str, int]) -> bool:
    """Whether a dimension has the size that ``dim`` says; a name means whatever it meant first, "batch + 1" one more than "batch"."""
    if isinstance(dim, int):
        return size == dim
    if dim == "batch + 1":
        return size == sizes.setdefault("batch", size - 1) + 1
    if dim == "max_pages" and size < 1:
        return False
    return sizes.setdefault(dim, size) == size


def _text(dtype: torch.dtype, dims: tuple[int | str, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} [{', '.join(map(str, dims))}]"


def describe(t: Tensor) -> str:
    text = f"{_text(t.dtype, tuple(t.shape))} on {t.device}"
    if not t.is_contiguous():
        text += f" with strides {list(t.stride())}"
    return text
