"""Scratch memory of kernels that split k: who shares it, when it grows, and that a graph's and an eager call's never meet."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tilebit.ops import workspace as workspaces
from tilebit.ops.workspace import workspace
from tilebit.schedules.gemm.rules import TICKETS

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
