"""Weighted one-dimensional k-means of every row of a weight at once.

Clusters of sorted values are segments, so a clustering is its ``edges``, int64 [n, clusters + 1]:
cluster c of a row holds sorted positions ``edges[c]`` to ``edges[c + 1] - 1``, perhaps none. Sums
over a segment are differences of prefix sums, which makes a step of Lloyd's algorithm a few binary
searches, and the best cut of a segment a maximum over its positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LLOYD_STEPS = 60  # at most; a step costs a few binary searches a cluster
DISTANCES = (1, 2, 4, 8)  # of the second choice's cuts
LEAST_SENSITIVITY = 1e-6  # of a row's mean: values that nothing depends on still have a nearest code


@dataclass(frozen=True, slots=True, eq=False)
class SortedRows:
    """Rows in ascending order: ``values`` fp64 [n, k], ``order`` int64 [n, k] the column of each,
    ``mass`` and ``moment`` fp64 [n, k + 1]: sums of weights, and of weights times values, before
    each position."""

    values: Tensor
    order: Tensor
    mass: Tensor
    moment: Tensor

    @classmethod
    def of(cls, w: Tensor, sensitivity: Tensor | None) -> SortedRows:
        """Of ``w`` [n, k] and the weight of each value, [n, k] and at least 0, or None: all alike. A
        row's weights are counted in units of their mean: some of what follows is in fp32."""
        values, order = torch.sort(w.float(), dim=1)
        values = values.double()
        if sensitivity is None:
            weights = torch.ones_like(values)
        else:
            weights = sensitivity.double().gather(1, order)
            mean = weights.mean(1, keepdim=True)
            weights = torch.where(mean > 0, (weights / mean).clamp(min=LEAST_SENSITIVITY), 1.0)
        start = values.new_zeros(len(values), 1)
        mass = torch.cat((start, weights.cumsum(1)), 1)
        return cls(values, order, mass, torch.cat((start, (weights * values).cumsum(1)), 1))

    @property
    def k(self) -> int:
        return self.values.shape[1]

    def means(self, edges: Tensor, empty: Tensor) -> Tensor:
        """fp64 [n, clusters]: each cluster's weighted mean; ``empty`` where it holds nothing."""
        mass, moment = self.mass.gather(1, edges).diff(dim=1), self.moment.gather(1, edges).diff(dim=1)
        return torch.where(edges.diff(dim=1) > 0, moment / mass, empty)

    def gains(self, edges: Tensor) -> Tensor:
        """fp64 [n, clusters]: what a cluster's one value takes off the squared error of zero."""
        mass, moment = self.mass.gather(1, edges).diff(dim=1), self.moment.gather(1, edges).diff(dim=1)
        return torch.where(edges.diff(dim=1) > 0, moment**2 / mass, 0.0)


def segments(edges: Tensor, k: int) -> Tensor:
    """int64 [n, k]: the cluster of each sorted position."""
    marks = torch.zeros(len(edges), k + 1, dtype=torch.int16, device=edges.device)
    marks.scatter_add_(1, edges[:, 1:-1], torch.ones_like(edges[:, 1:-1], dtype=torch.int16))
    return marks[:, :k].cumsum(1)


def cluster(rows: SortedRows, clusters: int) -> Tensor:
    """Edges of ``clusters`` clusters of each row: the best on a grid of cuts by dynamic programming,
    then Lloyd's algorithm until no cut moves; once more on a grid about these cuts. The
    tests hold its error beside the exact optimum's."""
    edges = lloyd(rows, best_on_grid(rows, coarse(rows, clusters), clusters))
    return lloyd(rows, best_on_grid(rows, near(rows, edges), clusters))


def lloyd(rows: SortedRows, edges: Tensor, steps: int = LLOYD_STEPS) -> Tensor:
    """Cuts moved to the middle between neighbouring means, until no cut moves, in at most ``steps``."""
    values = rows.values.contiguous()
    for _ in range(steps):
        lower, upper = values.gather(1, edges[:, :-1].clamp(max=rows.k - 1)), values.gather(1, (edges[:, 1:] - 1).clamp(min=0))
        means = rows.means(edges, torch.maximum(lower, upper))
        means = torch.cummax(means, 1).values  # an empty cluster stands where its neighbour ends
        cuts = torch.searchsorted(values, (means[:, :-1] + means[:, 1:]) / 2)
        moved = torch.cat((edges[:, :1], cuts, edges[:, -1:]), 1)
        if torch.equal(moved, edges):
            break
        edges = moved
    return edges


def coarse(rows: SortedRows, clusters: int) -> Tensor:
    """Cuts for a first choice, int64 [n, points], ascending: half at equal numbers of values, half at
    equal distances, so that outliers have cuts between them, too."""
    n, k = rows.values.shape
    steps = torch.linspace(0, 1, max(32, 3 * clusters) + 1, device=rows.values.device, dtype=torch.float64)
    by_rank = (steps * k).round().long().expand(n, -1)
    low, high = rows.values[:, :1], rows.values[:, -1:]
    by_value = torch.searchsorted(rows.values.contiguous(), low + (high - low) * steps[1:-1])
    return torch.cat((by_rank, by_value), 1).sort(1).values


def near(rows: SortedRows, edges: Tensor) -> Tensor:
    """Cuts for a second choice, int64 [n, points], ascending: ``edges`` and some on either side of
    each, from the next one to a fiftieth of a row away."""
    step = max(1, rows.k // 400)
    away = torch.tensor([sign * step * distance for sign in (-1, 1) for distance in DISTANCES] + [0], device=edges.device)
    around = (edges[:, 1:-1, None] + away).clamp(0, rows.k).flatten(1)
    return torch.cat((edges[:, :1], around, edges[:, -1:]), 1).sort(1).values


def best_on_grid(rows: SortedRows, grid: Tensor, clusters: int, costs: Tensor | None = None) -> Tensor:
    """Edges: the exact optimum among cuts at the positions ``grid`` of each row, the first of them
    0, the last k. ``costs`` fp64 [n, points, points]: what a cluster between two cuts costs beside its
    squared error."""
    n, device = len(grid), grid.device
    mass, moment = rows.mass.gather(1, grid), rows.moment.gather(1, grid)
    moment = moment - mass * (rows.moment[:, -1:] / rows.mass[:, -1:])  # about the mean: small enough for fp32
    points = grid.shape[1]
    # gain[i, j]: of one cluster from cut i to cut j
    width = mass[:, None, :] - mass[:, :, None]
    gain = (moment[:, None, :] - moment[:, :, None]) ** 2 / torch.where(width > 0, width, 1.0)
    if costs is not None:
        gain = gain - costs
    above = torch.ones(points, points, dtype=torch.bool, device=device).triu()
    gain = torch.where(above & (width > 0), gain, torch.where(above, 0.0, -torch.inf)).float()
    ways = [gain[:, 0, :]]  # of each number of clusters, the best gain up to each cut
    for _ in range(clusters - 1):
        ways.append((ways[-1][:, :, None] + gain).amax(1))
    cuts = [torch.full((n, 1), points - 1, device=device)]
    for best in reversed(ways[:-1]):  # only the ways that were taken are looked up
        last = gain.gather(2, cuts[-1][:, :, None].expand(-1, points, -1))[:, :, 0]
        cuts.append((best + last).argmax(1, keepdim=True))
    cuts.append(torch.zeros(n, 1, dtype=torch.int64, device=device))
    return grid.gather(1, torch.cat(cuts[::-1], 1))
