"""The prefill programs without a GPU: the whole kernel that TileLang generates from each, on every thread of every block.

Loads through tensor maps, wgmma and mma.sync are the emulation's, in the layouts that their descriptors and coordinates say; loops, waits
and the hand-over of stages are the generated code's. Products are computed as early as they are issued or as late as they are waited for.
"""

from __future__ import annotations

import pytest
import torch
from emulation.device_code import needs_host_compiler
from emulation.emulated_program import ORDERS
from emulation.generated_attention import GeneratedAttention
from kv_cases import prefill_problem
from lanes import one_of_each

from tilebit.autotune.problems.attention import AttentionProblem
from tilebit.autotune.problems.attention_verify import AttentionGate
from tilebit.layouts.kv_formats import KVFormat
from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.operations import legal
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name

pytestmark = needs_host_compiler
HALF, BFLOAT = "float16", "bfloat16"
WGMMA, MMA = "attention_prefill", "attention_prefill_mma"
ARCH = {WGMMA: "sm_90a", MMA: "sm_80"}


def prefill(head_dim: int, heads_q: int = 2, heads_kv: int = 1, **changes) -> AttentionWorkload:
    return AttentionWorkload("prefill", 4, 128, 256, heads_q, heads_kv, head_dim, KVFormat(), **changes)


# block_n, block_m, block_k, stages, warps
CASES = (
    (prefill(64, 4, 2, lse=True), Schedule(WGMMA, 64, 128, 64, 2, 8)),
    (prefill(64, 4, 2, lse=True), Schedule(MMA, 64, 64, 64, 2, 4)),
    (prefill(128, dtype=BFLOAT, window=100, sink_tokens=20, soft_cap=3.0, lse=True), Schedule(WGMMA, 64, 128, 128, 2, 8)),
    (prefill(128, 3, 3, sinks=True), Schedule(WGMMA, 176, 128, 128, 2, 8)),  # few registers are left: addresses are computed anew
    (prefill(64, 7, 1, window=70, sinks=True, dtype=BFLOAT), Schedule(WGMMA, 64, 64, 64, 3, 4)),
    (prefill(64, lse=True, scale=0.4), Schedule(WGMMA, 96, 192, 64, 2, 12)),  # three warpgroups take turns
    (prefill(256, window=150, soft_cap=5.0, sinks=True, lse=True), Schedule(WGMMA, 80, 128, 256, 2, 8)),  # no turns
    (prefill(128, dtype=BFLOAT, window=100, sink_tokens=20, soft_cap=3.0), Schedule(MMA, 64, 128, 128, 2, 8)),
    (prefill(256, 3, 3, window=70, sink_tokens=4, lse=True), Schedule(MMA, 32, 64, 256, 2, 4)),
    (prefill(64, 8, 1, sinks=True, scale=0.4), Schedule(MMA, 32, 64, 64, 3, 4)),
    (prefill(128, lse=True), Schedule(MMA, 64, 64, 128, 1, 4)),
)
# (keys, queries): full and partly filled tiles, a history, more queries than keys, nothing to see
SEQUENCES = (((300, 300), (1, 1), (0, 5), (129, 40), (17, 200)), ((391, 150), (128, 128), (512, 260)))


def label(case: tuple[AttentionWorkload, Schedule]) -> str:
    w, s = case
    softmax = f"window{w.window}+{w.sink_tokens}{'-sinks' * w.sinks}-cap{w.soft_cap:g}{'-lse' * w.lse}"
    return f"{s.program}-{w.dtype}-d{w.head_dim}-group{w.group}-{softmax}-{s.block_m}x{s.block_n}-{s.num_stages}s"


def test_the_cases_are_legal_and_use_every_value():
    for workload, schedule in CASES:
        assert legal(workload, schedule, target_from_name(ARCH[schedule.program])) == [], (workload, schedule)
    for name in ARCH:
        mine = [w for w, s in CASES if s.program == name]
        assert {w.dtype for w in mine} == {HALF, BFLOAT} and {w.head_dim for w in mine} == {64, 128, 256}
        flags = [(w.window > 0, w.sink_tokens > 0, w.sinks, w.soft_cap > 0, w.lse, w.group > 1, w.heads_kv > 1) for w in mine]
        assert all({True, False} == set(column) for column in zip(*flags, strict=True))
    assert {s.num_warps // 4 for _, s in CASES if s.program == WGMMA} == {1, 2, 3}


@pytest.mark.parametrize("case", one_of_each(CASES, lambda case: case[1].program), ids=label)
def test_prefill(case: tuple[AttentionWorkload, Schedule]):
    """The tuner's verdict: right, and the same bits whatever the order of the blocks, of their warps, and of their products."""
    workload, schedule = case
    kernels = [GeneratedAttention(*case, target_from_name(ARCH[schedule.program]), order=order, seed=1) for order in ORDERS]
    runs = iter(kernels * 2)

    def run(problem: AttentionProblem, outputs: dict[str, torch.Tensor]) -> None:
        next(runs)(problem.named(outputs))

    verdict = AttentionGate(*(prefill_problem(workload, s, seed) for seed, s in enumerate(SEQUENCES))).verify(run)
    assert verdict.ok, verdict.reasons
