"""Nested clusters of every row of a weight: those of each width lie in those of the width below, two
in one (incremental upscaling, Any-Precision LLM, section 4.1).

All clusters of a width are cut into as many codes, whatever they hold. Where the seed's clusters are
the best of their own width, and each is cut where that is best for the next one, wide widths have
too few codes at the tails: up to 1.9 times the squared error that as many free clusters leave. So
cuts are chosen for the widths to come as well, and then moved together. Edges are as in ``kmeans.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .kmeans import SortedRows, best_on_grid, cluster, coarse, lloyd, mean_of, near, segments, spread

AHEAD = 2  # bits above the seed's: the width that is looked at beside the widest
SEED_COUNTS = 4.0  # the seed's error beside that of any other width, each as a share of free clusters' error
FREE_STEPS, TOGETHER_STEPS = 3, 8  # of Lloyd's algorithm, at most: most of the gain comes in the first ones
LEAST_ERROR = 1e-12  # of a row's squares: errors below are rounding


@dataclass(frozen=True, slots=True, eq=False)
class Free:
    """``clusters`` clusters of each row that lie in no others: how many there are before each
    position, ``number`` fp32 [n, k + 1], with the share of the one it is in, and how much of all their
    squared error, ``total`` fp64 [n, 1], is up to there: ``error`` fp32 [n, k + 1]."""

    number: Tensor
    error: Tensor
    total: Tensor

    @classmethod
    def of(cls, rows: SortedRows, density: Tensor, clusters: int) -> Free:
        """By a few steps of Lloyd's algorithm from clusters of about equal errors."""
        k = rows.k
        edges = lloyd(rows, even(density, clusters), FREE_STEPS)
        inside = segments(edges, k)
        away = rows.values - spread(rows.means(edges, rows.first(edges)), inside, k)
        share = spread(1.0 / edges.diff(dim=1), inside, k)
        before = rows.values.new_zeros(2, len(away), k + 1)
        torch.cumsum(share, 1, dtype=before.dtype, out=before[0, :, 1:])
        torch.cumsum(away.square_().mul_(rows.weights), 1, out=before[1, :, 1:])
        number, error = before
        total = error[:, -1:]
        return cls(number.float(), torch.where(total > 0, error / total, 0.0).float(), total)


def density_of(rows: SortedRows) -> Tensor:
    """fp64 [n, k + 1]: before each position, the sum of the cube roots of the weights' density times
    their distances: clusters that have equal parts of it have about equal errors (Panter and
    Dite 1951)."""
    values = rows.values
    padded = torch.cat((values[:, :1], values, values[:, -1:]), 1)
    root = ((padded[:, 2:] - padded[:, :-2]).div_(2).square_().mul_(rows.weights)).float().log_().div_(3).exp_()
    before = values.new_zeros(len(values), rows.k + 1)
    torch.cumsum(root, 1, dtype=before.dtype, out=before[:, 1:])
    return before


def even(density: Tensor, clusters: int) -> Tensor:
    """Edges of ``clusters`` clusters with equal parts of ``density`` (``density_of``)."""
    k = density.shape[1] - 1
    places = torch.linspace(0, 1, clusters + 1, dtype=density.dtype, device=density.device)[1:-1] * density[:, -1:]
    cuts = torch.searchsorted(density, places).clamp(max=k)
    return torch.cat((torch.zeros_like(cuts[:, :1]), cuts, torch.full_like(cuts[:, :1], k)), 1)


@dataclass(frozen=True, slots=True, eq=False)
class Ahead:
    """What a part of a row will cost at a later width, where it has ``codes`` codes: the error of the
    free clusters there, which are ``number / codes`` times as narrow, as a share of all their
    error."""

    free: Free
    codes: int

    def cost(self, number: Tensor, error: Tensor) -> Tensor:
        """Of parts with so many free clusters and so much of their error."""
        return (number / self.codes).square_().mul_(error)


def nested(rows: SortedRows, seed_bits: int, max_bits: int) -> Tensor:
    """Edges of 2^max_bits clusters; every 2^(max_bits - b)-th of them are those of b bits.

    What is made small is the sum over widths of the squared error as a share of free clusters' (the
    seed's counts SEED_COUNTS times): first cut by cut, from the seed on, with an estimate of what
    follows, then in all widths together, by Lloyd's algorithm.
    """
    edges = cluster(rows, 1 << seed_bits)
    if seed_bits == max_bits:
        return edges
    density = density_of(rows)
    free = {bits: Free.of(rows, density, 1 << bits) for bits in {min(seed_bits + AHEAD, max_bits), max_bits}}
    squares = (rows.weights * rows.values**2).sum(1, keepdim=True)
    known = {seed_bits: squares - rows.gains(edges).sum(1, keepdim=True)} | {bits: one.total for bits, one in free.items()}
    scales = _between({bits: error.clamp(min=LEAST_ERROR * squares.clamp(min=1e-30)) for bits, error in sorted(known.items())})

    def ahead(bits: int) -> list[Ahead]:
        return [Ahead(one, 1 << (later - bits)) for later, one in free.items() if later > bits]

    grid = torch.cat((coarse(rows, 1 << seed_bits)[:, 1::3], near(rows, edges)), 1).sort(1).values
    edges = best_on_grid(rows, grid, 1 << seed_bits, _costs(grid, ahead(seed_bits)) * (scales[seed_bits] / SEED_COUNTS)[..., None])
    for bits in range(seed_bits + 1, max_bits + 1):
        edges = split(rows, edges, scales[bits], ahead(bits))
    return together(rows, edges, {bits: (SEED_COUNTS if bits == seed_bits else 1.0) / scale for bits, scale in scales.items()})


def _between(known: dict[int, Tensor]) -> dict[int, Tensor]:
    """Errors of all widths from those of some, in ascending order: by equal factors between."""
    widths = list(known)
    found = {widths[0]: known[widths[0]]}
    for low, high in pairwise(widths):
        factor = (known[high] / known[low]) ** (1 / (high - low))
        found |= {bits: known[low] * factor ** (bits - low) for bits in range(low + 1, high)} | {high: known[high]}
    return found


def _costs(grid: Tensor, ahead: Sequence[Ahead]) -> Tensor:
    """fp32 [n, points, points]: what later widths cost of a cluster between any two cuts of ``grid``."""
    costs = torch.zeros((), device=grid.device)
    for later in ahead:
        number, error = (before.gather(1, grid) for before in (later.free.number, later.free.error))
        costs = costs + later.cost(*(before[:, None, :] - before[:, :, None] for before in (number, error)))
    return costs


def split(rows: SortedRows, edges: Tensor, scale: Tensor, ahead: Sequence[Ahead] = ()) -> Tensor:
    """int64 [n, 2 clusters + 1]: each cluster cut in two where the weighted squared error, in units of
    ``scale`` fp64 [n, 1], and what is ``ahead`` are least: every position is tried. Of a cluster
    with no or one value the second half is empty."""
    k = rows.k
    of = segments(edges, k)
    ends = rows.at(edges)
    held, sums = ends.diff(dim=2)
    mean = torch.where(held > 0, sums / held, 0.0)
    # Left of a cut before position i: mass a, moment about the cluster's mean b. The error falls by
    # b^2 / a + b^2 / (held - a). Differences of sums in fp64, the rest in fp32.
    a, b = (before[:, :k] - spread(start[:, :-1], of, k) for before, start in zip(rows.sums, ends, strict=True))
    b = b.addcmul_(spread(mean, of, k), a, value=-1).float()
    rest = spread(held, of, k).sub_(a).mul_(a).float()
    better = b.square_().mul_(spread((held / scale).float(), of, k)).div_(rest)
    better.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)  # a cluster's first position, 0 / 0, cuts nothing off
    for later in ahead:
        number, error = later.free.number, later.free.error
        starts, stops = ((number.gather(1, at), error.gather(1, at)) for at in (edges[:, :-1], edges[:, 1:]))
        for (its_number, its_error), sign in ((starts, 1), (stops, -1)):  # less what is left of a cut costs, and right of it
            there = spread(its_number, of, k).sub_(number[:, :k]).square_()
            better.addcmul_(there, spread(its_error, of, k).sub_(error[:, :k]), value=sign / later.codes**2)
    # The first position of each cluster that is best.
    best = torch.segment_reduce(better, "max", lengths=edges.diff(dim=1), axis=1, unsafe=True, initial=-torch.inf)
    alike = rows.first(edges) >= rows.values.gather(1, (edges[:, 1:] - 1).clamp(min=0))
    best.masked_fill_(alike, torch.inf)  # which no position has: the cut stays at the end
    found = (better == spread(best, of, k)).flatten().nonzero()[:, 0]
    cut = edges[:, 1:].flatten().scatter_reduce(0, of[found].long(), found % k, "amin").view_as(held)
    return torch.cat((torch.stack((edges[:, :-1], cut), 2).flatten(1), edges[:, -1:]), 1)


def together(rows: SortedRows, edges: Tensor, weights: Mapping[int, Tensor]) -> Tensor:
    """Lloyd's algorithm for all widths at once, whose squared errors count ``weights`` (fp64 [n, 1] by
    bits) times: a cut moves to where the means of all clusters that it ends are, on both sides, equally
    good. ``edges`` are of the widest width."""
    values, widest = rows.values, max(weights)
    for _ in range(TOGETHER_STEPS):
        ends, first = rows.at(edges), rows.first(edges)
        slope, constant = values.new_zeros(2, len(edges), edges.shape[1] - 2)
        for bits, weight in weights.items():
            step = 1 << (widest - bits)
            means = torch.cummax(mean_of(ends[..., ::step].diff(dim=2), first[:, ::step]), 1).values  # as in ``lloyd``
            before, after = means[:, :-1], means[:, 1:]
            part = weight * (after - before)
            slope[:, step - 1 :: step] += part
            constant[:, step - 1 :: step] += part * (after + before) / 2
        places = torch.where(slope > 0, constant / slope, first[:, 1:])
        cuts = torch.searchsorted(values, torch.cummax(places, 1).values)
        moved = torch.cat((edges[:, :1], cuts, edges[:, -1:]), 1)
        if torch.equal(moved, edges):
            break
        edges = moved
    return edges
