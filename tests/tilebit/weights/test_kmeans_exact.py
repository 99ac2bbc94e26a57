"""Exact clusters leave the least error that any do, for every number of them, with ties too."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from cluster_cases import layer, optima, weights_of
from torch import Tensor

from tilebit.weights import kmeans_exact
from tilebit.weights.kmeans import SortedRows, cluster, lloyd
from tilebit.weights.kmeans_exact import exact
from tilebit.weights.nested import density_of, even

ROUNDING = 1e-13  # of a row's weighted square: of sums in fp64


def _error(rows: SortedRows, edges: Tensor) -> Tensor:
    return _square(rows) - rows.gains(edges).sum(1)


def _square(rows: SortedRows) -> Tensor:
    return (rows.mass.diff(dim=1) * rows.values**2).sum(1)


def _values(kind: str, n: int, k: int) -> Tensor:
    if kind == "grid":
        return (layer("gauss", n, k) * 3).round()
    if kind == "steps":  # every merge of two neighbours costs the same
        return torch.arange(k).float().repeat(n, 1)
    return layer(kind, n, k)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["gauss", "grid", "steps"])
def test_no_choice_of_cuts_is_better(kind: str, weighted: bool) -> None:
    w = _values(kind, 3, 9)
    rows = SortedRows.of(w, weights_of(3, 9) if weighted else None)
    for clusters in range(1, 8):
        every = torch.tensor([(0, *cuts, 9) for cuts in combinations(range(1, 9), clusters - 1)])
        least = torch.stack([_error(rows, one.expand(3, -1)) for one in every]).amin(0)
        found = _error(rows, exact(rows, clusters))
        assert bool((found <= least + ROUNDING * _square(rows)).all()), (clusters, found, least)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["gauss", "laplace", "outliers", "grid", "steps"])
def test_errors_are_those_of_dynamic_programming_over_every_cut(kind: str, weighted: bool) -> None:
    n, k = 2, 100
    rows = SortedRows.of(_values(kind, n, k), weights_of(n, k) if weighted else None)
    wanted = [2, 7, 16, 61, 99, 128]
    least = [optima(rows.values[i].numpy(), rows.weights[i].numpy(), wanted) for i in range(n)]
    for clusters in wanted:
        edges = exact(rows, clusters)
        assert edges.shape == (n, clusters + 1) and bool((edges.diff(dim=1) >= 0).all())
        assert bool((edges[:, 0] == 0).all()) and bool((edges[:, -1] == k).all())
        expected = torch.tensor([one[clusters] for one in least], dtype=torch.float64)
        assert bool(((_error(rows, edges) - expected).abs() <= ROUNDING * 100 * _square(rows)).all()), clusters


@pytest.mark.parametrize("bits", [3, 5, 8])
@pytest.mark.parametrize("kind", ["gauss", "outliers"])
def test_never_worse_than_lloyds_algorithm(kind: str, bits: int) -> None:
    rows = SortedRows.of(layer(kind, 12, 400), weights_of(12, 400))
    found = _error(rows, exact(rows, 1 << bits))
    for start in (even(density_of(rows), 1 << bits), cluster(rows, 8) if bits == 3 else even(rows.mass, 1 << bits)):
        assert bool((found <= _error(rows, lloyd(rows, start)) + ROUNDING * _square(rows)).all())
    if bits == 8:
        assert float((found / _error(rows, lloyd(rows, even(density_of(rows), 256)))).mean()) < 0.6  # exact, and clearly better


def test_rows_do_not_depend_on_each_other() -> None:
    w = torch.cat((layer("outliers", 4, 200), layer("gauss", 4, 200), torch.zeros(1, 200), _values("steps", 1, 200)))
    together = exact(SortedRows.of(w, None), 32)
    for i in range(len(w)):
        assert torch.equal(exact(SortedRows.of(w[i : i + 1], None), 32)[0], together[i]), i


@pytest.mark.parametrize("factor", [1e-20, 1.0, 60000.0])
@pytest.mark.parametrize("k", [1, 2, 5, 33])
def test_rows_of_few_values_have_a_cluster_for_each(k: int, factor: float) -> None:
    w = torch.stack((torch.zeros(k), torch.full((k,), -1.0), torch.arange(k) % 5 / 5, torch.linspace(-1, 1, k))) * factor
    rows = SortedRows.of(w, None)
    for clusters in (1, 8, 64):
        edges = exact(rows, clusters)
        numbers = rows.means(edges, rows.first(edges))
        assert edges.shape == (4, clusters + 1) and bool(numbers.isfinite().all())
        exactly = [i for i in range(4) if len(rows.values[i].unique()) <= clusters]
        assert bool((_error(rows, edges)[exactly].abs() <= ROUNDING * _square(rows)[exactly]).all())


def test_only_prices_at_which_two_clusterings_cost_the_same_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = SortedRows.of(layer("laplace", 6, 300), weights_of(6, 300))
    expected = {clusters: exact(rows, clusters) for clusters in (2, 16, 100)}
    monkeypatch.setattr(kmeans_exact, "GUESSES", 0)
    for clusters, edges in expected.items():
        assert torch.equal(exact(rows, clusters), edges)


@pytest.mark.gpu
def test_a_gpu_finds_the_same_errors() -> None:
    w, weights = layer("outliers", 100, 576), weights_of(100, 576)
    on_cpu, on_gpu = SortedRows.of(w, weights), SortedRows.of(w.cuda(), weights.cuda())
    for clusters in (8, 256):
        found = _error(on_gpu, exact(on_gpu, clusters)).cpu()
        apart = (found - _error(on_cpu, exact(on_cpu, clusters))).abs() / _square(on_cpu)
        assert float(apart.max()) <= ROUNDING * 100  # sums of a row are added in another order
