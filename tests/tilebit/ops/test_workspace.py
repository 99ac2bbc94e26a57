"""Scratch memory of kernels that split k: who shares it, when it grows, and that a graph's and an eager call's never meet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tilebit.layouts.formats import GemmFormat
from tilebit.layouts.kv_formats import KVFormat
from tilebit.ops import workspace as workspaces
from tilebit.ops.workspace import words_of, workspace
from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.gemm.rules import TICKETS
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import AnyWorkload, workspace_words
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name
from tilebit.tiles.compiler.request import CompileRequest

DEVICE = torch.device("cuda", 0)


@dataclass
class Driver:
    """What the stand-ins of torch and the CUDA driver answer."""

    stream: int = 0
    capture: int | None = None  # the id of the current stream's capture
    managed: bool = False  # by torch.compile's CUDA-graph manager


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Streams and captures without a GPU; workspaces lie in host memory."""
    state, allocate = Driver(), workspaces._allocate

    def capturing() -> bool:
        assert state.stream, "the default stream cannot be captured and must not be asked"
        return state.capture is not None

    monkeypatch.setattr(workspaces, "_eager", {})
    monkeypatch.setattr(workspaces, "_captured", {})
    monkeypatch.setattr(workspaces, "_current_stream", lambda index: state.stream)
    monkeypatch.setattr(workspaces, "managed_by_inductor", lambda index, stream: state.managed)
    monkeypatch.setattr(workspaces, "_allocate", lambda device, words: allocate(torch.device("cpu"), words))
    monkeypatch.setattr(workspaces, "capture_id", lambda stream: state.capture)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", capturing)
    return state


@pytest.mark.parametrize("words", [TICKETS, TICKETS + 1, TICKETS + 10**6])
def test_tickets_are_zero_and_the_address_is_the_memory_s(driver: Driver, words: int):
    address, length, memory = workspace(DEVICE, words)
    assert memory.dtype == torch.int32 and memory.numel() == length >= words
    assert address == memory.data_ptr() and address % 16 == 0
    assert not memory[:TICKETS].any()


@dataclass
class Built:
    """A loaded kernel, as far as its workspace is concerned."""

    params: tuple[str, ...]
    manifest: dict[str, Any]


KV4 = AttentionWorkload("decode", 4, 1, 4096, 32, 8, 128, KVFormat.from_name("kv4_channel"))
PERSISTENT: tuple[tuple[AnyWorkload, Schedule], ...] = (
    (Workload(256, 28672, 4096), Schedule("gemm_wgmma", 128, 128, 128, 3, 8, stream_k=True)),
    (Workload(64, 4096, 4096, GemmFormat.parse("w5a16_any")), Schedule("gemm_any_wgmma", 128, 64, 256, 4, 8, stream_k=True)),
    (
        AttentionWorkload("decode", 4, 1, 4096, 32, 8, 128, KVFormat.from_name("kv4_channel")),
        Schedule("attention_decode_bulk", 64, 16, 128, 3, 4),
    ),
)


@pytest.mark.parametrize("case", PERSISTENT, ids=lambda case: case[1].program)
def test_a_kernel_built_for_more_sms_has_room_for_as_many_blocks(case: tuple[AnyWorkload, Schedule]):
    """What it stores does not depend on the device that runs it, which may be a smaller one of the same architecture."""
    there = target_from_name("sm_90a")
    here = replace(there, name="NVIDIA H20", units=78)
    kernel = Built(("x", "workspace", "y"), {"schedule": case[1].to_json(), "target": there.to_json()})
    needed = words_of(kernel, case[0])  # type: ignore[arg-type]
    assert needed == workspace_words(*case, there) > workspace_words(*case, here) > 0
    assert words_of(Built(("x", "y"), kernel.manifest), case[0]) == 0  # type: ignore[arg-type]
    keys = {CompileRequest(case[1].program, *case, target).key for target in (there, here, replace(there, name="NVIDIA H100 80GB HBM3"))}
    assert len(keys) == 2, "and what is compiled here is made for this one"


def test_eager_calls_of_a_stream_share_one_that_grows(driver: Driver):
    first = workspace(DEVICE, TICKETS + 1000)
    assert workspace(DEVICE, TICKETS + 500) is first, "kept"
    grown = workspace(DEVICE, TICKETS + (1 << 20))
    assert grown is not first and grown[1] >= TICKETS + (1 << 20)
    assert workspace(DEVICE, TICKETS + 1000) is grown, "the larger one serves smaller calls"
    workspaces.release()
    assert workspace(DEVICE, TICKETS + 1000) is not grown


def test_streams_and_devices_have_their_own(driver: Driver):
    found = [workspace(DEVICE, TICKETS), workspace(torch.device("cuda", 1), TICKETS)]
    for stream in (5, 6):
        driver.stream = stream
        found.append(workspace(DEVICE, TICKETS))
    assert len({id(space) for space in found}) == 4
    assert workspace(DEVICE, TICKETS) is found[3]


def test_a_capture_has_its_own_and_keeps_it_to_its_end(driver: Driver):
    driver.stream = 5
    eager = workspace(DEVICE, TICKETS + 1000)
    driver.capture = 1
    captured = workspace(DEVICE, TICKETS + 1000)
    assert captured is not eager
    assert workspace(DEVICE, TICKETS + 1) is captured, "shared by the calls of one capture and stream"
    larger = workspace(DEVICE, TICKETS + (1 << 20))
    assert larger is not captured and larger is not eager
    driver.stream = 6
    assert workspace(DEVICE, TICKETS) is not larger, "another stream that takes part in the capture"
    driver.stream, driver.capture = 5, 2
    other = workspace(DEVICE, TICKETS)
    assert other is not larger, "another capture on the same stream"
    driver.capture = None
    assert workspace(DEVICE, TICKETS + 1000) is eager, "eager calls go on with theirs"
    driver.capture = 2
    assert workspace(DEVICE, TICKETS) is not other, "given up when an eager call showed that the capture had ended"


@pytest.mark.parametrize("capture", [None, 3])
def test_under_torch_compile_s_graph_manager_nothing_is_kept(driver: Driver, capture: int | None):
    driver.stream, driver.capture, driver.managed = 5, capture, True
    first, second = workspace(DEVICE, TICKETS), workspace(DEVICE, TICKETS)
    assert first is not second
    driver.managed = False
    assert workspace(DEVICE, TICKETS) not in (first, second)


@pytest.mark.gpu
def test_streams_have_their_own_workspace_on_a_gpu():
    workspaces.release()
    first = workspace(DEVICE, TICKETS + 1000)
    with torch.cuda.stream(torch.cuda.Stream()):
        second = workspace(DEVICE, TICKETS + 1000)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            third = workspace(DEVICE, TICKETS + 1000)
    assert len({space[0] for space in (first, second, third)}) == 3
    assert workspace(DEVICE, TICKETS + 500) is first
    workspaces.release()
