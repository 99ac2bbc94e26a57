"""Bugs to plant in the quantization of activations: edits of the programs' own text.

``BUGS`` are the CUDA program's, of its page and of its device functions. The CPU's are in a tile program of its own, whose schedule's
``raster`` says which one (0: none). It is named by its module ("emulation.planted_quantize"), so that the compile pool builds it in a
worker, where TVM may be imported.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
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
    "sums behind a vector": swap((", tirx.Shuffle([found], [i]), [at + i])", ", tirx.Shuffle([found], [0]), [at + i])")),
    "sum of x alone": swap((' + self._floats("residual", at, count)))', "))")),
    "sum is not what is read": swap(('"residual" if self.w.residual else "x", self.start', '"x", self.start')),
    "offset forgotten": swap(("weight + splat(self.w.offset) if self.w.offset else weight", "weight")),
    "gate on itself": swap(("at + self.w.k, count", "at, count")),
    "gate of the row before": swap(("self.start * 2 + column", "self.start + column")),
    "gate and up exchanged": swap(("activated(gate, self.w.gate) * up", "activated(up, self.w.gate) * gate")),
    "norm of the groups": swap(("splat(float(self.w.k))", "splat(128.0)")),
}

TOKEN, GROUP = QuantizeWorkload(7, 300), QuantizeWorkload(7, 300, "bfloat16", group=128)
LONG = QuantizeWorkload(7, 1000)  # two warps of a row have values
NORM = QuantizeWorkload(7, 300, "float16", norm=True, smooth=True)
LOOP = QuantizeWorkload(27, 1000, "float16", norm=True, smooth=True)
SUM, GATE = QuantizeWorkload(7, 1001, norm=True, residual=True, offset=1.0), QuantizeWorkload(7, 300, gate="silu")
SUMS = QuantizeWorkload(27, 1000, norm=True, smooth=True, residual=True)
FLOATS = QuantizeWorkload(7, 300, "float16", "e4m3", 128)
WIDE, PAIRS = Schedule("quantize_rows", 1, 1, 1, num_warps=2), Schedule("quantize_rows", 1, 2, 1, num_warps=4)
THROUGH = Schedule("quantize_rows", 1, 2, 1, num_stages=2, num_warps=4)
PAGE, DEVICE = "quantize_rows.py", "device"
FMA, MOST = "__fmaf_rn(y[i], inverse, 12582912.0f)", "max(most, __float_as_uint(y[i]) & 0x7fffffffu)"

HALF_OF = "step % 2 * block_warps"  # of the words of warps
ALL = "thread // per_row * warps + i"  # warps of a row


@dataclass(frozen=True, slots=True)
class Bug:
    """``edit`` of ``file``, the program's page or its device functions."""

    name: str
    workload: QuantizeWorkload
    schedule: Schedule
    file: str
    edit: Edit

    @property
    def edits(self) -> Mapping[str, Edit]:
        return {self.file: self.edit}


BUGS = (
    Bug("scale of the neighbour row", TOKEN, WIDE, PAGE, swap(("scales[row] =", "scales[T.max(row - 1, 0)] ="))),
    Bug("truncation", TOKEN, WIDE, DEVICE, swap((FMA, "__fadd_rn(truncf(__fmul_rn(y[i], inverse)), 12582912.0f)"))),
    Bug("last group's tail", GROUP, WIDE, PAGE, swap(("< w.k and", "< w.k // w.group * w.group and"))),
    Bug("eps forgotten", NORM, WIDE, DEVICE, swap(("__fadd_rn(__fdiv_rn(sum, R::K), R::EPS)", "__fdiv_rn(sum, R::K)"))),
    Bug("128 steps", TOKEN, WIDE, DEVICE, swap(("__fdiv_rn(R::LARGEST, amax", "__fdiv_rn(R::LARGEST + 1.0f, amax"))),
    Bug("NaN ignored", GROUP, WIDE, DEVICE, swap((MOST, "__float_as_uint(fmaxf(__uint_as_float(most), fabsf(y[i])))"))),
    Bug("a barrier forgotten", LONG, WIDE, PAGE, swap(("T.sync_threads()", "T.sync_warp()"))),
    Bug("the largest of another row", TOKEN, PAIRS, PAGE, swap((f"tops[{HALF_OF} + {ALL}]", f"tops[{HALF_OF} + i]"))),
    Bug("the sum of another row", NORM, PAIRS, PAGE, swap((f"sums[{HALF_OF} + {ALL}]", f"sums[{HALF_OF} + i]"))),
    Bug("a warp's largest alone", LONG, WIDE, PAGE, swap((f"T.max(top, tops[{HALF_OF} + {ALL}])", "T.max(top, top)"))),
    Bug("rows behind the last", TOKEN, PAIRS, DEVICE, swap(("row >= rows || column >=", "column >="))),
    Bug("rows behind the last read", TOKEN, PAIRS, DEVICE, swap(("row < rows && present", "present"))),
    Bug("columns behind the last", TOKEN, WIDE, DEVICE, swap(("row >= rows || column >= R::CODE_COLUMNS", "row >= rows"))),
    Bug("a norm over the padding", NORM, WIDE, DEVICE, swap(("__fdiv_rn(sum, R::K)", "__fdiv_rn(sum, float(R::COLUMNS + 8))"))),
    Bug("factors forgotten", NORM, WIDE, DEVICE, swap(("if constexpr (R::SMOOTH)", "if constexpr (false)"))),
    Bug("floats swapped", FLOATS, WIDE, DEVICE, swap((': "f"(high), "f"(low)', ': "f"(low), "f"(high)'))),
    Bug("halves of a word swapped", GROUP, WIDE, DEVICE, swap(("0x0040), 0x5410)", "0x0040), 0x1054)"))),
    Bug("half a group", GROUP, WIDE, PAGE, swap(("{w.group // CHUNK}", "{w.group // CHUNK // 2}"))),
    Bug("the rows after these twice", LOOP, THROUGH, PAGE, swap(("residual, row + most_blocks * block_m, m,", "residual, row, m,"))),
    Bug("a step of one block", LOOP, THROUGH, PAGE, swap(("row = row + most_blocks * block_m", "row = row + block_m"))),
    Bug("the last rows left out", LOOP, THROUGH, PAGE, swap(("T.ceildiv(m, block_m) - index", "m // block_m - index"))),
    Bug("factors of the first values", LOOP, THROUGH, DEVICE, swap(("(smooth)[within / 4 * R::KEEPING]", "(smooth)[0]"))),
    Bug(
        "the norm's weight of another thread",
        LOOP,
        THROUGH,
        DEVICE,
        swap(("(norm_weight)[within / 4 * R::KEEPING]", "(norm_weight)[within / 4]")),
    ),
    Bug(
        "columns kept behind the last",
        LOOP,
        THROUGH,
        DEVICE,
        swap(("present(at) ? __ldg(reinterpret_cast<const float4*>", "true ? __ldg(reinterpret_cast<const float4*>")),
    ),
    Bug("the residual kept", SUM, WIDE, DEVICE, swap(("*reinterpret_cast<uint4*>(kept) = ", "(void)kept; (void)"))),
    Bug("the residual left out", SUM, WIDE, DEVICE, swap(("low_of(words[i], T()) + low_of(held[i], T())", "low_of(words[i], T())"))),
    Bug("an offset on nothing", SUM, WIDE, DEVICE, swap(("return __fadd_rn(weight, R::OFFSET);", "return weight;"))),
    Bug("sums behind the last row", SUM, PAIRS, DEVICE, swap(("row >= rows || !Eight", "!Eight"))),
    Bug("gates behind the last column", GATE, WIDE, DEVICE, swap(("row >= rows || !Eight<R>::present(at)", "row >= rows"))),
    Bug("sums of the next rows", SUMS, THROUGH, PAGE, swap(("residual, row + most_blocks * block_m, m,", "residual, row, m,"))),
    Bug("a gate on itself", GATE, WIDE, DEVICE, swap(("load_written(from + R::K, ups);", "load_written(from, ups);"))),
    Bug("gates of the row before", GATE, WIDE, DEVICE, swap(("row * (2 * R::K) + column", "row * R::K + column"))),
    Bug("the second half of a chunk", GATE, WIDE, DEVICE, swap(("load_gated(x, row, at, words)", "load_gated(x, row, column, words)"))),
    Bug("codes of what is not finite", FLOATS, WIDE, DEVICE, swap(("codes_of(y, inverse) & kept", "codes_of(y, inverse)"))),
)


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
