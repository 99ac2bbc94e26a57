"""Findings about a compiled CUDA kernel: did the compiler do what the schedule asked for?

TileLang falls back silently (a copy that TMA or cp.async cannot make becomes plain loads, one that
cannot be vectorized becomes scalar), and ptxas spills and serializes silently. A finding is a
sentence that starts with its level: an error means that the kernel must not be used, a warning that
it is slower than meant.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...schedules.operations import Rule, find_rule
from ...schedules.schedule import Schedule
from ...schedules.target import Target

ERROR, WARNING = "error: ", "warning: "
# The code alone, without an analysis of where its branches go, which is a quarter of the time.
NVDISASM = ["-c", "-ndf"]
# ptxas advisories that say wgmma instructions wait for one another
SERIALIZED = re.compile(r"\(C75(0[5-9]|1\d)\)")


@dataclass(frozen=True, slots=True)
class Resources:
    """What ptxas says one kernel uses: ``registers`` a thread, bytes of ``spills`` (stores +
    loads), ``stack`` and static shared memory (``static_smem``), ``barriers``; ``smem`` is the
    shared memory of a block in bytes, dynamic part included; ``threads`` of a block; ``warnings``
    of ptxas and of the generated source."""

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
    """How often a kernel's code (``level``: "ptx" or "sass") does what a lint rule asks about.
    ``tma`` counts loads of tiles through a tensor map, ``bulk_copies`` those of plain byte ranges,
    ``dependent_waits`` waits for the preceding kernel of a dependent launch."""

    level: str
    wgmma: int
    mma: int
    ldmatrix: int
    tma: int
    bulk_copies: int
    cp_async: int
    dependent_waits: int
    wide_shared_loads: int
    register_reallocations: int
    float_atomics: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


PATTERNS = {
    "ptx": {
        "wgmma": r"\bwgmma\.mma_async",
        "mma": r"\bmma\.sync",
        "ldmatrix": r"\bldmatrix\.sync",
        "tma": r"\bcp\.async\.bulk\.tensor",
        "bulk_copies": r"\bcp\.async\.bulk\.shared",
        "cp_async": r"\bcp\.async\.c[ag]",
        "dependent_waits": r"\bgriddepcontrol\.wait",
        "wide_shared_loads": r"\bld\.shared\.(v4\.[bufs]32|v2\.[bufs]64)",
        "register_reallocations": r"\bsetmaxnreg",
        "float_atomics": r"\b(atom|red)\.[\w.:]*\.(f16|f16x2|bf16|bf16x2|f32|f64)\b",
    },
    "sass": {
        "wgmma": r"\b[HIQ]GMMA\b",
        "mma": r"\b[BHIQ]MMA\b",
        "ldmatrix": r"\bLDSM\b",
        "tma": r"\bUTMALDG\b",
        "bulk_copies": r"\bUBLKCP\b",
        "cp_async": r"\bLDGSTS\b",
        "dependent_waits": r"\bACQBULK\b",
        "wide_shared_loads": r"\bLDS(\.\w+)*\.128",
        "register_reallocations": r"\bUSETMAXREG",
        "float_atomics": r"\b(RED|REDG|ATOM|ATOMG|ATOMS)\.[\w.]*(F16|BF16|F32|F64)",
    },
}

# What it means when an instruction is not there: (level of the finding, its name, the consequence).
ABSENT = {
    "wgmma": (ERROR, "wgmma", "the product does not run on the tensor cores"),
    "mma": (ERROR, "mma.sync", "the product does not run on the tensor cores"),
    "ldmatrix": (ERROR, "ldmatrix", "operands do not reach the tensor cores in their order"),
    "tma": (ERROR, "TMA load", "copies became plain loads"),
    "bulk_copies": (ERROR, "bulk copy", "packed operands became plain loads"),
    "cp_async": (ERROR, "cp.async", "the pipeline was stripped"),
    "dependent_waits": (ERROR, "wait for the preceding kernel", "in a dependent launch it would read what that one still writes"),
    "register_reallocations": (WARNING, "setmaxnreg", "producer and consumers share registers evenly"),
    "wide_shared_loads": (WARNING, "128-bit shared-memory load", "packed operands are read in pieces"),
}


def count_instructions(code: str, level: str) -> Instructions:
    """The ``Instructions`` of PTX or SASS text."""
    return Instructions(level, **{name: len(re.findall(pattern, code)) for name, pattern in PATTERNS[level].items()})


def disassemble(cubin: Path, toolkit: Path) -> str | None:
    """SASS of a cubin by nvdisasm or cuobjdump (from PATH or the folder ``toolkit``), or None when
    neither is there or both fail."""
    for tool, flags in (("nvdisasm", NVDISASM), ("cuobjdump", ["--dump-sass"])):
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
    if registers > target.REGISTERS_PER_SM:
        found.append(
            f"{ERROR}{resources.registers} registers x {resources.threads} threads exceed the {target.REGISTERS_PER_SM} of an SM: "
            "the kernel cannot launch"
        )
    elif schedule.min_blocks > 1:
        by_smem = target.smem_per_sm // (resources.smem + target.BLOCK_SMEM)
        fit = min(target.REGISTERS_PER_SM // max(registers, 1), by_smem, target.threads_per_sm // resources.threads)
        if fit < schedule.min_blocks:
            found.append(f"{WARNING}{fit} blocks fit on one SM where the schedule asks for {schedule.min_blocks}")
    return found


def _warp_findings(resources: Resources, schedule: Schedule, rule: Rule) -> list[str]:
    """Whether the block has the loading and the computing warps that its program tells apart, and
    the registers that they take."""
    found, loading, computing = [], rule.loading_warps * 32, schedule.num_warps * 32
    if resources.threads != computing + loading:
        found.append(
            f"{ERROR}{resources.threads} threads a block; accepted: {computing + loading}, "
            f"{schedule.num_warps} computing warps and {rule.loading_warps} that load"
        )
    if rule.registers is None:
        return found
    producer, consumer = rule.registers(schedule)
    taken, given = producer * loading + consumer * computing, -(-resources.registers // 8) * 8 * resources.threads
    if taken > given:
        found.append(f"{ERROR}setmaxnreg takes {taken} registers of the {given} that a block starts with: the kernel would wait for ever")
    return found


def _program_findings(code: Instructions, resources: Resources, schedule: Schedule) -> list[str]:
    """What a program's rule promises about its code."""
    rule = find_rule(schedule.program)
    found = _warp_findings(resources, schedule, rule) if rule.loading_warps else []
    for instruction in rule.promises:
        if not getattr(code, instruction):
            severity, name, consequence = ABSENT[instruction]
            found.append(f"{severity}no {name} in the {code.level}: {consequence}")
    return found


def lint(code: Instructions, resources: Resources, schedule: Schedule, target: Target) -> list[str]:
    """Findings over a kernel's instructions and resources; empty: nothing to say. Each starts with
    "error: " or "warning: "."""
    found = _resource_findings(resources, schedule, target) + _program_findings(code, resources, schedule)
    if code.float_atomics:
        found.append(f"{ERROR}{code.float_atomics} floating-point atomics in the {code.level}: the result depends on the order of blocks")
    for line in resources.warnings:
        found.append(f"{ERROR if SERIALIZED.search(line) else WARNING}{line}")
    return found


def errors(findings: list[str]) -> list[str]:
    """Those findings that forbid using the kernel."""
    return [finding for finding in findings if finding.startswith(ERROR)]
