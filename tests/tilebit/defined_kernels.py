"""Stand-ins of the attention kernels, computed from the definitions: they show what the door hands to a kernel, in any format, without a
compiler."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilebit.cache.rotary import rotated
from tilebit.layouts import kv_quantize
from tilebit.layouts.kv import RESIDUAL, KVLayout
from tilebit.ops.dispatch import DTYPE_NAMES
from tilebit.ops.operands import ALIGNMENT, check, rows_apart
from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.operands import kernel_params
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target
from tilebit.tiles.attention import reference
from tilebit.tiles.attention.unpacked import unpack_cache

CHOSEN = Schedule("attention_append_cpu", 128, 1, 64).to_json()  # any that takes no workspace
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass
class DefinedKernels:
    """Stands for ``find_kernel``; ``asked`` are the workloads that kernels were asked for, ``calls`` the ops of the launches,
    ``given`` the last one's tensors by name."""

    asked: list[AttentionWorkload] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    given: dict[str, Tensor] = field(default_factory=dict)

    def find(self, w: AttentionWorkload, target: Target) -> Any:
        self.asked.append(w)
        stated = w.operands(target.arch)
        names = kernel_params(stated, False)

        def run(*tensors: Tensor) -> None:
            operands = dict(zip(names, tensors, strict=True))
            try:
                check(stated, [operands.get(o.name) for o in stated], torch.device("cpu"), "the kernel")
                apart = {o.name for o in stated if o.apart}
                assert all(rows_apart(t) if name in apart else t.is_contiguous() for name, t in operands.items())
                assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)
            except (ValueError, AssertionError, AttributeError):
                raise RuntimeError("the kernel refuses its operands") from None  # and says so in other words than the door's
            self.calls.append(w.op)
            self.given = operands
            _RUN[w.op](w, operands)

        return SimpleNamespace(params=names, run=run, run_dependent=None, path=Path("defined"), manifest={"schedule": CHOSEN})


def _cached(w: AttentionWorkload, o: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    layout = KVLayout(w.format, w.head_dim, w.page_size)
    cache = (o["pages"], o["windows"], o["block_tables"], o["slots"], o["lengths"])
    return unpack_cache(*cache, layout, DTYPES[w.dtype], o.get("head_scales"), w.full_windows)


def _options(w: AttentionWorkload, o: dict[str, Tensor]) -> dict[str, Any]:
    return {
        "scale": w.softmax_scale, "window": w.window, "sink_tokens": w.sink_tokens, "soft_cap": w.soft_cap, "sinks": o.get("sinks")
    }  # fmt: skip


def _give(o: dict[str, Tensor], out: Tensor, lse: Tensor) -> None:
    o["out"].copy_(out)
    if "lse" in o:
        o["lse"].copy_(lse)


def _decode(w: AttentionWorkload, o: dict[str, Tensor]) -> None:
    cached = _cached(w, o)
    _give(o, *reference.decode(o["q"], [k for k, _ in cached], [v for _, v in cached], **_options(w, o)))


def _prefill(w: AttentionWorkload, o: dict[str, Tensor]) -> None:
    _give(o, *reference.prefill(o["q"], o["k"], o["v"], o["cu_q"], o["cu_kv"], **_options(w, o)))


def _gather(w: AttentionWorkload, o: dict[str, Tensor]) -> None:
    for start, (k, v) in zip(o["cu_kv"].tolist(), _cached(w, o), strict=False):
        o["out_k"][start : start + len(k)] = k.float().to(o["out_k"].dtype)
        o["out_v"][start : start + len(v)] = v.float().to(o["out_v"].dtype)


def _append(w: AttentionWorkload, o: dict[str, Tensor]) -> None:
    bounds = o["cu_seqlens"].tolist()
    for b, length in enumerate(o["lengths"].tolist()):
        if bounds[b + 1] == bounds[b]:  # a row without a sequence names slot 0, which is another's
            continue
        past = length - (bounds[b + 1] - bounds[b])
        k, v = (o[name][bounds[b] : bounds[b + 1]] for name in ("k", "v"))
        k = _turned(w, o, k, past, "k_norm")
        if w.queries:
            mine = slice(bounds[b], bounds[b + 1])
            o["out"][mine] = _turned(w, o, o["q"][mine], past, "q_norm")
        for head in range(w.heads_kv):
            window = o["windows"][int(o["slots"][b]), head]
            _append_head(w, o, o["block_tables"][b], window, past, head, k[:, head].float().numpy(), v[:, head].float().numpy())


def _turned(w: AttentionWorkload, o: dict[str, Tensor], rows: Tensor, first: int, norm: str) -> Tensor:
    if w.qk_norm:
        rows = reference.normalize(rows, o[norm], w.norm_eps, w.norm_offset)
        if w.rotary:
            rows = reference.rotate(rows, torch.arange(first, first + len(rows)), o["cos_sin"], w.rotary)
        return rows.to(DTYPES[w.dtype])
    return rotated(rows, torch.arange(first, first + len(rows)), o["cos_sin"], w.rotary) if w.rotary else rows


def _append_head(
    w: AttentionWorkload, o: dict[str, Tensor], table: Tensor, window: Tensor, past: int, head: int, k: np.ndarray, v: np.ndarray
) -> None:
    kept = kv_quantize.unpack_window(window.numpy(), past % RESIDUAL, w.head_dim, w.dtype)
    k, v = (np.concatenate((old, new)) for old, new in zip(kept, (k, v), strict=True))
    full = 0 if w.full_windows else len(k) // RESIDUAL
    for g in range(full):
        rows = slice(g * RESIDUAL, (g + 1) * RESIDUAL)
        _pack_group(w, o, table, (past // RESIDUAL + g) * RESIDUAL, head, k[rows], v[rows])
    rest = slice(full * RESIDUAL, None)
    window.copy_(torch.from_numpy(kv_quantize.pack_window(k[rest], v[rest], w.dtype).copy()))


def _pack_group(w: AttentionWorkload, o: dict[str, Tensor], table: Tensor, first: int, head: int, k: np.ndarray, v: np.ndarray) -> None:
    layout = KVLayout(w.format, w.head_dim, w.page_size)
    scales = tuple(o["head_scales"][:, head].tolist()) if "head_scales" in o else (1.0, 1.0)
    group = kv_quantize.quantize_group(k, v, w.format, w.dtype, scales)
    earlier = []  # the half of a page of 256 tokens that is there already
    if first % w.page_size:
        earlier = kv_quantize.unpack_pages(o["pages"][int(table[first // w.page_size]), head].numpy()[None], layout, 1)
    for i, record in enumerate(kv_quantize.pack_pages([*earlier, group], layout)):
        o["pages"][int(table[first // w.page_size + i]), head] = torch.from_numpy(record.copy())


def _pack(w: AttentionWorkload, o: dict[str, Tensor]) -> None:
    layered = [name for name in ("pages", "windows", "head_scales") if name in o]
    for layer in range(len(o["pages"])):
        its = {name: o[name][layer] for name in layered}
        for table, slot, length in zip(o["block_tables"], o["slots"].tolist(), o["lengths"].tolist(), strict=True):
            for head in range(w.heads_kv) if length and length % RESIDUAL == 0 else ():
                rows = kv_quantize.unpack_window(its["windows"][slot, head].numpy(), RESIDUAL, w.head_dim, w.dtype)
                _pack_group(w, its, table, length - RESIDUAL, head, *rows)


_RUN = {"decode": _decode, "prefill": _prefill, "gather": _gather, "append": _append, "pack": _pack}
