"""What is asked of the compilers, and the key under which the answer is stored."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ...runtime import SCHEMA
from ...schedules.operations import AnyWorkload, find_rule
from ...schedules.schedule import Schedule
from ...schedules.target import Target
from ..program import DEVICE_DIR
from ..programs import program, program_sources
from .prelude import FILES

# Files of this package that decide what an artifact contains, beside the program's own.
PIPELINE = {
    "tilelang": (
        *("request.py", "compile.py", "cuda.py", "hasten.py", "prelude.py", "lint.py", "host_plan.py", "host_stub.py"),
        "../device/host_runtime.h",
        *(f"../device/{name}" for name in FILES),
    ),
    "tvm": ("request.py", "compile.py", "cpu.py"),
}
DISTRIBUTIONS = {"tilelang": "tilelang", "tvm": "apache-tvm"}
HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """Everything a compile needs, and nothing of a device: picklable, so that it travels to a
    worker or another machine."""

    program: str
    workload: AnyWorkload
    schedule: Schedule
    target: Target

    @property
    def key(self) -> str:
        """sha256 over all that determines the artifact: program and sources, workload without its
        DYNAMIC sizes, schedule, arch, compiler versions; of a GPU its SMs, for as many of which a
        persistent grid is made."""
        compiler = program(self.program).compiler
        workload = {name: value for name, value in self.workload.to_json().items() if name not in self.workload.DYNAMIC}
        parts = {
            "schema": SCHEMA,
            "program": self.program,
            "sources": _sources_digest(self.program, find_rule(self.program).sources(self.workload)),
            "workload": workload,
            "schedule": self.schedule.to_json(),
            "arch": self.target.arch,
            "features": list(self.target.features),
            "smem": self.target.smem,
            "units": self.target.units if self.target.is_cuda else None,
            "versions": compiler_versions(compiler),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def __str__(self) -> str:
        w, s = self.workload, self.schedule
        tile = f"{s.block_n}x{s.block_m}x{s.block_k} stages={s.num_stages} warps={s.num_warps} split_k={s.split_k}"
        return f"{self.program}[{w.served} {self.target.arch} {tile}]"


class CompileFailure(Exception):
    """Why a request has no kernel. ``kind`` is "illegal", "build", "nvcc", "stub", "lint",
    "timeout", "crash" or "cache"; ``sentences`` say more."""

    def __init__(self, request: CompileRequest, kind: str, sentences: tuple[str, ...]) -> None:
        super().__init__(request, kind, sentences)
        self.request = request
        self.kind = kind
        self.sentences = sentences

    def __str__(self) -> str:
        return f"{self.request} was not compiled ({self.kind}): " + "; ".join(self.sentences)


@functools.lru_cache(maxsize=32)
def _sources_digest(name: str, more: tuple[str, ...]) -> str:
    """Of a program, and of ``more`` files as ``Rule.sources`` names them."""
    digest = hashlib.sha256()
    pipeline = (HERE / part for part in PIPELINE[program(name).compiler])
    for path in (*program_sources(name), *pipeline, *(DEVICE_DIR / part for part in more)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@functools.lru_cache(maxsize=4)
def compiler_versions(compiler: str) -> dict[str, str | None]:
    """Versions of everything that takes part in a compile; None for what is not installed (a key
    made there matches no artifact)."""
    versions: dict[str, str | None] = {}
    for name in (DISTRIBUTIONS[compiler], "apache-tvm-ffi"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    if compiler == "tilelang":
        from .cuda import NvccError, nvcc_version

        try:
            versions["nvcc"] = nvcc_version()
        except (NvccError, OSError, subprocess.SubprocessError):
            versions["nvcc"] = None
    return versions
