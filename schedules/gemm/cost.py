"""The analytic cost model: how long a schedule should take, in terms that can be read.

LiquidGEMM's model (equations 3-6): one pass over the weight per row of tiles, each pass as long as
loading and computing take,

    T = ceil(M / Mt) * overlap(T_load, T_dequant + T_mma)

with T_load = bytes / read rate (eq. 3), T_dequant = alpha * N * K / scalar rate and T_mma = 2 * Mt
* N * K / tensor rate (eq. 4), plus what the paper leaves out: units that idle in the last wave, the
pipeline's fill and hand-over, the reduction of a split k, the launch. Mt is not cut to M, because a
tile's rows past the end are multiplied too. The paper's overlap is the maximum; on GPUs neither
hides the other wholly, and the root of the sum of squares is nearer to what was measured.

Constants that say "fitted" are least squares over measurements on an H200 (4-bit, groups of 128,
fp16; m = 1 to 4096), rounded. Those of gemm_wgmma are of 652 records, differences within a workload
and fast schedules weighing most. Its loading warps have become leaner since; choices by the model
alone are 1.037 times the best of a workload in the mean, 1.29 at worst, and fitting anew did no
better. Those of the small-m programs are of about 1,500 earlier measurements of both, these
programs counted as 6 % faster, which a later change to their copies brought. The others are counted
or known."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import hypot

from ...layouts.formats import FP8, PER_CHANNEL
from ..rule import Estimate
from ..schedule import Schedule
from ..target import Target
from . import stream as gemm_stream
from .codecs import codec_of
from .joined import first_joined, n_blocks
from .rules import PACKED_K, clustered_split, grid_blocks, paired_split, persistent, stage_bytes, x_stage_bytes
from .waves import cut_places, shared_places
from .workload import Workload

# --- all GPU programs
L2_SPEEDUP = 3.0  # read rate of the last cache over that of memory
KNEE_BYTES = 64 * 1024  # bytes in flight per SM that saturate memory; half of it loses about a third
EXCHANGE = 30.0  # bytes per clock that an SM's partial sums travel at, through the last cache or a cluster's network; fitted
LANES = 128  # of Target.dequant_gops per SM and clock

# --- gemm_wgmma, gemm_mma
MMA_BURST = 1.36  # products that wait for dequantization run at a higher clock than the power limit leaves a plain product; fitted
BYTES_OVER_HALF = 2  # rate of the tensor cores
MMA_SPARE = 1.44  # and an SM's rate over its share when others idle; fitted
AGAIN_US = 0.08  # a MB that is read from memory again, about 56 pJ a byte at 700 W; fitted (H200)
STEP_US = 0.063  # one stage handed from producer to consumer and back; fitted
IN_STEP = 2.6  # hand-over in a cluster over that in a block; fitted
FILL_US = 1.2  # a block's first stage; fitted
END_US = 0.8  # a tile's way out, while its block multiplies nothing; fitted
LAUNCH_US = 1.7
SPLIT_US = 1.1  # one ticket and its fence; fitted
SHARED_US = 1.7  # stream_k: blocks that end inside tiles wait for each other; fitted
NEAR_CACHE = 0.5  # of the last cache: what all SMs find of x there, each half of the cache holding it for its own (H100, H200)

# --- gemm_stream, gemm_stream_bulk: one warp takes about this many instructions (counted) a step, a record, a record and tile of 16 rows
STEP_ISSUE, RECORD_ISSUE, TILE_ISSUE = 40, 8, 19
COLUMNS_ISSUE = 5, 9  # of a record and of a tile of it, for 8 columns of x
ISSUE = 0.75  # of an SM's issue slots that are used when it has nothing else to wait for; fitted
GROUP = 128  # values of k whose sums leave the tensor cores where groups of x have scales, and of e4m3
GROUP_SUMS, FLOAT_SUMS = 5.0, 1.5  # instructions that such a sum takes beside its product; fitted (H100)
CHAIN_US = 0.2  # a step's loads from shared memory, dependent products and next request, one after another; fitted
STREAM_BURST = 1.2  # one SM's read rate over its share of the device's: idle SMs cost less when loading than when computing
STREAM_FILL_US = 1.8
STREAM_LAUNCH_US = 1.0
STREAM_SPLIT_US = 0.2  # one ticket and its fence; fitted
CLUSTER_US = 0.6  # a cluster starts together, and its blocks send each other their parts
SUM_US = 0.023  # one partial sum read from shared memory and added; fitted

CPU_L2_SPEEDUP = 2.5
CPU_CHAINS = 4  # independent accumulators that, with decoding in between, hide the latency of a fused multiply-add
# Of int8 x, as fast as fp32 products are: 4096 x 4096, m = 32, one thread, AVX2: 14.8 ms of 16-bit x,
# 5.6 and 12.5 ms of int8 x with 4 and 8 bits (vpdpbusd is not measured).
CPU_INTEGER_RATE = {4: 2.6, 8: 1.3}
CPU_FORK_US = 4.0  # waking and joining the threads of a parallel loop


@dataclass(frozen=True, slots=True)
class Grid:
    """How a grid falls on the SMs: ``waves``, ``blocks`` that the busiest SM runs, ``resident`` of
    them at once, of ``steps`` stages and ``ends`` of tiles each, and the ``utilization`` that
    leaves; ``shared`` is the part of the tiles that its blocks share (stream_k). ``decoded`` counts
    stages of strips as whole ones: their weights are."""

    waves: int
    blocks: int
    resident: int
    steps: int
    ends: int
    decoded: int
    utilization: float
    shared: float


def estimate(workload: Workload, schedule: Schedule, target: Target) -> Estimate:
    """The model's expectation for ``schedule``; meant for legal ones (an illegal one whose numbers
    are above 0 gets a meaningless number, never an error)."""
    if not target.is_cuda:
        return _cpu(workload, schedule, target)
    return (_stream if schedule.program in gemm_stream.ARCHES else _tiled)(workload, schedule, target)


def spread(tiles: int, k_steps: int, s: Schedule, target: Target) -> Grid:
    """How a grid of ``tiles`` of ``k_steps`` each falls on the SMs."""
    blocks, steps, ends, shared = tiles * s.split_k, _ceil(k_steps, s.split_k), 1, 0
    places, decoded = _ceil(tiles, s.cluster), steps
    if persistent(s):
        blocks = grid_blocks(s, target)
        ends, teams = _ceil(tiles, blocks), blocks // s.cluster
        shared = shared_places(places, teams, k_steps) if s.stream_k else 0
        cut = cut_places(places, teams, s.tail)
        strips = _ceil(cut * s.tail, teams) * k_steps
        whole = _ceil(shared * k_steps, teams) + _ceil(places - shared - cut, teams) * k_steps
        steps, decoded = whole + _ceil(strips, s.tail), whole + strips
    cluster = 2 if paired_split(s) else s.split_k if clustered_split(s) else s.cluster
    sms = gemm_stream.cluster_sms(cluster, target)
    waves = _ceil(blocks, sms * s.min_blocks)
    busiest = (waves - 1) * s.min_blocks + _ceil(blocks - (waves - 1) * sms * s.min_blocks, sms)
    utilization = tiles * k_steps / (busiest * steps * target.units)
    return Grid(waves, busiest, min(s.min_blocks, busiest), steps, ends, decoded, utilization, shared / places)


def _flow(in_flight: float) -> float:
    """The share of memory's rate that so many bytes in flight per SM bring."""
    return min(1.0, (max(in_flight, 1.0) / KNEE_BYTES) ** 0.5)


def _tiled(w: Workload, s: Schedule, target: Target) -> Estimate:
    """The GEMMs whose blocks multiply whole tiles stage by stage."""
    m_tiles, n_tiles = _ceil(max(w.m, 1), s.block_m), n_blocks(w, s)
    k_steps = _ceil(w.k, s.block_k)
    n, k, sms, clock = n_tiles * s.block_n, k_steps * s.block_k, target.units, target.dequant_gops / target.units / LANES
    rows = n + s.joined * (n - first_joined(w, s))  # of the weight: of a tile of bytes two for each channel
    grid = spread(m_tiles * n_tiles, k_steps, s, target)

    x_stage = x_stage_bytes(w.format, s)
    stage = x_stage + (stage_bytes(w.format, replace(s, joined=False)) - x_stage) * rows / n
    copied = stage - x_stage * (1 - 1 / s.cluster)  # what a stage takes from the last cache
    cached = grid.blocks * grid.steps * sms * copied
    x = m_tiles * s.block_m * k * w.x_bytes
    # Blocks that share tiles are not at the same k: of x, what the cache does not hold comes from
    # memory every time.
    far = cached * grid.shared * max(0.0, 1 - target.l2 * NEAR_CACHE / x)
    # Each group of row tiles goes over all channels before the next one: of the weight, too, what the
    # cache does not hold comes from memory again (57344 x 8192, m = 256, 8 bits, H100: 341 us in two
    # passes, 199 in one), unless all tiles run side by side, at the same k (10240 x 8192, m = 128: 37
    # us, 61 in shares).
    weight, passes = _weight_bytes(w, rows, k), _ceil(m_tiles, max(1, s.raster))
    if s.stream_k or m_tiles * n_tiles * s.split_k > sms * s.min_blocks:
        far += (passes - 1) * weight * max(0.0, 1 - target.l2 * NEAR_CACHE / weight)
    # So does a group's x, for each wave of its tiles, where the cache does not hold it.
    together = min(m_tiles, max(1, s.raster))
    group = together * s.block_m * k * w.x_bytes
    far += passes * max(0.0, together * n_tiles / (sms * s.min_blocks) - 1) * group * max(0.0, 1 - target.l2 * NEAR_CACHE / group)
    memory = (weight + far) / (target.read_gbps * 1e3) / grid.utilization  # GB/s = 1e3 bytes per us
    load = max(memory, cached / (target.read_gbps * 1e3 * L2_SPEEDUP)) / _flow(min(s.num_stages, grid.steps) * stage * grid.resident)

    dequant = codec_of(w.format).ops_per_weight[w.format.bits] * m_tiles * rows * k / (target.dequant_gops * 1e3) / grid.utilization
    dequant *= grid.decoded / grid.steps
    tflops = target.mma_tflops * (BYTES_OVER_HALF if w.format.x else 1)
    mma = 2.0 * s.block_m * m_tiles * n * k / (tflops * MMA_BURST * 1e6) / min(1.0, grid.utilization * MMA_SPARE)
    sums_of_groups = 0.0 if not w.format.step_sums else FLOAT_SUMS if w.format.x == FP8 else GROUP_SUMS
    mma += sums_of_groups * s.block_m * m_tiles * n * _ceil(k, GROUP) / (target.dequant_gops * 1e3) / grid.utilization
    mma += AGAIN_US * far / 1e6  # at the power limit what memory's bytes take is missing elsewhere, and is hidden by nothing
    mma += STEP_US * (IN_STEP if s.cluster > 1 else 1.0) * grid.blocks * grid.decoded / grid.resident

    sums = s.block_n * s.block_m * 4 / (EXCHANGE * clock * 1e3)  # us: an SM writes or reads one tile's
    split = 0.0
    if grid.shared:  # a block writes one part, then whoever is last reads the others: as many as blocks come to a shared tile
        split = SHARED_US + sums * grid.resident * (1 + max(1.0, grid_blocks(s, target) / (grid.shared * m_tiles * n_tiles)))
    elif clustered_split(s):
        split = sums * grid.blocks / s.split_k
    elif paired_split(s):  # a block adds half a tile up and writes as much, then two blocks read half of each
        split = SPLIT_US + sums * (grid.blocks + s.split_k / 8)
    elif s.split_k > 1:
        split = SPLIT_US + sums * (grid.blocks + s.split_k / 2)  # all write at once, the last one reads alone and faster
    return _total(target, m_tiles, load, dequant, mma, (FILL_US + END_US * grid.ends) * grid.waves, split, LAUNCH_US, grid)


def _stream(w: Workload, s: Schedule, target: Target) -> Estimate:
    """The small-m GEMMs: rings of warps that wait for memory and for nobody else."""
    m_tiles, n_tiles = _ceil(max(w.m, 1), s.block_m), _ceil(w.n, s.block_n)
    k_steps = _ceil(w.k, s.block_k)
    n, k, clock = n_tiles * s.block_n, k_steps * s.block_k, target.dequant_gops / target.units / LANES
    rings = gemm_stream.rings(s)
    grid = spread(m_tiles * n_tiles, k_steps, s, target)
    turns = _ceil(grid.steps, rings)
    utilization = grid.utilization * grid.steps / (turns * rings)  # the last turn may have no step for some rings

    x = n_tiles * min(max(w.m, 1), s.block_m) * m_tiles * k * 2  # bytes: every block reads it again
    load = (m_tiles * _weight_bytes(w, n, k) + x / L2_SPEEDUP) / (target.read_gbps * 1e3) / min(1.0, utilization * STREAM_BURST)
    load /= _flow(rings * min(s.num_stages, turns) * gemm_stream.weight_bytes(w.format, s) * grid.resident)

    records, columns = s.block_k // PACKED_K[w.format.bits], max(1, s.block_m // 8)
    tiles = gemm_stream.warp_rows(s) // 16
    of_record, of_tile = (part * columns for part in COLUMNS_ISSUE)
    issued = STEP_ISSUE + records * (RECORD_ISSUE + of_record + tiles * (TILE_ISSUE + of_tile))
    issued += 3 * s.block_m * s.block_k / (256 * gemm_stream.warps_n(s))  # 16-byte copies of x, three instructions each
    dequant = turns * grid.blocks * s.num_warps * issued / (4 * ISSUE * clock * 1e3)  # four schedulers
    chain = CHAIN_US * turns * grid.blocks / grid.resident

    split = SUM_US * rings * s.block_m * s.block_n / (s.num_warps * 32) * grid.blocks
    if clustered_split(s):
        split += CLUSTER_US
    elif s.split_k > 1:
        split += STREAM_SPLIT_US + s.block_n * s.block_m * 4 * (grid.blocks + s.split_k / 2) / (EXCHANGE * clock * 1e3)
    return _total(target, m_tiles, load, dequant, chain, STREAM_FILL_US * grid.waves, split, STREAM_LAUNCH_US, grid)


def _cpu(w: Workload, s: Schedule, target: Target) -> Estimate:
    threads = max(1, min(s.num_warps, target.units))
    m = max(w.m, 1)
    passes, tasks = _ceil(m, s.block_m), _ceil(w.n, s.block_n)
    n, k = tasks * s.block_n, w.k
    waves = _ceil(tasks, threads)
    utilization = tasks / (waves * threads)
    share = threads / target.units * utilization
    memory = _weight_bytes(w, n, k) / (target.read_gbps * 1e3)
    fits = s.block_n * k * w.format.bits // 8 < target.l2 / 2
    load = memory * (1 + (passes - 1) / (CPU_L2_SPEEDUP if fits else 1.0)) / share  # later passes find the rows of a task in cache
    dequant = passes * codec_of(w.format).cpu_ops_per_weight[w.format.bits] * n * k / (target.dequant_gops * 1e3) / share
    mma = 2.0 * passes * s.block_m * n * k / (target.mma_tflops * 1e6) / share
    mma /= CPU_INTEGER_RATE[w.format.bits] if w.format.integer_sums else 1.0
    mma *= max(1.0, CPU_CHAINS / (2 * s.block_m * s.split_k))  # a task's tile is two vectors wide or more
    grid = Grid(waves, waves, 1, 1, 1, 1, utilization, 0.0)
    return _total(target, passes, load, dequant, mma, 0.0, 0.0, CPU_FORK_US if threads > 1 else 0.5, grid)


def _total(
    target: Target, passes: int, load: float, dequant: float, mma: float, pipeline: float, split: float, launch: float, grid: Grid
) -> Estimate:
    """``load``, ``dequant`` and ``mma`` are those of all passes."""
    body = hypot(load, dequant + mma) if target.is_cuda else max(load, dequant + mma)
    us = launch + pipeline + body + split
    return Estimate(us, passes, load / passes, dequant / passes, mma / passes, pipeline, split, launch, grid.waves, grid.utilization)


def _weight_bytes(w: Workload, n: int, k: int) -> float:
    """Bytes of codes and group parameters of a padded weight."""
    groups = 1 if w.format.group_size == PER_CHANNEL else _ceil(k, w.format.group_size)
    return n * k * w.format.bits / 8 + n * groups * w.format.group_bytes


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
