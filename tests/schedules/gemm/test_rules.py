"""The GEMM rules: candidates are legal, few and deterministic, and every limit has its sentence."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilebit.layouts.formats import BITS, GROUP_SIZES, GemmFormat, QuantFormat
from tilebit.layouts.packing import gemm_layout
from tilebit.schedules.gemm.rules import (
    PACKED_K,
    SLAB_N,
    TICKETS,
    grid_blocks,
    shared_memory,
    wgmma_registers,
)
from tilebit.schedules.gemm.workload import PROPOSED_M, Workload
from tilebit.schedules.operations import MAX_CANDIDATES, candidates, legal, programs, workspace_words
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target, target_from_name

ARCHES = ("sm_80", "sm_86", "sm_89", "sm_90a")
H200 = target_from_name("sm_90a")
A100 = target_from_name("sm_80")
CPU = Target("cpu", "test cpu", 2, 0, 0, 32 << 20, 20.0, 0.1, 100.0, ("avx512", "avx2"))
FORMATS = st.builds(QuantFormat, st.sampled_from(BITS), st.sampled_from(GROUP_SIZES), st.booleans())
WORKLOADS = st.builds(Workload, st.sampled_from(PROPOSED_M), st.integers(1, 60000), st.integers(1, 30000), FORMATS)
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


def test_candidates_hold_the_measured_winners():
    large = candidates(Workload(4096, 14336, 4096), H200) or []
    tiles = [s for s in large if (s.block_n, s.block_m, s.block_k, s.num_stages, s.num_warps) == (128, 256, 128, 3, 8)]
    assert {(s.stream_k, s.cluster) for s in tiles} >= {(False, 1), (True, 2)}
    small = candidates(Workload(1, 4096, 4096), H200) or []
    assert any((s.program, s.block_n, s.block_m, s.num_warps) == ("gemm_stream_bulk", 32, 1, 16) for s in small)
    middle = candidates(Workload(64, 28672, 4096), H200) or []
    assert any((s.block_n, s.block_m) == (128, 64) for s in middle)


@pytest.mark.parametrize("m", [1, 2, 4, 8, 16, 17, 64])
def test_both_families_are_tried_where_m_is_small(m):
    found = {s.program for s in candidates(Workload(m, 4096, 4096), H200) or []}
    assert found == ({"gemm_stream_bulk", "gemm_wgmma"} if m <= 16 else {"gemm_wgmma"})
    found = {s.program for s in candidates(Workload(m, 4096, 4096), A100) or []}
    assert found == ({"gemm_stream", "gemm_mma"} if m <= 16 else {"gemm_mma"})


def test_no_candidates_where_no_program_runs():
    assert candidates(W4, replace(H200, arch="sm_70")) is None
    assert candidates(W4, replace(CPU, features=())) is None


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
    (replace(WGMMA, block_n=96), H200, W4, "block_n is 96; accepted: 64, 128, 192, 256"),
    (replace(WGMMA, block_m=24), H200, W4, "block_m is 24"),
    (replace(WGMMA, block_m=8), H200, W4, "block_m is 8; accepted: 16, 32"),
    (replace(MMA, block_m=24), A100, W4, "block_m is 24"),
    (replace(WGMMA, block_k=256), H200, W4, "block_k is 256; accepted for x of 16 bits: up to 128"),
    (replace(MMA, num_warps=4), A100, W4, "16 rows a warp"),
    (replace(MMA, block_n=256, num_warps=16), A100, Workload(64, 4096 + 64, 4096), "block_n is 256; accepted by gemm_mma for n 4160"),
    (
        replace(WGMMA, block_n=64, num_warps=4, cluster=2),
        H200,
        Workload(64, 4096 + 64, 4096),
        "cluster is 2; accepted for 65 tiles of 64 rows",
    ),
    (replace(WGMMA, block_k=128), H200, Workload(64, 4096, 4096 + 64), "accepted for k 4160 (padded to 4160): its divisors"),
    (replace(MMA, block_k=32), A100, W4, "block_k is 32; accepted at 4 bits: multiples of 64"),
    (replace(WGMMA, num_warps=20), H200, W4, "num_warps is 20"),
    (replace(WGMMA, block_n=64), H200, W4, "which 2 groups of four warps cannot share"),
    (replace(WGMMA, num_stages=1), H200, W4, "num_stages is 1; accepted: 2 to 8"),
    (replace(MMA, num_stages=6), A100, W4, "num_stages is 6; accepted: 2 to 5"),
    (replace(WGMMA, split_k=0), H200, W4, "split_k is 0"),
    (replace(WGMMA, split_k=17), H200, W4, "split_k is 17"),
    (replace(WGMMA, split_k=9), H200, Workload(64, 4096, 64 * 8), "a split would be empty"),
    (replace(MMA, split_k=3), A100, W4, "split_k is 3; accepted by gemm_mma for 64 steps of 64: its divisors"),
    (replace(WGMMA, split_k=2, cluster=2), H200, W4, "split_k is 2 and cluster 2; accepted: one of them 1"),
    (replace(WGMMA, cluster=3), H200, W4, "cluster is 3; accepted: 1, 2"),
    (replace(MMA, cluster=2), A100, W4, "cluster is 2; accepted by gemm_mma, which does not use it: 1"),
    (
        replace(WGMMA, stream_k=True, split_k=2),
        H200,
        W4,
        "stream_k goes with split_k 2; accepted: split_k 1",
    ),
    (replace(MMA, stream_k=True), A100, W4, "stream_k is True; accepted by gemm_mma, which does not use it: False"),
    (replace(WGMMA, tail=3), H200, W4, "tail is 3; accepted: 1, and without stream_k and split_k 2, 4"),
    (replace(WGMMA, stream_k=True, tail=2), H200, W4, "tail is 2; accepted: 1"),
    (replace(WGMMA, split_k=2, tail=2), H200, W4, "tail is 2; accepted: 1"),
    (replace(MMA, tail=2), A100, W4, "tail is 2; accepted by gemm_mma, which does not use it: 1"),
    (replace(WGMMA, block_m=32, tail=4), H200, W4, "block_m is 32 and tail 4; accepted: strips of 16"),
    (
        replace(WGMMA, block_n=256, block_m=16, num_stages=4, split_k=2),
        H200,
        W4,
        "16384 bytes of fp32 sums do not fit into the stages of x",
    ),
    (replace(WGMMA, min_blocks=5), H200, W4, "min_blocks is 5"),
    (replace(WGMMA, raster=-1), H200, W4, "raster is -1"),
    (replace(WGMMA, block_n=256, block_k=128, num_stages=8), H200, W4, "bytes of shared memory"),
    (replace(WGMMA, block_n=128, block_k=128, num_stages=4, min_blocks=3), H200, W4, "of an SM's shared memory"),
    (replace(WGMMA, block_m=256, block_n=256, num_stages=2), H200, W4, "registers for accumulators"),
    (replace(WGMMA, block_m=256, min_blocks=2), H200, W4, "registers for accumulators"),
    (replace(WGMMA, block_n=0), H200, W4, "block_n is 0"),
]


@pytest.mark.parametrize(("schedule", "target", "workload", "sentence"), ILLEGAL)
def test_every_limit_has_its_sentence(schedule, target, workload, sentence):
    reasons = legal(workload, schedule, target)
    assert any(sentence in reason for reason in reasons), reasons
    assert all(reason.endswith(".") for reason in reasons)


def test_illegal_cpu_schedule_is_passed_to_its_rule():
    assert legal(W4, Schedule("gemm_cpu", 7, 1, 32), CPU)


@pytest.mark.parametrize(("k", "accepted"), [(4096, 16), (448, 7), (576, 9), (64, 1)])
def test_a_wgmma_split_takes_any_number_of_steps(k, accepted):
    """Shares differ by a step at most, so no share is empty before there are more of them than steps."""
    workload, schedule = Workload(1, 4096, k), replace(WGMMA, block_m=16, num_stages=8)
    for split_k in range(1, accepted + 1):
        assert legal(workload, replace(schedule, split_k=split_k), H200) == []
    assert legal(workload, replace(schedule, split_k=accepted + 1), H200)


def test_an_mma_split_divides_the_steps():
    workload = Workload(64, 4096, 64 * 12)
    assert [split for split in range(1, 17) if not legal(workload, replace(MMA, split_k=split), A100)] == [1, 2, 3, 4, 6, 12]


def test_shared_memory_by_hand():
    """128 x 64 codes of 4 bits, 64 x 64 halves, 128 scales of one group, four 8-byte barriers: four stages, 32 columns of 128 halves to
    store through, 16 bytes for where the tile lies, and 512 bytes."""
    rest, of_channels = 32 * 128 * 2 + 16 + 512, 128 * 4

    def needed(format: GemmFormat, schedule: Schedule = WGMMA, **fields: Any) -> int:
        return shared_memory(Workload(64, 4096, 4096, format, **fields), schedule)

    assert needed(QuantFormat(4, 128)) == 4 * (4096 + 8192 + 256 + 32) + rest
    assert needed(QuantFormat(4, 32, symmetric=False)) == 4 * (4096 + 8192 + 2 * 2 * 256 + 32) + rest
    assert needed(QuantFormat(8, -1)) == 4 * (8192 + 8192 + 256 + 32) + rest + of_channels
    assert needed(QuantFormat(4, 128), replace(WGMMA, block_m=16)) == 4 * (4096 + 2048 + 256 + 32) + 16 * 128 * 2 + 16 + 512
    scales = 64 * 4  # fp32, of a tile's rows of x
    assert needed(QuantFormat(4, 128), token_scales=True) - needed(QuantFormat(4, 128)) == scales
    assert needed(QuantFormat.parse("w8a8_channel")) == 4 * (8192 + 4096 + 256 + 32) + rest + scales + of_channels
    # those of groups come with the stages
    assert needed(QuantFormat.parse("w8a8_g128"), replace(WGMMA, block_k=128)) == 4 * (16384 + 8192 + 256 + 256 + 32) + rest


def test_strips_take_more_steps_than_there_are_stages():
    """Where they are staged otherwise than tiles: else warps could stage one where others still read the tile ahead of it."""
    for block_m, more, accepted in ((32, 1, True), (32, 0, False), (64, 0, True)):
        schedule = replace(WGMMA, block_m=block_m, tail=2)
        assert (legal(Workload(64, 4096, (schedule.num_stages + more) * schedule.block_k), schedule, H200) == []) == accepted


def test_programs_of_gemm():
    assert set(programs("gemm")) == {
        "gemm_wgmma",
        "gemm_mma",
        "gemm_stream",
        "gemm_stream_bulk",
        "gemm_any",
        "gemm_any_binary",
        "gemm_any_wgmma",
        "gemm_cpu",
        "gemm_any_cpu",
    }


@pytest.mark.parametrize(("num_warps", "min_blocks"), list(product((4, 8, 12, 16), (1, 2, 3, 4))))
def test_registers_are_handed_on_and_not_made(num_warps, min_blocks):
    """What both sides take fits into what the launch gave to all threads alike, in the steps that setmaxnreg knows; a kernel that asks for
    more waits for ever."""
    threads = num_warps * 32 + 128
    producer, consumer = wgmma_registers(replace(WGMMA, num_warps=num_warps, min_blocks=min_blocks))
    given = min(255, Target.REGISTERS_PER_SM // (threads * min_blocks)) // 8 * 8
    assert producer * 128 + consumer * num_warps * 32 <= given * threads
    assert producer % 8 == consumer % 8 == 0 and 24 <= producer <= consumer <= 240


def test_a_persistent_grid_is_whole_clusters():
    assert grid_blocks(WGMMA, H200) == 132
    assert grid_blocks(replace(WGMMA, min_blocks=2), H200) == 264
    assert grid_blocks(replace(WGMMA, cluster=2), replace(H200, units=77)) == 76


def test_workspace_by_hand():
    """Tickets, then fp32 tiles: of every share of a tile, or two of every persistent block."""
    n_blocks, tile = 4096 // 128, 128 * 64
    assert workspace_words(W4, WGMMA, H200) == workspace_words(W4, replace(WGMMA, cluster=2), H200) == 0
    assert workspace_words(W4, replace(WGMMA, split_k=3), H200) == TICKETS + n_blocks * 3 * tile
    assert workspace_words(W4.with_m(65), replace(WGMMA, split_k=3), H200) == TICKETS + 2 * n_blocks * 3 * tile
    assert workspace_words(W4, replace(WGMMA, stream_k=True, cluster=2), H200) == TICKETS + 2 * 132 * tile
    assert workspace_words(W4.with_m(5000), replace(WGMMA, stream_k=True), H200) == TICKETS + 2 * 132 * tile
    assert workspace_words(W4, replace(MMA, split_k=4), A100) == TICKETS + n_blocks * 4 * tile
    assert workspace_words(replace(W4, n=65), replace(MMA, split_k=2), A100) == TICKETS + 1 * 2 * tile
    streamed = Schedule("gemm_stream", 32, 8, 128, 4, 8, split_k=2)
    assert workspace_words(W4, streamed, A100) == TICKETS + 8 * (4096 // 32) * 2 * 32 * 8
    assert workspace_words(W4, replace(streamed, program="gemm_stream_bulk"), H200) == 0, "its shares are a cluster"
    assert workspace_words(W4, Schedule("gemm_cpu", 32, 1, 32, split_k=4), CPU) == 0


@pytest.mark.parametrize("arch", ["sm_86", "sm_89"])
def test_an_sm_holds_as_many_threads_as_its_arch_has_places_for(arch: str):
    """1,536 where an A100 and an H100 hold 2,048."""
    four = Schedule("gemm_stream", 16, 1, 64, 2, 16, min_blocks=4)
    assert "threads, an SM" not in " ".join(legal(Workload(1, 4096, 4096), four, A100))
    assert "4 blocks have 2048 threads, an SM holds 1536" in " ".join(legal(Workload(1, 4096, 4096), four, target_from_name(arch)))
