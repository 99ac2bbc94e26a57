"""The CPU build around the kernel: what it refuses, and that its library needs no compiler to run."""

from __future__ import annotations

import subprocess
import sys

import pytest
from cpu_cases import runs_here, target

from tilebit.layouts.formats import QuantFormat
from tilebit.schedules.gemm.cpu import cpu_candidates
from tilebit.schedules.gemm.workload import Workload
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileRequest, compile_kernel

pytestmark = pytest.mark.xdist_group("cpu_gemm")

# One process for all refusals: importing tvm takes seconds.
REFUSALS = """
import os, sys, tempfile
from dataclasses import replace
from tilebit.layouts.formats import QuantFormat
from tilebit.schedules.gemm.cpu import cpu_candidates
from tilebit.schedules.target import target_from_name
from tilebit.schedules.gemm.workload import Workload
from tilebit.tiles.compiler import cpu
from tilebit.tiles.cpu.gemm import program as gemm
from tilebit.tiles.cpu.outline import outline

avx2 = replace(target_from_name("cpu"), features=("avx2",))
bare = replace(avx2, features=())
workload = Workload(1, 64, 64, QuantFormat())
function = gemm.build(workload, cpu_candidates(workload, avx2)[0], avx2)
from tvm.script.ir_builder import IRBuilder
from tilebit.tiles.cpu.vectors import T

def one_loop(kind, *shapes):
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("f")
        buffers = [T.match_buffer(T.arg(f"a{i}", T.handle()), shape, "float32") for i, shape in enumerate(shapes)]
        with kind(8) as i:
            T.buffer_store(buffers[0], T.float32(0), [i])
    return builder.get()

def refused(what, call):
    try:
        call()
    except (ValueError, cpu.CpuCompileError) as error:
        print(f"{what}: {type(error).__name__}: {error}")

m, other = T.int32(is_size_var=True), T.int32(is_size_var=True)
with tempfile.TemporaryDirectory() as out:
    refused("bare target", lambda: cpu.compile_cpu(function, bare, out))
    refused("bare build", lambda: gemm.build(workload, cpu_candidates(workload, avx2)[0], bare))
    refused("serial", lambda: outline(one_loop(T.serial, (m,))))
    refused("static", lambda: outline(one_loop(T.parallel, (8,))))
    header = outline(one_loop(T.parallel, (m,), (other, m))).header
    print("two sizes:", *(line.strip() for line in header.splitlines() if "float" in line.lower() or "loop0(int32_t" in line))
    os.environ["CC"] = "no-such-compiler"
    refused("no compiler", lambda: cpu.compile_cpu(function, avx2, out))
    os.environ["CC"] = "false"
    refused("broken compiler", lambda: cpu.compile_cpu(function, avx2, out))
    print("left:", sorted(os.listdir(out)))
"""

RUN = """
import sys
for name in ("tvm", "tilelang"):
    sys.modules[name] = None  # any import of them fails
import torch, tvm_ffi
run = tvm_ffi.load_module(sys.argv[1])["run"]
x = torch.ones(3, 64, dtype=torch.float16)
weight = torch.full((2, 2, 128), -1, dtype=torch.int32)
scales = torch.ones(1, 64, dtype=torch.float16)
y = torch.empty(3, 64, dtype=torch.float16)
run(x, weight, scales, y)
assert torch.equal(y, torch.full_like(y, 64 * 7)), y
maps = open("/proc/self/maps").read()
assert "libtvm_ffi" in maps and "libtvm_runtime" not in maps and "libtvm_compiler" not in maps
assert len({line.split()[-1] for line in maps.splitlines() if "gomp" in line}) <= 1
print("ran")
"""


def test_refusals_say_what_to_do():
    done = subprocess.run([sys.executable, "-c", REFUSALS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert "needs" in lines["bare build"] and "'avx2'" in lines["bare build"] and "'avx2'" in lines["bare target"]
    assert "accepted: allocations, then parallel loops" in lines["serial"]
    assert "accepted: at least one" in lines["static"]
    assert "{-1}, 0}" in lines["two sizes"] and "{-2, -1}, 0}" in lines["two sizes"]  # size i of a tensor: -1 - i; rows lie together
    assert "void loop0(int32_t begin, int32_t end, int32_t, int32_t, void*, void*);" in lines["two sizes"]
    assert "CC=no-such-compiler is not on PATH; install gcc" in lines["no compiler"]
    assert "failed on cpu_launch.c" in lines["broken compiler"]
    assert lines["left"] == "['kernel.ll']"


@pytest.mark.slow
def test_library_runs_without_a_compiler(tmp_path):
    isa = next((isa for isa in ("avx512", "avx2") if runs_here(isa)), None)
    if isa is None:
        pytest.skip("this machine has neither AVX-512 nor AVX2")
    workload = Workload(1, 64, 64, QuantFormat())
    schedule = cpu_candidates(workload, target(isa))[0]
    kernel = compile_kernel(CompileRequest("gemm_cpu", workload, schedule, target(isa)), ArtifactCache(tmp_path))
    assert sorted(path.name for path in kernel.path.iterdir()) == ["kernel.ll", "kernel.so", "manifest.json"]
    assert kernel.params == ("x", "weight", "scales", "y")
    done = subprocess.run([sys.executable, "-c", RUN, str(kernel.path / "kernel.so")], capture_output=True, text=True, timeout=120)
    assert done.stdout == "ran\n", done.stderr
