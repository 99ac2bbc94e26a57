"""The whole loop with nothing faked: the CPU program compiled, verified, timed, recorded and selected."""

from __future__ import annotations

import io
import warnings

import pytest
from rich.console import Console

from tilebit.autotune import progress
from tilebit.autotune.provenance import package_versions, source_commit
from tilebit.autotune.store import RecordStore
from tilebit.autotune.tune import tune
from tilebit.layouts.formats import QuantFormat
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.select import choose, explain
from tilebit.schedules.target import detect_target
from tilebit.tiles.compiler.cache import ArtifactCache

WORKLOAD = Workload(4, 160, 256, QuantFormat(4, 64, symmetric=False), "bfloat16", bias=True)


@pytest.mark.slow
def test_cpu_program_is_tuned(tmp_path):
    pytest.importorskip("tvm_ffi")
    from importlib.util import find_spec

    if find_spec("tvm") is None:
        pytest.skip("needs apache-tvm, which compiles for the CPU: pip install tilebit[compile]")
    target = detect_target("cpu")
    if not target.features:
        pytest.skip("this CPU has neither AVX-512 nor AVX2")
    store, cache = RecordStore(tmp_path / "records.jsonl"), ArtifactCache(tmp_path / "cache")
    report = tune([WORKLOAD], target, store=store, cache=cache, progress=False, jobs=1, max_candidates=3)
    (result,) = report.results
    assert report.complete and result.measured == 3 and result.failed == 0, [r.reason for r in store.records()]
    assert result.best is not None and result.best.rel_err is not None and result.best.rel_err < 5e-3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        records = store.records()
    choice = choose(WORKLOAD, target, records)
    assert (choice.source, choice.schedule) == ("tuned", result.best.schedule)
    assert sum(row.record is not None for row in explain(WORKLOAD, target, records)) == 3
    again = tune([WORKLOAD], target, store=store, cache=cache, progress=False, max_candidates=3)
    assert (again.results[0].measured, again.results[0].reused) == (0, 3)


def shown(monkeypatch, terminal: bool, wanted: bool) -> str:
    out = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=out, force_terminal=terminal, width=120))
    with progress.TuningBar(wanted) as bar:
        bar.begin(WORKLOAD, 5)
        bar.step(None)
        bar.step(12.34)
        bar.skip(3)
    return out.getvalue()


def test_progress_is_a_bar_on_a_terminal_and_quiet_elsewhere(monkeypatch):
    on_terminal = shown(monkeypatch, True, True)
    assert "m=4 n=160 k=256 w4a16_g64_asym" in on_terminal and "2/2" in on_terminal and "best 12.3 us" in on_terminal
    assert "m=4" not in shown(monkeypatch, False, True)
    assert "m=4" not in shown(monkeypatch, True, False)


def test_provenance():
    assert {"torch", "apache-tvm-ffi"} <= set(package_versions())
    commit = source_commit().removesuffix("-dirty")
    assert commit == "" or (len(commit) == 40 and int(commit, 16) >= 0)
