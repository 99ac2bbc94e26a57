"""The GEMM rules: candidates are legal, few and deterministic, and every limit has its sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilebit.layouts.formats import BITS, GROUP_SIZES, QuantFormat
from tilebit.layouts.packing import gemm_layout
from tilebit.schedules.rules.gemm import (
    MAX_CANDIDATES,
    PACKED_K,
    PROGRAMS,
    SLAB_N,
    candidates,
    legal,
    programs_for,
    shared_memory,
)
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target, target_from_name
from tilebit.schedules.workload import M_BUCKETS, Workload

ARCHES = ("sm_80", "sm_86", "sm_89", "sm_90a")
H200 = target_from_name("sm_90a")
A100 = target_from_name("sm_80")
CPU = Target("cpu", "test cpu", 2, 0, 0, 32 << 20, 20.0, 0.1, 100.0, ("avx512", "avx2"))
FORMATS = st.builds(QuantFormat, st.sampled_from(BITS), st.sampled_from(GROUP_SIZES), st.booleans())
WORKLOADS = st.builds(Workload, st.sampled_from(M_BUCKETS), st.integers(1, 60000), st.integers(1, 30000), FORMATS)
TARGETS = st.sampled_from([*(target_from_name(a) for a in ARCHES), CPU])

WGMMA = Schedule("gemm_wgmma", 128, 64, 64, 4, 8)
MMA = Schedule("gemm_mma", 128, 64, 64, 3, 8)
W4 = Workload(64, 4096, 4096)


@settings(max_examples=60, deadline=None)
@given(WORKLOADS, TARGETS)
def test_candidates_are_legal_few_distinct_and_deterministic(workload, target):
    found = candidates(workload, target)
    assert found, "every supported target has a program"
    assert 1 <= len(found) <= MAX_CANDIDATES
    assert len(set(found)) == len(found)
    assert found == candidates(workload, target)
    for schedule in found:
        assert legal(workload, schedule, target) == []
        assert schedule.program == programs_for(target.arch)[0]


def test_candidates_hold_the_measured_winners():
    large = candidates(Workload(4096, 14336, 4096), H200) or []
    assert any((s.block_n, s.block_m, s.block_k, s.num_stages, s.num_warps) == (128, 256, 128, 3, 8) for s in large)
    small = candidates(Workload(1, 4096, 4096), H200) or []
    assert any(s.block_n == 64 and s.block_m == 8 and s.num_stages >= 5 and s.split_k >= 2 for s in small)
    assert {1, 4} <= {s.min_blocks for s in small}
    middle = candidates(Workload(64, 28672, 4096), H200) or []
    assert any((s.block_n, s.block_m, s.num_warps, s.min_blocks) == (128, 64, 4, 2) for s in middle)


def test_no_candidates_where_no_program_runs():
    assert candidates(W4, replace(H200, arch="sm_70")) is None
    assert candidates(W4, replace(CPU, features=())) is None
    assert programs_for("sm_70") == ()


def test_programs_for_every_arch():
    assert programs_for("sm_90a") == ("gemm_wgmma", "gemm_mma")
    assert programs_for("sm_80") == programs_for("sm_86") == programs_for("sm_89") == ("gemm_mma",)
    assert programs_for("cpu") == ("gemm_cpu",)


@pytest.mark.parametrize("bits", BITS)
def test_rule_and_packed_layout_agree(bits):
    layout = gemm_layout("sm_90a", bits)
    assert (layout.tile_n, layout.tile_k) == (SLAB_N, PACKED_K[bits])


def test_baselines_are_legal():
    assert legal(W4, WGMMA, H200) == []
    assert legal(W4, MMA, A100) == []
    assert legal(W4, MMA, H200) == []  # its code runs there


ILLEGAL = [
    (replace(WGMMA, program="gemm_fpga"), H200, W4, "program is 'gemm_fpga'"),
    (WGMMA, A100, W4, "gemm_wgmma does not run on sm_80; accepted: sm_90a"),
    (replace(WGMMA, block_n=96), H200, W4, "block_n is 96; accepted: 64, 128, 256"),
    (replace(WGMMA, block_m=24), H200, W4, "block_m is 24"),
    (replace(MMA, block_m=24), A100, W4, "block_m is 24"),
    (replace(WGMMA, block_k=256), H200, W4, "block_k is 256; accepted: 32, 64, 128"),
    (replace(MMA, num_warps=4), A100, W4, "16 rows a warp"),
    (replace(WGMMA, block_n=256), H200, Workload(64, 4096 + 64, 4096), "accepted for n 4160 (padded to 4160): its divisors"),
    (replace(WGMMA, block_k=128), H200, Workload(64, 4096, 4096 + 64), "accepted for k 4160 (padded to 4160): its divisors"),
    (replace(MMA, block_k=32), A100, W4, "block_k is 32; accepted at 4 bits: multiples of 64"),
    (replace(WGMMA, num_warps=12), H200, W4, "num_warps is 12"),
    (replace(WGMMA, block_n=64), H200, W4, "which 2 groups of four warps cannot share"),
    (replace(WGMMA, num_stages=1), H200, W4, "num_stages is 1; accepted: 2 to 8"),
    (replace(MMA, num_stages=6), A100, W4, "num_stages is 6; accepted: 2 to 5"),
    (replace(WGMMA, split_k=0), H200, W4, "split_k is 0"),
    (replace(WGMMA, split_k=17), H200, W4, "split_k is 17"),
    (replace(WGMMA, split_k=6), H200, Workload(64, 4096, 64 * 8), "a split would be empty"),
    (replace(WGMMA, min_blocks=5), H200, W4, "min_blocks is 5"),
    (replace(WGMMA, raster=-1), H200, W4, "raster is -1"),
    (replace(WGMMA, block_n=256, block_k=128, num_stages=8), H200, W4, "bytes of shared memory"),
    (replace(WGMMA, block_n=128, block_k=128, num_stages=4, min_blocks=3), H200, W4, "of an SM's shared memory"),
    (replace(WGMMA, block_m=256, block_n=256, num_stages=2), H200, W4, "registers for accumulators"),
    (replace(WGMMA, block_m=128, min_blocks=2), H200, W4, "registers for accumulators"),
    (replace(WGMMA, block_n=0), H200, W4, "block_n is 0"),
]


@pytest.mark.parametrize(("schedule", "target", "workload", "sentence"), ILLEGAL)
def test_every_limit_has_its_sentence(schedule, target, workload, sentence):
    reasons = legal(workload, schedule, target)
    assert any(sentence in reason for reason in reasons), reasons
    assert all(reason.endswith(".") for reason in reasons)


def test_illegal_cpu_schedule_is_passed_to_its_rule():
    assert legal(W4, Schedule("gemm_cpu", 7, 1, 32), CPU)


@pytest.mark.parametrize(("k", "block_k", "accepted"), [(4096, 64, 16), (448, 64, 4), (576, 64, 5), (64, 64, 1)])
def test_largest_split_leaves_no_split_empty(k, block_k, accepted):
    """Splits take ceil(steps / split_k) steps each: 9 steps in 5 splits are 2+2+2+2+1, in 6 splits the last would be empty."""
    workload, schedule = Workload(1, 4096, k), replace(WGMMA, block_m=8, block_k=block_k)
    assert legal(workload, replace(schedule, split_k=accepted), H200) == []
    steps, split = -(-k // block_k), accepted + 1
    if split <= 16 and (split - 1) * -(-steps // split) >= steps:
        assert legal(workload, replace(schedule, split_k=split), H200)


def test_shared_memory_by_hand():
    """128 x 64 codes of 4 bits, 64 x 64 halves, 128 scales of one group, two 8-byte barriers: four stages and 1 KiB."""
    assert shared_memory(QuantFormat(4, 128), WGMMA) == 4 * (4096 + 8192 + 256 + 16) + 1024
    assert shared_memory(QuantFormat(4, 32, symmetric=False), WGMMA) == 4 * (4096 + 8192 + 2 * 2 * 256 + 16) + 1024
    assert shared_memory(QuantFormat(8, -1), WGMMA) == 4 * (8192 + 8192 + 256 + 16) + 1024
    assert set(PROGRAMS) == {"gemm_wgmma", "gemm_mma", "gemm_cpu"}
