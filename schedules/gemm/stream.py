"""The rules of the small-m programs: ``gemm_stream_bulk`` (sm_90a) and ``gemm_stream`` (sm_80 and
later), see ``tiles/gemm/stream.py``.

``block_n`` output channels and ``block_m`` rows of x a block; ``num_warps`` warps share k in steps
of ``block_k``, with ``num_stages`` steps in flight each; ``split_k`` blocks share an output tile
(``gemm_stream_bulk``: as one cluster).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import accumulate, product
from typing import NamedTuple

from ...layouts.formats import PER_CHANNEL, GemmFormat
from ..schedule import Schedule, in_turn
from ..target import Target
from .parts import GATE_ROWS
from .residence import crowding
from .workload import Workload

ASYNC, BULK = "gemm_stream", "gemm_stream_bulk"
ARCHES = {ASYNC: ("sm_80", "sm_86", "sm_89", "sm_90a"), BULK: ("sm_90a",)}

# Of W that one warp holds: the first that divides block_n (at 64, sums and products for 16 rows of
# x take 64 registers). A warp of 80, 112 or 48 reads from two packed records of 64 rows or three.
# So n with a factor of five or three fills a wave by blocks of one warp's rows (in alternation, m =
# 1, H200: 10240 x 8192 from 13.7 us to 12.6; 6144 x 4096 from 6.8 to 5.9; 5120 x 27648 from 20.8
# to 20.0, but 27.6 where warps of 16 share 80), n with a factor of seven by one or two warps' rows
# (57344 x 8192, m = 16: beside other kernels, at the power limit, 71.4 us by blocks of 224 and 75.5
# of 512, but alone 69.4 and 63.6).
WARP_ROWS = (64, 80, 112, 48, 32, 16)
MAX_M = 16  # largest m for which these programs are tried: beyond it a tile reads W again
MAX_BLOCK_N = 512
BLOCK_M = (1, 2, 4, 8, 16)
BLOCK_K = (32, 64, 128)
MAX_WARPS = 16
MAX_RINGS = 15  # rings that several warps share have a named barrier each
STAGES = (2, 8)
MAX_SPLIT_K = 8  # the portable size of a thread-block cluster
MAX_MIN_BLOCKS = 8
PACKED_K = {4: 64, 8: 32}
LEAST_K_BYTES = 64  # of x of bytes one ldmatrix brings as much
# Share of the SMs that clusters of four and of eight can take (H200: 31 and 15 clusters; 32 of
# four, an SM a block, took two waves: 4096 x 14336 at m = 16, 25.8 us against 15.4 for clusters of
# two).
CLUSTER_SMS = {4: 0.94, 8: 0.91}
# What is tried.
FULL_WAVES = (0.8, 0.5, 0.0)  # of the SMs' places that a grid must fill; the next where few grids do
FULLER = 0.03  # of a grid whose last tile overlaps the one before, than all that divide the rows
ENOUGH = 16  # candidates that end the search for less full grids
MOST_BLOCKS, SPLIT_BELOW = 8, 2  # blocks an SM, one after another; tiles an SM from which no split is tried
SPLITS = (1, 2, 4, 8)  # clusters of three fill GPCs badly: 40 of them took two waves (5120 x 27648, m = 1: 32.2 us, of four 20.5, H200)
RESIDENT = (1, 2, 3, 4)  # blocks an SM
WARPS = (8, 16, 32)  # of an SM: fewest, most of those that won (28 but once), most
RINGS = (1, 2, 3, 4, 6, 8, 12, 16)  # of a block: twelve warps have registers that sixteen have not, and won at every m
IN_FLIGHT = (64 << 10, 96 << 10, 144 << 10)  # bytes of packed weights requested per SM
NORM_SPARE = 10  # registers that norming x takes besides (256 x 16 by sixteen warps, which have none left, spills 52 bytes)
LINE = {ASYNC: 16, BULK: 128}  # bytes; x and each warp's weights begin on one
STATIC_SMEM = 16  # the ticket of gemm_stream


def x_pitch(workload: Workload, schedule: Schedule) -> int:
    """Bytes of a row of x in a slot: with 16 bytes of padding ``ldmatrix`` meets no bank twice. Where
    groups of x have scales, the row's is the first of these."""
    return schedule.block_k * workload.x_bytes + 16


def x_bytes(workload: Workload, schedule: Schedule) -> int:
    """Bytes of a slot's x, and of the norm's weight behind it, whole lines."""
    return _whole_lines((schedule.block_m + workload.norm) * x_pitch(workload, schedule), schedule)


def warp_bytes(workload: Workload, schedule: Schedule) -> int:
    """Bytes of a slot's weights, scales and zero points of one warp, whole lines."""
    f, s = workload.format, schedule
    parameters = step_groups(f, s) * warp_rows(s) * f.group_bytes
    return _whole_lines(weight_bytes(f, s) // warps_n(s) + parameters, s)


def step_groups(format: GemmFormat, schedule: Schedule) -> int:
    """Scale groups that a step touches; 0: per-channel scales, which no slot holds."""
    return 0 if format.group_size == PER_CHANNEL else max(1, schedule.block_k // format.group_size)


def slot_bytes(workload: Workload, schedule: Schedule) -> int:
    """Bytes of one slot of the ring: x, then what each of the warps that share it has for itself."""
    return x_bytes(workload, schedule) + warps_n(schedule) * warp_bytes(workload, schedule)


def _whole_lines(size: int, schedule: Schedule) -> int:
    line = LINE[schedule.program]
    return -(-size // line) * line


def weight_bytes(format: GemmFormat, schedule: Schedule) -> int:
    """Bytes of packed weights of one slot."""
    return schedule.block_n * schedule.block_k * format.bits // 8


def warp_rows(schedule: Schedule) -> int:
    """Rows of W that one warp holds."""
    return _warp_rows(schedule.block_n)


@cache
def _warp_rows(block_n: int) -> int:
    return next((rows for rows in WARP_ROWS if block_n % rows == 0), WARP_ROWS[-1])


def warps_n(schedule: Schedule) -> int:
    """Warps that hold neighbouring rows of W and share a ring's x; groups of them share k."""
    return max(1, schedule.block_n // warp_rows(schedule))


def rings(schedule: Schedule) -> int:
    """Groups of warps that share k, each with a ring of its own."""
    return max(1, schedule.num_warps // warps_n(schedule))


def cluster_sms(size: int, target: Target) -> int:
    """SMs that whole clusters of ``size`` blocks can take, one block an SM: a cluster lies in one
    GPC, which seldom holds a multiple."""
    return int(target.units * CLUSTER_SMS.get(size, 1.0)) // size * size


def ring_bytes(workload: Workload, schedule: Schedule) -> int:
    """Bytes of all slots of all rings of a block."""
    return rings(schedule) * schedule.num_stages * slot_bytes(workload, schedule)


def sum_pitch(schedule: Schedule) -> int:
    """Floats from one column of a block's partial sums to the next: a warp's stores meet no bank
    twice."""
    return schedule.block_n + 4


def exchange_at(workload: Workload, schedule: Schedule) -> int:
    """The 32-bit word from which on a block holds what a cluster's blocks send each other: behind
    the rings with their barriers (two of a slot), and behind the partial sums which take their
    place."""
    s = schedule
    barriers = rings(s) * s.num_stages * 16 if s.program == BULK else 0
    sums = rings(s) * s.block_m * sum_pitch(s) * 4
    return -(-max(ring_bytes(workload, s) + barriers, sums) // 16) * 4


def quads_of_block(workload: Workload, schedule: Schedule) -> int:
    """Neighbouring fours of a tile's sums that a block of a cluster stores, the last ones fewer: those of
    gates and what they gate, or of rows that may be added up, 16 rows, together."""
    together = 2 * GATE_ROWS // 4 if workload.gate or workload.width else 1
    return -(-schedule.block_m * schedule.block_n // 4 // together // schedule.split_k) * together


def squares_quads(workload: Workload, schedule: Schedule) -> int:
    """Fours of the sums of squares of a block's rows of x, which a norm takes."""
    return -(-schedule.block_m // 4) if workload.norm else 0


def shared_words(workload: Workload, schedule: Schedule, target: Target) -> int:
    """32-bit words of shared memory of a block: rings, barriers, partial sums, and what a cluster's
    blocks send each other (a barrier in 16 bytes, then 16 bytes for each four of the block's own
    sums, of each block).

    ``gemm_stream_bulk`` asks for so much that no more than ``min_blocks`` blocks fit on an SM: the
    blocks of a dependent launch start early, and two of them on an SM that is idle make the kernel
    wait for that one (4096 x 4096 at m = 1, two of 32 x 8 warps fitting: 17.1 us in a chain where
    the same kernel alone takes 9.4, H200).
    """
    s = schedule
    quads = quads_of_block(workload, s) + squares_quads(workload, s)
    exchanged = 16 + s.split_k * quads * 16 if s.program == BULK and s.split_k > 1 else 0
    alone = target.smem_alone(s.min_blocks) if s.program == BULK else 0
    return max(exchange_at(workload, s) + exchanged // 4, alone // 4)


def stream_legal(workload: Workload, schedule: Schedule, target: Target) -> list[str]:
    """Why ``schedule`` cannot serve ``workload`` on ``target``; empty: it can."""
    s, f, reasons = schedule, workload.format, []
    if target.arch not in ARCHES[s.program]:
        reasons.append(f"{s.program} does not run on {target.arch}; accepted: {', '.join(ARCHES[s.program])}.")
    for field, accepted in (("block_m", BLOCK_M), ("block_k", BLOCK_K)):
        if getattr(s, field) not in accepted:
            reasons.append(f"{field} is {getattr(s, field)}; accepted: {', '.join(map(str, accepted))}.")
    if s.block_n % WARP_ROWS[-1] or not 0 < s.block_n <= MAX_BLOCK_N:
        reasons.append(f"block_n is {s.block_n}; accepted: multiples of {WARP_ROWS[-1]} up to {MAX_BLOCK_N}.")
    for field, low, high in (
        ("num_warps", 1, MAX_WARPS),
        ("num_stages", *STAGES),
        ("split_k", 1, MAX_SPLIT_K),
        ("min_blocks", 1, MAX_MIN_BLOCKS),
    ):
        if not low <= getattr(s, field) <= high:
            reasons.append(f"{field} is {getattr(s, field)}; accepted: {low} to {high}.")
    if reasons:
        return reasons
    n_pad, packed_k = -(-workload.n // 64) * 64, PACKED_K[f.bits]
    k_pad = -(-workload.k // packed_k) * packed_k
    if s.block_n > n_pad:
        reasons.append(f"block_n is {s.block_n}; accepted for n {workload.n} (padded to {n_pad}): up to that.")
    if workload.gate_halves and n_pad % s.block_n:
        reasons.append(f"block_n is {s.block_n}; accepted where gates are the first half of {workload.n} rows: divisors of {n_pad}.")
    if s.block_k % packed_k or k_pad % s.block_k:
        reasons.append(
            f"block_k is {s.block_k}; accepted for k {workload.k} at {f.bits} bits: multiples of {packed_k} that divide {k_pad} (k padded)."
        )
    if f.x and s.block_k < LEAST_K_BYTES:
        reasons.append(f"block_k is {s.block_k}; accepted for x of bytes: from {LEAST_K_BYTES} on.")
    if f.group_size != PER_CHANNEL and s.block_k % f.group_size and f.group_size % s.block_k:
        reasons.append(f"block_k is {s.block_k}; accepted: a multiple or a divisor of group_size {f.group_size}.")
    if s.num_warps % warps_n(s):
        reasons.append(
            f"num_warps is {s.num_warps}; accepted for block_n {s.block_n}: multiples of {warps_n(s)} ({warp_rows(s)} rows a warp)."
        )
    elif warps_n(s) > 1 and rings(s) > MAX_RINGS:
        reasons.append(f"num_warps is {s.num_warps}, {rings(s)} groups of {warps_n(s)}; accepted: at most {MAX_RINGS} groups.")
    if workload.gate_halves and warps_n(s) % 2:
        reasons.append(
            f"block_n is {s.block_n}, which {warps_n(s)} warps share; accepted where gates are the first half: an even number of warps of "
            f"{', '.join(map(str, WARP_ROWS))} rows, half of them with gates."
        )
    if s.split_k > k_pad // s.block_k:
        reasons.append(f"split_k is {s.split_k}, but k {workload.k} has {k_pad // s.block_k} steps of {s.block_k}: a share would be empty.")
    if reasons:
        return reasons
    smem = shared_words(workload, s, target) * 4 + STATIC_SMEM
    reasons += crowding(s, smem, s.num_warps * 32, target, "num_stages, num_warps or min_blocks")
    needed, share = registers_needed(s) + NORM_SPARE * workload.norm, target.REGISTERS_PER_SM // (s.min_blocks * s.num_warps * 32) // 8 * 8
    if needed > min(share, 255):
        reasons.append(f"a thread needs about {needed} registers, {min(share, 255)} are free; use fewer num_warps or min_blocks.")
    return reasons


def registers_needed(schedule: Schedule) -> int:
    """Registers of a thread, about: sums, products, operands and addresses."""
    tiles, columns = warp_rows(schedule) // 16, max(1, schedule.block_m // 8)
    return 2 * tiles * columns * 4 + tiles * 4 + columns * 8 + columns * 4 + 24


def stream_candidates(workload: Workload, target: Target) -> list[Schedule]:
    """Legal schedules worth measuring for a small m: grids of nearly whole waves (of less whole
    ones where there are few), the deepest steps, rings that keep IN_FLIGHT bytes of weights on
    their way to an SM. Blocks in turn, the likely winners first."""
    # What else norms x reads W no less often, and nothing else gates one half of W by the other.
    if not 0 < workload.m <= MAX_M and not workload.norm and not workload.gate_halves:
        return []
    program = BULK if target.arch in ARCHES[BULK] else ASYNC
    block_m = next((b for b in BLOCK_M if b >= workload.m), BLOCK_M[-1])
    whole, overlapping = _grids(workload, block_m, program, target)
    pipelines = cache(lambda base: _pipelines(base, workload, target))

    def enough(least: float) -> bool:
        return sum(len(pipelines(grid.base)) for grid in whole if grid.full >= least) >= ENOUGH

    least = next(filter(enough, FULL_WAVES), FULL_WAVES[-1])
    grids = [grid for grid in whole + overlapping if grid.full >= least]
    # Small tiles take twice the instructions; few large blocks read x less often.
    grids.sort(key=lambda grid: (warp_rows(grid.base) == WARP_ROWS[-1], grid.blocks, -grid.full))
    return in_turn([pipelines(grid.base) for grid in grids])


class _Grid(NamedTuple):
    """Of ``blocks`` that compute ``base``, a schedule without its pipeline; ``full``: the share of the
    SMs' places that rows fill."""

    full: float
    blocks: int
    base: Schedule


def _grids(workload: Workload, block_m: int, program: str, target: Target) -> tuple[list[_Grid], list[_Grid]]:
    """Grids of nearly enough blocks and not many: (those that divide the rows, those whose last tile
    overlaps the tile before: which rows fill nearly, and FULLER than any of the others with no more
    blocks, as many on an SM)."""
    n_pad = -(-workload.n // 64) * 64
    whole: list[_Grid] = []
    overlapping: list[_Grid] = []
    for block_n, split_k, min_blocks in product(range(WARP_ROWS[-1], min(MAX_BLOCK_N, n_pad) + 1, WARP_ROWS[-1]), SPLITS, RESIDENT):
        tiles = -(-n_pad // block_n)
        blocks, places = tiles * split_k, cluster_sms(split_k if program == BULK else 1, target) * min_blocks
        if places and target.units * (min_blocks - 1) < blocks and (split_k == 1 or tiles < target.units * SPLIT_BELOW):
            full = n_pad * split_k / block_n / (-(-blocks // places) * target.units * min_blocks)
            base = Schedule(program, block_n, block_m, BLOCK_K[-1], STAGES[0], 1, split_k, min_blocks)
            if not (workload.gate_halves and (n_pad % block_n or warps_n(base) % 2)):
                (overlapping if n_pad % block_n else whole).append(_Grid(full, blocks, base))
    most = target.units * MOST_BLOCKS
    # None of a huge n without large divisors is of few (151936 x 5120, m = 1: 128 rows a block 90 us, the
    # best of gemm_wgmma 138, H200).
    widest = max((grid.base.block_n for grid in whole), default=0)
    whole = [grid for grid in whole if grid.blocks <= most] or [grid for grid in whole if grid.base.block_n == widest]
    fullest: dict[int, list[float]] = {}  # by blocks an SM, of no more than so many blocks
    for resident in RESIDENT:
        best = [0.0] * (most + 1)
        for grid in whole:
            if grid.base.min_blocks == resident and grid.blocks <= most:
                best[grid.blocks] = max(best[grid.blocks], grid.full)
        fullest[resident] = list(accumulate(best, max))
    few = (grid for grid in overlapping if grid.blocks <= most and grid.full >= FULL_WAVES[0])
    return whole, [grid for grid in few if grid.full > fullest[grid.base.min_blocks][grid.blocks] + FULLER]


def _pipelines(base: Schedule, workload: Workload, target: Target) -> list[Schedule]:
    """Warps and stages for a block of ``base``, with the deepest steps that are legal: no more than
    WARPS[1] and few stages first."""
    fewest, usual, most = WARPS
    counts = [rings_k for rings_k in RINGS if fewest <= warps_n(base) * rings_k * base.min_blocks <= most]
    for block_k in sorted(BLOCK_K, reverse=True):
        of_k = replace(base, block_k=block_k)
        step, pipelines = weight_bytes(workload.format, of_k), []
        for in_flight, rings_k in product(IN_FLIGHT, counts):
            turns = -(-workload.k // (block_k * base.split_k * rings_k))
            stages = min(round(in_flight / (base.min_blocks * rings_k * step)), turns)
            pipelines.append((warps_n(base) * rings_k, min(max(stages, STAGES[0]), STAGES[1])))
        tried = (replace(of_k, num_warps=warps, num_stages=stages) for warps, stages in dict.fromkeys(pipelines))
        found = [s for s in tried if not stream_legal(workload, s, target)]
        if found:
            return sorted(found, key=lambda s: s.num_warps * s.min_blocks > usual)
    return []
