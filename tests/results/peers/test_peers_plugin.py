"""tilebit behind the peer harness's interface, driven on the CPU by a stand-in that does what the harness does."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from results.peers import peers_plugin
from tilebit.kernels import KernelUnavailable
from tilebit.layouts.formats import QuantFormat
from tilebit.schedules.gemm.workload import Workload

N, K, GROUP = 64, 256, 128


class Shape:
    """The harness's shape on the CPU: fp16 A and W, codes 1..15 or with zero points, and fp32 references."""

    def __init__(self, n: int = N, k: int = K, ms: tuple[int, ...] = (1, 3)) -> None:
        self.N, self.K, self.ms = n, k, ms
        generator = torch.Generator().manual_seed(n * 7 + k)
        self.A = torch.randn(max(ms), k, generator=generator).half()
        self.W = torch.randn(n, k, generator=generator).half() * 0.05

    def get(self, key: str) -> Any:
        groups = self.W.float().view(self.N, self.K // GROUP, GROUP)
        if key in ("q4", "q8"):
            top = 7 if key == "q4" else 127
            scales = (groups.abs().amax(-1) / top).half()
            codes = (groups / scales.float().unsqueeze(-1)).round().clamp(-top, top) + top + 1
            return codes.to(torch.uint8).view(self.N, self.K), scales
        assert key == "q4z", key
        low, high = groups.amin(-1), groups.amax(-1)
        scales = ((high - low) / 15).half()
        zeros = (-low / scales.float()).round().clamp(0, 15)
        codes = ((groups / scales.float().unsqueeze(-1)).round() + zeros.unsqueeze(-1)).clamp(0, 15)
        return codes.to(torch.uint8).view(self.N, self.K), scales, zeros.to(torch.uint8)


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the plug-in uses of the harness: two rotating copies."""
    monkeypatch.setitem(sys.modules, "gemm_peers", types.SimpleNamespace(copies=lambda tensor: [tensor, tensor.clone()]))


def relative_error(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("name", "ms"), [("tilebit_w4a16_sym", (1, 3)), ("tilebit_w4a16_asym", (3,)), ("tilebit_w8a16_sym", (3,))])
def test_a_peer_runs_as_the_harness_runs_it(harness: None, name: str, ms: tuple[int, ...]):
    shape = Shape(ms=ms)
    peer = {p.name: p for p in peers_plugin.peers()}[name]
    assert peer.kind == "gemm" and peer.dtype == name.split("_")[1]
    before = dict(vars(peer))
    peer.prepare(shape)
    assert len(peer.ws) == 2 and relative_error(peer.ref, shape.W.float()) < 0.2
    for m in shape.ms:
        assert peer.supports(shape, m) is True
        calls, y, bytes_moved, note = peer.run(shape, m)
        assert len(calls) == len(peer.ws)
        for call in calls:
            call()
            expected = peer.arows(shape, m, torch.arange(m)) @ peer.ref.t()
            assert relative_error(y(), expected) < peer.tol
        assert bytes_moved == peer.packed.nbytes + 2 * m * (N + K)
        said = json.loads(note)
        assert said["schedule"]["program"] == "gemm_cpu" and said["torch"] == torch.__version__
        assert {"run", "gpu", "commit", "date"} <= set(said)
    vars(peer).clear()  # the harness drops what a shape left behind
    vars(peer).update(before)
    assert not hasattr(peer, "ws")


@pytest.mark.slow
def test_the_reference_sees_a_wrong_weight(harness: None):
    shape = Shape()
    peer = {p.name: p for p in peers_plugin.peers()}["tilebit_w4a16_sym"]
    peer.prepare(shape)
    peer.ws[0].bitwise_xor_(0x11111111)
    calls, y, _, _ = peer.run(shape, 3)
    calls[0]()
    assert relative_error(y(), peer.arows(shape, 3, torch.arange(3)) @ peer.ref.t()) > peer.tol


def test_bfloat16_has_its_own_scales_and_shapes(harness: None, monkeypatch: pytest.MonkeyPatch):
    shape = Shape(ms=(1,))
    peer = {p.name: p for p in peers_plugin.peers()}["tilebit_w4a16_sym_bf16"]
    assert isinstance(peer.supports(shape, 1), str) and peer.dtype == "w4a16-bf16"
    monkeypatch.setattr(peers_plugin, "BF16_SHAPES", ((N, K),))
    assert peer.supports(shape, 1) is True
    peer.prepare(shape)
    calls, y, _, _ = peer.run(shape, 1)
    calls[1]()
    assert y().dtype == torch.bfloat16
    assert relative_error(y(), peer.arows(shape, 1, torch.arange(1)) @ peer.ref.t()) < peer.tol


def test_a_kernel_that_cannot_be_had_fails_its_own_call_only(
    harness: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("TILEBIT_NO_COMPILE", "1")
    peer = {p.name: p for p in peers_plugin.peers()}["tilebit_w4a16_sym"]
    shape = Shape(n=192, k=384, ms=(1,))
    peer.prepare(shape)
    assert "tilebit compile" in capsys.readouterr().err
    with pytest.raises(KernelUnavailable):
        peer.run(shape, 1)


def test_dependent_peers_ask_for_dependent_launch(harness: None, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def op(x: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        asked.append(options)
        return x

    gemm = types.SimpleNamespace(default=op)
    monkeypatch.setattr(torch, "ops", types.SimpleNamespace(tilebit=types.SimpleNamespace(gemm=gemm)))
    monkeypatch.setattr(peers_plugin, "find_kernel", lambda *_: types.SimpleNamespace(manifest={"schedule": {}}))
    monkeypatch.setattr(peers_plugin.tilebit, "prepare", lambda *_: None)
    peers = {p.name: p for p in peers_plugin.peers()}
    for name in ("tilebit_w4a16_asym", "tilebit_w4a16_asym_pdl"):
        peers[name].prepare(Shape())
        peers[name].run(Shape(), 1)[0][0]()
    assert asked == [{}, {"dependent": True}]


def test_names_and_selection(monkeypatch: pytest.MonkeyPatch):
    names = [peer.name for peer in peers_plugin.peers()]
    assert len(set(names)) == len(names) == 7
    assert {"tilebit_w4a16_sym", "tilebit_w4a16_asym_pdl", "tilebit_w8a16_sym_pdl", "tilebit_w4a16_sym_bf16"} <= set(names)
    monkeypatch.setenv("TILEBIT_PEERS", "*_sym, tilebit_w4a16_asym")
    assert [peer.name for peer in peers_plugin.peers()] == ["tilebit_w4a16_sym", "tilebit_w4a16_asym", "tilebit_w8a16_sym"]


def test_every_round_replays_the_peers_in_an_order_of_its_own(harness: None, monkeypatch: pytest.MonkeyPatch):
    """Replays of 2, 3 and 4 ms, which take turns; each is timed by its own events."""
    peers_plugin.peers()
    replay_times = sys.modules["gemm_peers"].replay_times
    clock, replayed = [0.0], []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock[0]

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    class Graph:
        def __init__(self, ms: float) -> None:
            self.ms = ms

        def replay(self) -> None:
            replayed.append(self.ms)
            clock[0] += self.ms

    for name, stand_in in (("Event", Event), ("_sleep", lambda cycles: None), ("synchronize", lambda: None)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    captured = [types.SimpleNamespace(g=Graph(ms), calls=calls) for ms, calls in ((2.0, 20), (3.0, 10), (4.0, 40))]
    assert replay_times(captured, 20) == [pytest.approx((us, us, calls)) for us, calls in ((100.0, 20), (300.0, 10), (100.0, 40))]
    rounds = [tuple(replayed[i : i + 3]) for i in range(0, 60, 3)]
    assert len(set(rounds)) == 6 and all(sorted(r) == [2.0, 3.0, 4.0] for r in rounds)


def test_what_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    built = []
    monkeypatch.setattr(peers_plugin, "build", lambda wanted, target, jobs: built.append((wanted, target.arch, jobs)))
    assert peers_plugin.main(["--compile", "6144x4096,28672x4096", "1,3,16", "--target", "sm_90a"]) == 0
    (wanted, arch, jobs) = built[0]
    assert arch == "sm_90a" and jobs is None and len(set(wanted)) == len(wanted)
    # Three formats and three numbers of rows for both weights, and bfloat16 for one of them.
    assert len(wanted) == 3 * 3 * 2 + 3
    assert Workload(3, 28672, 4096, QuantFormat(4, 128, True), "bfloat16") in wanted

    def fails(*_: Any, **__: Any) -> None:
        raise KernelUnavailable("no compiler here")

    monkeypatch.setattr(peers_plugin, "build", fails)
    assert peers_plugin.main(["--compile", "64x256", "1", "--target", "sm_90a"]) == 1
    assert "no compiler here" in capsys.readouterr().err


def test_the_harness_can_load_it_by_path():
    """The harness executes the file alone, without its folder as a package."""
    path = Path(peers_plugin.__file__)
    spec = importlib.util.spec_from_file_location("peers_plugin_peers_plugin", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # as the harness does: sys.modules does not hold it
    assert len(module.peers()) == 7
