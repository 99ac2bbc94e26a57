"""Dual-MMA packing taken away: ``w4a8_lqq_g128`` with codes that lie row by row, in the order of k, for
the ablation of LiquidGEMM.

A thread's sixteen codes of a product's left side are four runs of four (LiquidGEMM, section 5.2,
figure 7a): as they lie here, each takes a load of 16 bits, and its codes are put into bytes one run at
a time (``plain_nibbles.cuh``). A record is 64 rows x 64 k, so that copies and rings stay as they are.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from tilebit.layouts.formats import GemmFormat
from tilebit.layouts.packing import PackedLayout
from tilebit.schedules.gemm.codecs import BYTES

from .by_lanes import LQQ

NAME = "results.measure.ablation.plain_nibbles"
ROWS = COLUMNS = 64  # of a record
FORMAT = replace(LQQ, weight=replace(LQQ.weight, kind=NAME), module=NAME)


def row_by_row(arch: str, format: GemmFormat) -> PackedLayout:
    """Eight neighbouring k of a row in a word, the lowest nibble first."""
    return PackedLayout("plain_nibbles", format.bits, ROWS, COLUMNS, np.arange(ROWS * COLUMNS).reshape(-1, 32 // format.bits))


CODEC = replace(
    BYTES,
    kind=NAME,
    device=lambda format: "tilebit::LqqRowByRow",
    headers=(*BYTES.headers, str(Path(__file__).with_suffix(".cuh").resolve())),
    dequantize="tilebit::dequantize_row_by_row",
    programs=frozenset({"gemm_wgmma"}),
    layout=row_by_row,
)
