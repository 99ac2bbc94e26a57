"""Measuring quantized activations: what a bout gives, here on a CPU, and what the command refuses."""

from __future__ import annotations

import pytest

from results.measure import activations
from tilebit.schedules.target import cpu_target, target_from_name


@pytest.mark.slow
def test_a_bout_gives_a_row_for_each_schedule_beside_a_copy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(activations, "MOST_COPIES", 4)
    rows = activations.measured(16, 256, ["int8_token"], 0, cpu_target(), "cpu")
    assert {row["schedule"]["num_warps"] for row in rows} == {cpu_target().units, 1}
    for row in rows:
        assert (row["kind"], row["m"], row["k"], row["rel_err"]) == ("int8_token", 16, 256, 0.0)
        assert row["us"] > 0 and row["copy_us"] > 0 and row["bytes"] == 16 * (3 * 256 + 4)


def test_the_schedules_are_the_chosen_one_and_the_next():
    w, target = activations.KINDS["int8_group"], target_from_name("sm_90a")
    some, every = (activations.promising(w, target, count) for count in (2, 0))
    assert len(some) == 2 and every[:2] == some and len(set(every)) == len(every) > 2


@pytest.mark.parametrize("arguments", [["--kinds", "int4"], ["--shapes", "4096"], []])
def test_wrong_calls_are_refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(activations, "detect_target", cpu_target)
    with pytest.raises(SystemExit):
        activations.main(arguments)
    assert "accepted" in capsys.readouterr().err
