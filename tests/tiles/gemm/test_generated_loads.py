"""What is loaded once for several: it costs only time when it is not, so results cannot show it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from lanes import one_of_each

from tilebit.autotune.problems.gemm_drawn import exact_problem
from tilebit.autotune.problems.verify import guarded_output
from tilebit.layouts.formats import QuantFormat
from tilebit.schedules.gemm.stream import warps_n
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import legal
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name

sys.path.append(str(Path(__file__).parents[1]))
from emulation.device_code import needs_host_compiler
from emulation.generated_gemm import GeneratedGemm
from emulation.generated_kernel import lower

HOPPER = target_from_name("sm_90a")
W4 = QuantFormat(4, 64, True)
LARGE = Workload(64, 256, 512, W4)
FEW = Workload(8, 256, 512, W4)
SHARED_X = (
    Schedule("gemm_stream_bulk", 128, 8, 64, 2, 4),  # two warps share the rows of x that one of them would load for itself
    Schedule("gemm_stream", 128, 8, 64, 2, 4),
    Schedule("gemm_stream", 64, 8, 64, 3, 2),
    Schedule("gemm_stream_bulk", 256, 8, 128, 2, 4, split_k=2),
)


def loads(schedule: Schedule) -> tuple[set[str], set[str]]:
    """The tensor maps that the generated source of a schedule loads through for a whole cluster, and for a block alone."""
    assert legal(LARGE, schedule, HOPPER) == []
    source = lower(LARGE, schedule, HOPPER).cuda
    together, alone = (set(re.findall(rf"\btl::{name}\((\w+),", source)) for name in ("tma_load_multicast", "tma_load"))
    return together, alone


def test_a_cluster_s_common_tile_is_loaded_once():
    """Blocks of a cluster have neighbouring tiles: those of x are the same, and their loads go to both."""
    together, alone = loads(Schedule("gemm_wgmma", 64, 64, 64, 2, 4, cluster=2))
    none, all_alone = loads(Schedule("gemm_wgmma", 64, 64, 64, 2, 4))
    assert none == set() and together == {name for name in all_alone if name.startswith("x_")} and together
    assert alone == all_alone  # where the tiles of the two are of different rows


@needs_host_compiler
@pytest.mark.parametrize("schedule", one_of_each(SHARED_X, lambda _: "a shared ring"), ids=lambda s: f"{s.program}-{s.block_n}")
def test_what_is_read_is_read_once(schedule: Schedule):
    """Of x as often as there are tiles along n, whoever shares it; of the weights once."""
    assert legal(FEW, schedule, HOPPER) == [] and (warps_n(schedule) > 1) == (schedule.block_n > 64)
    problem, gemm = exact_problem(FEW, 1, "sm_90a"), GeneratedGemm(FEW, schedule, HOPPER)
    gemm(problem, guarded_output((FEW.m, FEW.n), problem.x.dtype).y)
    assert gemm.copied["x"] == FEW.n // schedule.block_n * FEW.m * FEW.k * 2
    assert gemm.copied["weight"] == FEW.n * FEW.k // 2
