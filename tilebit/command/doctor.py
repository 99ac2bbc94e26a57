"""What this machine can do with tilebit, what is missing, and how to get it."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

OK, WARNING, MISSING = "ok", "warning", "missing"
MIN_FREE_BYTES = 1 << 30  # a compiled kernel is about 1 MiB; a tuning run keeps hundreds


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact: ``status`` is "ok", "warning" (something optional or slower) or "missing" (some task named in ``do`` is impossible);
    ``do`` says how to get it."""

    name: str
    status: str
    found: str
    do: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings, and the abilities that follow from them: each task with whether it works here."""

    findings: tuple[Finding, ...]
    abilities: dict[str, bool]

    @property
    def healthy(self) -> bool:
        """Whether this machine can run kernels and compile them for its own device."""
        return all(self.abilities[task] for task in ("run kernels", "compile for this machine"))

    def to_json(self) -> dict[str, Any]:
        return {"healthy": self.healthy, "abilities": self.abilities, "findings": [f.to_json() for f in self.findings]}


def diagnose() -> Diagnosis:
    """Look at this machine; changes nothing but a probe file in the artifact cache, which is removed again."""
    pins = _requirements()
    packages = {
        name: _package(name, pins) for name in ("torch", "apache-tvm-ffi", "apache-tvm", "tilelang", "matplotlib", "compressed-tensors")
    }
    gpu, arch = _gpu()
    nvcc, compiler, cache = _nvcc(), _c_compiler(), _cache()
    findings = (_python(), *packages.values(), gpu, nvcc, compiler, _cpu(), cache, _switch(), _records(), _packs())
    ok = {f.name for f in findings if f.status != MISSING}
    run = {"torch", "apache-tvm-ffi"} <= ok
    build = run and {"C compiler", "artifact cache"} <= ok and "compiling" in ok
    cpu = build and "apache-tvm" in ok
    cuda = build and {"tilelang", "nvcc"} <= ok
    abilities = {
        "run kernels": run,
        "compile for this machine": cuda if arch else cpu,
        "compile for CPUs": cpu,
        "cross-compile for NVIDIA GPUs": cuda,
        "run on an NVIDIA GPU": run and arch is not None,
        "draw layouts": "matplotlib" in ok,
    }
    return Diagnosis(findings, abilities)


def _requirements() -> dict[str, str]:
    """Version specifier of every distribution that tilebit's metadata names ("==0.1.15"); empty when tilebit runs uninstalled."""
    try:
        declared = importlib.metadata.requires("tilebit") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found = {}
    for line in declared:
        match = re.match(r"([A-Za-z0-9_.-]+)\s*(?:\[[^\]]*\])?\s*([^;\s]*)", line)
        if match:
            found[match.group(1).lower()] = match.group(2)
    return found


_PURPOSE = {
    "torch": ("run anything", "pip install torch", MISSING),
    "apache-tvm-ffi": ("load kernels", "pip install {pin}", MISSING),
    "apache-tvm": ("compile for CPUs", "pip install 'tilebit[compile]'", MISSING),
    "tilelang": ("compile for NVIDIA GPUs", "pip install 'tilebit[compile]'", MISSING),
    "matplotlib": ("draw layouts (tilebit show)", "pip install 'tilebit[draw]'", WARNING),
    "compressed-tensors": (
        "read the configuration of compressed-tensors checkpoints with its own code",
        "pip install compressed-tensors",
        WARNING,
    ),
}


def _package(name: str, pins: dict[str, str]) -> Finding:
    purpose, install, severity = _PURPOSE[name]
    pin = pins.get(name, "")
    how = install.format(pin=f"{name}{pin}")
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, severity, "not installed", f"needed to {purpose}: {how}")
    if pin.startswith("==") and version != pin[2:]:
        return Finding(
            name, WARNING, version, f"tilebit is tested with {pin[2:]}, other versions may not load its kernels: pip install {name}{pin}"
        )
    floor = re.match(r">=([\d.]+)", pin)
    if floor and _numbers(version) < _numbers(floor.group(1)):
        return Finding(name, MISSING, version, f"{floor.group(1)} or newer is needed to {purpose}: {how}")
    return Finding(name, OK, version)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("python", OK, version)


def _gpu() -> tuple[Finding, str | None]:
    """The finding, and the arch of the first GPU (None without one that kernels run on)."""
    from ..schedules.target import detect_target, driver_version

    driver = driver_version()
    try:
        import torch
    except ImportError:
        return Finding("GPU", WARNING, "unknown: torch is not installed", "pip install torch"), None
    if not torch.cuda.is_available():
        if driver is None:
            return Finding("GPU", OK, "none (no NVIDIA driver); kernels run on the CPU"), None
        why = (
            "this torch is built without CUDA"
            if torch.version.cuda is None
            else f"torch (CUDA {torch.version.cuda}) cannot use driver {driver}"
        )
        return Finding(
            "GPU", WARNING, f"driver {driver}, but {why}", "install the CUDA build of torch that fits the driver (pytorch.org/get-started)"
        ), None
    names = Counter(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    text = (
        ", ".join(f"{count} x {name}" if count > 1 else name for name, count in names.items())
        + f"; driver {driver}, CUDA {torch.version.cuda}"
    )
    try:
        target = detect_target("cuda:0")
    except ValueError as error:
        return Finding("GPU", WARNING, text, str(error)), None
    return Finding("GPU", OK, f"{text}, {target.arch}, {target.units} SMs"), target.arch


def _attempt(name: str, severity: str, look: Callable[[], str]) -> Finding:
    """What ``look`` finds; its exception's message is the advice."""
    try:
        return Finding(name, OK, look())
    except Exception as error:  # whatever is wrong with a tool is a finding, not a failure of the doctor
        return Finding(
            name, severity, "not found" if type(error).__name__ in ("NvccError", "StubError") else type(error).__name__, str(error)
        )


def _nvcc() -> Finding:
    def look() -> str:
        from ..tiles.compiler.cuda import find_nvcc, nvcc_version

        return f"{nvcc_version()} ({find_nvcc()})"

    return _attempt("nvcc", MISSING, look)


def _c_compiler() -> Finding:
    def look() -> str:
        from ..tiles.compiler.host_stub import c_compiler

        return c_compiler()

    return _attempt("C compiler", MISSING, look)


def _cpu() -> Finding:
    from ..schedules.target import cpu_target

    target = cpu_target()
    text = f"{target.name}, {target.units} cores, {', '.join(target.features) or 'no vector extension that kernels use'}"
    if not target.features:
        return Finding("CPU", WARNING, text, "CPU kernels need AVX2 with FMA, or AVX-512; use an NVIDIA GPU")
    return Finding("CPU", OK, text)


def _cache() -> Finding:
    def look() -> str:
        from ..tiles.compiler.cache import ArtifactCache

        cache = ArtifactCache()
        cache.discard(cache.build_dir())
        free = shutil.disk_usage(cache.root).free
        entries = sum(1 for _ in Path(cache.kernels).iterdir())
        return f"{cache.root}: {entries} kernels, {free / 2**30:.1f} GiB free" + (
            " (low: free some space or set TILEBIT_CACHE)" if free < MIN_FREE_BYTES else ""
        )

    return _attempt("artifact cache", MISSING, look)


def _switch() -> Finding:
    from ..kernels import NO_COMPILE, compiling_is_off

    if compiling_is_off():
        return Finding(
            "compiling",
            MISSING,
            f"forbidden by {NO_COMPILE}={os.environ[NO_COMPILE]}",
            f"unset {NO_COMPILE} to compile here; packs and cached kernels work as they are",
        )
    return Finding("compiling", OK, "allowed")


def _records() -> Finding:
    from ..schedules.records import records_path, shipped_records, user_records
    from ..schedules.target import detect_target

    shipped, own = shipped_records(), user_records()
    try:
        target = detect_target()
    except ValueError:
        return Finding("tuned records", WARNING, f"{len(shipped)} shipped, {len(own)} in {records_path()}", "this GPU is not supported")
    here = sum(1 for r in (*shipped, *own) if r.ok and r.measured_on(target))
    text = f"{len(shipped)} shipped, {len(own)} in {records_path()}; {here} measured on a device like this one"
    advice = "" if here else "schedules come from the cost model until this device is tuned: `tilebit tune --n N --k K`"
    return Finding("tuned records", OK if here else WARNING, text, advice)


def _packs() -> Finding:
    from .. import packs

    loaded = packs.loaded()
    text = ", ".join(f"{pack.path}: {len(pack)} kernels for {', '.join(pack.arches)}" for pack in loaded)
    return Finding("packs", OK, text or "none loaded in this process; `tilebit pack` writes one, tilebit.packs.load(PATH) loads it")
