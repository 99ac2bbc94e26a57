"""The CUDA that every program generates is what it was: a change that is to keep it is proved by this file, one that is not renews it.

``goldens.json`` holds SHA-256 digests: of a kernel's body, which TileLang generates, for each case, and of each file of ``tiles/device``,
which kernels include as text, without its comments and blank lines. A failure names the case or the file. TileLang's own prelude is left
out. After an intended change:

    RENEW_GOLDENS=1 .venv/bin/python -m pytest tests/tiles/test_goldens.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from attention.test_prefill_build import CASES as PREFILL_CASES
from attention.test_prefill_build import prefill
from gemm.test_cross_compile import CASES as GEMM_CASES
from goldens import RENEWED, STORED, body_of, differences, digest, label, stored, without_comments
from toolchain import have_nvcc

from tilebit.layouts.kv_formats import KVFormat
from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.operations import legal
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name
from tilebit.tiles.compiler.cuda import lower_cuda, lowered_arch
from tilebit.tiles.compiler.hasten import hasten_tilelang
from tilebit.tiles.compiler.headers import device_source
from tilebit.tiles.program import DEVICE_DIR
from tilebit.tiles.programs import program


def asked(op: str, format: str, **changes) -> AttentionWorkload:
    return AttentionWorkload(op, 32, 1, 4096, 32, 8, 128, KVFormat.from_name(format), **changes)


# Schedules are given, not selected: a new rule or record must not look like a new kernel.
ATTENTION_CASES = (
    ("sm_80", asked("decode", "kv8_token", window=1000, sink_tokens=4), Schedule("attention_decode", 64, 8, 128, 2, 4)),
    ("sm_90a", asked("decode", "kv4_channel", lse=True), Schedule("attention_decode_bulk", 64, 8, 128, 2, 4)),
    ("sm_80", asked("append", "kvfp8", dtype="bfloat16"), Schedule("attention_append", 128, 1, 128, num_warps=8)),
    ("sm_90a", asked("append", "kv4_channel", rotary="half"), Schedule("attention_append", 128, 1, 128, num_warps=8)),
    ("sm_80", asked("gather", "kv4_channel"), Schedule("attention_gather", 128, 1, 128, num_warps=4)),
    ("sm_90a", asked("gather", "kv16"), Schedule("attention_gather", 128, 1, 128, num_warps=4)),
    ("sm_80", prefill(128), Schedule("attention_prefill_mma", 64, 128, 128, 2, 8)),
    ("sm_90a", prefill(128, window=4096, sinks=True, lse=True), Schedule("attention_prefill_mma", 64, 128, 128, 2, 8)),
)
COMPILED = (*GEMM_CASES, *(case for case in PREFILL_CASES if case[2].program == "attention_prefill"))  # by tests that look at their sources
CASES = (*COMPILED, *ATTENTION_CASES)
RENEW = "RENEW_GOLDENS" in os.environ
LOWERED = ATTENTION_CASES if have_nvcc() and not RENEW else CASES


def lowered(case: tuple[str, Any, Schedule]) -> str:
    """The digest of a case's body. Imports TileLang."""
    arch, workload, schedule = case
    hasten_tilelang()
    made, target = program(schedule.program), target_from_name(arch)
    artifact = lower_cuda(made.build(workload, schedule, target), lowered_arch(made, target), dict(made.pass_configs))
    return digest(body_of(artifact.kernel_source, device_source(made.headers)))


def main() -> None:
    """The worker, which may import TileLang: digests of bodies, as the last line that it prints."""
    print("\n" + json.dumps({label(case): lowered(case) for case in LOWERED}))


def bodies() -> dict[str, str]:
    """Digest by case of ``LOWERED``, of a fresh process: TileLang and TVM do not meet in this one."""
    start = f"import sys; sys.path[:] = {[entry or os.getcwd() for entry in sys.path]!r}; import test_goldens; test_goldens.main()"
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def headers() -> dict[str, str]:
    """Digest by file that a case's kernel includes."""
    names = {name for _, _, schedule in CASES for name in program(schedule.program).headers}
    return {name: digest(without_comments((DEVICE_DIR / name).read_text())) for name in sorted(names)}


def test_a_difference_is_named():
    assert differences("bodies", {"a": "1", "b": "2"}, {"b": "3", "c": "4"}) == [
        "bodies: b changed", "bodies: a is only stored", "bodies: c is only found",
    ]  # fmt: skip
    assert differences("bodies", {"a": "1"}, {"a": "1"}) == []


def test_comments_do_not_count_and_code_does():
    assert without_comments("int a; // one\n\n/* two\n */\nint b;  \n") == "int a;\nint b;"
    assert without_comments('f("http://x");') == 'f("http://x");'
    assert digest(without_comments("int a = 1;")) != digest(without_comments("int a = 2;"))


def test_the_cases_are_of_every_cuda_program_and_their_labels_differ():
    assert len({label(case) for case in CASES}) == len(CASES)
    assert {arch for arch, _, s in CASES if s.program == "attention_prefill_mma"} >= {"sm_80", "sm_90a"}
    for arch, workload, schedule in CASES:
        assert legal(workload, schedule, target_from_name(arch)) == []


@pytest.mark.parametrize(("kind", "find"), [("headers", headers), pytest.param("bodies", bodies, marks=pytest.mark.slow)])
def test_generated_sources_are_as_stored(kind: str, find: Callable[[], dict[str, str]]):
    found = find()
    if RENEW:
        STORED.write_text(json.dumps({**stored(), kind: found}, indent=1, sort_keys=True) + "\n")
        return
    elsewhere = {label(case) for case in CASES} - {label(case) for case in LOWERED} if kind == "bodies" else set()
    changes = differences(kind, {name: value for name, value in stored().get(kind, {}).items() if name not in elsewhere}, found)
    assert not changes, "\n".join((*changes, RENEWED))


def test_every_case_is_stored():
    assert stored()["bodies"].keys() == {label(case) for case in CASES}, RENEWED
