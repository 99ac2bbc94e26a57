"""LiquidGEMM's cost model, by hand, and its table of tuned products."""

from __future__ import annotations

from dataclasses import replace

import pytest

from results.report.liquid_model import liquid_model_section, parts
from tilebit.layouts.formats import QuantFormat
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.records import TuningRecord
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name

# 1 GB/s, 1 TFLOP/s of fp16 (so 2 of int8) and 1 G operations a second
SLOW = replace(target_from_name("sm_90a"), read_gbps=1.0, mma_tflops=1.0, dequant_gops=1.0)
LQQ = QuantFormat.parse("w4a8_lqq_g128")


def test_equation_6_by_hand():
    model = parts(Workload(40, 1000, 2000, LQQ), 16, SLOW)
    assert model.passes == 3
    assert model.load == pytest.approx(1000.0)  # 1 MB of codes
    assert model.dequant == pytest.approx(1750.0)  # 7 / 8 of 2 M
    assert model.mma == pytest.approx(32.0)  # 64 M operations
    assert model.us == pytest.approx(3 * 1782.0) and model.bound == "computation"
    few = parts(Workload(1, 1000, 2000, LQQ), 16, replace(SLOW, dequant_gops=10.0))
    assert few.passes == 1 and few.mma == pytest.approx(2.0), "rows that are there"
    assert few.us == pytest.approx(1000.0) and few.bound == "loads"


def test_each_shape_counts_by_its_fastest_record():
    schedule, workload = Schedule("gemm_stream_bulk", 64, 1, 128, 2, 8), Workload(1, 4096, 4096, LQQ)
    us = parts(workload, 1, target_from_name("sm_90a")).us
    fast = TuningRecord(workload, schedule, "a GPU", "sm_90a", 132, us=2 * us)
    others = [
        replace(fast, us=4 * us),
        replace(fast, us=None, status="crash"),
        replace(fast, workload=replace(workload, format=QuantFormat()), us=us),
        replace(fast, arch="sm_80", us=us),
    ]
    lines = liquid_model_section([*others, fast]).split("\n")
    assert "| 1 | 1 | 0.50 | 0.50 | 0.50 | 50% | 1 by loads |" in lines
    assert liquid_model_section(others[2:3]) == ""
