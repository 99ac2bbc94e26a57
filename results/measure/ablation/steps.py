"""The steps of the ablation, and the schedules that each of them tries:

0  TileLang as its examples write it: plain nibbles, dequantized through shared memory (``naive.py``)
1  induced packing: the dequantized weight is the MMA's register operand; one block a tile, two stages
2  deep pipeline: more stages, more blocks an SM
3  blocks that work together (split-k, stream-k): as many of them as the device has places
4  the small-m program: every warp streams its own weights
5  dependent launch: the fastest of 1 to 4 launched so that it requests its weights before the call ahead of it ends
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from tilebit.schedules.gemm import rules as rules
from tilebit.schedules.gemm import stream as gemm_stream
from tilebit.schedules.gemm.cost import estimate
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import candidates, legal
from tilebit.schedules.records import TuningRecord, shipped_records
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target

from . import naive

SHALLOW = 2  # stages of step 1: load one tile while the other is multiplied
TRIED = 10  # schedules of a step, at most
MANY_ROWS = 32  # from here on candidates are those of the tiled programs


@dataclass(frozen=True, slots=True)
class Step:
    """One rung: ``uses(schedule)`` says whether a schedule has the idea of this step and none of a
    later one."""

    number: int
    idea: str
    uses: Callable[[Schedule], bool]


def _whole_tiles(s: Schedule) -> bool:
    """gemm_wgmma in which every block works for itself on tiles of its own: no field is set but
    those of tile, pipeline and order."""
    alone = Schedule(s.program, s.block_n, s.block_m, s.block_k, s.num_stages, s.num_warps, min_blocks=s.min_blocks, raster=s.raster)
    return s.program == "gemm_wgmma" and s == alone


STEPS = (
    Step(0, "naive TileLang: dequantized through shared memory", lambda s: s.program == naive.NAME),
    Step(1, "induced packing, register operand", lambda s: _whole_tiles(s) and s.num_stages == SHALLOW and s.min_blocks == 1),
    Step(2, "deep pipeline", lambda s: _whole_tiles(s) and s.num_stages > SHALLOW),
    Step(3, "blocks that work together: split-k, stream-k", lambda s: s.program == "gemm_wgmma" and not _whole_tiles(s)),
    Step(4, "small-m program", lambda s: s.program in gemm_stream.ARCHES),
)
DEPENDENT = Step(5, "dependent launch", lambda s: s.program != naive.NAME)  # a way to launch, not to divide the work


def drawn(workload: Workload, target: Target, records: Iterable[TuningRecord] | None = None) -> dict[Step, list[Schedule]]:
    """The schedules to try of every step that has any: tuned ones first, by their time, for at most
    half of the places, then the cost model's best.

    They are the workload's candidates, tiles that ``_tiles`` adds, these with ``SHALLOW`` stages,
    the tuned ones (``records``, default: the shipped), and the naive program's own."""
    tuned = [r for r in (shipped_records() if records is None else records) if r.ok and r.workload == workload and r.measured_on(target)]
    measured = {r.schedule: r.us or 0.0 for r in tuned if not legal(workload, r.schedule, target)}
    offered: list[Schedule] = [*measured, *(candidates(workload, target) or []), *_tiles(workload, target)]
    shallow = (replace(s, num_stages=SHALLOW, min_blocks=1) for s in offered if _whole_tiles(s))
    every = [*offered, *(s for s in shallow if not legal(workload, s, target))]
    found = {}
    for step in STEPS:
        known = sorted((s for s in measured if step.uses(s)), key=measured.__getitem__)[: TRIED // 2]
        rest = sorted((s for s in every if step.uses(s)), key=lambda s: estimate(workload, s, target).us)
        found[step] = [*dict.fromkeys([*known, *rest])][:TRIED]
    found[STEPS[0]] = naive.candidates(workload, target)
    return {step: schedules for step, schedules in found.items() if schedules}


def _tiles(workload: Workload, target: Target) -> list[Schedule]:
    """Legal schedules of gemm_wgmma for a workload of few rows, for which ``candidates`` may offer
    the small-m program alone: those of ``MANY_ROWS`` rows with tiles cut to what is there."""
    block_m = max(8, 1 << (workload.m - 1).bit_length())
    offered = candidates(workload.with_m(max(workload.m, MANY_ROWS)), target) or []
    cut = (replace(s, block_m=min(s.block_m, block_m)) for s in offered if s.program == "gemm_wgmma")
    return [s for s in cut if not legal(workload, s, target)]
