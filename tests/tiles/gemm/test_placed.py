"""Products that store by an index: some columns of a wider y, and two rows of the weight added up for one column. Of every program
that does, without a GPU, in orders that are hard on an index; what lies between is left as it was."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tilebit.autotune.problems.gemm import Problem
from tilebit.autotune.problems.gemm_drawn import exact_problem, layer_index
from tilebit.autotune.problems.verify import Gate, check_exact, check_guards, guarded_output
from tilebit.autotune.worker_process import launch
from tilebit.layouts.formats import QuantFormat
from tilebit.schedules.gemm import stream
from tilebit.schedules.gemm.joined import first_joined, n_blocks, scatters
from tilebit.schedules.gemm.parts import ADDED, NOWHERE
from tilebit.schedules.gemm.rules import TICKETS
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import legal, workspace_words
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import detect_target, target_from_name
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileRequest
from tilebit.tiles.compiler.kernel import Kernel
from tilebit.tiles.compiler.pool import CompilePool
from tilebit.weights.paired import row_count

sys.path.append(str(Path(__file__).parents[1]))
from emulation.device_code import KernelFault, needs_host_compiler
from emulation.emulated_gemm import Case, Edits, EmulatedGemm
from emulation.generated_gemm import GeneratedGemm
from emulation.planted import swap
from gemm_cases import GROUP_WISE, label

STREAMS = tuple(stream.ARCHES)
HOPPER = replace(target_from_name("sm_90a"), units=5)  # as in test_emulated_gemm.py
TARGET = dict.fromkeys(("gemm_wgmma", *STREAMS), HOPPER) | {"gemm_mma": target_from_name("sm_80")}
BYTES, NIBBLES = GROUP_WISE
CHANNEL = QuantFormat(8, -1, True)
LQQ, ASYM = map(QuantFormat.parse, ("w4a8_lqq_g64", "w4a8_channel_asym"))

# Of one, two, three and four slabs a warpgroup and ragged; shared tiles through a workspace and by a cluster; strips; parts before it.
CUDA_CASES = (
    (Workload(40, 190, 576, NIBBLES, "bfloat16", bias=True, width=270), Schedule("gemm_wgmma", 128, 32, 128, 3, 8)),
    (Workload(13, 100, 300, BYTES, width=101), Schedule("gemm_wgmma", 64, 16, 128, 4, 4)),
    (Workload(33, 250, 256, BYTES, bias=True, width=170), Schedule("gemm_wgmma", 256, 32, 128, 2, 8)),
    (Workload(20, 190, 256, NIBBLES, width=190), Schedule("gemm_wgmma", 192, 48, 128, 3, 4)),
    (Workload(40, 128, 576, BYTES, bias=True, width=100), Schedule("gemm_wgmma", 128, 64, 128, 2, 8, split_k=2)),
    (Workload(60, 190, 640, BYTES, "bfloat16", width=333), Schedule("gemm_wgmma", 64, 16, 128, 2, 4, stream_k=True)),
    (Workload(100, 190, 512, BYTES, width=200), Schedule("gemm_wgmma", 64, 32, 128, 3, 4, tail=2)),
    (Workload(20, 72, 256, CHANNEL, bias=True, token_scales=True, width=144), Schedule("gemm_wgmma", 64, 16, 64, 3, 4)),
    (Workload(20, 190, 576, NIBBLES, "bfloat16", bias=True, width=191), Schedule("gemm_mma", 64, 16, 128, 3, 4)),
    (Workload(40, 250, 300, BYTES, bias=True, width=190), Schedule("gemm_mma", 256, 32, 128, 2, 16)),
    (Workload(7, 505, 300, BYTES, "bfloat16", width=505), Schedule("gemm_mma", 128, 8, 128, 3, 8, split_k=3)),
    (Workload(1, 190, 576, NIBBLES, "bfloat16", bias=True, width=270), Schedule("gemm_stream_bulk", 32, 1, 64, 3, 4)),
    (Workload(13, 250, 640, BYTES, bias=True, width=170), Schedule("gemm_stream_bulk", 64, 16, 64, 2, 4, split_k=2)),
    (Workload(5, 505, 300, NIBBLES, width=600), Schedule("gemm_stream", 128, 8, 64, 2, 4, split_k=2)),
    (Workload(3, 72, 256, CHANNEL, "bfloat16", token_scales=True, width=144), Schedule("gemm_stream", 64, 4, 64, 3, 4)),
    (Workload(20, 176, 512, LQQ, bias=True, width=100), Schedule("gemm_wgmma", 64, 16, 128, 3, 4)),
    (Workload(9, 144, 512, LQQ, "bfloat16", bias=True, width=80), Schedule("gemm_stream_bulk", 64, 16, 128, 2, 4)),
    (
        Workload(7, 190, 576, NIBBLES, "bfloat16", bias=True, width=150),
        Schedule("gemm_stream_bulk", 80, 8, 64, 2, 2, split_k=2),
    ),  # overlaps
    (Workload(20, 144, 256, ASYM, width=90), Schedule("gemm_wgmma", 128, 16, 128, 3, 8)),
    (Workload(20, 144, 256, ASYM, bias=True, width=90), Schedule("gemm_mma", 64, 16, 64, 3, 4)),
)
# Tiles of bytes whose nibbles are rows of their own: of groups' sums, with a short last tile, shared in both ways, cut, and of channels.
NIBBLE_CASES = (
    (Workload(40, 320, 576, NIBBLES, "bfloat16", True, width=208, nibbles=True), Schedule("gemm_wgmma", 64, 32, 128, 3, 4)),
    (Workload(33, 480, 256, NIBBLES, width=300, nibbles=True), Schedule("gemm_wgmma", 128, 48, 128, 2, 8)),
    (Workload(60, 400, 640, NIBBLES, width=217, nibbles=True), Schedule("gemm_wgmma", 64, 16, 128, 2, 4, stream_k=True)),
    (Workload(40, 320, 576, NIBBLES, width=160, nibbles=True), Schedule("gemm_wgmma", 64, 32, 128, 2, 4, split_k=2)),
    (Workload(40, 320, 576, NIBBLES, width=170, nibbles=True), Schedule("gemm_wgmma", 64, 16, 128, 2, 4, split_k=3)),
    (Workload(100, 336, 512, NIBBLES, width=200, nibbles=True), Schedule("gemm_wgmma", 64, 32, 128, 3, 4, tail=2)),
    (Workload(20, 320, 512, LQQ, bias=True, width=200, nibbles=True), Schedule("gemm_wgmma", 64, 16, 128, 3, 4)),
    (Workload(20, 400, 256, ASYM, bias=True, width=240, nibbles=True), Schedule("gemm_wgmma", 128, 16, 256, 2, 8)),
    (Workload(20, 320, 256, ASYM, width=180, nibbles=True), Schedule("gemm_wgmma", 64, 16, 64, 3, 4)),
)
# As above, where others store them: of shared tiles, whole ones and strips, two tiles of bytes one after another, two warpgroups.
SCATTERED_CASES = (
    (Workload(250, 400, 640, NIBBLES, width=217, nibbles=True), Schedule("gemm_wgmma", 64, 16, 128, 2, 4, stream_k=True)),
    (Workload(250, 336, 1000, NIBBLES, "bfloat16", True, width=200, nibbles=True), Schedule("gemm_wgmma", 64, 32, 128, 3, 4, tail=2)),
    (Workload(200, 480, 1024, NIBBLES, width=300, nibbles=True), Schedule("gemm_wgmma", 128, 32, 128, 2, 8, stream_k=True, raster=2)),
    (Workload(250, 320, 1024, LQQ, bias=True, width=200, nibbles=True), Schedule("gemm_wgmma", 64, 32, 128, 3, 4, stream_k=True)),
)
TILED_CASES = tuple(case for case in CUDA_CASES if case[1].program not in STREAMS)
CPU_CASES = (
    (Workload(5, 100, 576, BYTES, bias=True, width=130), Schedule("gemm_cpu", 32, 2, 32, num_warps=2)),
    (Workload(6, 257, 300, NIBBLES, "bfloat16", width=257), Schedule("gemm_cpu", 64, 2, 32, num_warps=2, split_k=2)),
    (Workload(3, 64, 64, QuantFormat(4, 64, False), bias=True, width=1000), Schedule("gemm_cpu", 32, 1, 32, num_warps=2)),
)
ORDERS = ("drawn", "ascending", "reversed", "pairs", "alternating", "the last ones", "layer")


def ordered(problem: Problem, order: str) -> Problem:
    """``problem`` with its rows stored elsewhere; "drawn" adds rows up here and there, "layer" does as a mixed layer, "pairs" wherever
    it can, the others nowhere."""
    w = problem.workload
    rows = torch.arange(w.n, dtype=torch.int32)
    pairs = torch.where(rows % 16 < 8, rows // 16 * 8 + rows % 8, ADDED)
    generator = torch.Generator().manual_seed(w.n)
    found = {
        "drawn": problem.operands["channels"],
        "layer": layer_index(w, generator),
        "pairs": pairs,
        "ascending": rows,
        "reversed": w.width - 1 - rows,
        "alternating": torch.cat([torch.arange(0, w.width, 2), torch.arange(1, w.width, 2)])[: w.n].to(torch.int32),
        "the last ones": rows + (w.width - w.n),
    }[order]
    return Problem(w, problem.layout, problem.x, {**problem.operands, "channels": found})


def emulated(case: Case, edits: Edits | None = None) -> EmulatedGemm | GeneratedGemm:
    workload, schedule = case
    if schedule.program in STREAMS:
        return GeneratedGemm(workload, schedule, HOPPER, edits)
    return EmulatedGemm(workload, schedule, edits, together=TILED_CASES if edits is None else (), target=TARGET[schedule.program])


def check(run, problem: Problem) -> list[str]:
    w = problem.workload
    output, reference = guarded_output((w.m, w.width), getattr(torch, w.dtype)), problem.reference()
    run(problem, output.y)
    stored = int((problem.operands["channels"] >= 0).sum())
    assert int(reference.isnan().all(0).sum()) == w.width - stored and bool((reference.isnan().any(0) == reference.isnan().all(0)).all())
    return check_guards(output) + check_exact(output.y, reference)


@needs_host_compiler
@pytest.mark.parametrize("case", CUDA_CASES, ids=label)
def test_cuda_programs_are_exact(case: Case):
    assert legal(*case, TARGET[case[1].program]) == []
    number = CUDA_CASES.index(case)
    problem = exact_problem(case[0], number, "sm_90a")
    orders = [order for order in ORDERS if case[0].n <= case[0].width or order in ("drawn", "pairs", "layer")]
    run = emulated(case)
    for order in dict.fromkeys(("drawn", orders[number % len(orders)], "layer" if number % 2 else "pairs")):
        assert check(run, ordered(problem, order)) == [], order


def test_programs_without_an_index_say_so():
    w, s = Workload(4, 128, 256, QuantFormat.parse("w3a16_any")), Schedule("gemm_any", 64, 4, 1, 2, 2)
    assert legal(w, s, HOPPER) == []
    (reason,) = legal(replace(w, width=200), s, HOPPER)
    assert "by an index; accepted: gemm_cpu, gemm_mma, gemm_stream, gemm_stream_bulk, gemm_wgmma" in reason


def joined(case: Case, edits: Edits | None = None, order: str = "shuffled") -> EmulatedGemm:
    """Of one of NIBBLE_CASES or SCATTERED_CASES, with tiles of bytes."""
    return EmulatedGemm(case[0], replace(case[1], joined=True), edits, target=HOPPER, order=order)


@needs_host_compiler
@pytest.mark.parametrize("case", NIBBLE_CASES, ids=label)
def test_nibbles_of_bytes_are_multiplied_as_bytes(case: Case):
    """In tiles of their own, behind those of single rows, wherever between them the pairs begin: exact, as pairs of products are."""
    workload, schedule = case[0], replace(case[1], joined=True)
    assert legal(workload, schedule, HOPPER) == legal(*case, HOPPER) == []
    first = first_joined(workload, schedule)
    assert (
        first < workload.n and first % schedule.block_n == 0 and n_blocks(*case) > n_blocks(workload, schedule) > first // schedule.block_n
    )
    begin = set()
    for seed in range(3):
        problem = exact_problem(workload, seed, "sm_90a")
        begin.add(int((problem.operands["channels"] == ADDED).nonzero()[0]) - 8)
        assert check(joined(case), problem) == []
        assert seed or check(emulated(case), problem) == []
    assert max(begin) <= first


@needs_host_compiler
@pytest.mark.parametrize("case", SCATTERED_CASES, ids=label)
def test_tiles_of_bytes_are_stored_by_other_warps(case: Case):
    """While the next tile is multiplied: exact, twice in one workspace, whatever order blocks run in."""
    workload, schedule = case[0], replace(case[1], joined=True)
    assert legal(workload, schedule, HOPPER) == [] and scatters(schedule) and not scatters(case[1])
    sums = workspace_words(workload, case[1], HOPPER)
    assert workspace_words(workload, schedule, HOPPER) - (sums or TICKETS) == HOPPER.units * schedule.block_n * schedule.block_m // 2
    for seed, order in enumerate(("ascending", "descending", "shuffled")):
        run, problem = joined(case, order=order), exact_problem(workload, seed, "sm_90a")
        assert check(run, problem) == check(run, problem) == []


def test_where_the_tiles_of_bytes_begin_no_row_is_single():
    """For every number of channels in 4 and in 8 bits, as a layer stores them."""
    schedule = Schedule("gemm_wgmma", 64, 16, 128, 2, 4, joined=True)
    for low in range(0, 200, 3):
        for high in range(1, 130, 2):
            n, begin = row_count(low, high), -(-low // 16) * 16
            first = first_joined(Workload(1, n, 128, NIBBLES, width=low + high, nibbles=True), schedule)
            assert begin <= first <= min(-(-n // 64) * 64, -(-(begin + 32) // 64) * 64)


@pytest.mark.parametrize(
    ("workload", "changes", "reason"),
    [
        (replace(NIBBLE_CASES[0][0], nibbles=False), {}, "accepted for a weight whose rows are not nibbles of bytes: false"),
        (Workload(40, 320, 576, NIBBLES, width=319, nibbles=True), {}, "accepted for 320 rows and 319 columns in tiles of 64: false"),
        (
            NIBBLE_CASES[0][0],
            {"num_warps": 8, "block_n": 256},
            "joined goes with block_n 256 and 8 warps; accepted: up to 128, 64 for each",
        ),
        (NIBBLE_CASES[0][0], {"block_n": 128}, "joined goes with block_n 128 and 4 warps"),
        (NIBBLE_CASES[0][0], {"cluster": 2}, "joined goes with cluster 2; accepted: 1"),
        (NIBBLE_CASES[0][0], {"program": "gemm_mma"}, "joined is True; accepted"),
    ],
)
def test_what_cannot_be_joined_is_refused(workload: Workload, changes: dict[str, Any], reason: str):
    found = legal(workload, replace(NIBBLE_CASES[0][1], **{"joined": True, **changes}), HOPPER)
    assert any(reason in said for said in found), found


PLANTED_JOINED: dict[str, tuple[int, str, tuple[tuple[str, str], ...]]] = {
    "the high nibble's scale": (0, "device", (("+ own + 8 :", "+ own :"),)),
    "rows r + 8 of the slab of rows r": (0, "device", (("slab * 128 + low * 64", "slab * 128 + low * 8"),)),
    "slabs the other way round": (1, "device", (("+ i % 2 * 2 + half", "+ i % 2 * 2 + 1 - half"),)),
    "k the other way round": (1, "device", (("+ i % 2 * 2 + half", "+ (1 - i % 2) * 2 + half"),)),
    "nibbles that are not swapped": (1, "device", (("((word << 4 & 0xf0f0f0f0u) | (word >> 4 & 0x0f0f0f0fu))", "word"),)),
    "bytes that are not centered": (1, "device", (("(word >> 4 & 0x0f0f0f0fu)) ^ 0x80808080u", "(word >> 4 & 0x0f0f0f0fu))"),)),
    "the first part's bytes for the second": (1, "device", (("(PART * (STRIDE / 64) + 2", "(0 * (STRIDE / 64) + 2"),)),
    "the index of the low nibbles": (1, "device", (("row / 16 * 16 + row % 8 : row)", "row / 16 * 16 + row % 8 + 8 : row)"),)),
    "the index of the first slab twice": (1, "device", (("row % 16 / 8 * JOINED_APART + row / 16", "row / 16"),)),
    "the warpgroup's index of single rows": (
        1, "device", (("thread / OWN * (joined(n0) ? 2 * OWN_ROWS : OWN_ROWS)", "thread / OWN * OWN_ROWS"),),
    ),
    "tiles of bytes one after another": (0, "device", (("* (2 * BLOCK_N) : tile", "* BLOCK_N : tile"),)),
    "sums of bytes are added up once more": (0, "device", (("    if (joined(n0)) return;\n", ""),)),
    "rows behind the last": (0, "device", (("row < OWN_ROWS && n0 + of_weight < N;", "row < OWN_ROWS;"),)),
    "a channel's scale: the high nibble's": (7, "device", (("JOINED_APART + (added ? 0 : 8)", "JOINED_APART"),)),
    "a channel's bias: the low nibble's": (7, "device", (("JOINED_APART + (added ? 0 : 8)", "JOINED_APART + 8"),)),
    "weights of the tile before": (0, "wgmma_load.py", (("(bx - plan.whole_tiles) * (2 * bn)", "(bx - plan.whole_tiles) * bn"),)),
    "the first tile of bytes is loaded as codes": (1, "wgmma_load.py", (("if bx < plan.whole_tiles:", "if bx <= plan.whole_tiles:"),)),
    "scales of codes alone": (1, "wgmma_load.py", (("if p.step_sums and part == plan.scales_part:", "if False:"),)),
    "all tiles as codes": (1, "wgmma.py", (("plan.whole_tiles, 0, 1)", "plan.whole_tiles, 0, 0)"),)),
    "all tiles as bytes": (5, "wgmma.py", (("plan.whole_tiles, 0, 1)", "plan.whole_tiles, 1, 1)"),)),
}  # fmt: skip


@needs_host_compiler
@pytest.mark.parametrize("bug", PLANTED_JOINED)
def test_bugs_planted_in_tiles_of_bytes_are_caught(bug: str):
    number, file, edits = PLANTED_JOINED[bug]
    try:
        found = check(joined(NIBBLE_CASES[number], {file: swap(*edits)}, "descending"), exact_problem(NIBBLE_CASES[number][0], 1, "sm_90a"))
    except KernelFault:
        return
    assert found


PLANTED_SCATTERED: dict[str, tuple[int, str, tuple[tuple[str, str], ...]]] = {
    "columns in another order than they are staged": (
        0,
        "device",
        (("place % 16 / 8 * JOINED_APART + place % OWN_ROWS / 16 * 16", "place % OWN_ROWS"),),
    ),
    "columns of the first warpgroup for the second": (2, "device", (("place / OWN_ROWS * (2 * OWN_ROWS) + place % 16", "place % 16"),)),
    "the second warpgroup's numbers over the first's": (2, "device", (("* BLOCK_N + group * OWN_ROWS + at * 8", "* BLOCK_N + at * 8"),)),
    "columns that are staged together": (
        0,
        "device",
        (("place(column, at)));\n    }\n    __syncwarp", "place(column ^ 1, at)));\n    }\n    __syncwarp"),),
    ),
    "the first rows of x": (0, "device", (("int64_t(tile.m0) * S::COLUMNS_OF_Y", "0"),)),
    "a row too few": (
        1,
        "device",
        (("handed_tile() = {n0, m0, min(m - m0, S::ROWS_OF_X)}", "handed_tile() = {n0, m0, min(m - m0, S::ROWS_OF_X) - 1}"),),
    ),
    "rows behind the last": (1, "device", (("min(m - m0, S::ROWS_OF_X)}", "S::ROWS_OF_X}"),)),
    "one warp's half only": (2, "device", (("first < S::ROWS; first += WARPS * 32", "first < S::ROWS / 2; first += WARPS * 32"),)),
    "handed over before it is told": (3, "wgmma.py", (("release(handed[0], thread, 1)", "release(handed[0], thread, 0)"),)),
    "stored before it is there": (
        3,
        "wgmma_scatter.py",
        (('T.call_extern("handle", "tilebit::await_stage", T.address_of(handed[0]), turn)', "pass"),),
    ),
    "the turn of the first one": (3, "wgmma_scatter.py", (("turn = turn ^ 1", "turn = turn"),)),
    "tiles of codes": (1, "wgmma_scatter.py", (("of_bytes == 1", "of_bytes == 0"),)),
}


@needs_host_compiler
@pytest.mark.parametrize("bug", PLANTED_SCATTERED)
def test_bugs_planted_where_others_store_are_caught(bug: str):
    number, file, edits = PLANTED_SCATTERED[bug]
    try:
        found = []
        for order in ("ascending", "descending"):
            found += check(
                joined(SCATTERED_CASES[number], {file: swap(*edits)}, order), exact_problem(SCATTERED_CASES[number][0], 1, "sm_90a")
            )
    except KernelFault:
        return
    assert found


AT = "(CHANNELS * 4), of_weight))"
PLANTED: dict[str, tuple[Case, str, tuple[tuple[str, str], ...]]] = {
    "the index of the next channel": (CUDA_CASES[1], "device", ((AT, "(CHANNELS * 4), of_weight ^ 1))"),)),
    "the index of the neighbour tile": (
        CUDA_CASES[0], "device", (("bring_channels<Parts>(to, operands, n0, lane)", "bring_channels<Parts>(to, operands, n0 ^ 64, lane)"),),
    ),
    "the index of the first warpgroup": (CUDA_CASES[0], "device", ((AT, "(CHANNELS * 4), of_weight - own_first(n0, thread)))"),)),
    "no index": (CUDA_CASES[1], "device", ((f"static_cast<int>(bits_at<Place<int>>(numbers + LAST * {AT}", "n0 + of_weight"),)),
    "the last channel is left out": (CUDA_CASES[3], "device", (("n0 + of_weight < N;", "n0 + of_weight < N - 1;"),)),
    "rows of x past the last": (CUDA_CASES[1], "device", (("if (chunk * COLUMNS + first + column < columns) to", "to"),)),
    "rows of the product's own n": (CUDA_CASES[2], "device", (("to[int64_t(column) * WIDTH]", "to[int64_t(column) * N]"),)),
    "every second row of x": (CUDA_CASES[1], "device", (("const int first = TOGETHER > 1 ? own / OWN_ROWS : 0", "const int first = 0"),)),
    "mma.sync: the index of the next channel": (
        CUDA_CASES[8], "operands.py", (("tensor[channel] for", "tensor[(channel + 1) % tensor.shape[0]] for"),),
    ),
    "stream: the index of the first tile": (
        CUDA_CASES[12], "stream_sums.py", (("column_of(p.first_row(T, bx) + element % bn, after)", "column_of(element % bn, after)"),),
    ),
    "stream: no index": (
        CUDA_CASES[13], "stream_sums.py", (("column_of(p.first_row(T, bx) + element % bn, after)", "bx * bn + element % bn"),),
    ),
    "rows are not added": (CUDA_CASES[1], "device", (("if (second != ADDED) return;", "return;"),)),
    "rows are added whatever the index says": (CUDA_CASES[0], "device", (("if (second != ADDED) return;", ""),)),
    "the row before is told to be added": (
        CUDA_CASES[3], "device", (("own_channel(n0, slab, 1, thread));", "own_channel(n0, slab, 1, thread) - 1);"),),
    ),
    "the index of the first row for its second": (
        CUDA_CASES[0], "device", (("own_channel(n0, slab, 1, thread));", "own_channel(n0, slab, 0, thread));"),),
    ),
    "a row behind the last is added": (CUDA_CASES[0], "device", (("max(0, (N - n0) * SIZE - at)", "max(0, (N - n0) * SIZE - at + 4)"),)),
    "mma.sync: rows of the first tile are added": (
        CUDA_CASES[8], "device", (("second_row<SLABS>(n0, thread) + slab", "second_row<SLABS>(0, thread) + slab"),),
    ),
    "stream: rows are not added": (CUDA_CASES[12], "stream_sums.py", (("after) == ADDED:", "after) == 12345:"),)),
    "stream: a row is added to itself": (
        CUDA_CASES[11], "stream_sums.py",
        (("total = total + finished(after, bx, by, element + GATE_ROWS, second, factor)", "total = total + total"),),
    ),
    "mma.sync: staged, no index": (CUDA_CASES[9], "operands.py", ((' if part.does == "place"), channel)', " if False), channel)"),)),
}  # fmt: skip


@needs_host_compiler
@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_caught(bug: str):
    case, file, edits = PLANTED[bug]
    try:
        run, problem = emulated(case, {file: swap(*edits)}), exact_problem(case[0], 1, "sm_90a")
        found = check(run, problem) or check(run, ordered(problem, "pairs"))
    except KernelFault:
        return
    assert found


@pytest.fixture(scope="module")
def kernels() -> list[Kernel]:
    here = detect_target("cpu")
    if not here.features:
        pytest.skip("this CPU has neither AVX-512 nor AVX2")
    with CompilePool(jobs=1, cache=ArtifactCache(), keep=True) as pool:
        return pool.compile([CompileRequest("gemm_cpu", *case, here) for case in CPU_CASES])  # type: ignore[return-value]


@pytest.mark.parametrize("number", range(len(CPU_CASES)))
def test_the_cpu_program_is_exact_in_every_order(kernels: list[Kernel], number: int):
    kernel, workload = kernels[number].load(), CPU_CASES[number][0]
    assert kernel.params[-2:] == ("channels", "y")

    def run(problem: Problem, y: torch.Tensor) -> None:
        launch(kernel, {}, problem, y)

    for seed, order in enumerate(ORDERS):
        for m in (workload.m, 1, 33):
            assert check(run, ordered(exact_problem(workload.with_m(m), seed), order)) == []


@needs_host_compiler
@pytest.mark.parametrize("case", [CUDA_CASES[i] for i in (1, 11, 13)], ids=label)
def test_an_index_outside_of_y_writes_no_other_memory_from_cuda_programs(case: Case):
    w, problem = case[0], exact_problem(case[0], 1, "sm_90a")
    problem = ordered(problem, "ascending")
    problem.operands["channels"][3], problem.operands["channels"][70] = NOWHERE, w.width
    output = guarded_output((w.m, w.width), getattr(torch, w.dtype))
    emulated(case)(problem, output.y)
    assert check_guards(output) == []
    assert int(output.y.isnan().all(0).sum()) == w.width - w.n + 2


def test_an_index_outside_of_y_writes_no_other_memory(kernels: list[Kernel]):
    problem = ordered(exact_problem(CPU_CASES[0][0], 1), "ascending")
    channels = problem.operands["channels"]
    channels[3], channels[70] = NOWHERE, CPU_CASES[0][0].width
    output = guarded_output((5, CPU_CASES[0][0].width), torch.float16)
    launch(kernels[0].load(), {}, problem, output.y)
    assert check_guards(output) == []
    assert int(output.y.isnan().all(0).sum()) == CPU_CASES[0][0].width - CPU_CASES[0][0].n + 2


def test_the_gate_of_the_tuner_sees_what_is_written_between(kernels: list[Kernel]):
    kernel, workload = kernels[2].load(), CPU_CASES[2][0]
    gate = Gate(*(exact_problem(workload, seed) for seed in (1, 2)))
    assert gate.verify(lambda problem, y: launch(kernel, {}, problem, y)).ok

    def strays(problem: Problem, y: torch.Tensor) -> None:
        launch(kernel, {}, problem, y)
        y[-1, (y[0].isnan()).nonzero()[0]] = 0

    assert not gate.verify(strays).ok
