"""``gemm_wgmma``: the packed-weight GEMM on sm_90a.

One producer warpgroup loads x, packed weights, scales and zero points by TMA into ``num_stages`` buffers; ``num_warps / 4`` consumer
warpgroups dequantize whole 64-row slabs into wgmma's register operand (one conflict-free 128-bit shared load per thread and 2 KiB record)
and multiply. While one consumer dequantizes, the other keeps the tensor cores busy (LiquidGEMM section 5), so at block_m 256 the
arithmetic of dequantization, about 110 instructions a stage and thread against 1,024 cycles of wgmma, is hidden. TileLang specializes the
warps; ``tiles/lint.py`` checks that it did.

Where large m stands (H200, m = 4096, which runs into the card's power cap: 1,380 MHz at 688 W): 14336 x 4096 takes 718 us alone and 750
interleaved with cuBLAS's 710. At 128 x 256 a block has the SM to itself, so its start and its epilogue (by count, not measured, 4,000 of
70,000 cycles at k = 4096) overlap with nobody's product: that is the open lever.
"""

import re
from typing import Any

from ...schedules.rules import gemm as rules
from ...schedules.schedule import Schedule
from ...schedules.target import Target
from ...schedules.workload import Workload
from ..program import TileProgram
from . import packed
from .operands import HEADERS, gemm_params
from .reference import gemm_reference

# The producer's branch, and its release of registers, which the whole warpgroup must execute.
PRODUCER = re.compile(r"(if \(\(\(int\)threadIdx\.x\) < 128\) \{\n)(\s*tl::warpgroup_reg_dealloc<\d+>\(\);\n)?")


def build(workload: Workload, schedule: Schedule, target: Target) -> Any:
    """See ``packed.build``; on this target TileLang makes it wgmma + TMA."""
    return packed.build(workload, schedule)


def one_producer_warp(source: str) -> str:
    """Generated CUDA in which three of the producer warpgroup's four warps leave at once.

    Only one thread of it issues copies, but all four warps wait on every "empty" barrier, and nobody waits for the idle three: one that
    falls two phases behind sees a barrier's parity as not yet reached and, after the last phase, waits for ever (H200, 64 x 8 x 128, four
    blocks an SM: a run of 20,000 launches hung; with one warp two such runs did not). Raises ``ValueError`` when the source is not
    specialized as expected.
    """
    rewritten, found = PRODUCER.subn(r"\1\2    if (threadIdx.x >= 32) return;  // see one_producer_warp in tiles/gemm/wgmma.py\n", source)
    if found != 1:
        raise ValueError(
            f"found {found} producer branches in the generated source; expected one: warp specialization did not fire as expected"
        )
    return rewritten


PROGRAM = TileProgram(
    name="gemm_wgmma",
    compiler="tilelang",
    arches=("sm_90a",),
    legal=rules.legal,
    build=build,
    params=gemm_params,
    headers=HEADERS,
    reference=gemm_reference,
    rewrite=one_producer_warp,
)
