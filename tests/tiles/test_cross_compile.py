"""Every CUDA program compiled for every architecture without a GPU, over schedules that between them use each value that matters.

One kernel a test, so that test workers share them out. Each must come out as the schedule promised: linted, without spills, within shared
memory, on the tensor cores, with wide loads, with the parameters of its workload.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from toolchain import needs_nvcc

from tilebit.layouts.formats import PER_CHANNEL, QuantFormat
from tilebit.schedules.rules.gemm import legal
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name
from tilebit.schedules.workload import Workload
from tilebit.tiles.cache import ArtifactCache
from tilebit.tiles.compile import CompileRequest
from tilebit.tiles.kernel import Kernel
from tilebit.tiles.pool import CompilePool

HALF, BFLOAT = "float16", "bfloat16"
G32, G64Z, G128, G128Z, CHANNEL = (QuantFormat(4, *f) for f in ((32, True), (64, False), (128, True), (128, False), (PER_CHANNEL, True)))
B32Z, B64, B128Z, B_CHANNEL, B_CHANNEL_Z = (
    QuantFormat(8, *f) for f in ((32, False), (64, True), (128, False), (PER_CHANNEL, True), (PER_CHANNEL, False))
)

# arch, workload, schedule (block_n, block_m, block_k, stages, warps)
CASES = (
    ("sm_90a", Workload(4096, 4096, 4096, G128Z, HALF), Schedule("gemm_wgmma", 128, 256, 128, 3, 8, raster=8)),
    ("sm_90a", Workload(256, 4096, 14336, G128, BFLOAT), Schedule("gemm_wgmma", 128, 128, 64, 4, 8, split_k=4)),
    ("sm_90a", Workload(1, 4096, 4096, G64Z, HALF), Schedule("gemm_wgmma", 64, 8, 128, 6, 4, split_k=3, min_blocks=2)),
    ("sm_90a", Workload(16, 10240, 8192, CHANNEL, BFLOAT, bias=True), Schedule("gemm_wgmma", 256, 16, 64, 5, 8)),
    ("sm_90a", Workload(64, 505, 1001, G32, HALF, bias=True), Schedule("gemm_wgmma", 128, 64, 64, 4, 4)),
    ("sm_90a", Workload(32, 505, 1001, B_CHANNEL_Z, HALF), Schedule("gemm_wgmma", 64, 32, 32, 8, 4, split_k=5)),
    ("sm_90a", Workload(8, 4096, 4096, B64, BFLOAT), Schedule("gemm_wgmma", 128, 8, 128, 4, 4)),
    ("sm_90a", Workload(512, 4096, 4096, B128Z, BFLOAT), Schedule("gemm_wgmma", 128, 128, 64, 4, 8)),
    ("sm_80", Workload(1, 4096, 4096, G128, HALF), Schedule("gemm_mma", 64, 16, 128, 4, 4, split_k=2, min_blocks=2)),
    ("sm_80", Workload(256, 4096, 4096, G64Z, BFLOAT, bias=True), Schedule("gemm_mma", 128, 64, 64, 3, 8, raster=4)),
    ("sm_80", Workload(64, 505, 1001, B32Z, HALF), Schedule("gemm_mma", 256, 32, 32, 4, 16)),
    ("sm_86", Workload(16, 4096, 4096, G128Z, HALF, bias=True), Schedule("gemm_mma", 128, 16, 64, 3, 8)),
    ("sm_86", Workload(64, 4096, 4096, B_CHANNEL, BFLOAT), Schedule("gemm_mma", 64, 64, 64, 3, 4)),
    ("sm_89", Workload(32, 505, 1001, G32, BFLOAT), Schedule("gemm_mma", 64, 32, 64, 3, 4, split_k=4)),
    ("sm_89", Workload(512, 4096, 4096, CHANNEL, HALF), Schedule("gemm_mma", 128, 128, 64, 2, 8)),
)


def label(case: tuple[str, Workload, Schedule]) -> str:
    arch, w, s = case
    return f"{arch}-{w.format.name}-{w.dtype}-m{w.m}-{s.block_n}x{s.block_m}x{s.block_k}-split{s.split_k}"


def test_the_cases_use_every_value_and_are_legal():
    for arch, workload, schedule in CASES:
        assert legal(workload, schedule, target_from_name(arch)) == [], (workload, schedule)
    arches, workloads, schedules = zip(*CASES, strict=True)
    assert set(arches) == {"sm_80", "sm_86", "sm_89", "sm_90a"}
    for program in ("gemm_wgmma", "gemm_mma"):
        mine = [(w, s) for w, s in zip(workloads, schedules, strict=True) if s.program == program]
        assert {w.dtype for w, _ in mine} == {HALF, BFLOAT}
        assert {(w.format.bits, w.format.symmetric) for w, _ in mine} == {(b, s) for b in (4, 8) for s in (True, False)}
        assert {w.format.group_size for w, _ in mine} == {32, 64, 128, PER_CHANNEL}
        assert {w.bias for w, _ in mine} == {True, False}
        assert {s.block_n for _, s in mine} == {64, 128, 256} and {s.block_k for _, s in mine} == {32, 64, 128}
        assert any(s.split_k > 1 for _, s in mine)
        assert any(s.min_blocks > 1 for _, s in mine) and any(s.raster for _, s in mine)
        assert any(w.n % 64 and w.k % 8 for w, _ in mine)
        assert program == "gemm_mma" or any(-(-w.k // s.block_k) % s.split_k for w, s in mine)  # mma.sync takes equal splits only
        assert {min(w.m, 17) for w, _ in mine} >= {1, 16, 17} and any(w.m > 128 for w, _ in mine)


@pytest.fixture(scope="module")
def pool() -> Iterator[CompilePool]:
    with CompilePool(jobs=1, cache=ArtifactCache()) as one:
        yield one


@needs_nvcc
@pytest.mark.parametrize("case", CASES, ids=label)
def test_compiles_as_promised(pool: CompilePool, case: tuple[str, Workload, Schedule]):
    arch, workload, schedule = case
    target = target_from_name(arch)
    (kernel,) = pool.compile([CompileRequest(schedule.program, workload, schedule, target)])
    assert isinstance(kernel, Kernel), kernel
    resources, code = kernel.resources, kernel.resources["instructions"]
    assert kernel.manifest["lint"] == []  # not even a warning: these schedules are the ones we would ship
    assert resources["spills"] == 0 and resources["stack"] == 0
    assert 0 < resources["smem"] <= target.smem
    assert resources["registers"] * resources["threads"] * schedule.min_blocks <= 65536
    assert resources["threads"] == schedule.num_warps * 32 + (128 if schedule.program == "gemm_wgmma" else 0)
    assert code["wgmma" if schedule.program == "gemm_wgmma" else "mma"] > 0
    assert code["wide_shared_loads"] > 0 and code["float_atomics"] == 0
    zeros = [] if workload.format.symmetric else ["zeros"]
    bias = ["bias"] if workload.bias else []
    workspace = ["partials", "tickets"] if schedule.split_k > 1 else []
    assert kernel.params == ("x", "weight", "scales", *zeros, *bias, *workspace, "y")
    if schedule.program == "gemm_wgmma":
        check_pipeline((kernel.path / "kernel.cu").read_text())


def check_pipeline(source: str) -> None:
    """Two properties that rare races depended on: only one producer warp waits on barriers, and no stage buffer is released before the
    product."""
    producer = source.index("if (((int)threadIdx.x) < 128) {")
    leaves = source.index("if (threadIdx.x >= 32) return;")
    assert producer < leaves < source.index(".wait(", producer)
    start = source.index(
        "tilebit::dequantize<half" if "tilebit::dequantize<half" in source[producer:] else "tilebit::dequantize<__nv_bfloat16", producer
    )
    assert source.index("warpgroup_wait<0>()", start) < source.index(".arrive();", start)


def test_the_producer_rewrite_refuses_other_sources():
    from tilebit.tiles.gemm.wgmma import one_producer_warp

    branch = "  if (((int)threadIdx.x) < 128) {\n    tl::warpgroup_reg_dealloc<40>();\n    for (;;) {}\n  } else {}\n"
    rewritten = one_producer_warp(branch)
    assert rewritten.index("reg_dealloc") < rewritten.index("if (threadIdx.x >= 32) return;") < rewritten.index("for (;;)")
    for source in ("__global__ void kernel() {}", branch + branch):
        with pytest.raises(ValueError, match="producer branches"):
            one_producer_warp(source)
