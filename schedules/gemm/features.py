"""What the learned ranker sees of a schedule: the analytic model's terms, the workload, and how the
schedule divides it.

Values are named, so that a model trained before a field existed still finds its own, and none
depends on a device's name: rates enter through the estimate. Sizes are logarithms to base 2,
because a tree cuts them and a GEMM's behaviour follows ratios."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from math import ceil, log2

from ...layouts.formats import PER_CHANNEL
from ..schedule import Schedule
from ..target import Target
from .cost import Estimate
from .joined import n_blocks
from .rules import stage_bytes
from .stream import ARCHES, rings
from .workload import Workload

PER_PASS = ("load_us", "dequant_us", "mma_us")  # terms of an estimate that count once for each row of tiles
TIMES = tuple(f.name for f in fields(Estimate) if f.name.endswith("_us"))
COUNTS = tuple(f.name for f in fields(Estimate) if f.name != "us" and f.name not in TIMES)  # and shares
LOG2_FIELDS = ("block_n", "block_m", "block_k", "num_warps", "split_k", "min_blocks")  # of a schedule; the others are counts or switches


def features(workload: Workload, schedule: Schedule, target: Target, expected: Estimate) -> dict[str, float]:
    """The named values of one schedule; ``expected`` is its estimate. What does not apply (a
    pipeline's bytes on a CPU) is left out."""
    m, s = max(workload.m, 1), schedule
    m_tiles, n_tiles = ceil(m / s.block_m), n_blocks(workload, s) if s.joined else ceil(workload.n / s.block_n)
    steps = ceil(ceil(workload.k / s.block_k) / s.split_k)
    places = target.units * s.min_blocks if target.is_cuda else s.num_warps
    waves = m_tiles * n_tiles * (s.split_k if target.is_cuda else 1) / places
    found = {
        **_of_estimate(expected),
        **_of_workload(workload, m),
        **_of_schedule(s),
        "resident_waves": log2(waves),
        "wave_fill": waves / ceil(waves),
        "blocks_per_unit": log2(waves * places / target.units),
        "steps_per_block": log2(steps),
        "padded_rows": m_tiles * s.block_m / m,
    }
    if target.is_cuda:
        pipelines = rings(s) if s.program in ARCHES else 1
        found["bytes_in_flight"] = log2(pipelines * min(s.num_stages, steps) * stage_bytes(workload.format, s) * s.min_blocks)
    return found


def _of_estimate(e: Estimate) -> dict[str, float]:
    """Times as shares of the whole, counts as logarithms, and how far apart loading and computing
    are."""
    found = {"log_us": log2(e.us), "load_to_compute": log2(e.load_us / (e.dequant_us + e.mma_us))}
    for name in TIMES:
        found[name] = getattr(e, name) * (e.passes if name in PER_PASS else 1) / e.us
    for name in COUNTS:
        value = getattr(e, name)
        found[name] = log2(max(value, 1)) if isinstance(value, int) else float(value)
    return found


def _of_workload(w: Workload, m: int) -> dict[str, float]:
    group = w.k if w.format.group_size == PER_CHANNEL else w.format.group_size
    return {
        "log_mnk": log2(m) + log2(w.n) + log2(w.k),
        "log_m": log2(m),
        "log_n": log2(w.n),
        "log_k": log2(w.k),
        "bits": float(w.format.bits),
        "symmetric": float(w.format.symmetric),
        "log_group": log2(group),
        "bfloat16": float(w.dtype == "bfloat16"),
        "bias": float(w.bias),
        "sums_of_groups": float(w.format.step_sums),
        "placed": float(w.width > 0),
    }


@lru_cache(maxsize=4096)
def _of_schedule(s: Schedule) -> Mapping[str, float]:
    """Every field, also one that was added later: sizes as logarithms, switches as 0 and 1, the
    program as a column of its own."""
    found = {f"program={s.program}": 1.0}
    for field in fields(s):
        if field.name != "program":
            value = getattr(s, field.name)
            found[field.name] = log2(value) if field.name in LOG2_FIELDS else float(value)
    return found
