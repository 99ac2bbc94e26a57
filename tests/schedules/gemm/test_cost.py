"""The cost model: its arithmetic by hand, and the orders of schedules that measurements have settled."""

from __future__ import annotations

from dataclasses import replace
from math import hypot
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilebit.layouts.formats import QuantFormat
from tilebit.schedules.gemm.codecs import UINT
from tilebit.schedules.gemm.cost import MMA_BURST, STEP_US, estimate
from tilebit.schedules.gemm.workload import PROPOSED_M, Workload
from tilebit.schedules.operations import candidates
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target, target_from_name

H200 = target_from_name("sm_90a")
CPU = Target("cpu", "test cpu", 2, 0, 0, 32 << 20, 20.0, 0.1, 100.0, ("avx512", "avx2"))
BIG = Schedule("gemm_wgmma", 128, 256, 128, 3, 8)
MMA = Schedule("gemm_mma", 128, 64, 64, 3, 8)
FEW = Schedule("gemm_stream_bulk", 128, 16, 128, 2, 8)


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(PROPOSED_M), st.integers(1, 60000), st.integers(1, 30000), st.sampled_from(["sm_80", "sm_86", "sm_89", "sm_90a", "cpu"])
)
def test_terms_add_up(m, n, k, arch):
    target = CPU if arch == "cpu" else target_from_name(arch)
    workload = Workload(m, n, k)
    overlap = hypot if target.is_cuda else max
    for schedule in (candidates(workload, target) or [])[::7]:
        e = estimate(workload, schedule, target)
        body = e.passes * overlap(e.load_us, e.dequant_us + e.mma_us)
        assert e.us == pytest.approx(e.launch_us + e.pipeline_us + body + e.split_us)
        assert 0 < e.utilization <= 1 and e.waves >= 1 and e.passes == -(-m // schedule.block_m)
        assert e.bound == ("load" if e.load_us >= e.dequant_us + e.mma_us else "compute")
        assert min(e.load_us, e.dequant_us, e.mma_us, e.us) > 0
        assert e.split_us > 0 or not target.is_cuda or schedule.split_k == 1


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([BIG, FEW, MMA]), st.integers(0, 9), st.integers(0, 9), st.integers(1, 40), st.integers(1, 5000))
def test_an_illegal_schedule_is_no_error(schedule, stages, warps, block_n, m):
    illegal = replace(schedule, num_stages=stages, num_warps=max(1, warps), block_n=block_n)
    assert estimate(Workload(m, 4096, 4096), illegal, H200).us > 0


def test_equation_4_by_hand():
    """A grid of exactly one wave has no idle SM, so dequantization and MMA are N * K over the device's rates, stages handed over beside."""
    n, k = 132 * 128, 4096
    e = estimate(Workload(256, n, k), BIG, H200)
    assert e.utilization == 1.0
    assert e.dequant_us == pytest.approx(UINT.ops_per_weight[4] * n * k / 33450e3)
    assert e.mma_us == pytest.approx(2 * 256 * n * k / (656e6 * MMA_BURST) + STEP_US * k / 128)


def test_equation_6_one_pass_for_each_row_of_tiles():
    n, k = 132 * 128, 4096
    one, four = (estimate(Workload(m, n, k), BIG, H200) for m in (256, 1024))
    assert (one.passes, four.passes) == (1, 4)
    assert four.us - four.pipeline_us - four.launch_us == pytest.approx(4 * (one.us - one.pipeline_us - one.launch_us), rel=0.05)


def test_a_tile_mostly_past_m_is_not_free():
    small, big = replace(BIG, block_m=64), BIG
    workload = Workload(64, 14336, 4096)
    assert estimate(workload, small, H200).us < estimate(workload, big, H200).us


def test_split_k_pays_when_sms_idle_and_not_when_they_are_full():
    s = Schedule("gemm_wgmma", 128, 32, 128, 8, 8)
    narrow, wide = Workload(32, 4096, 14336), Workload(32, 132 * 128 * 4, 4096)
    assert estimate(narrow, replace(s, split_k=4), H200).us < estimate(narrow, s, H200).us
    assert estimate(wide, replace(s, split_k=4), H200).us > estimate(wide, s, H200).us


def test_one_tile_more_than_a_wave_costs_a_wave():
    exact, over = (estimate(Workload(256, n, 4096), BIG, H200) for n in (132 * 128, 133 * 128))
    assert (exact.waves, over.waves) == (1, 2)
    assert over.mma_us > 1.4 * exact.mma_us and over.dequant_us > 1.9 * exact.dequant_us  # idle SMs leave the others a higher clock


def test_stream_k_pays_for_a_short_last_wave_only():
    short, whole = (Workload(256, tiles * 128, 4096) for tiles in (150, 264))
    streamed = replace(BIG, stream_k=True)
    assert estimate(short, streamed, H200).us < estimate(short, BIG, H200).us
    assert estimate(whole, streamed, H200).split_us == 0, "whole waves are not shared"
    assert estimate(short, streamed, H200).utilization > 0.95 and estimate(short, BIG, H200).utilization < 0.6


def test_clusters_of_four_do_not_fill_the_sms():
    """32 clusters of four blocks with an SM each need two waves on 132 SMs, 31 need one (4096 x 14336, m = 16: 25.8 us, not 15.4)."""
    fits, not_quite = (estimate(Workload(16, clusters * 128, 14336), replace(FEW, split_k=4), H200) for clusters in (31, 32))
    assert (fits.waves, not_quite.waves) == (1, 2)
    two = estimate(Workload(16, 4096, 14336), replace(FEW, block_n=64, split_k=2), H200)
    assert two.waves == 1 and two.us < 0.7 * not_quite.us


def test_blocks_that_share_x_load_less():
    alone, pair = (estimate(Workload(4096, 16384, 4096), replace(BIG, cluster=c, raster=4), H200) for c in (1, 2))
    assert pair.load_us < alone.load_us


def test_a_weight_that_no_cache_holds_is_loaded_in_every_pass():
    """Row tiles in groups go over it once a group, and tiles that all run side by side once."""

    def load(n: int, block_n: int, **options: Any) -> float:
        workload = Workload(256, n, 8192, QuantFormat.parse("w8a8_channel"))
        return estimate(workload, Schedule("gemm_wgmma", block_n, 128, 256, 2, 8, **options), H200).load_us

    assert load(57344, 256) > 1.5 * load(57344, 256, raster=4)
    assert load(2048, 256) < 1.1 * load(2048, 256, raster=4)
    assert load(10240, 192) == load(10240, 192, raster=4)  # 108 tiles on 132 SMs
    assert load(10240, 192, stream_k=True) > 1.3 * load(10240, 192, stream_k=True, raster=4)  # shares, each at its own k


def test_what_memory_is_asked_again_costs_power():
    """28672 x 4096, m = 4096, 8 bits, tiles of 256 rows: 853 us in plain order, 748 in groups of four, 737 in groups of eight (H200). A
    group's x that the cache does not hold is asked again, too."""

    def multiply(raster: int, k: int = 4096) -> float:
        schedule = Schedule("gemm_wgmma", 128, 256, 256, 2, 8, cluster=2, raster=raster, tail=2)
        return estimate(Workload(4096, 28672, k, QuantFormat.parse("w8a8_channel")), schedule, H200).mma_us * 16  # row tiles

    plain, four, eight, all_of_them = (multiply(raster) for raster in (0, 4, 8, 16))
    assert plain - eight == pytest.approx(853 - 737, rel=0.3) and four - eight == pytest.approx(748 - 737, rel=0.3)
    assert all_of_them < eight and multiply(16, 28672) > multiply(8, 28672)


def test_sums_that_leave_the_tensor_cores_take_time():
    """Of groups of x more than of e4m3 with groups, of whole rows none; more where k is longer."""

    def multiply(format: str, k: int = 4096) -> float:
        return estimate(Workload(4096, 4096, k, QuantFormat.parse(format)), replace(BIG, num_stages=2), H200).mma_us

    whole, same, floats, groups = map(multiply, ("w8a8_channel", "w8a8_fp8", "w8a8_fp8_g128", "w8a8_g128"))
    assert whole == same < floats < groups and groups > 1.5 * whole
    assert multiply("w8a8_g128", 8192) - multiply("w8a8_channel", 8192) > 1.8 * (groups - whole)


def test_shallow_pipelines_load_slowly():
    s = Schedule("gemm_wgmma", 64, 16, 64, 8, 4)
    workload = Workload(1, 132 * 64, 4096)
    assert estimate(workload, replace(s, num_stages=2), H200).load_us > 1.5 * estimate(workload, s, H200).load_us
    few = Schedule("gemm_stream_bulk", 64, 1, 64, 2, 4)
    assert estimate(workload, few, H200).load_us > 1.5 * estimate(workload, replace(few, num_stages=6), H200).load_us


def test_few_warps_and_small_tiles_issue_slowly():
    """What takes the small-m programs' time beside the weights: instructions, more of them a byte on 16 rows than on 64, and waiting."""
    workload = Workload(1, 8192, 28672)
    wide, small = (replace(FEW, block_n=n, block_m=1, num_warps=8) for n in (64, 16))
    assert estimate(workload, small, H200).dequant_us > 1.5 * estimate(workload, wide, H200).dequant_us
    assert estimate(workload, replace(wide, num_warps=2), H200).mma_us > 3 * estimate(workload, wide, H200).mma_us


def test_sixteen_rows_take_longer_than_one():
    for n, k in ((4096, 14336), (57344, 8192)):
        one, sixteen = (min(estimate(w, s, H200).us for s in candidates(w, H200) or []) for w in (Workload(1, n, k), Workload(16, n, k)))
        assert 1.05 < sixteen / one < 1.6


def test_eight_bits_load_longer_than_four():
    four, eight = (estimate(Workload(1, 14336, 4096, QuantFormat(bits)), Schedule("gemm_wgmma", 64, 16, 64, 8, 4), H200) for bits in (4, 8))
    assert eight.load_us > four.load_us


MEASURED = (  # (n, k, m, us): the fastest of what was measured on an H200, 4 bits with zero points in groups of 128, fp16
    (4096, 4096, 1, 4.42), (4096, 14336, 1, 9.1), (28672, 4096, 1, 15.8), (57344, 8192, 1, 56.7),
    (4096, 4096, 16, 7.6), (4096, 14336, 16, 13.8), (28672, 4096, 16, 19.7), (57344, 8192, 16, 63.6),
    (4096, 14336, 32, 17.7), (28672, 4096, 32, 27.6), (4096, 14336, 64, 22.3), (28672, 4096, 64, 33.9), (4096, 14336, 128, 31.6),
    (4096, 4096, 256, 15.8), (28672, 4096, 256, 100.2), (4096, 14336, 512, 78.8), (8192, 28672, 1024, 703.0), (28672, 4096, 4096, 1426.0),
)  # fmt: skip


@pytest.mark.parametrize(("n", "k", "m", "measured"), MEASURED)
def test_estimates_are_near_measurements(n, k, m, measured):
    workload = Workload(m, n, k, QuantFormat(4, 128, False))
    best = min(estimate(workload, s, H200).us for s in candidates(workload, H200) or [])
    assert 0.8 < best / measured < 1.25, best


FASTER = (  # (n, k, m, faster, slower): two schedules that were measured, at least 15 % apart
    (4096, 14336, 16, (64, 16, 2, 8, 2, 1), (128, 16, 2, 8, 4, 1)), (8192, 28672, 16, (128, 16, 2, 8, 2, 1), (256, 16, 2, 8, 4, 1)),
    (10240, 8192, 1, (80, 1, 2, 8, 1, 1), (80, 1, 2, 5, 1, 1)),
    (5120, 27648, 16, (80, 16, 2, 8, 2, 1), (128, 16, 3, 8, 8, 1)),
    (4096, 4096, 1, (32, 1, 2, 16, 1, 1), (64, 1, 4, 2, 8, 4)), (8192, 28672, 1, (64, 1, 2, 8, 1, 1), (64, 1, 2, 6, 1, 1)),
)  # fmt: skip


@pytest.mark.parametrize(("n", "k", "m", "faster", "slower"), FASTER)
def test_small_m_schedules_in_the_measured_order(n, k, m, faster, slower):
    """block_n, block_m, num_stages, num_warps, split_k, min_blocks of ``gemm_stream_bulk`` with steps of 128."""
    us = []
    for block_n, block_m, stages, warps, split, resident in (faster, slower):
        schedule = Schedule("gemm_stream_bulk", block_n, block_m, 128, stages, warps, split, resident)
        us.append(estimate(Workload(m, n, k, QuantFormat(4, 128, False)), schedule, H200).us)
    assert us[1] > 1.1 * us[0], us


FASTER_TILES = (  # (n, k, m, faster, slower): two schedules of gemm_wgmma that were measured, at least 15 % apart
    # parts of a cluster, added up in its shared memory, against parts that two to four blocks leave in the workspace
    (4096, 4096, 256, {"block_m": 128, "num_stages": 5, "split_k": 2}, {"stream_k": True}),
    (4096, 14336, 512, {"split_k": 2}, {"stream_k": True}),
    (8192, 28672, 256, {"split_k": 2}, {"stream_k": True, "cluster": 2}),
    # whole waves in step against shares at many k, where x does not fit the last cache
    (8192, 28672, 1024, {"cluster": 2, "raster": 4}, {"stream_k": True}),
    # and shares where two thirds of a last wave would idle
    (57344, 8192, 256, {"stream_k": True, "cluster": 2}, {"block_n": 256, "block_m": 128, "num_stages": 4}),
)  # fmt: skip


@pytest.mark.parametrize(("n", "k", "m", "faster", "slower"), FASTER_TILES)
def test_tiles_in_the_measured_order(n, k, m, faster, slower):
    us = [estimate(Workload(m, n, k, QuantFormat(4, 128, False)), replace(BIG, **fields), H200).us for fields in (faster, slower)]
    assert us[1] > 1.02 * us[0], us


def test_cpu_threads_and_rows():
    workload = Workload(1, 4096, 4096)
    one, two = (estimate(workload, Schedule("gemm_cpu", 32, 1, 32, num_warps=t, split_k=4), CPU).us for t in (1, 2))
    assert two < one
    rows = Workload(32, 4096, 4096)
    apart, together = (estimate(rows, Schedule("gemm_cpu", 32, b, 32, num_warps=2), CPU).us for b in (1, 8))
    assert together < apart
