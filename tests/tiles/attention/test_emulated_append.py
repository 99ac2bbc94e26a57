"""The append program without a GPU: the generated kernel on every thread of every block, bit for bit against the numpy twin."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, pairwise, product
from typing import Any

import pytest
import torch
from emulation.device_code import needs_host_compiler
from emulation.generated_attention import GeneratedAttention
from kv_cases import FORMATS, poisoned_problem
from lanes import one_of_each
from torch import Tensor

from tilebit.autotune.problems.attention import AttentionProblem
from tilebit.autotune.problems.attention_verify import AttentionGate
from tilebit.layouts.kv import RESIDUAL, KVLayout
from tilebit.layouts.kv_formats import KVFormat
from tilebit.schedules.attention.workload import DTYPES, AttentionWorkload
from tilebit.schedules.operations import legal
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name
from tilebit.tiles.attention.unpacked import unpack_cache

pytestmark = needs_host_compiler
TARGET = target_from_name("sm_90a")
HEADS = 2
# (tokens after the call, new ones): nothing, one, a full window, its borders, from one group's middle over the next, prompts
STEPS = (
    ((0, 0), (1, 1), (128, 1), (129, 1), (300, 2)),
    ((127, 127), (128, 128), (129, 129), (256, 255), (257, 2), (300, 44), (512, 130), (5, 0)),
)


def schedule(workload: AttentionWorkload, warps: int = 8) -> Schedule:
    found = Schedule("attention_append", RESIDUAL, 1, workload.head_dim, num_warps=warps)
    assert legal(workload, found, TARGET) == []
    return found


def cases() -> tuple[AttentionWorkload, ...]:
    """Every format in both dtypes; head dims, page sizes and rotary embeddings take turns, which do not keep step."""
    head_dims, page_sizes, rotary = cycle((64, 128, 128)), cycle((16, 256, 64, 128, 32)), cycle(("", "", "half", "", "interleaved", "", ""))
    found = [
        AttentionWorkload("append", 4, 1, 300, HEADS, HEADS, next(head_dims), format, dtype, next(page_sizes), rotary=next(rotary))
        for dtype, format in product(DTYPES, FORMATS)
    ]
    return (*found, *(replace(found[i], head_dim=256) for i in (4, 12)))


CASES = cases()


def label(w: AttentionWorkload) -> str:
    return f"{w.format.name}-{w.dtype}-d{w.head_dim}-page{w.page_size}{'-rotary-' * bool(w.rotary)}{w.rotary}"


def problem_of(workload: AttentionWorkload, steps: tuple[tuple[int, int], ...], seed: int) -> AttentionProblem:
    return poisoned_problem(workload, [length for length, _ in steps], [rows for _, rows in steps], seed)


def run(kernel: GeneratedAttention):
    return lambda problem, outputs: kernel(problem.named(outputs))


def test_the_cases_cover_everything():
    assert {(w.format, w.dtype) for w in CASES} == set(product(FORMATS, DTYPES))
    assert {w.rotary for w in CASES} == {"", "half", "interleaved"} and {w.head_dim for w in CASES} == {64, 128, 256}
    assert {(w.head_dim, w.page_size) for w in CASES} >= set(product((64, 128), (16, 32, 64, 128, 256)))
    assert {(w.format.key_scales, w.page_size) for w in CASES} >= set(product(("channel", "token"), (16, 64, 256)))


@pytest.mark.parametrize("workload", one_of_each(CASES, lambda workload: (workload.rotary, workload.format.key_scales)), ids=label)
def test_append(workload: AttentionWorkload):
    """The tuner's verdict: codes and parameters are the twin's, the window holds the rest, nothing else has changed."""
    kernel = GeneratedAttention(workload, schedule(workload), TARGET, seed=1)
    verdict = AttentionGate(*(problem_of(workload, steps, seed) for seed, steps in enumerate(STEPS))).verify(run(kernel))
    assert verdict.ok, verdict.reasons


NORM: dict[str, Any] = {"qk_norm": True, "norm_eps": 1e-5, "norm_offset": 1.0}
TURNS: tuple[tuple[int, str, dict[str, Any]], ...] = (  # head_dim, rotary, and the rest
    (64, "half", {}), (128, "half", NORM), (128, "interleaved", {"rotary_dim": 64}), (64, "interleaved", NORM | {"norm_offset": 0.0}),
    (256, "half", {"rotary_dim": 96}), (256, "interleaved", {}), (128, "", NORM), (64, "half", NORM | {"rotary_dim": 32}),
)  # fmt: skip
QUERIES = tuple(
    AttentionWorkload("append", 4, 1, 300, HEADS * group, HEADS, head_dim, format, dtype, rotary=rotary, queries=True, **options)
    for (head_dim, rotary, options), group, format, dtype in zip(
        TURNS, cycle((1, 4, 3, 5)), cycle(FORMATS[::2]), cycle(DTYPES), strict=False
    )
)


@pytest.mark.parametrize("workload", one_of_each(QUERIES, lambda workload: (workload.rotary, workload.qk_norm)), ids=label)
def test_queries(workload: AttentionWorkload):
    """Turned where their keys are, by whichever block; rows of q, k and v are slices of one product."""
    problems = [problem_of(workload, steps, seed) for seed, steps in enumerate(STEPS)]
    assert all(p.operands[name].stride(0) == (workload.heads_q + 2 * HEADS) * workload.head_dim for p in problems for name in "qkv")
    verdict = AttentionGate(*problems).verify(run(GeneratedAttention(workload, schedule(workload), TARGET, seed=1)))
    assert verdict.ok, verdict.reasons


APART = tuple(w for w in (*CASES, *QUERIES) if w.head_dim <= 128)


@pytest.mark.parametrize(
    "workload", one_of_each(APART, lambda w: (w.queries, w.qk_norm, w.format.key_scales, w.format.value_scales)), ids=label
)
def test_keys_and_values_with_warps_of_their_own(workload: AttentionWorkload):
    """Sixteen warps: the same codes, parameters, windows and queries."""
    kernel = GeneratedAttention(workload, schedule(workload, 16), TARGET, seed=1)
    verdict = AttentionGate(*(problem_of(workload, steps, seed) for seed, steps in enumerate(STEPS))).verify(run(kernel))
    assert verdict.ok, verdict.reasons


def extreme_rows(rows: int, channels: int, dtype: torch.dtype) -> Tensor:
    """[rows, HEADS, channels]: columns of one value, of zeros of both signs, of the largest and smallest numbers, of steps so small that a
    scale rounds to zero or to a subnormal, of exact ties; rows of one value."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, HEADS, channels, generator=generator)
    x[:, :, 0] = 1.5
    x[:, :, 1] = 0.0
    x[::2, :, 1] = -0.0
    x[:, :, 2] = 3e4 * torch.sign(x[:, :, 2])
    x[:, :, 3] = 1 + 2.0**-10 * (torch.arange(rows)[:, None] % 2)
    x[:, :, 4] = 6e-8 * (torch.arange(rows)[:, None] % 3)
    x[:, :, 5] = torch.arange(rows)[:, None] % 31 / 2  # between 0 and 15: codes of 4 bits are ties
    x[:, :, 6] = torch.arange(rows)[:, None] % 7 / 2
    x[:, :, 7] = 449 * torch.sign(x[:, :, 7])
    x[5] = -0.75
    x[6] = 0.0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", one_of_each(FORMATS[1:8], lambda f: (f.key_scales, f.value_scales)), ids=lambda f: f.name)
def test_extreme_numbers(format: KVFormat, dtype: str):
    """Bit for bit the twin's there too: parameters that round to 0, ties, saturation."""
    workload = AttentionWorkload("append", 4, 1, 300, HEADS, HEADS, 64, format, dtype, 128)
    problem = problem_of(workload, ((256, 256), (130, 130)), 1)
    for name in ("k", "v"):
        problem.operands[name] = extreme_rows(386, 64, getattr(torch, dtype))
    verdict = AttentionGate(problem, problem_of(workload, STEPS[0], 2)).verify(
        run(GeneratedAttention(workload, schedule(workload), TARGET))
    )
    assert verdict.ok, verdict.reasons


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kv4_channel", "kv2_token", "kvfp8", "kv16"])
def test_token_by_token_is_all_at_once(name: str):
    workload = AttentionWorkload("append", 1, 1, 300, HEADS, HEADS, 64, KVFormat.from_name(name), "float16", 64, rotary="half")
    kernel = GeneratedAttention(workload, schedule(workload), TARGET)
    problem = problem_of(workload, ((270, 270),), 7)
    o = problem.operands

    def cache_after(steps: list[tuple[int, int]]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Pages, and what the cache means, after rows [first, last) of each step."""
        state: dict[str, Any] = {**o, **problem.outputs()}
        for first, last in steps:
            state |= {"k": o["k"][first:last], "v": o["v"][first:last], "lengths": torch.tensor([last], dtype=torch.int32)}
            state |= {"cu_seqlens": torch.tensor([0, last - first], dtype=torch.int32)}
            kernel({name: tensor.contiguous() for name, tensor in state.items()})
        layout = KVLayout(workload.format, workload.head_dim, workload.page_size)
        s, scales = state, o.get("head_scales")
        return s["pages"], unpack_cache(
            s["pages"], s["windows"], s["block_tables"], s["slots"], s["lengths"], layout, torch.float16, scales
        )

    at_once, one_by_one, uneven = (
        cache_after(list(pairwise(bounds))) for bounds in ([0, 270], list(range(271)), [0, 1, 100, 127, 130, 256, 260, 270])
    )
    for pages, sequences in (one_by_one, uneven):
        assert torch.equal(pages, at_once[0])
        assert all(torch.equal(a, b) for pair in zip(sequences, at_once[1], strict=True) for a, b in zip(*pair, strict=True))
