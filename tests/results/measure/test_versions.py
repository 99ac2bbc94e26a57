"""Kernels beside those of another commit: what is asked of both trees, how times are compared, and
the whole program on the CPU."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from results.measure import versions, versions_child, versions_points, versions_process
from results.measure.versions_points import Point, compile_all, decode, gemm, rows_of
from results.measure.versions_process import compared, measured, point, same_bits
from results.measure.versions_trees import BudgetOver, Tree, build, host_times
from tilebit.autotune.measure import Timing
from tilebit.autotune.problems import Verdict
from tilebit.autotune.provenance import source_commit
from tilebit.layouts.formats import QuantFormat
from tilebit.layouts.kv_formats import KVFormat
from tilebit.runtime import CorruptArtifact
from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import workload_from_json
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import detect_target, target_from_name

SCHEDULE = {"program": "gemm_mma", "block_n": 64, "block_m": 16, "block_k": 64, "num_stages": 2, "num_warps": 4}


@pytest.fixture
def compiler() -> None:
    if find_spec("tvm") is None or find_spec("tvm_ffi") is None:
        pytest.skip("needs apache-tvm, which compiles for the CPU: pip install tilebit[compile]")
    if not detect_target("cpu").features:
        pytest.skip("this CPU has neither AVX-512 nor AVX2")


def test_stored_forms_say_what_is_meant() -> None:
    assert workload_from_json(gemm(4096, 14336, 16)) == Workload(16, 4096, 14336, QuantFormat(4, 128, True))
    cache = KVFormat("int2", "int2", "channel")
    assert workload_from_json(decode(8, 8192, "kv2")) == AttentionWorkload("decode", 8, 1, 8192, 32, 8, 128, cache)
    assert len(versions.SHAPES) * len(versions.MS) == 42 and len(versions.DECODE) * len(versions.CACHES) == 18


def timings(**us: float) -> dict[str, Timing]:
    return {name: Timing(t, t - 1, t + 1, 20, 20) for name, t in us.items()}


def test_times_are_compared_bout_by_bout() -> None:
    """A slow bout is slow for all: its ratio counts as any other."""
    found = compared([timings(before=10, after=10), timings(before=30, after=20), timings(before=12, after=10)])
    assert found["before"]["us"] == 12 and found["after"] == {"us": 10, "us_p20": 9, "us_p80": 11, "ratio": 1.2, "spread": [1.0, 1.5]}


def test_bits_of_a_tensor_and_of_tensors_by_name() -> None:
    zero, minus = torch.zeros(4, 8, dtype=torch.float16), -torch.zeros(4, 8, dtype=torch.float16)
    nan = torch.full((4,), torch.nan)
    assert same_bits(zero, zero.clone()) and not same_bits(zero, minus) and same_bits(nan, nan.clone())
    assert same_bits({"out": zero, "lse": nan}, {"out": zero, "lse": nan}) and not same_bits({"out": zero}, {"out": minus})


class Gate:
    """Of a call that writes one number; a kernel that writes below 0 is wrong."""

    def __init__(self) -> None:
        self.random = SimpleNamespace(operands={"x": torch.zeros(2)}, outputs=lambda: torch.zeros(2), copied=lambda: self.random)

    def verify(self, run: Callable[[Any, Any], None]) -> Verdict:
        run(self.random, y := torch.zeros(2))
        return Verdict(("it is below 0.",)) if (y < 0).any() else Verdict((), 0.25)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Timing]]:
    """Kernels whose path is the number that they write; the bouts that were timed."""
    bouts: list[dict[str, Timing]] = []

    def time_calls(calls: Mapping[str, Sequence[Callable[[], None]]], device: str, orders: Any) -> dict[str, Timing]:
        assert len({len(of_one) for of_one in calls.values()}) == 1 and orders is not None
        copy = 12.0 if len(bouts) < 4 else 10.0
        bouts.append(timings(**{name: {"again": copy, "after": 8.0}.get(name, 10.0) for name in calls}))
        return bouts[-1]

    monkeypatch.setattr(versions_process, "gate_of", lambda *_: Gate())
    monkeypatch.setattr(versions_process, "load_kernel", lambda path: path)
    monkeypatch.setattr(versions_process, "launch", lambda kernel, workspace, problem, y: y.fill_(float(kernel) + len(workspace)))
    monkeypatch.setattr(versions_process, "time_calls", time_calls)
    return bouts


def job(**numbers: str) -> dict[str, Any]:
    return {"workload": gemm(64, 128, 1), "kernels": {name: {"path": path, "workspace_words": 0} for name, path in numbers.items()}}


def test_a_point_is_timed_until_the_copy_agrees(kernels: list[dict[str, Timing]]) -> None:
    found = point(job(before="1", after="1", again="1", forced="2"), target_from_name("cpu"), "cpu")
    assert found["bouts"] == len(kernels) == 7, "4 of 7 bouts disagree: the median does to the end"
    assert found["kernels"]["after"]["ratio"] == 1.25 and found["kernels"]["again"]["ratio"] == pytest.approx(10 / 12)
    assert {name: k["same_bits"] for name, k in found["kernels"].items()} == {"before": True, "after": True, "again": True, "forced": False}
    assert found["kernels"]["forced"]["rel_err"] == 0.25 and found["wrong"] == {}


def test_what_is_wrong_is_not_timed(kernels: list[dict[str, Timing]]) -> None:
    found = point(job(before="1", after="1", again="1", forced="-1"), target_from_name("cpu"), "cpu")
    assert found["wrong"] == {"forced": "it is below 0."} and set(found["kernels"]) == {"before", "after", "again"}
    timed = len(kernels)
    assert point(job(before="1", after="-1", again="1"), target_from_name("cpu"), "cpu") == {"wrong": {"after": "it is below 0."}}
    assert len(kernels) == timed


def test_words_of_workspace_are_zeros_of_its_own(kernels: list[dict[str, Timing]]) -> None:
    given = job(before="1", after="1", again="1")
    given["kernels"]["after"]["workspace_words"] = 5  # the made-up kernel adds one then
    assert point(given, target_from_name("cpu"), "cpu")["kernels"]["after"]["same_bits"] is False


def made(name: str, **schedule: Any) -> dict[str, Any]:
    return {"path": f"/kernels/{name}", "schedule": {**SCHEDULE, **schedule}, "workspace_words": 0}


def test_another_schedule_is_compiled_again_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before, after = Tree(tmp_path, tmp_path / "before"), Tree(tmp_path, tmp_path / "after")
    asked: list[Any] = []

    def build(wanted: Mapping[Tree, Sequence[Any]], job: Any, deadline: float) -> dict[Tree, list[Any]]:
        asked.append(dict(wanted))
        if len(wanted) == 1:
            return {after: [made("forced")]}
        same = made("same", tail=1)  # at its default: the same as a schedule without the field
        return {
            before: [made("b0"), made("b1"), {"failed": "no."}, made("extra")],
            after: [same, made("a1", num_stages=3), made("a2"), made("extra")],
        }

    monkeypatch.setattr(versions_points, "build", build)
    points = [Point(gemm(4096, 4096, m), {}) for m in (1, 4, 16)]
    compile_all(points, (before, after), {}, [gemm(256, 256, 1)], 0.0)
    assert [p.kernels.keys() for p in points] == [{"before", "after"}, {"before", "after", "forced"}, {"before", "after"}]
    assert [each["workload"]["n"] for each in asked[0][before]] == [4096, 4096, 4096, 256] and asked[0][before] == asked[0][after]
    assert asked[1] == {after: [{"workload": points[1].workload, "schedule": SCHEDULE}]}
    assert points[2].reasons == ["before: no."] and points[0].same_schedule and not points[1].same_schedule


def test_rows_name_what_was_compared() -> None:
    p = Point(gemm(4096, 4096, 4), {"before": made("b"), "after": made("a", num_stages=3), "forced": made("f")})
    us = compared([timings(before=10.0, after=8.0, forced=10.2, again=10.01)])
    found = {"kernels": {name: {**k, "rel_err": 0.1, "same_bits": name != "after"} for name, k in us.items()}, "bouts": 1, "others": None}
    chosen, forced = rows_of(p, found)
    assert (chosen["kind"], chosen["us_before"], chosen["us_after"], chosen["ratio"]) == ("chosen", 10.0, 8.0, 1.25)
    assert (forced["kind"], forced["ratio"], forced["again"]) == ("forced", 0.9804, 0.999)
    assert (chosen["same_schedule"], forced["same_schedule"], chosen["same_bits"], forced["same_bits"]) == (False, True, False, True)
    assert chosen["schedule_after"]["num_stages"] == 3 and forced["schedule_after"] == SCHEDULE
    assert versions.line(forced) == (
        "m=4 n=4096 k=4096 w4a16_g128, forced: 10.00 us before, 10.20 after, 0.980 times as fast (0.980 to 0.980); "
        "a copy 0.999; the same bits"
    )


ANSWERING = """
import json, os, sys, time
for p in json.load(sys.stdin)["points"]:
    if p == "die": os._exit(3)
    if p == "hang": time.sleep(600)
    print(json.dumps({"said": p}), flush=True)
"""


def test_a_process_that_ends_costs_its_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions_process, "COMMAND", (sys.executable, "-c", ANSWERING))
    points: Any = ["a", "die", "die", "b"]
    (_, a), (one, first), (two, second), (_, b) = measured(points, "cpu", time.monotonic() + 600)
    assert (a, b, one, two) == ({"said": "a"}, {"said": "b"}, 1, 2)
    assert first == second and "did not answer: its status was 3" in first["failed"]


def test_a_process_that_hangs_costs_its_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions_process, "COMMAND", (sys.executable, "-c", ANSWERING))
    monkeypatch.setattr(versions_process, "POINT_SECONDS", 0.2)
    points: Any = ["a", "hang", "b"]
    (_, a), (_, hung), (_, b) = measured(points, "cpu", time.monotonic() + 600)
    assert (a, b) == ({"said": "a"}, {"said": "b"}) and "it hung and was ended" in hung["failed"]


def test_the_budget_ends_measuring_and_compiling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(versions_process, "COMMAND", (sys.executable, "-c", ANSWERING))
    points: Any = ["hang"]
    with pytest.raises(BudgetOver):
        next(measured(points, "cpu", time.monotonic()))
    with pytest.raises(BudgetOver):
        build({Tree(versions.ROOT, tmp_path): []}, {"target": "cpu", "device": "cpu"}, time.monotonic())


def test_a_folder_that_is_no_tree_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(versions.COMMIT_BEFORE, "abc")
    for arguments, said in (
        (["--before", str(tmp_path)], "has no folder tilebit, layouts"),
        (["--before", str(versions.ROOT), "--shapes", "4096"], "--shapes is '4096'; accepted: pairs such as 4096x4096"),
        (["--before", str(versions.ROOT), "--budget", "0"], "--budget is 0; accepted: seconds above 0"),
    ):
        with pytest.raises(SystemExit):
            versions.main(["--device", "cpu", *arguments])
        assert said in capsys.readouterr().err
    monkeypatch.delenv(versions.COMMIT_BEFORE)
    with pytest.raises(SystemExit):
        versions.main(["--device", "cpu", "--before", str(versions.ROOT)])
    assert "TILEBIT_COMMIT_BEFORE is not set" in capsys.readouterr().err


def test_a_tree_is_imported_whatever_else_is_installed(tmp_path: Path) -> None:
    """A tree of nothing but a door: its child finds it, and only it."""
    for folder in ("tilebit", "layouts", "schedules", "tiles", "autotune"):
        (tmp_path / "tree" / folder).mkdir(parents=True)
    (tmp_path / "tree" / "tilebit" / "__init__.py").write_text("")
    tree = Tree(tmp_path / "tree", tmp_path / "work")
    tree.check()
    process = tree.start("host", {"device": "cpu", "weights": []})
    assert process.communicate()[0] == "[]\n" and process.returncode == 0
    with pytest.raises(SystemExit, match=r"tilebit was imported from .*; accepted: the one of"):
        list(versions_child.answers("build", [json.dumps({"tree": str(tmp_path)})]))


def test_links_that_are_right_stay(tmp_path: Path) -> None:
    """A second process of a tree takes nothing from under one that is importing."""
    for folder in ("tilebit", "layouts", "schedules", "tiles", "autotune"):
        (tmp_path / "tree" / folder).mkdir(parents=True)
    (tmp_path / "tree" / "tilebit" / "kept.py").touch()
    (tmp_path / "tree" / "tilebit" / "gone.py").touch()
    tree, package = Tree(tmp_path / "tree", tmp_path / "work"), tmp_path / "work" / "tree" / "tilebit"
    tree.environment()
    (package / "layouts").unlink()
    (package / "layouts").symlink_to(tmp_path)
    (tmp_path / "tree" / "tilebit" / "gone.py").unlink()
    before = (package / "kept.py").lstat()
    tree.environment()
    assert sorted(p.name for p in package.iterdir()) == ["autotune", "kept.py", "layouts", "schedules", "tiles"]
    assert (package / "kept.py").lstat() == before and (package / "layouts").resolve() == tmp_path / "tree" / "layouts"


@pytest.mark.slow
def test_calls_that_fail_cost_the_host_rows_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees whose door has nothing in it: their processes end at the first call."""
    monkeypatch.setattr(versions, "HOST_PROCESSES", 1)  # each imports torch
    for folder in ("tilebit", "layouts", "schedules", "tiles", "autotune"):
        (tmp_path / folder).mkdir()
    (tmp_path / "tilebit" / "__init__.py").write_text("")
    trees = Tree(tmp_path, tmp_path / "one"), Tree(tmp_path, tmp_path / "two")
    run = versions.Run(target_from_name("cpu"), trees, tmp_path / "rows.jsonl", tmp_path, 600.0)
    run.host()
    said = capfd.readouterr()
    assert run.failed and "ended with status 1; its own words are above" in said.out and "has no attribute" in said.err
    assert not (tmp_path / "rows.jsonl").exists()


def test_a_module_that_lacks_another_is_not_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "lacking.py").write_text("import nothing_of_this_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert versions_child.either("no_such_module.at_all", "json") is json
    with pytest.raises(ModuleNotFoundError, match="nothing_of_this_name"):
        versions_child.either("lacking", "json")
    with pytest.raises(ModuleNotFoundError, match="none of no_such_module"):
        versions_child.either("no_such_module")


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_the_whole_program_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """This tree beside itself; a second run has nothing left to measure."""
    if not source_commit():
        pytest.skip("needs a checkout, or its commit in TILEBIT_COMMIT")
    monkeypatch.setenv(versions.COMMIT_BEFORE, "abc")
    arguments = ["--before", str(versions.ROOT), "--device", "cpu", "--shapes", "64x128", "--ms", "1,4", "--decode", "2x64"]
    arguments += ["--caches", "kv4", "--out", str(tmp_path / "rows"), "--work", str(tmp_path / "work")]
    assert versions.main(arguments) == 0
    rows = [json.loads(line) for path in (tmp_path / "rows").glob("*.jsonl") for line in path.read_text().splitlines()]
    assert [(r["kind"], r["workload"]) for r in rows] == [
        ("chosen", w) for w in (gemm(64, 128, 1), gemm(64, 128, 4), decode(2, 64, "kv4"))
    ]  # fmt: skip
    for r in rows:
        assert (
            r["same_bits"] and r["same_schedule"] and 3 <= r["bouts"] <= 7 and (r["commit"], r["commit_before"]) == (source_commit(), "abc")
        )
        assert r["spread"][0] <= r["ratio"] <= r["spread"][1] and r["rel_err_before"] == r["rel_err_after"] > 0
    assert "product, m <= 16 | 2 |" in capsys.readouterr().out
    assert versions.main(arguments) == 0
    assert "0 points to measure" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_host_times_of_both_trees_and_a_given_schedule(tmp_path: Path) -> None:
    """Processes that take turns, and a kernel with a schedule that the tree would not choose."""
    trees = [Tree(versions.ROOT, tmp_path / name) for name in ("before", "after")]
    found = host_times(trees, {"device": "cpu", "weights": [(64, 128)]}, 3, 2)
    assert set(found) == {"tilebit.gemm 64x128", "QuantLinear 64x128"}
    assert all(len(both) == 2 and all(len(tree) == 2 for tree in both) for both in found.values())
    assert all(len(us) == 3 and min(us) > 0 for both in found.values() for tree in both for us in tree)
    workload = Workload(1, 64, 128)
    chosen = versions_child.chosen([workload], detect_target("cpu"), 1)[0].schedule
    job = {"target": None, "device": "cpu"}
    wanted = {"workload": gemm(64, 128, 1), "schedule": chosen.to_json()}
    impossible = {"workload": gemm(64, 128, 1), "schedule": Schedule.from_json(SCHEDULE).to_json()}
    good, bad = build({trees[0]: [wanted, impossible]}, job, time.monotonic() + 600)[trees[0]]
    assert good["schedule"] == chosen.to_json() and good["workspace_words"] == 0 and "was not compiled" in bad["failed"]
    with pytest.raises(CorruptArtifact):
        versions_process.load_kernel(tmp_path)
