"""The cost model: its arithmetic by hand, and the orders of schedules that measurements have settled."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilebit.layouts.formats import QuantFormat
from tilebit.schedules.cost import DEQUANT_OPS, estimate
from tilebit.schedules.rules.gemm import candidates
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target, target_from_name
from tilebit.schedules.workload import M_BUCKETS, Workload

H200 = target_from_name("sm_90a")
CPU = Target("cpu", "test cpu", 2, 0, 0, 32 << 20, 20.0, 0.1, 100.0, ("avx512", "avx2"))
BIG = Schedule("gemm_wgmma", 128, 256, 128, 3, 8)


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(M_BUCKETS), st.integers(1, 60000), st.integers(1, 30000), st.sampled_from(["sm_80", "sm_86", "sm_89", "sm_90a", "cpu"])
)
def test_terms_add_up(m, n, k, arch):
    target = CPU if arch == "cpu" else target_from_name(arch)
    workload = Workload(m, n, k)
    for schedule in (candidates(workload, target) or [])[::7]:
        e = estimate(workload, schedule, target)
        body = e.passes * max(e.load_us, e.dequant_us + e.mma_us)
        assert e.us == pytest.approx(e.launch_us + e.pipeline_us + body + e.split_us)
        assert 0 < e.utilization <= 1 and e.waves >= 1 and e.passes == -(-m // schedule.block_m)
        assert e.bound == ("load" if e.load_us >= e.dequant_us + e.mma_us else "compute")
        assert min(e.load_us, e.dequant_us, e.mma_us, e.us) > 0
        assert (e.split_us > 0) == (schedule.split_k > 1 and target.is_cuda)


def test_equation_4_by_hand():
    """A grid of exactly one wave has no idle SM, so dequantization and MMA are N * K over the device's rates."""
    n, k = 132 * 128, 4096
    e = estimate(Workload(256, n, k), BIG, H200)
    assert e.utilization == 1.0
    assert e.dequant_us == pytest.approx(DEQUANT_OPS[4] * n * k / 33450e3)
    assert e.mma_us == pytest.approx(2 * 256 * n * k / 656e6)


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
    s = Schedule("gemm_wgmma", 128, 8, 64, 8, 4)
    narrow, wide = Workload(1, 4096, 14336), Workload(1, 132 * 128 * 4, 4096)
    assert estimate(narrow, replace(s, split_k=4), H200).us < estimate(narrow, s, H200).us
    assert estimate(wide, replace(s, split_k=4), H200).us > estimate(wide, s, H200).us


def test_one_tile_more_than_a_wave_costs_a_wave():
    exact, over = (estimate(Workload(256, n, 4096), BIG, H200) for n in (132 * 128, 133 * 128))
    assert (exact.waves, over.waves) == (1, 2)
    assert over.mma_us > 1.9 * exact.mma_us


def test_shallow_pipelines_load_slowly():
    s = Schedule("gemm_wgmma", 64, 8, 64, 8, 4)
    workload = Workload(1, 132 * 64, 4096)
    assert estimate(workload, replace(s, num_stages=2), H200).load_us > 1.5 * estimate(workload, s, H200).load_us


def test_eight_bits_load_longer_than_four():
    four, eight = (estimate(Workload(1, 14336, 4096, QuantFormat(bits)), Schedule("gemm_wgmma", 64, 8, 64, 8, 4), H200) for bits in (4, 8))
    assert eight.load_us > four.load_us


def test_estimates_are_near_the_measured_prototype():
    """The best estimate is within a factor of two of what a first kernel measured on an H200 (us)."""
    for n, k, m, measured in (
        (4096, 4096, 1, 6.9),
        (14336, 4096, 1, 18.0),
        (14336, 4096, 256, 45.2),
        (4096, 14336, 4096, 607),
        (14336, 4096, 4096, 639),
    ):
        workload = Workload(m, n, k)
        best = min(estimate(workload, s, H200).us for s in candidates(workload, H200) or [])
        assert measured / 2 < best < measured * 2, (n, k, m, best)


def test_cpu_threads_and_rows():
    workload = Workload(1, 4096, 4096)
    one, two = (estimate(workload, Schedule("gemm_cpu", 32, 1, 32, num_warps=t, split_k=4), CPU).us for t in (1, 2))
    assert two < one
    rows = Workload(32, 4096, 4096)
    apart, together = (estimate(rows, Schedule("gemm_cpu", 32, b, 32, num_warps=2), CPU).us for b in (1, 8))
    assert together < apart
