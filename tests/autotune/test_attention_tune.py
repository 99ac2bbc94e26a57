"""The tuner on attention, with nothing faked where the CPU's programs run, and with made-up measurements where GPUs would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from tilebit.autotune.search import searched
from tilebit.autotune.store import RecordStore
from tilebit.autotune.tune import tune
from tilebit.autotune.worker import DeviceWorker, Outcome
from tilebit.layouts.kv_formats import KVFormat
from tilebit.runtime import read_manifest
from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.operations import estimate
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.select import choose, explain
from tilebit.schedules.target import detect_target, target_from_name
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileRequest, compile_kernel, write_manifest
from tilebit.tiles.compiler.kernel import Kernel

H200 = target_from_name("sm_90a")
KV4 = KVFormat.from_name("kv4_channel")
W = AttentionWorkload("decode", 2, 2, 400, 8, 2, 64, KV4, lse=True)
OPTIONS = {
    "decode": {"window": 200, "sink_tokens": 4, "sinks": True},
    "append": {"q_len": 140, "rotary": "half"},
    "gather": {"q_len": 0},
    "prefill": {"q_len": 60, "soft_cap": 30.0},
}


def cpu():
    pytest.importorskip("tvm_ffi")
    if find_spec("tvm") is None:
        pytest.skip("needs apache-tvm, which compiles for the CPU: pip install tilebit[compile]")
    target = detect_target("cpu")
    if not target.features:
        pytest.skip("this CPU has neither AVX-512 nor AVX2")
    return target


@pytest.fixture(scope="module")
def worker(tmp_path_factory) -> Iterator[DeviceWorker]:
    """One measuring process for all: it takes seconds to import torch."""
    with DeviceWorker("cpu", tmp_path_factory.mktemp("locks")) as worker:
        yield worker


@pytest.mark.slow
@pytest.mark.parametrize("op", OPTIONS)
def test_cpu_programs_are_tuned(op, worker, tmp_path):
    target, workload = cpu(), replace(W, op=op, **OPTIONS[op])
    store, cache = RecordStore(tmp_path / "records.jsonl"), ArtifactCache(tmp_path / "cache")
    given = {"store": store, "cache": cache, "measurer": worker, "progress": False, "jobs": 1, "max_candidates": 2}
    report = tune([workload, replace(workload, kv_len=410)], target, **given)
    (result,) = report.results
    assert report.complete and result.failed == 0, [r.reason for r in store.records()]
    assert result.workload == workload.bucketed() and result.best is not None and result.best.rel_err is not None
    choice = choose(workload, target, store.records())
    assert (choice.source, choice.schedule) == ("tuned", result.best.schedule)
    assert sum(row.record is not None for row in explain(workload, target, store.records())) == result.measured
    again = tune([workload], target, **given)
    assert (again.results[0].measured, again.results[0].reused) == (0, result.measured)


@pytest.mark.slow
def test_a_kernel_of_another_question_is_not_measured(worker, tmp_path):
    """A kernel without a window, which the gate is told has one."""
    target, cache = cpu(), ArtifactCache(tmp_path / "cache")
    schedule = Schedule("attention_decode_cpu", 16, 1, 64, num_warps=target.units)
    kernel = compile_kernel(CompileRequest(schedule.program, W, schedule, target), cache)
    assert worker.measure(kernel.path, W, schedule, target).status == "ok"
    outcome = worker.measure(kernel.path, replace(W, window=50), schedule, target)
    assert outcome.status == "wrong" and "relative error" in outcome.reason and outcome.us is None
    outcome = worker.measure(kernel.path, replace(W, lse=False), schedule, target)
    assert outcome.status == "error" and "the kernel takes lse, which this workload does not have" in outcome.reason


class NoCompiler:
    """Publishes kernel directories without a kernel."""

    def __init__(self, cache: ArtifactCache) -> None:
        self.cache = cache

    def compile(self, requests):
        kernels = []
        for request in requests:
            folder = self.cache.build_dir()
            (folder / "kernel.so").write_bytes(b"nothing")
            write_manifest(request, folder, {"params": [], "resources": {}, "lint": []})
            path = self.cache.publish(request.key, folder).path
            kernels.append(Kernel(path, read_manifest(path)))
        return kernels


class MadeUp:
    """A device on which deep rings are faster than the model says."""

    def __init__(self) -> None:
        self.asked: list[Schedule] = []

    def measure(self, kernel: Path, workload, schedule: Schedule, target) -> Outcome:
        self.asked.append(schedule)
        return self.compare([kernel], workload, [schedule], target)[0]

    def compare(self, kernels: Sequence[Path], workload, schedules: Sequence[Schedule], target) -> list[Outcome]:
        del kernels
        times = [estimate(workload, schedule, target).us / schedule.num_stages for schedule in schedules]
        return [Outcome("ok", us=us, us_p20=us, us_p80=us, rel_err=1e-4) for us in times]


@pytest.mark.parametrize("op", ["decode", "prefill"])
def test_gpu_schedules_are_searched(op, tmp_path):
    workload = replace(W, op=op, batch=4, q_len=1 if op == "decode" else 4096, kv_len=4096, head_dim=128)
    store, measurer = RecordStore(tmp_path / "records.jsonl"), MadeUp()
    report = tune(
        [workload], H200, store=store, compiler=NoCompiler(ArtifactCache(tmp_path)), measurer=measurer, progress=False, patience=99
    )
    (result,) = report.results
    assert result.best is not None and result.best.schedule == min(
        measurer.asked, key=lambda s: estimate(workload, s, H200).us / s.num_stages
    )
    assert result.measured == len(measurer.asked) == len(searched(workload, H200) or [])
    nearby = replace(workload, batch=8, dtype="bfloat16")
    assert choose(nearby, H200, store.records()).source == "nearest"


def test_keys_do_not_depend_on_sizes():
    schedule = Schedule("attention_decode_bulk", 64, 8, 64, 4, 4)
    request = CompileRequest(schedule.program, W, schedule, H200)
    assert replace(request, workload=replace(W, batch=9, q_len=1, kv_len=70000)).key == request.key
    for change in ({"page_size": 64}, {"window": 3}, {"lse": False}, {"format": KVFormat()}, {"heads_q": 4}, {"scale": 0.3}):
        assert replace(request, workload=replace(W, **change)).key != request.key
    assert "attention_decode_bulk[decode 8/2x64 kv4_channel float16 sm_90a 64x8x64" in str(request)
