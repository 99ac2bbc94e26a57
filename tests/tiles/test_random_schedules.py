"""What a rule calls legal is right: random workloads and schedules, each judged by the tuner's gate on the emulated kernel.

    TILEBIT_SCHEDULES_MINUTES=10 python -m pytest tests/tiles/test_random_schedules.py

tries new ones for as long, of each program in turn.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
from emulation.device_code import needs_host_compiler
from emulation.generated_attention import GeneratedAttention
from emulation.generated_gemm import GeneratedGemm
from kv_cases import FORMATS as KV_FORMATS
from kv_cases import poisoned_problem

from tilebit.autotune.problems import Verdict
from tilebit.autotune.problems.attention_verify import AttentionGate
from tilebit.autotune.problems.verify import gate
from tilebit.layouts.formats import FORMATS
from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.gemm.parts import ACTIVATIONS
from tilebit.schedules.gemm.workload import DTYPES, Workload
from tilebit.schedules.operations import find_rule, legal
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target, target_from_name

pytestmark = needs_host_compiler
MINUTES = float(os.environ.get("TILEBIT_SCHEDULES_MINUTES", "0"))
CASES, SEED = 2, 4  # of a program, else: decode's by bulk copies have odd numbers of warps and stages, whose results lay unaligned once
GEMM = ("gemm_stream", "gemm_stream_bulk", "gemm_any", "gemm_any_binary", "gemm_any_wgmma")
ATTENTION = ("attention_decode", "attention_decode_bulk", "attention_append", "attention_pack", "attention_gather")
HOPPER = target_from_name("sm_90a")
MOST_WARPS = 32  # of a cluster, for which the emulation has room
LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 255, 256, 257, 300, 384, 391, 513)
Case = tuple[Workload | AttentionWorkload, Schedule, Target]


def drawn_product(random: Random) -> Workload:
    """Raises ``ValueError`` for what no product is."""
    n, k = random.choice((64, 96, 100, 160, 192, 224, 250, 320, 448)), random.choice((64, 96, 128, 200, 320, 500, 512, 640))
    parts: tuple[dict[str, object], ...] = (
        {}, {}, {"bias": True}, {"residual": True}, {"gate": random.choice(ACTIVATIONS)}, {"width": n + 40}, {"norm": True, "eps": 1e-5},
    )  # fmt: skip
    sizes = random.choice((1, 2, 3, 5, 8, 13, 16, 17, 33, 64)), n, k
    return Workload(*sizes, random.choice(list(FORMATS.values())), random.choice(DTYPES), **random.choice(parts))  # type: ignore[arg-type]


def near(random: Random, schedule: Schedule, workload: Workload) -> Schedule:
    """A legal schedule not far from this one, which its program tries."""
    for name in random.sample(sorted(find_rule(schedule.program).reads), 3):
        value = getattr(schedule, name)
        others = (not value,) if isinstance(value, bool) else (value // 2, value - 1, value + 1, value * 3 // 2, value * 2)
        other = replace(schedule, **{name: random.choice(others)})
        schedule = schedule if legal(workload, other, HOPPER) else other
    return schedule


def drawn_attention(random: Random, program: str) -> Case:
    """Of caches and kernels, legal or not. Raises ``ValueError`` for what no operation is."""
    heads, group, width = random.choice((1, 2, 3)), random.choice((1, 3, 4, 7, 8, 16)), random.choice((64, 128, 256))
    full, rotary = random.random() < 0.3, random.choice(("half", "interleaved"))
    options: dict[str, dict[str, object]] = {
        "decode": {
            "window": random.choice((0, 0, 1, 100, 129)), "sink_tokens": random.choice((0, 4, 20)), "sinks": random.random() < 0.3,
            "soft_cap": random.choice((0.0, 3.0)), "lse": random.random() < 0.5, "full_windows": full,
        },
        "append": {"rotary": rotary, "queries": True, "rotary_dim": random.choice((0, 32)), "full_windows": full},
    }  # fmt: skip
    op = program.split("_")[1]
    workload = AttentionWorkload(
        op, 4, 1, 400, heads * group, heads, width, random.choice(KV_FORMATS), random.choice(DTYPES),
        random.choice((16, 32, 64, 128, 256)), **options.get(op, {}),  # type: ignore[arg-type]
    )  # fmt: skip
    schedule = Schedule(program, 128, 1, width, num_warps=random.choice((1, 2, 4, 8, 16)))
    if op == "decode":
        sizes = random.choice((16, 32, 64, 128)), random.choice((8, 16, 32)), width, random.choice(range(2, 8)), random.choice(range(1, 17))
        schedule = Schedule(program, *sizes, min_blocks=random.choice((1, 1, 2, 3)))
    return workload, schedule, replace(HOPPER, units=random.choice((1, 2, 3, 5, 7)))


def cases(program: str, random: Random) -> Iterator[Case]:
    rule = find_rule(program)
    while True:
        try:
            if program in ATTENTION:
                case = drawn_attention(random, program)
            else:
                workload = drawn_product(random)
                tried = [] if rule.unserved(workload, HOPPER.arch) else rule.candidates(workload, HOPPER)
                case = workload, near(random, random.choice(tried), workload), HOPPER
        except (ValueError, IndexError):  # no such workload, or none of this program
            continue
        if case[1].split_k * case[1].num_warps <= MOST_WARPS and not legal(*case):
            yield case


def verdict(case: Case, random: Random) -> Verdict:
    workload, schedule, target = case
    seed = random.randrange(1 << 20)
    if isinstance(workload, Workload):
        return gate(workload, seed, target.arch, "cpu").verify(GeneratedGemm(workload, schedule, target))
    kernel = GeneratedAttention(workload, schedule, target, seed=1)
    problems = []
    for count in (4, 2):
        lengths = [random.choice(LENGTHS) for _ in range(count)]
        new = [min(length, 1) if workload.full_windows else random.randrange(min(length, 140) + 1) for length in lengths]
        problems.append(poisoned_problem(workload, lengths, new if workload.op == "append" else [0] * count, seed))
    return AttentionGate(*problems).verify(lambda problem, outputs: kernel(problem.named(outputs)))


@pytest.mark.timeout(120 + 60 * MINUTES)
@pytest.mark.parametrize("program", GEMM + ATTENTION)
def test_a_legal_schedule_is_right(program: str):
    seed = time.time_ns() if MINUTES else SEED
    random = Random(seed)
    until = time.monotonic() + 60 * MINUTES / len(GEMM + ATTENTION)
    for done, case in enumerate(cases(program, random)):
        if time.monotonic() >= until and (MINUTES or done >= CASES):
            break
        found = verdict(case, random)
        assert found.ok, (seed, case, found.reasons)
