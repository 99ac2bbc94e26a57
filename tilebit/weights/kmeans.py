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

FIRST_STEPS, LLOYD_STEPS = 8, 60  # at most, from a first choice and from the second; a step costs a few binary searches a cluster
DISTANCES = (1, 2, 4, 8)  # of the second choice's cuts
LEAST_SENSITIVITY = 1e-6  # of a row's mean: values that nothing depends on still have a nearest code


@dataclass(frozen=True, slots=True, eq=False)
class SortedRows:
    """Rows in ascending order: ``values`` fp64 [n, k], ``order`` int64 [n, k] the column of each,
    ``weights`` fp64 [n, k], and ``sums`` fp64 [2, n, k + 1]: sums of weights, ``mass``, and of weights
    times values, ``moment``, before each position."""

    values: Tensor
    order: Tensor
    weights: Tensor
    sums: Tensor

    @classmethod
    def of(cls, w: Tensor, sensitivity: Tensor | None) -> SortedRows:
        """Of ``w`` [n, k] and the weight of each value, [n, k] and at least 0, or None: all alike. A
        row's weights are counted in units of their mean: some of what follows is in fp32."""
        sorted_values, order = ascending(w.float())
        values = sorted_values.double()
        if sensitivity is None:
            weights = torch.ones_like(values)
        else:
            weights = sensitivity.double().gather(1, order)
            mean = weights.mean(1, keepdim=True)
            weights = torch.where(mean > 0, (weights / mean).clamp(min=LEAST_SENSITIVITY), 1.0)
        sums = values.new_zeros(2, len(values), values.shape[1] + 1)
        torch.cumsum(weights, 1, out=sums[0, :, 1:])
        torch.cumsum(weights * values, 1, out=sums[1, :, 1:])
        return cls(values, order, weights, sums)

    @property
    def k(self) -> int:
        return self.values.shape[1]

    @property
    def mass(self) -> Tensor:
        """fp64 [n, k + 1]"""
        return self.sums[0]

    @property
    def moment(self) -> Tensor:
        """fp64 [n, k + 1]"""
        return self.sums[1]

    def at(self, edges: Tensor) -> Tensor:
        """fp64 [2, n, edges]: mass and moment before each edge."""
        return self.sums.gather(2, edges.expand(2, -1, -1))

    def first(self, edges: Tensor) -> Tensor:
        """fp64 [n, clusters]: each cluster's least value; of an empty one the next value of the row, at
        its end the last."""
        return self.values.gather(1, edges[:, :-1].clamp(max=self.k - 1))

    def means(self, edges: Tensor, empty: Tensor) -> Tensor:
        """fp64 [n, clusters]: each cluster's weighted mean; ``empty`` where it holds nothing."""
        return mean_of(self.at(edges).diff(dim=2), empty)

    def gains(self, edges: Tensor) -> Tensor:
        """fp64 [n, clusters]: what a cluster's one value takes off the squared error of zero."""
        mass, moment = self.at(edges).diff(dim=2)
        return torch.where(mass > 0, moment**2 / mass, 0.0)


def ascending(w: Tensor) -> tuple[Tensor, Tensor]:
    """Values of each row of ``w``, fp32 [n, k], in ascending order, and their columns, int64 [n, k]; equal
    ones in the order of their columns."""
    w = w + 0.0  # of both zeros one
    if w.device.type != "cpu":
        return torch.sort(w, dim=1, stable=True)
    # One int64 holds value and column: numpy sorts these several times as fast as torch sorts pairs.
    bits = w.view(torch.int32)
    keys = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long() << 32 | torch.arange(w.shape[1], device=w.device)
    keys.numpy().sort(axis=1)
    order = keys.bitwise_and_(0xFFFFFFFF)
    return w.gather(1, order), order


def mean_of(held: Tensor, empty: Tensor) -> Tensor:
    """Moment over mass of ``held`` [2, n, clusters], their differences; ``empty`` where mass is 0."""
    mass, moment = held
    return torch.where(mass > 0, moment / mass, empty)


def segments(edges: Tensor, k: int) -> Tensor:
    """int32 [n k]: the cluster of each sorted position, row after row, counted over all rows: cluster c
    of row i is i clusters + c."""
    return torch.repeat_interleave(edges.diff(dim=1).int().flatten(), output_size=len(edges) * k)


def spread(numbers: Tensor, of: Tensor, k: int) -> Tensor:
    """[n, k]: of each position the number, [n, clusters], of its cluster ``of`` (``segments``)."""
    return numbers.flatten().index_select(0, of).view(-1, k)


def cluster(rows: SortedRows, clusters: int) -> Tensor:
    """Edges of ``clusters`` clusters of each row: the best on a grid of cuts by dynamic programming,
    then steps of Lloyd's algorithm; once more on a grid about these cuts, then until no cut moves. The
    tests hold its error beside the exact optimum's."""
    edges = lloyd(rows, best_on_grid(rows, coarse(rows, clusters), clusters), FIRST_STEPS)
    return lloyd(rows, best_on_grid(rows, near(rows, edges), clusters))


def lloyd(rows: SortedRows, edges: Tensor, steps: int = LLOYD_STEPS) -> Tensor:
    """Cuts moved to the middle between neighbouring means, until no cut moves, in at most ``steps``."""
    for _ in range(steps):
        means = torch.cummax(rows.means(edges, rows.first(edges)), 1).values  # an empty cluster stands where its neighbour begins
        cuts = torch.searchsorted(rows.values, (means[:, :-1] + means[:, 1:]) / 2)
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
    by_value = torch.searchsorted(rows.values, low + (high - low) * steps[1:-1])
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
    mass, moment = rows.at(grid)
    moment = (moment - mass * (rows.moment[:, -1:] / rows.mass[:, -1:])).float()  # about the mean: small enough for fp32
    mass = mass.float()
    points = grid.shape[1]
    # gain[i, j]: of one cluster from cut i to cut j
    width = mass[:, None, :] - mass[:, :, None]
    gain = (moment[:, None, :] - moment[:, :, None]).square_().div_(width)
    if costs is not None:
        gain.sub_(costs)
    below = torch.ones(points, points, dtype=torch.bool, device=device).tril(-1)
    gain.masked_fill_(width <= 0, 0.0).masked_fill_(below, -torch.inf)
    ways = [gain[:, 0, :]]  # of each number of clusters, the best gain up to each cut
    for _ in range(clusters - 1):
        ways.append((ways[-1][:, :, None] + gain).amax(1))
    cuts = [torch.full((n, 1), points - 1, device=device)]
    for best in reversed(ways[:-1]):  # only the ways that were taken are looked up
        last = gain.gather(2, cuts[-1][:, :, None].expand(-1, points, -1))[:, :, 0]
        cuts.append((best + last).argmax(1, keepdim=True))
    cuts.append(torch.zeros(n, 1, dtype=torch.int64, device=device))
    return grid.gather(1, torch.cat(cuts[::-1], 1))
