"""How well schedules are chosen: the grid holds what is legal and nothing twice, the program measures what it says and nothing twice, and
the page says what the rows say."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest

from results.measure import selection as measure
from results.measure import selection_bench
from results.measure import selection_grid as grid
from results.measure.selection_bench import Bench, BudgetOver
from results.measure.selection_grid import WITHIN, full_grid, scanned
from results.report.selection import selection_section
from tilebit.autotune.store import RecordStore
from tilebit.autotune.worker import DeviceWorker, Outcome
from tilebit.layouts.formats import QuantFormat
from tilebit.schedules.gemm import rules as gemm
from tilebit.schedules.gemm.cost import estimate
from tilebit.schedules.gemm.operation import GEMM
from tilebit.schedules.gemm.workload import PROPOSED_M, Workload
from tilebit.schedules.operations import OPERATIONS, candidates, legal, programs
from tilebit.schedules.records import TuningRecord
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.select import refresh
from tilebit.schedules.target import ARCHES, Target, detect_target, target_from_name
from tilebit.tiles.compiler.compile import CompileFailure, CompileRequest
from tilebit.tiles.compiler.pool import CompilePool

FORMAT = QuantFormat(4, 64, False)
HOPPER = target_from_name("sm_90a")
CPU = Target("cpu", "test cpu", 3, 0, 0, 1 << 20, 20.0, 0.1, 100.0, ("avx512", "avx2"))
SMALL = Workload(40, 128, 256, FORMAT)
grid_of = cache(full_grid)  # one takes seconds, and several tests look at the same


@pytest.mark.slow
@pytest.mark.parametrize(("workload", "target"), [(Workload(1, 64, 512), HOPPER), (SMALL, HOPPER), (Workload(3, 96, 256), CPU)])
def test_the_grid_holds_every_candidate_and_nothing_illegal_or_twice(workload: Workload, target: Target) -> None:
    found, offered = grid_of(workload, target), candidates(workload, target)
    assert offered and set(offered) < set(found) and len(set(found)) == len(found)
    assert not any(legal(workload, s, target) for s in found[:: max(1, len(found) // 2000)])
    assert {s.program for s in found} == {
        name for name, rule in programs("gemm", target.arch).items() if not rule.unserved(workload, target.arch)
    }
    assert not any(s.raster for s in found if s.block_m >= workload.m)


def slow_grid() -> Iterator[Schedule]:
    """Some products of fields, none left out for what a shorter one says."""
    tiles = product(
        ("gemm_wgmma", "gemm_mma"), (64, 128, 256), (16, 32, 64, 128), (32, 64, 128), (2, 4, 7), (4, 8, 16), (1, 2, 7), (1, 2, 4)
    )
    for tile, raster, stream_k, cluster in product(tiles, (0, 4), (False, True), (1, 2)):
        yield Schedule(*tile, raster, stream_k, cluster)
    yield from (
        Schedule(*fields)
        for fields in product(gemm.gemm_stream.ARCHES, (16, 48, 64, 128), (1, 8, 16), (64, 128), (2, 5, 8), (2, 3, 8), (1, 2, 5), (1, 2, 6))
    )


@pytest.mark.slow
def test_the_grid_leaves_out_nothing_legal() -> None:
    """Tiles and pipelines are judged by their least demanding schedule; here every schedule is asked for itself."""
    asked = {s for s in slow_grid() if not (s.raster and s.block_m >= SMALL.m)}
    assert {s for s in asked if not legal(SMALL, s, HOPPER)} == asked & set(grid_of(SMALL, HOPPER))


@pytest.mark.slow
def test_a_grid_that_is_too_large_is_cut_by_the_rule_that_it_states(monkeypatch: pytest.MonkeyPatch) -> None:
    few = Workload(1, 32, 64, FORMAT)
    assert scanned(few, CPU, 10**6) == ((all_of := full_grid(few, CPU)), len(all_of), "all legal schedules")
    monkeypatch.setattr(grid, "full_grid", grid_of)
    monkeypatch.setattr(grid, "estimate", expected := cache(estimate))  # asked three times of a hundred thousand schedules
    every = grid.full_grid(SMALL, HOPPER)
    legal = len(every)
    offered = candidates(SMALL, HOPPER) or []
    places = len(offered) + 61
    found, still, rule = scanned(SMALL, HOPPER, places)
    assert (len(found), len(set(found)), still) == (places, places, legal) and set(found) < set(every)
    assert found[: len(offered)] == offered and rule.startswith(f"of {legal:,} legal schedules {len(offered)} candidates of the rules; ")
    assert "times its fastest 30 that" in rule and rule.endswith("31 drawn evenly")
    us = {s: expected(SMALL, s, HOPPER).us for s in every}
    fastest, drawn = found[len(offered) :][:30], found[len(offered) + 30 :]
    shapes = [(s.program, s.block_n, s.block_m, s.num_warps) for s in fastest]
    assert len(set(shapes)) > 15 and us[fastest[0]] == min(us[s] for s in {*every} - {*offered})
    assert max(us[s] for s in drawn) <= WITHIN * min(us.values()) and max(us[s] for s in drawn) > max(us[s] for s in fastest)
    assert scanned(SMALL, HOPPER, places)[0] == found


def test_the_workloads_are_those_that_were_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEBIT_RECORDS", str(tmp_path / "none.jsonl"))
    assert len({(w.n, w.k) for w in measure.FRESH}) == 12 and {w.m for w in measure.FRESH} == {1, 4, 16, 48, 128, 256, 700, 2048}
    assert Counter((w.format.bits, w.dtype) for w in measure.FRESH) == {(4, "float16"): 10, (8, "float16"): 1, (4, "bfloat16"): 1}
    assert {w.format.symmetric for w in measure.FRESH} == {True, False}
    assert all(candidates(w.bucketed(), HOPPER) for w in measure.FRESH) and all(w.k % 8 == 0 for w in measure.FRESH)
    assert len(measure.EXHAUSTIVE) == 3 and all(w.m in PROPOSED_M for w in measure.EXHAUSTIVE)
    assert not any(measure.objections(measure.FRESH, target_from_name(arch)) for arch in ARCHES)


def test_what_records_know_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "user.jsonl"
    monkeypatch.setenv("TILEBIT_RECORDS", str(path))
    monkeypatch.setattr(measure, "detect_target", lambda device: HOPPER)
    monkeypatch.setattr(measure, "FRESH", (*measure.FRESH, Workload(3, 6144, 4096)))
    with pytest.raises(SystemExit):
        measure.main(["--fresh", "--out", str(tmp_path)])
    assert "the shipped records hold 6144 x 4096 on sm_90a" in capsys.readouterr().err
    record = TuningRecord(SMALL, Schedule("gemm_mma", 64, 16, 64), HOPPER.name, HOPPER.arch, HOPPER.units, us=1.0)
    RecordStore(path).append(record)
    path.with_suffix(".sm_90a.ranker.json").write_text("{}")
    with pytest.raises(SystemExit):
        measure.main(["--exhaustive", "--out", str(tmp_path)])
    said = capsys.readouterr().err
    assert f"{path} holds records of sm_90a" in said and "user.sm_90a.ranker.json is a ranker" in said and "6144" not in said
    with pytest.raises(SystemExit):
        measure.main(["--budget", "0"])
    assert "--budget is 0; accepted: seconds above 0" in capsys.readouterr().err


class Scripted:
    """A pool of two jobs and a worker without a device: schedules with one stage more than two do not compile, the others take a µs per
    warp."""

    jobs = 2

    def __init__(self) -> None:
        self.compiled: list[Schedule] = []
        self.seen: list[Schedule] = []

    def compile(self, requests: Sequence[CompileRequest]) -> list[Any]:
        self.compiled += [r.schedule for r in requests]
        return [CompileFailure(r, "lint", ("it spills",)) if r.schedule.num_stages == 3 else self for r in requests]

    path = Path("kernel")

    def measure(self, kernel: Path, workload: Workload, schedule: Schedule, target: Target) -> Outcome:
        self.seen.append(schedule)
        return Outcome("ok", us=float(schedule.num_warps))


def test_a_scan_records_each_schedule_once_and_stops_at_its_deadline(tmp_path: Path) -> None:
    """On a GPU target, where batches compile ahead."""
    scripted = Scripted()
    schedules = [Schedule("gemm_wgmma", 64, 64, 64, stages, warps) for stages in (2, 3) for warps in (4, 8, 12, 16)][:7]
    pool, worker = cast(CompilePool, scripted), cast(DeviceWorker, scripted)
    bench = Bench(HOPPER, pool, worker, RecordStore(tmp_path / "candidates.jsonl"), None)
    first = bench.scan(SMALL, schedules[:3])
    found = bench.scan(SMALL, schedules)
    assert [(r.schedule, r.status, r.us) for r in found] == [
        (s, "compile_error", None) if s.num_stages == 3 else (s, "ok", float(s.num_warps)) for s in schedules
    ]
    assert found[:3] == first and found[-1].reason == "lint: it spills" and scripted.seen == schedules[:4]
    assert scripted.compiled == schedules and bench.store.records() == found
    late = Bench(HOPPER, pool, worker, bench.store, time.monotonic())
    assert late.scan(SMALL, schedules) == found
    for call in (partial(late.scan, SMALL, [*schedules, Schedule("gemm_wgmma", 64, 64, 32, 2, 4)]), partial(late.tuned, SMALL)):
        with pytest.raises(BudgetOver):
            call()
    assert bench.store.records() == found


@pytest.mark.slow
def test_the_whole_program_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Budget, run, resumption, with three candidates a workload and a scan of five: compiled, verified and timed for real."""
    if find_spec("tvm") is None or find_spec("tvm_ffi") is None:
        pytest.skip("needs apache-tvm, which compiles for the CPU: pip install tilebit[compile]")
    if not detect_target("cpu").features:
        pytest.skip("this CPU has neither AVX-512 nor AVX2")
    monkeypatch.setenv("TILEBIT_RECORDS", str(tmp_path / "none.jsonl"))
    monkeypatch.setenv("TILEBIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measure, "FRESH", (Workload(3, 96, 256, FORMAT, "bfloat16"),))
    monkeypatch.setattr(measure, "EXHAUSTIVE", (Workload(1, 64, 128, QuantFormat(4, 32)),))
    monkeypatch.setattr(measure, "scanned", partial(grid.scanned, places=5))
    monkeypatch.setattr(selection_bench, "copies_needed", lambda *_: 2)  # the CPU's cache holds thousands of such problems
    few = [replace(r, candidates=lambda w, t, of_rule=r.candidates: of_rule(w, t)[:3]) for r in GEMM.rules]
    monkeypatch.setitem(OPERATIONS, GEMM.name, replace(GEMM, rules=tuple(few)))
    turns, of_worker = [], DeviceWorker.measure
    monkeypatch.setattr(DeviceWorker, "measure", lambda self, *job: turns.append(job[2]) or of_worker(self, *job))
    refresh()
    out = tmp_path / "out"
    arguments = ["--device", "cpu", "--out", str(out)]

    measure.main([*arguments, "--budget", "0.001"])
    assert "the budget of 0.001 s is over at fresh m=3 n=96" in capsys.readouterr().out and not turns and not list(out.glob("*.jsonl"))

    measure.main(arguments)
    said = capsys.readouterr().out
    path, records = *out.glob("*.jsonl"), *out.glob("candidates/*.jsonl")
    fresh, exhaustive = map(json.loads, path.read_text().splitlines())
    every = [TuningRecord.from_json(json.loads(text)) for text in records.read_text().splitlines()]
    tried = list({(r.workload, r.schedule): r for r in every}.values())  # the last of each: the tuner times its fastest once more
    assert [r.schedule for r in tried] == turns and len(turns) == 3 + 5 and all(r.ok for r in tried)
    assert (fresh["op"], fresh["kind"], fresh["n"], fresh["m"], fresh["dtype"]) == ("selection", "fresh", 96, 3, "bfloat16")
    assert fresh["source"] in ("model", "portfolio")  # by this CPU's caches, m = 3 has the model's best or shares another m's kernel
    assert (fresh["measured"], fresh["candidates"], fresh["failed"], fresh["fallback"]) == (3, 3, 0, False)
    assert Schedule.from_json(fresh["best_schedule"]) == min(tried[:3], key=lambda r: r.us or 0.0).schedule
    assert (fresh["schedule"] == fresh["best_schedule"]) <= (fresh["us"] == fresh["best_us"]) and fresh["us"] > 0
    assert (exhaustive["scanned"], exhaustive["measured"], exhaustive["share"], exhaustive["failed"]) == (5, 3, 0.6, 0)
    assert Schedule.from_json(exhaustive["schedule"]) == min(tried[3:6], key=lambda r: r.us or 0.0).schedule
    assert Schedule.from_json(exhaustive["best_schedule"]) in {r.schedule for r in tried[3:]}
    assert 0 < exhaustive["best_us"] <= exhaustive["tuned_us"] and exhaustive["legal"] > 5 and "3 candidates" in exhaustive["rule"]
    assert fresh["run"] == exhaustive["run"] and f"select {fresh['us']:.2f} us ({fresh['source']}), tuned {fresh['best_us']:.2f} us" in said
    assert f"tuned {exhaustive['tuned_us']:.2f} us, scan of 5 {exhaustive['best_us']:.2f} us" in said and "96 x 256" in selection_section(
        out
    )

    measure.main(arguments)  # both rows are there
    assert len(path.read_text().splitlines()) == 2 and len(turns) == 8
    path.write_text(json.dumps({**fresh, "commit": "another"}) + "\n")
    measure.main(arguments)  # no row of this commit, but all candidates
    again = [json.loads(text) for text in path.read_text().splitlines()[1:]]
    assert len(turns) == 8 and [r["kind"] for r in again] == ["fresh", "exhaustive"]
    for row, before in zip(again, (fresh, exhaustive), strict=True):
        assert all(row[name] == before[name] for name in ("schedule", "measured", "failed", "candidates"))


def written(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "h200.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def test_the_page_says_what_the_rows_say(tmp_path: Path) -> None:
    """Medians, worst cases and shares by hand; of two rows of a workload the later one counts."""
    assert selection_section(tmp_path) == ""
    common = {
        "gpu": "NVIDIA H200",
        "k": 4096,
        "format": "w4a16",
        "group_size": 128,
        "symmetric": False,
        "dtype": "float16",
        "best_us": 10.0,
    }
    fresh = {**common, "kind": "fresh", "source": "ranker", "candidates": 80, "measured": 20}
    scan = {**common, "kind": "exhaustive", "legal": 12345, "scanned": 400, "failed": 7, "candidates": 80}
    rows = [{**fresh, "n": n, "m": 1, "us": us} for n, us in ((512, 99.0), (512, 10.4), (1024, 12.6), (2048, 10.0))]
    rows += [
        {**scan, "n": n, "m": 64, "tuned_us": us, "measured": count, "share": count / 400}
        for n, us, count in ((512, 10.25, 12), (1024, 10.0, 60))
    ]
    section = selection_section(written(tmp_path, rows))
    assert "of shapes that were in no record (3)" in section and "in the median by **4.0%** (asked: at most 10%, met)" in section
    assert "in the worst case by **26.0%** (asked: at most 25%, **missed**)" in section
    assert "| 512 x 4096 | 1 | w4a16_g128_asym, float16 | ranker | 10.4 | 10.0 | 4.0% | 20 of 80 |" in section and "99.0" not in section
    assert (
        "at worst by **2.5%** (asked: at most 3%, met), with at most **15.0%** of the scan's measurements (asked: at most 25%, met)"
        in section
    )
    assert "| 512 x 4096 | 64 | w4a16_g128_asym, float16 | 12,345 | 400 (7 failed) | 10.0 | 10.2 | 2.5% | 12 of 80 | 3.0% |" in section
    only = selection_section(written(tmp_path / "scan", rows[-1:]))
    assert "Without a record" not in only and "by **0.0%**" in only
    bare = {**scan, "n": 512, "m": 64, "measured": 12, "share": 0.03}
    with pytest.raises(ValueError, match=r"h200.jsonl, line 1: tuned_us missing"):
        selection_section(written(tmp_path / "bare", [bare]))
