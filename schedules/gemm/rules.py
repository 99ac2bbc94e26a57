"""The GEMM rules: what each program accepts on each target, and the schedules worth trying for a
workload.

``gemm_wgmma`` (sm_90a): a TMA producer warpgroup and one or two consumer warpgroups; the
dequantized weight is wgmma's register operand, so a consumer warpgroup holds whole 64-row slabs of
W and wgmma's n is ``block_m``. ``gemm_mma`` (sm_80 and later): the same tile as mma.sync on four
warps per 64-row slab, fed by cp.async. ``gemm_stream_bulk``, ``gemm_stream``: see ``stream.py``.
``gemm_cpu``: see ``cpu.py``. What is tried: ``tiles.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ...layouts.formats import PER_CHANNEL, STEP_K, GemmFormat
from ..schedule import Schedule
from ..target import Target
from . import stream as gemm_stream
from .joined import SLAB_N, first_joined, n_blocks, scatters, stage_rows
from .parts import parts
from .waves import TAILS
from .workload import Workload

PACKED_K = {4: 64, 8: 32}  # values of k in one packed tile (2 KiB): a stage is a whole number of tiles
WIDEST_K = 128  # values of k in a step of 16-bit x: two parts of a row are two swizzled lines; of int8 twice as many
TMA_ALIGNMENT = 128  # bytes, of the places in shared memory that it writes to
MAX_SPLIT_K = 16
MAX_MIN_BLOCKS = 4
MAX_RASTER = 32
CLUSTERS = (1, 2)  # of four, 31 fit on an H200 at a block an SM
WGMMA_SPARE = 30  # registers beside one wgmma's accumulators; ptxas refuses kernels that start with fewer (C7602: 94 at 128 columns)
ODD_TILE = 9  # registers that columns of no power of two take besides (256 x 144, 192 x 192, H200: ptxas serializes the products, C7512)
GROUP_SPARE = 12  # registers that scaling a group's sums takes (128 x 176 by eight warps spills 76 bytes)
WHERE_BYTES = 16  # where a tile lies
MOST_JOINED = 128  # output channels of a tile of bytes whose nibbles are rows of their own: TMA loads at most 256 rows' scales
LEAST_STAGED = 16  # columns of a tile that gemm_wgmma stages at a time, at least
STAGED_COLUMNS = 32  # of a tile that gemm_wgmma stages at a time

# A kernel that adds up shares of a tile takes a workspace: one word a tile to count arrivals, then
# fp32 sums (device/store/split_k.cuh, which is given this number).
TICKETS = 16384


@dataclass(frozen=True, slots=True)
class CudaRule:
    """The constants of one CUDA program; change a limit here and ``legal`` follows.

    ``registers`` is what one computing thread may hold when a block has an SM to itself,
    ``spare_registers`` what addresses, scales and loop state take of it; ``b_fragment`` says
    whether the small operand passes through registers (mma.sync) or is read from shared memory
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


WGMMA = CudaRule(
    "gemm_wgmma", ("sm_90a",), (64, 128, 192, 256), tuple(range(16, 257, 16)), (32, 64, 128, 256), (4, 8, 12, 16), (2, 8),
    producer_threads=128, registers=232, spare_registers=24, barrier_bytes=32, reserved_smem=512, b_fragment=False,
)  # fmt: skip
MMA = CudaRule(
    "gemm_mma", ("sm_80", "sm_86", "sm_89", "sm_90a"), (64, 128, 256), (8, *range(16, 129, 16)), (32, 64, 128), (4, 8, 16), (2, 5),
    producer_threads=0, registers=255, spare_registers=50, barrier_bytes=0, reserved_smem=16, b_fragment=True,
)  # fmt: skip
CUDA_RULES = {rule.program: rule for rule in (WGMMA, MMA)}


def tiled_legal(workload: Workload, schedule: Schedule, target: Target) -> list[str]:
    """Why a program of ``CUDA_RULES`` cannot serve ``workload`` on ``target``, one sentence per
    reason; an empty list: it can. It is the same for every m."""
    return list(_reasons(_static(workload), schedule, target))


_static = lru_cache(maxsize=4096)(Workload.static)


@lru_cache(maxsize=1 << 15)
def _reasons(workload: Workload, schedule: Schedule, target: Target) -> list[str]:
    rule = CUDA_RULES[schedule.program]
    reasons = _field_reasons(rule, workload, schedule)
    return reasons or _resource_reasons(rule, workload, schedule, target)  # sizes mean nothing while a field is out of range


def workspace_words(workload: Workload, schedule: Schedule, target: Target) -> int:
    """32-bit words of the workspace that the kernel takes for ``workload.m`` rows of x: TICKETS,
    the fp32 sums, and a tile of bytes of each block that others of its warps store; 0: it takes none."""
    s = schedule
    tile = s.block_m * (s.block_n + workload.norm)  # of a norm the rows' sums of squares, too
    if s.stream_k or scatters(s):
        return TICKETS + grid_blocks(s, target) * tile * (4 * s.stream_k + scatters(s)) // 2
    if s.split_k == 1 or clustered_split(s):
        return 0
    tiles = -(-workload.m // s.block_m) * n_blocks(workload, s)
    return TICKETS + tiles * s.split_k * tile // (2 if paired_split(s) else 1)


def wgmma_registers(schedule: Schedule) -> tuple[int, int]:
    """(producer's, consumer's) registers of a thread of ``gemm_wgmma``, out of the even share that
    a launch gives to both."""
    return handed_on(schedule, 64 if scatters(schedule) else 40 if schedule.min_blocks == 1 else 24)


def handed_on(schedule: Schedule, wanted: int) -> tuple[int, int]:
    """``wgmma_registers`` of a program whose loading threads want so many."""
    consumers = schedule.num_warps * 32
    threads = consumers + WGMMA.producer_threads
    share = min(255, Target.REGISTERS_PER_SM // (threads * schedule.min_blocks)) // 8 * 8
    producer = min(wanted, share)
    return producer, min(240, (share * threads - producer * WGMMA.producer_threads) // consumers // 8 * 8)


ANY_WGMMA = "gemm_any_wgmma"
PAIRED = (WGMMA.program, ANY_WGMMA)  # their blocks that share a tile are a cluster where they are two


def clustered_split(schedule: Schedule) -> bool:
    """Whether the blocks that share a tile are a thread-block cluster, which adds its parts up
    without a workspace.

    ``gemm_wgmma`` and ``gemm_any_wgmma`` do so for two: clusters of four that have an SM each leave
    too many SMs without one (4096 x 14336 at m = 64, 32 of them: 37.8 us, two waves; 22.7 through a
    workspace, H200); for two it saves up to 15 % (4096 x 4096, m = 256: from 20.8 us to 17.5), of
    bit planes 3 to 22 % (``results/notes/any-split-pairs.md``)."""
    return schedule.split_k > 1 and (schedule.program == gemm_stream.BULK or (schedule.program in PAIRED and schedule.split_k == 2))


def paired_split(schedule: Schedule) -> bool:
    """Whether more than two blocks share a tile, as clusters of two that meet in a workspace: half
    as many sums are written there as by blocks that meet one by one, and two blocks read half of
    them each. Halves of a tile's rows are staged whole."""
    s = schedule
    return s.program in PAIRED and s.split_k > 2 and s.split_k % 2 == 0 and s.block_m % (2 * LEAST_STAGED) == 0


def most_tiles(schedule: Schedule) -> int:
    """Tiles that blocks may share in one launch: each takes a ticket, or two where clusters meet."""
    return TICKETS // 2 if paired_split(schedule) else TICKETS


def exchanged_split(schedule: Schedule) -> bool:
    """Whether blocks that share a tile exchange halves of their sums, in clusters of two."""
    return paired_split(schedule) or (schedule.program in PAIRED and clustered_split(schedule))


def persistent(schedule: Schedule) -> bool:
    """Whether the grid is as many blocks as the device holds at once, which take one tile after
    another."""
    return schedule.stream_k or schedule.tail > 1


def grid_blocks(schedule: Schedule, target: Target) -> int:
    """Blocks of a persistent grid: as many as the device holds at once, in whole clusters."""
    return target.units * schedule.min_blocks // schedule.cluster * schedule.cluster


def stage_bytes(format: GemmFormat, schedule: Schedule) -> int:
    """Shared memory of one pipeline stage in bytes: packed weight tile, x tile, and the group
    parameters of the tile."""
    parameters = stage_rows(schedule) * stage_groups(format, schedule) * format.group_bytes
    if format.x_grouped:
        parameters += schedule.block_m * -(-schedule.block_k // format.x_group) * 4
    return stage_rows(schedule) * schedule.block_k * format.bits // 8 + x_stage_bytes(format, schedule) + parameters


def stage_groups(format: GemmFormat, schedule: Schedule) -> int:
    """Rows of group parameters of a stage: those that a step touches; of bytes an even number where a
    row is no multiple of TMA_ALIGNMENT."""
    groups = 1 if format.group_size == PER_CHANNEL else -(-schedule.block_k // format.group_size)
    of_bytes = format.integer_sums and not format.symmetric
    return groups + groups % 2 if of_bytes and schedule.block_n % TMA_ALIGNMENT else groups


def x_stage_bytes(format: GemmFormat, schedule: Schedule) -> int:
    """Shared memory that x takes in a pipeline stage."""
    return schedule.block_m * schedule.block_k * (1 if format.x else 2)


def shared_memory(workload: Workload, schedule: Schedule) -> int:
    """Shared memory of one block of a CUDA program in bytes."""
    rule, format = CUDA_RULES[schedule.program], workload.format
    pipeline = schedule.num_stages * (stage_bytes(format, schedule) + rule.barrier_bytes)
    if rule.b_fragment:
        return (
            max(pipeline, schedule.block_m * (schedule.block_n + 8) * 2) + rule.reserved_smem
        )  # the tile to store takes the pipeline's place
    return pipeline + _staging_bytes(workload, schedule) + rule.reserved_smem  # the next tile is on its way while one is stored


def _staging_bytes(workload: Workload, schedule: Schedule) -> int:
    """Shared memory through which a block of ``gemm_wgmma`` stores its tile."""
    return min(schedule.block_m, STAGED_COLUMNS) * schedule.block_n * 2 + number_bytes(workload, schedule)


def number_bytes(workload: Workload, schedule: Schedule) -> int:
    """Of that, for what a tile's end needs: where it lies, four bytes for each part and output channel, fp32 ones of
    rows of x."""
    of_channels = sum(part.axis == "n" for part in parts(workload))
    of_rows = any(part.axis == "m" for part in parts(workload))
    return WHERE_BYTES + of_channels * stage_rows(schedule) * 4 + of_rows * schedule.block_m * 4


def staged_columns(rows: int) -> int:
    """Columns of a tile, or a strip, of so many rows of x that ``gemm_wgmma`` stages at a time: whole
    times."""
    return LEAST_STAGED if rows % STAGED_COLUMNS else STAGED_COLUMNS


def registers_needed(format: GemmFormat, schedule: Schedule) -> int:
    """32-bit registers that one computing thread needs for its accumulators and its operand
    fragments."""
    rule = CUDA_RULES[schedule.program]
    threads = schedule.num_warps * 32
    accumulators = schedule.block_n * schedule.block_m // threads
    if format.step_sums:
        accumulators = 2 * accumulators + GROUP_SPARE  # a step's, the fp32 sums, and scales
    a_fragment = schedule.block_n * schedule.block_k // threads // (4 if format.x else 2)
    b_fragment = schedule.block_m * 16 // 32 // 2 if rule.b_fragment else 0  # one k16 step: every warp reads all of block_m
    return accumulators + a_fragment + b_fragment


def _register_budget(rule: CudaRule, schedule: Schedule) -> int:
    if not rule.b_fragment:
        return wgmma_registers(schedule)[1] - rule.spare_registers
    if schedule.min_blocks == 1:
        return rule.registers - rule.spare_registers
    threads = schedule.num_warps * 32 + rule.producer_threads  # without register reallocation all threads get the same share
    share = Target.REGISTERS_PER_SM // (threads * schedule.min_blocks) // 8 * 8
    return min(rule.registers, share) - rule.spare_registers


def _field_reasons(rule: CudaRule, workload: Workload, schedule: Schedule) -> list[str]:
    s, reasons = schedule, []
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
    if s.stream_k and s.split_k > 1:
        reasons.append(f"stream_k goes with split_k {s.split_k}; accepted: split_k 1.")
    if s.tail not in ((1, *TAILS) if not s.stream_k and s.split_k == 1 else (1,)):
        reasons.append(f"tail is {s.tail}; accepted: 1, and without stream_k and split_k {', '.join(map(str, TAILS))}.")
    steps = -(-workload.k // s.block_k)
    # A group of warps that is a strip ahead would stage it where another still reads its part of a tile.
    if s.tail > 1 and steps <= s.num_stages and staged_columns(s.block_m) != staged_columns(s.block_m // s.tail):
        reasons.append(
            f"tail is {s.tail}; accepted for {steps} steps of {s.block_k} in {s.num_stages} stages: 1, or strips of 32 rows of x."
        )
    if s.split_k > 1 and s.cluster > 1:
        reasons.append(f"split_k is {s.split_k} and cluster {s.cluster}; accepted: one of them 1.")
    if s.cluster not in CLUSTERS:
        reasons.append(f"cluster is {s.cluster}; accepted: {', '.join(map(str, CLUSTERS))}.")
    if reasons:
        return reasons
    if s.block_m % s.tail or s.block_m // s.tail not in rule.block_m:
        reasons.append(f"block_m is {s.block_m} and tail {s.tail}; accepted: strips of {', '.join(map(str, rule.block_m))} rows of x.")
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
    whole = s.block_n if rule.b_fragment else 1  # TMA fills what a tile of gemm_wgmma has beyond the last row with zeros
    if n_pad % whole:
        reasons.append(f"block_n is {s.block_n}; accepted by {rule.program} for n {workload.n} (padded to {n_pad}): divisors of it.")
    if s.joined:
        reasons += _joined_reasons(workload, s)
    if -(-n_pad // s.block_n) % s.cluster:
        reasons.append(f"cluster is {s.cluster}; accepted for {-(-n_pad // s.block_n)} tiles of {s.block_n} rows: divisors of that.")
    if s.block_k > WIDEST_K and not workload.format.x:
        reasons.append(f"block_k is {s.block_k}; accepted for x of 16 bits: up to {WIDEST_K}.")
    packed_k = PACKED_K[workload.format.bits]
    k_pad = -(-workload.k // packed_k) * packed_k
    step_sums = workload.format.step_sums
    if step_sums and s.block_k != STEP_K:
        reasons.append(f"block_k is {s.block_k}; accepted where sums of {STEP_K} k are scaled and added up: {STEP_K}.")
    elif s.block_k % packed_k == 0 and k_pad % s.block_k and not step_sums:
        reasons.append(f"block_k is {s.block_k}; accepted for k {workload.k} (padded to {k_pad}): its divisors.")
    if s.block_k % packed_k:
        reasons.append(f"block_k is {s.block_k}; accepted at {workload.format.bits} bits: multiples of {packed_k} (the packed tile).")
    group = workload.format.group_size
    if group != PER_CHANNEL and s.block_k % group and group % s.block_k:
        reasons.append(f"block_k is {s.block_k}; accepted: a multiple or a divisor of group_size {group}.")
    steps = -(-workload.k // s.block_k)
    if rule.b_fragment and steps % s.split_k:  # the cp.async pipeline is unrolled at its ends and needs a constant length
        reasons.append(f"split_k is {s.split_k}; accepted by {rule.program} for {steps} steps of {s.block_k}: its divisors.")
    pair = 2 * LEAST_STAGED
    if rule is WGMMA and clustered_split(s) and s.block_m % pair and s.block_m != LEAST_STAGED:
        reasons.append(f"block_m is {s.block_m}; accepted where two blocks share a tile: {LEAST_STAGED}, and multiples of {pair}.")
    if s.split_k > steps:
        reasons.append(f"split_k is {s.split_k}, but k {workload.k} has {steps} steps of {s.block_k}: a split would be empty.")
    return reasons


def _joined_reasons(workload: Workload, schedule: Schedule) -> list[str]:
    s, reasons = schedule, []
    if not workload.nibbles:
        reasons.append("joined is true; accepted for a weight whose rows are not nibbles of bytes: false.")
    elif first_joined(workload, s) >= workload.n:
        reasons.append(f"joined is true; accepted for {workload.n} rows and {workload.width} columns in tiles of {s.block_n}: false.")
    if s.block_n // SLAB_N != s.num_warps // 4 or s.block_n > MOST_JOINED:
        reasons.append(
            f"joined goes with block_n {s.block_n} and {s.num_warps} warps; accepted: up to {MOST_JOINED}, {SLAB_N} for each group of four."
        )
    if s.cluster > 1:
        reasons.append(f"joined goes with cluster {s.cluster}; accepted: 1.")
    return reasons


def _resource_reasons(rule: CudaRule, workload: Workload, schedule: Schedule, target: Target) -> list[str]:
    s, reasons, format = schedule, [], workload.format
    smem = shared_memory(workload, s)
    if smem > target.smem:
        reasons.append(f"a block needs {smem} bytes of shared memory, {target.smem} are there; use fewer num_stages or a smaller tile.")
    resident = s.min_blocks * (smem + target.BLOCK_SMEM)
    if s.min_blocks > 1 and resident > target.smem_per_sm:
        reasons.append(
            f"{s.min_blocks} blocks need {resident} bytes of an SM's shared memory, {target.smem_per_sm} are there; use fewer min_blocks."
        )
    threads = s.min_blocks * (s.num_warps * 32 + rule.producer_threads)
    if threads > target.threads_per_sm:
        reasons.append(
            f"{s.min_blocks} blocks have {threads} threads, an SM holds {target.threads_per_sm}; use fewer min_blocks or num_warps."
        )
    sent = s.block_n * max(s.block_m // 2, LEAST_STAGED) * 4  # what each block of a pair is sent: half a tile's sums
    if s.program == WGMMA.program and exchanged_split(s) and sent > s.num_stages * x_stage_bytes(format, s):
        reasons.append(f"{sent} bytes of fp32 sums do not fit into the stages of x; use more num_stages.")
    share, one = Target.REGISTERS_PER_SM // threads // 8 * 8, s.block_m // 2 + WGMMA_SPARE
    if s.program == WGMMA.program and share < one:
        reasons.append(
            f"a launch gives a thread {share} registers, one wgmma of {s.block_m} columns takes {one}; use fewer min_blocks or warps."
        )
    needed, budget = registers_needed(format, s), _register_budget(rule, s)
    if s.program == WGMMA.program and s.block_m & (s.block_m - 1):
        budget -= ODD_TILE
    if needed > budget:
        reasons.append(
            f"a thread needs {needed} registers for accumulators and fragments, {budget} are free; "
            "use a smaller tile, more num_warps or fewer min_blocks."
        )
    return reasons
