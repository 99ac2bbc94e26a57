"""What ``versions.py`` has a tree do, this one or the one before: a program that is run by its
path, with ``tilebit`` from either.

    python versions_child.py build    one job as JSON on standard input; answers with one line of JSON
    python versions_child.py host     the same, then one line of JSON for every further line of input

It imports what both trees have by the names of both, and asks in the forms in which both store a
workload and a schedule.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

CALLS = 200  # of a round, when host time is taken


def target_of(job: dict[str, Any]) -> Any:
    """The target that the job names, or that of its device."""
    targets = importlib.import_module("tilebit.schedules.target")
    return targets.target_from_name(job["target"]) if job["target"] else targets.detect_target(job["device"])


def built(job: dict[str, Any]) -> list[dict[str, Any]]:
    """What became of each of ``job["wanted"]``, {workload, schedule}: its kernel's directory,
    schedule and words of workspace, or why it ``failed``. Where no schedule is given, this tree
    chooses, as for its users."""
    operations = importlib.import_module("tilebit.schedules.operations")
    target = target_of(job)
    wanted = [(operations.workload_from_json(each["workload"]), each["schedule"]) for each in job["wanted"]]
    kernels: dict[int, Any] = {}
    own = [i for i, (_, schedule) in enumerate(wanted) if schedule is None]
    given = [i for i, (_, schedule) in enumerate(wanted) if schedule is not None]
    kernels |= zip(own, chosen([wanted[i][0] for i in own], target, job["jobs"]), strict=True)
    kernels |= zip(given, compiled([wanted[i] for i in given], target, job["jobs"]), strict=True)
    return [described(kernels[i], wanted[i][0], target, operations) for i in range(len(wanted))]


def chosen(workloads: list[Any], target: Any, jobs: int) -> list[Any]:
    """A kernel of each workload with the schedule that this tree uses for it, or the reason why
    there is none."""
    kernels = importlib.import_module("tilebit.kernels")
    try:
        return kernels.build(workloads, target, jobs=jobs) if workloads else []
    except kernels.KernelUnavailable:  # of one or more; what could be compiled is in the cache
        return [alone(kernels, workload, target) for workload in workloads]


def alone(kernels: Any, workload: Any, target: Any) -> Any:
    try:
        return kernels.build([workload], target)[0]
    except kernels.KernelUnavailable as error:
        return str(error)


def compiled(wanted: list[tuple[Any, dict[str, Any]]], target: Any, jobs: int) -> list[Any]:
    """A kernel of each (workload, schedule), or the reason why there is none."""
    if not wanted:
        return []
    schedule_of = importlib.import_module("tilebit.schedules.schedule").Schedule.from_json
    request = either("tilebit.tiles.compiler.request", "tilebit.tiles.request").CompileRequest
    schedules = [schedule_of(schedule) for _, schedule in wanted]
    requests = [request(s.program, workload, s, target) for (workload, _), s in zip(wanted, schedules, strict=True)]
    with either("tilebit.tiles.compiler.pool", "tilebit.tiles.pool").CompilePool(jobs) as pool:
        results = pool.compile(requests)
    return [str(result) if isinstance(result, Exception) else result for result in results]


def described(kernel: Any, workload: Any, target: Any, operations: Any) -> dict[str, Any]:
    if isinstance(kernel, str):
        return {"failed": kernel}
    words = operations.workspace_words(workload, kernel.schedule, target) if "workspace" in kernel.params else 0
    return {"path": str(kernel.path), "schedule": kernel.manifest["schedule"], "workspace_words": words}


def either(*names: str) -> Any:
    """The first of these modules that this tree has."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):  # it is there, and lacks something itself
                raise
    raise ModuleNotFoundError(f"this tree has none of {', '.join(names)}")


def host_calls(job: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Public calls of products of one row, by name, made once each; their weights are random."""
    import torch

    import tilebit

    device, calls = job["device"], {}
    generator = torch.Generator(device).manual_seed(0)
    for n, k in job["weights"]:
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device, generator=generator)
        scales = torch.rand(n, k // 128, device=device, generator=generator).to(torch.float16) * 0.01 + 0.005
        weight = tilebit.pack(tilebit.QuantizedTensor(codes, scales, None, tilebit.QuantFormat(4, 128, True)), torch.float16)
        x = torch.randn(1, k, device=device, generator=generator).to(torch.float16)
        layer = tilebit.QuantLinear(weight)
        calls[f"tilebit.gemm {n}x{k}"] = lambda x=x, weight=weight: tilebit.gemm(x, weight)
        calls[f"QuantLinear {n}x{k}"] = lambda x=x, layer=layer: layer(x)
    for call in calls.values():
        call()
    return calls


def host_round(calls: dict[str, Callable[[], Any]], device: str) -> dict[str, float]:
    """Microseconds of the host for one of ``CALLS`` calls in a row, of each. A GPU is idle before."""
    import torch

    found = {}
    for name, call in calls.items():
        for _ in range(10):  # the other tree's process had the cores meanwhile
            call()
        if device != "cpu":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        found[name] = (time.perf_counter() - start) / CALLS * 1e6
    return found


def answers(work: str, lines: Iterable[str]) -> Iterable[Any]:
    """What is answered to the lines of input."""
    lines = iter(lines)
    job = json.loads(next(lines))
    tree, import_module = Path(job["tree"]).resolve(), importlib.import_module
    found = import_module("tilebit").__file__
    if found is None or not Path(found).resolve().is_relative_to(tree):
        raise SystemExit(f"tilebit was imported from {found}; accepted: the one of {tree}")
    if work == "build":
        yield built(job)
        return
    with import_module("torch").inference_mode():
        calls = host_calls(job)
        yield list(calls)
        for _ in lines:
            yield host_round(calls, job["device"])


def main() -> None:
    said = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a compiler prints must not end up between two answers
    for answer in answers(sys.argv[1], sys.stdin):
        said.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
