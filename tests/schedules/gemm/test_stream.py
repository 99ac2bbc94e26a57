"""The rules of the small-m GEMMs: their limits, and the shared memory that they and the device code must agree on."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
from emulation.device_code import build, needs_host_compiler
from hypothesis import given, settings
from hypothesis import strategies as st

from tilebit.layouts.formats import BITS, GROUP_SIZES, QuantFormat
from tilebit.schedules.gemm.rules import workspace_words
from tilebit.schedules.gemm.stream import (
    BLOCK_K,
    BLOCK_M,
    PACKED_K,
    STATIC_SMEM,
    exchange_at,
    ring_bytes,
    rings,
    shared_words,
    slot_bytes,
    step_groups,
    stream_candidates,
    sum_pitch,
    warp_bytes,
    warp_rows,
    warps_n,
    weight_bytes,
    x_bytes,
    x_pitch,
)
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import legal, params
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name
from tilebit.tiles.gemm.stream import product_type
from tilebit.tiles.program import DEVICE_DIR

H200, A100 = target_from_name("sm_90a"), target_from_name("sm_80")
W4 = Workload(1, 4096, 4096)
HALVES = replace(W4, n=8192, gate="silu", gate_halves=True)
ASYNC = Schedule("gemm_stream", 64, 8, 128, 3, 8)
BULK = replace(ASYNC, program="gemm_stream_bulk")


def test_baselines_are_legal():
    assert legal(W4, ASYNC, A100) == legal(W4, ASYNC, H200) == legal(W4, BULK, H200) == []
    assert legal(W4.with_m(1000), BULK, H200) == [], "they run with any m"


ILLEGAL = [
    (BULK, A100, W4, "gemm_stream_bulk does not run on sm_80; accepted: sm_90a"),
    (replace(BULK, block_m=3), H200, W4, "block_m is 3; accepted: 1, 2, 4, 8, 16"),
    (replace(BULK, block_m=32), H200, W4, "block_m is 32"),
    (replace(BULK, block_k=256), H200, W4, "block_k is 256; accepted: 32, 64, 128"),
    (replace(BULK, block_n=72), H200, W4, "block_n is 72; accepted: multiples of 16 up to 512"),
    (replace(BULK, block_n=1024), H200, W4, "block_n is 1024"),
    (replace(BULK, block_n=0), H200, W4, "block_n is 0"),
    (replace(BULK, num_warps=32), H200, W4, "num_warps is 32; accepted: 1 to 16"),
    (replace(BULK, num_stages=1), H200, W4, "num_stages is 1; accepted: 2 to 8"),
    (replace(BULK, split_k=9), H200, W4, "split_k is 9; accepted: 1 to 8"),
    (replace(BULK, min_blocks=9), H200, W4, "min_blocks is 9"),
    (replace(BULK, raster=2), H200, W4, "raster is 2; accepted by gemm_stream_bulk, which does not use it: 0"),
    (replace(ASYNC, stream_k=True), A100, W4, "stream_k is True; accepted by gemm_stream, which does not use it"),
    (replace(BULK, block_n=128), H200, Workload(1, 64, 4096), "block_n is 128; accepted for n 64 (padded to 64): up to that"),
    (replace(BULK, block_n=96), H200, HALVES, "block_n is 96; accepted where gates are the first half of 8192 rows: divisors of 8192"),
    (replace(BULK, block_k=32), H200, W4, "block_k is 32; accepted for k 4096 at 4 bits: multiples of 64"),
    (BULK, H200, Workload(1, 4096, 4096 + 64), "multiples of 64 that divide 4160 (k padded)"),
    (replace(BULK, block_n=256, num_warps=6), H200, W4, "num_warps is 6; accepted for block_n 256: multiples of 4 (64 rows a warp)"),
    (replace(BULK, split_k=5), H200, Workload(1, 4096, 512), "split_k is 5, but k 512 has 4 steps of 128: a share would be empty"),
    (replace(BULK, num_stages=8, num_warps=16), H200, W4, "bytes of an SM's shared memory"),
    (replace(ASYNC, min_blocks=8, num_stages=2), A100, W4, "bytes of an SM's shared memory"),
    (replace(BULK, block_m=16, num_warps=16, min_blocks=2, num_stages=2), H200, W4, "a thread needs about"),
]


@pytest.mark.parametrize(("schedule", "target", "workload", "sentence"), ILLEGAL)
def test_every_limit_has_its_sentence(schedule, target, workload, sentence):
    reasons = legal(workload, schedule, target)
    assert any(sentence in reason for reason in reasons), reasons
    assert all(reason.endswith(".") for reason in reasons)


@pytest.mark.parametrize(
    ("block_n", "rows", "in_row"),
    [(16, 16, 1), (32, 32, 1), (64, 64, 1), (80, 80, 1), (96, 48, 2), (112, 112, 1), (208, 16, 13), (224, 112, 2), (256, 64, 4)],
)
def test_warps_hold_rows_that_divide_the_tile(block_n, rows, in_row):
    schedule = replace(BULK, block_n=block_n, num_warps=2 * in_row)
    assert (warp_rows(schedule), warps_n(schedule), rings(schedule)) == (rows, in_row, 2)


@pytest.mark.parametrize("m", [0, 17, 4096])
def test_only_a_small_m_has_candidates(m):
    assert stream_candidates(W4.with_m(m), H200) == []


def test_groups_of_x_and_an_index_of_channels_are_served_for_few_rows():
    for name in ("w8a8_g128", "w4a8_g128_asym"):
        for width in (0, 8192):
            workload = Workload(4, 4096, 4096, QuantFormat.parse(name), width=width)
            for target in (H200, A100):
                tried = stream_candidates(workload, target)
                assert tried and all(legal(workload, schedule, target) == [] for schedule in tried)


@pytest.mark.parametrize(("target", "program"), [(H200, "gemm_stream_bulk"), (A100, "gemm_stream")])
def test_candidates_cover_m_with_one_tile(target, program):
    for m, block_m in ((1, 1), (2, 2), (3, 4), (8, 8), (9, 16), (16, 16)):
        found = stream_candidates(W4.with_m(m), target)
        assert found and {(s.program, s.block_m) for s in found} == {(program, block_m)}


def test_a_workspace_is_taken_where_one_is_made():
    for target, schedule in ((A100, ASYNC), (H200, ASYNC), (H200, BULK)):
        for split_k in (1, 2, 4):
            split = replace(schedule, split_k=split_k)
            taken = split_k > 1 and schedule == ASYNC
            assert bool(workspace_words(W4, split, target)) == ("workspace" in params(W4, split, target)) == taken


def test_shared_memory_by_hand():
    """8 rows of 128 halves and 16 bytes of x, 64 x 128 codes of 4 bits, 64 scales: a slot. Eight warps have three each."""
    slot = 8 * (256 + 16) + 64 * 128 // 2 + 64 * 2
    assert slot_bytes(W4, ASYNC) == slot and weight_bytes(W4.format, ASYNC) == 4096
    assert shared_words(W4, ASYNC, A100) * 4 == 8 * 3 * slot
    assert shared_words(W4, BULK, H200) * 4 == 8 * 3 * (slot + 16), "two mbarriers a slot; x and weights fill whole lines of 128 bytes"
    narrow = replace(BULK, block_m=1)
    assert slot_bytes(W4, narrow) == 384 + 64 * 128 // 2 + 64 * 2, "one row of x, 272 bytes, takes three lines"


# What of tilebit::RawProduct is arithmetic on its template arguments; the rest is instructions that a host has not.
SIZES = ("STEP_K", "ROWS", "PITCH", "SCALE_BYTES")


def product_sizes(pairs: list[tuple[Workload, Schedule]]) -> list[list[int]]:
    """``SIZES`` of the ``tilebit::RawProduct`` of each pair, computed by the host's compiler from the header's own text."""
    source = (DEVICE_DIR / "codecs/raw_product.cuh").read_text()
    start = source.index("template <typename T, typename CODE, bool SYMMETRIC, int GROUP_STEPS")
    members = "template <int N> struct Uint { static constexpr int BITS = N; };" + source[start : source.index("using R = ", start)]
    functions = [
        f'extern "C" void sizes_{i}(int* out) {{ using S = {product_type(w, s)}; '
        + " ".join(f"*out++ = S::{size};" for size in SIZES)
        + " }"
        for i, (w, s) in enumerate(pairs)
    ]
    library = build("\n".join(["namespace tilebit {", members, "};", "}", *functions]))
    found = []
    for i in range(len(pairs)):
        out = (ctypes.c_int * len(SIZES))()
        getattr(library, f"sizes_{i}")(out)
        found.append(list(out))
    return found


def sized_pairs() -> list[tuple[Workload, Schedule]]:
    """Every format with tiles of 16, 32 and 64 rows a warp, one and several warps a row, short and long rings, each number of columns."""
    shapes = ((16, 1, 8, 2), (32, 2, 16, 3), (64, 4, 4, 8), (80, 8, 10, 2), (224, 16, 6, 2), (256, 1, 4, 4))
    pairs = []
    for bits in BITS:
        for group in GROUP_SIZES:
            for symmetric in (True, False):
                for i, (block_n, block_m, num_warps, num_stages) in enumerate(shapes):
                    workload = Workload(block_m, 4480, 4096, QuantFormat(bits, group, symmetric), ("float16", "bfloat16")[i % 2])
                    block_k = next(k for k in BLOCK_K[i % 3 :] + BLOCK_K if k % PACKED_K[bits] == 0)
                    pairs += [
                        (workload, Schedule(p, block_n, block_m, block_k, num_stages, num_warps))
                        for p in ("gemm_stream", "gemm_stream_bulk")
                    ]
    return pairs


@needs_host_compiler
def test_rule_and_device_code_agree_on_a_slot():
    """The program puts x, weights and parameters where the device code reads them."""
    pairs = sized_pairs()
    for (workload, s), sizes in zip(pairs, product_sizes(pairs), strict=True):
        f = workload.format
        assert sizes == [s.block_k, warp_rows(s), x_pitch(workload, s), step_groups(f, s) * warp_rows(s) * 2]
        assert x_bytes(workload, s) >= s.block_m * x_pitch(workload, s)
        assert warp_bytes(workload, s) >= weight_bytes(f, s) // warps_n(s) + sizes[-1] * (1 if f.symmetric else 2)


def test_rings_sums_and_what_is_exchanged_fit():
    """A ring that is larger than what was asked for would run into other memory."""
    for workload, s in sized_pairs():
        slots = rings(s) * s.num_stages
        ring = slots * slot_bytes(workload, s)
        assert ring == ring_bytes(workload, s) and ring % 16 == 0
        needed = max(ring + 16 * slots * (s.program == "gemm_stream_bulk"), rings(s) * s.block_m * sum_pitch(s) * 4)
        assert exchange_at(workload, s) * 4 == -(-needed // 16) * 16
        given = shared_words(workload, s, H200) * 4
        if s.program == "gemm_stream":
            assert given == -(-needed // 16) * 16
        else:  # and no more blocks fit than were asked for
            assert given >= needed
            assert (s.min_blocks + 1) * (given + H200.BLOCK_SMEM) > H200.smem_per_sm


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["gemm_stream", "gemm_stream_bulk"]), st.sampled_from([16, 32, 64, 80, 96, 128, 224, 256]), st.sampled_from(BLOCK_M),
    st.sampled_from(BLOCK_K), st.integers(2, 8), st.integers(1, 16), st.integers(1, 8), st.integers(1, 4),
    st.builds(QuantFormat, st.sampled_from(BITS), st.sampled_from(GROUP_SIZES), st.booleans()),
)  # fmt: skip
def test_what_is_legal_fits(program, block_n, block_m, block_k, stages, warps, split, blocks, format):
    schedule, workload = Schedule(program, block_n, block_m, block_k, stages, warps, split, blocks), Workload(1, 13440, 8192, format)
    if not legal(workload, schedule, H200):
        smem = shared_words(workload, schedule, H200) * 4 + STATIC_SMEM
        assert smem <= H200.smem and blocks * (smem + H200.BLOCK_SMEM) <= H200.smem_per_sm
        assert blocks * warps * 32 <= 2048 and warps % warps_n(schedule) == 0
        assert 8192 // block_k >= split
