"""The operations on a KV cache: their programs, and how far one problem's measurements speak
of another's."""

from __future__ import annotations

from collections.abc import Callable
from math import log2

from ..gemm.operation import OTHER_DTYPE
from ..rule import Operation, Rule
from ..schedule import Schedule
from ..target import Target
from . import decode, rules
from .cost import attention_estimate as estimate
from .workload import AttentionWorkload

# A persistent grid sees batch x kv heads x kv_len as one line of work, so that each says less than
# a GEMM's m does.
SIZES = {"batch": 0.5, "kv_len": 0.5, "heads_kv": 0.5, "q_len": 1.0}
OTHER_KEY_SCALES = 0.25
OTHER_PAGE_SIZE = 0.25
OTHER_SCORES = 0.0625  # a window, a cap, sinks, ...: what happens to scores, and what is returned
_SCORES = ("window", "sink_tokens", "sinks", "soft_cap", "scale", "lse", "rotary", "queries", "rotary_dim", "qk_norm")

_TILE = frozenset({"block_n", "block_m", "block_k", "num_stages", "num_warps", "min_blocks"})
_CPU = frozenset({"block_n", "block_m", "block_k", "num_warps"})
_OLDER = ("sm_80", "sm_86", "sm_89")
_FOLDER = "tilebit.tiles.attention"


def distance(there: AttentionWorkload, here: AttentionWorkload) -> float | None:
    """How far two calls are apart; None for another operation, other numbers, another head_dim or
    group of heads."""
    f, g = there.format, here.format
    if (there.kind, there.head_dim, there.group) != (here.kind, here.head_dim, here.group):
        return None
    shape = sum(weight * abs(log2(max(getattr(there, name), 1) / max(getattr(here, name), 1))) for name, weight in SIZES.items())
    flags = OTHER_SCORES * sum(getattr(there, name) != getattr(here, name) for name in _SCORES)
    numbers = OTHER_DTYPE * (there.dtype != here.dtype) + OTHER_KEY_SCALES * (f.key_scales != g.key_scales)
    return shape + flags + numbers + OTHER_PAGE_SIZE * (there.page_size != here.page_size)


def rank(there: AttentionWorkload, here: AttentionWorkload) -> float:
    """Kernels serve all sizes alike: the nearest ones."""
    return sum(abs(log2(max(getattr(there, size), 1) / max(getattr(here, size), 1))) for size in here.DYNAMIC)


def _cpu(op: str) -> Rule:
    return Rule(
        f"attention_{op}_cpu",
        f"tilebit.tiles.cpu.attention.{op}",
        arches=("cpu",),
        tried=("cpu",),
        reads=_CPU,
        legal=rules.cpu_legal,
        candidates=rules.cpu_candidates,
        estimate=estimate,
    )


def _decode(program: str, module: str, tried: tuple[str, ...], *promises: str) -> Rule:
    def candidates(workload: AttentionWorkload, target: Target) -> list[Schedule]:
        return decode.decode_candidates(program, workload, target)

    return Rule(
        program,
        f"{_FOLDER}.{module}",
        arches=decode.ARCHES[program],
        tried=tried,
        reads=_TILE,
        legal=decode.decode_legal,
        candidates=candidates,
        estimate=estimate,
        workspace_words=decode.workspace_words,
        promises=("mma", *promises, "wide_shared_loads"),
    )


def _mover(op: str) -> Rule:
    return Rule(
        rules.MOVERS[op],
        f"{_FOLDER}.{op}",
        arches=rules.GPUS,
        tried=rules.GPUS,
        reads=frozenset({"block_n", "block_m", "block_k", "num_warps"}),
        legal=rules.mover_legal,
        candidates=rules.mover_candidates,
        estimate=estimate,
    )  # rows are moved once: no instruction decides, so nothing is promised


def _prefill_candidates(program: str) -> Callable[[AttentionWorkload, Target], list[Schedule]]:
    return lambda workload, target: rules.prefill_candidates(program, workload, target)


_BULK = _decode(decode.BULK, "decode_bulk", ("sm_90a",), "bulk_copies", "dependent_waits")
_ASYNC = _decode(decode.ASYNC, "decode", _OLDER, "cp_async")
_WGMMA = Rule(
    rules.WGMMA,
    f"{_FOLDER}.prefill",
    arches=("sm_90a",),
    tried=("sm_90a",),
    reads=_TILE,
    legal=rules.prefill_legal,
    candidates=_prefill_candidates(rules.WGMMA),
    estimate=estimate,
    promises=("wgmma", "tma", "register_reallocations"),
    loading_warps=rules.LOADING_WARPS,
    registers=rules.prefill_registers,
)
_MMA = Rule(
    rules.MMA,
    f"{_FOLDER}.prefill_mma",
    arches=rules.GPUS,
    tried=_OLDER,
    reads=_TILE,
    legal=rules.prefill_legal,
    candidates=_prefill_candidates(rules.MMA),
    estimate=estimate,
    promises=("mma", "ldmatrix", "cp_async"),
)


def _operation(name: str, *programs: Rule) -> Operation:
    return Operation(
        name,
        AttentionWorkload,
        rules=(*programs, _cpu(name)),
        gate="tilebit.autotune.problems.attention_verify",
        distance=distance,
        rank=rank,
    )


DECODE = _operation("decode", _BULK, _ASYNC)
APPEND = _operation("append", _mover("append"))
PACK = _operation("pack", _mover("pack"))
GATHER = _operation("gather", _mover("gather"))
PREFILL = _operation("prefill", _WGMMA, _MMA)
