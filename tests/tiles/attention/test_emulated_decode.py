"""The decode programs without a GPU: the whole kernel that TileLang generates, on every thread of every block, against fp64.

The generated CUDA and the device functions in it are compiled for the host, their PTX included; copies land as late as they may,
and what they will overwrite is spoilt when they are issued. What the cache does not hold is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from emulation.device_code import KernelFault, needs_host_compiler
from emulation.emulated_program import Edits
from emulation.generated_attention import GeneratedAttention
from emulation.planted_attention import once
from kv_cases import FORMATS, poisoned_problem
from lanes import one_of_each

from tilebit.autotune.problems import Verdict
from tilebit.autotune.problems.attention import AttentionProblem
from tilebit.autotune.problems.attention_verify import AttentionGate
from tilebit.layouts.kv_formats import KVFormat
from tilebit.schedules.attention.decode import ASYNC, BULK
from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.gemm.rules import TICKETS
from tilebit.schedules.operations import legal
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target, target_from_name
from tilebit.tiles.attention.cache import KINDS

pytestmark = needs_host_compiler
LENGTHS = (0, 1, 15, 16, 17, 63, 64, 127, 128, 129, 255, 256, 257, 300, 384, 391, 513)
Q_LENS = (1, 2, 5, 16)
# What scores pass through: (window, sink_tokens, sinks, soft_cap, scale)
SOFTMAXES = (
    (0, 0, False, 0.0, None), (0, 0, True, 0.0, 0.31), (100, 0, False, 0.0, None), (64, 4, False, 3.0, None), (129, 20, True, 0.0, None),
    (1, 0, True, 0.0, None), (0, 0, False, 1.5, 0.2),
)  # fmt: skip
AXES = {
    "group": (1, 4, 7, 8, 16),
    "head_dim": (64, 128),
    "dtype": ("float16", "bfloat16"),
    "softmax": SOFTMAXES,
    "lse": (False, True),
    "block_n": (16, 32, 64, 128),
    "block_m": (8, 16, 32),
    "num_warps": (1, 2, 3, 4),
    "num_stages": (2, 3, 4),
    "program": (ASYNC, BULK),
    "units": (2, 3, 5),
}
PAGE_SIZES = (16, 64, 128, 256)
STORED = (*product(FORMATS, PAGE_SIZES), *((format, 32) for format in FORMATS[3::4]))
# Every format meets nearly every page size; of these axes every two values meet too.
MEET = (
    ("format", "head_dim"), ("format", "dtype"), ("format", "block_n"), ("format", "program"), ("page_size", "block_n"),
    ("page_size", "program"), ("page_size", "head_dim"), ("group", "block_m"), ("group", "softmax"), ("softmax", "block_n"),
    ("softmax", "program"), ("softmax", "lse"), ("num_warps", "num_stages"), ("block_n", "num_warps"), ("num_stages", "program"),
)  # fmt: skip
WIDE = 6  # cases of 256 channels, which are few because they are slow
Case = tuple[AttentionWorkload, Schedule, Target]


@dataclass(frozen=True, slots=True)
class Choice:
    """One value of each axis."""

    values: dict[str, Any]

    def case(self) -> Case:
        v = self.values
        window, sink_tokens, sinks, soft_cap, scale = v["softmax"]
        workload = AttentionWorkload(
            "decode", 4, 1, 400, 2 * v["group"], 2, v["head_dim"], v["format"], v["dtype"], v["page_size"], window, sink_tokens, sinks,
            soft_cap, scale, v["lse"],
        )  # fmt: skip
        schedule = Schedule(v["program"], v["block_n"], v["block_m"], v["head_dim"], v["num_stages"], v["num_warps"])
        return workload, schedule, replace(target_from_name("sm_90a"), units=v["units"])

    def pairs(self) -> set[tuple[Any, ...]]:
        """The values that meet here, of the axes that must meet."""
        return {(a, self.values[a], b, self.values[b]) for a, b in MEET}


def choices() -> Iterator[Choice]:
    """Of each format and page size the legal one among random choices that lets most pairs meet for the first time."""
    random, met = Random(1), set()
    for i, (format, page_size) in enumerate(STORED):
        given = {"format": format, "page_size": page_size, "block_n": AXES["block_n"][(i + FORMATS.index(format)) % 4]}
        found = [Choice({**{name: random.choice(values) for name, values in AXES.items()}, **given}) for _ in range(100)]
        if i % (len(STORED) // WIDE) == 0:
            found = [Choice({**c.values, "head_dim": 256}) for c in found]
        best = max((c for c in found if not legal(*c.case())), key=lambda c: len(c.pairs() - met))
        met |= best.pairs()
        yield best


CHOICES = tuple(choices())
CASES = tuple(choice.case() for choice in CHOICES)


def label(case: Case) -> str:
    w, s, target = case
    kind = f"{w.format.name}-{w.dtype}-d{w.head_dim}-group{w.group}-page{w.page_size}"
    softmax = f"window{w.window}+{w.sink_tokens}{'-sinks' * w.sinks}-cap{w.soft_cap:g}{'-lse' * w.lse}"
    return f"{kind}-{softmax}-{s.program}-{s.block_n}x{s.block_m}-{s.num_warps}w{s.num_stages}s-{target.units}"


def test_the_cases_cover_everything():
    met = set().union(*(choice.pairs() for choice in CHOICES))
    axes = {"format": FORMATS, "page_size": PAGE_SIZES, **AXES}
    missing = [(a, x, b, y) for a, b in MEET for x, y in product(axes[a], axes[b]) if (a, x, b, y) not in met]
    assert not missing, missing
    assert {f.key for f in FORMATS} == {f.value for f in FORMATS} == set(KINDS)
    assert sum(w.head_dim == 256 for w, _, _ in CASES) >= WIDE


def problems(case: Case, seed: int) -> Iterator[AttentionProblem]:
    """One query a sequence, and several where heads are few."""
    random, workload = Random(seed), case[0]
    several = random.choice([n for n in Q_LENS if n * workload.group <= 64 and (n > 1 or workload.group == 16)])
    for q_len, count in ((1, 5), (several, 3)):
        lengths = random.sample(LENGTHS, count)
        yield poisoned_problem(replace(workload, q_len=q_len), lengths, [0] * count, random.randrange(1 << 20))


@pytest.mark.parametrize("case", one_of_each(CASES, lambda case: (case[1].program, case[0].format.key_scales)), ids=label)
def test_decode(case: Case):
    """The tuner's verdict, on one kernel and its workspace: right, and the same bits whatever the order of the blocks."""
    kernel = GeneratedAttention(*case, seed=1)

    def run(problem: AttentionProblem, outputs: dict[str, torch.Tensor]) -> None:
        kernel(problem.named(outputs))
        assert not kernel.tickets_left

    verdict = AttentionGate(*problems(case, CASES.index(case))).verify(run)
    assert verdict.ok, verdict.reasons


ADDED = "for (int share = 0; share < shares; share += AT_ONCE)"
MANY_SHARES = {  # what reduce.cuh does with the parts of one segment, eight at a time
    "as it is": {},
    "parts after the eighth lost": {"device": once((ADDED, ADDED.replace("share < shares", "share < min(shares, AT_ONCE)")))},
    "parts of before under another maximum": {
        "device": once(("const float factor = exp2_fast(top - higher);", "const float factor = 1.0f;"))
    },
}


@pytest.mark.parametrize("bug", ["as it is", *(pytest.param(b, marks=pytest.mark.slow) for b in list(MANY_SHARES)[1:])])
def test_more_blocks_share_a_sequence_than_are_added_at_once(bug: str):
    workload = AttentionWorkload("decode", 1, 1, 1900, 4, 1, 64, KVFormat.from_name("kv4_token"), page_size=64, scale=0.4, lse=True)
    target = replace(target_from_name("sm_90a"), units=20)
    kernel = GeneratedAttention(workload, Schedule(BULK, 32, 8, 64, 2, 2), target, MANY_SHARES[bug], seed=1)

    def run(problem: AttentionProblem, outputs: dict[str, torch.Tensor]) -> None:
        kernel(problem.named(outputs))
        assert not kernel.tickets_left

    verdict = AttentionGate(*(poisoned_problem(workload, [length], [0], seed) for seed, length in enumerate((1900, 1234)))).verify(run)
    assert verdict.ok == (bug == "as it is"), verdict.reasons


SHARED_OUT = {  # lengths of sequences, blocks: partial results that blocks write
    "a segment a block": ((300, 290), 4, 0),
    "two segments a block": ((300, 300, 257, 310), 4, 0),
    "three segments a block, of two sequences": ((300, 300, 290), 2, 0),
    "two blocks a segment": ((513, 520), 8, 8),
    "one sequence is much longer": ((513, 40), 4, 5),
    "blocks would have nothing": ((300, 300, 300), 8, 12),
    "a segment has fewer units than parts": ((254, 20), 12, 14),
    "a sequence has nothing": ((300, 0), 4, 4),
}


TWO, THREE, HALVES = "two segments a block", "three segments a block, of two sequences", "two blocks a segment"
WRONGLY_DEALT = {  # how segments are shared out, a file, what it says and what it would say
    "the next block's segment": (TWO, "device", "int segment = block / parts * each", "int segment = (block + 1) / parts * each"),
    "the last segment left out": (TWO, "device", "left = min(each, segments - segment)", "left = min(each, segments - segment - 1)"),
    "another sequence's left out": (THREE, "device", "left -= here;", "left = 0;"),
    "a unit that both parts have": (HALVES, "device", "(block % parts + 1) / parts;", "(block % parts + 1) / parts + 1;"),
    "a part of nothing": ("a segment has fewer units than parts", "device", "units >= found", "units > 0"),
    "whose ticket it is": (HALVES, "decode.py", "first = block - block % shares", "first = block"),
}


def verdict_of(name: str, edits: Edits | None = None) -> tuple[Verdict, int]:
    """What the gate says of a kernel that shares ``SHARED_OUT[name]`` out, and the partial results that its last launch left."""
    lengths, blocks, _ = SHARED_OUT[name]
    workload = AttentionWorkload("decode", len(lengths), 1, 300, 8, 2, 64, KVFormat.from_name("kv4_channel"), page_size=64, lse=True)
    schedule = Schedule(BULK, 32, 8, 64, 2, 2)
    kernel = GeneratedAttention(workload, schedule, replace(target_from_name("sm_90a"), units=blocks), edits, seed=1)

    def run(problem: AttentionProblem, outputs: dict[str, torch.Tensor]) -> None:
        kernel(problem.named(outputs))
        if kernel.tickets_left:
            raise KernelFault("tickets are left behind")

    verdict = AttentionGate(*(poisoned_problem(workload, lengths, [0] * len(lengths), seed) for seed in (5, 6))).verify(run)
    (workspace,) = kernel.workspaces.values()
    parts = workspace[TICKETS:].view(2 * blocks, schedule.block_m * (workload.head_dim + 2))
    return verdict, int((parts != -1).any(1).sum())


@pytest.mark.parametrize("name", SHARED_OUT)
def test_segments_are_cut_where_whole_ones_would_be_unfair(name: str):
    verdict, parts = verdict_of(name)
    assert verdict.ok, verdict.reasons
    assert parts == SHARED_OUT[name][2]


@pytest.mark.parametrize("bug", one_of_each(tuple(WRONGLY_DEALT), lambda bug: WRONGLY_DEALT[bug][1]))
def test_segments_wrongly_dealt_are_found(bug: str):
    name, file, right, wrong = WRONGLY_DEALT[bug]
    with suppress(KernelFault):  # is found, too
        verdict, _ = verdict_of(name, {file: once((right, wrong))})
        assert not verdict.ok
