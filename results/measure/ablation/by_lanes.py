"""LQQ taken away: ``w4a8_lqq_g128`` with QServe's arithmetic (Lin et al. 2024, section 5.2.3), for the
ablation of LiquidGEMM.

The numbers and their layout are the library's; what differs is how a code becomes a byte. QServe
multiplies four codes by their scale in one instruction and then adds (there: subtracts) bytes lane by
lane, which Hopper has no instruction for; LQQ's offsets let one exclusive or do that
(``by_lanes.cuh``).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tilebit.layouts.formats import FORMATS
from tilebit.schedules.gemm.codecs import BYTES

NAME = "results.measure.ablation.by_lanes"
LQQ = FORMATS["w4a8_lqq_g128"]
FORMAT = replace(LQQ, weight=replace(LQQ.weight, kind=NAME), module=NAME)
CODEC = replace(
    BYTES,
    kind=NAME,
    device=lambda format: "tilebit::LqqByLanes",
    programs=frozenset({"gemm_wgmma"}),
    headers=(*BYTES.headers, str(Path(__file__).with_suffix(".cuh").resolve())),
)
