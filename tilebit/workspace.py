"""Scratch memory of split-k kernels on CUDA: partial sums, and tickets that say which block arrives last.

Eager calls share one workspace per (device, stream): kernels of one stream run one after another and leave their tickets zero again, so
nothing is cleared between calls. A call that is being captured into a CUDA graph uses memory of that graph (allocated and cleared inside
the capture, shared by the calls of one capture and stream), so that a replay, on whatever stream, never meets an eager call's workspace.

Size: a call needs ``split_k * m_tiles * n_tiles * block_m * block_n`` floats and ``m_tiles * n_tiles`` tickets. ``ops`` cuts a call into
slices of rows so that the floats stay within ``LIMIT_BYTES`` (or one row of tiles, if that is more): peak extra memory is that much per
stream in use.
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

_Pair = tuple[Tensor, Tensor]
_eager: dict[tuple[int, int], _Pair] = {}
_captured: dict[tuple[int, int], tuple[int, _Pair]] = {}


def workspace(device: torch.device, partials: int, tickets: int) -> _Pair:
    """(float32 [>= partials], int32 [>= tickets] of zeros) on CUDA ``device``, for a kernel launched next on torch's current stream."""
    index = device.index
    stream = torch._C._cuda_getCurrentRawStream(index)
    key = (index, stream)
    if torch.cuda.is_current_stream_capturing():
        capture = capture_id(stream)
        held = _captured.get(key)
        if held is not None and held[0] == capture and _fits(held[1], partials, tickets):
            return held[1]
        pair = _allocate(device, partials, tickets)
        if not _managed_by_inductor(index, stream):
            _captured[key] = (capture, pair)
        return pair
    _captured.pop(key, None)  # that capture has ended: its memory belongs to its graph's pool alone
    pair = _eager.get(key)
    if pair is None or not _fits(pair, partials, tickets):
        pair = _allocate(device, partials, tickets)
        if not _managed_by_inductor(index, stream):
            _eager[key] = pair
    return pair


def release() -> None:
    """Drop every workspace; the next call allocates a new one."""
    _eager.clear()
    _captured.clear()


def _fits(pair: _Pair, partials: int, tickets: int) -> bool:
    return pair[0].numel() >= partials and pair[1].numel() >= tickets


def _allocate(device: torch.device, partials: int, tickets: int) -> _Pair:
    """A new workspace; the tickets are cleared on the current stream (inside the capture, when there is one)."""
    floats = torch.empty(-(-partials // _STEP) * _STEP, dtype=torch.float32, device=device)
    return floats, torch.zeros(max(tickets, _MIN_TICKETS), dtype=torch.int32, device=device)


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
