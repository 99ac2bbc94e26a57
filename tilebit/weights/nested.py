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

from .kmeans import SortedRows, best_on_grid, cluster, coarse, lloyd, near, segments

AHEAD = 2  # bits above the seed's: the width that is looked at beside the widest
SEED_COUNTS = 4.0  # the seed's error beside that of any other width, each as a share of free clusters' error
FREE_STEPS, TOGETHER_STEPS = 6, 8  # of Lloyd's algorithm, at most: most of the gain comes in the first ones
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
    def of(cls, rows: SortedRows, clusters: int) -> Free:
        """By a few steps of Lloyd's algorithm from clusters of about equal errors."""
        edges = lloyd(rows, even(rows, clusters), FREE_STEPS)
        inside = segments(edges, rows.k)
        share = 1.0 / edges.diff(dim=1).clamp(min=1)
        away = rows.values - rows.means(edges, rows.values[:, :1]).gather(1, inside)
        start = rows.values.new_zeros(len(inside), 1)
        number = torch.cat((start, share.double().gather(1, inside).cumsum(1)), 1)
        error = torch.cat((start, (rows.mass.diff(dim=1) * away**2).cumsum(1)), 1)
        total = error[:, -1:]
        return cls(number.float(), torch.where(total > 0, error / total, 0.0).float(), total)


def even(rows: SortedRows, clusters: int) -> Tensor:
    """Edges of ``clusters`` clusters with about equal errors: as dense as the cube root of the
    weights' density (Panter and Dite 1951)."""
    values, k = rows.values, rows.k
    padded = torch.cat((values[:, :1], values, values[:, -1:]), 1)
    density = (rows.mass.diff(dim=1) * ((padded[:, 2:] - padded[:, :-2]) / 2).square_()).float() ** (1 / 3)
    before = torch.cat((values.new_zeros(len(values), 1), density.cumsum(1, dtype=values.dtype)), 1)
    places = torch.linspace(0, 1, clusters + 1, dtype=values.dtype, device=values.device)[1:-1] * before[:, -1:]
    cuts = torch.searchsorted(before, places).clamp(max=k)
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
        return error * (number / self.codes) ** 2


def nested(rows: SortedRows, seed_bits: int, max_bits: int) -> Tensor:
    """Edges of 2^max_bits clusters; every 2^(max_bits - b)-th of them are those of b bits.

    What is made small is the sum over widths of the squared error as a share of free clusters' (the
    seed's counts SEED_COUNTS times): first cut by cut, from the seed on, with an estimate of what
    follows, then in all widths together, by Lloyd's algorithm.
    """
    edges = cluster(rows, 1 << seed_bits)
    if seed_bits == max_bits:
        return edges
    free = {bits: Free.of(rows, 1 << bits) for bits in {min(seed_bits + AHEAD, max_bits), max_bits}}
    squares = (rows.mass.diff(dim=1) * rows.values**2).sum(1, keepdim=True)
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
    costs = torch.zeros(())
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
    mass, moment = rows.mass.gather(1, edges), rows.moment.gather(1, edges)
    held, sums = mass.diff(dim=1), moment.diff(dim=1)
    mean = torch.where(held > 0, sums / held, 0.0)
    # Left of a cut before position i: mass a, moment about the cluster's mean b. The error falls by
    # b^2 / a + b^2 / (held - a). Differences of sums in fp64, the rest in fp32.
    a = rows.mass[:, :k] - mass[:, :-1].gather(1, of)
    b = rows.moment[:, :k] - (moment[:, :-1] - mean * mass[:, :-1]).gather(1, of)
    b = b.addcmul_(mean.gather(1, of), rows.mass[:, :k], value=-1).float()
    rest = held.gather(1, of).sub_(a).mul_(a).float()
    better = b.square_().mul_(held.float().gather(1, of)).div_(rest)
    inside = (rest > 0) & (better > 0)  # a cluster's first position cuts nothing off
    if ahead:
        better = better.div_(scale.float())
        for later in ahead:
            number, error = later.free.number, later.free.error
            ends = [(number.gather(1, at).gather(1, of), error.gather(1, at).gather(1, of)) for at in (edges[:, :-1], edges[:, 1:])]
            left = later.cost(number[:, :k] - ends[0][0], error[:, :k] - ends[0][1])
            better.sub_(later.cost(ends[1][0] - number[:, :k], ends[1][1] - error[:, :k]).add_(left))
    better.masked_fill_(~inside, -torch.inf)
    # The first position of each cluster that is best.
    best = torch.full_like(held, -torch.inf, dtype=better.dtype).scatter_reduce_(1, of, better, "amax")
    found = torch.where(better == best.gather(1, of), torch.arange(k, device=edges.device), k)
    cut = torch.full_like(edges[:, 1:], k).scatter_reduce_(1, of, found, "amin")
    cut = torch.where(best > -torch.inf, cut, edges[:, 1:])
    return torch.cat((torch.stack((edges[:, :-1], cut), 2).flatten(1), edges[:, -1:]), 1)


def together(rows: SortedRows, edges: Tensor, weights: Mapping[int, Tensor]) -> Tensor:
    """Lloyd's algorithm for all widths at once, whose squared errors count ``weights`` (fp64 [n, 1] by
    bits) times: a cut moves to where the means of all clusters that it ends are, on both sides, equally
    good. ``edges`` are of the widest width."""
    values, widest = rows.values, max(weights)
    for _ in range(TOGETHER_STEPS):
        slope = constant = torch.zeros((), dtype=torch.float64, device=edges.device)
        for bits, weight in weights.items():
            at = edges[:, :: 1 << (widest - bits)]
            lower, upper = values.gather(1, at[:, :-1].clamp(max=rows.k - 1)), values.gather(1, (at[:, 1:] - 1).clamp(min=0))
            means = torch.cummax(rows.means(at, torch.maximum(lower, upper)), 1).values  # as in ``lloyd``
            means = means[:, :, None].expand(-1, -1, 1 << (widest - bits)).flatten(1)  # of each of the widest width's clusters
            before, after = means[:, :-1], means[:, 1:]  # the same inside a cluster
            slope = slope + weight * (after - before)
            constant = constant + weight * (after - before) * (after + before) / 2
        places = torch.where(slope > 0, constant / slope, values.gather(1, edges[:, 1:-1].clamp(max=rows.k - 1)))
        cuts = torch.searchsorted(values, torch.cummax(places, 1).values)
        moved = torch.cat((edges[:, :1], cuts, edges[:, -1:]), 1)
        if torch.equal(moved, edges):
            break
        edges = moved
    return edges
