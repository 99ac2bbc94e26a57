"""The CPU GEMM with bugs planted in the text of its loops: a tile program whose schedule's ``raster`` says which one (0: none).

Named by its module ("emulation.planted_cpu"), so that the compile pool builds it in a worker, where TVM may be imported.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import Rule
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target
from tilebit.tiles.cpu.gemm import program as gemm
from tilebit.tiles.program import TileProgram

from .planted import Edit, swap

NAME = "emulation.planted_cpu"
PACKAGE = "tilebit.tiles.cpu.gemm"
MODULES = ("inner", "integers", "loops")  # edited copies of these, in the order in which they import each other

COLUMN = "column = T.bind((group * plan.n_tiles + nt) * TILE"
SUM = "v.fma(joined, factor, total[slot])"
AFTER = "for part in after:"

# name -> (module, edit, a word of the verdict)
BUGS: dict[str, tuple[str, Edit, str]] = {
    "nibble swapped": (
        "inner",
        swap(("2 * p + row // parts", "2 * p + 1 - row // parts"), ("2 * p, row // parts)", "2 * p, 1 - row // parts)")),
        "wrong",
    ),
    "k in the wrong order": ("inner", swap(("words + quad * 16", "words + (quad ^ 1) * 16")), "wrong"),
    "scale group off by one": ("loops", swap((COLUMN, COLUMN.replace("group *", "T.max(group - 1, 0) *"))), "wrong"),
    "zero point missed": ("loops", swap(("v.fma(zero, ", 'v.fma(v.splat(0.0, "float32", lanes), ')), "wrong"),
    "scale applied twice": ("loops", swap((SUM, SUM.replace("joined", "joined * scale"))), "wrong"),
    "earlier groups lost": ("loops", swap((SUM, "joined * scale")), "wrong"),
    "split lost": ("loops", swap(("range(1, plan.schedule.split_k)", "range(2, plan.schedule.split_k)")), "wrong"),
    "k tile lost": ("loops", swap(("T.serial(tiles // whole)", "T.serial(tiles // whole - 1)")), "wrong"),
    "tile lost": ("loops", swap(("T.If(nt < plan.written_tiles)", "T.If(nt < plan.written_tiles - 1)")), "NaN"),
    "bias added twice": ("loops", swap(("else value + number", "else value + number + number")), "wrong"),
    "row scale forgotten": ("loops", swap((AFTER, AFTER.replace("after", "after[1:]"))), "wrong"),
    "bias before the row scale": ("loops", swap((AFTER, AFTER.replace("after", "after[::-1]"))), "wrong"),
    "m tail not masked": ("loops", swap(("T.If(row < m)", "T.If(row < m + 1)")), "after the output"),
    "n tail not masked": ("loops", swap(("T.max(n - column, 0)", "T.max(n + 1 - column, 0)")), "after the output"),
}

# Of products of int8 x. name -> (module, edit, bits of the weight, sets of sums, whether rows of x have scales of groups)
INT8_BUGS: dict[str, tuple[str, Edit, int, int, bool]] = {
    "halves of a tile exchanged": ("integers", swap(("% parts], row // parts)", "% parts], 1 - row // parts)")), 4, 1, False),
    "k of a word in the order of x": ("integers", swap(("QUAD = (0, 2, 1, 3)", "QUAD = (0, 1, 2, 3)")), 4, 1, False),
    "offset less nothing": ("integers", swap(("if weight_format.offset:", "if False:")), 4, 1, False),
    "sum of x of the first group": ("integers", swap(("(block * plan.groups + group) * mb", "block * plan.groups * mb")), 4, 1, False),
    "scale of the first group": ("integers", swap(("(group * plan.n_tiles + nt)", "nt")), 4, 1, False),
    "split sums lost": ("integers", swap(("range(1, plan.schedule.split_k)", "range(0)")), 4, 2, False),
    "middle of bytes stays": ("integers", swap(('splat(OFFSET_ZERO, "int16"', 'splat(0, "int16"')), 8, 1, False),
    "neighbours in k exchanged": (
        "integers",
        swap(("codes(2 * pair, row) | codes(2 * pair + 1, row)", "codes(2 * pair + 1, row) | codes(2 * pair, row)")),
        8,
        1,
        False,
    ),
    "scales of channels applied to nothing": ("loops", swap(('() if plan.integers else ("scales",)', '("scales",)')), 8, 1, False),
    "scale of x of the neighbour group": (
        "integers",
        swap(("[group * m + T.min(row, m - 1)]", "[T.max(group - 1, 0) * m + T.min(row, m - 1)]")),
        4,
        2,
        True,
    ),
    "scale of x of the neighbour row": (
        "integers",
        swap(("[group * m + T.min(row, m - 1)]", "[group * m + T.max(T.min(row, m - 1) - 1, 0)]")),
        8,
        1,
        True,
    ),
    "scale of x of the padded rows": (
        "integers",
        swap(("[group * m + T.min(row, m - 1)]", "[group * (m + 1) + T.min(row, m - 1)]")),
        8,
        1,
        True,
    ),
    "scale of the weight forgotten": ("integers", swap(("of_weight * of_x", "of_x")), 8, 1, True),
    "scale of the first group of the weight": ("integers", swap(("(group * plan.n_tiles + nt)", "nt")), 4, 1, True),
    "zero points added": ("integers", swap(("joined - shift", "joined + shift")), 4, 1, True),
    "zero points times x of the first group": (
        "integers",
        swap(("(block * plan.groups + group) * mb", "block * plan.groups * mb")),
        4,
        1,
        True,
    ),
    "groups before this one lost": ("integers", swap(("of_weight * of_x, total[slot])", "of_weight * of_x, total[slot] * 0)")), 4, 2, True),
    "sums of the group before stay": (
        "loops",
        swap(
            ("            for rows in plan.row_passes:\n", ""),
            (
                "    for count, first, run in plan.group_runs:\n",
                "    rows = plan.row_passes[0]\n"
                "    sums = v.sums(plan.schedule.split_k * mb * len(rows), lanes, plan.sums_dtype)\n"
                "    for count, first, run in plan.group_runs:\n",
            ),
            (
                "                sums = v.sums(plan.schedule.split_k * mb * len(rows), lanes, plan.sums_dtype)\n",
                "            if True:\n",
            ),
        ),
        8,
        1,
        True,
    ),
}


def build(workload: Workload, schedule: Schedule, target: Target) -> Any:
    if schedule.raster == 0:
        return gemm.build(workload, schedule, target)
    module, edit, *_ = [*BUGS.values(), *INT8_BUGS.values()][schedule.raster - 1]
    with edited(module, edit):
        return gemm.build(workload, schedule, target)


@contextmanager
def edited(which: str, edit: Edit, modules: Sequence[str] = MODULES) -> Iterator[None]:
    """Copies of ``modules`` in place of the real ones, ``which`` of them edited."""
    package = sys.modules[PACKAGE]
    real = {name: importlib.import_module(f"{PACKAGE}.{name}") for name in modules}
    try:
        for name in modules:
            text = Path(str(real[name].__file__)).read_text()
            copy = types.ModuleType(f"{PACKAGE}.{name}")
            copy.__package__ = PACKAGE
            exec(compile(edit(text) if name == which else text, f"{name}.py", "exec", dont_inherit=True), copy.__dict__)
            sys.modules[f"{PACKAGE}.{name}"] = copy
            setattr(package, name, copy)
        yield
    finally:
        for name, module in real.items():
            sys.modules[f"{PACKAGE}.{name}"] = module
            setattr(package, name, module)


RULE = Rule(NAME, NAME, arches=("cpu",))
PROGRAM = TileProgram(name=NAME, compiler="tvm", build=build, headers=gemm.PROGRAM.headers)
