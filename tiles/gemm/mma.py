"""``gemm_mma``: the packed-weight GEMM on sm_80, sm_86 and sm_89.

cp.async fills ``num_stages`` buffers, each warp dequantizes its own 16 rows of a 64-row slab into mma.m16n8k16's A registers and
multiplies with x from ldmatrix. The packed records are the ones of ``gemm_wgmma``: four warps of mma.sync own a slab exactly as a
warpgroup does, so a checkpoint packed once serves every NVIDIA target. One slab per four warps (block_n = 16 * num_warps): with two,
mma.sync would give a warp 32 neighbouring rows where the record has rows of two slabs.
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
    """See ``packed.build``; on these targets TileLang makes it mma.sync + cp.async."""
    return packed.build(workload, schedule)


PROGRAM = TileProgram(
    name="gemm_mma",
    compiler="tilelang",
    arches=("sm_80", "sm_86", "sm_89", "sm_90a"),
    legal=rules.legal,
    build=build,
    params=gemm_params,
    headers=HEADERS,
    reference=gemm_reference,
    newest_arch="sm_89",  # for sm_90a TileLang would turn the same body into wgmma
)
