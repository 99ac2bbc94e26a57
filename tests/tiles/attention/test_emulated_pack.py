"""The programs of full windows without a GPU: the pack, bit for bit against the numpy twin, and an append and a decode before it."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, product

import pytest
from emulation.device_code import needs_host_compiler
from emulation.generated_attention import GeneratedAttention
from kv_cases import FORMATS, poisoned_problem
from lanes import one_of_each

from tilebit.autotune.problems.attention import AttentionProblem
from tilebit.autotune.problems.attention_verify import AttentionGate
from tilebit.layouts.kv_formats import KVFormat
from tilebit.schedules.attention.decode import ASYNC, BULK
from tilebit.schedules.attention.workload import DTYPES, AttentionWorkload
from tilebit.schedules.operations import legal
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name
from tilebit.tiles.attention.pack import SEQUENCES

pytestmark = needs_host_compiler
TARGET = replace(target_from_name("sm_90a"), units=3)
HEADS = 2
FULL = (0, 1, 127, 128, 129, 255, 256, 384)
MANY = (*range(113, 113 + SEQUENCES), 256, 130)  # more sequences than a block looks at
KV4 = KVFormat.from_name("kv4_channel")


def packs() -> tuple[AttentionWorkload, ...]:
    """Every format in both dtypes; head dims and page sizes take turns."""
    head_dims, page_sizes = cycle((64, 128, 128)), cycle((16, 256, 64, 128, 32))
    kinds = product(DTYPES, FORMATS)
    found = [AttentionWorkload("pack", 4, 1, 1, HEADS, HEADS, next(head_dims), f, d, next(page_sizes)) for d, f in kinds]
    return (*found, *(replace(found[i], head_dim=256) for i in (4, 12)))


def label(w: AttentionWorkload) -> str:
    return f"{w.format.name}-{w.dtype}-d{w.head_dim}-page{w.page_size}"


def verified(workload: AttentionWorkload, schedule: Schedule, *problems: AttentionProblem) -> None:
    assert legal(workload, schedule, TARGET) == []
    kernel = GeneratedAttention(workload, schedule, TARGET, seed=1)
    verdict = AttentionGate(*problems).verify(lambda problem, outputs: kernel(problem.named(outputs)))
    assert verdict.ok, verdict.reasons


@pytest.mark.parametrize("workload", one_of_each(packs(), lambda w: (w.format.key_scales, w.format.value_scales)), ids=label)
def test_full_windows_go_to_their_pages(workload: AttentionWorkload):
    """In both layers, and nothing else changes."""
    schedule = Schedule("attention_pack", 128, 1, workload.head_dim, num_warps=8)
    verified(workload, schedule, *(poisoned_problem(workload, lengths, [0] * len(lengths), 3) for lengths in (FULL, MANY)))


@pytest.mark.parametrize("warps", [8, 16])
def test_an_append_leaves_a_window_that_it_fills(warps: int):
    workload = AttentionWorkload("append", 4, 1, 300, 4, HEADS, 64, KV4, page_size=64, rotary="half", queries=True, full_windows=True)
    problems = [poisoned_problem(workload, lengths, [int(n % 5 != 0) for n in lengths], 3) for lengths in (FULL, MANY)]
    verified(workload, Schedule("attention_append", 128, 1, 64, num_warps=warps), *problems)


@pytest.mark.parametrize(("program", "window"), [(BULK, 0), (ASYNC, 0), (BULK, 100)])
def test_a_decode_reads_all_of_a_full_window(program: str, window: int):
    workload = AttentionWorkload("decode", 4, 1, 300, 8, HEADS, 64, KV4, page_size=64, window=window, full_windows=True)
    problems = [poisoned_problem(workload, lengths, [0] * len(lengths), 3) for lengths in (FULL, MANY)]
    verified(workload, Schedule(program, 32, 8, 64, 2, 2), *problems)
