"""From a request to a kernel directory: build, lint, manifest, publish. ``compile_request`` runs
where its compiler may be imported."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...runtime import MANIFEST_NAME, SCHEMA
from ...schedules.operations import legal, operands
from ...schedules.operations import params as kernel_parameters
from ..programs import program
from .cache import ArtifactCache
from .host_plan import describe_params
from .kernel import Kernel
from .lint import errors, lint
from .pool import CompilePool
from .request import CompileFailure, CompileRequest, compiler_versions

__all__ = ["CompileFailure", "CompilePool", "CompileRequest", "compile_kernel", "compile_request"]


def _build_cuda(request: CompileRequest, build_dir: Path) -> dict[str, Any]:
    """Manifest fields of a CUDA build. Raises ``CompileFailure``."""
    from .cuda import NvccError, compile_cuda
    from .host_plan import UnsupportedHost
    from .host_stub import StubError

    try:
        build = compile_cuda(program(request.program), request.workload, request.schedule, request.target, build_dir)
    except NvccError as error:
        raise CompileFailure(request, "nvcc", (str(error),)) from None
    except (StubError, UnsupportedHost) as error:
        raise CompileFailure(request, "stub", (str(error),)) from None
    return {
        "params": [p.to_json() for p in build.plan.params],
        "resources": {**build.resources.to_json(), "instructions": build.instructions.to_json()},
        "lint": lint(build.instructions, build.resources, request.schedule, request.target),
        "prelude": build.prelude,
        "seconds": {name: round(value, 3) for name, value in build.seconds.items()},
    }


def _build_cpu(request: CompileRequest, build_dir: Path) -> dict[str, Any]:
    from .cpu import compile_cpu

    workload, schedule, target = request.workload, request.schedule, request.target
    function = program(request.program).build(workload, schedule, target)
    params = describe_params(function, kernel_parameters(workload, schedule, target), operands(workload, schedule.program, target.arch))
    report = compile_cpu(function, request.target, build_dir)
    resources = {name: value for name, value in report.items() if name != "lint"}
    return {"params": [p.to_json() for p in params], "resources": resources, "lint": report["lint"]}


BUILDERS: dict[str, Callable[[CompileRequest, Path], dict[str, Any]]] = {"tilelang": _build_cuda, "tvm": _build_cpu}


def compile_request(request: CompileRequest, cache: ArtifactCache) -> Kernel:
    """The kernel of ``request``, from the cache or compiled now and published. Raises
    ``CompileFailure`` with sentences.

    Imports the program's compiler into this process: call it in a worker (see ``pool.py``) unless
    the process is spent anyway.
    """
    found = cache.lookup(request.key)
    if found is not None:
        return found
    chosen = program(request.program)
    if request.schedule.program != request.program:
        raise CompileFailure(
            request, "illegal", (f"the schedule is for {request.schedule.program!r}, the request for {request.program!r}",)
        )
    reasons = legal(request.workload, request.schedule, request.target)
    if reasons:
        raise CompileFailure(request, "illegal", tuple(reasons))
    build_dir = cache.build_dir()
    try:
        fields = BUILDERS[chosen.compiler](request, build_dir)
        refused = errors(fields["lint"])
        if refused:
            raise CompileFailure(request, "lint", tuple(refused))
        write_manifest(request, build_dir, fields)
        return cache.publish(request.key, build_dir)
    except CompileFailure:
        raise
    except OSError as error:
        raise CompileFailure(request, "cache", (cache.explain("write a kernel", error),)) from None
    except Exception as error:
        raise CompileFailure(request, "build", (f"{type(error).__name__}: {error}",)) from error
    finally:
        cache.discard(build_dir)  # nothing is left of it after a publish


def write_manifest(request: CompileRequest, build_dir: Path, fields: dict[str, Any]) -> None:
    """Write ``manifest.json``: the request, the build's ``fields``, and length and sha256 of every
    file of ``build_dir``."""
    files = {}
    for path in sorted(p for p in build_dir.iterdir() if p.is_file() and p.name != MANIFEST_NAME):
        data = path.read_bytes()
        files[path.name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    manifest = {
        "schema": SCHEMA,
        "key": request.key,
        "program": request.program,
        "workload": request.workload.to_json(),
        "schedule": request.schedule.to_json(),
        "target": request.target.to_json(),
        "versions": {**compiler_versions(program(request.program).compiler), "python": sys.version.split()[0]},
        **fields,
        "files": files,
    }
    (build_dir / MANIFEST_NAME).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def compile_kernel(request: CompileRequest, cache: ArtifactCache | None = None, pool: CompilePool | None = None) -> Kernel:
    """The kernel of ``request``: from the cache, else compiled in a worker process, of ``pool`` or one
    that is kept for the next call. Raises ``CompileFailure`` with the reasons."""
    cache = cache or ArtifactCache()
    found = cache.lookup(request.key)
    if found is not None:
        return found
    if pool is not None:
        (result,) = pool.compile([request])
    else:
        with CompilePool(jobs=1, cache=cache, keep=True) as one:
            (result,) = one.compile([request])
    if isinstance(result, CompileFailure):
        raise result
    return result
