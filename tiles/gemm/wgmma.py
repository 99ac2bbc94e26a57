"""``gemm_wgmma``: the packed-weight GEMM on sm_90a.

One producer warpgroup loads x, packed weights, scales and zero points by TMA into ``num_stages`` buffers; ``num_warps / 4`` consumer
warpgroups dequantize whole 64-row slabs into wgmma's register operand (one conflict-free 128-bit shared load per thread and 2 KiB record) and multiply.
While one consumer dequantizes, the other keeps the tensor cores busy (LiquidGEMM section 5), so at block_m 256 the arithmetic of dequantization,
about 110 instructions a stage and thread against 1,024 cycles of wgmma, is hidden. TileLang specializes the warps; ``tiles/lint.py`` checks that it did.
"""

from typing import Any

from ...schedules.rules import gemm as rules
from ...schedules.schedule import Schedule
from ...schedules.target import Target
from ...schedules.workload import Workload
from ..program import TileProgram
from . import packed
from .operands import HEADERS, gemm_params
from .reference import gemm_reference


def build(workload: Workload, schedule: Schedule, target: Target) -> Any:
    """See ``packed.build``; on this target TileLang makes it wgmma + TMA."""
    return packed.build(workload, schedule)


PROGRAM = TileProgram(
    name="gemm_wgmma",
    compiler="tilelang",
    arches=("sm_90a",),
    legal=rules.legal,
    build=build,
    params=gemm_params,
    headers=HEADERS,
    reference=gemm_reference,
)
