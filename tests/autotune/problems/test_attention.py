"""Random attention problems: caches of the asked sizes, in random places, with values such as a model's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilebit.autotune.problems.attention import (
    attention_problem,
    edge_attention,
    exact_attention,
    random_attention,
    torch_attention,
)
from tilebit.autotune.problems.gemm import split_workspace
from tilebit.layouts.kv_formats import KVFormat
from tilebit.schedules.attention.workload import OPS, AttentionWorkload
from tilebit.schedules.gemm.rules import TICKETS
from tilebit.schedules.operations import params
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name

KV4 = KVFormat.from_name("kv4_channel")
DECODE = AttentionWorkload("decode", 5, 2, 700, 4, 2, 64, KV4, page_size=32, lse=True)
PROGRAMS = {op: f"attention_{op}" for op in OPS}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("options", [{}, {"format": KVFormat.from_name("kvfp8"), "sinks": True, "rotary": "half", "lse": False}])
def test_problems_hold_what_kernels_take(op, options):
    workload = replace(DECODE, op=op, **options)
    problem = random_attention(workload, 0)
    taken = params(workload, Schedule(PROGRAMS[op], 128, 8, 64), target_from_name("sm_80"))
    assert set(taken) - {"workspace"} == set(problem.named(problem.outputs()))


def test_caches_lie_in_random_pages():
    problem = random_attention(DECODE, 3)
    o, lengths = problem.operands, problem.lengths
    assert lengths[0] == 700 and all(700 - 88 < length <= 700 for length in lengths) and len(set(lengths)) > 1
    used = [page for row in o["block_tables"].tolist() for page in row if page >= 0]
    assert len(used) == len(set(used)) == sum(length // 128 * 4 for length in lengths)
    assert used != sorted(used) and max(used) < len(o["pages"]) == len(used) + 2
    assert sorted(o["slots"].tolist()) == sorted(set(o["slots"].tolist())) and len(o["windows"]) == 6
    for row, length in zip(o["block_tables"].tolist(), lengths, strict=True):
        assert [page >= 0 for page in row] == [index < length // 128 * 4 for index in range(len(row))], (
            "entries that nobody may read are -1"
        )
    assert o["pages"].shape[2] == DECODE.layout.page_words


@pytest.mark.parametrize("name", ["kv16", "kv8_channel", "kv4_token", "kv2_channel", "kvfp8"])
def test_values_are_about_normal(name):
    for k_or_v in zip(*random_attention(replace(DECODE, format=KVFormat.from_name(name)), 1).cache(), strict=True):
        values = torch.cat(k_or_v)
        assert abs(float(values.mean())) < 0.1 and 0.7 < float(values.std()) < 1.4 and bool(values.isfinite().all())


@pytest.mark.parametrize("op", OPS)
def test_edges_hold_the_lengths_at_which_kernels_go_wrong(op):
    problem = edge_attention(replace(DECODE, op=op, page_size=64), 0)
    assert {0, 1, 127, 128, 129} <= set(problem.lengths)
    assert op == "prefill" or {63, 65, 128} <= set(problem.lengths), "a page is of 64 tokens"
    assert op != "decode" or problem.workload.q_len == 3, "another q_len than the one that the schedule was chosen for"
    if op == "append":
        rows = problem.operands["cu_seqlens"].diff().tolist()
        assert 0 in rows and max(rows) > 128 and all(new <= length for new, length in zip(rows, problem.lengths, strict=True))
        late = edge_attention(replace(DECODE, op=op, page_size=64, full_windows=True), 0)
        new = dict(zip(late.lengths, late.operands["cu_seqlens"].diff().tolist(), strict=True))
        assert set(new.values()) == {0, 1} and new[128] == 1, "one token a sequence, and a window that it fills"


def test_seeds_decide():
    one, same, other = (random_attention(DECODE, seed).operands for seed in (0, 0, 1))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["pages"], other["pages"]) and not torch.equal(one["q"], other["q"])


def test_copies_share_no_memory():
    problem = random_attention(DECODE, 0)
    copy = problem.copied()
    for name, tensor in problem.operands.items():
        assert torch.equal(tensor, copy.operands[name]) and tensor.data_ptr() != copy.operands[name].data_ptr()


def test_appends_write_to_copies():
    problem = random_attention(replace(DECODE, op="append"), 0)
    outputs = problem.outputs()
    assert torch.equal(outputs["pages"], problem.operands["pages"])
    assert outputs["pages"].data_ptr() != problem.operands["pages"].data_ptr()
    assert problem.named(outputs)["pages"] is outputs["pages"]


@pytest.mark.parametrize(
    "options", [{}, {"window": 30, "sink_tokens": 3}, {"sinks": True}, {"soft_cap": 4.0, "sinks": True}, {"scale": 0.5, "window": 9}]
)
@pytest.mark.parametrize("op", ["decode", "prefill"])
def test_torchs_attention_is_the_references(op, options):
    problem = attention_problem(replace(DECODE, op=op, q_len=3, **options), [0, 2, 40, 300], [0, 2, 30, 7], 0)
    (out, lse), (expected, expected_lse) = problem.attended(torch_attention), problem.attended(exact_attention)
    assert out.dtype == torch.float16 and float((out.double() - expected).abs().max()) < 1e-2
    assert torch.equal(lse.isinf(), expected_lse.isinf()) and float((lse - expected_lse).nan_to_num().abs().max()) < 1e-2


def test_chunks_change_nothing(monkeypatch):
    problem = attention_problem(replace(DECODE, op="prefill", window=20), [90, 33], [70, 33], 0)
    whole = problem.attended(exact_attention)
    monkeypatch.setattr("tilebit.autotune.problems.attention.CHUNK_SCORES", 4 * 90 * 8)
    chunked = problem.attended(exact_attention)
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(whole, chunked, strict=True))


def test_decode_kernels_get_a_workspace():
    schedule = Schedule("attention_decode", 64, 8, 64, 2, 4)
    words = split_workspace(DECODE, schedule, target_from_name("sm_80"), "cpu")["workspace"]
    assert words[:TICKETS].eq(0).all() and words[TICKETS:].view(torch.float32).isnan().all()
    assert len(words) == TICKETS + 108 * 2 * 8 * (64 + 2)
    assert split_workspace(DECODE, Schedule("attention_decode_cpu", 16, 1, 64), target_from_name("cpu"), "cpu") == {}
