"""The quantization of activations: its programs, which schedules they accept, what they cost, and how
far one problem's measurements speak of another's.

``quantize_rows`` (CUDA): a block of ``num_warps`` warps has ``block_m`` rows; the threads of a row
hold it in registers between the search for its largest value and the codes, 16 values at a time.
With ``num_stages`` 2, ``min_blocks`` blocks of an SM go through all rows and keep what rows share,
a norm's weight and factors by column, in shared memory.
``quantize_cpu``: a task is a row, ``num_warps`` threads share the tasks.
"""

from __future__ import annotations

from dataclasses import replace
from math import log2

from ..gemm.cost import CPU_FORK_US, KNEE_BYTES
from ..gemm.cpu import isa
from ..gemm.operation import OTHER_DTYPE
from ..rule import Estimate, Operation, Rule
from ..schedule import Schedule
from ..target import Target
from .workload import QuantizeWorkload

ROWS, CPU = "quantize_rows", "quantize_cpu"
GPUS = ("sm_80", "sm_86", "sm_89", "sm_90a")
WARPS = (1, 2, 4, 8, 16, 32)  # of a block
BLOCK_M = (1, 2, 4, 8, 16)
CHUNK = 16  # values that a thread loads, and codes that it stores, at once
MOST_RESIDENT = 8  # blocks of an SM that go through all rows
MOST_CHUNKS = 4  # of a thread: 32 registers, of the 64 that 1,024 threads of a block have each
MOST_GATED = 2  # of 1,024 threads, where a chunk is loaded as gates and what they gate: three spill up to 16 bytes (sm_80, sm_90a)
CPU_THREADS_MAX = 512
REGISTERS = 32  # of a thread, beside 8 for each chunk that it holds
OTHER_OUT = 0.25  # other codes, groups, a norm, factors: the same bytes, some more instructions
LAUNCH_US = 1.5
CHUNK_US = 0.15  # a chunk more of each thread, one after another
BARRIER_US = 0.1  # threads of several warps that wait for one another
IDLE = 0.1  # of the time of loads, where as many threads of a row have no chunk as have one
SM_GOPS = 128 * 1.7  # of an SM: 128 lanes, and 128 bytes from L1, a cycle
THROUGH_OPS, SMOOTH_OPS = 20, 8  # lanes a value, and with factors, of blocks that go through all rows (4096 x 8192, H200)
PAIR, UNPAIRED = 2, 1.05  # rows of such a block that were fastest at as many warps and rows of an SM, and what others take
STEP_US = 0.35  # of such a block's step, beside loads and instructions
SCATTERED = 4  # lines of L1 that lanes read for one full one: 16 of 64 bytes of factors at once, 8 of 32 of weights
CPU_VALUE_OPS = 1.2  # vector operations a value, in lanes


def row_threads(schedule: Schedule) -> int:
    """Threads that share a row."""
    return schedule.num_warps * 32 // schedule.block_m


def chunks(workload: QuantizeWorkload, schedule: Schedule) -> int:
    """Chunks of a row that each of its threads holds."""
    return -(-workload.k // (CHUNK * row_threads(schedule)))


def most_chunks(workload: QuantizeWorkload, num_warps: int) -> int:
    """Chunks of a row that a thread has registers for."""
    return MOST_GATED if workload.gate and num_warps == WARPS[-1] else MOST_CHUNKS


def through_threads(workload: QuantizeWorkload, schedule: Schedule, target: Target) -> int:
    """Threads of an SM that have registers to go through all rows: what is computed with, their chunks
    of a row and of the next one."""
    return min(target.threads_per_sm, target.REGISTERS_PER_SM // (REGISTERS + 16 * max(1, chunks(workload, schedule))))


def kept_bytes(workload: QuantizeWorkload, schedule: Schedule) -> int:
    """Shared memory of a block that goes through all rows, and of its warps' words."""
    columns = max(1, chunks(workload, schedule)) * CHUNK * schedule.num_warps * 32
    return columns * (2 * workload.norm + 4 * workload.smooth) + 16 * schedule.num_warps


def legal(workload: QuantizeWorkload, schedule: Schedule, target: Target) -> list[str]:
    s, reasons = schedule, []
    for name, accepted in (("block_m", BLOCK_M), ("num_warps", WARPS)):
        if getattr(s, name) not in accepted:
            reasons.append(f"{name} is {getattr(s, name)}; accepted: {', '.join(map(str, accepted))}.")
    if reasons:
        return reasons
    if s.block_m > s.num_warps:
        return [f"block_m is {s.block_m}; accepted for num_warps {s.num_warps}: at most {s.num_warps}, a warp or more a row."]
    if s.num_stages not in (1, 2):
        reasons.append(f"num_stages is {s.num_stages}; accepted: 1, a block of block_m rows, and 2, blocks that go through all rows.")
    elif s.num_stages == 1 and s.min_blocks != 1:
        reasons.append(f"min_blocks is {s.min_blocks}; accepted with num_stages 1: 1.")
    elif s.num_stages == 2:
        threads, kept = s.num_warps * 32 * s.min_blocks, kept_bytes(workload, s)
        resident, there = s.min_blocks * (kept + target.BLOCK_SMEM), target.smem_per_sm
        if not 1 <= s.min_blocks <= MOST_RESIDENT:
            reasons.append(f"min_blocks is {s.min_blocks}; accepted with num_stages 2: 1 to {MOST_RESIDENT}.")
        elif threads > (fit := through_threads(workload, s, target)):
            reasons.append(f"{s.min_blocks} blocks of {s.num_warps} warps; accepted on an SM: {fit // 32} warps that go through all rows.")
        elif s.min_blocks > 1 and resident > there:
            reasons.append(
                f"{s.min_blocks} blocks need {resident} bytes of an SM's shared memory, {there} are there; use fewer min_blocks."
            )
        elif kept > target.smem:
            reasons.append(f"a block needs {kept} bytes of shared memory, {target.smem} are there; use fewer num_warps.")
    if chunks(workload, s) > (held := most_chunks(workload, s.num_warps)):
        most = CHUNK * held * row_threads(s)
        reasons.append(f"num_warps is {s.num_warps} for {s.block_m} rows, which hold {most} values of a row; k is {workload.k}: use more.")
    return reasons


def unserved(workload: QuantizeWorkload, arch: str) -> list[str]:
    most = max(CHUNK * most_chunks(workload, warps) * 32 * warps for warps in WARPS)
    return [f"k is {workload.k}; accepted by {ROWS}: at most {most}."] if workload.k > most else []


def candidates(workload: QuantizeWorkload, target: Target) -> list[Schedule]:
    """Legal schedules worth measuring: no row with more threads than it has chunks, in blocks of 128
    threads or more where a row has fewer."""
    found = [Schedule(ROWS, 1, block_m, 1, num_warps=warps) for warps in WARPS[2:] for block_m in BLOCK_M]
    through = [replace(s, num_stages=2, min_blocks=count) for s in found for count in range(1, MOST_RESIDENT + 1)]
    found += [s for s in through if (workload.norm or workload.smooth) and -(-workload.m // s.block_m) >= 2 * target.units * s.min_blocks]
    enough = 2 * max(workload.k, 32 * CHUNK)  # values of a row whose threads would be twice as many as have a chunk
    return [s for s in found if row_threads(s) * CHUNK < enough and not legal(workload, s, target)]


def estimate(workload: QuantizeWorkload, schedule: Schedule, target: Target) -> Estimate:
    """Bytes over the read rate of the SMs that have a block, less where too few of them are in flight
    or the last wave is short; and what one row takes from end to end."""
    w, s = workload, schedule
    if s.num_stages == 2:
        return _estimate_through(w, s, target)
    threads, held = s.num_warps * 32, max(1, chunks(w, s))
    resident = max(1, min(target.threads_per_sm // threads, target.REGISTERS_PER_SM // (threads * (REGISTERS + 8 * held))))
    blocks, places = max(1, -(-w.m // s.block_m)), target.units * resident
    waves, busy = -(-blocks // places), min(blocks, target.units)
    used = blocks / (waves * places) if 1 < waves < 4 else 1.0
    in_flight = min(max(w.m, 1), min(blocks, places) * s.block_m) / busy * 2 * w.k  # bytes of an SM
    flow = min(1.0, (in_flight / KNEE_BYTES) ** 0.5)
    load = w.bytes / (target.read_gbps * 1e3) / flow / (used * busy / target.units)
    shared = w.m * w.k * SCATTERED * (2 * w.norm + 4 * w.smooth) / (busy * SM_GOPS * 1e3)  # what rows share, read anew for each
    idle = held * CHUNK * row_threads(s) / w.k - 1  # places of chunks that no value takes
    alone = CHUNK_US * held * (1 + w.norm) + BARRIER_US * (row_threads(s) > 32) * (1 + w.norm)
    return Estimate(LAUNCH_US + alone + (load + shared) * (1 + IDLE * idle), 1, load, 0.0, 0.0, alone, 0.0, LAUNCH_US, waves, used)


def _estimate_through(w: QuantizeWorkload, s: Schedule, target: Target) -> Estimate:
    """Of blocks that go through all rows: a row is on its way while the one before is computed with;
    steps take what loads or instructions do, and a little of their own. One alone takes twice as
    long as that of a block without a next row (1 row of 8192, 4 warps, 2 blocks: 2.7 us, H200)."""
    blocks = min(max(1, -(-w.m // s.block_m)), target.units * s.min_blocks)
    steps, busy = max(1, -(-w.m // (s.block_m * blocks))), min(blocks, target.units)
    alone = 2 * CHUNK_US * chunks(w, s) * (1 + w.norm) + BARRIER_US * (row_threads(s) > 32) * (1 + w.norm)
    used = max(w.m, 1) / (steps * s.block_m * blocks)
    load = w.bytes / (target.read_gbps * 1e3) / (used * busy / target.units)
    compute = w.m * w.k * (THROUGH_OPS + SMOOTH_OPS * w.smooth) / (busy * SM_GOPS * 1e3) / used
    idle = CHUNK * max(1, chunks(w, s)) * row_threads(s) / w.k - 1
    start = blocks * kept_bytes(w, s) / (target.read_gbps * 1e3)  # every block reads what it keeps, from L2
    paired = 1.0 if s.block_m == PAIR else UNPAIRED
    us = LAUNCH_US + start + paired * steps * max(max(load, compute) / steps * (1 + IDLE * idle) + STEP_US, alone)
    return Estimate(us, 1, load, compute, 0.0, start + alone, 0.0, LAUNCH_US, steps, used)


def cpu_legal(workload: QuantizeWorkload, schedule: Schedule, target: Target) -> list[str]:
    if isa(target) is None:
        return [f"target {target.arch} has features {target.features}; {CPU} needs 'avx2' or 'avx512'."]
    if not 1 <= schedule.num_warps <= CPU_THREADS_MAX:
        return [f"num_warps is {schedule.num_warps}; accepted: 1 to {CPU_THREADS_MAX} threads."]
    return []


def cpu_candidates(workload: QuantizeWorkload, target: Target) -> list[Schedule]:
    threads = dict.fromkeys((min(max(1, target.units), CPU_THREADS_MAX), 1))
    found = [Schedule(CPU, 1, 1, 1, num_warps=count) for count in threads]
    return [s for s in found if not cpu_legal(workload, s, target)]


def cpu_estimate(workload: QuantizeWorkload, schedule: Schedule, target: Target) -> Estimate:
    threads = max(1, min(schedule.num_warps, target.units, workload.m))
    share = threads / target.units
    load = workload.bytes / (target.read_gbps * 1e3) / share
    compute = workload.m * workload.k * CPU_VALUE_OPS / (target.dequant_gops * 1e3) / share
    launch = CPU_FORK_US if schedule.num_warps > 1 else 0.5
    waves = max(1, -(-workload.m // threads))
    return Estimate(launch + max(load, compute), 1, load, compute, 0.0, 0.0, 0.0, launch, waves, 1.0)


def distance(there: QuantizeWorkload, here: QuantizeWorkload) -> float | None:
    """How far two calls are apart, in factors of two of a size."""
    differ = sum(getattr(there, name) != getattr(here, name) for name in ("out", "group", "norm", "smooth", "residual", "gate"))
    return rank(there, here) + abs(log2(there.k / here.k)) + OTHER_DTYPE * (there.dtype != here.dtype) + OTHER_OUT * differ


def rank(there: QuantizeWorkload, here: QuantizeWorkload) -> float:
    """Kernels serve all m alike: the nearest ones."""
    return abs(log2(max(there.m, 1) / max(here.m, 1)))


QUANTIZE = Operation(
    "quantize",
    QuantizeWorkload,
    rules=(
        Rule(
            ROWS,
            "tilebit.tiles.activations.quantize_rows",
            arches=GPUS,
            tried=GPUS,
            reads=frozenset({"block_m", "num_warps", "num_stages", "min_blocks"}),
            unserved=unserved,
            legal=legal,
            candidates=candidates,
            estimate=estimate,
        ),  # rows are moved once: no instruction decides, so nothing is promised
        Rule(
            CPU,
            "tilebit.tiles.cpu.activations.quantize",
            arches=("cpu",),
            tried=("cpu",),
            reads=frozenset({"num_warps"}),
            legal=cpu_legal,
            candidates=cpu_candidates,
            estimate=cpu_estimate,
        ),
    ),
    gate="tilebit.autotune.problems.activations",
    distance=distance,
    rank=rank,
)
