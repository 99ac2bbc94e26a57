"""A tile program whose build misbehaves as its schedule's raster says. It never returns a function."""

from __future__ import annotations

import os
import time
from typing import Any

from tilebit.schedules.operations import Rule
from tilebit.tiles.program import TileProgram

NAME = "tests.autotune.faulty_program"
FAULTS = {"compile_raise": 1, "compile_hang": 2, "compile_crash": 3}


def build(workload: Any, schedule: Any, target: Any) -> Any:
    if schedule.raster == FAULTS["compile_raise"]:
        raise ValueError("the pass pipeline rejected this loop nest")
    if schedule.raster == FAULTS["compile_hang"]:
        time.sleep(3600)
    os._exit(70)


RULE = Rule(NAME, NAME, arches=("cpu",))
PROGRAM = TileProgram(name=NAME, compiler="tvm", build=build)
