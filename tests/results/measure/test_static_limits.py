"""Blocks that fit, bytes in flight and rates against numbers worked out by hand; simulated conflicts on addresses with and without any."""

from __future__ import annotations

import pytest

from results.measure.static import limits
from results.measure.static.conflicts import SCATTERED, STAGING, STMATRIX, STREAM, conflicts
from tilebit.layouts.formats import PER_CHANNEL, QuantFormat
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name
from tilebit.tiles.compiler.headers import device_source
from tilebit.tiles.gemm import mma, stream, wgmma

ASYMMETRIC, CHANNEL = QuantFormat(4, 128, False), QuantFormat(8, PER_CHANNEL, True)
T = "((int)threadIdx.x)"
# An ldmatrix of 8 rows of 128 bytes, as TileLang writes it: all of a matrix's rows start in the same bank unless the index swizzles them.
LDMATRIX = "tl::ptx_ldmatrix_x2((&(((half_t*)Xs)[({row} + {column})])), (&(B_local[0])));"
STAGED = "\n".join((STAGING, *SCATTERED))
DESCRIBED = "tl::initialize_wgmma_descriptor<{kind}, 1, 64>(desc_b, (&(((half_t*)Xs)[0])));"
STORED = "\n".join(STMATRIX)
ROW = f"((i_1 * 512) + (({T} & 7) * 64))"
PLAIN = LDMATRIX.format(row=ROW, column=f"(((ki & 3) * 16) + ((({T} & 15) >> 3) * 8))")
SWIZZLED = LDMATRIX.format(
    row=ROW,
    column=f"(((((({T} & 7) >> 2) + ((ki & 3) >> 1)) & 1) * 32) + (((((({T} & 3) >> 1) + (ki & 1)) & 1) * 16)"
    f" + ((((({T} & 15) >> 3) + ({T} & 1)) & 1) * 8)))",
)


@pytest.mark.parametrize(
    ("arch", "registers", "smem", "threads", "blocks"),
    [
        ("sm_80", 72, 32000, 128, 5),  # shared memory: 164 KiB over 33,024 bytes
        ("sm_80", 128, 65024, 256, 2),  # registers: 65,536 over 32,768
        ("sm_80", 168, 0, 384, 1),  # registers: 64,512 of 65,536
        ("sm_80", 224, 0, 96, 2),  # registers: a scheduler's 16,384 hold two warps of 7,168, the SM eight, not nine
        ("sm_80", 32, 0, 256, 8),  # warps: 64 over 8
        ("sm_86", 32, 0, 256, 6),  # warps: 48 over 8
        ("sm_86", 16, 0, 32, 16),  # blocks
        ("sm_90a", 255, 0, 288, 0),  # cannot launch
    ],
)
def test_blocks_per_sm(arch: str, registers: int, smem: int, threads: int, blocks: int) -> None:
    assert limits.blocks_per_sm(registers, smem, threads, target_from_name(arch)) == blocks


@pytest.mark.parametrize(
    ("workload", "schedule", "wanted"),
    [
        (Workload(1, 4096, 4096, ASYMMETRIC), Schedule("gemm_wgmma", 64, 8, 128, 8, 4), 8 * (4096 + 256)),
        (Workload(1, 4096, 256, ASYMMETRIC), Schedule("gemm_mma", 64, 8, 128, 5, 4), 2 * (4096 + 256)),  # two steps fill two stages
        (Workload(1, 4096, 4096, CHANNEL), Schedule("gemm_wgmma", 64, 8, 128, 8, 4), 8 * 8192),
        (Workload(1, 4096, 4096, ASYMMETRIC), Schedule("gemm_stream", 16, 8, 64, 4, 8), 8 * 4 * (512 + 64)),  # eight warps share k
        (Workload(1, 4096, 4096, ASYMMETRIC), Schedule("gemm_stream", 128, 8, 64, 4, 8), 4 * 4 * (4096 + 512)),  # two warps of rows
    ],
)
def test_bytes_in_flight(workload: Workload, schedule: Schedule, wanted: int) -> None:
    assert limits.bytes_in_flight(workload, schedule) == wanted


def test_rates() -> None:
    hopper, ampere = target_from_name("sm_90a"), target_from_name("sm_80")
    assert limits.clock_ghz(hopper) == pytest.approx(1.98, abs=0.01)
    assert limits.bytes_needed(hopper) == pytest.approx(64 * 1024)
    assert limits.bytes_needed(ampere) == pytest.approx(1250e3 / 108 * limits.latency_us())
    per_us = hopper.units * 4 * limits.clock_ghz(hopper) * 1e3
    assert limits.issue_us(per_us, hopper) == pytest.approx(1) and limits.issue_us(per_us, hopper, 2) == pytest.approx(2)
    loads, computes = Workload(1, 14336, 4096, ASYMMETRIC), Workload(4096, 14336, 4096, ASYMMETRIC)
    assert limits.floor_us(loads, hopper) == pytest.approx(loads.bytes / 4706e3)
    assert limits.floor_us(computes, hopper) == pytest.approx(computes.flops / 656e6)


def test_blocks_of_the_launch() -> None:
    workload = Workload(65, 4096, 4096)
    assert limits.grid_blocks(workload, Schedule("gemm_wgmma", 128, 64, 128, 4, 8, split_k=3), 132) == 32 * 2 * 3
    assert limits.grid_blocks(workload, Schedule("gemm_wgmma", 128, 64, 128, 4, 8, stream_k=True), 132) == 132


def test_conflicts_are_seen_in_generated_indices() -> None:
    small, large = (Schedule("gemm_mma", 64, block_m, 64, 4, 4) for block_m in (8, 64))
    assert conflicts(small, SWIZZLED) == {"packed line": 0, "scale": 0, "x": 0}
    assert conflicts(large, SWIZZLED + STAGED) == {"packed line": 0, "scale": 0, "x": 0, "output tile": 0}
    assert conflicts(small, PLAIN)["x"] == 8 * 2 * 7  # eight values of the loop variables, two matrices, their rows one after another


@pytest.mark.parametrize("block_m", [1, 2, 4, 8, 16])
def test_padded_rows_meet_no_bank_twice(block_m: int) -> None:
    assert set(conflicts(Schedule("gemm_stream", 64, block_m, 128, 4, 8), "\n".join(STREAM)).values()) == {0}


@pytest.mark.parametrize("kind", [0, 1, 2, 3])
def test_hardware_swizzles(kind: int) -> None:
    assert conflicts(Schedule("gemm_wgmma", 128, 256, 128, 3, 8), DESCRIBED.format(kind=kind) + STORED)["x"] == 0


@pytest.mark.parametrize(("block_n", "num_warps"), [(64, 4), (128, 4), (128, 8), (192, 4), (192, 12), (256, 4), (256, 8)])
def test_staged_tiles_meet_no_bank_twice(block_n: int, num_warps: int) -> None:
    found = conflicts(Schedule("gemm_wgmma", block_n, 64, 128, 3, num_warps), DESCRIBED.format(kind=1) + STORED)
    assert found == {"packed line": 0, "scale": 0, "x": 0, "output tile": 0}


def test_the_headers_compute_what_is_simulated() -> None:
    for headers, expressions in ((wgmma.HEADERS, STMATRIX), (mma.HEADERS, SCATTERED), (stream.HEADERS, STREAM)):
        source = device_source(headers)
        assert [e for e in expressions if e not in source] == []


@pytest.mark.parametrize(
    ("program", "source", "words"),
    [
        ("gemm_mma", "", "no ldmatrix"),
        ("gemm_wgmma", "", "no wgmma descriptor"),
        ("gemm_stream", STREAM[0], "does not compute"),
        ("gemm_mma", SWIZZLED + STAGING, "does not compute"),
        ("gemm_wgmma", DESCRIBED.format(kind=1), "does not compute"),
        ("gemm_mma", "tl::ptx_ldmatrix_x4((&(((half_t*)Xs)[f(1), 'x']", "cannot evaluate"),
    ],
)
def test_a_source_without_the_access_is_refused(program: str, source: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        conflicts(Schedule(program, 64, 8, 64, 4, 4), source)
