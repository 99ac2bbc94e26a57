"""What a rule calls legal is right: random workloads and schedules, each judged by the tuner's gate on the emulated kernel, of CPUs
on the kernel itself.

    TILEBIT_SCHEDULES_MINUTES=10 python -m pytest tests/tiles/test_random_schedules.py

tries new ones for as long, of each program in turn.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
from cpu_cases import FEATURES, INTEGER_FEATURES, built, runs_here
from cpu_cases import target as cpu_target
from emulation.device_code import needs_host_compiler
from emulation.emulated_gemm import EmulatedGemm
from emulation.generated_attention import GeneratedAttention
from emulation.generated_dense import GeneratedDense
from emulation.generated_gemm import GeneratedGemm
from emulation.generated_glue import GeneratedGlue
from emulation.generated_quantize import GeneratedQuantize
from kv_cases import FORMATS as KV_FORMATS
from kv_cases import poisoned_problem, prefill_problem

from tilebit.autotune.problems import Verdict, gate_of
from tilebit.autotune.problems.attention_verify import AttentionGate
from tilebit.autotune.problems.gemm import split_workspace
from tilebit.autotune.worker_process import launch
from tilebit.layouts.formats import FORMATS
from tilebit.schedules.activations.glue import GlueWorkload
from tilebit.schedules.activations.workload import GROUPS, OUTS, QuantizeWorkload
from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.gemm.dense import DenseWorkload
from tilebit.schedules.gemm.parts import ACTIVATIONS
from tilebit.schedules.gemm.workload import DTYPES, Workload
from tilebit.schedules.operations import find_rule, legal, programs
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target, target_from_name
from tilebit.tiles.compiler.compile import CompileRequest

pytestmark = needs_host_compiler
MINUTES = float(os.environ.get("TILEBIT_SCHEDULES_MINUTES", "0"))
CASES, SEED = 2, 4  # of a program, else: decode's by bulk copies have odd numbers of warps and stages, whose results lay unaligned once
TILED = ("gemm_wgmma", "gemm_mma")  # run from their own text
GEMM = ("gemm_stream", "gemm_stream_bulk", "gemm_any", "gemm_any_binary", "gemm_any_wgmma", *TILED)
CACHE = ("attention_decode", "attention_decode_bulk", "attention_append", "attention_pack", "attention_gather")
PREFILL = ("attention_prefill", "attention_prefill_mma")
ROWS = ("quantize_rows", "norm_rows", "gated_rows")
DENSE = ("gemm_dense",)
ISAS = [isa for isa in (*FEATURES, *INTEGER_FEATURES) if runs_here(isa)]  # of this machine
CPU = tuple(programs(arch="cpu")) if ISAS else ()
PROGRAMS = GEMM + DENSE + CACHE + PREFILL + ROWS + CPU
HOPPER = target_from_name("sm_90a")
MOST_WARPS = 32  # of a cluster, for which the emulation has room
LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 255, 256, 257, 300, 384, 391, 513)
Asked = Workload | DenseWorkload | AttentionWorkload | QuantizeWorkload | GlueWorkload
Case = tuple[Asked, Schedule, Target]


def drawn_product(random: Random, program: str) -> Workload:
    """Raises ``ValueError`` for what no product is."""
    n, k = random.choice((64, 96, 100, 160, 192, 224, 250, 320, 448)), random.choice((64, 96, 128, 200, 320, 500, 512, 640))
    parts: tuple[dict[str, object], ...] = (
        {}, {}, {"bias": True}, {"residual": True}, {"gate": random.choice(ACTIVATIONS)},
        {"gate": random.choice(ACTIVATIONS), "gate_halves": True}, {"width": n + 40}, {"norm": True, "eps": 1e-5},
    )  # fmt: skip
    if program == "gemm_wgmma" and random.random() < 0.2:  # tiles of bytes whose nibbles are rows
        n = n // 32 * 32
        parts = ({"width": random.choice(range(n // 2, n)), "nibbles": True, "bias": random.random() < 0.5},)
    sizes = random.choice((1, 2, 3, 5, 8, 13, 16, 17, 33, 64, *((100, 130, 200, 290) if program in TILED else ()))), n, k
    return Workload(*sizes, random.choice(list(FORMATS.values())), random.choice(DTYPES), **random.choice(parts))  # type: ignore[arg-type]


def drawn_rows(random: Random, program: str) -> QuantizeWorkload | GlueWorkload:
    """Raises ``ValueError`` for what none is."""
    m, dtype, activation = random.choice((1, 2, 3, 7, 17)), random.choice(DTYPES), random.choice(ACTIVATIONS)
    k, flags = random.choice((1, 8, 72, 127, 129, 264, 1000, 1025, 2048, 4104)), [random.random() < 0.5 for _ in range(3)]
    if program.startswith("quantize"):
        gate = activation if random.random() < 0.3 else ""
        return QuantizeWorkload(m, k, dtype, random.choice(OUTS), random.choice(GROUPS), flags[0], 1e-5, flags[1], flags[2], 1.0, gate)
    return GlueWorkload(program.split("_")[0], m, k, dtype, flags[0], 1e-5, float(flags[1]), activation)


def drawn_prefill(random: Random) -> AttentionWorkload:
    """Of 16-bit rows."""
    heads, width = random.choice(((1, 1), (3, 3), (4, 2), (7, 1))), random.choice((64, 128, 256))
    return AttentionWorkload(
        "prefill", 4, 128, 256, *heads, width, KV_FORMATS[0], random.choice(DTYPES), window=random.choice((0, 1, 70, 200)),
        sink_tokens=random.choice((0, 4, 20)), sinks=random.random() < 0.3, soft_cap=random.choice((0.0, 3.0)), lse=random.random() < 0.5,
    )  # fmt: skip


def near(random: Random, schedule: Schedule, workload: Asked, target: Target) -> Schedule:
    """A legal schedule not far from this one, which its program tries."""
    reads = find_rule(schedule.program).reads
    for name in random.sample(sorted(reads), min(3, len(reads))):
        value = getattr(schedule, name)
        others = (not value,) if isinstance(value, bool) else (value // 2, value - 1, value + 1, value * 3 // 2, value * 2)
        other = replace(schedule, **{name: random.choice(others)})
        schedule = schedule if legal(workload, other, target) else other
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


def drawn(random: Random, program: str) -> Asked:
    """Raises ``ValueError`` for what none is."""
    if program.startswith("attention"):
        op = program.split("_")[1]
        return drawn_prefill(random) if op == "prefill" else drawn_attention(random, f"attention_{op}")[0]
    if program in ROWS or program.startswith("quantize"):
        return drawn_rows(random, program)
    product = drawn_product(random, program)
    return DenseWorkload(product.m, product.n, product.k, product.dtype) if program in DENSE else product


def cases(program: str, random: Random) -> Iterator[Case]:
    """Legal ones of ``program``, without end."""
    rule = find_rule(program)
    while True:
        try:
            if program in CACHE:
                case = drawn_attention(random, program)
            else:
                workload, target = drawn(random, program), HOPPER
                if program in CPU:
                    target = replace(cpu_target(random.choice(ISAS)), units=random.choice((1, 2, 3)))
                elif program in TILED + DENSE + ROWS:
                    target = replace(HOPPER, units=random.choice((1, 2, 3, 5, 7)))
                tried = [] if rule.unserved(workload, target.arch) else rule.candidates(workload, target)
                case = workload, near(random, random.choice(tried), workload, target), target
        except (ValueError, IndexError):  # no such workload, or none of this program
            continue
        fits = program in CPU or case[1].split_k * case[1].num_warps <= MOST_WARPS
        if fits and not legal(*case):
            yield case


def kernel_of(case: Case) -> Callable[[Any, Any], None]:
    """``run(problem, outputs)``: emulated, on a CPU compiled."""
    workload, schedule, target = case
    if schedule.program in CPU:
        kernel = built(CompileRequest(schedule.program, workload, schedule, target)).load()
        return partial(launch, kernel, split_workspace(workload, schedule, target, "cpu"))
    if isinstance(workload, AttentionWorkload):
        emulated = GeneratedAttention(workload, schedule, target, seed=1)
        return lambda problem, outputs: emulated(problem.named(outputs))
    if isinstance(workload, Workload):
        return (EmulatedGemm if schedule.program in TILED else GeneratedGemm)(workload, schedule, target=target)
    made = {DenseWorkload: GeneratedDense, QuantizeWorkload: GeneratedQuantize, GlueWorkload: GeneratedGlue}
    return made[type(workload)](workload, schedule, target, seed=1)


def verdict(case: Case, random: Random) -> Verdict:
    workload, _, target = case
    run, seed = kernel_of(case), random.randrange(1 << 20)
    if not isinstance(workload, AttentionWorkload):
        return gate_of(workload, seed, target.arch, "cpu").verify(run)
    problems = []
    for count in (4, 2):
        lengths = [random.choice(LENGTHS) for _ in range(count)]
        if workload.op == "prefill":
            problems.append(prefill_problem(workload, [(length, random.randrange(min(length, 260) + 3)) for length in lengths], seed))
            continue
        new = [min(length, 1) if workload.full_windows else random.randrange(min(length, 140) + 1) for length in lengths]
        problems.append(poisoned_problem(workload, lengths, new if workload.op == "append" else [0] * count, seed))
    return AttentionGate(*problems).verify(run)


@pytest.mark.timeout(120 + 60 * MINUTES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_legal_schedule_is_right(program: str):
    seed = time.time_ns() if MINUTES else SEED
    random = Random(seed)
    until = time.monotonic() + 60 * MINUTES / len(PROGRAMS)
    for done, case in enumerate(cases(program, random)):
        if time.monotonic() >= until and (MINUTES or done >= CASES):
            break
        found = verdict(case, random)
        assert found.ok, (seed, case, found.reasons)
