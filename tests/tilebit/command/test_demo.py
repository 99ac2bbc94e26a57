"""The demonstration, at a size that a test can afford."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from tilebit.autotune.measure import Timing
from tilebit.command import demo, demo_model


@pytest.mark.slow
def test_the_demo_runs_end_to_end(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEBIT_RECORDS", str(tmp_path / "records.jsonl"))
    monkeypatch.setattr(demo, "ROWS", {False: (1, 3), True: (1, 3)})
    console = Console(file=io.StringIO(), width=160)
    lines = demo.run(console, budget_s=4.0, shapes=((128, 256),))
    assert [(line.family, line.m) for line in lines] == [(family, m) for family in demo.FAMILIES for m in (1, 3)]
    assert all(line.right and line.ours.us > 0 and line.torchs.us > 0 for line in lines), lines
    assert all(len({line.torchs for line in lines if line.m == m}) == 1 for m in (1, 3)), "the same product is timed in one alternation"
    console.print(demo.result_table(lines))
    shown = console.file.getvalue()  # type: ignore[union-attr]
    assert "compressed-tensors" in shown and "right" in shown and "WRONG" not in shown


@pytest.mark.slow
def test_the_demo_starts_with_a_model(monkeypatch, tmp_path):
    """A random one, made on the spot, that has fewer bytes than before and writes text."""
    pytest.importorskip("transformers", minversion="5.17")
    monkeypatch.delenv(demo_model.MODEL, raising=False)
    console = Console(file=io.StringIO(), width=200)
    demo_model.run_model(console, tmp_path, "cpu")
    shown = console.file.getvalue()  # type: ignore[union-attr]
    after, before = (float(re.search(pattern, shown)[1]) for pattern in (r"weights ([\d.]+) MB", r"([\d.]+) MB before"))  # type: ignore[index]
    assert after < before and "model on cpu" in shown and f"{demo_model.PROMPT!r} -> '" in shown
    assert re.search(r"decode [\d.]+ tokens/s: a second call", shown)


def test_the_demo_does_without_transformers(monkeypatch, tmp_path):
    monkeypatch.setattr(demo_model, "find_spec", lambda name: None)
    console = Console(file=io.StringIO(), width=200)
    demo_model.run_model(console, tmp_path, "cpu")
    assert "pip install 'tilebit[transformers]'" in console.file.getvalue()  # type: ignore[union-attr]


def line(p80: float = 1.1, others: float | None = 0.0, error: float = 0.0) -> demo.Line:
    return demo.Line("awq", 128, 256, 1, Timing(1.0, 0.9, p80, 1, 20, others), Timing(2.0, 1.9, 2.1, 1, 20, others), error)


def said(line: demo.Line, monkeypatch, capsys) -> tuple[int, str]:
    """The demo's exit code and what it prints of one measured line."""
    monkeypatch.setattr(demo, "run", lambda *_: [line])
    monkeypatch.setattr(demo, "run_model", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["demo"])
    return demo.main(), " ".join(capsys.readouterr().out.split())


def test_a_wrong_result_is_shown_and_fails(monkeypatch, capsys):
    code, text = said(line(error=0.5), monkeypatch, capsys)
    assert code == 1 and "WRONG" in text


def test_a_busy_machine_is_named(monkeypatch, capsys):
    assert all("busy" not in said(line(others=share), monkeypatch, capsys)[1] for share in (0.05, None))
    code, text = said(line(others=0.43), monkeypatch, capsys)
    assert code == 0 and "The machine was busy (other processes had up to 43% of its cores): a quiet one gives other times" in text
    assert "busy (one in five calls took 2.0 times as long as another)" in said(line(p80=1.8, others=None), monkeypatch, capsys)[1]


def test_a_budget_of_nothing_is_bad_usage(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["demo", "--budget", "0"])
    with pytest.raises(SystemExit) as caught:
        demo.main()
    assert caught.value.code == 2 and "--budget is 0" in capsys.readouterr().err
