"""A tile program: one computation that can be built for many workloads and schedules."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..schedules.schedule import Schedule
from ..schedules.target import Target

COMPILERS = ("tilelang", "tvm")
LIBRARY = __name__.partition(".")[0]
DEVICE_DIR = Path(__file__).parent / "device"

# Module of each program, imported on first use: a program's module is cheap to import (it imports its compiler only inside `build`).
PROGRAM_MODULES = {
    "gemm_wgmma": "tilebit.tiles.gemm.wgmma",
    "gemm_mma": "tilebit.tiles.gemm.mma",
    "gemm_stream": "tilebit.tiles.gemm.stream",
    "gemm_stream_bulk": "tilebit.tiles.gemm.stream_bulk",
    "gemm_cpu": "tilebit.tiles.cpu.gemm.program",
    "attention_decode": "tilebit.tiles.attention.decode",
    "attention_decode_bulk": "tilebit.tiles.attention.decode_bulk",
    "attention_append": "tilebit.tiles.attention.append",
    "attention_gather": "tilebit.tiles.attention.gather",
    "attention_prefill": "tilebit.tiles.attention.prefill",
    "attention_prefill_mma": "tilebit.tiles.attention.prefill_mma",
    "attention_decode_cpu": "tilebit.tiles.cpu.attention.decode",
    "attention_append_cpu": "tilebit.tiles.cpu.attention.append",
    "attention_gather_cpu": "tilebit.tiles.cpu.attention.gather",
    "attention_prefill_cpu": "tilebit.tiles.cpu.attention.prefill",
}


@dataclass(frozen=True, slots=True)
class TileProgram:
    """A computation written once, divided by a ``Schedule``.

    Its workload is a ``Workload`` or an ``AttentionWorkload``, of the operation that it computes.
    ``compiler`` ("tilelang" or "tvm") says which compiler ``build`` needs; the two never share a process. ``arches`` are the
    architectures it runs on. ``legal(workload, schedule, target)`` returns sentences, empty when the combination can be built.
    ``build(workload, schedule, target)`` returns the compiler's ``PrimFunc`` and touches no device. ``params(workload, schedule)``
    names the kernel's tensors in call order. ``headers`` are files under ``tiles/device`` that the generated code includes
    (they are part of a kernel's key). ``reference`` is the computation in fp64. ``pass_configs`` (TileLang's) and ``nvcc_flags`` are
    given to the compilers as they are. ``newest_arch`` caps what TileLang generates code for: on a newer target the same source is
    compiled for that target, so that an sm_89 program runs, and is tested, on sm_90a.
    """

    name: str
    compiler: str
    arches: tuple[str, ...]
    legal: Callable[[Any, Schedule, Target], list[str]]
    build: Callable[[Any, Schedule, Target], Any]
    params: Callable[[Any, Schedule], tuple[str, ...]]
    headers: tuple[str, ...] = ()
    reference: Callable[..., Any] | None = None
    pass_configs: Mapping[str, Any] = field(default_factory=dict)
    nvcc_flags: tuple[str, ...] = ()
    newest_arch: str | None = None

    def __post_init__(self) -> None:
        if self.compiler not in COMPILERS:
            raise ValueError(f"program {self.name!r} names the compiler {self.compiler!r}; accepted: {COMPILERS}")
        for header in self.headers:
            if not (DEVICE_DIR / header).is_file():
                raise ValueError(f"program {self.name!r} lists the header {header!r}; accepted: names of files in {DEVICE_DIR}")


def program_module(name: str) -> str:
    """The module that holds program ``name``. A dotted name is itself a module (with a ``PROGRAM``): so programs may live outside
    this package. Raises ``ValueError`` for any other unknown name."""
    if "." in name:
        return name
    if name not in PROGRAM_MODULES:
        raise ValueError(f"unknown tile program {name!r}; accepted: {', '.join(sorted(PROGRAM_MODULES))}, or a module path with a PROGRAM")
    return PROGRAM_MODULES[name]


def program(name: str) -> TileProgram:
    """The tile program called ``name``; imports its module on first use. Raises ``ValueError`` for an unknown one."""
    return importlib.import_module(program_module(name)).PROGRAM


def program_sources(name: str) -> tuple[Path, ...]:
    """Every source file that decides what program ``name`` builds, sorted: the Python files of its package, what these import from this
    library (transitively), and its device headers."""
    module = importlib.import_module(program_module(name))
    package = module.__name__.rpartition(".")[0] or module.__name__
    waiting = [f"{package}.{path.stem}" for path in Path(str(module.__file__)).parent.glob("*.py")]
    found: dict[str, Path] = {}
    while waiting:
        current = waiting.pop()
        path = None if current in found else _source(current)
        if path is not None:
            found[current] = path
            waiting += _imports(current, path)
    return (*sorted(set(found.values())), *(DEVICE_DIR / header for header in sorted(module.PROGRAM.headers)))


def _source(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None  # a name inside a module rather than a module
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None


def _imports(module: str, path: Path) -> list[str]:
    """Names of this library's modules that the file at ``path`` may import, wherever in it; some are names inside modules."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return [name for name in names if name.partition(".")[0] == LIBRARY]
