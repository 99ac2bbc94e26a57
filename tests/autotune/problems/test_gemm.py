"""The workspace that the tuner gives to kernels which split k."""

from __future__ import annotations

import pytest
import torch

from tilebit.autotune.problems.gemm import rules, split_workspace
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import cpu_target, target_from_name

WORKLOAD, SCHEDULE = Workload(16, 256, 1024), Schedule("gemm_wgmma", 128, 16, 128, 4, 4, split_k=3)


@pytest.mark.parametrize(("arch", "words"), [("cpu", 100), ("sm_90a", 0)])
def test_a_kernel_without_one_gets_none(monkeypatch: pytest.MonkeyPatch, arch: str, words: int) -> None:
    monkeypatch.setattr(rules, "workspace_words", lambda *_: words)
    target = cpu_target() if arch == "cpu" else target_from_name(arch)
    assert split_workspace(WORKLOAD, SCHEDULE, target, "cpu") == {}


def test_tickets_are_zero_and_partial_sums_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(rules, "TICKETS", 48)
    monkeypatch.setattr(rules, "workspace_words", lambda *arguments: asked.append(arguments) or 100)
    target = target_from_name("sm_90a")
    (memory,) = split_workspace(WORKLOAD, SCHEDULE, target, "cpu").values()
    assert asked == [(WORKLOAD, SCHEDULE, target)]
    assert memory.dtype == torch.int32 and memory.shape == (100,)
    assert not memory[:48].any() and memory[48:].view(torch.float32).isnan().all()
