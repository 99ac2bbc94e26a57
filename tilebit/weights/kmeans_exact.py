"""Weighted one-dimensional k-means of every row of a weight at once, exactly.

The least squared error is convex in the number of clusters: segments of sorted values obey the
quadrangle inequality. So a price for each cluster takes the place of their number: the cheapest of all
clusterings has the least error for as many clusters as it has, and dynamic programming over positions
alone finds it. The price is searched that gives the number that is wanted; where it gives fewer as
well as more, two clusterings are joined (Aggarwal, Schieber and Tokuyama 1994). Edges are as in
``kmeans.py``; only the rounding of fp64 sums over a row comes between what is found and the optimum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .kmeans import SortedRows
from .nested import density_of

LOOKS = 16  # positions between looks at where any row's last cluster begins: a GPU is waited for at each
GUESSES = 6  # of prices, at most; then each is the one at which both known clusterings cost the same
FARTHEST = 4.0  # times more or fewer clusters that a guess allows for


@dataclass(frozen=True, slots=True, eq=False)
class Clusterings:
    """One of each row: ``edges`` int64 [n, k + 1], past the last cluster all k; ``count`` int64 [n] clusters;
    ``gain`` fp64 [n], what they take off the squared error of one cluster; ``price`` fp64 [n] that it is
    the cheapest at, not a number where none is known."""

    edges: Tensor
    count: Tensor
    gain: Tensor
    price: Tensor

    @classmethod
    def of(cls, sums: Tensor, edges: Tensor, price: Tensor) -> Clusterings:
        """Of ``edges`` and the rows' ``sums`` fp64 [2, n, k + 1], of moments about their means."""
        mass, moment = sums.gather(2, edges.expand(2, -1, -1)).diff(dim=2)
        gain = torch.where(mass > 0, moment**2 / mass, 0.0).sum(1)
        return cls(edges, (mass > 0).sum(1), gain, price)

    def rows(self, which: Tensor) -> Clusterings:
        return Clusterings(self.edges[which], self.count[which], self.gain[which], self.price[which])

    def replaced(self, where: Tensor, other: Clusterings) -> Clusterings:
        """``other`` in the rows ``where`` (bool [n])."""
        return Clusterings(
            torch.where(where[:, None], other.edges, self.edges),
            torch.where(where, other.count, self.count),
            torch.where(where, other.gain, self.gain),
            torch.where(where, other.price, self.price),
        )


def exact(rows: SortedRows, clusters: int) -> Tensor:
    """Edges int64 [n, clusters + 1] of the least weighted squared error, of 1 cluster or more. Rows of no
    more different values than that have a cluster for each of them, and then empty ones."""
    every = each_value(rows)
    edges = pad(every, (0, max(0, clusters - rows.k)), value=rows.k)[:, : clusters + 1].clone()
    edges[:, -1] = rows.k
    left = ((every.diff(dim=1).count_nonzero(1) > clusters) & (clusters > 1)).nonzero()[:, 0]  # rows that are searched
    sums = torch.stack((rows.mass, rows.moment - rows.mass * (rows.moment[:, -1:] / rows.mass[:, -1:])))[:, left]
    price = density_of(rows)[left, -1] ** 3 / (6 * clusters**3)  # what one more takes off Panter and Dite's error, D^3 / 12 c^2
    unknown, one = torch.full_like(price, torch.nan), torch.full_like(every[left], rows.k)
    one[:, 0] = 0
    few, many = Clusterings.of(sums, one, unknown), Clusterings.of(sums, every[left], unknown)
    guesses = 0
    while len(left):
        found = Clusterings.of(sums, cheapest(sums, price), price)
        hit = found.count == clusters
        last = (many.count - few.count == 2) | (guesses > GUESSES)  # a price that finds what there is between both
        tied = last & ((found.count <= few.count) | (found.count >= many.count))
        edges[left[hit]] = found.edges[hit, : clusters + 1]
        edges[left[tied]] = joined(few.rows(tied), many.rows(tied), clusters)
        going = ~(hit | tied)
        left, sums = left[going], sums[:, going]
        few, many, found = (each.rows(going) for each in (few, many, found))
        few, many = few.replaced(found.count < clusters, found), many.replaced(found.count > clusters, found)
        guesses += 1
        price = next_price(few, many, clusters, guesses <= GUESSES)
    return edges


def each_value(rows: SortedRows) -> Tensor:
    """int64 [n, k + 1]: edges of a cluster for each different value, past the last one all k."""
    places = torch.arange(1, rows.k, device=rows.values.device)
    cuts = torch.where(rows.values.diff(dim=1) > 0, places, rows.k).sort(1).values
    return pad(pad(cuts, (1, 0), value=0), (0, 1), value=rows.k)


def cheapest(sums: Tensor, price: Tensor) -> Tensor:
    """Edges int64 [n, k + 1] of the clustering of each row whose squared error and ``price`` (fp64 [n])
    for each cluster are least together."""
    mass, moment = sums.transpose(1, 2).contiguous()  # [k + 1, n]: what is looked at at once lies together
    gain = torch.zeros_like(mass)  # of the best clustering of the values before each position, less what its clusters cost
    start = torch.zeros(mass.shape, dtype=torch.int64, device=mass.device)  # of its last cluster: never before those before
    low = 0
    for end in range(1, len(mass)):
        best = (moment[end] - moment[low:end]).square_().div_(mass[end] - mass[low:end]).add_(gain[low:end])
        most, its = best.max(0)
        torch.sub(most, price, out=gain[end])
        torch.add(its, low, out=start[end])
        if end % LOOKS == 0:
            low = int(start[end].min())
    return walked(start)


def walked(start: Tensor) -> Tensor:
    """Edges int64 [n, k + 1] of the clusterings whose last clusters begin at ``start`` (int64 [k + 1, n],
    of those of the values before each position)."""
    places = [torch.full_like(start[0], len(start) - 1)]
    while bool(places[-1].any()):
        places.append(start.gather(0, places[-1][None])[0])
    backwards = torch.stack(places, 1)
    clusters = (backwards > 0).sum(1, keepdim=True)
    return backwards.gather(1, (clusters - torch.arange(len(start), device=start.device)).clamp(min=0))


def next_price(few: Clusterings, many: Clusterings, clusters: int, guess: bool) -> Tensor:
    """fp64 [n]: the price at which ``few`` and ``many`` cost the same, which finds what there is between them; or,
    for a ``guess`` and where they are more than two clusters apart, one that may find ``clusters``: of a power of
    their number that goes through both prices, or through one of them, about the inverse cube, and a bit farther."""
    same = (many.gain - few.gain) / (many.count - few.count)
    if not guess:
        return same
    low, high, wanted = (number.double().log() for number in (few.count, many.count, torch.full_like(few.count, clusters)))
    between = torch.lerp(few.price.log(), many.price.log(), (wanted - low) / (high - low)).exp()
    lacks = few.price.isnan()
    known, its_price = torch.where(lacks, many.count, few.count), torch.where(lacks, many.price, few.price)
    beside = its_price * ((known + (known - clusters).sign()) / clusters).clamp(1 / FARTHEST, FARTHEST) ** 4
    guessed = torch.where(lacks | many.price.isnan(), beside, between)
    return torch.where(many.count - few.count == 2, same, guessed)


def joined(few: Clusterings, many: Clusterings, clusters: int) -> Tensor:
    """Edges int64 [n, clusters + 1] of the clusters of ``few`` up to the first that holds the one of
    ``many`` after as many more as are wanted, and from there on of ``many``: where both are the cheapest at
    one price, this is, too."""
    device, k = few.edges.device, few.edges.shape[1] - 1
    places = torch.arange(clusters + 1, device=device)
    beside = many.edges.gather(1, (places + (many.count - clusters)[:, None]).clamp(max=k))
    mine = few.edges.gather(1, places.clamp(max=k).expand(len(beside), -1))
    cut = (beside[:, 1:] <= mine[:, 1:]).int().argmax(1, keepdim=True)
    return torch.where(places <= cut, mine, beside)
