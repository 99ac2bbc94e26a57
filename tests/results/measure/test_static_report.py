"""The static report: which kernels it looks at, what a row says, and that the committed rows are clean."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from toolchain import needs_nvcc

from results.measure.static.listing import KIB, Spent
from results.measure.static.report import GPU_ARCHES, MS, SHAPES, Case, cases, loop_fields, main, row
from results.report.rows import ROWS
from results.report.static import schedule_text, static_section
from tilebit.layouts.formats import QuantFormat
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import candidates, legal
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileRequest
from tilebit.tiles.compiler.kernel import Kernel
from tilebit.tiles.compiler.pool import CompilePool

FORMAT = QuantFormat(4, 128, False)


@pytest.mark.parametrize("arch", GPU_ARCHES)
def test_every_program_with_candidates_is_looked_at(arch: str) -> None:
    target = target_from_name(arch)
    found = cases(target, [])
    assert len(set(found)) == len(found)
    assert {(c.workload.n, c.workload.k, c.workload.m) for c in found} == {(n, k, m) for n, k in SHAPES for m in MS}
    for c in found:
        assert legal(c.workload, c.schedule, target) == [] and c.source == "model"  # there are no records
    for workload in {c.workload for c in found}:
        programs = [c.schedule.program for c in found if c.workload == workload]
        assert sorted(programs) == sorted({s.program for s in candidates(workload, target) or []})


def test_what_a_loop_costs_the_whole_product() -> None:
    """At 64 KiB of packed weights a row of tiles, two rows of tiles, and 100 instructions a KiB of which half are bit operations."""
    target = target_from_name("sm_80")
    workload, schedule = Workload(100, 128, 1024, FORMAT), Schedule("gemm_mma", 128, 64, 64, 4, 8)
    spent = Spent(50, {"mma": 4, "bits": 25, "arithmetic": 6, "shared": 5, "global": 2, "other": 8}, 512, 4 * 4096, True)
    found = loop_fields(spent, workload, schedule, target)
    assert found["per_kib"] == {"all": 100, "mma": 8, "bits": 50, "arithmetic": 12, "shared": 10, "global": 4, "other": 16}
    clocks = 100 * 64 * 2 / 4 / target.units
    assert found["issue_us"] == pytest.approx(clocks / 1410, abs=0.01)
    assert found["bits_us"] == pytest.approx(found["issue_us"], abs=0.01)  # half as many at half the rate
    assert found["tensor_us"] == pytest.approx(2 * 4 * 4096 * 64 * 2 / 250e6, abs=0.01)


@pytest.fixture
def sample() -> dict[str, Any]:
    per_kib = {"all": 211.4, "bits": 53, "arithmetic": 65, "mma": 8, "shared": 20, "global": 5, "other": 60}
    return {
        "arch": "sm_80", "m": 1, "n": 14336, "k": 4096, "format": "w4a16_g128_asym", "dtype": "float16", "source": "model", "level": "sass",
        "schedule": Schedule("gemm_mma", 64, 8, 128, 5, 4, split_k=2).to_json(), "registers": 72, "spills": 0, "smem": 32000,
        "blocks_per_sm": 5, "bytes_in_flight": 45000, "bytes_needed": 21276, "looped": True, "per_kib": per_kib, "issue_us": 10.0,
        "bits_us": 5.0, "tensor_us": 2.5, "floor_us": 25.0, "conflicts": {"x": 1, "scale": 2}, "versions": {"nvcc": "13.0.88"},
    }  # fmt: skip


def written(folder: Path, rows: list[dict[str, Any]]) -> str:
    """The section of ``rows``, written to ``folder``."""
    (folder / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return static_section(folder)


def test_a_line_of_the_page(sample: dict[str, Any], tmp_path: Path) -> None:
    text = written(tmp_path, [sample, {**sample, "n": 4096, "looped": False}])
    line = "| 1 | mma 64x8x128 s5 w4 k2 | model | 72 | 0 | 31 | 5 | 44 / 21 | 211 | 53 | 65 | 8 | 20 | 5 | 60 | 40% | 20% | 10% | 3 |"
    assert line in text and line.replace("| 211 |", "| 211* |") in text
    assert text.index("## 14336 x 4096") < text.index("## 4096 x 4096") and "counted in SASS" in text and "nvcc 13.0.88" in text


def test_architectures_lie_one_after_another(sample: dict[str, Any], tmp_path: Path) -> None:
    assert static_section(tmp_path) == ""
    text = written(tmp_path, [sample, {**sample, "arch": "sm_86"}])
    assert text.index("## sm_80") < text.index("NVIDIA A100") < text.index("## sm_86") < text.index("NVIDIA RTX A6000")
    with pytest.raises(ValueError, match=r"some\.jsonl, line 1: arch missing"):
        written(tmp_path, [{name: value for name, value in sample.items() if name != "arch"}])


def test_schedules_in_cells() -> None:
    plain = Schedule("gemm_wgmma", 128, 256, 128, 3, 8)
    assert schedule_text(plain.to_json()) == "wgmma 128x256x128 s3 w8"
    assert schedule_text({**plain.to_json(), "stream_k": True, "raster": 4}) == "wgmma 128x256x128 s3 w8 r4 stream-k"


@pytest.mark.parametrize("path", sorted((ROWS / "static").glob("*.jsonl")), ids=lambda path: path.stem)
def test_committed_rows_are_clean(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {r["arch"] for r in rows} == {path.stem}
    assert rows == sorted(rows, key=lambda r: (r["n"], r["k"], r["m"], r["schedule"]["program"]))
    assert all(r["spills"] == 0 and not any(r["conflicts"].values()) for r in rows)


def test_unknown_architectures_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--arch", "sm_70"])
    assert "sm_80" in capsys.readouterr().err


# Two programs, shallow and wide: the lines that a warp fetches in a step are its share of the tile, however the compiler unrolled.
COMPILED = (("sm_80", Schedule("gemm_mma", 64, 16, 128, 3, 4)), ("sm_90a", Schedule("gemm_wgmma", 128, 64, 128, 4, 4)))


@pytest.fixture(scope="module")
def pool() -> Iterator[CompilePool]:
    with CompilePool(jobs=1, cache=ArtifactCache(), keep=True) as one:
        yield one


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize(("arch", "schedule"), COMPILED, ids=[arch for arch, _ in COMPILED])
def test_a_compiled_kernel_s_row(pool: CompilePool, arch: str, schedule: Schedule) -> None:
    target, workload = target_from_name(arch), Workload(schedule.block_m, 256, 2048, FORMAT)
    (kernel,) = pool.compile([CompileRequest(schedule.program, workload, schedule, target)])
    assert isinstance(kernel, Kernel), kernel
    found = row(Case(workload, schedule, "model"), kernel, target)
    assert found["level"] in ("sass", "ptx") and found["looped"] and found["spills"] == 0
    assert found["blocks_per_sm"] >= 1 and not any(found["conflicts"].values())
    per_warp = schedule.block_n * schedule.block_k // 2 / schedule.num_warps
    products = schedule.block_n // 16 * schedule.block_k // 16 // schedule.num_warps  # of 16 x 16 weights, by one warp in a step
    columns = schedule.block_m // 8 if arch == "sm_80" else 1  # of x that one instruction takes: 8, or all
    assert found["per_kib"]["mma"] == products * columns * KIB / per_warp
    assert sum(v for name, v in found["per_kib"].items() if name != "all") == pytest.approx(found["per_kib"]["all"], abs=0.5)
    json.dumps(found)
