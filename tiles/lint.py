"""Findings about a compiled CUDA kernel: did the compiler do what the schedule asked for?

TileLang falls back silently (a pipeline that cannot be specialized is serialized, a copy that cannot be vectorized becomes scalar), and
ptxas spills silently. A finding is a sentence that starts with its level: an error means that the kernel must not be used, a warning
that it is slower than meant.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..schedules.schedule import Schedule
from ..schedules.target import Target

ERROR, WARNING = "error: ", "warning: "
REGISTERS_PER_SM = 65536
THREADS_PER_SM = 2048
BLOCK_SMEM = 1024  # bytes of shared memory that the system takes per resident block
PRODUCER_THREADS = 128  # the warpgroup that TileLang adds when it specializes
# ptxas advisories that say wgmma instructions wait for one another
SERIALIZED = re.compile(r"\(C75(0[5-9]|1\d)\)")


@dataclass(frozen=True, slots=True)
class Resources:
    """What ptxas says one kernel uses: ``registers`` a thread, bytes of ``spills`` (stores + loads), ``stack`` and static shared memory
    (``static_smem``), ``barriers``; ``smem`` is the shared memory of a block in bytes, dynamic part included; ``threads`` of a block;
    ``warnings`` of ptxas and of the generated source."""

    registers: int
    spills: int
    stack: int
    static_smem: int
    barriers: int
    smem: int
    threads: int
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "warnings": list(self.warnings)}


@dataclass(frozen=True, slots=True)
class Instructions:
    """How often a kernel's code (``level``: "ptx" or "sass") does what a lint rule asks about."""

    level: str
    wgmma: int
    mma: int
    tma: int
    cp_async: int
    wide_shared_loads: int
    register_reallocations: int
    float_atomics: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


PATTERNS = {
    "ptx": {
        "wgmma": r"\bwgmma\.mma_async",
        "mma": r"\bmma\.sync",
        "tma": r"\bcp\.async\.bulk",
        "cp_async": r"\bcp\.async\.c[ag]",
        "wide_shared_loads": r"\bld\.shared\.(v4\.[bufs]32|v2\.[bufs]64)",
        "register_reallocations": r"\bsetmaxnreg",
        "float_atomics": r"\b(atom|red)\.[\w.:]*\.(f16|f16x2|bf16|bf16x2|f32|f64)\b",
    },
    "sass": {
        "wgmma": r"\b[HIQ]GMMA\b",
        "mma": r"\b[HIQ]MMA\b",
        "tma": r"\b(UTMALDG|UBLKCP)\b",
        "cp_async": r"\bLDGSTS\b",
        "wide_shared_loads": r"\bLDS(\.\w+)*\.128",
        "register_reallocations": r"\bUSETMAXREG",
        "float_atomics": r"\b(RED|REDG|ATOM|ATOMG|ATOMS)\.[\w.]*(F16|BF16|F32|F64)",
    },
}


def count_instructions(code: str, level: str) -> Instructions:
    """The ``Instructions`` of PTX or SASS text."""
    return Instructions(level, **{name: len(re.findall(pattern, code)) for name, pattern in PATTERNS[level].items()})


def disassemble(cubin: Path, toolkit: Path) -> str | None:
    """SASS of a cubin by nvdisasm or cuobjdump (from PATH or the folder ``toolkit``), or None when neither is there or both fail."""
    for tool, flags in (("nvdisasm", ["-c"]), ("cuobjdump", ["--dump-sass"])):
        path = shutil.which(tool) or shutil.which(tool, path=str(toolkit))
        if path:
            done = subprocess.run([path, *flags, str(cubin)], capture_output=True, text=True)
            if done.returncode == 0 and done.stdout.strip():
                return done.stdout
    return None


def _resource_findings(resources: Resources, schedule: Schedule, target: Target) -> list[str]:
    found = []
    if resources.spills:
        found.append(f"{ERROR}{resources.spills} bytes of register spills; accepted: none. Use a smaller tile or more warps")
    elif resources.stack:
        found.append(f"{WARNING}{resources.stack} bytes of local memory a thread (an array is indexed dynamically); aim: none")
    if resources.smem > target.smem:
        found.append(
            f"{ERROR}{resources.smem} bytes of shared memory a block; accepted on {target.arch}: {target.smem}. "
            "Use fewer stages or a smaller tile"
        )
    registers = resources.registers * resources.threads
    if registers > REGISTERS_PER_SM:
        found.append(
            f"{ERROR}{resources.registers} registers x {resources.threads} threads exceed the {REGISTERS_PER_SM} of an SM: "
            "the kernel cannot launch"
        )
    elif schedule.min_blocks > 1:
        by_smem = target.smem_per_sm // (resources.smem + BLOCK_SMEM)
        fit = min(REGISTERS_PER_SM // max(registers, 1), by_smem, THREADS_PER_SM // resources.threads)
        if fit < schedule.min_blocks:
            found.append(f"{WARNING}{fit} blocks fit on one SM where the schedule asks for {schedule.min_blocks}")
    return found


def _program_findings(code: Instructions, resources: Resources, schedule: Schedule) -> list[str]:
    """What the programs of this library promise about their code; programs from elsewhere promise nothing."""
    found = []
    if schedule.program == "gemm_wgmma":
        if resources.threads != schedule.num_warps * 32 + PRODUCER_THREADS:
            found.append(
                f"{ERROR}warp specialization did not fire: {resources.threads} threads where {schedule.num_warps} computing warps "
                f"and a producer warpgroup make {schedule.num_warps * 32 + PRODUCER_THREADS}; the pipeline is serialized"
            )
        if not code.wgmma:
            found.append(f"{ERROR}no wgmma in the {code.level}: the product does not run on the tensor cores")
        if not code.tma:
            found.append(f"{ERROR}no TMA load in the {code.level}: copies became plain loads")
        if not code.register_reallocations and schedule.min_blocks == 1:
            found.append(f"{WARNING}no setmaxnreg in the {code.level}: producer and consumers share registers evenly")
    if schedule.program == "gemm_mma":
        if not code.mma:
            found.append(f"{ERROR}no mma.sync in the {code.level}: the product does not run on the tensor cores")
        if not code.cp_async and schedule.num_stages > 1:
            found.append(f"{ERROR}no cp.async in the {code.level}: the pipeline was stripped")
    if schedule.program in ("gemm_wgmma", "gemm_mma") and not code.wide_shared_loads:
        found.append(f"{WARNING}no 128-bit shared-memory load in the {code.level}: packed weights are read in pieces")
    return found


def lint(code: Instructions, resources: Resources, schedule: Schedule, target: Target) -> list[str]:
    """Findings over a kernel's instructions and resources; empty: nothing to say. Each starts with "error: " or "warning: "."""
    found = _resource_findings(resources, schedule, target) + _program_findings(code, resources, schedule)
    if code.float_atomics:
        found.append(f"{ERROR}{code.float_atomics} floating-point atomics in the {code.level}: the result depends on the order of blocks")
    for line in resources.warnings:
        found.append(f"{ERROR if SERIALIZED.search(line) else WARNING}{line}")
    return found


def errors(findings: list[str]) -> list[str]:
    """Those findings that forbid using the kernel."""
    return [finding for finding in findings if finding.startswith(ERROR)]
