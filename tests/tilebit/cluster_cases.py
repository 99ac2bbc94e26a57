"""Rows of numbers to be clustered, and the least error that any clusters leave."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def layer(kind: str, n: int, k: int, seed: int = 0) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    w = torch.randn(n, k, generator=made)
    if kind == "outliers":
        w[torch.rand(n, k, generator=made) < 0.005] *= 20
    if kind == "laplace":
        w = w.sign() * torch.rand(n, k, generator=made).clamp(min=1e-6).log()
    return w


def weights_of(n: int, k: int) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(9)) ** 2


def optima(values: np.ndarray, weights: np.ndarray, clusters: list[int]) -> dict[int, float]:
    """The least weighted squared error of one row for each number of clusters, by dynamic programming
    over every cut."""
    order = np.argsort(values)
    v, s = values[order].astype(np.float64), weights[order].astype(np.float64)
    mass, moment, square = (np.concatenate(([0.0], np.cumsum(part))) for part in (s, s * v, s * v * v))
    width = mass[None, :] - mass[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        cost = square[None, :] - square[:, None] - (moment[None, :] - moment[:, None]) ** 2 / width
    cost = np.where(np.arange(len(mass))[None, :] > np.arange(len(mass))[:, None], cost, np.inf)
    np.fill_diagonal(cost, 0.0)
    best, found = cost[0], {}
    for count in range(2, max(clusters) + 1):
        best = (best[:, None] + cost).min(0)
        if count in clusters:
            found[count] = float(best[-1])
    return found
