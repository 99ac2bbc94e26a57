"""Scratch memory of split-k kernels on CUDA: partial sums, and tickets that say which block arrives last.

Eager calls share one workspace per (device, stream): kernels of one stream run one after another and leave their tickets zero again, so
nothing is cleared between calls. A call that is being captured into a CUDA graph uses memory of that graph (allocated and cleared inside
the capture, shared by the calls of one capture and stream), so that a replay, on whatever stream, never meets an eager call's workspace.

Size: a call needs ``split_k * m_tiles * n_tiles * block_m * block_n`` floats and ``m_tiles * n_tiles`` tickets. ``dispatch`` cuts a call
into slices of rows so that the floats stay within ``LIMIT_BYTES`` (or one row of tiles, if that is more): peak extra memory is that much
per stream in use.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

LIMIT_BYTES = 64 << 20
_STEP = 1 << 18  # floats: workspaces grow in steps of 1 MiB, so that nearby shapes share one
_MIN_TICKETS = 4096

# partials, tickets, and how many of each: kept as numbers, because asking a tensor costs host time
_Space = tuple[Tensor, Tensor, int, int]
_eager: dict[tuple[int, int], _Space] = {}
_captured: dict[tuple[int, int], tuple[int, _Space]] = {}


def workspace(device: torch.device, partials: int, tickets: int) -> tuple[Tensor, Tensor]:
    """(float32 [>= partials], int32 [>= tickets] of zeros) on CUDA ``device``, for a kernel launched next on torch's current stream."""
    index = device.index
    stream = torch._C._cuda_getCurrentRawStream(index)
    if torch.cuda.is_current_stream_capturing():
        return _for_capture(device, index, stream, partials, tickets)
    if _captured:
        _captured.pop((index, stream), None)  # that capture has ended: its memory belongs to its graph's pool alone
    space = _eager.get((index, stream))
    if space is None or space[2] < partials or space[3] < tickets:
        space = _allocate(device, partials, tickets)
        if not _managed_by_inductor(index, stream):
            _eager[index, stream] = space
    return space[0], space[1]


def _for_capture(device: torch.device, index: int, stream: int, partials: int, tickets: int) -> tuple[Tensor, Tensor]:
    """Memory of the graph that is being captured; cleared by the graph itself, at the start of every replay."""
    capture = capture_id(stream)
    held = _captured.get((index, stream))
    if held is not None and held[0] == capture and held[1][2] >= partials and held[1][3] >= tickets:
        return held[1][0], held[1][1]
    space = _allocate(device, partials, tickets)
    if not _managed_by_inductor(index, stream):
        _captured[index, stream] = (capture, space)
    return space[0], space[1]


def release() -> None:
    """Drop every workspace; the next call allocates a new one."""
    _eager.clear()
    _captured.clear()


def _allocate(device: torch.device, partials: int, tickets: int) -> _Space:
    """A new workspace; the tickets are cleared on the current stream (inside the capture, when there is one)."""
    floats, counts = -(-partials // _STEP) * _STEP, max(tickets, _MIN_TICKETS)
    return (
        torch.empty(floats, dtype=torch.float32, device=device),
        torch.zeros(counts, dtype=torch.int32, device=device),
        floats,
        counts,
    )


def _managed_by_inductor(index: int, stream: int) -> bool:
    """Whether torch.compile's own CUDA-graph manager runs this call. It owns every allocation on its stream and rejects one that outlives
    the call, so there each call gets a workspace of its own (which costs one clear of the tickets)."""
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    manager = trees.get_manager(index, create_if_none_exists=False)
    return manager is not None and manager.stream.cuda_stream == stream


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def capture_id(stream: int) -> int:
    """The driver's id of the capture that ``stream`` (a raw handle) takes part in: unique for the process. Only called while it
    captures."""
    status, identity = ctypes.c_int(), ctypes.c_ulonglong()
    query = _driver().cuStreamGetCaptureInfo_v2
    code = query(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(identity), None, None, None)
    if code != 0:
        raise RuntimeError(f"cuStreamGetCaptureInfo failed with code {code}; the stream is being captured and its capture cannot be named")
    return identity.value
