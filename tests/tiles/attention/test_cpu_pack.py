"""The CPU programs of full windows: an append that packs nothing, a decode that reads 128 tokens of a window, and the pack behind them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cpu_attention import PAGES, Case, call, case, kernel_of, name_of, verdict, workload
from kv_cases import FORMATS, poisoned_problem

from tilebit.autotune.problems.attention import AttentionProblem
from tilebit.layouts.kv import HEAD_DIMS, RESIDUAL
from tilebit.schedules.attention.workload import AttentionWorkload

LENGTHS = (0, 1, 127, 128, 129, 255, 256, 384, 512)
PACKS = [
    case(AttentionWorkload("pack", 1, 1, 1, heads, heads, head_dim, form, dtype, page))
    for form, head_dim, dtype, page, heads in zip(
        FORMATS, HEAD_DIMS * 4, ("float16", "bfloat16") * 6, [PAGES[i * 3 % 5] for i in range(11)], (1, 2) * 6, strict=False
    )
]


@pytest.mark.parametrize("one", [p if i % 4 == 1 else pytest.param(p, marks=pytest.mark.slow) for i, p in enumerate(PACKS)], ids=name_of)
def test_a_pack_is_the_twin(one: Case):
    none, other = [0] * len(LENGTHS), [[128, 300, 1024], [0, 127, 129]]
    edges = poisoned_problem(one[0], LENGTHS, none, seed=3)
    for lengths in other:
        assert verdict(kernel_of(one), edges, poisoned_problem(one[0], lengths, none[:3], seed=4)) == ()


@pytest.mark.parametrize("name", ["kv4_channel", "kv16", "kvfp8"])
def test_an_append_of_full_windows_packs_nothing(name: str):
    w = workload("append", name, heads_q=4, heads_kv=2, rotary="half", queries=True, full_windows=True)
    rows = [int(length % 5 != 0) for length in LENGTHS]
    edges = poisoned_problem(w, LENGTHS, rows, seed=3)
    assert verdict(kernel_of(case(w)), edges, poisoned_problem(w, [128, 300, 1024], [1, 1, 1], seed=4)) == ()


@pytest.mark.parametrize("name", ["kv4_channel", "k8_channel_v4", "kvfp8"])
def test_a_decode_reads_full_windows(name: str):
    w = replace(workload("decode", name, heads_q=4, heads_kv=2, full_windows=True), q_len=2)
    edges = poisoned_problem(w, LENGTHS, [0] * len(LENGTHS), seed=3)
    assert verdict(kernel_of(case(w)), edges, poisoned_problem(w, [128, 300, 1024], [0] * 3, seed=4)) == ()


def test_appends_and_packs_give_the_bits_of_appends():
    """Token by token over two groups, with a pack behind each."""
    w = workload("append", "kv4_token", heads_q=1)
    problem = poisoned_problem(w, [2 * RESIDUAL + 3], [2 * RESIDUAL + 3], seed=5)
    at_once = call(kernel_of(case(w)), problem)
    late, pack = (kernel_of(case(replace(w, **changes))) for changes in ({"full_windows": True}, {"op": "pack"}))
    state = {name: problem.operands[name].clone() for name in at_once}
    for done in range(2 * RESIDUAL + 3):
        given = {name: problem.operands[name][done : done + 1].contiguous() for name in "kv"}
        given |= {"cu_seqlens": torch.tensor([0, 1], dtype=torch.int32), "lengths": torch.tensor([done + 1], dtype=torch.int32)}
        now = replace(problem, operands=problem.operands | given)
        call(late, now, state)
        layered = {name: tensor[None] for name, tensor in state.items()}
        call(pack, AttentionProblem(replace(w, op="pack"), now.operands | layered, {}), {"pages": layered["pages"]})
    assert torch.equal(state["pages"], at_once["pages"])
    after = [replace(problem, operands=problem.operands | cache).cache() for cache in (state, at_once)]
    assert all(torch.equal(a, b) for a, b in zip(*(pair[0] for pair in after), strict=True))
