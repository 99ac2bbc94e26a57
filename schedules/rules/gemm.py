"""The GEMM rules: what each program accepts on each target, and the schedules worth trying for a workload.

``gemm_wgmma`` (sm_90a): a TMA producer warpgroup and one or two consumer warpgroups; the dequantized weight is wgmma's register operand,
so a consumer warpgroup holds whole 64-row slabs of W and wgmma's n is ``block_m``.
``gemm_mma`` (sm_80 and later): the same tile as mma.sync on four warps per 64-row slab, fed by cp.async.
``gemm_cpu``: see ``gemm_cpu.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from ...layouts.formats import PER_CHANNEL, QuantFormat
from ..schedule import Schedule
from ..target import Target
from ..workload import Workload
from .gemm_cpu import cpu_candidates, cpu_legal

SLAB_N = 64  # rows of W that four warps hold: one wgmma m64, or four mma.m16
PACKED_K = {4: 64, 8: 32}  # values of k in one packed tile (2 KiB): a stage is a whole number of tiles
REGISTERS_PER_SM = 65536
THREADS_PER_SM = 2048
BLOCK_SMEM_OVERHEAD = 1024  # bytes of an SM's shared memory that each resident block costs beyond what it asked for
MAX_SPLIT_K = 16
MAX_MIN_BLOCKS = 4
MAX_RASTER = 32
MAX_CANDIDATES = 150


@dataclass(frozen=True, slots=True)
class _CudaRule:
    """The constants of one CUDA program; change a limit here and ``legal`` and ``candidates`` follow.

    ``registers`` is what one computing thread may hold when a block has an SM to itself, ``spare_registers`` what addresses, scales and
    loop state take of it; ``b_fragment`` says whether the small operand passes through registers (mma.sync) or is read from shared memory
    (wgmma)."""

    program: str
    arches: tuple[str, ...]
    block_n: tuple[int, ...]
    block_m: tuple[int, ...]
    block_k: tuple[int, ...]
    num_warps: tuple[int, ...]
    stages: tuple[int, int]
    producer_threads: int
    registers: int
    spare_registers: int
    barrier_bytes: int  # per stage
    reserved_smem: int  # alignment and the split-k ticket
    b_fragment: bool
    tried_block_m: tuple[int, ...]
    tried_block_k: tuple[int, ...] = (64, 128)


_WGMMA = _CudaRule(
    "gemm_wgmma", ("sm_90a",), (64, 128, 256), (8, 16, 32, 64, 128, 256), (32, 64, 128), (4, 8), (2, 8),
    producer_threads=128, registers=232, spare_registers=24, barrier_bytes=16, reserved_smem=1024, b_fragment=False,
    tried_block_m=(8, 16, 32, 64, 128, 256), tried_block_k=(32, 64, 128),
)  # fmt: skip
_MMA = _CudaRule(
    "gemm_mma", ("sm_80", "sm_86", "sm_89", "sm_90a"), (64, 128, 256), (8, *range(16, 129, 16)), (32, 64, 128), (4, 8, 16), (2, 5),
    producer_threads=0, registers=255, spare_registers=50, barrier_bytes=0, reserved_smem=16, b_fragment=True,
    tried_block_m=(8, 16, 32, 64, 128), tried_block_k=(32, 64, 128),
)  # fmt: skip
_CUDA = {rule.program: rule for rule in (_WGMMA, _MMA)}
PROGRAMS = (*_CUDA, "gemm_cpu")

# The program whose candidates are tried on an arch. gemm_mma is legal on sm_90a too (its code runs there) but never the faster one.
_PREFERRED = {"sm_80": "gemm_mma", "sm_86": "gemm_mma", "sm_89": "gemm_mma", "sm_90a": "gemm_wgmma", "cpu": "gemm_cpu"}


def programs_for(arch: str) -> tuple[str, ...]:
    """The GEMM programs that run on ``arch``, the preferred one first; empty when there is none."""
    if arch == "cpu":
        return ("gemm_cpu",)
    preferred = _PREFERRED.get(arch)
    return tuple(sorted((p for p, rule in _CUDA.items() if arch in rule.arches), key=lambda p: p != preferred))


def legal(workload: Workload, schedule: Schedule, target: Target) -> list[str]:
    """Why ``schedule`` cannot serve ``workload`` on ``target``, one sentence per reason; an empty list means that it can."""
    if schedule.program not in PROGRAMS:
        return [f"program is {schedule.program!r}; accepted: {', '.join(PROGRAMS)}."]
    if schedule.program == "gemm_cpu":
        return cpu_legal(workload, schedule, target)
    rule = _CUDA[schedule.program]
    reasons = _field_reasons(rule, workload, schedule, target)
    return reasons or _resource_reasons(rule, workload.format, schedule, target)  # sizes mean nothing while a field is out of range


def candidates(workload: Workload, target: Target) -> list[Schedule] | None:
    """Legal schedules worth measuring, at most ``MAX_CANDIDATES``, without duplicates, always in the same order; None: no program runs
    there."""
    preferred = _PREFERRED.get(target.arch)
    if preferred is None:
        return None
    if preferred == "gemm_cpu":
        return cpu_candidates(workload, target) or None
    found = [s for s in _cuda_grid(_CUDA[preferred], workload, target) if not legal(workload, s, target)]
    return list(dict.fromkeys(found))[:MAX_CANDIDATES]


def stage_bytes(format: QuantFormat, schedule: Schedule) -> int:
    """Shared memory of one pipeline stage in bytes: packed weight tile, 16-bit x tile, and the group parameters of the tile."""
    groups = 1 if format.group_size == PER_CHANNEL else -(-schedule.block_k // format.group_size)
    parameters = schedule.block_n * 2 * groups * (1 if format.symmetric else 2)
    return schedule.block_n * schedule.block_k * format.bits // 8 + schedule.block_m * schedule.block_k * 2 + parameters


def shared_memory(format: QuantFormat, schedule: Schedule) -> int:
    """Shared memory of one block of a CUDA program in bytes."""
    rule = _CUDA[schedule.program]
    pipeline = schedule.num_stages * (stage_bytes(format, schedule) + rule.barrier_bytes)
    staging = schedule.block_m * (schedule.block_n + 8) * 2  # the output tile reuses the pipeline's memory
    return max(pipeline, staging) + rule.reserved_smem


def registers_needed(schedule: Schedule) -> int:
    """32-bit registers that one computing thread needs for its fp32 accumulators and its 16-bit operand fragments."""
    rule = _CUDA[schedule.program]
    threads = schedule.num_warps * 32
    accumulators = schedule.block_n * schedule.block_m // threads
    a_fragment = schedule.block_n * schedule.block_k // threads // 2
    b_fragment = schedule.block_m * 16 // 32 // 2 if rule.b_fragment else 0  # one k16 step: every warp reads all of block_m
    return accumulators + a_fragment + b_fragment


def _register_budget(rule: _CudaRule, schedule: Schedule) -> int:
    if schedule.min_blocks == 1:
        return rule.registers - rule.spare_registers
    threads = schedule.num_warps * 32 + rule.producer_threads  # without register reallocation all threads get the same share
    share = REGISTERS_PER_SM // (threads * schedule.min_blocks) // 8 * 8
    return min(rule.registers, share) - rule.spare_registers


def _field_reasons(rule: _CudaRule, workload: Workload, schedule: Schedule, target: Target) -> list[str]:
    s, reasons = schedule, []
    if target.arch not in rule.arches:
        reasons.append(f"{rule.program} does not run on {target.arch}; accepted: {', '.join(rule.arches)}.")
    for field in ("block_n", "block_m", "block_k", "num_warps"):
        value, accepted = getattr(s, field), getattr(rule, field)
        if value not in accepted:
            reasons.append(f"{field} is {value}; accepted: {', '.join(map(str, accepted))}.")
    for field, low, high in (
        ("num_stages", *rule.stages), ("split_k", 1, MAX_SPLIT_K), ("min_blocks", 1, MAX_MIN_BLOCKS), ("raster", 0, MAX_RASTER),
    ):  # fmt: skip
        value = getattr(s, field)
        if not low <= value <= high:
            reasons.append(f"{field} is {value}; accepted: {low} to {high}.")
    if reasons:
        return reasons
    warpgroups = s.num_warps // 4
    if s.block_n // SLAB_N % warpgroups:
        reasons.append(
            f"block_n is {s.block_n}, {s.block_n // SLAB_N} slabs of {SLAB_N} rows, "
            f"which {warpgroups} groups of four warps cannot share evenly."
        )
    if rule.b_fragment and warpgroups * SLAB_N != s.block_n:
        reasons.append(
            f"block_n is {s.block_n} with {s.num_warps} warps; accepted: 16 rows a warp (two slabs a warp would interleave their rows)."
        )
    n_pad = -(-workload.n // SLAB_N) * SLAB_N
    if n_pad % s.block_n:
        reasons.append(f"block_n is {s.block_n}; accepted for n {workload.n} (padded to {n_pad}): its divisors.")
    packed_k = PACKED_K[workload.format.bits]
    k_pad = -(-workload.k // packed_k) * packed_k
    if s.block_k % packed_k == 0 and k_pad % s.block_k:
        reasons.append(f"block_k is {s.block_k}; accepted for k {workload.k} (padded to {k_pad}): its divisors.")
    if s.block_k % packed_k:
        reasons.append(f"block_k is {s.block_k}; accepted at {workload.format.bits} bits: multiples of {packed_k} (the packed tile).")
    group = workload.format.group_size
    if group != PER_CHANNEL and s.block_k % group and group % s.block_k:
        reasons.append(f"block_k is {s.block_k}; accepted: a multiple or a divisor of group_size {group}.")
    steps = -(-workload.k // s.block_k)
    if rule.b_fragment and steps % s.split_k:  # the cp.async pipeline is unrolled at its ends and needs a constant length
        reasons.append(f"split_k is {s.split_k}; accepted by {rule.program} for {steps} steps of {s.block_k}: its divisors.")
    if (s.split_k - 1) * -(-steps // s.split_k) >= steps:
        reasons.append(f"split_k is {s.split_k}, but k {workload.k} has {steps} steps of {s.block_k}: a split would be empty.")
    return reasons


def _resource_reasons(rule: _CudaRule, format: QuantFormat, schedule: Schedule, target: Target) -> list[str]:
    s, reasons = schedule, []
    smem = shared_memory(format, s)
    if smem > target.smem:
        reasons.append(f"a block needs {smem} bytes of shared memory, {target.smem} are there; use fewer num_stages or a smaller tile.")
    resident = s.min_blocks * (smem + BLOCK_SMEM_OVERHEAD)
    if s.min_blocks > 1 and resident > target.smem_per_sm:
        reasons.append(
            f"{s.min_blocks} blocks need {resident} bytes of an SM's shared memory, {target.smem_per_sm} are there; use fewer min_blocks."
        )
    threads = s.min_blocks * (s.num_warps * 32 + rule.producer_threads)
    if threads > THREADS_PER_SM:
        reasons.append(f"{s.min_blocks} blocks have {threads} threads, an SM holds {THREADS_PER_SM}; use fewer min_blocks or num_warps.")
    needed, budget = registers_needed(s), _register_budget(rule, s)
    if needed > budget:
        reasons.append(
            f"a thread needs {needed} registers for accumulators and fragments, {budget} are free; "
            "use a smaller tile, more num_warps or fewer min_blocks."
        )
    return reasons


def _cuda_grid(rule: _CudaRule, workload: Workload, target: Target) -> list[Schedule]:
    """Schedules around the measured winners: tiles that fit m, pipelines as deep as shared memory allows, splits that fill the SMs."""
    grid = []
    shapes = product(_block_ms(rule, workload.m), product(rule.block_n, rule.num_warps), _block_ks(rule, workload))
    for block_m, (block_n, num_warps), block_k in shapes:
        for min_blocks in (1, 2, 4):
            base = Schedule(rule.program, block_n, block_m, block_k, rule.stages[0], num_warps, 1, min_blocks)
            for num_stages, split_k in product(_depths(rule, workload.format, base, target), _splits(workload, base, target)):
                for raster in _rasters(workload):
                    grid.append(Schedule(rule.program, block_n, block_m, block_k, num_stages, num_warps, split_k, min_blocks, raster))
    return grid


def _rasters(workload: Workload) -> tuple[int, ...]:
    """Visiting neighbouring tiles together at large m is tried, not assumed: in the shipped H200 records (m = 4096, five shapes) plain
    order is the fastest everywhere, by 0.1 to 12 % over 2; an earlier run of 14336 x 4096 had 4 ahead of it, 737 us against 760."""
    return (0, 2, 4) if workload.m >= 1024 else (0,)


def _block_ms(rule: _CudaRule, m: int) -> list[int]:
    """The smallest tile that covers m, and half of it from 64 rows up (twice the blocks, half the accumulators)."""
    fitting = next((b for b in rule.tried_block_m if b >= m), rule.tried_block_m[-1])
    return [fitting, fitting // 2] if fitting >= 64 else [fitting]


def _block_ks(rule: _CudaRule, workload: Workload) -> list[int]:
    """The deepest stages that divide the padded k: one for wgmma (half as deep was 3 to 7 % slower at m = 4096, H200, four shapes), two
    for middle m, where the operand registers of a deep stage can keep a second block off the SM (though at m = 64 the shipped H200 records
    have it 13 to 32 % slower), and for mma.sync, whose targets have less shared memory."""
    packed_k = PACKED_K[workload.format.bits]
    k_pad = -(-workload.k // packed_k) * packed_k
    return [b for b in rule.tried_block_k if b % packed_k == 0 and k_pad % b == 0][
        -2 if rule.b_fragment or 32 <= workload.m <= 128 else -1 :
    ]


def _depths(rule: _CudaRule, format: QuantFormat, base: Schedule, target: Target) -> list[int]:
    """Stages that fill the shared memory of ``base.min_blocks`` blocks and, where that is deep, six and four: at m = 1 and 16 none of the
    three is ahead everywhere, and the best of each are within 4 % (shipped H200 records, five shapes)."""
    room = min(target.smem, target.smem_per_sm // base.min_blocks - BLOCK_SMEM_OVERHEAD) - rule.reserved_smem
    deepest = min(rule.stages[1], room // (stage_bytes(format, base) + rule.barrier_bytes))
    return [deepest, *(depth for depth in (6, 4) if depth < deepest)]


def _splits(workload: Workload, base: Schedule, target: Target) -> list[int]:
    """1; and, when the tiles leave SMs idle, the split that fills one wave, and twice as many; fewer where some would be empty."""
    tiles = -(-workload.n // base.block_n) * -(-max(workload.m, 1) // base.block_m)
    steps = -(-workload.k // base.block_k)
    slots = target.units * base.min_blocks
    fill = slots // tiles
    wanted = [1, fill, 2 * fill] if fill else [1]
    if slots < tiles < 2 * slots:  # a second wave that is not full: halves of tiles can fill it better
        wanted.append(2)
    return sorted({-(-steps // -(-steps // min(split, MAX_SPLIT_K))) for split in wanted})
