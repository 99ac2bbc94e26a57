"""The rules of decode attention over a packed cache: ``attention_decode_bulk`` (sm_90a: bulk
copies) and ``attention_decode`` (sm_80 and later: cp.async), see ``tiles/attention/decode.py``.

The grid is persistent. Its warps take *units* of ``block_n`` tokens of one kv head through rings of
their own, ``num_stages`` units deep; ``block_m`` columns, (query, head of the group) pairs, are the
width of a product. Blocks are dealt *segments* (a sequence, kv head and pass over columns): whole
ones, or equal parts of one; where that is not fair all take equal shares of the units of all
sequences (Stream-K, Osama et al. 2023), so that a block begins and ends inside a segment. Lengths
alone decide who adds up what, in which order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import product

from ...layouts.kv import GRANULE
from ..gemm.rules import TICKETS
from ..schedule import Schedule
from ..target import Target
from .workload import AttentionWorkload

ASYNC, BULK = "attention_decode", "attention_decode_bulk"
ARCHES = {ASYNC: ("sm_80", "sm_86", "sm_89", "sm_90a"), BULK: ("sm_90a",)}

BLOCK_N = (16, 32, 64, 128)
BLOCK_M = (8, 16, 32)
STAGES = (2, 16)
MAX_WARPS = 16
MAX_MIN_BLOCKS = 8
BARRIER_BYTES = 8
SUM_PADDING = 4  # floats a column, which keep the warps' partial sums free of bank conflicts
SPARE_REGISTERS = 44  # of addresses, codes on their way and running maxima
SCALED_QUERIES = 12  # and of queries that take the keys' channel scales
# And of each eight columns beyond the first, by tokens of a unit: what spilled, compiled for sm_90a and sm_80, at 64 and 128 channels.
WIDER = {16: 0, 32: 12, 64: 45, 128: 85}
WIDER_BULK = WIDER | {64: 57}
PLAN_WORDS = 3  # of shared memory that say how the blocks share the units
STATIC_SMEM = 64  # the ticket, and where the block's share begins
# What is tried. 32 x 4,096 tokens on an H200: at 4 bits 39.0 us with 8 warps and 39.6 with 12, at 8
# bits 70.2 with 8 and 85.3 with 4. Fewer are for shared memory that is short.
WARPS_PER_SM = ((8, 12), (4, 16), (1, 4))
IN_FLIGHT = (64 << 10, 80 << 10, 104 << 10, 144 << 10)  # bytes of the cache requested per SM; the knee lies in the first ones (H200)
# 64 x about 4,096 tokens at 4 bits behind an append that is launched early: three blocks an SM take
# 92.9 us, two 75.2, four 73.8 (H200).
MIN_BLOCKS = (1, 2, 4)
NUM_WARPS = (4, 8, 2, 6, 12, 16)
ENOUGH = 8  # candidates


def unit_bytes(workload: AttentionWorkload, schedule: Schedule) -> tuple[int, int]:
    """Bytes that a warp copies for the keys and for the values of one unit of packed tokens, their
    parameters (by channel those of the whole group) included."""
    f, n, d = workload.format, schedule.block_n, workload.head_dim
    key_parameters = {"channel": 4 * d, "token": 4 * n}.get(f.key_scales, 0)
    value_parameters = 4 * n if f.value_scales == "token" else 0
    return n * d * f.key_bits // 8 + key_parameters, n * d * f.value_bits // 8 + value_parameters


def slot_bytes(workload: AttentionWorkload, schedule: Schedule) -> int:
    """Bytes of one slot of a warp's ring: keys or values of a packed unit, or of 16 tokens of the
    residual window."""
    return max(*unit_bytes(workload, schedule), GRANULE * workload.row_bytes // 2)


def ring_bytes(workload: AttentionWorkload, schedule: Schedule) -> int:
    """Bytes of all warps' rings, without their barriers."""
    return schedule.num_warps * schedule.num_stages * slot_bytes(workload, schedule)


def results_at(workload: AttentionWorkload, schedule: Schedule) -> int:
    """The byte of shared memory from which on the warps' partial results lie: behind the rings and a
    barrier for every slot, where loads of 16 bytes may begin."""
    s = schedule
    barriers = s.num_warps * s.num_stages * BARRIER_BYTES if s.program == BULK else 0
    return -(-(ring_bytes(workload, s) + barriers) // 16) * 16


def shared_bytes(workload: AttentionWorkload, schedule: Schedule, target: Target) -> int:
    """Dynamic shared memory of a block: the rings, a barrier for every slot, and the warps' partial
    results (which have a place of their own: the next piece is requested while they are added up):
    per column the channels' sums, a maximum and a denominator; then PLAN_WORDS.

    ``attention_decode_bulk`` asks for so much that no more than ``min_blocks`` blocks fit on an SM:
    those of a dependent launch start early, and the kernel waits for the SM that got the most.
    """
    s = schedule
    results = s.num_warps * s.block_m * (workload.head_dim + SUM_PADDING + 2) * 4
    needed = results_at(workload, s) + results + 4 * PLAN_WORDS
    return max(needed, target.smem_alone(s.min_blocks)) if s.program == BULK else needed


def grid_blocks(schedule: Schedule, target: Target) -> int:
    """Blocks of the persistent grid: as many as the device holds at once."""
    return target.units * schedule.min_blocks


def column_passes(workload: AttentionWorkload, schedule: Schedule) -> int:
    """How often a kv head's tokens are read: once for every ``block_m`` columns."""
    return -(-workload.group * max(workload.q_len, 1) // schedule.block_m)


def workspace_words(workload: AttentionWorkload, schedule: Schedule, target: Target) -> int:
    """32-bit words of the workspace: TICKETS, which a launch finds and leaves zero (it uses one a block: a block begins at most one segment
    that others go on with), then for each block two partial results, those of the segments that it begins and ends in: per column
    ``head_dim`` sums, a maximum and a denominator in fp32.  The same for all lengths, batches and q_len.
    """
    s = schedule
    return TICKETS + grid_blocks(s, target) * 2 * s.block_m * (workload.head_dim + 2)


def registers_needed(workload: AttentionWorkload, schedule: Schedule) -> int:
    """Registers of a thread below which it spills, about: queries (the B operand of keys) and
    output sums, scales, scores, and what everything else takes. Where there are more, the compiler
    takes 20 more."""
    tiles, columns = workload.head_dim // 16, schedule.block_m // 8
    scaled = SCALED_QUERIES if workload.format.key_scales == "channel" else 0
    wider = (columns - 1) * (WIDER_BULK if schedule.program == BULK else WIDER)[schedule.block_n]
    return tiles * columns * (2 + 4) + tiles * 5 // 2 + columns * 16 + scaled + wider + SPARE_REGISTERS


def decode_legal(workload: AttentionWorkload, schedule: Schedule, target: Target) -> list[str]:
    """Why ``schedule`` cannot serve ``workload`` on ``target`` (an arch of its program); empty: it
    can."""
    s = schedule
    ranges = {"num_stages": STAGES, "num_warps": (1, MAX_WARPS), "min_blocks": (1, MAX_MIN_BLOCKS)}
    reasons = field_reasons(workload, s, {"block_n": BLOCK_N, "block_m": BLOCK_M}, ranges)
    return reasons or resource_reasons(s, target, shared_bytes(workload, s, target) + STATIC_SMEM, registers_needed(workload, s), 255)


def decode_candidates(program: str, workload: AttentionWorkload, target: Target) -> list[Schedule]:
    """Legal schedules worth measuring: the narrowest product that holds all columns (of too many
    columns, both wide ones), rings that keep IN_FLIGHT bytes on their way to an SM, WARPS_PER_SM
    warps."""
    columns = workload.group * max(workload.q_len, 1)
    widths = [m for m in BLOCK_M if m >= columns][:1] or [BLOCK_M[-1], BLOCK_M[-2]]
    if all(registers_needed(workload, Schedule(program, 16, m, workload.head_dim)) > 255 for m in widths):
        widths = [BLOCK_M[-2], BLOCK_M[0]]
    found: list[Schedule] = []
    deepest = cache(lambda base: _deepest(base, workload, target))
    for fewest, most in WARPS_PER_SM:
        if len(found) < ENOUGH:
            bases = (
                (in_flight, Schedule(program, block_n, block_m, workload.head_dim, 1, warps, min_blocks=blocks))
                for block_m, in_flight, block_n, blocks, warps in product(widths, IN_FLIGHT, BLOCK_N[::-1], MIN_BLOCKS, NUM_WARPS)
                if fewest <= warps * blocks <= most
            )
            deepened = (_deepened(base, workload, deepest(base), in_flight) for in_flight, base in bases)
            found = list(dict.fromkeys([*found, *(s for s in deepened if s is not None)]))
    return found


def _deepened(base: Schedule, workload: AttentionWorkload, deepest: int, in_flight: int) -> Schedule | None:
    """``base`` with rings that keep about ``in_flight`` bytes on their way to an SM, or the ``deepest``
    that fit; None: none fit."""
    wanted = round(2 * in_flight / (base.num_warps * base.min_blocks * sum(unit_bytes(workload, base))))
    return replace(base, num_stages=min(max(wanted, STAGES[0]), deepest)) if deepest else None


def _deepest(base: Schedule, workload: AttentionWorkload, target: Target) -> int:
    """Of ``base`` the most stages that are legal, 0 where none are: a deeper ring needs more memory, and
    nothing else."""
    depths = range(STAGES[0], STAGES[1] + 1)
    fit = bisect_left(depths, True, key=lambda depth: bool(decode_legal(workload, replace(base, num_stages=depth), target)))
    return depths[fit - 1] if fit else 0


def field_reasons(
    workload: AttentionWorkload, schedule: Schedule, sizes: Mapping[str, tuple[int, ...]], ranges: Mapping[str, tuple[int, int]]
) -> list[str]:
    """Sentences about fields of an attention schedule that are none of ``sizes`` or outside
    ``ranges``, or that no such program has."""
    s, reasons = schedule, []
    for field, accepted in {"block_k": (workload.head_dim,), **sizes}.items():
        if getattr(s, field) not in accepted:
            reasons.append(f"{field} is {getattr(s, field)}; accepted: {', '.join(map(str, accepted))}.")
    for field, (low, high) in ranges.items():
        if not low <= getattr(s, field) <= high:
            reasons.append(f"{field} is {getattr(s, field)}; accepted: {low} to {high}.")
    return reasons


def resource_reasons(schedule: Schedule, target: Target, smem: int, registers: int, most_registers: int, extra_warps: int = 0) -> list[str]:
    """Sentences about blocks of ``smem`` bytes whose computing threads need ``registers`` that do
    not fit on an SM of ``target``; ``extra_warps`` compute nothing."""
    s, reasons = schedule, []
    if smem > target.smem:
        reasons.append(
            f"a block needs {smem} bytes of shared memory, {target.smem} are there; use fewer num_stages, num_warps or a smaller block_n."
        )
    resident = s.min_blocks * (smem + target.BLOCK_SMEM)
    if s.min_blocks > 1 and resident > target.smem_per_sm:
        reasons.append(
            f"{s.min_blocks} blocks need {resident} bytes of an SM's shared memory, {target.smem_per_sm} are there; use fewer min_blocks."
        )
    threads = s.min_blocks * (s.num_warps + extra_warps) * 32
    if threads > target.threads_per_sm:
        reasons.append(
            f"{s.min_blocks} blocks have {threads} threads, an SM holds {target.threads_per_sm}; use fewer min_blocks or num_warps."
        )
    share = most_registers if extra_warps else target.REGISTERS_PER_SM // threads // 8 * 8
    if registers > min(share, most_registers):
        reasons.append(
            f"a thread needs about {registers} registers, {min(share, most_registers)} are free; "
            "use a smaller block_m or block_n, or fewer num_warps or min_blocks."
        )
    return reasons
