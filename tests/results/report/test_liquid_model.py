"""LiquidGEMM's cost model, by hand, and its tables of tuned products and of the ablation's variants."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from results.report.liquid_model import ALPHA, liquid_model_section, parts
from results.report.liquid_rates import PUBLISHED_INT8, DeviceRates, device_rates
from results.report.liquid_variants import VARIANTS, liquid_variants_section, predicted
from results.report.rows import ROWS, Row, read_rows
from results.report.targets import H100, H200
from tilebit.layouts.formats import QuantFormat
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.records import TuningRecord
from tilebit.schedules.schedule import Schedule

SLOW = DeviceRates(1.0, 2.0, 1.0, "")  # GB/s, TOP/s and G instructions a second
LQQ = QuantFormat.parse("w4a8_lqq_g128")


def product(us: float, gpu: str, format: str = "w8a8_int8", m: int = 4096) -> Row:
    given: dict[str, Any] = {"op": "gemm", "impl": "vllm", "format": format, "dtype": "float16", "m": m, "n": 4096, "k": 4096, "us": us}
    return Row(**{f.name: {**given, "run": "1", "gpu": gpu, "date": ""}.get(f.name) for f in fields(Row)})  # type: ignore[arg-type]


def test_equation_6_by_hand():
    model = parts(Workload(40, 1000, 2000, LQQ), 16, SLOW, 7 / 8)
    assert model.passes == 3
    assert model.load == pytest.approx(1000.0)  # 1 MB of codes
    assert model.dequant == pytest.approx(1750.0)  # 7 / 8 of 2 M
    assert model.mma == pytest.approx(32.0)  # 64 M operations
    assert model.us == pytest.approx(3 * 1782.0) and model.bound == "computation"
    apart = replace(model, apart=True)
    assert apart.us == pytest.approx(3 * 1750.0) and replace(apart, dequant=20.0).bound == "loads"
    few = parts(Workload(1, 1000, 2000, LQQ), 16, replace(SLOW, instructions=10.0), 7 / 8)
    assert few.passes == 1 and few.mma == pytest.approx(2.0), "rows that are there"
    assert few.us == pytest.approx(1000.0) and few.bound == "loads"


def test_each_device_has_rates_of_its_own():
    rows = [
        product(100.0, H100),
        product(90.0, H200),
        product(1.0, H100, "w4a8_lqq"),
        product(80.0, H100, "w8a8_channel"),
        product(1.0, "x"),
    ]
    h100, h200 = device_rates(H100, rows), device_rates(H200, rows)
    assert h100 is not None and h100.int8_tops == pytest.approx(2 * 4096**3 / 80e6) and "3,352 GB/s read (published)" in h100.said
    assert h200 is not None and h200.int8_tops == pytest.approx(2 * 4096**3 / 90e6) and "4,706 GB/s read (measured)" in h200.said
    bare = device_rates(H100, [])
    assert bare is not None and bare.int8_tops == PUBLISHED_INT8 and "TOP/s of int8 (published)" in bare.said
    assert device_rates("another GPU", rows) is None


def test_each_shape_counts_by_its_devices_fastest_record():
    schedule, workload = Schedule("gemm_stream_bulk", 64, 1, 128, 2, 8), Workload(1, 4096, 4096, LQQ)
    h200, h100 = device_rates(H200, []), device_rates(H100, [])
    assert h200 is not None and h100 is not None
    us = parts(workload, 1, h200).us
    fast = TuningRecord(workload, schedule, H200, "sm_90a", 132, us=2 * us)
    others = [
        replace(fast, us=4 * us),
        replace(fast, us=None, status="crash"),
        replace(fast, workload=replace(workload, format=QuantFormat()), us=us),
        replace(fast, arch="sm_80", us=us),
        replace(fast, gpu="another GPU", us=us),
    ]
    lines = liquid_model_section({}, [*others, fast, replace(fast, gpu=H100, us=parts(workload, 1, h100).us)]).split("\n")
    assert "| 1 | 1 | 0.50 | 0.50 | 0.50 | 50% | 1 by loads |" in lines
    assert "| 1 | 1 | 1.00 | 1.00 | 1.00 | 0% | 1 by loads |" in lines, "the H100 by its own rate of memory"
    assert liquid_model_section({}, others[1:]) == ""


def ablation(step: int, us: float, run: str = "1", **changes: Any) -> dict[str, Any]:
    shape = {"n": 4096, "k": 14336, "m": 256, "format": "w4a8_lqq_g128", "schedule": {"block_m": 128}}
    return {"gpu": H100, "run": run, "step": step, "idea": "", "us": us, "commit": "a" * 40, **shape, **changes}


def section(tmp_path: Path, *rows: dict[str, Any]) -> str:
    (tmp_path / "a-gpu.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return liquid_variants_section(tmp_path, {H100: [product(100.0, H100)]})


def test_each_row_of_the_ablation_is_predicted_with_its_error(tmp_path: Path):
    rates = device_rates(H100, [product(100.0, H100)])
    assert rates is not None
    models = {step: predicted(ablation(step, 1.0), rates) for step in VARIANTS}
    numbers = 4096 * 14336
    mma, load = 2 * 256 * numbers / rates.int8_tops / 1e6, 2 * numbers / 2 / 3352e3  # of both passes
    for step, variant in VARIANTS.items():
        dequant = 2 * variant.alpha * numbers / 33450e3
        assert models[step].us == pytest.approx(max(load, mma, dequant) if step == 0 else max(load, mma + dequant)), variant
    text = section(tmp_path, ablation(3, 99.0, "0"), ablation(0, 70.0), ablation(1, models[1].us / 0.9), ablation(3, models[3].us / 1.25))
    worth = f"{models[1].us / models[3].us:.2f} | {models[1].us / 0.9 / (models[3].us / 1.25):.2f} |"
    assert f" | -10% | {worth}" in text and " | +25% | - | - |" in text and "| 99.0 |" not in text
    assert "QServe's arithmetic 10%; all of LiquidGEMM's ideas 25%." in text


def test_rows_of_no_variant_are_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"a-gpu\.jsonl, line 1: step is 4; accepted: 0, 1, 2, 3"):
        section(tmp_path, ablation(4, 1.0))
    short = ablation(1, 1.0)
    del short["schedule"]
    with pytest.raises(ValueError, match="schedule missing"):
        section(tmp_path, short)
    assert section(tmp_path) == "" and section(tmp_path, ablation(1, 1.0, gpu="another GPU")) == ""


def test_every_row_there_is_has_a_prediction():
    rows = [json.loads(line) for path in (ROWS / "ablation_int8").glob("*.jsonl") for line in path.read_text().splitlines()]
    text = liquid_variants_section(ROWS / "ablation_int8", read_rows(ROWS / "int8"))
    assert {row["step"] for row in rows} == set(VARIANTS) and VARIANTS[max(VARIANTS)].alpha == ALPHA
    newest = {(row["gpu"], row["n"], row["k"], row["m"], row["step"]) for row in rows}
    assert sum(line.startswith("| ") and "% |" in line for line in text.splitlines()) == len(newest)
