"""Our statements of what generated CUDA calls of TileLang: nvcc makes of them what it makes of TileLang's own headers, and those are taken
where a kernel calls anything else."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))
from gemm.test_cross_compile import CASES
from toolchain import needs_nvcc

from tilebit.schedules.target import target_from_name
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileRequest, compile_kernel
from tilebit.tiles.compiler.cuda import compile_source, run_nvcc
from tilebit.tiles.compiler.prelude import FILES, KERNEL, with_own_prelude
from tilebit.tiles.program import DEVICE_DIR

# Between them: tensor maps, multicast, barriers, clusters, products of warpgroups; copies, products of a warp, named barriers.
KERNELS = {case[2].program: case for case in reversed(CASES) if case[2].program != "gemm_wgmma" or case[2].cluster > 1}
PARTS = ("instruction/mma", "intrin", "barrier", "copy", "ldsm", "threadblock_swizzle")
OF_HOPPER = ("instruction/wgmma", "copy_sm90", "cluster")  # nvcc takes a second to read them
KERNEL_OF_HALVES = f"""
{KERNEL} void __launch_bounds__(32) main_kernel(half_t* __restrict__ x, half_t* __restrict__ y) {{
  y[threadIdx.x] = (half_t)(EXPRESSION);
}}
"""


def their_prelude(parts: tuple[str, ...]) -> str:
    """As TileLang begins a source; includes that a kernel does not need are no error."""
    return "#if defined(_MSC_VER)\n#include <cuda.h>\n#endif\n" + "".join(f"#include <tl_templates/cuda/{name}.h>\n" for name in parts)


def with_their_prelude(ours: str, arch: str) -> str:
    start, kernel = ours.index((DEVICE_DIR / FILES[0]).read_text()), ours.index(KERNEL)
    return ours[:start] + their_prelude((*PARTS, *(OF_HOPPER if arch == "sm_90a" else ()))) + ours[kernel:]


def instructions(ptx: str) -> list[str]:
    """Of the kernel, without names of registers, labels and variables, and without blanks: where those are two statements' own."""
    body = ptx[ptx.index(".entry main_kernel") :]
    body = re.sub(r"//[^\n]*", "", re.sub(r"%[a-z]+\d*", "%", body))
    body = re.sub(r"\$L\w*|\b(?:LAB_WAIT|AGAIN|P1|done|there|remAddr32)\b", "L", body)
    return [line for found in body.splitlines() if (line := re.sub(r"\s+", "", found)) and not line.startswith(".reg")]


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("name", ("gemm_wgmma", "gemm_mma", "gemm_stream"))
def test_the_instructions_are_those_of_tilelangs_headers(name: str, tmp_path: Path):
    arch, workload, schedule = KERNELS[name]  # compiled by that test, too: one of the two finds it
    kernel = compile_kernel(CompileRequest(schedule.program, workload, schedule, target_from_name(arch)), ArtifactCache())
    assert kernel.manifest["prelude"] == "tilebit"
    # With the fence that gemm_wgmma says it does not need.
    ours = (kernel.path / "kernel.cu").read_text().replace("#define STAGES_ARE_COPIED\n", "")
    assert "tl_templates" not in ours
    found = []
    for source in (ours, with_their_prelude(ours, arch)):
        (tmp_path / "kernel.cu").write_text(source)
        found.append(instructions(run_nvcc(tmp_path, arch)[1]))
    assert len(found[0]) > 100 and found[0] == found[1]


@needs_nvcc
@pytest.mark.parametrize(
    ("expression", "prelude"),
    [("(float)x[threadIdx.x] * 2", "tilebit"), ("x[threadIdx.x] + x[0]", "tilelang"), ("tl::fast_rcp(x[0])", "tilelang")],
    ids=["what ours states", "sums that TileLang rounds to halves", "a function that ours lacks"],
)
def test_what_ours_does_not_state_is_tilelangs(expression: str, prelude: str, tmp_path: Path):
    source = their_prelude(("copy",)) + KERNEL_OF_HALVES.replace("EXPRESSION", expression)
    _, ptx, chosen = compile_source(source, tmp_path, "sm_80", ())
    assert chosen == prelude and "main_kernel" in ptx
    assert ("tl_templates" in (tmp_path / "kernel.cu").read_text()) == (prelude == "tilelang")


def test_a_source_of_another_form_is_left_as_it_is():
    assert with_own_prelude("__global__ void main_kernel() {}") is None
    assert with_own_prelude(f"#include <tl_templates/cuda/common.h>\n{KERNEL} void main_kernel() {{}}") is None
