"""The decode and append programs compiled for every architecture they run on, without a GPU: no spills and no warnings; early starts where
the device has them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from arrivals import early_arrivals
from lanes import one_of_each
from toolchain import encoded_machine_code, needs_nvcc

from tilebit.layouts.kv_formats import KVFormat
from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.operations import params
from tilebit.schedules.select import select
from tilebit.schedules.target import target_from_name
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileRequest
from tilebit.tiles.compiler.kernel import Kernel
from tilebit.tiles.compiler.pool import CompilePool


def asked(op: str, format: str, head_dim: int = 128, q_len: int = 1, **changes) -> AttentionWorkload:
    return AttentionWorkload(op, 32, q_len, 4096, 32, 8, head_dim, KVFormat.from_name(format), **changes)


CASES = (
    ("sm_90a", asked("decode", "kv4_channel")),
    ("sm_90a", asked("decode", "kv2_channel", dtype="bfloat16", page_size=16, lse=True)),
    ("sm_90a", asked("decode", "kvfp8", 64, soft_cap=30.0, sinks=True)),
    ("sm_80", asked("decode", "kv8_token", window=1000, sink_tokens=4)),
    ("sm_86", asked("decode", "kv16", dtype="bfloat16")),
    ("sm_89", asked("decode", "k8_channel_v4", 256, page_size=64)),
    ("sm_90a", asked("decode", "kv2_channel", q_len=16)),  # drafts of several tokens, whose products are wide
    ("sm_90a", asked("decode", "kv8_channel", 64, q_len=5)),
    ("sm_80", asked("decode", "kv2_token", q_len=3)),
    ("sm_90a", asked("append", "kv4_channel", rotary="half")),
    ("sm_80", asked("append", "kvfp8", 64, dtype="bfloat16")),
)


@pytest.fixture(scope="module")
def pool() -> Iterator[CompilePool]:
    with CompilePool(jobs=1, cache=ArtifactCache(), keep=True) as one:
        yield one


@needs_nvcc
@pytest.mark.parametrize(
    ("arch", "workload"),
    one_of_each(CASES, lambda case: "any", several=True),
    ids=[f"{arch}-{w.op}-{w.format.name}-{w.q_len}" for arch, w in CASES],
)
def test_compiles_as_promised(pool: CompilePool, arch: str, workload: AttentionWorkload):
    target = target_from_name(arch)
    schedule = select(workload, target)
    (kernel,) = pool.compile([CompileRequest(schedule.program, workload, schedule, target)])
    assert isinstance(kernel, Kernel), kernel
    assert kernel.manifest["lint"] == []
    assert kernel.manifest["prelude"] == "tilebit"
    code = kernel.resources["instructions"]
    assert kernel.resources["spills"] == 0 and code["float_atomics"] == 0
    assert bool(code["dependent_waits"]) == (arch == "sm_90a")
    assert bool(code["mma"]) == (workload.op == "decode")
    assert kernel.params == params(workload, schedule, target)
    if arch == "sm_90a":
        assert early_arrivals(encoded_machine_code(kernel.path / "kernel.cubin")) == []
