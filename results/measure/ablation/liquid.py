"""What LiquidGEMM's ideas are worth: ``python -m results.measure.ablation.liquid`` times ``w4a8_lqq_g128``
on tensor cores with one of them taken away at a time (section 7.4, figure 13), and whole, as
``variants.py`` says. Schedules of ``gemm_wgmma`` are those of the whole, tuned ones first.
"""

from __future__ import annotations

from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target

from ...report.rows import ROWS
from . import by_lanes, coarse, plain_nibbles
from .variants import Step, measure, of_wgmma

LQQ = by_lanes.LQQ
WORKLOADS = tuple(
    Workload(m, n, k, LQQ, "float16") for n, k, ms in ((28672, 4096, (32, 64, 256, 1024, 4096)), (4096, 14336, (256, 4096))) for m in ms
)
STEPS = (
    Step(0, "coarse pipeline: a warpgroup dequantizes into shared memory, others multiply from there", LQQ, coarse.NAME),
    Step(1, "QServe's arithmetic in place of LQQ's: bytes added lane by lane", by_lanes.FORMAT),
    Step(2, "codes row by row in place of dual-MMA packing", plain_nibbles.FORMAT),
    Step(3, "all of LiquidGEMM's ideas", LQQ),
)


def drawn(workload: Workload, target: Target) -> dict[Step, list[Schedule]]:
    """The schedules that each step tries."""
    ours = of_wgmma(workload, target)
    return {step: coarse.candidates(workload, target) if step.program == coarse.NAME else ours for step in STEPS}


if __name__ == "__main__":
    measure(__doc__, WORKLOADS, drawn, ROWS / "ablation_int8")
