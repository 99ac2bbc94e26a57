"""Time between m-buckets and of odd shapes: what is measured and against what, the whole program small and on the CPU, and the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from lanes import one_of_each

from results.measure import sweep
from results.report.sweep import envelope, sweep_section
from tilebit.autotune.measure import Call, Timing
from tilebit.autotune.problems.gemm import Problem
from tilebit.ops.dispatch import Launcher
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.select import select
from tilebit.schedules.target import ARCHES, detect_target, target_from_name


def test_every_bucket_is_met_at_its_first_m_inside_and_at_its_border() -> None:
    assert sweep.sweep_ms(16) == [1, 2, 3, 4, 5, 6, 8, 9, 12, 16]
    ms = sweep.sweep_ms(sweep.LARGEST)
    assert len(ms) == 25 and ms[-4:] == [256, 257, 384, 512] and {1 << i for i in range(10)} < {*ms}


def test_neighbours_are_the_nearest_in_factors_of_two() -> None:
    """|log2| of n and of k. 152064 x 3584 is 2.600 from both 28672 x 4096 and 57344 x 8192 (twice the one in n and k); the latter has
    nearly as many weights."""
    assert [sweep.neighbour(shape) for shape in sweep.ODD] == [(4096, 4096), (57344, 8192), (8192, 28672)]
    assert all(sweep.neighbour(shape) == shape for shape in sweep.LISTED) and {*sweep.SHAPES} < {*sweep.LISTED}
    assert sweep.neighbour((4096, 7000)) == (4096, 4096) and sweep.neighbour((4096, 8000)) == (4096, 14336)  # sqrt(4096 * 14336): 7663


def test_the_envelope_looks_ahead_and_not_back() -> None:
    times = {4: 9.0, 1: 10.0, 2: 7.0, 8: 8.0, 9: 12.0, 16: 12.0}
    assert envelope(times) == {1: 2, 2: 2, 4: 8, 8: 8, 9: 9, 16: 16}
    assert list(envelope(times)) == sorted(times) and envelope({}) == {}


@pytest.mark.parametrize("arch", one_of_each([arch for arch in ARCHES if arch != "cpu"], lambda arch: "any"))
def test_every_workload_has_a_schedule(arch: str) -> None:
    target, shapes = target_from_name(arch), {*sweep.ODD, *map(sweep.neighbour, sweep.ODD)}
    asked = [(s, m) for s in sweep.SHAPES[:: 1 if arch == "sm_90a" else 3] for m in sweep.sweep_ms(sweep.LARGEST)]
    asked += [(s, m) for s in shapes for m in sweep.ODD_MS]
    assert all(select(Workload(m, *shape, sweep.FORMAT), target) for shape, m in asked)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that a CPU compiles and times in moments, fewer m, and two copies: its cache holds thousands of them."""
    if find_spec("tvm") is None or find_spec("tvm_ffi") is None:
        pytest.skip("needs apache-tvm, which compiles for the CPU: pip install tilebit[compile]")
    if not detect_target("cpu").features:
        pytest.skip("this CPU has neither AVX-512 nor AVX2")
    monkeypatch.setattr(sweep, "SHAPES", ((64, 128),))
    monkeypatch.setattr(sweep, "LARGEST", 4)
    monkeypatch.setattr(sweep, "ODD", ((72, 384),))
    monkeypatch.setattr(sweep, "LISTED", ((64, 128), (64, 256), (256, 256)))
    monkeypatch.setattr(sweep, "ODD_MS", {2: "bytes", 4: "flops"})
    monkeypatch.setattr(sweep, "copies_needed", lambda *_: 2)


def run(folder: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    status = sweep.main(["--device", "cpu", "--out", str(folder), *arguments])
    return status, [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_the_whole_program_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    timed: list[dict[str, list[tuple[int, int]]]] = []
    of_measure = sweep.time_calls

    def time_calls(named: dict[str, Sequence[Call]], device: str) -> dict[str, Timing]:
        operands = {name: [cast(partial, call).args for call in calls] for name, calls in named.items()}
        timed.append({name: [(len(x), len(y)) for x, *_, y in of_calls] for name, of_calls in operands.items()})
        for of_calls in operands.values():  # no copy shares memory with another
            assert all(len({t.data_ptr() for t in copies}) == 2 for copies in zip(*of_calls, strict=True) if copies[0] is not None)
        return of_measure(named, device)

    monkeypatch.setattr(sweep, "time_calls", time_calls)
    status, rows = run(tmp_path)
    said = capsys.readouterr().out
    swept, *pairs = timed  # all m of a shape, and a pair, in alternation: calls of m rows of x and y, one per copy
    assert status == 0 and swept == {str(m): [(m, m)] * 2 for m in (1, 2, 3, 4)}
    assert pairs == [{"here": [(m, m)] * 2, "there": [(m, m)] * 2} for m in (2, 4)]
    assert [(r["kind"], r["n"], r["k"], r["m"]) for r in rows] == [
        *(("m", 64, 128, m) for m in (1, 2, 3, 4)),
        *(("odd", 72, 384, m) for m in (2, 4)),
    ]
    assert len({r["run"] for r in rows}) == 1
    for row in rows:
        assert (row["op"], row["arch"], row["format"], row["symmetric"], row["dtype"]) == ("sweep", "cpu", "w4a16", False, "float16")
        assert 0 < row["us_p20"] <= row["us"] <= row["us_p80"] and 0 < row["rel_err"] < 2e-3
        assert row["schedule"] == select(Workload(row["m"], row["n"], row["k"], sweep.FORMAT), detect_target("cpu")).to_json()
    bytes_of = {s: Workload(2, *s, sweep.FORMAT).bytes for s in ((72, 384), (64, 256))}
    by_hand = {(72, 384): 72 * 192 + 4 * 72 * 3 + 4 * (72 + 384), (64, 256): 64 * 128 + 4 * 64 * 2 + 4 * (64 + 256)}
    assert bytes_of == by_hand
    for row, work in zip(rows[4:], (bytes_of, {(72, 384): 8 * 72 * 384, (64, 256): 8 * 64 * 256}), strict=True):
        near = row["neighbour"]
        assert (
            (near["n"], near["k"]) == (64, 256) and near["us"] > 0 and near["rel_err"] < 2e-3 and near["schedule"]["program"] == "gemm_cpu"
        )
        assert row["ratio"] == pytest.approx(row["us"] / work[72, 384] / (near["us"] / work[64, 256]), rel=2e-3)
    assert [r["per"] for r in rows[4:]] == ["bytes", "flops"]
    assert "m  64 x 128: 4 of 4 m" in said and f"m 4: {rows[3]['us']:.2f} us, 1.000 times its envelope (m 4)" in said
    assert f"per flops {rows[5]['ratio']:.3f} times its neighbour's" in said
    section = sweep_section(tmp_path)
    assert "| 64 x 128 | w4a16_g128_asym, float16 | 4 |" in section and "| 72 x 384 | 4 | w4a16_g128_asym, float16 |" in section


@pytest.mark.usefixtures("small")
def test_what_is_wrong_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    of_sweep = sweep._call

    def spoiled(launcher: Launcher, problem: Problem, y: torch.Tensor) -> Call:
        call = of_sweep(launcher, problem, y)
        return lambda: (call(), y[-1:].zero_() if y.shape[0] == 3 or (y.shape == (4, 64) and problem.workload.k == 256) else None)

    monkeypatch.setattr(sweep, "_call", spoiled)
    status, rows = run(tmp_path)
    said = capsys.readouterr().out
    # A check of m = 4 takes 3 rows as well.
    assert status == 1 and [(r["kind"], r["m"]) for r in rows] == [("m", 1), ("m", 2), ("odd", 2)]
    assert (
        "wrong, left out: m=3 n=64 k=128 w4a16_g128" in said and "wrong, left out: m=4 n=64 k=256" in said and "64 x 128: 2 of 4 m" in said
    )


@pytest.mark.usefixtures("small")
def test_the_budget_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--budget", "1e-9") == (0, [])
    assert "the budget of 1e-09 s is over; not measured: m 64 x 128, odd 72 x 384" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run(tmp_path, "--budget", "0")
    assert "--budget is 0; accepted: seconds above 0" in capsys.readouterr().err


def test_the_page_says_what_the_rows_say(tmp_path: Path) -> None:
    """Ratios and bars by hand; of a shape's runs the newest counts, and of odd rows the last."""
    assert sweep_section(tmp_path) == ""
    numbers = {"gpu": "NVIDIA H200", "format": "w4a16", "group_size": 128, "symmetric": False, "dtype": "float16"}

    def written(name: str, rows: list[dict[str, Any]]) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "h200.jsonl").write_text("".join(json.dumps({**numbers, "run": "b", **r}) + "\n" for r in rows))
        return tmp_path / name

    swept = [{"kind": "m", "n": 512, "k": 4096, "m": m, "us": us} for m, us in ((1, 10.0), (2, 11.0), (3, 13.2), (4, 12.0))]
    other = [{"kind": "m", "n": 1024, "k": 4096, "m": m, "us": us} for m, us in ((64, 20.0), (65, 24.0), (128, 18.0))]
    stale = {"kind": "m", "n": 512, "k": 4096, "m": 8, "us": 1.0, "run": "a"}
    odd = {"kind": "odd", "n": 520, "k": 72, "per": "bytes", "neighbour": {"n": 512, "k": 4096, "us": 9.0}}
    odds = [
        {**odd, "m": 1, "us": 99.0, "ratio": 9.0},
        {**odd, "m": 1, "us": 8.0, "ratio": 1.15},
        {**odd, "m": 1024, "us": 7.0, "ratio": 0.9, "per": "flops"},
    ]
    section = sweep_section(written("all", [stale, *swept, *other, *odds]))
    assert "| 512 x 4096 | w4a16_g128_asym, float16 | 4 | 10.0% | 3 | 13.2 | 12.0 (m = 4) | met |" in section
    assert "| 1024 x 4096 | w4a16_g128_asym, float16 | 3 | 33.3% | 65 | 24.0 | 18.0 (m = 128) | **missed** |" in section
    assert "Above it at worst by **33.3%** (asked: at most 15%, **missed**)" in section
    assert (
        "| 520 x 72 | 1 | w4a16_g128_asym, float16 | 8.00 | 512 x 4096 | 9.00 | bytes | +15.0% | met |" in section and "99.0" not in section
    )
    assert "| 520 x 72 | 1024 | w4a16_g128_asym, float16 | 7.00 | 512 x 4096 | 9.00 | flops | -10.0% | met |" in section
    assert "At worst **15.0%** (asked: at most 15%, met)" in section
    assert "neighbour" not in sweep_section(written("m", swept)) and "envelope" not in sweep_section(written("odd", odds))
    for name, row, missing in (("bare", swept[0] | {"kind": "odd"}, "per, ratio, neighbour"), ("timeless", {**stale} | {"gpu": "x"}, "us")):
        lacking = {key: value for key, value in row.items() if not (name == "timeless" and key == "us")}
        with pytest.raises(ValueError, match=f"h200.jsonl, line 1: {missing} missing"):
            sweep_section(written(name, [lacking]))
