"""Scratch memory of CUDA kernels that split k: tickets, which say what block arrives last at an
output tile, and partial sums.

A workspace is one int32 tensor: ``TICKETS`` words that are zero before a launch and left zero by
it, then the fp32 partial sums. Kernels take its address. How many words a kernel needs is said by
``words_of``.

Eager calls share one workspace per (device, stream): kernels of one stream touch it one after
another (those that start early wait for their predecessor first) and leave the tickets zero, so
nothing is cleared between calls. A call that is being captured into a CUDA graph uses memory of
that graph (allocated and cleared inside the capture, shared by the calls of one capture and
stream), so that a replay, on whatever stream, never meets an eager call's workspace.

Blocks that take one tile after another are as many as fit the device that a kernel was built for,
which may have other SMs than the one that runs it (a pack built elsewhere): ``words_of`` goes by
the kernel.

Size: ``dispatch`` cuts a call into slices of rows so that the partial sums stay within
``LIMIT_BYTES`` (or a few rows, if that is more): peak extra memory is that much per stream in use.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..runtime import LoadedKernel
from ..schedules.gemm.rules import TICKETS
from ..schedules.operands import WORKSPACE
from ..schedules.operations import AnyWorkload, workspace_words
from ..schedules.schedule import Schedule
from ..schedules.target import Target

LIMIT_BYTES = 64 << 20
_STEP = 1 << 18  # words: workspaces grow in steps of 1 MiB, so that nearby shapes share one

# Its address, its length in words, and the memory itself, which whoever launches a kernel on the
# address holds until it has. Kept as numbers, because asking a tensor costs host time.
Space = tuple[int, int, Tensor]
_eager: dict[tuple[int, int], Space] = {}
_captured: dict[tuple[int, int], tuple[int, Space]] = {}

_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # absent from a torch built without CUDA


def words_of(kernel: LoadedKernel, workload: AnyWorkload) -> int:
    """32-bit words of the workspace that ``kernel`` takes for ``workload``, which it serves; 0: it
    takes none."""
    if WORKSPACE not in kernel.params:
        return 0
    manifest = kernel.manifest
    return workspace_words(workload, Schedule.from_json(manifest["schedule"]), Target.from_json(manifest["target"]))


def workspace(device: torch.device, words: int) -> Space:
    """A workspace of at least ``words`` words (tickets included) on CUDA ``device``, torch's
    current one, for a kernel launched next on torch's current stream."""
    index = device.index
    stream = _current_stream(index)
    if stream:  # 0, the default stream, cannot be captured: asking would cost its calls 0.3 us
        if torch.cuda.is_current_stream_capturing():
            return _for_capture(device, index, stream, words)
        if _captured:
            _captured.pop((index, stream), None)  # that capture has ended: its memory belongs to its graph's pool alone
    space = _eager.get((index, stream))
    if space is None or space[1] < words:
        space = _allocate(device, words)
        if not managed_by_inductor(index, stream):
            _eager[index, stream] = space
    return space


def _for_capture(device: torch.device, index: int, stream: int, words: int) -> Space:
    """Memory of the graph that is being captured; cleared by the graph itself, at the start of
    every replay."""
    capture = capture_id(stream)
    held = _captured.get((index, stream))
    if held is not None and held[0] == capture and held[1][1] >= words:
        return held[1]
    space = _allocate(device, words)
    if not managed_by_inductor(index, stream):
        _captured[index, stream] = (capture, space)
    return space


def release() -> None:
    """Drop every workspace; the next call allocates a new one."""
    _eager.clear()
    _captured.clear()


def _allocate(device: torch.device, words: int) -> Space:
    """A new workspace; the tickets are cleared on the current stream (inside the capture, when
    there is one)."""
    length = TICKETS + -(-max(0, words - TICKETS) // _STEP) * _STEP
    memory = torch.empty(length, dtype=torch.int32, device=device)
    memory[:TICKETS].zero_()
    return memory.data_ptr(), length, memory


def managed_by_inductor(index: int, stream: int) -> bool:
    """Whether torch.compile's own CUDA-graph manager runs this call. It owns every allocation on
    its stream and rejects one that outlives the call, so there each call gets a workspace of its
    own (which costs one clear of the tickets)."""
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    manager = trees.get_manager(index, create_if_none_exists=False)
    return manager is not None and manager.stream.cuda_stream == stream


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def capture_id(stream: int) -> int:
    """The driver's id of the capture that ``stream`` (a raw handle) takes part in: unique for the
    process. Only called while it captures."""
    status, identity = ctypes.c_int(), ctypes.c_ulonglong()
    query = _driver().cuStreamGetCaptureInfo_v2
    code = query(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(identity), None, None, None)
    if code != 0:
        raise RuntimeError(f"cuStreamGetCaptureInfo failed with code {code}; the stream is being captured and its capture cannot be named")
    return identity.value
