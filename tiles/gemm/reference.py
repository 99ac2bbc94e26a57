"""The packed-weight GEMM in fp64: what every program must compute."""

from __future__ import annotations

import numpy as np

from ...layouts.formats import GemmFormat


def dequantized(
    codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, format: GemmFormat, row_scales: np.ndarray | None = None
) -> np.ndarray:
    """w ``[n, k]`` in fp64 from codes ``[n, k]``, scales ``[n, groups]``, zero points ``[n, groups]`` (None: symmetric) and row scales
    ``[n]`` (None: scales have one level)."""
    k = codes.shape[1]
    group = np.arange(k) // (k if format.group_size < 0 else format.group_size)
    zero = np.float64(format.symmetric_zero_point) if zeros is None else zeros.astype(np.float64)[:, group]
    weight = (np.array(format.weight.values)[codes] - zero) * scales.astype(np.float64)[:, group]
    return weight if row_scales is None else weight * row_scales.astype(np.float64)[:, None]


def gemm_reference(
    x: np.ndarray,
    codes: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray | None,
    bias: np.ndarray | None,
    format: GemmFormat,
    row_scales: np.ndarray | None = None,
) -> np.ndarray:
    """y ``[m, n]`` in fp64 = x ``[m, k]`` @ w^T (+ bias ``[n]``)."""
    y = x.astype(np.float64) @ dequantized(codes, scales, zeros, format, row_scales).T
    return y if bias is None else y + bias.astype(np.float64)
