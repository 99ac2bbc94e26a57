"""The schedules of an exhaustive scan: all that the rules accept, and which of them are measured
where there are too many."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from tilebit.schedules.gemm import cpu as gemm_cpu
from tilebit.schedules.gemm import rules as gemm
from tilebit.schedules.gemm import stream as gemm_stream
from tilebit.schedules.gemm.cost import estimate
from tilebit.schedules.gemm.waves import TAILS
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import candidates, legal, programs
from tilebit.schedules.schedule import Schedule, in_turn
from tilebit.schedules.target import Target

PLACES = 200  # schedules that are measured of a workload: some fifteen times as many as the tuner tries
WITHIN = 3.0  # times the cost model's fastest: what it expects to be slower would take most of the time
RASTERS = (0, 2, 4, 8, 16, 32)  # 1 is plain order too
# (stream_k, cluster, tail) of tiles that no split shares
SHARES = (*((False, cluster, tail) for tail in (1, *TAILS) for cluster in (1, 2)), (True, 1, 1), (True, 2, 1))


@dataclass(frozen=True, slots=True)
class _Axes:
    """The values of a program's fields that its rule can accept at all; ``shares`` are (split_k,
    stream_k, cluster, tail)."""

    block_n: Sequence[int]
    block_m: Sequence[int]
    block_k: Sequence[int]
    num_warps: Sequence[int]
    num_stages: Sequence[int]
    min_blocks: Sequence[int]
    rasters: Sequence[int]
    shares: Sequence[tuple[int, bool, int, int]]


def full_grid(workload: Workload, target: Target) -> list[Schedule]:
    """Every legal schedule of every program on ``target``, always in the same order. Of schedules
    that make the same launch one is there: a raster says nothing where one tile covers all rows of
    x."""
    serving = [program for program, rule in programs("gemm", target.arch).items() if not rule.unserved(workload, target.arch)]
    return [schedule for program in serving for schedule in _legal_of(program, workload, target)]


def scanned(workload: Workload, target: Target, places: int = PLACES) -> tuple[list[Schedule], int, str]:
    """(schedules to measure, how many are legal, the rule in words): the full grid where it has at
    most ``places`` schedules. Else all that the rules offer the tuner; then, of what the analytic
    model (a tuner with a ranker does not go by it) expects within ``WITHIN`` times its fastest, as
    many of the fastest, tile shapes in turn, as are drawn evenly from the rest."""
    grid = full_grid(workload, target)
    if len(grid) <= places:
        return grid, len(grid), "all legal schedules"
    us = {schedule: estimate(workload, schedule, target).us for schedule in grid}
    bound = WITHIN * min(us.values())
    offered = candidates(workload, target) or []
    known = set(offered)
    near = [s for s in grid if us[s] <= bound and s not in known]
    shapes: dict[tuple[str, int, int, int], list[Schedule]] = {}
    for schedule in sorted(near, key=us.__getitem__):
        shapes.setdefault((schedule.program, schedule.block_n, schedule.block_m, schedule.num_warps), []).append(schedule)
    free = max(0, places - len(offered))
    fastest = in_turn(list(shapes.values()))[: free // 2]
    known.update(fastest)
    rest = [s for s in near if s not in known]
    drawn = random.Random(0).sample(rest, min(len(rest), free - len(fastest)))
    rule = (
        f"of {len(grid):,} legal schedules {len(offered)} candidates of the rules; of those that the cost model expects within {WITHIN:g} "
        f"times its fastest {len(fastest)} that it expects to be the fastest, tile shapes in turn, and {len(drawn)} drawn evenly"
    )
    return [*offered, *fastest, *drawn], len(grid), rule


def _legal_of(program: str, workload: Workload, target: Target) -> Iterator[Schedule]:
    """A tile that is illegal with the shortest pipeline and no split, a pipeline without one, or so many
    blocks of it on an SM, is so with more: it needs more of all."""
    axes = _axes(program, target)
    for block_n, block_m, block_k, num_warps in product(axes.block_n, axes.block_m, axes.block_k, axes.num_warps):
        tile = Schedule(program, block_n, block_m, block_k, axes.num_stages[0], num_warps)
        if legal(workload, tile, target):
            continue
        rasters = axes.rasters if block_m < workload.m else axes.rasters[:1]
        for num_stages in axes.num_stages:
            fields = program, block_n, block_m, block_k, num_stages, num_warps
            for min_blocks in axes.min_blocks:
                if legal(workload, Schedule(*fields, 1, min_blocks), target):
                    break
                for (split_k, stream_k, cluster, tail), raster in product(axes.shares, rasters):
                    schedule = Schedule(*fields, split_k, min_blocks, raster, stream_k, cluster, tail)
                    if not legal(workload, schedule, target):
                        yield schedule


def _axes(program: str, target: Target) -> _Axes:
    if program == gemm_cpu.PROGRAM:
        vectors, threads = gemm_cpu.isa(target), min(max(1, target.units), gemm_cpu.THREADS_MAX)
        return _Axes(
            block_n=range(gemm_cpu.TILE, gemm_cpu.BLOCK_N_MAX + 1, gemm_cpu.TILE),
            block_m=range(1, vectors.registers if vectors is not None else 1),
            block_k=gemm_cpu.BLOCK_K,
            num_warps=sorted({*(1 << i for i in range(threads.bit_length())), threads}),
            num_stages=(1,),
            min_blocks=(1,),
            rasters=(0,),
            shares=[(split_k, False, 1, 1) for split_k in (1, 2, 4)],
        )
    if program in gemm_stream.ARCHES:
        return _Axes(
            block_n=range(gemm_stream.WARP_ROWS[-1], gemm_stream.MAX_BLOCK_N + 1, gemm_stream.WARP_ROWS[-1]),
            block_m=gemm_stream.BLOCK_M,
            block_k=gemm_stream.BLOCK_K,
            num_warps=range(1, gemm_stream.MAX_WARPS + 1),
            num_stages=range(gemm_stream.STAGES[0], gemm_stream.STAGES[1] + 1),
            min_blocks=range(1, gemm_stream.MAX_MIN_BLOCKS + 1),
            rasters=(0,),
            shares=[(split_k, False, 1, 1) for split_k in range(1, gemm_stream.MAX_SPLIT_K + 1)],
        )
    rule = gemm.CUDA_RULES[program]
    return _Axes(
        block_n=rule.block_n,
        block_m=rule.block_m,
        block_k=rule.block_k,
        num_warps=rule.num_warps,
        num_stages=range(rule.stages[0], rule.stages[1] + 1),
        min_blocks=range(1, gemm.MAX_MIN_BLOCKS + 1),
        rasters=RASTERS,
        shares=[*((1, *share) for share in SHARES), *((split_k, False, 1, 1) for split_k in range(2, gemm.MAX_SPLIT_K + 1))],
    )
