"""The workspace that the tuner gives to kernels which split k."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilebit.autotune.problems import gemm
from tilebit.autotune.problems.gemm import rules, split_workspace, strayed
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import cpu_target, target_from_name

WORKLOAD, SCHEDULE = Workload(16, 256, 1024), Schedule("gemm_wgmma", 128, 16, 128, 4, 4, split_k=3)


@pytest.mark.parametrize("schedule", [replace(SCHEDULE, split_k=1), Schedule("gemm_cpu", 32, 1, 32, split_k=4)])
def test_a_kernel_without_one_gets_none(schedule: Schedule) -> None:
    target = cpu_target() if schedule.program == "gemm_cpu" else target_from_name("sm_90a")
    assert split_workspace(WORKLOAD, schedule, target, "cpu") == {}


def test_tickets_are_zero_and_partial_sums_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(rules, "TICKETS", 48)
    monkeypatch.setattr(gemm, "workspace_words", lambda *arguments: asked.append(arguments) or 100)
    target = target_from_name("sm_90a")
    (memory,) = split_workspace(WORKLOAD, SCHEDULE, target, "cpu").values()
    assert asked == [(WORKLOAD, SCHEDULE, target)]
    assert memory.dtype == torch.int32 and memory.shape == (100,)
    assert not memory[:48].any() and memory[48:].view(torch.float32).isnan().all()
    memory[:] = 5
    assert not strayed({"workspace": memory}) and not strayed({})
    memory.as_strided((1,), (1,), 100)[0] = 5
    assert strayed({"workspace": memory})
