"""From a call to a launch: operands in order, the workspace and its slices, and which of a kernel's two launches is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tilebit.kernels import KernelUnavailable
from tilebit.ops import dispatch, launchers
from tilebit.ops import workspace as spaces
from tilebit.schedules.gemm.rules import TICKETS
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target

ADDRESS = 4096
N, K = 256, 64
TILE = 128 * 16  # partial sums of one block of the schedule below
SPLIT = Schedule("gemm_wgmma", 128, 16, 64, split_k=4)


ELSEWHERE = Target("sm_90a", "built for", 264, 0, 0, 0, 1.0, 1.0, 1.0)


class FakeKernel:
    """Stands in for a CUDA kernel: records its launches as (function, arguments)."""

    path = "none"

    def __init__(self, params: tuple[str, ...], schedule: Schedule = SPLIT, dependent: bool = True) -> None:
        self.params, self.manifest = params, {"schedule": schedule.to_json(), "target": ELSEWHERE.to_json()}
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.run = self._launch("run")
        self.run_dependent = self._launch("run_dependent") if dependent else None

    def _launch(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self.calls.append((name, arguments))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The words of every workspace that a call asks for; a kernel needs one ticket and split_k partial tiles for each output tile."""
    words: list[int] = []

    def needed(workload: Workload, schedule: Schedule, target: Target) -> int:
        tiles = -(-workload.m // schedule.block_m) * -(-workload.n // schedule.block_n)
        return (
            dispatch.rules.TICKETS + (target.units if schedule.stream_k else tiles * schedule.split_k) * schedule.block_n * schedule.block_m
        )

    def workspace(device: torch.device, count: int) -> tuple[int, int, None]:
        words.append(count)
        return ADDRESS, count, None

    monkeypatch.setattr(spaces, "workspace_words", needed)
    monkeypatch.setattr(launchers, "workspace", workspace)
    return words


def cuda_plan(
    n: int = N, symmetric: bool = True, bias: bool = False, dependent: bool = False, format: str = "", k: int = K
) -> dispatch.Plan:
    """A plan for a GPU that is not there."""
    format = format or ("w4a16_g32" if symmetric else "w4a16_g32_asym")
    made = dispatch.plan_for(torch.device("cpu"), n, k, format, torch.float16, bias, dependent)
    plan = dispatch.Plan.__new__(dispatch.Plan)
    for name in ("device", "bias", "dependent", "operands", "workload"):
        setattr(plan, name, getattr(made, name))
    plan.target = Target("sm_90a", "x", 1, 0, 0, 0, 1.0, 1.0, 1.0)
    return plan


@pytest.mark.parametrize("scratch", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_kernel_gets_its_operands_in_order(asked: list[int], symmetric: bool, bias: bool, scratch: bool):
    given: dict[str, Any] = {name: torch.zeros(4, 4) for name in ("x", "weight", "scales", "zeros", "row_scales", "bias", "y")}
    absent = {"row_scales"} | {name for name, there in (("zeros", not symmetric), ("bias", bias)) if not there}
    arguments = [None if name in absent else tensor for name, tensor in given.items()]
    params = tuple(name for name in given if name not in absent | {"y"}) + (("workspace",) if scratch else ()) + ("y",)
    kernel = FakeKernel(params)
    dispatch.bound(kernel, cuda_plan(N, symmetric, bias), 16)(*arguments)  # type: ignore[arg-type]
    ((function, got),) = kernel.calls
    assert function == "run" and len(got) == len(params)
    assert all(value is given[name] if name != "workspace" else value == ADDRESS for name, value in zip(params, got, strict=True))
    assert asked == ([TICKETS + 2 * 4 * TILE] if scratch else [])


@pytest.mark.parametrize("params", [("x", "weight", "scales", "partials", "tickets", "y"), ("x", "weight", "scales", "zeros", "y")])
def test_a_kernel_with_other_parameters_is_refused(asked: list[int], params: tuple[str, ...]):
    with pytest.raises(KernelUnavailable, match=r"this call needs .*'x', 'weight', 'scales', 'y'.* compile it again"):
        dispatch.bound(FakeKernel(params), cuda_plan(), 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(("option", "has", "taken"), [(False, True, "run"), (True, True, "run_dependent"), (True, False, "run")])
@pytest.mark.parametrize("scratch", [False, True])
def test_dependent_launch_is_taken_when_asked_for_and_there(asked: list[int], option: bool, has: bool, taken: str, scratch: bool):
    kernel = FakeKernel(("x", "weight", "scales", *(("workspace",) if scratch else ()), "y"), dependent=has)
    t = torch.zeros(1, N)
    dispatch.bound(kernel, cuda_plan(dependent=option), 1)(t, t, t, None, None, None, t)  # type: ignore[arg-type]
    assert [function for function, _ in kernel.calls] == [taken]


def test_the_option_has_a_plan_of_its_own():
    keys = (torch.device("cpu"), N, K, "w4a16_g32", torch.float16, False)
    plain, early = dispatch.plan_for(*keys), dispatch.plan_for(*keys, True)
    assert plain is not early and (plain.dependent, early.dependent) == (False, True)
    assert early.workload == replace(plain.workload, dependent=True) != plain.workload
    assert dispatch.plan_for(*keys, False) is plain and dispatch.plan_for(*keys, True) is early


def slices(schedule: Schedule, m: int, rows: int | None, n: int = N, format: str = "") -> list[int]:
    """The rows of each launch of a call with ``m`` rows, by a launcher bound for up to ``rows``."""
    kernel = FakeKernel(("x", "weight", "scales", "workspace", "y"), schedule)
    x, y = torch.arange(m).view(m, 1), torch.arange(m).view(m, 1)
    dispatch.bound(kernel, cuda_plan(n, format=format), rows)(x, y, y, None, None, None, y)  # type: ignore[arg-type]
    parts: list[tuple[Tensor, Tensor]] = [(arguments[0], arguments[-1]) for _, arguments in kernel.calls]
    assert all(torch.equal(part_x, part_y) for part_x, part_y in parts), "the same rows of x and y"
    assert torch.equal(torch.cat([part for part, _ in parts]), x), "every row once"
    return [len(part) for part, _ in parts]


@pytest.mark.parametrize("rows", [128, None])
@pytest.mark.parametrize(("m", "limit_tiles", "expected"), [(64, 4, [64]), (65, 4, [64, 1]), (100, 1, [16] * 6 + [4]), (16, 0, [16])])
def test_a_call_whose_workspace_would_pass_the_limit_is_cut_into_rows(
    monkeypatch: pytest.MonkeyPatch, asked: list[int], m: int, limit_tiles: int, expected: list[int], rows: int | None
):
    floats = 2 * TILE * 4  # of one row of tiles: n tiles x split_k
    monkeypatch.setattr(dispatch, "LIMIT_BYTES", limit_tiles * floats * 4)
    assert slices(SPLIT, m, rows) == expected
    assert set(asked) == {TICKETS + max(1, limit_tiles) * floats}, "one size for every call, within the limit or one row of tiles"


@pytest.mark.parametrize(("m", "limit_tiles", "expected"), [(64, 4, [64]), (65, 4, [64, 1]), (40, 1, [16, 16, 8])])
def test_scales_of_groups_are_cut_along_their_rows(
    monkeypatch: pytest.MonkeyPatch, asked: list[int], m: int, limit_tiles: int, expected: list[int]
):
    """[groups, m] as kernels read it: every launch gets a contiguous tensor of its own rows, whole calls their own tensor."""
    monkeypatch.setattr(dispatch, "LIMIT_BYTES", limit_tiles * 2 * TILE * 4 * 4)
    kernel = FakeKernel(("x", "weight", "scales", "token_scales", "workspace", "y"))
    rows, token_scales = torch.arange(m).view(m, 1), torch.arange(2 * m).float().view(2, m)
    plan = cuda_plan(format="w8a8_g128", k=200)
    given = {"x": rows, "weight": rows, "scales": rows, "token_scales": token_scales, "y": rows}
    dispatch.bound(kernel, plan, None)(*(given.get(o.name) for o in plan.operands))  # type: ignore[arg-type]
    parts = [arguments[3] for _, arguments in kernel.calls]
    assert [part.shape for part in parts] == [(2, count) for count in expected] and all(part.is_contiguous() for part in parts)
    assert torch.equal(torch.cat(parts, 1), token_scales)
    assert len(parts) > 1 or parts[0].data_ptr() == token_scales.data_ptr()
    assert all(len(arguments[0]) == part.shape[1] for part, (_, arguments) in zip(parts, kernel.calls, strict=True))


def test_a_workspace_is_no_longer_than_the_bucket_needs(asked: list[int]):
    assert slices(SPLIT, 20, 32) == [20]
    assert asked == [TICKETS + 2 * 2 * TILE * 4], "32 rows are two rows of tiles"


def test_stream_k_is_not_cut_for_its_workspace(monkeypatch: pytest.MonkeyPatch, asked: list[int]):
    """Its partial sums and tickets belong to blocks, not to tiles, and do not grow with m."""
    stream = Schedule("gemm_wgmma", 128, 16, 64, stream_k=True)
    monkeypatch.setattr(dispatch, "LIMIT_BYTES", 1)
    monkeypatch.setattr(dispatch.rules, "TICKETS", 4)
    assert slices(stream, 4096, 4096) == [4096]
    assert slices(stream, 5000, None) == [5000]
    assert len(set(asked)) == 1
    monkeypatch.setattr(dispatch, "MOST_ROWS", 2048)
    assert slices(stream, 5000, None) == [2048, 2048, 904]


def test_slices_start_where_y_is_aligned(monkeypatch: pytest.MonkeyPatch, asked: list[int]):
    """At an odd n only every eighth row of y starts at a 16-byte boundary, whatever block_m is."""
    thin = Schedule("gemm_stream", 64, 1, 64, split_k=2)
    monkeypatch.setattr(dispatch.rules, "TICKETS", 4 * 20)
    assert slices(thin, 40, 64, n=255) == [16, 16, 8]


def test_tickets_are_those_of_output_channels_also_where_channels_have_codebooks(monkeypatch: pytest.MonkeyPatch, asked: list[int]):
    """Codebooks are [n_pad, 8]: of 1,024 channels there are 64 tiles, not one."""
    monkeypatch.setattr(dispatch.rules, "TICKETS", 2 * 64)
    assert slices(Schedule("gemm_any", 16, 8, 1, split_k=2), 40, None, n=1024, format="w3a16_any") == [16, 16, 8]


@pytest.mark.parametrize("program", ["gemm_wgmma", "gemm_any_wgmma"])
def test_clusters_that_share_a_tile_take_two_tickets_for_it(monkeypatch: pytest.MonkeyPatch, asked: list[int], program: str):
    """Each of a cluster's blocks meets those of the others that have its half of the rows."""
    monkeypatch.setattr(dispatch.rules, "TICKETS", 16)
    pairs = replace(SPLIT, program=program, block_m=32)
    assert slices(pairs, 200, None) == [128, 72] and slices(replace(pairs, split_k=3), 300, None) == [256, 44]


def test_more_tiles_than_tickets_are_refused(monkeypatch: pytest.MonkeyPatch, asked: list[int]):
    thin, params = Schedule("gemm_stream", 64, 1, 64, split_k=2), ("x", "weight", "scales", "workspace", "y")
    monkeypatch.setattr(dispatch.rules, "TICKETS", 4)
    assert slices(thin, 1, 1) == [1], "four tiles, four tickets"
    for rows in (2, None):
        with pytest.raises(KernelUnavailable, match=r"4 tiles of a row of n = 256; accepted .* larger block_n"):
            dispatch.bound(FakeKernel(params, thin), cuda_plan(), rows)  # type: ignore[arg-type]
