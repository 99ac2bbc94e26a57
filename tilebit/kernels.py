"""From a workload to a kernel: out of a loaded pack, else out of the artifact cache, else compiled with the schedule that
``schedules.select`` chooses.

A chosen schedule that does not pass the lint (the cost model cannot see register spills) is remembered as unfit, beside the artifact
cache, and the next best one is tried: a call never fails because one schedule does. With ``TILEBIT_NO_COMPILE=1`` nothing is compiled and
the error names the commands which build the kernel.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from . import packs
from .runtime import LoadedKernel
from .schedules.attention import AttentionWorkload
from .schedules.operations import AnyWorkload
from .schedules.schedule import Schedule
from .schedules.select import explain, select
from .schedules.target import Target

if TYPE_CHECKING:
    from .tiles.cache import ArtifactCache
    from .tiles.compile import CompileFailure, CompileRequest
    from .tiles.kernel import Kernel

NO_COMPILE = "TILEBIT_NO_COMPILE"
TRIES = 8  # schedules tried for one workload
# Kinds of ``CompileFailure`` that are the schedule's own and will be the same at every attempt; the others are this machine's.
UNFIT = ("illegal", "lint")


class KernelUnavailable(RuntimeError):
    """No kernel for this call is at hand and none may or can be built now; the message says how to get one."""


def find_kernel(workload: AnyWorkload, target: Target) -> LoadedKernel:
    """The loaded kernel for ``workload`` (sizes: its bucket's) on this machine's ``target``. Raises ``KernelUnavailable``."""
    packed = packs.find(workload, target)
    return packed if packed is not None else build([workload], target)[0].load()


def build(workloads: Iterable[AnyWorkload], target: Target, jobs: int | None = 1) -> list[Kernel]:
    """A kernel per workload for any ``target``, from the cache or compiled in ``jobs`` processes (None: one per core); opens none.

    Raises ``KernelUnavailable`` with every reason when one cannot be had; those that could be compiled stay in the cache.
    """
    from .tiles.cache import ArtifactCache
    from .tiles.compile import CompileFailure
    from .tiles.pool import CompilePool

    wanted, cache = list(workloads), ArtifactCache()
    ranked = [_ranked(workload, target) for workload in wanted]
    found: dict[int, Kernel] = {}
    reasons: list[str] = []
    waiting = list(range(len(wanted)))
    with CompilePool(jobs, cache=cache) as pool:
        while waiting:
            requests: dict[int, CompileRequest] = {}
            for index in waiting:
                kernel, request = _next(wanted[index], ranked[index], target, cache)
                if kernel is not None:
                    found[index] = kernel
                elif request is not None:
                    requests[index] = request
                else:
                    reasons.append(f"{wanted[index]}: none of the {TRIES} best schedules passes the lint; `tilebit tune` searches further")
            if requests and compiling_is_off():
                reasons += [_how_to_build(request.workload, target) for request in requests.values()]
                break
            waiting = []
            for (index, request), result in zip(requests.items(), pool.compile(list(requests.values())), strict=True):
                if not isinstance(result, CompileFailure):
                    found[index] = result
                elif result.kind in UNFIT:
                    _remember(cache, request, result)
                    waiting.append(index)
                else:
                    reasons.append(f"{result}; `tilebit doctor` says what this machine can compile and what is missing")
    if reasons:
        raise KernelUnavailable("\n".join(reasons))
    return [found[index] for index in range(len(wanted))]


def _ranked(workload: AnyWorkload, target: Target) -> Iterator[Schedule]:
    """The schedule to use, then those to fall back to, best first."""
    chosen = select(workload, target)
    yield chosen
    rows = explain(workload, target)
    usable = (r.schedule for r in rows if not r.illegal and (r.record is None or r.record.ok) and r.schedule != chosen)
    yield from islice(usable, TRIES - 1)


def _next(
    workload: AnyWorkload, ranked: Iterator[Schedule], target: Target, cache: ArtifactCache
) -> tuple[Kernel | None, CompileRequest | None]:
    """(cached kernel, None), or (None, what to compile), of the best schedule that is not known to be unfit; (None, None) when all are."""
    from .tiles.compile import CompileRequest

    for schedule in ranked:
        request = CompileRequest(schedule.program, workload, schedule, target)
        kernel = cache.lookup(request.key)
        if kernel is not None:
            return kernel, None
        if not (cache.root / "unfit" / request.key).is_file():
            return None, request
    return None, None


def _remember(cache: ArtifactCache, request: CompileRequest, failure: CompileFailure) -> None:
    """Keep what was found out about a schedule, so that no later process compiles it again. A key covers sources and compilers: new ones
    ask anew."""
    folder = cache.root / "unfit"
    partial = folder / f".{uuid.uuid4().hex}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        partial.write_text(str(failure) + "\n", encoding="utf-8")
        os.replace(partial, folder / request.key)
    except OSError:
        partial.unlink(missing_ok=True)  # a full disk costs the memory of it, nothing else


def compiling_is_off() -> bool:
    """Whether the environment forbids compiling (``TILEBIT_NO_COMPILE`` is set, and not to 0)."""
    return os.environ.get(NO_COMPILE, "") not in ("", "0")


def _how_to_build(workload: AnyWorkload, target: Target) -> str:
    if isinstance(workload, AttentionWorkload):
        return (
            f"no kernel for {workload} on {target.arch} is loaded or cached, and {NO_COMPILE} forbids compiling one here; build it where "
            "the compilers are, tilebit.packs.export(PATH, tilebit.kernels.build([workload], target)), and load it with "
            "tilebit.packs.load(PATH)"
        )
    w, bias = workload, " --bias" if workload.bias else ""
    arguments = f"--n {w.n} --k {w.k} --m {w.m} --format {w.format.name} --dtype {w.dtype}{bias} --target {target.arch}"
    return (
        f"no kernel for {w.format.name} [{w.n}, {w.k}], m = {w.m}, {w.dtype}{' with bias' if w.bias else ''} on {target.arch} is loaded or "
        f"cached, and {NO_COMPILE} forbids compiling one here; build it with `tilebit compile {arguments}`, or with "
        f"`tilebit pack PATH {arguments}` and load it with tilebit.packs.load(PATH)"
    )
