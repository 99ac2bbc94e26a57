"""Which candidates are measured: all kinds of them, and with them what won when everything was measured."""

from __future__ import annotations

from collections import Counter

import pytest

from tilebit.autotune import search
from tilebit.autotune.search import MAX_PLACES, MIN_PLACES, SHARE, places, searched, shortlist
from tilebit.layouts.formats import QuantFormat
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import candidates
from tilebit.schedules.ranker import known_ranker
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.select import Choice, choose
from tilebit.schedules.target import target_from_name

H200 = target_from_name("sm_90a")
W4 = QuantFormat(4, 128, False)
SHAPES = ((4096, 4096), (4096, 14336), (10240, 8192), (28672, 4096), (57344, 8192))


def test_places():
    assert [places(options, ranked=False) for options in (5, 120)] == [MAX_PLACES, MAX_PLACES]
    assert [places(options, ranked=True) for options in (5, 20, 80, 120, 1000)] == [MIN_PLACES, MIN_PLACES, 20, 30, MAX_PLACES]


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_no_tile_takes_all_places_and_every_likely_one_has_some(n, k):
    for m in (1, 16, 64, 256, 4096):
        workload = Workload(m, n, k, W4)
        short, options = shortlist(workload, H200) or [], candidates(workload, H200) or []
        assert len(short) == min(MAX_PLACES, len(options))
        tiles = Counter((s.program, s.block_n, s.block_m, s.num_warps) for s in short)
        assert max(tiles.values()) <= max(SHARE * MAX_PLACES, len(short) // 2) and len(tiles) >= 3


def test_all_orders_of_the_large_tile_are_measured():
    """Which of them is the fastest the models do not know: 4096 x 14336 wants plain tiles, 28672 x 4096 stream_k in clusters."""
    for n, k in ((4096, 14336), (28672, 4096)):
        short = shortlist(Workload(4096, n, k, W4), H200) or []
        orders = {(s.stream_k, s.cluster, s.raster) for s in short if (s.block_n, s.block_m, s.num_warps) == (128, 256, 8)}
        assert orders == {(stream_k, cluster, raster) for stream_k in (False, True) for cluster in (1, 2) for raster in (0, 4, 8)}


# n, k, block_n, block_m, num_stages, num_warps, split_k, min_blocks
@pytest.mark.parametrize(
    "winner",
    [
        (4096, 4096, 32, 1, 2, 16, 1, 1), (10240, 8192, 128, 1, 2, 4, 4, 3), (28672, 4096, 128, 1, 2, 8, 1, 2),
        (4096, 14336, 64, 16, 2, 8, 2, 1), (8192, 28672, 128, 16, 2, 8, 2, 1), (57344, 8192, 256, 16, 3, 4, 1, 2),
    ],
    ids=str,
)  # fmt: skip
def test_measured_winners_are_measured_again(winner):
    n, k, block_n, block_m, stages, warps, split, resident = winner
    schedule = Schedule("gemm_stream_bulk", block_n, block_m, 128, stages, warps, split, resident)
    assert schedule in (shortlist(Workload(block_m, n, k, W4), H200) or [])


def test_what_is_used_untuned_is_always_measured(monkeypatch):
    """What select takes over from a neighbour can be what no rule would try here."""
    workload, ranker = Workload(64, 3456, 1152, W4), known_ranker(H200)
    short = shortlist(workload, H200, 12, ranker) or []
    neighbours = Schedule("gemm_wgmma", 64, 64, 128, 3, 4, 4, 2)
    assert len(short) == 12 and neighbours not in short
    monkeypatch.setattr(search, "choose", lambda *_: Choice(neighbours, "nearest"))
    assert searched(workload, H200, 12, ranker) == [neighbours, *short[:-1]]


@pytest.mark.parametrize("m", [1, 64, 1024])
def test_what_is_used_is_not_measured_twice(m):
    workload = Workload(m, 4096, 4096, W4)
    measured = searched(workload, H200, 12, known_ranker(H200)) or []
    assert choose(workload, H200).schedule == measured[0] and len(set(measured)) == len(measured) == 12
