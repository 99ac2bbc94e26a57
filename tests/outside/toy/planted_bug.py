"""``toy.planted_bug``: the program of ``toy.scaled_add``, with a bug that only more than one row shows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tilebit.tiles.program import TileProgram

from . import scaled_add, scaled_add_program

NAME = "toy.planted_bug"
RULE = replace(scaled_add.RULE, program=NAME, module=NAME)
PROGRAM = TileProgram(NAME, "tvm", partial(scaled_add_program.build, one_scale=True), headers=("cpu_launch.c",))
