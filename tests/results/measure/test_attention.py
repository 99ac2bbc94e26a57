"""Bouts of attention, small, on the CPU and with kernels that are their definitions: what is timed side by side is right and comparable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from defined_kernels import DefinedKernels

from results.measure import attention as attention_measure
from results.measure.attention import Contender, append_bouts, gather_bouts, measured, paged_bouts, places, query_bouts, workloads
from results.report.attention_rows import AttentionRow
from tilebit.autotune.measure import Timing
from tilebit.layouts.kv import RESIDUAL
from tilebit.schedules.target import cpu_target

L2 = 1000  # bytes: hardly any copies


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> DefinedKernels:
    """Small heads and stand-in kernels; calls are made once each and not timed: a stand-in's time says nothing."""
    made = DefinedKernels()

    def find(workload: Any, target: Any) -> Any:
        kernel = made.find(workload, target)
        kernel.manifest = {"schedule": {"program": "defined"}}
        return kernel

    def timed(calls: dict[str, list[Callable[[], None]]], device: str) -> dict[str, Timing]:
        for of_one in calls.values():
            of_one[-1]()
        return {name: Timing(10.0 + i, 9.0, 12.0, len(of_one), 1) for i, (name, of_one) in enumerate(calls.items())}

    monkeypatch.setattr(attention_measure, "find_kernel", find)
    monkeypatch.setattr(attention_measure, "time_calls", timed)
    monkeypatch.setattr(attention_measure, "HEADS", (2, 1))
    monkeypatch.setattr(attention_measure, "HEAD_DIM", 64)
    monkeypatch.setattr(attention_measure, "TOKENS", 2 * RESIDUAL)
    monkeypatch.setattr(attention_measure, "PAGE_SIZES", (16, 256))
    monkeypatch.setattr(attention_measure, "QUERIES", (1, 4))
    monkeypatch.setattr(attention_measure, "APPEND_FORMATS", ("kv4_channel",))
    return made


def rows_of(bout: list[Contender]) -> list[AttentionRow]:
    common = {"run": "r", "gpu": "cpu", "date": "d"}
    return [AttentionRow.from_json({**common, **row}) for row in measured(bout, cpu_target(), "cpu")]


def test_a_paged_bout_is_the_same_step_in_other_pages(kernels: DefinedKernels):
    (make,) = paged_bouts("cpu", L2, [(2, 256)])
    bout = make()
    assert [c.variant for c in bout] == ["", "page 16", "page 256"]
    assert torch.equal(bout[0].problem.operands["block_tables"], torch.arange(4, dtype=torch.int32).view(2, 2))
    assert bout[1].problem.operands["block_tables"].flatten().tolist() != list(range(32))
    rows = rows_of(bout)
    assert len({row.place for row in rows}) == 1 and [row.page_size for row in rows] == [128, 16, 256]
    assert all(row.rel_err is not None and row.rel_err < 2e-3 and row.impl == "tilebit" for row in rows)
    moved = bout[0].problem.workload.bytes
    assert (rows[0].us, rows[0].bytes) == (10.0, moved)
    assert rows[0].floor_us == pytest.approx(moved / cpu_target().read_gbps / 1e3, abs=1e-4)


def test_bouts_of_queries_and_of_gathering(kernels: DefinedKernels):
    rows = rows_of(query_bouts("cpu", L2, (2, 256))[1]())
    assert [(row.q_len, row.format, row.case) for row in rows] == [(1, "kv4_channel", (2, 256)), (4, "kv4_channel", (2, 256))]
    rows = rows_of(gather_bouts("cpu", L2, [(1, 256)])[0]())
    assert [(row.op, row.format, row.rel_err) for row in rows] == [("gather", f, 0.0) for f in attention_measure.MOVED_FORMATS]


def test_an_append_fills_no_window_or_all_of_them(kernels: DefinedKernels):
    one_token, prompt = append_bouts("cpu", L2, [2], 300)
    some, full = one_token()
    assert not any(n % RESIDUAL == 0 for p in some.problems for n in p.lengths) and all(n % RESIDUAL == 0 for n in full.problem.lengths)
    rows = rows_of([some, full])
    assert [(row.variant, row.q_len, row.batch) for row in rows] == [("none fills up", 1, 2), ("all fill up", 1, 2)]
    layout = full.problem.workload.layout
    assert rows[1].bytes == 2 * RESIDUAL * (4 * 64 + layout.token_bytes) > 50 * (rows[0].bytes or 0)
    (row,) = rows_of(prompt())
    assert (row.variant, row.q_len, row.kv_len) == ("a prompt", 300, 300)


def test_calls_of_one_token_meet_every_place_of_the_windows(kernels: DefinedKernels):
    (some, _) = append_bouts("cpu", L2, [2])[0]()
    assert len(some.problems) == RESIDUAL - 1 == len({p.lengths[0] for p in some.problems})  # the windows exceed this cache many times
    o = some.problem.operands
    wide = places(some.problem, o["windows"].nbytes)  # a cache that holds the windows: copies of them too
    assert len(wide) == 3 * (RESIDUAL - 1) and len({p.operands["windows"].data_ptr() for p in wide}) == 3
    assert all(p.operands["pages"] is o["pages"] for p in wide)
    most = places(some.problem, 100 * o["windows"].nbytes)
    assert len(most) <= attention_measure.MOST_CALLS


def test_a_wrong_kernel_is_left_out(kernels: DefinedKernels, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    find = attention_measure.find_kernel

    def broken(workload: Any, target: Any) -> Any:
        kernel: Any = find(workload, target)
        run, out = kernel.run, kernel.params.index("out")

        def wrong(*tensors: torch.Tensor) -> None:
            run(*tensors)
            if workload.page_size == 16:
                tensors[out][0, 0, 0].mul_(1.5)

        kernel.run = wrong
        return kernel

    monkeypatch.setattr(attention_measure, "find_kernel", broken)
    rows = rows_of(paged_bouts("cpu", L2, [(2, 256)])[0]())
    assert [row.variant for row in rows] == ["", "page 256"] and "wrong, left out" in capsys.readouterr().out


def test_everything_is_compiled_ahead(kernels: DefinedKernels):
    """What the bouts ask for is what ``workloads`` names."""
    ahead = set(workloads(attention_measure.WHATS))
    bouts = [*paged_bouts("cpu", L2, [(1, 32768)]), *query_bouts("cpu", L2)[1:], *append_bouts("cpu", L2)[:2], *gather_bouts("cpu", L2)[:1]]
    for make in bouts:
        for contender in make():
            assert contender.problem.workload.bucketed() in ahead
    assert len(workloads(["gather"])) == 2 * len(attention_measure.MOVED_FORMATS)


def test_only_a_gpu_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention_measure, "detect_target", cpu_target)
    for arguments, said in (([], "accepted: an NVIDIA GPU"), (["--only", "all"], "accepted: paged, queries, append, gather")):
        with pytest.raises(SystemExit):
            attention_measure.main(arguments)
        assert said in capsys.readouterr().err
