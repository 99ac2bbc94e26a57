"""The product with a 16-bit weight without a GPU: the whole kernel that TileLang generates, on every thread of every block, through the
tuner's gate; compiled; what its rule says."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from lanes import one_of_each
from toolchain import needs_nvcc

from tilebit.autotune.problems.dense import gate
from tilebit.schedules.gemm.dense import BLOCK_M, MAX_M, PROGRAM, STATIC_SMEM, DenseWorkload, stage_bytes
from tilebit.schedules.operations import candidates, estimate, legal, operation, params, workload_from_json
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileRequest
from tilebit.tiles.compiler.kernel import Kernel
from tilebit.tiles.compiler.pool import CompilePool

sys.path.append(str(Path(__file__).parents[1]))
from emulation.device_code import KernelFault, needs_host_compiler
from emulation.emulated_program import ORDERS
from emulation.generated_dense import GeneratedDense
from emulation.planted import Edit, swap

H200 = target_from_name("sm_90a")
HALF, BFLOAT = "float16", "bfloat16"
Case = tuple[DenseWorkload, Schedule]


def schedule(block_n: int, block_m: int, stages: int, min_blocks: int = 1) -> Schedule:
    return Schedule(PROGRAM, block_n, block_m, 64, stages, block_n // 16, min_blocks=min_blocks)


# n, k and m that no tile divides; fewer steps than slots; several tiles of rows; one step
CASES: tuple[Case, ...] = (
    (DenseWorkload(13, 200, 520, HALF), schedule(128, 16, 4)),
    (DenseWorkload(9, 101, 1000, BFLOAT), schedule(64, 16, 6, 3)),
    (DenseWorkload(50, 320, 136, BFLOAT), schedule(256, 64, 5)),
    (DenseWorkload(70, 130, 328, HALF), schedule(64, 32, 2)),
    (DenseWorkload(48, 192, 64, HALF), schedule(192, 48, 3)),
    (DenseWorkload(3, 5, 8, BFLOAT), schedule(64, 16, 2, 2)),
)


def label(case: Case) -> str:
    w, s = case
    return f"{w.m}x{w.n}x{w.k}-{w.dtype}-{s.block_n}x{s.block_m}-{s.num_stages}s"


def test_the_cases_are_legal():
    assert all(legal(*case, H200) == [] for case in CASES)
    assert {s.block_m for _, s in CASES} == set(BLOCK_M)


@needs_host_compiler
@pytest.mark.parametrize("case", one_of_each(CASES, lambda case: case[0].dtype), ids=label)
@pytest.mark.parametrize("order", ORDERS)
def test_right_in_every_order(case: Case, order: str):
    verdict = gate(case[0], 1, H200.arch, "cpu").verify(GeneratedDense(*case, H200, order=order, seed=1))
    assert verdict.ok, verdict.reasons


OF_ROWS, RAGGED = (DenseWorkload(40, 64, 320, HALF), schedule(64, 16, 2)), (DenseWorkload(13, 200, 520, HALF), schedule(128, 16, 2))
RAGGED_N = (DenseWorkload(13, 101, 520, HALF), schedule(64, 16, 2))
BUGS: dict[str, tuple[Case, str, Edit]] = {
    "a slot released before its product": (
        RAGGED, "dense.py", swap(("empty[(i + stages - 1) % stages]), own, i > 0", "empty[i % stages]), own, True")),
    ),
    "the last product not awaited": (RAGGED, "dense.py", swap(("        T.wait_wgmma(0)\n", ""))),
    "a slot filled that is still read": (RAGGED, "dense.py", swap(("(i // stages & 1) ^ 1)", "i // stages & 1)"))),
    "sums of the tile before": (RAGGED, "dense.py", swap(("clear_accum=i == 0", "clear_accum=False"))),
    "rows of the first tile": (OF_ROWS, "dense.py", swap(("empty, by * bm, bm, None)", "empty, 0, bm, None)"))),
    "channels of the first tile": (RAGGED, "dense.py", swap(("empty, bx * bn, bn, ", "empty, 0, bn, "))),
    "columns of the first step": (RAGGED, "dense.py", swap(("i * bk : i * bk + bk], slots", "0:bk], slots"))),
    "rows past the last": (RAGGED, "device", swap(("if (row >= rows || at >= channels)", "if (at >= channels)"))),
    "channels past the last": (RAGGED, "device", swap(("if (row >= rows || at >= channels)", "if (row >= rows)"))),
    "channels past the last of a ragged row": (RAGGED_N, "device", swap(("min(8, channels - at)", "8"))),
    "rows in another distance": (RAGGED, "device", swap(("row * (BLOCK_N + 8) + at", "row * BLOCK_N + at"))),
    "staged while a product still reads": (
        RAGGED, "device", swap(("sync_group<BARRIER, THREADS>(0);\n  const int lane", "const int lane")),
    ),
}  # fmt: skip


@needs_host_compiler
@pytest.mark.parametrize("bug", one_of_each(tuple(BUGS), lambda name: BUGS[name][1]))
def test_planted_bugs_are_caught(bug: str):
    case, file, edit = BUGS[bug]
    try:
        verdict = gate(case[0], 1, H200.arch, "cpu").verify(GeneratedDense(*case, H200, {file: edit}, seed=1))
    except KernelFault:
        return
    assert not verdict.ok


COMPILED = (
    (DenseWorkload(16, 128256, 4096, BFLOAT), schedule(128, 16, 6, 2)),
    (DenseWorkload(64, 151936, 2560, HALF), schedule(256, 64, 5)),
    (DenseWorkload(48, 505, 1000, BFLOAT), schedule(64, 48, 4, 3)),
)


@needs_nvcc
@pytest.mark.parametrize("case", COMPILED, ids=label)
def test_compiles_as_promised(case: Case):
    """Linted, which asks for what the rule promises."""
    with CompilePool(jobs=1, cache=ArtifactCache(), keep=True) as pool:
        (kernel,) = pool.compile([CompileRequest(PROGRAM, *case, H200)])
    assert isinstance(kernel, Kernel), kernel
    assert kernel.manifest["lint"] == [] and kernel.params == params(*case, H200) == ("x", "weight", "y")
    assert kernel.manifest["prelude"] == "tilebit"
    source = (Path(kernel.path) / "kernel.cu").read_text()
    assert "EVICT_FIRST>(weight_desc" in source and "tl::tma_load(x_desc" in source
    assert kernel.resources["spills"] == kernel.resources["stack"] == 0
    assert kernel.resources["smem"] + kernel.resources["static_smem"] <= case[1].num_stages * stage_bytes(case[1]) + STATIC_SMEM


@pytest.mark.parametrize("m", [1, 16, 17, 64])
def test_candidates_cover_all_rows_by_one_tile(m: int):
    workload = DenseWorkload(m, 128256, 4096)
    found = candidates(workload, H200) or []
    assert len(found) >= 10 and len(set(found)) == len(found)
    assert all(legal(workload, s, H200) == [] and s.block_m >= m > s.block_m - 16 for s in found)
    assert {s.block_n for s in found} == {64, 128, 192, 256}
    bytes_us = workload.bytes / (H200.read_gbps * 1e3)
    assert all(bytes_us <= estimate(workload, s, H200).us <= 1.5 * bytes_us for s in found)


def test_more_rows_than_a_tile_has_are_not_tried():
    assert candidates(DenseWorkload(MAX_M + 1, 4096, 4096), H200) is None
    assert candidates(DenseWorkload(1, 4096, 4096), target_from_name("sm_80")) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_n": 96}, "block_n is 96; accepted: 64, 128, 192, 256."),
        ({"block_m": 8}, "block_m is 8; accepted: 16, 32, 48, 64."),
        ({"block_k": 128}, "block_k is 128; accepted: 64."),
        ({"num_stages": 17}, "num_stages is 17; accepted: 2 to 16."),
        ({"num_warps": 4}, "num_warps is 4; accepted with block_n 128: 8, 16 rows a warp."),
        ({"num_stages": 16}, "use fewer num_stages"),
        ({"split_k": 2}, "accepted by gemm_dense, which does not use it: 1"),
    ],
)
def test_what_is_illegal_is_said(change: dict[str, int], words: str):
    assert words in " ".join(legal(RAGGED[0], replace(RAGGED[1], **change), H200))


def test_workloads():
    workload = DenseWorkload(5, 100, 1000, BFLOAT)
    assert workload_from_json(workload.to_json()) == workload
    assert workload.bucketed().m == 16 and DenseWorkload(1, 100, 1000).bucketed().m == 1 and DenseWorkload(99, 8, 8).bucketed().m == MAX_M
    assert workload.static() == DenseWorkload(0, 100, 1000, BFLOAT)
    other = operation("dense").distance
    assert other(workload, workload) == 0 and other(workload, workload.with_m(10)) == 1
    for wrong, words in (({"k": 1001}, "multiple of 8"), ({"m": -1}, "m >= 0"), ({"dtype": "float32"}, "dtype is 'float32'")):
        with pytest.raises(ValueError, match=words):
            replace(workload, **wrong)  # type: ignore[arg-type]
