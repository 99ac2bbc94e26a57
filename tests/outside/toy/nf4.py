"""``toy.nf4``: 4-bit codes of a table of numbers that lie as a normal distribution's do, and a scale
for each 64 of them. Its numbers are multiples of 1 / 128, so that products with them can be exact."""

from __future__ import annotations

from tilebit.layouts.formats import GemmFormat, Numbers, Scale
from tilebit.schedules.gemm.codecs import Codec

NAME = "toy.nf4"
LEVELS = tuple(n / 128 for n in (-128, -89, -67, -51, -36, -24, -12, 0, 10, 21, 31, 43, 56, 72, 93, 128))
FORMAT = GemmFormat(Numbers(NAME, 4, (Scale(64),), LEVELS), module=NAME)
CODEC = Codec(
    NAME,
    device=lambda format: "",  # no functions for GPUs: no program there takes it
    programs=frozenset({"gemm_cpu"}),
    group_sizes=(64,),
    ops_per_weight={},
    cpu_ops_per_weight={4: 1.0},
)
