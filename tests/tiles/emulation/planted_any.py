"""The CPU GEMM on bit planes with bugs planted in the text of its modules: a tile program whose schedule's ``raster`` says which one
(0: none). Named by its module ("emulation.planted_any"), so that the compile pool builds it in a worker."""

from __future__ import annotations

from typing import Any

from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import Rule
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target
from tilebit.tiles.cpu.gemm import any_program as gemm
from tilebit.tiles.program import TileProgram

from .planted import Edit, swap
from .planted_cpu import edited

NAME = "emulation.planted_any"
MODULES = ("codebooks", "codebooks_wide", "any_loops")

# name -> (module, edit, bits of the weight)
BUGS: dict[str, tuple[str, Edit, int]] = {
    "planes in the wrong order": ("codebooks", swap(("low = planes[::-1]", "low = planes")), 3),
    "planes above in the wrong order": ("codebooks", swap(("for plane in upper[::-1]]", "for plane in upper]")), 6),
    "codebook of the neighbour": ("any_loops", swap(("T.bind(row * (1 << bits))", "T.bind(T.max(row - 1, 0) * (1 << bits))")), 4),
    "codebook of another width": ("any_loops", swap(("T.bind(row * (1 << bits))", "T.bind(row * (1 << (bits - 1)))")), 4),
    "highest bit dropped": (
        "any_loops",
        swap(("codes = bytes_of(planes) if", "planes[0] = planes[0] & v.splat(0, 'uint32', LANES); codes = bytes_of(planes) if")),
        3,
    ),
    "highest bit dropped, of five": (
        "any_loops",
        swap(("codes = bytes_of(planes) if", "planes[0] = planes[0] & v.splat(0, 'uint32', LANES); codes = bytes_of(planes) if")),
        5,
    ),
    "bits not exchanged": ("codebooks", swap(("return v.held(a ^ moved << by), v.held(b ^ moved)", "return a, b")), 4),
    "order of x lost": ("codebooks", swap(('if dtype == "bfloat16":\n        return [half', "if False:\n        return [half")), 3),
    "high bytes for low ones": ("codebooks", swap(("splat(8 * which", "splat(8 - 8 * which")), 3),
    "chunk lost": ("any_loops", swap(("with T.serial(plan.chunks) as chunk:", "with T.serial(plan.chunks - 1) as chunk:")), 4),
    "sums of a set lost": ("any_loops", swap(("range(1, splits)", "range(2, splits)")), 4),
    "codebook's first numbers throughout": ("codebooks_wide", swap(("first + table * entries, entries", "first, entries")), 7),
    "highest bit overlooked": ("codebooks_wide", swap(("v.splat(1 << bit,", "v.splat(0 << bit,")), 8),
    "steps in another order": ("codebooks", swap(("for half in (0, 1) for pair in halves]", "for pair in halves for half in (0, 1)]")), 5),
    "last row left out": ("any_loops", swap(("T.min(n - nt * TILE, TILE)", "T.min(n - nt * TILE - 1, TILE)")), 4),
}
# Planted in what only AVX-512 does.
WIDE = ("codebook's first numbers throughout", "highest bit overlooked", "steps in another order")


def build(workload: Workload, schedule: Schedule, target: Target) -> Any:
    if schedule.raster == 0:
        return gemm.build(workload, schedule, target)
    module, edit, _ = list(BUGS.values())[schedule.raster - 1]
    with edited(module, edit, MODULES):
        return gemm.build(workload, schedule, target)


RULE = Rule(NAME, NAME, arches=("cpu",))
PROGRAM = TileProgram(name=NAME, compiler="tvm", build=build, headers=gemm.PROGRAM.headers)
