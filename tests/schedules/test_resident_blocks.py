"""Blocks that are to lie on an SM together: each takes what it asked for, and 1 KB of the SM's shared memory beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tilebit.layouts.formats import QuantFormat
from tilebit.layouts.kv_formats import KVFormat
from tilebit.schedules.activations import operation as quantize_rules
from tilebit.schedules.activations.workload import QuantizeWorkload
from tilebit.schedules.attention import decode as decode_rules
from tilebit.schedules.attention import rules as attention_rules
from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.gemm import any as any_rules
from tilebit.schedules.gemm import any_wgmma as any_wgmma_rules
from tilebit.schedules.gemm import dense as dense_rules
from tilebit.schedules.gemm import rules as gemm_rules
from tilebit.schedules.gemm import stream as stream_rules
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import legal, programs
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target, target_from_name

W4 = Workload(8, 4096, 4096)
DECODE = AttentionWorkload("decode", 32, 1, 4096, 32, 8, 128, KVFormat.from_name("kv4_channel"))
PREFILL = AttentionWorkload("prefill", 1, 8192, 8192, 32, 8, 128, KVFormat())
H200 = target_from_name("sm_90a")
# bytes that a block asks for, where an SM has no more of them than it must
ASKED: dict[str, Callable[[Any, Schedule, Target], int]] = {
    "gemm_wgmma": lambda w, s, _: gemm_rules.shared_memory(w, s),
    "gemm_mma": lambda w, s, _: gemm_rules.shared_memory(w, s),
    "gemm_stream": lambda w, s, t: stream_rules.shared_words(w, s, t) * 4 + stream_rules.STATIC_SMEM,
    "gemm_stream_bulk": lambda w, s, t: stream_rules.shared_words(w, s, t) * 4 + stream_rules.STATIC_SMEM,
    "gemm_any": lambda w, s, t: any_rules.shared_bytes(w, s, t) + any_rules.STATIC_SMEM,
    "gemm_any_wgmma": lambda w, s, _: any_wgmma_rules.shared_bytes(w, s),
    "gemm_dense": lambda w, s, _: s.num_stages * dense_rules.stage_bytes(s) + dense_rules.STATIC_SMEM,
    "attention_decode": lambda w, s, t: decode_rules.shared_bytes(w, s, t) + decode_rules.STATIC_SMEM,
    "attention_decode_bulk": lambda w, s, t: decode_rules.shared_bytes(w, s, t) + decode_rules.STATIC_SMEM,
    "quantize_rows": lambda w, s, _: quantize_rules.kept_bytes(w, s),
    "attention_prefill": lambda w, s, _: attention_rules.prefill_shared_bytes(w, s),
    "attention_prefill_mma": lambda w, s, _: attention_rules.prefill_shared_bytes(w, s),
}
CASES = (
    (W4, Schedule("gemm_wgmma", 128, 64, 64, 2, 4, min_blocks=2)),
    (W4, Schedule("gemm_mma", 128, 64, 64, 3, 8, min_blocks=2)),
    (W4, Schedule("gemm_stream", 64, 8, 64, 3, 4, min_blocks=2)),
    (W4, Schedule("gemm_stream_bulk", 64, 8, 64, 3, 4, min_blocks=2)),
    (W4, Schedule("gemm_stream_bulk", 64, 8, 64, 3, 4, min_blocks=3)),
    (replace(W4, format=QuantFormat.parse("w3a16_any")), Schedule("gemm_any", 16, 8, 1, 2, 4, min_blocks=2)),
    (replace(W4, m=64, format=QuantFormat.parse("w4a16_any")), Schedule("gemm_any_wgmma", 64, 64, 256, 4, 4, min_blocks=2)),
    (dense_rules.DenseWorkload(8, 4096, 4096), Schedule("gemm_dense", 64, 16, 64, 4, 4, min_blocks=3)),
    (DECODE, Schedule("attention_decode", 64, 8, 128, 3, 4, min_blocks=2)),
    (DECODE, Schedule("attention_decode_bulk", 64, 8, 128, 3, 4, min_blocks=3)),
    (QuantizeWorkload(64, 4096, norm=True, smooth=True), Schedule("quantize_rows", 1, 1, 1, 2, 8, min_blocks=2)),
    (PREFILL, Schedule("attention_prefill", 64, 64, 128, 2, 4, min_blocks=2)),
    (PREFILL, Schedule("attention_prefill_mma", 64, 64, 128, 1, 4, min_blocks=2)),
)


@pytest.mark.parametrize(("workload", "schedule"), CASES, ids=lambda value: getattr(value, "program", None) or value.title)
def test_each_block_costs_a_kilobyte_more(workload: Workload | AttentionWorkload | QuantizeWorkload, schedule: Schedule):
    assert legal(workload, schedule, H200) == []
    asked = ASKED[schedule.program](workload, schedule, replace(H200, smem_per_sm=0))
    least = schedule.min_blocks * (asked + 1024)
    assert legal(workload, schedule, replace(H200, smem_per_sm=least)) == []
    for few in (least - 1, schedule.min_blocks * asked):
        (reason,) = legal(workload, schedule, replace(H200, smem_per_sm=few))
        assert f"{schedule.min_blocks} blocks need {least} bytes of an SM's shared memory, {few} are there" in reason


EARLY = ("gemm_stream_bulk", "attention_decode_bulk")  # programs whose blocks start early, and would crowd an SM that is free


@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
@pytest.mark.parametrize("program", EARLY)
def test_one_block_more_than_meant_does_not_fit(program: str, blocks: int):
    workload, schedule = next((w, replace(s, num_stages=2, num_warps=2, min_blocks=blocks)) for w, s in CASES if s.program == program)
    assert legal(workload, schedule, H200) == []
    asked = ASKED[program](workload, schedule, H200) + 1024
    assert blocks * asked <= H200.smem_per_sm < (blocks + 1) * asked


def test_every_program_that_shares_an_sm_has_a_case():
    # append and gather take what memory they take: their schedules have no min_blocks
    rest = {name for name, rule in programs(arch="sm_90a").items() if "min_blocks" in rule.reads}
    assert {s.program for _, s in CASES} == rest
