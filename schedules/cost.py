"""The analytic cost model: how long a schedule should take, in terms that can be read.

LiquidGEMM's model (equations 3-6): one pass over the weight per row of tiles, each pass as long as the slower of loading and computing,

    T = ceil(M / Mt) * max(T_load, T_dequant + T_mma)

with T_load = bytes / read rate (eq. 3), T_dequant = alpha * N * K / scalar rate and T_mma = 2 * Mt * N * K / tensor rate (eq. 4), plus
what the paper leaves out: units that idle in the last wave, the pipeline's fill and hand-over, the reduction of a split k, the launch.
Two terms differ from the paper: Mt is not cut to M, because a tile's rows past the end are multiplied too, and T_load counts the x tile,
which each row of output tiles reads again."""

from __future__ import annotations

from dataclasses import dataclass

from ..layouts.formats import PER_CHANNEL
from .rules.gemm import stage_bytes
from .schedule import Schedule
from .target import Target
from .workload import Workload

DEQUANT_OPS = {
    4: 1.25,
    8: 1.5,
}  # alpha: scalar operations per weight (4 LOP3, 1 SHF, 4 HFMA2 per eight 4-bit weights; 2 PRMT, 2 HSUB2, 2 HFMA2 per four 8-bit)
L2_SPEEDUP = 2.5  # read rate of the last cache over that of memory
KNEE_BYTES = 64 * 1024  # bytes in flight per SM that saturate memory; half of it loses about a third
BURST = 1.5  # one SM's read rate over its share of the device's: idle SMs cost less when loading than when computing
MMA_MIN_M = {"gemm_wgmma": 32, "gemm_mma": 8}  # an MMA with fewer columns takes as long as this one
FILL_US = 0.8  # memory latency before a block's first multiply
STEP_US = 0.02  # one stage handed from producer to consumer and back
ISSUE_WARPS = 8  # computing warps per SM that keep its four schedulers busy with dequantization
LAUNCH_US = 1.5
SPLIT_US = 1.0  # one ticket and its fence
CPU_DEQUANT_OPS = {4: 1.0, 8: 0.75}  # per weight, in lanes: unpack, convert, scale
CPU_CHAINS = 4  # independent accumulators that, with decoding in between, hide the latency of a fused multiply-add
CPU_FORK_US = 4.0  # waking and joining the threads of a parallel loop


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the model expects of one call, all times in microseconds.

    ``us`` = ``launch_us`` + ``pipeline_us`` + ``passes`` * max(``load_us``, ``dequant_us`` + ``mma_us``) + ``split_us``. The terms inside
    the maximum are those of one pass over the weight and already contain the idling: ``utilization`` is the share of the units' time that
    is used (1: no idle unit), ``waves`` the number of blocks (CPU: task steps) that the busiest unit runs one after another."""

    us: float
    passes: int
    load_us: float
    dequant_us: float
    mma_us: float
    pipeline_us: float
    split_us: float
    launch_us: float
    waves: int
    utilization: float

    @property
    def bound(self) -> str:
        """The term that decides: "load" or "compute"."""
        return "load" if self.load_us >= self.dequant_us + self.mma_us else "compute"


def estimate(workload: Workload, schedule: Schedule, target: Target) -> Estimate:
    """The model's expectation for ``schedule``; meant for legal ones (an illegal one gets a meaningless number, never an error)."""
    return _cuda(workload, schedule, target) if target.is_cuda else _cpu(workload, schedule, target)


def _cuda(w: Workload, s: Schedule, target: Target) -> Estimate:
    m_tiles, n_tiles = _ceil(max(w.m, 1), s.block_m), _ceil(w.n, s.block_n)
    n, k = n_tiles * s.block_n, _ceil(w.k, s.block_k) * s.block_k
    blocks = m_tiles * n_tiles * s.split_k
    waves = _ceil(blocks, target.units)
    utilization = blocks / (waves * target.units)
    steps = _ceil(k // s.block_k, s.split_k)
    utilization *= k // s.block_k / (steps * s.split_k)  # the last split may be shorter

    weight = _weight_bytes(w, n, k)
    in_flight = min(s.num_stages, steps) * stage_bytes(w.format, s) * s.min_blocks
    flow = min(1.0, (in_flight / KNEE_BYTES) ** 0.5) * min(1.0, utilization * BURST)
    read_once = weight / (target.read_gbps * 1e3)  # GB/s = 1e3 bytes per us
    reread = weight / (target.read_gbps * 1e3 * (L2_SPEEDUP if weight < target.l2 / 2 else 1.0))
    x = n_tiles * s.block_m * k * 2 / (target.read_gbps * 1e3 * L2_SPEEDUP)
    load = ((read_once + (m_tiles - 1) * reread) / m_tiles + x) / flow
    dequant = DEQUANT_OPS[w.format.bits] * n * k / (target.dequant_gops * 1e3) / utilization
    dequant *= max(1.0, ISSUE_WARPS / (s.num_warps * s.min_blocks))
    mma = 2.0 * max(s.block_m, MMA_MIN_M[s.program]) * n * k / (target.mma_tflops * 1e6) / utilization

    pipeline = (FILL_US + STEP_US * steps) * _ceil(waves, s.min_blocks)  # resident neighbours hide each other's
    partials = s.split_k * m_tiles * s.block_m * n * 4 if s.split_k > 1 else 0
    split = SPLIT_US + 2 * partials / (target.read_gbps * 1e3 * L2_SPEEDUP) if s.split_k > 1 else 0.0
    return _total(m_tiles, load, dequant, mma, pipeline, split, LAUNCH_US, waves, utilization)


def _cpu(w: Workload, s: Schedule, target: Target) -> Estimate:
    threads = max(1, min(s.num_warps, target.units))
    m = max(w.m, 1)
    passes, tasks = _ceil(m, s.block_m), _ceil(w.n, s.block_n)
    n, k = tasks * s.block_n, w.k
    waves = _ceil(tasks, threads)
    utilization = tasks / (waves * threads)
    share = threads / target.units * utilization
    weight = _weight_bytes(w, n, k)
    memory = weight / (target.read_gbps * 1e3)
    cached = memory / (
        L2_SPEEDUP if s.block_n * k * w.format.bits // 8 < target.l2 / 2 else 1.0
    )  # later passes find the rows of a task in cache
    load = (memory + (passes - 1) * cached) / passes / share
    dequant = CPU_DEQUANT_OPS[w.format.bits] * n * k / (target.dequant_gops * 1e3) / share
    mma = 2.0 * s.block_m * n * k / (target.mma_tflops * 1e6) / share
    mma *= max(1.0, CPU_CHAINS / (2 * s.block_m * s.split_k))  # a task's tile is two vectors wide or more
    return _total(passes, load, dequant, mma, 0.0, 0.0, CPU_FORK_US if threads > 1 else 0.5, waves, utilization)


def _total(
    passes: int, load: float, dequant: float, mma: float, pipeline: float, split: float, launch: float, waves: int, utilization: float
) -> Estimate:
    us = launch + pipeline + passes * max(load, dequant + mma) + split
    return Estimate(us, passes, load, dequant, mma, pipeline, split, launch, waves, utilization)


def _weight_bytes(w: Workload, n: int, k: int) -> float:
    """Bytes of codes and group parameters of a padded weight."""
    groups = 1 if w.format.group_size == PER_CHANNEL else _ceil(k, w.format.group_size)
    return n * k * w.format.bits / 8 + n * groups * (2 if w.format.symmetric else 4)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
