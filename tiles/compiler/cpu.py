"""A PrimFunc to a directory with ``kernel.so`` (function ``run``) and ``kernel.ll``, through
apache-tvm's LLVM and the system's C compiler.

The library needs apache-tvm-ffi and a C library, nothing of TVM: LLVM makes an object file of the
loops that ``device/cpu_launch.c`` calls.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from ...schedules.gemm.cpu import Isa, isa
from ...schedules.target import Target
from ..cpu.outline import LOCAL_ARRAYS, THREADS, outline
from ..program import DEVICE_DIR

LAUNCHER = "cpu_launch.c"
COMPILERS = ("cc", "gcc", "clang")
EXPORTS = "{ global: __tvm_ffi_run; local: *; };\n"  # two kernels in one process must not find each other's loops
# LLVM's processor levels: x86-64-v4 has AVX-512 F, BW, CD, DQ, VL; v3 has AVX2, FMA, F16C. Not one
# model's: kernels travel in packs.
_LLVM_CPU = {
    "avx512_bf16": ("x86-64-v4", ["+avx512bf16", "+avx512vnni"]),
    "avx512_vnni": ("x86-64-v4", ["+avx512vnni"]),
    "avx512": ("x86-64-v4", []),
    "avx_vnni": ("x86-64-v3", ["+avxvnni"]),
    "avx2": ("x86-64-v3", []),
}


class CpuCompileError(Exception):
    """The C compiler is missing or refused the launcher."""


def compile_cpu(function: Any, target: Target, out_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Write ``kernel.so`` and ``kernel.ll`` into ``out_dir``. ``function`` is a PrimFunc that
    ``outline`` accepts.

    Returns resources: ``threads``, ``isa``, ``vector_bits``, ``spills`` and ``loop_spills`` (vector
    accesses to the stack in the whole kernel and in the hottest loop, a function's ``LOCAL_ARRAYS``
    among them), ``instructions`` (the commonest, with counts), ``loop`` (the hottest loop's) and
    ``lint`` (sentences).

    Raises ``ValueError`` for a target without AVX2 or a function ``outline`` refuses,
    ``CpuCompileError`` without a C compiler.
    """
    import tvm.tirx

    tirx: Any = tvm.tirx
    vectors = isa(target)
    if vectors is None:
        raise ValueError(f"target features are {target.features}; accepted: 'avx2', 'avx512' (with 'avx512_bf16')")
    out = Path(out_dir)
    outlined = outline(function)
    mcpu, mattr = _LLVM_CPU[vectors.name]
    llvm = tvm.target.Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": mcpu, "mattr": mattr, "opt-level": 3})
    passes = [
        tirx.transform.BindTarget(llvm),
        tirx.transform.FlattenBuffer(),
        tirx.transform.StmtSimplify(),
        tirx.transform.LowerIntrin(),
    ]
    with llvm:
        lowered = tvm.ir.transform.Sequential(passes)(outlined.module)
        compiled: Any = tvm.get_global_func("target.build.llvm")(lowered, llvm)
    assembly = compiled.inspect_source("asm")
    (out / "kernel.ll").write_text(compiled.inspect_source("ll"), encoding="utf-8")
    object_file, header, exports = (out / name for name in ("kernel.o", "kernel.h", "kernel.map"))
    threads = int(function.attrs[THREADS])
    try:
        compiled.write_to_file(str(object_file), "o")
        header.write_text(outlined.header, encoding="utf-8")
        exports.write_text(EXPORTS, encoding="utf-8")
        _link(object_file, header, exports, threads, out / "kernel.so")
    finally:
        for path in (object_file, header, exports):
            path.unlink(missing_ok=True)
    local_arrays = function.attrs is not None and LOCAL_ARRAYS in function.attrs
    return {"threads": threads, **read_assembly(assembly, vectors, local_arrays)}


def _link(object_file: Path, header: Path, exports: Path, threads: int, library: Path) -> None:
    import tvm_ffi.libinfo

    chosen = os.environ.get("CC")
    compiler = shutil.which(chosen) if chosen else next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        looked_for = f"CC={chosen}" if chosen else " or ".join(COMPILERS)
        raise CpuCompileError(f"no C compiler: {looked_for} is not on PATH; install gcc, or set CC to a compiler")
    ffi = Path(tvm_ffi.libinfo.find_libtvm_ffi())
    command = [
        compiler, "-std=c11", "-O2", "-fPIC", "-shared", f"-Wl,--version-script={exports}", f"-DTHREADS={threads}",
        f'-DKERNEL_DECLARATIONS="{header.name}"', f"-I{header.parent}", *(f"-I{path}" for path in tvm_ffi.libinfo.include_paths()),
        str(DEVICE_DIR / LAUNCHER), str(object_file), f"-L{ffi.parent}", "-ltvm_ffi", "-ldl", "-o", str(library),
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise CpuCompileError(f"{compiler} failed on {LAUNCHER}: {result.stderr.strip()[-2000:]}")


def read_assembly(assembly: str, vectors: Isa, local_arrays: bool = False) -> dict[str, Any]:
    """What the generated code is made of, see ``compile_cpu``. The hottest loop is taken to be the
    innermost one with the most products.

    ``local_arrays``: the code has arrays on the stack, from which spilled registers cannot be told.
    """
    wide = {16: "zmm", 8: "ymm"}[vectors.lanes]
    lines = [line.split("#")[0].strip() for line in assembly.splitlines()]
    labels = {line[:-1]: number for number, line in enumerate(lines) if line.endswith(":")}
    loops = []
    for number, line in enumerate(lines):
        jump = re.match(r"j\w+\s+(\S+)$", line)
        if jump and labels.get(jump[1], number) < number:
            loops.append((labels[jump[1]], number))
    innermost = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]

    def mix(rows: list[str]) -> Counter[str]:
        return Counter(row.removeprefix("{vex}").split()[0] for row in rows if row and row[0] not in ".#" and not row.endswith(":"))

    def spills(rows: list[str]) -> int:
        return sum(1 for row in rows if wide in row and re.search(r"\(%rsp[,)]", row))

    def products(rows: list[str]) -> int:
        return sum(count for name, count in mix(rows).items() if name.startswith(("vfmadd", "vdpbf16", "vpmadd", "vpdp")))

    hot = max((lines[begin : end + 1] for begin, end in innermost), key=products, default=[])
    scalar = [name for name in mix(hot) if re.fullmatch(r"v(fm|mul|add|sub|cvt)\w*s[sd]", name)]
    lint = []
    if spills(hot) and not local_arrays:
        lint.append(f"warning: {spills(hot)} vector spills in the innermost loop; choose a smaller block_m or split_k")
    if scalar:
        lint.append(f"warning: scalar arithmetic in the innermost loop ({', '.join(scalar)})")
    return {
        "isa": vectors.name,
        "vector_bits": 32 * vectors.lanes,
        "spills": spills(lines),
        "loop_spills": spills(hot),
        "instructions": dict(mix(lines).most_common(12)),
        "loop": dict(mix(hot).most_common()),
        "lint": lint,
    }
