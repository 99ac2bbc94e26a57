"""What one store of many widths is measured against: a weight in one width, by the exact k-means of
each of its rows for that width and no other."""

from __future__ import annotations

import torch
from torch import Tensor

from tilebit.weights.cores import side_by_side
from tilebit.weights.kmeans import SortedRows, segments, spread
from tilebit.weights.kmeans_exact import exact

CPU_VALUES, GPU_VALUES = 1 << 18, 1 << 24  # at once: temporaries that stay in caches, and that fit memory
CPU_ROWS = 32  # at once, at least: dynamic programming goes from value to value, in all rows together


def independent(w: Tensor, bits: int, sensitivity: Tensor | None) -> Tensor:
    """``w`` [n, k] with 2^bits numbers a row, rounded to fp16, of clusters that lie in no others: their
    squared error, weighted with ``sensitivity`` ([n, k] or None: all alike), is the least there is."""
    found = torch.empty_like(w)
    step = max(CPU_ROWS, CPU_VALUES // w.shape[1]) if w.device.type == "cpu" else max(1, GPU_VALUES // w.shape[1])

    def work(start: int) -> None:
        part = slice(start, start + step)
        rows = SortedRows.of(w[part], None if sensitivity is None else sensitivity[part])
        edges = exact(rows, 1 << bits)
        numbers = spread(rows.means(edges, rows.first(edges)), segments(edges, rows.k), rows.k).half().to(w.dtype)
        found[part] = torch.empty_like(w[part]).scatter_(1, rows.order, numbers)

    starts = range(0, len(w), step)
    for _ in side_by_side(work, starts) if w.device.type == "cpu" else map(work, starts):
        pass
    return found
