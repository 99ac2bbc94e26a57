"""GEMM with packed weights as an operation: its programs, and how far one product's measurements
speak of another's."""

from __future__ import annotations

from collections.abc import Callable
from math import log2

from ..rule import Operation, Rule
from ..schedule import Schedule
from ..target import Target
from . import any as any_precision
from . import any_binary, any_wgmma, cpu, cpu_any, rules, stream
from .any_binary_cost import any_binary_estimate
from .any_cost import any_estimate
from .any_wgmma_cost import any_wgmma_estimate
from .codecs import codec_of, sources_of
from .cost import estimate
from .features import features
from .joined import SLAB_N
from .tiles import tile_candidates
from .workload import PROPOSED_M, Workload

# One unit is a factor of two in n, k or m.
OTHER_DTYPE = 0.25
OTHER_BIAS = 0.0625
OTHER_STORE = 0.0625  # in order, or by an index; with a residual, a gate, a norm
OTHER_SYMMETRY = 0.25
OTHER_GROUP = 0.5

PLACING = frozenset({rules.WGMMA.program, rules.MMA.program, stream.ASYNC, stream.BULK, cpu.PROGRAM})  # store some columns of a wider y
NORMING = frozenset({stream.ASYNC, stream.BULK, cpu.PROGRAM})  # programs that norm x themselves
HALVING = NORMING  # that gate the second half of a weight by the first

_TILE = frozenset({"block_n", "block_m", "block_k", "num_stages", "num_warps", "split_k", "min_blocks"})


def _tiles(workload: Workload, target: Target) -> list[Schedule]:
    rule = WGMMA if target.arch in WGMMA.tried else MMA
    return tile_candidates(rule.program, workload, target, rule.reasons)


def _unserved(program: str) -> Callable[[Workload, str], list[str]]:
    def reasons(workload: Workload, arch: str) -> list[str]:
        found = codec_of(workload.format).unserved(workload.format, program, arch)
        if workload.width and program not in PLACING:
            found.append(f"{program} does not store channels by an index; accepted: {', '.join(sorted(PLACING))}.")
        if workload.norm and program not in NORMING:
            found.append(f"{program} does not norm x; accepted: {', '.join(sorted(NORMING))}.")
        if workload.gate_halves and program not in HALVING:
            found.append(f"{program} does not take gates as the weight's first half; accepted: {', '.join(sorted(HALVING))}.")
        if workload.gate_halves and workload.n < 2 * SLAB_N and arch != "cpu":
            found.append(f"n is {workload.n} with gates as the weight's first half; accepted on GPUs: from {2 * SLAB_N} rows on.")
        return found

    return reasons


def _sources(workload: Workload) -> tuple[str, ...]:
    return sources_of(workload.format)


BULK = Rule(
    stream.BULK,
    "tilebit.tiles.gemm.stream_bulk",
    unserved=_unserved(stream.BULK),
    sources=_sources,
    arches=("sm_90a",),
    tried=("sm_90a",),
    reads=_TILE,
    legal=stream.stream_legal,
    candidates=stream.stream_candidates,
    estimate=estimate,
    promises=("mma", "ldmatrix", "bulk_copies", "dependent_waits", "wide_shared_loads"),
)
STREAM = Rule(
    stream.ASYNC,
    "tilebit.tiles.gemm.stream",
    unserved=_unserved(stream.ASYNC),
    sources=_sources,
    arches=("sm_80", "sm_86", "sm_89", "sm_90a"),
    tried=("sm_80", "sm_86", "sm_89"),
    reads=_TILE,
    legal=stream.stream_legal,
    candidates=stream.stream_candidates,
    estimate=estimate,
    workspace_words=rules.workspace_words,
    promises=("mma", "ldmatrix", "cp_async", "wide_shared_loads"),
)
WGMMA = Rule(
    rules.WGMMA.program,
    "tilebit.tiles.gemm.wgmma",
    unserved=_unserved(rules.WGMMA.program),
    sources=_sources,
    arches=rules.WGMMA.arches,
    tried=("sm_90a",),
    reads=_TILE | {"raster", "stream_k", "cluster", "tail", "joined"},
    legal=rules.tiled_legal,
    candidates=_tiles,
    estimate=estimate,
    workspace_words=rules.workspace_words,
    promises=("wgmma", "tma", "dependent_waits", "register_reallocations", "wide_shared_loads"),
    loading_warps=rules.WGMMA.producer_threads // 32,
    registers=rules.wgmma_registers,
)
MMA = Rule(
    rules.MMA.program,
    "tilebit.tiles.gemm.mma",
    unserved=_unserved(rules.MMA.program),
    sources=_sources,
    arches=rules.MMA.arches,
    tried=("sm_80", "sm_86", "sm_89"),  # legal on sm_90a too (its code runs there) but never the faster one
    reads=_TILE | {"raster"},
    legal=rules.tiled_legal,
    candidates=_tiles,
    estimate=estimate,
    workspace_words=rules.workspace_words,
    promises=("mma", "cp_async", "wide_shared_loads"),
)
ANY = Rule(
    any_precision.PROGRAM,
    "tilebit.tiles.gemm.any",
    unserved=_unserved(any_precision.PROGRAM),
    sources=_sources,
    arches=any_precision.ARCHES,
    tried=any_precision.ARCHES,
    reads=_TILE - {"block_k"},
    legal=any_precision.any_legal,
    candidates=any_precision.any_candidates,
    estimate=any_estimate,
    workspace_words=rules.workspace_words,
    promises=("mma", "cp_async"),
)
ANY_BINARY = Rule(
    any_binary.PROGRAM,
    "tilebit.tiles.gemm.any_binary",
    unserved=_unserved(any_binary.PROGRAM),
    sources=_sources,
    arches=any_binary.ARCHES,
    tried=any_binary.ARCHES,
    reads=frozenset({"block_n", "block_m", "num_stages", "num_warps"}),
    legal=any_binary.binary_legal,
    candidates=any_binary.binary_candidates,
    estimate=any_binary_estimate,
    promises=("mma", "cp_async", "wide_shared_loads"),
)
ANY_WGMMA = Rule(
    any_wgmma.PROGRAM,
    "tilebit.tiles.gemm.any_wgmma",
    unserved=_unserved(any_wgmma.PROGRAM),
    sources=_sources,
    arches=any_wgmma.ARCHES,
    tried=any_wgmma.ARCHES,
    reads=_TILE | {"raster", "stream_k", "cluster"},
    legal=any_wgmma.any_wgmma_legal,
    candidates=any_wgmma.any_wgmma_candidates,
    estimate=any_wgmma_estimate,
    workspace_words=rules.workspace_words,
    promises=("wgmma", "tma", "register_reallocations", "wide_shared_loads"),
    loading_warps=any_wgmma.PRODUCERS // 32,
    registers=any_wgmma.registers,
)
CPU = Rule(
    cpu.PROGRAM,
    "tilebit.tiles.cpu.gemm.program",
    unserved=_unserved(cpu.PROGRAM),
    sources=_sources,
    arches=("cpu",),
    tried=("cpu",),
    reads=frozenset({"block_n", "block_m", "block_k", "num_warps", "split_k"}),
    legal=cpu.cpu_legal,
    candidates=cpu.cpu_candidates,
    estimate=estimate,
)
CPU_ANY = Rule(
    cpu_any.PROGRAM,
    "tilebit.tiles.cpu.gemm.any_program",
    unserved=_unserved(cpu_any.PROGRAM),
    sources=_sources,
    arches=("cpu",),
    tried=("cpu",),
    reads=frozenset({"block_n", "block_m", "num_warps", "split_k"}),
    legal=cpu_any.any_legal,
    candidates=cpu_any.any_candidates,
)


def distance(there: Workload, here: Workload) -> float | None:
    """How far two GEMMs are apart; None for another class of numbers."""
    f, g = there.format, here.format
    if there.kind != here.kind:
        return None
    shape = abs(log2(there.n / here.n)) + abs(log2(there.k / here.k)) + abs(log2(max(there.m, 1) / max(here.m, 1)))
    numbers = OTHER_DTYPE * (there.dtype != here.dtype) + OTHER_BIAS * (there.bias != here.bias)
    stored = (there.width > 0) != (here.width > 0), there.residual != here.residual, there.gate != here.gate, there.norm != here.norm
    numbers += OTHER_STORE * sum(stored)
    return shape + numbers + OTHER_SYMMETRY * (f.symmetric != g.symmetric) + OTHER_GROUP * (f.group_size != g.group_size)


def twins(there: Workload, here: Workload) -> bool:
    """The same shape, in another dtype, group size or symmetry, or with another bias."""
    return there.kind == here.kind and (there.m, there.n, there.k) == (here.m, here.n, here.k)


def rank(there: Workload, here: Workload) -> tuple[bool, bool, float, bool]:
    """A kernel made for as many rows serves best, then the next larger one, then the largest. What was
    made for a step serves a product by itself only where nothing else does."""
    rows = there.m < here.m, abs(log2(max(there.m, 1) / max(here.m, 1)))
    return (there.dependent and not here.dependent, *rows, there.dependent != here.dependent)


GEMM = Operation(
    "gemm",
    Workload,
    rules=(BULK, STREAM, WGMMA, MMA, ANY, ANY_BINARY, ANY_WGMMA, CPU, CPU_ANY),
    gate="tilebit.autotune.problems.verify",
    distance=distance,
    rank=rank,
    twins=twins,
    features=features,
    proposed=PROPOSED_M,
)
