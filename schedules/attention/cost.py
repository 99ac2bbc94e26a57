"""The analytic cost model of attention: enough to rank candidates, in terms that can be read.

Decode is bound by reading the cache: T = launch + fill + overlap(bytes / read rate, instructions /
issue rate) + combine, where the read rate depends on the bytes in flight per SM, and both terms are
divided by the share of the warps that have a unit in the last turn. Instructions are counted: a 16
x 16 fragment of a granule takes one tensor-core product for every 8 columns and what unpacks it.
Constants that say "fitted" follow measurements of an exploration in plain CUDA on an H200 (heads
32/8 of 128, KV8, KV4 and KV2)."""

from __future__ import annotations

from math import hypot

from ...layouts.kv import GRANULE, RESIDUAL
from ..gemm.cost import CPU_FORK_US, ISSUE, KNEE_BYTES, L2_SPEEDUP, LANES
from ..rule import Estimate
from ..schedule import Schedule
from ..target import Target
from .decode import column_passes, grid_blocks, unit_bytes
from .workload import AttentionWorkload

LAUNCH_US = 1.7
FILL_US = 3.0  # the first units' way from memory; fitted
COMBINE_US = 1.5  # partial results of shared segments; fitted
TURN_US = 0.12  # one unit handed from copy to product, per turn of a warp that has nothing else to do; fitted
UNPACK = {16: 1.0, 8: 7.0, 4: 4.5, 2: 5.0}  # instructions a fragment of one lane's 8 codes, counted
SOFTMAX = 24.0  # instructions for 16 tokens and 8 columns, counted
PRODUCT = 2.0  # issue slots that one mma.m16n8k16 takes
MMA_SHARE = {"attention_prefill": 0.85, "attention_prefill_mma": 0.55}  # of the tensor rate that a full pipeline reaches
PREFILL_STEP_US = 0.1  # one tile of keys handed over
LONE_WARPGROUP = 1.6  # four warps have nobody who multiplies while they compute the softmax
CPU_VECTOR_OPS = 6.0  # vector operations for a code that is unpacked, multiplied and added, in lanes


def attention_estimate(workload: AttentionWorkload, schedule: Schedule, target: Target) -> Estimate:
    """The model's expectation for ``schedule``; meant for legal ones (an illegal one gets a
    meaningless number, never an error)."""
    if not target.is_cuda:
        return _cpu(workload, schedule, target)
    return {"decode": _decode, "prefill": _prefill}.get(workload.op, _moved)(workload, schedule, target)


def _decode(w: AttentionWorkload, s: Schedule, target: Target) -> Estimate:
    passes, warps = column_passes(w, s), s.num_warps * s.min_blocks
    recent = min(w.visible_tokens, w.kv_len % RESIDUAL)
    packed = w.visible_tokens - recent
    segments = max(1, w.batch * w.heads_kv * passes)
    units = segments * (-(-packed // s.block_n) + -(-recent // GRANULE))
    turns = -(-max(units, 1) // (grid_blocks(s, target) * s.num_warps))
    used = max(units, 1) / (turns * grid_blocks(s, target) * s.num_warps)

    unit = sum(unit_bytes(w, s))
    copied = w.batch * w.heads_kv * (-(-packed // s.block_n) * unit + recent * w.row_bytes) + 4 * w.head_dim * w.heads_q * w.batch * w.q_len
    in_flight = warps * min(s.num_stages / 2, turns) * unit
    flow = min(1.0, (max(in_flight, 1) / KNEE_BYTES) ** 0.5)
    load = copied * (1 + (passes - 1) / L2_SPEEDUP) / (target.read_gbps * 1e3) / flow / used

    fragments, columns = w.head_dim // 16, s.block_m // 8
    issued = fragments * (UNPACK[w.format.key_bits] + UNPACK[w.format.value_bits] + 2 * PRODUCT * columns) + SOFTMAX * columns
    clock = target.dequant_gops / target.units / LANES  # GHz
    tokens = s.block_n * turns  # of the busiest warp
    compute = tokens / GRANULE * issued * warps / (4 * ISSUE * clock * 1e3)
    chain = TURN_US * turns
    us = LAUNCH_US + FILL_US + hypot(load, max(compute, chain)) + COMBINE_US
    return Estimate(us, passes, load / passes, compute / passes, chain / passes, FILL_US, COMBINE_US, LAUNCH_US, turns, used)


def _prefill(w: AttentionWorkload, s: Schedule, target: Target) -> Estimate:
    row_tiles = max(1, w.batch * w.heads_q * -(-w.q_len // s.block_m))
    places = target.units * s.min_blocks
    waves = -(-row_tiles // places)
    used = row_tiles / (waves * places) if waves < 4 else 1.0  # of many waves of unequal tiles the last is filled by what is short
    steps = w.flops / (4 * w.head_dim * s.block_m * s.block_n) + row_tiles * (s.block_m + s.block_n) / (
        2 * s.block_n
    )  # and the masked halves
    mma = steps * 4 * w.head_dim * s.block_m * s.block_n / (target.mma_tflops * MMA_SHARE.get(s.program, 1.0) * 1e6) / used
    if s.num_warps <= 4:
        mma *= LONE_WARPGROUP
    handed = PREFILL_STEP_US * steps / target.units / used * (2 if s.num_stages == 1 else 1)
    load = w.bytes / (target.read_gbps * 1e3)
    us = LAUNCH_US + FILL_US + hypot(load, mma + handed)
    return Estimate(us, 1, load, handed, mma, FILL_US, 0.0, LAUNCH_US, waves, used)


def _moved(w: AttentionWorkload, s: Schedule, target: Target) -> Estimate:
    """Append, pack and gather: bytes, and blocks of one group each."""
    groups = max(1, w.batch * w.heads_kv * -(-(w.kv_len if w.op == "gather" else w.q_len) // s.block_n))
    waves = -(-groups // (target.units * max(1, 16 // s.num_warps)))
    load = w.bytes / (target.read_gbps * 1e3)
    return Estimate(LAUNCH_US + FILL_US + load, 1, load, 0.0, 0.0, FILL_US, 0.0, LAUNCH_US, waves, 1.0)


def _cpu(w: AttentionWorkload, s: Schedule, target: Target) -> Estimate:
    threads = max(1, min(s.num_warps, target.units))
    tasks = max(1, w.batch * w.heads_kv)
    waves = -(-tasks // threads)
    share = threads / target.units * tasks / (waves * threads)
    load = w.bytes / (target.read_gbps * 1e3) / share
    codes = 2 * w.batch * w.heads_kv * w.head_dim * (w.visible_tokens if w.op in ("decode", "gather") else w.q_len)
    dequant = codes * CPU_VECTOR_OPS / (target.dequant_gops * 1e3) / share
    mma = w.flops / (target.mma_tflops * 1e6) / share
    launch = CPU_FORK_US if threads > 1 else 0.5
    return Estimate(launch + max(load, dequant + mma), 1, load, dequant, mma, 0.0, 0.0, launch, waves, tasks / (waves * threads))
