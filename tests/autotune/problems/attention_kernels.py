"""Attention kernels in torch and numpy for the gate to judge: right ones, from the definitions and the twin, and ways to go wrong."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tilebit.autotune.problems.attention import AttentionProblem, exact_attention
from tilebit.layouts.kv import RESIDUAL
from tilebit.layouts.kv_quantize import KVGroup, pack_pages, pack_window, quantize_group, unpack_pages, unpack_window
from tilebit.tiles.attention.reference import rotate


def right(problem: AttentionProblem, outputs: dict[str, Tensor]) -> None:
    """Write what the operation is defined to write."""
    {"append": append, "pack": pack, "gather": gather}.get(problem.workload.op, attend)(problem, outputs)


def attend(problem: AttentionProblem, outputs: dict[str, Tensor]) -> None:
    out, lse = problem.attended(exact_attention)
    outputs["out"].copy_(out)
    if "lse" in outputs:
        outputs["lse"].copy_(lse)


def gather(problem: AttentionProblem, outputs: dict[str, Tensor]) -> None:
    for name, rows in zip(("out_k", "out_v"), zip(*problem.cache(), strict=True), strict=True):
        outputs[name].copy_(torch.cat(rows).float())


def append(problem: AttentionProblem, outputs: dict[str, Tensor]) -> None:
    """Token by token, as a cache that knows nothing of bulk: a window that is full is packed at once."""
    w, o = problem.workload, problem.operands
    starts, layout = o["cu_seqlens"].tolist(), w.layout
    for b, length in enumerate(problem.lengths):
        rows = starts[b + 1] - starts[b]
        k, v = (o[name][starts[b] : starts[b + 1]] for name in ("k", "v"))
        if w.rotary:
            k = rotate(k, torch.arange(length - rows, length), o["cos_sin"], w.rotary).to(k.dtype)
        for head in range(w.heads_kv):
            window = outputs["windows"][int(o["slots"][b]), head]
            position = length - rows
            held = [list(x) for x in unpack_window(window.numpy(), position % RESIDUAL, w.head_dim, w.dtype)]
            for token in range(rows):
                held[0].append(k[token, head].float().numpy())
                held[1].append(v[token, head].float().numpy())
                position += 1
                if position % RESIDUAL == 0 and not w.full_windows:
                    group = quantize_group(np.stack(held[0]), np.stack(held[1]), w.format, w.dtype, _scales(o.get("head_scales"), head))
                    _store(group, position // RESIDUAL - 1, o["block_tables"][b], head, outputs["pages"], layout)
                    held = [[], []]
            if held[0]:
                window.copy_(torch.from_numpy(pack_window(np.stack(held[0]), np.stack(held[1]), w.dtype)))


def pack(problem: AttentionProblem, outputs: dict[str, Tensor]) -> None:
    """Each layer's windows that are full, one by one."""
    w, o = problem.workload, problem.operands
    scales = o.get("head_scales", [None] * len(o["windows"]))
    for pages, windows, its in zip(outputs["pages"], o["windows"], scales, strict=True):
        for b, length in enumerate(problem.lengths):
            for head in range(w.heads_kv) if length and length % RESIDUAL == 0 else ():
                k, v = unpack_window(windows[int(o["slots"][b]), head].numpy(), RESIDUAL, w.head_dim, w.dtype)
                group = quantize_group(k, v, w.format, w.dtype, _scales(its, head))
                _store(group, length // RESIDUAL - 1, o["block_tables"][b], head, pages, w.layout)


def _scales(head_scales: Tensor | None, head: int) -> tuple[float, float]:
    return (1.0, 1.0) if head_scales is None else (float(head_scales[0, head]), float(head_scales[1, head]))


def _store(group: KVGroup, index: int, table: Tensor, head: int, pages: Tensor, layout) -> None:
    """Put group ``index`` of a sequence into its pages; the group beside it in a page of two stays."""
    first = index * RESIDUAL // layout.page_size
    ids = table[first : first + max(1, RESIDUAL // layout.page_size)].long()
    groups = [group]
    if layout.page_size > RESIDUAL:
        groups = unpack_pages(pages[ids, head].numpy(), layout, 2)
        groups[index % 2] = group
    pages[ids, head] = torch.from_numpy(pack_pages(groups, layout))
