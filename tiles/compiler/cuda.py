"""From a TileLang PrimFunc to a CUDA kernel library: lower, generate CUDA, nvcc, ptxas report, host
stub."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import site
import subprocess
import sysconfig
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...schedules.operations import AnyWorkload, operands
from ...schedules.operations import params as kernel_parameters
from ...schedules.schedule import Schedule
from ...schedules.target import Target, target_from_name
from ..program import DEVICE_DIR, TileProgram
from .hasten import hasten_tilelang, without_repeats
from .host_plan import HostPlan, describe_params, read_host
from .host_stub import CUBIN_NAME, compile_stub, generate_stub
from .lint import Instructions, Resources, count_instructions, disassemble
from .prelude import with_own_prelude

SOURCE_NAME = "kernel.cu"
# What a wait for the preceding kernel becomes in PTX. Looked for there and not in the CUDA source,
# which holds the headers' functions whether the kernel calls them or not.
DEPENDENT_WAIT = "griddepcontrol.wait"
# libstdc++'s functions of mathematical physics, which CUDA's own headers bring along by <cmath>: a tenth of nvcc's time for a kernel.
WITHOUT_BESSEL = "-D_GLIBCXX_BITS_SPECFUN_H"


class NvccError(Exception):
    """nvcc is missing or refused the generated source."""


@dataclass(frozen=True, slots=True)
class CudaBuild:
    """The outcome of ``compile_cuda``: files were written to the build directory."""

    plan: HostPlan
    resources: Resources
    instructions: Instructions
    seconds: dict[str, float]
    prelude: str  # whose statements of what TileLang calls were compiled: "tilebit" or "tilelang"


def find_nvcc() -> str:
    """nvcc from ``$CUDACXX``, ``$CUDA_HOME/bin``, ``$PATH``, /usr/local/cuda or the
    nvidia-cuda-nvcc wheel, in this order.

    Raises ``NvccError`` with how to get one when there is none.
    """
    candidates = [os.environ.get("CUDACXX")]
    candidates += [os.path.join(home, "bin", "nvcc") for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")) if home]
    candidates += ["nvcc", "/usr/local/cuda/bin/nvcc"]
    for root in dict.fromkeys([sysconfig.get_paths()["purelib"], *site.getsitepackages()]):
        candidates += sorted(map(str, Path(root).glob("nvidia/*/bin/nvcc")), reverse=True)
    for candidate in candidates:
        found = candidate and shutil.which(candidate)
        if found:
            return found
    raise NvccError(
        "nvcc was not found in $CUDACXX, $CUDA_HOME/bin, $PATH, /usr/local/cuda or the nvidia-cuda-nvcc wheel; it compiles CUDA kernels. "
        "Install a CUDA toolkit (12.4 or newer), or `pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl`, or use a pack"
    )


@functools.lru_cache(maxsize=8)
def _version_of(path: str, stamp: float) -> str:
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    release = re.search(r"release [\d.]+, V([\d.]+)", done.stdout)
    if not release:
        raise NvccError(f"{path} --version says {done.stdout.strip()[:200]!r}; expected nvcc's version line")
    return release.group(1)


def nvcc_version() -> str:
    """Version of the nvcc that ``find_nvcc`` chooses, such as "13.0.88"."""
    path = find_nvcc()
    return _version_of(path, os.stat(path).st_mtime)


def lowered_arch(program: TileProgram, target: Target) -> str:
    """The architecture that the program's CUDA is generated for: the target's, or the program's
    newest where the target is newer."""
    newest = program.newest_arch
    return newest if newest and target.capability > target_from_name(newest).capability else target.arch


def lower_cuda(function: Any, arch: str, pass_configs: dict[str, Any] | None = None) -> Any:
    """TileLang's ``CompiledArtifact`` of a PrimFunc for ``arch`` (needs no device)."""
    from tilelang import tvm
    from tilelang.engine.lower import lower

    cuda = tvm.target.Target({"kind": "cuda", "arch": arch})
    with tvm.transform.PassContext(opt_level=3, config=dict(pass_configs or {})), cuda, without_repeats():
        return lower(function, target=cuda)


def _include_flags() -> list[str]:
    """TileLang's headers, found without importing it: that would point this process and its
    children at the compiler it carries."""
    found = importlib.util.find_spec("tilelang")
    roots = list(found.submodule_search_locations or ()) if found else []
    system = [os.path.join(root, *path) for root in roots for path in (("src",), ("3rdparty", "cutlass", "include"))]
    return [f"-I{DEVICE_DIR}", *(flag for path in system for flag in ("-isystem", path))]


def run_nvcc(build_dir: Path, arch: str, flags: tuple[str, ...] = ()) -> tuple[str, str]:
    """Compile ``build_dir/kernel.cu`` to ``build_dir/kernel.cubin``; returns all that nvcc and
    ptxas said, and the PTX.

    No fast math: it changes divisions and denormals, which the exact oracle would notice. Raises
    ``NvccError`` with the first errors.
    """
    number = arch.removeprefix("sm_")
    command = [find_nvcc(), "--cubin", "-O3", "-std=c++20", "-gencode", f"arch=compute_{number},code=sm_{number}", "-Xptxas", "-v"]
    command += ["-diag-suppress", "177", WITHOUT_BESSEL, *_include_flags(), *flags, SOURCE_NAME, "-o", CUBIN_NAME]
    with tempfile.TemporaryDirectory(dir=build_dir) as kept:
        done = subprocess.run([*command, "--keep", "--keep-dir", kept], cwd=build_dir, capture_output=True, text=True)
        ptx = "".join(path.read_text() for path in Path(kept).glob("*.ptx"))
    report = done.stdout + done.stderr
    if done.returncode != 0:
        errors = [line for line in report.splitlines() if re.search("error|fatal", line, re.I)] or report.splitlines()
        raise NvccError(
            f"nvcc ({nvcc_version()}) refused the generated source for {arch}:\n"
            + "\n".join(errors[:12])
            + f"\ncommand: {' '.join(command)}"
        )
    return report, ptx


def parse_ptxas(report: str, kernel: str, dynamic_smem: int, threads: int) -> Resources:
    """The ``Resources`` of ``kernel`` in the output of ``-Xptxas -v``. Raises ``NvccError`` when
    the kernel is not in it."""
    section = re.search(rf"Compiling entry function '{re.escape(kernel)}'.*?(?=Compiling entry function|\Z)", report, re.S)
    if not section:
        raise NvccError(f"ptxas did not report kernel {kernel!r}; its output was:\n{report.strip()[-2000:]}")
    text = section.group(0)

    def number(pattern: str) -> int:
        found = re.search(pattern, text)
        return int(found.group(1)) if found else 0

    static = number(r"(\d+) bytes smem")
    # warnings of the generated source and of ptxas; those of the headers it includes are not this
    # kernel's
    warnings = [
        line.strip()
        for line in report.splitlines()
        if re.match(rf"ptxas\b.*(\(C\d{{4}}\)|warning)|{re.escape(SOURCE_NAME)}\(\d+\): warning", line)
    ]
    return Resources(
        registers=number(r"Used (\d+) registers"),
        spills=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        stack=number(r"(\d+) bytes stack frame"),
        static_smem=static,
        barriers=number(r"used (\d+) barriers"),
        smem=static + dynamic_smem,
        threads=threads,
        warnings=tuple(dict.fromkeys(warnings)),
    )


def waits_for_predecessor(ptx: str, kernel: str) -> bool:
    """Whether the code of ``kernel`` in ``ptx`` waits for the preceding kernel itself, so that it
    may be launched before that has ended."""
    body = re.search(rf"\.entry {re.escape(kernel)}\b.*?(?=\.(?:entry|func) |\Z)", ptx, re.S)
    return body is not None and DEPENDENT_WAIT in body.group(0)


def compile_cuda(program: TileProgram, workload: AnyWorkload, schedule: Schedule, target: Target, build_dir: Path) -> CudaBuild:
    """Build the kernel of one request into ``build_dir``: kernel.cu, kernel.cubin, host.c,
    kernel.so. Runs where TileLang may be imported.

    Raises ``NvccError``, ``StubError`` or ``UnsupportedHost`` with sentences; TileLang's own
    exceptions pass through.
    """
    seconds = {}
    start = time.perf_counter()
    hasten_tilelang()
    function = program.build(workload, schedule, target)
    params = describe_params(function, kernel_parameters(workload, schedule, target), operands(workload, schedule.program, target.arch))
    artifact = lower_cuda(function, lowered_arch(program, target), dict(program.pass_configs))
    source = artifact.kernel_source
    plan = read_host(artifact.host_mod, artifact.device_mod, params)
    seconds["lower"] = time.perf_counter() - start

    start = time.perf_counter()
    report, ptx, prelude = compile_source(source, build_dir, target.arch, program.nvcc_flags)
    plan = replace(plan, launches=tuple(replace(launch, dependent=waits_for_predecessor(ptx, launch.kernel)) for launch in plan.launches))
    first = plan.launches[0]
    threads = 1
    for extent in first.block:
        threads *= int(extent)
    resources = parse_ptxas(report, first.kernel, int(first.smem), threads)
    sass = disassemble(build_dir / CUBIN_NAME, Path(find_nvcc()).resolve().parent)
    instructions = count_instructions(sass, "sass") if sass else count_instructions(ptx, "ptx")
    seconds["nvcc"] = time.perf_counter() - start

    start = time.perf_counter()
    stub = generate_stub(plan, program.name, target.arch)
    compile_stub(stub, (build_dir / CUBIN_NAME).read_bytes(), build_dir)
    seconds["stub"] = time.perf_counter() - start
    return CudaBuild(plan, resources, instructions, seconds, prelude)


def compile_source(source: str, build_dir: Path, arch: str, flags: tuple[str, ...]) -> tuple[str, str, str]:
    """What ``run_nvcc`` returns for a generated source, and whose prelude it was compiled with: ours,
    or TileLang's where the kernel calls what ours does not state."""
    ours = with_own_prelude(source)
    if ours is not None:
        (build_dir / SOURCE_NAME).write_text(ours)
        try:
            return (*run_nvcc(build_dir, arch, flags), "tilebit")
        except NvccError:
            pass  # nvcc says of TileLang's own below whether the source is wrong
    (build_dir / SOURCE_NAME).write_text(source)
    return (*run_nvcc(build_dir, arch, flags), "tilelang")
