"""What it costs to make fp32 of groups' int32 sums: ``python -m results.measure.ablation.sums`` times
``w4a8_g128_asym`` on tensor cores with each conversion of ``device/codecs/group_sums.cuh`` (MixLLM section
3.3), as ``variants.py`` says. All steps try the same schedules, those of the library's format, whose
conversion the last step has.
"""

from __future__ import annotations

from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target

from ...report.rows import ROWS
from .sums_variants import magic_add, magic_start
from .sums_variants.variant import GROUP_WISE
from .variants import Step, measure, of_wgmma

WORKLOADS = tuple(
    Workload(m, n, k, GROUP_WISE, "float16") for n, k, ms in ((28672, 4096, (64, 256, 1024, 4096)), (4096, 14336, (256, 4096))) for m in ms
)
STEPS = (
    Step(0, "magic bits added to a sum, their number taken away", magic_add.FORMAT),
    Step(1, "sums that start at the magic bits, their number taken away", magic_start.FORMAT),
    Step(2, "one instruction (I2FP)", GROUP_WISE),
)


def drawn(workload: Workload, target: Target) -> dict[Step, list[Schedule]]:
    """The schedules that each step tries."""
    return dict.fromkeys(STEPS, of_wgmma(workload, target))


if __name__ == "__main__":
    measure(__doc__, WORKLOADS, drawn, ROWS / "ablation_sums")
