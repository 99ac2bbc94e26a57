"""From a workload to a kernel: out of a loaded pack, else out of the artifact cache, else compiled
with the schedule that ``schedules.select`` chooses.

A chosen schedule that does not pass the lint (the cost model cannot see register spills) is
remembered as unfit, beside the artifact cache, and the next best one is tried, as it is where
compilers refuse one: a call never fails because one schedule does. What failed when it was tuned
comes last, since much of that is a machine's fault and passes; a kernel that computed wrong results
is never used. With ``TILEBIT_NO_COMPILE=1`` nothing is compiled and the error names the commands
which build the kernel.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from . import packs
from .runtime import LoadedKernel
from .schedules.faults import machines_fault
from .schedules.operations import AnyWorkload, alone
from .schedules.records import WRONG, records_path
from .schedules.schedule import Schedule
from .schedules.select import choose, explain, wrong_artifacts
from .schedules.target import Target

if TYPE_CHECKING:
    from .tiles.compiler.cache import ArtifactCache
    from .tiles.compiler.compile import CompileFailure, CompileRequest
    from .tiles.compiler.kernel import Kernel
    from .tiles.compiler.pool import CompilePool

NO_COMPILE = "TILEBIT_NO_COMPILE"
TRIES = 8  # schedules tried for one workload
# Kinds of ``CompileFailure`` that are the schedule's own and will be the same at every attempt; those that
# may be, where they are not this machine's.
UNFIT, MAY_BE_UNFIT = ("illegal", "lint"), ("build", "nvcc")


_lock = threading.Lock()
_turns: dict[tuple[AnyWorkload, Target], threading.Lock] = {}


class _OfThread(threading.local):
    """What ``one_compiler`` holds: None outside of it, then a pool from the first build on."""

    pools: list[CompilePool] | None = None


_of_thread = _OfThread()


class KernelUnavailable(RuntimeError):
    """No kernel for this call is at hand and none may or can be built now; the message says how to
    get one."""


def find_kernel(workload: AnyWorkload, target: Target) -> LoadedKernel:
    """The loaded kernel for ``workload`` on this machine's ``target``; threads that ask for the
    same one wait for one build of it. Raises ``KernelUnavailable``."""
    packed = packs.find(workload, target)
    if packed is not None:
        return packed
    with _lock:
        turn = _turns.setdefault((workload, target), threading.Lock())
    with turn:
        return build([workload], target)[0].load()


@contextmanager
def one_compiler() -> Iterator[None]:
    """While this lasts, whatever this thread finds or builds is compiled in one process, which starts
    once: threads that build beside each other would start one for each kernel otherwise, as only one
    is kept for whoever comes next."""
    _of_thread.pools = pools = []
    try:
        yield
    finally:
        _of_thread.pools = None
        for pool in pools:
            pool.close()


@contextmanager
def _compilers(jobs: int | None, cache: ArtifactCache) -> Iterator[CompilePool]:
    from .tiles.compiler.pool import CompilePool

    held = _of_thread.pools
    if held is None:
        with CompilePool(jobs, cache=cache, keep=True) as pool:
            yield pool
        return
    if not held:
        held.append(CompilePool(1, cache=cache, keep=True))
    yield held[0]


def build(
    workloads: Iterable[AnyWorkload], target: Target, jobs: int | None = 1, progress: Callable[[int], None] | None = None
) -> list[Kernel]:
    """A kernel per workload for any ``target``, from the cache or compiled in ``jobs`` processes
    (None: one per core); opens none. ``progress`` is told how many workloads are settled.

    Raises ``KernelUnavailable`` with every reason when one cannot be had; those that could be
    compiled stay in the cache.
    """
    from .tiles.compiler.cache import ArtifactCache, CacheError
    from .tiles.compiler.compile import CompileFailure

    wanted = list(workloads)
    try:
        cache = ArtifactCache()
    except CacheError as error:
        if not compiling_is_off():
            raise
        raise KernelUnavailable("\n".join([*(_how_to_build(workload, target) for workload in wanted), str(error)])) from None
    ranked = [_ranked(workload, target) for workload in wanted]
    found: dict[int, Kernel] = {}
    reasons: list[str] = []
    failures: dict[int, str] = {}  # the first of each that may be the machine's
    waiting = list(range(len(wanted)))
    with _compilers(jobs, cache) as pool:
        while waiting:
            requests: dict[int, CompileRequest] = {}
            for index in waiting:
                kernel, request = _next(wanted[index], ranked[index], target, cache)
                if kernel is not None:
                    found[index] = kernel
                elif request is not None:
                    requests[index] = request
                else:
                    reasons.append(failures.get(index) or _why_none(wanted[index], target))
            if requests and compiling_is_off():
                reasons += [_how_to_build(request.workload, target) for request in requests.values()]
                break
            waiting = []
            told = None if progress is None else _counted(progress, len(found))
            for (index, request), result in zip(requests.items(), pool.compile(list(requests.values()), told), strict=True):
                if not isinstance(result, CompileFailure):
                    found[index] = result
                elif result.kind in UNFIT:
                    _remember(cache, request, result)
                    waiting.append(index)
                else:
                    failures.setdefault(index, f"{result}; `tilebit doctor` says what this machine can compile and what is missing")
                    if result.kind in MAY_BE_UNFIT and not machines_fault("compile_error", str(result)):
                        waiting.append(index)
                    else:
                        reasons.append(failures[index])
    if reasons:
        raise KernelUnavailable("\n".join(reasons))
    return [found[index] for index in range(len(wanted))]


def _counted(progress: Callable[[int], None], before: int) -> Callable[[int, int, object], None]:
    """What a pool reports, as the number of workloads that are settled, ``before`` of them found."""
    return lambda done, _total, _result: progress(before + done)


def _ranked(workload: AnyWorkload, target: Target) -> Iterator[Schedule]:
    """The schedule to use, then those to fall back to, best first and what failed when tuned
    last."""
    choice = choose(workload, target)
    yield choice.schedule
    rows = [r for r in explain(workload, target) if not r.illegal and r.schedule != choice.schedule]
    rows.sort(key=lambda r: 0 if r.record is None or r.record.ok else 1 + (r.record.status == WRONG))
    yield from (r.schedule for r in rows[: TRIES - 1])


def _next(
    workload: AnyWorkload, ranked: Iterator[Schedule], target: Target, cache: ArtifactCache
) -> tuple[Kernel | None, CompileRequest | None]:
    """(cached kernel, None), or (None, what to compile), of the best schedule that is not known to
    be unfit or wrong; (None, None) when all are."""
    from .tiles.compiler.compile import CompileRequest

    for schedule in ranked:
        request = CompileRequest(schedule.program, workload, schedule, target)
        if request.key in wrong_artifacts(target):
            continue
        kernel = cache.lookup(request.key)
        if kernel is not None:
            return kernel, None
        if not (cache.root / "unfit" / request.key).is_file():
            return None, request
    return None, None


def _why_none(workload: AnyWorkload, target: Target) -> str:
    from .tiles.compiler.compile import CompileRequest

    known, tried = wrong_artifacts(target), (r.schedule for r in explain(workload, target) if not r.illegal)
    keys = [CompileRequest(s.program, workload, s, target).key for s in tried] if known else []
    wrong = [known[key] for key in keys if key in known]
    tune = f"`{packs.command_line('tune', alone(workload), target.arch)}`"
    if not wrong:
        return f"{workload}: none of the {TRIES} best schedules passes the lint; {tune} searches further"
    return (
        f"{workload}: no schedule that works is left; {len(wrong)} computed wrong results when tuned on {target.name} ({wrong[0].reason}) "
        f"and are never used. {tune} searches further; if the device was at fault, remove their lines from {records_path()} first"
    )


def _remember(cache: ArtifactCache, request: CompileRequest, failure: CompileFailure) -> None:
    """Keep what was found out about a schedule, so that no later process compiles it again. A key
    covers sources and compilers: new ones ask anew."""
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
    compiling, packing = (packs.command_line(command, workload, target.arch) for command in ("compile", "pack PATH"))
    return (
        f"no kernel for {workload.title} {workload.dtype} on {target.arch} is loaded or cached, and {NO_COMPILE} forbids compiling one "
        f"here; build it with `{compiling}`, or with `{packing}` and load it with tilebit.packs.load(PATH)"
    )
