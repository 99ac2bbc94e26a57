"""The attention gate: right kernels pass for every format and option, and every way to be wrong is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilebit.autotune.problems.attention import attention_problem, edge_attention, random_attention
from tilebit.autotune.problems.attention_verify import AttentionGate, sequence_errors
from tilebit.layouts.kv import PAGE_SIZES
from tilebit.layouts.kv_formats import KVFormat
from tilebit.schedules.attention.workload import AttentionWorkload

from .attention_kernels import right

KV4 = KVFormat.from_name("kv4_channel")
FORMATS = [
    KVFormat.from_name(n) for n in ("kv16", "kv8_channel", "kv8_token", "kv4_channel", "kv2_token", "kvfp8", "k8_channel_v4", "kfp8_v2")
]
DECODE = AttentionWorkload("decode", 3, 2, 300, 4, 2, 64, KV4, page_size=32, lse=True)
APPEND = AttentionWorkload("append", 3, 40, 300, 2, 2, 64, KV4, page_size=32)
PREFILL = AttentionWorkload("prefill", 3, 20, 90, 4, 2, 64, KVFormat(), lse=True)
LATE = replace(APPEND, q_len=1, full_windows=True)
PACK = AttentionWorkload("pack", 3, 1, 1, 2, 2, 64, KV4, page_size=32)
GATHER = AttentionWorkload("gather", 3, 0, 300, 2, 2, 64, KV4)


def gate_of(workload: AttentionWorkload) -> AttentionGate:
    return AttentionGate(edge_attention(workload, 0), random_attention(workload, 1))


@pytest.mark.parametrize(
    "workload",
    [
        *(replace(DECODE, format=f, dtype=("float16", "bfloat16")[i % 2], page_size=PAGE_SIZES[i % 5]) for i, f in enumerate(FORMATS)),
        replace(DECODE, window=70, sink_tokens=3, sinks=True),
        replace(DECODE, soft_cap=20.0, scale=0.3, sinks=True),
        replace(DECODE, heads_q=14, head_dim=128, lse=False),
        replace(DECODE, full_windows=True),
        replace(PREFILL, window=11, sink_tokens=2, sinks=True),
        replace(PREFILL, soft_cap=5.0, dtype="bfloat16", heads_q=2),
        *(replace(GATHER, format=KVFormat.from_name(name)) for name in ("kv16", "kv2_token", "kvfp8", "k8_channel_v4")),
    ],
    ids=lambda w: f"{w.op}-{w.format.name}-{w.page_size}-{w.window}-{w.soft_cap}-{w.dtype}",
)
def test_the_definition_passes(workload):
    verdict = gate_of(workload).verify(right)
    assert verdict.ok, verdict.reasons
    assert verdict.rel_err is not None and verdict.rel_err < (2e-3 if workload.dtype == "float16" else 1e-2)


@pytest.mark.parametrize(
    ("name", "page_size"),
    [("kv16", 128), ("kv8_token", 64), ("kv4_channel", 16), ("kv2_channel", 32), ("kvfp8", 256), ("k16_v4", 256), ("kv4_channel", 256)],
)
def test_appending_token_by_token_passes(name, page_size):
    verdict = gate_of(replace(APPEND, format=KVFormat.from_name(name), page_size=page_size)).verify(right)
    assert verdict.ok, verdict.reasons


@pytest.mark.parametrize(("name", "page_size"), [("kv16", 128), ("kv4_channel", 16), ("kv2_token", 256), ("kvfp8", 64)])
def test_windows_that_are_packed_behind_pass(name, page_size):
    for workload in (LATE, PACK):
        verdict = gate_of(replace(workload, format=KVFormat.from_name(name), page_size=page_size)).verify(right)
        assert verdict.ok, verdict.reasons


def test_windows_that_are_packed_too_early_or_elsewhere_are_seen():
    def early(problem, outputs):
        right(replace(problem, workload=replace(problem.workload, full_windows=False)), outputs)

    assert "pages that hold none of the new groups" in " ".join(gate_of(LATE).verify(early).reasons)

    def first_layer_twice(problem, outputs):
        right(problem, outputs)
        outputs["pages"][1] = outputs["pages"][0]

    assert "layer 1: packed keys" in " ".join(gate_of(PACK).verify(first_layer_twice).reasons)
    assert "layer 0: packed keys" in " ".join(gate_of(PACK).verify(lambda problem, outputs: None).reasons)


@pytest.mark.parametrize("rotary", ["half", "interleaved"])
def test_rotated_keys_may_be_rounded_differently(rotary):
    gate = gate_of(replace(APPEND, rotary=rotary, dtype="bfloat16"))
    assert gate.verify(right).ok

    def unrotated(problem, outputs):
        right(replace(problem, workload=replace(problem.workload, rotary="")), outputs)

    assert "keys" in " ".join(gate.verify(unrotated).reasons)


def spoiled(name: str, change):
    """A right kernel after which ``change(tensor)`` happens to an output."""

    def run(problem, outputs):
        right(problem, outputs)
        change(outputs[name])

    return run


def off_by(amount: float):
    def change(tensor: torch.Tensor) -> None:
        tensor.view(-1)[-1] += amount

    return change


def unwritten(tensor: torch.Tensor) -> None:
    tensor.view(-1)[-1] = torch.nan


def stray(tensor: torch.Tensor) -> None:
    tensor.as_strided((1,), (1,), tensor.storage_offset() + tensor.numel()).zero_()


@pytest.mark.parametrize("workload", [DECODE, PREFILL], ids=lambda w: w.op)
@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("out", off_by(0.05), "relative error"),
        ("out", unwritten, "relative error of inf"),
        ("out", stray, "1 elements after the output were written"),
        ("lse", off_by(0.02), "log-sum-exp is off by"),
        ("lse", unwritten, "log-sum-exp is off by inf"),
        ("lse", stray, "lse: 1 elements after"),
    ],
)
def test_a_wrong_result_is_seen(workload, name, change, words):
    verdict = gate_of(workload).verify(spoiled(name, change))
    assert not verdict.ok and words in " ".join(verdict.reasons), verdict.reasons


def test_one_lost_token_of_many_is_seen():
    gate = AttentionGate(edge_attention(DECODE, 0), random_attention(replace(DECODE, kv_len=4000), 1))

    def forgetful(problem, outputs):
        changed = dict(problem.operands)
        lengths = [length - 1 if length > 3000 else length for length in problem.lengths]
        changed["lengths"] = torch.tensor(lengths, dtype=torch.int32)
        right(replace(problem, operands=changed), outputs)

    reasons = gate.verify(forgetful).reasons
    assert len(reasons) >= 1 and "kv_len=4000" in reasons[0] and "relative error" in reasons[0]


def every_second(amount: float):
    """A right kernel of whose every second call an output is off by ``amount``."""
    calls = []

    def run(problem, outputs):
        right(problem, outputs)
        calls.append(0)
        outputs["out"][-1, 0, 0, 0] += amount * (len(calls) % 2 == 0)

    return run


def test_unstable_results_are_seen():
    assert "two runs on the same input differ" in gate_of(DECODE).verify(every_second(1e-4)).reasons[0]


def test_last_bits_may_vary_where_the_gate_is_told_so():
    edges, random = edge_attention(DECODE, 0), random_attention(DECODE, 1)
    gate = AttentionGate(edges, random, reproducible=False)
    varying = gate.verify(every_second(1e-4))
    assert varying.ok, varying.reasons
    alike = gate.verify(right)
    assert varying.rel_err is not None and alike.rel_err is not None and varying.rel_err > alike.rel_err  # the second run's
    wrong = gate.verify(every_second(0.05))
    assert not wrong.ok and "relative error" in " ".join(wrong.reasons), wrong.reasons
    assert "1 elements after" in " ".join(gate.verify(spoiled("out", stray)).reasons)


def flip(tensor: torch.Tensor) -> None:
    tensor[:, 0, 0] ^= 1


@pytest.mark.parametrize("page_size", [16, 128, 256])
def test_a_wrong_cache_is_seen(page_size):
    gate = gate_of(replace(APPEND, page_size=page_size))
    everywhere = gate.verify(spoiled("pages", flip)).reasons
    assert "packed keys" in " ".join(everywhere) or "none of the new groups" in " ".join(everywhere)
    assert "window" in " ".join(gate.verify(spoiled("windows", flip)).reasons)
    assert "pages: 1 elements after" in " ".join(gate.verify(spoiled("pages", stray)).reasons)


@pytest.mark.parametrize(("word", "what"), [(0, "keys"), (-1, "values")])
def test_one_word_of_one_new_group_is_seen(word, what):
    def change(problem, outputs):
        right(problem, outputs)
        b = problem.lengths.index(max(problem.lengths))
        page = problem.operands["block_tables"][b, max(problem.lengths) // 128 * 4 - 1]
        outputs["pages"][page, 1, word] ^= 4

    edges = attention_problem(replace(APPEND, batch=2), [290, 17], [130, 17], 0)
    verdict = AttentionGate(edges, edges).verify(change)
    assert any(f"packed {what} of sequence 0, kv head 1, tokens from 128" in reason for reason in verdict.reasons), verdict.reasons


@pytest.mark.parametrize("where", ["pages", "windows"])
def test_writing_outside_of_the_new_groups_is_seen(where):
    used = {"pages": "block_tables", "windows": "slots"}[where]

    def change(problem, outputs):
        right(problem, outputs)
        free = set(range(len(outputs[where]))) - set(problem.operands[used].flatten().tolist())
        outputs[where][free.pop(), 0, 5] ^= 1

    words = {"pages": "none of the new groups were changed", "windows": "windows of other sequences"}[where]
    assert words in " ".join(gate_of(APPEND).verify(change).reasons)


@pytest.mark.parametrize("name", ["out_k", "out_v"])
def test_a_wrong_row_is_seen(name):
    reasons = gate_of(GATHER).verify(spoiled(name, off_by(0.25))).reasons
    assert f"{name}: 1 of" in reasons[0] and "and should be" in reasons[0]


def test_errors_by_sequence():
    expected = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    out = expected + torch.tensor([[0.3, 0.4], [0.0, 0.25], [0.0, 0.0], [0.0, torch.nan]])
    assert sequence_errors(out, expected, [1, 1, 0, 1, 1]).tolist() == pytest.approx([0.1, 0.25, 0.0, 0.0, torch.inf])
