"""A tile program: one computation that can be built for many workloads and schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..schedules.schedule import Schedule
from ..schedules.target import Target

COMPILERS = ("tilelang", "tvm")
DEVICE_DIR = Path(__file__).parent / "device"


@dataclass(frozen=True, slots=True)
class TileProgram:
    """A computation written once, divided by a ``Schedule``. What it accepts is said by the
    ``Rule`` of its name (``schedules``).

    ``compiler`` ("tilelang" or "tvm") says which compiler ``build`` needs; the two never share a
    process. ``build(workload, schedule, target)`` returns the compiler's ``PrimFunc``, whose
    parameters are the workload's operands in call order (``schedules.operations.params``), and
    touches no device. ``headers`` are files under ``tiles/device`` that the generated code includes
    (they are part of a kernel's key). ``pass_configs`` (TileLang's) and ``nvcc_flags`` are given to
    the compilers as they are. ``newest_arch`` caps what TileLang generates code for: on a newer
    target the same source is compiled for that target, so that an sm_89 program runs, and is
    tested, on sm_90a.
    """

    name: str
    compiler: str
    build: Callable[[Any, Schedule, Target], Any]
    headers: tuple[str, ...] = ()
    pass_configs: Mapping[str, Any] = field(default_factory=dict)
    nvcc_flags: tuple[str, ...] = ()
    newest_arch: str | None = None

    def __post_init__(self) -> None:
        if self.compiler not in COMPILERS:
            raise ValueError(f"program {self.name!r} names the compiler {self.compiler!r}; accepted: {COMPILERS}")
        for header in self.headers:
            if not (DEVICE_DIR / header).is_file():
                raise ValueError(f"program {self.name!r} lists the header {header!r}; accepted: names of files in {DEVICE_DIR}")
