"""Speed targets: what is met, what is missed and by how much, what is missing, and that the table is of rows that exist."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from results.report.rows import ROWS
from results.report.target_found import Found, found_of
from results.report.target_times import times_of
from results.report.targets import FAST, H100, H200, LONG, TAKES, TARGETS, Others, Target, mixed_bytes
from results.report.targets_page import STUDY, TITLES, targets_page, targets_sentence, verdict

SHAPES = ((4096, 4096), (8192, 4096))
PEERS = Others("W4A8 of others", ("humming w4a8_int8", "vllm w4a8_fp8"))
ASKED = Target("int8", "tilebit w4a8_lqq_g128", PEERS, SHAPES, (1, 16), 1.25, 1.5, gpus=(H200,))


def product(impl: str, format: str, us: float, m: int = 1, n: int = 4096, run: str = "1", **fields: Any) -> dict[str, Any]:
    common = {"op": "gemm", "dtype": "float16", "k": 4096, "gpu": H200, "date": "", "commit": "a" * 40, "group_size": 128, "rel_err": 2e-4}
    return {**common, "impl": impl, "format": format, "us": us, "m": m, "n": n, "run": run, **fields}


def beside(times: dict[tuple[int, int], tuple[float, float, float]]) -> list[dict[str, Any]]:
    """By m and n: the time of tilebit and of two others, in one process."""
    names = ("tilebit", "w4a8_lqq"), ("humming", "w4a8_int8"), ("vllm", "w4a8_fp8")
    return [product(*name, us, m, n) for (m, n), found in times.items() for name, us in zip(names, found, strict=True)]


EACH = {(1, 4096): (10.0, 16.0, 20.0), (16, 4096): (10.0, 20.0, 14.0), (1, 8192): (10.0, 13.0, 99.0), (16, 8192): (10.0, 12.0, 99.0)}


def found(folder: Path, rows: list[dict[str, Any]], target: Target = ASKED) -> Found:
    path = folder / target.study / "a-gpu.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (result,) = found_of([target], folder)
    return result


def test_a_target_is_met_by_the_mean_of_the_fastest_others(tmp_path: Path) -> None:
    result = found(tmp_path, beside(EACH))
    assert result.figure == pytest.approx((1.6 * 1.4 * 1.3 * 1.2) ** 0.25) and result.met and verdict(result) == "met"
    assert (result.worst.place, result.worst.beside) == (((8192, 4096), 16), "humming w4a8_int8")
    assert verdict(found(tmp_path, beside(EACH), replace(ASKED, aim=1.36))) == "met, and its aim"
    page = targets_page([result])
    assert "| w4a8_lqq_g128 | W4A8 of others | m = 1, 16 | at least 1.25 times as fast | 1.5 | **1.367** | " in page
    assert "| 1.200 (8192 x 4096, m = 16, humming w4a8_int8) | 4 of 4 | met | aaaaaaaaaaaa |" in page
    assert targets_sentence([result]) == f"[Speed targets](pages/targets.md) that are met: {H200} 1 of 1 (0 lack points)."


def test_a_target_is_missed_by_a_share(tmp_path: Path) -> None:
    result = found(tmp_path, beside(EACH), replace(ASKED, asked=1.6))
    assert not result.met and verdict(result) == "**missed by 14.5%**"
    every = found(tmp_path, beside(EACH), replace(ASKED, every=True))
    assert every.figure == pytest.approx(1.2) and verdict(every) == "**missed by 4.0%**"
    assert found(tmp_path, beside(EACH), replace(ASKED, asked=1.2, every=True)).met
    assert f"| {TITLES['int8']} | {H200} | **0** of 1 | 1 | 0 |" in targets_page([result])


def test_rounding_meets_no_target(tmp_path: Path) -> None:
    assert not found(tmp_path, beside(dict.fromkeys(EACH, (10.0, 12.4999, 20.0)))).met
    assert found(tmp_path, beside(dict.fromkeys(EACH, (10.0, 12.5, 20.0)))).met


def test_a_missing_point_means_that_it_is_not_met(tmp_path: Path) -> None:
    rows = beside({place: times for place, times in EACH.items() if place != (16, 8192)})
    result = found(tmp_path, rows)
    assert result.missing == (((8192, 4096), 16),) and result.figure == pytest.approx((1.6 * 1.4 * 1.3) ** (1 / 3))
    assert not result.met and result.keeps(result.target.aim) is False and verdict(result) == "**1 missing**, the others keep it"
    page = targets_page([result])
    assert "| 3 of 4 |" in page and "- w4a8_lqq_g128, beside W4A8 of others: 8192 x 4096 at m = 16\n" in page
    assert f"| {TITLES['int8']} | {H200} | **0** of 1 | 0 | 1 |" in page
    assert verdict(found(tmp_path, rows, replace(ASKED, asked=2.0))) == "**1 missing**, missed by 28.6%"


def test_a_point_that_lacks_one_of_the_others_is_missing(tmp_path: Path) -> None:
    rows = [row for row in beside(EACH) if (row["impl"], row["m"], row["n"]) != ("vllm", 1, 8192)]
    assert found(tmp_path, rows).missing == (((8192, 4096), 1),), "however slow it might have been"


def test_without_rows_nothing_is_met(tmp_path: Path) -> None:
    result = found(tmp_path, [])
    assert result.figure is None and not result.met and len(result.missing) == 4 and verdict(result) == "**not measured**"
    assert targets_sentence([result]) == "" and "| - | - | 0 of 4 | **not measured** | - |" in targets_page([result])


def test_times_of_one_process_are_compared_and_the_newest_count(tmp_path: Path) -> None:
    one = replace(ASKED, where=SHAPES[:1], ms=(1,))
    old = [product("tilebit", "w4a8_lqq", 10.0), product("humming", "w4a8_int8", 30.0), product("vllm", "w4a8_fp8", 13.0)]
    new = [product("tilebit", "w4a8_lqq", 8.0, run="2", commit="b" * 40), product("humming", "w4a8_int8", 20.0, run="2")]
    result = found(tmp_path, [*old, *new, product("vllm", "w4a8_fp8", 4.0, run="3")], one)
    assert result.figure == pytest.approx(1.3), "vllm beside its own process's time"
    assert found(tmp_path, [*old, *new, product("vllm", "w4a8_fp8", 20.0, run="2")], one).commits == ["b" * 12]
    apart = replace(one, against=replace(PEERS, elsewhere=True))
    assert found(tmp_path, [*old, *new, product("vllm", "w4a8_fp8", 4.0, run="3")], apart).figure == pytest.approx(0.5)


@pytest.mark.parametrize("fields", [{"rel_err": None}, {"rel_err": float("nan")}, {"dtype": "bfloat16"}, {"gpu": H100}, {"group_size": 64}])
def test_rows_that_were_not_checked_or_are_of_something_else_do_not_count(tmp_path: Path, fields: dict[str, Any]) -> None:
    rows = beside(EACH)
    assert found(tmp_path, rows).met
    result = found(tmp_path, [{**row, **fields} if row["impl"] == "tilebit" and row["m"] == 16 else row for row in rows])
    assert len(result.missing) == 2 and not result.met


def test_a_mixed_layer_is_held_against_the_ratio_of_bytes(tmp_path: Path) -> None:
    assert mixed_bytes((4096, 4096), 1) == pytest.approx(1.1, abs=2e-4) and mixed_bytes((4096, 4096), 64) == pytest.approx(1.0915, abs=1e-4)
    base = Others("base", ("tilebit w4a8_g128_asym",))
    target = Target("int8", "tilebit w4.4a8_g128", base, SHAPES[:1], (1,), 1.03, figure=LONG, over="the ratio of bytes", gpus=(H200,))
    rows = [product("tilebit", "w4a8_g128_asym", 10.0), product("tilebit", "w4.4a8_g128", 11.3)]
    result = found(tmp_path, rows, target)
    assert result.figure == pytest.approx(1.0275, abs=3e-4) and result.met
    assert "at most 1.03 times the ratio of bytes" in targets_page([result])
    rows[1]["us"] = 11.4
    assert found(tmp_path, rows, target).short == pytest.approx(0.0064, abs=3e-4) and not found(tmp_path, rows, target).met


def test_widths_stand_beside_the_16_bits_of_their_turn_and_beside_themselves(tmp_path: Path) -> None:
    def pair(bits: int, us: float, dense: float, m: int = 1, **fields: Any) -> list[dict[str, Any]]:
        own = product("tilebit", f"w{bits}a16_any", us, m, **fields)
        return [own, {**own, "impl": "cublas", "format": "fp16", "us": dense, "commit": None}]

    rows = [*pair(3, 10.0, 40.0), *pair(4, 12.0, 30.0), *pair(3, 15.0, 99.0, 8), *pair(4, 1.0, 30.0, tried=15, run="2")]
    cublas = Others("cuBLAS, fp16", ("16 bits beside w3a16_any",))
    target = Target("any_precision", "tilebit w3a16_any", cublas, SHAPES[:1], (1,), 3.4, gpus=(H200,))
    assert found(tmp_path, rows, target).figure == pytest.approx(4.0)
    wider = found(tmp_path, rows, replace(target, against=Others("w4a16_any", ("tilebit w4a16_any",))))
    assert wider.figure == pytest.approx(1.2), "the trial's row does not count"
    itself = Others("itself at m = 1", ("tilebit w3a16_any",), m=1)
    assert found(tmp_path, rows, replace(target, against=itself, ms=(8,), figure=LONG)).figure == pytest.approx(1.5)


def test_steps_count_with_shipped_schedules_and_right_logits(tmp_path: Path) -> None:
    def step(impl: str, format: str, us: float, run: str = "1", **fields: Any) -> dict[str, Any]:
        common = {"kv_format": "kv4_channel", "batch": 1, "kv_len": 4096, "layers": 32, "graph_us": us, "rel_err": 0.01}
        return {"gpu": H200, "impl": impl, "format": format, "us": us, "run": run, "commit": "c" * 40, **common, **fields}

    target = Target("step", "tilebit w4a16_g128 kv4_channel", None, ((4096,),), (1,), 1.65, figure=TAKES, gpus=(H200,))
    rows = [step("tilebit", "w4a16_g128", 1700.0), step("tilebit", "w4a16_g128", 1600.0, "2")]
    others = [
        step("tilebit", "w4a16_g128", 1.0, "3", tuned="step"),
        step("tilebit", "w4a16_g128", 1.0, "3", rel_err=0.5, rel_err_accepted=0.02),
        step("tilebit", "w4a16_g128", 1.0, "3", layers=2),
        step("tilebit_parts", "w4a16_g128", 1.0, "3", parts="gate"),
        step("tilebit", "w4a16_g128", 1.0, "3", op="generate"),
    ]
    result = found(tmp_path, [*rows, *others], target)
    assert result.figure == pytest.approx(1.6) and result.met
    assert "| w4a16_g128 kv4_channel | - | 1 x 4,096 tokens | at most 1.65 ms | - | **1.600** |" in targets_page([result])
    assert not found(tmp_path, rows[:1], target).met


def test_every_target_finds_rows() -> None:
    """Each names series that there are: of tilebit at every point on one of its devices, of others at any."""
    times = {study: list(times_of(study, ROWS)) for study in STUDY}
    ours = {(study, time.gpu, time.series, time.where, time.m) for study, found in times.items() for time in found}
    others = {(study, time.series, time.m) for study, found in times.items() for time in found}
    for target in TARGETS:
        places = [(where, m) for where in target.where for m in target.ms]
        assert any(all((target.study, gpu, target.ours, *place) in ours for place in places) for gpu in target.gpus), target
        if (against := target.against) is not None:
            assert all((target.study, series, against.m or m) in others for series in against.series for m in target.ms), target


def test_the_table_says_each_thing_once() -> None:
    assert len(set(TARGETS)) == len(TARGETS) and {target.study for target in TARGETS} == set(TITLES) == set(STUDY)
    for target in TARGETS:
        assert target.figure in (FAST, LONG, TAKES) and (target.against is None) == (target.figure == TAKES)
        assert target.aim is None or (target.aim > target.asked) == (target.figure == FAST)
