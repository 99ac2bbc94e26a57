"""The demonstration, at a size that a test can afford."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tilebit.command import demo


def test_the_demo_runs_end_to_end(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEBIT_RECORDS", str(tmp_path / "records.jsonl"))
    monkeypatch.setattr(demo, "ROWS", {False: (1, 3), True: (1, 3)})
    console = Console(file=io.StringIO(), width=160)
    lines = demo.run(console, budget_s=4.0, shapes=((128, 256),))
    assert [(line.family, line.m) for line in lines] == [(family, m) for family in demo.FAMILIES for m in (1, 3)]
    assert all(line.right and line.ours > 0 and line.torchs > 0 for line in lines), lines
    console.print(demo.result_table(lines))
    shown = console.file.getvalue()  # type: ignore[union-attr]
    assert "compressed-tensors" in shown and "right" in shown and "WRONG" not in shown


def test_a_wrong_result_is_shown_and_fails(monkeypatch, capsys):
    wrong = demo.Line("awq", 128, 256, 1, 1.0, 2.0, 0.5)
    monkeypatch.setattr(demo, "run", lambda *_: [wrong])
    monkeypatch.setattr("sys.argv", ["demo"])
    assert demo.main() == 1
    assert "WRONG" in capsys.readouterr().out


def test_a_budget_of_nothing_is_bad_usage(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["demo", "--budget", "0"])
    with pytest.raises(SystemExit) as caught:
        demo.main()
    assert caught.value.code == 2 and "--budget is 0" in capsys.readouterr().err
