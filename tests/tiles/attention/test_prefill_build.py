"""The prefill and gather programs compiled for every architecture they run on, without a GPU: no spills, no serialized products, the
instructions that make them fast, and the order of instructions that keeps the tensor cores at work.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from arrivals import early_arrivals
from goldens import check_source
from lanes import one_of_each
from toolchain import encoded_machine_code, machine_code, needs_nvcc

from tilebit.layouts.kv_formats import KVFormat
from tilebit.schedules.attention.rules import LOADING_WARPS
from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.operations import find_rule, legal, params
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileRequest
from tilebit.tiles.compiler.kernel import Kernel
from tilebit.tiles.compiler.pool import CompilePool

HALF, BFLOAT = "float16", "bfloat16"
WGMMA, MMA, GATHER = "attention_prefill", "attention_prefill_mma", "attention_gather"


def prefill(head_dim: int, **changes) -> AttentionWorkload:
    return AttentionWorkload("prefill", 1, 8192, 8192, 32, 8, head_dim, KVFormat(), **changes)


def gather(head_dim: int, format: str, page_size: int, dtype: str = HALF) -> AttentionWorkload:
    return AttentionWorkload("gather", 1, 1, 8192, 32, 8, head_dim, KVFormat.from_name(format), dtype, page_size)


# arch, workload, schedule (block_n, block_m, block_k, stages, warps)
CASES = (
    ("sm_90a", prefill(128), Schedule(WGMMA, 128, 128, 128, 2, 8)),
    ("sm_90a", prefill(128, dtype=BFLOAT, window=4096, sink_tokens=4, soft_cap=50.0, lse=True), Schedule(WGMMA, 128, 128, 128, 2, 8)),
    ("sm_90a", prefill(128, sinks=True), Schedule(WGMMA, 176, 128, 128, 2, 8)),
    ("sm_90a", prefill(64, lse=True), Schedule(WGMMA, 96, 192, 64, 2, 12)),
    ("sm_90a", prefill(64, window=128, sinks=True, dtype=BFLOAT), Schedule(WGMMA, 64, 64, 64, 3, 4)),
    ("sm_90a", prefill(128), Schedule(WGMMA, 64, 64, 128, 2, 4, min_blocks=2)),
    ("sm_90a", prefill(256), Schedule(WGMMA, 80, 128, 256, 2, 8)),
    ("sm_90a", prefill(256, window=1024, soft_cap=30.0, sinks=True, lse=True), Schedule(WGMMA, 80, 128, 256, 2, 8)),
    ("sm_80", prefill(128), Schedule(MMA, 64, 128, 128, 2, 8)),
    ("sm_86", prefill(256, dtype=BFLOAT, window=500, sink_tokens=16, lse=True), Schedule(MMA, 32, 64, 256, 2, 4)),
    ("sm_89", prefill(64, sinks=True, soft_cap=20.0), Schedule(MMA, 128, 128, 64, 2, 8)),
    ("sm_90a", prefill(128, lse=True), Schedule(MMA, 64, 64, 128, 1, 4)),
    ("sm_80", gather(128, "kv4_channel", 16), Schedule(GATHER, 128, 1, 128, 1, 4)),
    ("sm_86", gather(64, "kv2_channel", 64, BFLOAT), Schedule(GATHER, 128, 1, 64, 1, 8)),
    ("sm_89", gather(128, "kvfp8", 128), Schedule(GATHER, 128, 1, 128, 1, 4)),
    ("sm_90a", gather(256, "k8_token_v2", 256, BFLOAT), Schedule(GATHER, 128, 1, 256, 1, 8)),
    ("sm_90a", gather(128, "kv16", 32), Schedule(GATHER, 128, 1, 128, 1, 4)),
)


def label(case: tuple[str, AttentionWorkload, Schedule]) -> str:
    arch, w, s = case
    return f"{arch}-{s.program}-{w.format.name}-{w.dtype}-d{w.head_dim}-{s.block_m}x{s.block_n}"


def test_the_cases_are_legal_and_use_every_value():
    for arch, workload, schedule in CASES:
        assert legal(workload, schedule, target_from_name(arch)) == [], (workload, schedule)
    for name in (WGMMA, MMA, GATHER):
        mine = [(a, w) for a, w, s in CASES if s.program == name]
        assert {a for a, _ in mine} == set(find_rule(name).arches)
        assert {w.dtype for _, w in mine} == {HALF, BFLOAT} and {w.head_dim for _, w in mine} == {64, 128, 256}
    for name in (WGMMA, MMA):
        flags = [(w.window > 0, w.sink_tokens > 0, w.sinks, w.soft_cap > 0, w.lse) for _, w, s in CASES if s.program == name]
        assert all({True, False} == set(column) for column in zip(*flags, strict=True))


@pytest.fixture(scope="module")
def pool() -> Iterator[CompilePool]:
    with CompilePool(jobs=1, cache=ArtifactCache(), keep=True) as one:
        yield one


@needs_nvcc
@pytest.mark.parametrize("case", one_of_each(CASES, lambda case: case[2].program == GATHER), ids=label)
def test_compiles_as_promised(pool: CompilePool, case: tuple[str, AttentionWorkload, Schedule]):
    arch, workload, schedule = case
    target = target_from_name(arch)
    (kernel,) = pool.compile([CompileRequest(schedule.program, workload, schedule, target)])
    assert isinstance(kernel, Kernel), kernel
    resources, code = kernel.resources, kernel.resources["instructions"]
    assert kernel.manifest["lint"] == []  # no warnings of ptxas: it says there when it serializes products
    assert kernel.manifest["prelude"] == "tilebit"
    assert resources["spills"] == 0 and resources["stack"] == 0 and code["float_atomics"] == 0
    assert 0 < resources["smem"] <= target.smem
    assert kernel.params == params(workload, schedule, target)
    loading = LOADING_WARPS if schedule.program == WGMMA else 0
    assert resources["threads"] == (schedule.num_warps + loading) * 32
    if schedule.program == WGMMA:
        check_source(case, (kernel.path / "kernel.cu").read_text())
        assert code["wgmma"] > 0 and code["tma"] > 0 and code["register_reallocations"] == 2
        check_pipeline((kernel.path / "kernel.cu").read_text())
        check_overlap(kernel, workload, schedule)
        assert early_arrivals(encoded_machine_code(kernel.path / "kernel.cubin")) == []
    elif schedule.program == MMA:
        assert code["mma"] > 0 and code["ldmatrix"] > 0 and code["cp_async"] > 0


def check_pipeline(source: str) -> None:
    """In a step both products are under way before the first is waited for, each stage is released after the product that reads it, and no
    fence of other proxies stands between (TileLang adds one where it believes that shared memory was written)."""
    body = source[source.rindex("main_kernel(") :]
    loops = [part for part in re.split(r"\n    for \(", body) if "wait_wgmma<1>" in part]
    assert len(loops) in (2, 3)  # with a mask and without, and behind the window
    for loop in loops:
        step = loop[: loop.index("tilebit::round_weights")]
        order = (
            "tilebit::await_stage((&(full_k", "wgmma_ss<", "tilebit::await_stage((&(full_v", "wgmma_rs<", "wait_wgmma<1>",
            "tilebit::release<1>((&(empty_k", "tilebit::softmax_step", "tilebit::weights_before_wait", "wait_wgmma<0>",
            "tilebit::release<1>((&(empty_v", "tilebit::rescale_rows",
        )  # fmt: skip
        at = 0
        for part in order:
            at = step.index(part, at) + len(part)
        assert "fence_proxy" not in step and "__syncthreads" not in step


def check_overlap(kernel: Kernel, workload: AttentionWorkload, schedule: Schedule) -> None:
    """The exponentials of a step are computed before the wait for O += P V, in every loop, and no more of them than there are scores."""
    sass = machine_code(kernel.path / "kernel.cubin")
    each = 3 if workload.soft_cap else 1  # a tanh is an exponential and a reciprocal more
    exponentials = schedule.block_n // 2 * each + 2  # and two rows' rescaling
    loops = re.split(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1\b", sass)[1:]
    assert len(loops) == (3 if workload.window else 2)
    for loop in loops:
        running, _, after = loop.partition("WARPGROUP.DEPBAR.LE gsb0, 0x0")
        assert running.count("MUFU") == exponentials
        assert after[: after.index("HGMMA")].count("MUFU.EX2") <= 2  # a row's learned sink, moved up from the end
