"""What attention programs promise about their code."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilebit.schedules.operations import programs
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name
from tilebit.tiles.compiler.lint import Instructions, Resources, errors, lint

H200 = target_from_name("sm_90a")
ALL = Instructions(
    "sass", **{name: 4 for name in Instructions.__dataclass_fields__ if name not in ("level", "float_atomics")}, float_atomics=0
)
USED = Resources(registers=120, spills=0, stack=0, static_smem=16, barriers=1, smem=60000, threads=128)
GPU = [name for name in programs() if name.startswith("attention") and not name.endswith("_cpu")]


def schedule(program: str) -> Schedule:
    return Schedule(program, 64, 128 if "prefill" in program else 8, 128, 2, 8 if "prefill" in program else 4)


def resources(program: str) -> Resources:
    threads, registers = {"attention_prefill": (384, 168), "attention_prefill_mma": (256, 120)}.get(program, (128, 120))
    return replace(USED, threads=threads, registers=registers)


@pytest.mark.parametrize("program", GPU)
def test_what_keeps_its_promises_passes(program):
    assert lint(ALL, resources(program), schedule(program), H200) == []


@pytest.mark.parametrize(("program", "instruction"), [(p, i) for p in GPU for i in programs()[p].promises])
def test_a_missing_instruction_is_a_finding(program, instruction):
    (finding,) = lint(replace(ALL, **{instruction: 0}), resources(program), schedule(program), H200)
    assert finding.split(":")[0] in ("error", "warning") and "no " in finding


def test_decoding_needs_tensor_cores_and_copies():
    for program, copies in (("attention_decode", "cp_async"), ("attention_decode_bulk", "bulk_copies")):
        for instruction in ("mma", copies):
            assert errors(lint(replace(ALL, **{instruction: 0}), USED, schedule(program), H200))


def test_prefill_has_a_loading_warpgroup():
    (finding,) = lint(ALL, replace(USED, threads=256, registers=255), schedule("attention_prefill"), H200)
    assert "256 threads a block; accepted: 384, 8 computing warps and 4 that load" in finding


def test_prefill_takes_no_more_registers_than_it_starts_with():
    two = replace(schedule("attention_prefill"), block_m=64, num_warps=4, min_blocks=2)
    started = replace(USED, threads=256, registers=128)
    assert lint(ALL, started, two, H200) == []
    (finding,) = errors(lint(ALL, replace(started, registers=120), two, H200))
    assert "setmaxnreg takes 32768 registers of the 30720 that a block starts with" in finding


@pytest.mark.parametrize("program", GPU)
def test_atomics_on_floats_are_refused(program):
    assert errors(lint(replace(ALL, float_atomics=1), resources(program), schedule(program), H200))
