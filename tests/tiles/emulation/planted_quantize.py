"""Bugs to plant in the quantization of activations: edits of the programs' own text.

The CPU's are in a tile program of its own, whose schedule's ``raster`` says which one (0: none). It is named by its module
("emulation.planted_quantize"), so that the compile pool builds it in a worker, where TVM may be imported.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any

from tilebit.schedules.activations.workload import QuantizeWorkload
from tilebit.schedules.operations import Rule
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target
from tilebit.tiles.cpu.activations import quantize
from tilebit.tiles.program import TileProgram

from .planted import Edit, swap

NAME = "emulation.planted_quantize"
PACKAGE, LOOPS = "tilebit.tiles.cpu.activations", "quantize_loops"
ROUNDED = "v.fma(y, inverse, splat(ROUNDER))"
TRUNCATED = 'tirx.call_llvm_pure_intrin("float32x16", "llvm.trunc", y * inverse)'

CPU_BUGS: dict[str, Edit] = {
    "scale of the neighbour row": swap(("* group + row)", "* group + tirx.Select(row > 0, row - 1, row))")),
    "eps forgotten": swap((" + splat(self.w.eps)", "")),
    "truncation": swap((ROUNDED, f"splat(ROUNDER) + {TRUNCATED}")),
    "128 steps": swap(("inverse = v.held(splat(w.largest)", "inverse = v.held(splat(w.largest + 1.0)")),
    "last group's tail": swap(("    if rest:", "    if rest > 128:")),
    "tail of a vector": swap(("range(count)", "range(count - 1)")),
    "NaN ignored": swap(("Select(finite, amax /", "Select(bits > splat(0, 'int32'), amax /")),
    "factors forgotten": swap(("if self.w.smooth:", "if False:")),
    "norm of the groups": swap(("splat(float(self.w.k))", "splat(128.0)")),
}


def build(workload: QuantizeWorkload, schedule: Schedule, target: Target) -> Any:
    if schedule.raster == 0:
        return quantize.build(workload, schedule, target)
    package, real = sys.modules[PACKAGE], importlib.import_module(f"{PACKAGE}.{LOOPS}")
    text = list(CPU_BUGS.values())[schedule.raster - 1](Path(str(real.__file__)).read_text())
    copy = types.ModuleType(f"{PACKAGE}.{LOOPS}")
    copy.__package__ = PACKAGE
    exec(compile(text, f"{LOOPS}.py", "exec", dont_inherit=True), copy.__dict__)
    try:
        sys.modules[f"{PACKAGE}.{LOOPS}"] = copy
        setattr(package, LOOPS, copy)
        return quantize.build(workload, schedule, target)
    finally:
        sys.modules[f"{PACKAGE}.{LOOPS}"] = real
        setattr(package, LOOPS, real)


RULE = Rule(NAME, NAME, arches=("cpu",))
PROGRAM = TileProgram(name=NAME, compiler="tvm", build=build, headers=quantize.PROGRAM.headers)
