"""``toy.plus_one``: 4-bit codes of the numbers 1 to 16, with device functions of its own for the
programs that multiply with whole tiles. fp16 alone."""

from __future__ import annotations

from pathlib import Path

from tilebit.layouts.formats import GemmFormat, Numbers, Scale
from tilebit.schedules.gemm.codecs import Codec

NAME = "toy.plus_one"
FORMAT = GemmFormat(Numbers(NAME, 4, (Scale(64),), tuple(float(code + 1) for code in range(16))), module=NAME)
CODEC = Codec(
    NAME,
    device=lambda format: "toy::PlusOne",
    headers=(str(Path(__file__).with_name("plus_one.cuh")),),
    programs=frozenset({"gemm_wgmma", "gemm_mma"}),
    group_sizes=(64,),
    ops_per_weight={4: 2.2},
    cpu_ops_per_weight={4: 1.0},
)
