"""What is tried: the schedules that won when everything was measured, and few others."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from lanes import one_of_each

from tilebit.layouts.formats import PER_CHANNEL, GemmFormat, QuantFormat
from tilebit.schedules.gemm.stream import cluster_sms, stream_candidates
from tilebit.schedules.gemm.tiles import in_turn, tile_candidates
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import MAX_CANDIDATES, candidates, estimate, legal
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name

H200 = target_from_name("sm_90a")
ARCHES = ("sm_80", "sm_86", "sm_89", "sm_90a")
W4 = QuantFormat(4, 128, False)

# n, k, then block_n, block_m, num_stages, num_warps, split_k, min_blocks of the fastest gemm_stream_bulk with steps of 128, H200
FEW_ROWS = (
    (4096, 4096, 32, 1, 2, 16, 1, 1), (4096, 14336, 64, 1, 2, 8, 2, 1), (28672, 4096, 256, 1, 2, 16, 1, 1),
    (28672, 4096, 128, 1, 2, 8, 1, 2), (10240, 8192, 128, 1, 2, 4, 4, 3), (57344, 8192, 64, 1, 2, 8, 1, 2),
    (8192, 28672, 64, 1, 2, 8, 1, 1), (8192, 28672, 64, 1, 2, 4, 2, 2),
    (4096, 4096, 64, 16, 2, 8, 2, 1), (4096, 14336, 64, 16, 2, 8, 2, 1), (6144, 4096, 96, 16, 3, 12, 2, 1),
    (28672, 4096, 256, 16, 2, 4, 2, 2), (10240, 8192, 128, 16, 2, 4, 4, 3), (57344, 8192, 256, 16, 3, 4, 1, 2),
    (8192, 28672, 128, 16, 2, 8, 2, 1),
)  # fmt: skip

# n, k, m, then block_n, block_m, num_warps, split_k, min_blocks, stream_k, cluster, raster of the fastest gemm_wgmma, H200
MORE_ROWS = (
    (4096, 14336, 32, 128, 32, 8, 4, 1, False, 1, 0), (28672, 4096, 32, 256, 32, 8, 1, 1, False, 1, 0),
    (28672, 4096, 32, 128, 32, 4, 1, 2, False, 1, 0), (10240, 8192, 32, 128, 32, 4, 1, 2, True, 1, 0),
    (28672, 4096, 64, 256, 64, 8, 1, 1, False, 1, 0), (4096, 14336, 64, 128, 64, 8, 4, 1, False, 1, 0),
    (28672, 4096, 128, 256, 128, 8, 1, 1, False, 1, 0), (4096, 14336, 128, 128, 128, 8, 4, 1, False, 1, 0),
    (10240, 8192, 128, 128, 128, 8, 1, 1, True, 1, 0), (4096, 4096, 256, 128, 128, 8, 2, 1, False, 1, 0),
    (4096, 14336, 256, 128, 256, 8, 4, 1, False, 1, 0), (10240, 8192, 256, 128, 256, 8, 1, 1, True, 2, 0),
    (28672, 4096, 512, 128, 256, 8, 1, 1, True, 1, 0), (4096, 14336, 4096, 128, 256, 8, 1, 1, False, 1, 4),
    (10240, 8192, 4096, 128, 256, 8, 1, 1, True, 2, 4), (28672, 4096, 4096, 128, 256, 8, 1, 1, True, 2, 8),
)  # fmt: skip


@pytest.mark.parametrize("winner", FEW_ROWS, ids=str)
def test_small_m_winners_are_tried(winner):
    n, k, block_n, block_m, stages, warps, split, resident = winner
    schedule = Schedule("gemm_stream_bulk", block_n, block_m, 128, stages, warps, split, resident)
    assert schedule in (candidates(Workload(block_m, n, k, W4), H200) or [])


@pytest.mark.parametrize("format", [W4, GemmFormat.parse("w4a8_lqq_g128"), GemmFormat.parse("w8a8_channel")], ids=str)
@pytest.mark.parametrize("m", [32, 64, 128])
def test_pairs_share_narrow_tiles_where_each_block_has_an_sm(format, m):
    def depths(n, k):
        found = candidates(Workload(m, n, k, format), H200) or []
        pair = ("gemm_wgmma", 64, m, 4, 2, 1)
        return {s.num_stages for s in found if (s.program, s.block_n, s.block_m, s.num_warps, s.split_k, s.min_blocks) == pair}

    for k in (4096, 14336):
        assert 4 in depths(4096, k) and max(depths(4096, k)) > 4  # 64 tiles: 128 blocks
    assert not depths(6144, 4096) and not depths(2048, 4096)  # 192 blocks, more than there are SMs, and 64


@pytest.mark.parametrize("winner", MORE_ROWS, ids=str)
def test_winners_are_tried(winner):
    n, k, m, block_n, block_m, warps, split, resident, stream_k, cluster, raster = winner
    found = candidates(Workload(m, n, k, W4), H200) or []
    fields = {(s.block_n, s.block_m, s.num_warps, s.split_k, s.min_blocks, s.stream_k, s.cluster, s.raster) for s in found}
    assert (block_n, block_m, warps, split, resident, stream_k, cluster, raster) in fields
    assert len(found) <= 80


def test_row_tiles_of_large_bytes_are_tried_in_groups():
    """Of 8-bit x from 129 rows on where the cache does not hold the weight, in groups that hold all row tiles, strips among them."""

    def tried(m: int, format: str, n: int = 28672, k: int = 4096) -> set[tuple[int, int]]:
        found = candidates(Workload(m, n, k, QuantFormat.parse(format)), H200) or []
        return {(s.raster, s.tail) for s in found if s.program == "gemm_wgmma"}

    assert {raster for raster, _ in tried(256, "w8a8_channel")} == {0, 4} and {raster for raster, _ in tried(512, "w8a8_channel")} == {
        0,
        4,
        8,
    }
    assert {raster for raster, _ in tried(128, "w8a8_channel")} == {0} == {raster for raster, _ in tried(512, "w8a8_channel", 4096)}
    assert {raster for raster, _ in tried(512, "w4a16_g128")} == {0}
    assert {raster for raster, tail in tried(512, "w8a8_channel", 10240, 8192) if tail > 1} == {0, 4, 8}


@pytest.mark.parametrize("format", ["w4a8_lqq_g128", "w8a8_channel", "w8a8_g128"])
@pytest.mark.parametrize(("m", "n", "k"), [(1024, 28672, 4096), (4096, 28672, 4096), (4096, 4096, 4096), (4096, 57344, 8192)])
def test_blocks_that_take_many_tiles_of_8_bit_x_one_after_another_are_tried(format: str, m: int, n: int, k: int):
    """Each tile that makes several waves, and whose halves are tiles: its last wave shared, in strips, or
    neither where that is nearly full."""
    every = candidates(Workload(m, n, k, GemmFormat.parse(format)), H200) or []
    found = [s for s in every if s.split_k == 1 and s.block_m in (64, 128, 256)]
    tiles = {(s.block_n, s.block_m, s.num_warps, s.min_blocks) for s in found if -(-m // s.block_m) * n // s.block_n > 132 * s.min_blocks}
    in_turn = {(s.block_n, s.block_m, s.num_warps, s.min_blocks) for s in found if s.tail > 1 or s.stream_k}
    assert tiles and tiles <= in_turn


def test_tiles_whose_shares_spill_are_not_shared():
    """Compiled for sm_90a: 128 x 160 and 128 x 256 by eight warps keep all in registers, 192 x 160 by twelve does not."""
    found = candidates(Workload(300, 9216, 4096, GemmFormat.parse("w4a8_lqq_g128")), H200) or []
    shared = {(s.block_n, s.block_m) for s in found if s.stream_k}
    assert (192, 160) in {(s.block_n, s.block_m) for s in found} and (192, 160) not in shared and {(128, 160), (128, 256)} <= shared


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("n", [4096, 57344, 1000, 64])
def test_a_cut_leaves_both_families(arch, n):
    for m in (1, 16):
        found = candidates(Workload(m, n, 4096, W4), target_from_name(arch)) or []
        first = Counter(s.program for s in found[:20])
        assert len(first) == 2 and min(first.values()) >= min(3, len(found) // 4) and len(found) <= MAX_CANDIDATES


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(
    "format", one_of_each([W4, QuantFormat(8, 32), QuantFormat(4, PER_CHANNEL), QuantFormat(8, 64, False)], lambda f: f.bits), ids=str
)
def test_every_shape_has_candidates_of_every_family(arch, format):
    target = target_from_name(arch)
    tiled = "gemm_wgmma" if arch == "sm_90a" else "gemm_mma"
    for n, k in ((1, 1), (64, 64), (4160, 4160), (1000, 500), (128256, 4096)):
        for m in (1, 2, 16, 17, 64, 300, 5000):
            workload = Workload(m, n, k, format)
            assert tile_candidates(tiled, workload, target, legal), workload
            assert bool(stream_candidates(workload, target)) == (m <= 16), workload


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", one_of_each(["w4a8_lqq_g64", "w4a8_lqq_g128", "w8a8_channel", "w4a8_channel_asym"], lambda name: name[:8]))
def test_every_shape_of_int8_x_has_tiles(arch: str, name: str):
    """k of an odd number of packed tiles of 32 among them, which only steps of 32 divide."""
    target = target_from_name(arch)
    tiled = "gemm_wgmma" if arch == "sm_90a" else "gemm_mma"
    for n, k in ((1, 1), (64, 64), (576, 576), (4160, 1056), (1000, 500), (4096, 4096)):
        for m in (1, 16, 17, 300, 5000):
            workload = Workload(m, n, k, GemmFormat.parse(name))
            found = candidates(workload, target) or []
            assert found and all(not legal(workload, s, target) for s in found), workload
            assert tile_candidates(tiled, workload, target, legal), workload
            if arch != "sm_90a" and k == 4096:
                assert {s.block_k for s in found if s.program == tiled} >= {64, 128}


def _full(n: int, s: Schedule) -> float:
    """The share of the SMs' places that rows fill."""
    places = cluster_sms(s.split_k, H200) * s.min_blocks
    return n * s.split_k / s.block_n / (-(-(-(-n // s.block_n) * s.split_k) // places) * 132 * s.min_blocks)


def test_grids_are_nearly_whole_waves_where_they_can_be():
    for n, k in ((4096, 4096), (28672, 4096), (10240, 8192)):
        for s in stream_candidates(Workload(1, n, k, W4), H200):
            assert _full(n, s) >= 0.8


@pytest.mark.parametrize("m", [1, 16])
def test_a_wide_weight_without_large_divisors_is_streamed_too(m):
    """151936 = 128 x 1187 rows: the largest tile that divides them, more blocks than are tried of other weights, and tiles that do not."""
    found = [s for s in candidates(Workload(m, 151936, 5120), H200) or [] if s.program == "gemm_stream_bulk"]
    assert {s.block_n for s in found if 151936 % s.block_n == 0} == {128} and len([s for s in found if s.block_n == 128]) >= 4
    assert all(-(-151936 // s.block_n) <= 8 * 132 for s in found if s.block_n != 128)


@pytest.mark.parametrize(
    ("n", "block_n", "split_k", "resident"), [(31552, 240, 1, 1), (63104, 480, 1, 1), (9024, 144, 2, 1), (18944, 144, 1, 1)]
)
@pytest.mark.parametrize("m", [1, 16])
def test_tiles_overlap_where_none_that_divides_fills_a_wave(n: int, block_n: int, split_k: int, resident: int, m: int):
    """Rows of mixed layers and of Qwen2.5-7B: no factor of 3, 5, 7 or 11 for 132 blocks."""
    found = stream_candidates(Workload(m, n, 4096, W4), H200)
    assert any((s.block_n, s.split_k, s.min_blocks) == (block_n, split_k, resident) for s in found)
    whole = [s for s in found if n % s.block_n == 0]
    for s in set(found).difference(whole):
        blocks = -(-n // s.block_n) * s.split_k
        assert all(_full(n, s) > _full(n, o) for o in whole if o.min_blocks == s.min_blocks and n // o.block_n * o.split_k <= blocks)


def test_clusters_take_less_than_all_sms():
    assert [cluster_sms(size, H200) for size in (1, 2, 4, 8)] == [132, 132, 124, 120]


@pytest.mark.parametrize("name", ["w4a8_g128_asym", "w4a8_lqq_g128"])
def test_nibbles_are_joined_too_where_operations_count(name: str):
    rows = Workload(1024, 31552, 4096, QuantFormat.parse(name), width=28672)
    nibbles, tried = replace(rows, nibbles=True), {}
    for m in (32, 64, 128, 1024, 4096):
        tried[m] = candidates(nibbles.with_m(m), H200) or []
        assert not any(s.joined for s in candidates(rows.with_m(m), H200) or [])
        joined = [s for s in tried[m] if s.joined]
        assert bool(joined) == (m >= 64) and [s for s in tried[m] if not s.joined]
        assert all(s.block_n == 16 * s.num_warps and s.program == "gemm_wgmma" for s in joined)
    best = {way: min(estimate(nibbles, s, H200).us for s in tried[1024] if s.joined == way) for way in (False, True)}
    assert 0.6 < best[True] / best[False] < 0.95  # a tenth less to multiply, in whole tiles


def test_in_turn():
    a, b, c = (Schedule("gemm_cpu", i, 1, 32) for i in (32, 64, 96))
    assert in_turn([[a, b], [], [c, a, b]]) == [a, c, b]
