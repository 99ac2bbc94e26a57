"""Products of 8-bit x behind the peer harness's interface, driven on the CPU."""

from __future__ import annotations

import json
import sys
import types
from typing import Any

import pytest
import torch

from results.peers import int8_plugin
from results.peers.import_peers import peer_kind
from results.peers.vllm_blocks import VllmBlocks, restored

N, K = 640, 256  # a tenth of the channels: 64


class Shape:
    """The harness's shape: fp16 A and W."""

    N, K, ms = N, K, (1, 3)

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.A = torch.randn(3, K, generator=generator).half()
        self.W = torch.randn(N, K, generator=generator).half() * 0.05


def test_every_peer_has_a_kind():
    for peer in int8_plugin.peers():
        kind = peer_kind(peer.name)
        assert kind is not None and kind.impl == ("vllm" if peer.name.startswith("vllm") else "tilebit")
    assert {peer.dtype for peer in int8_plugin.peers()} == {"w4a8-int8", "w8a8-int8", "w4a8-fp8", "w8a8-fp8", "w4a16"}


@pytest.mark.parametrize(
    "name",
    [int8_plugin.FORMATS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in (*int8_plugin.FORMATS[1:], *int8_plugin.MIXED))],
)
def test_a_peer_runs_as_the_harness_runs_it(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setitem(sys.modules, "gemm_peers", types.SimpleNamespace(copies=lambda tensor: [tensor, tensor.clone()]))
    mixed = name in int8_plugin.MIXED
    shape: Any = Shape()
    peer: Any = int8_plugin.MixedPeer(name) if mixed else int8_plugin.Int8Peer(name)
    peer.prepare(shape)
    for m in shape.ms:
        assert peer.supports(shape, m) is True
        calls, y, size, note = peer.run(shape, m)
        expected = peer.arows(shape, m, torch.arange(m)) @ peer.ref.t()
        for call in calls:
            call()
            assert float((y().float() - expected).norm() / expected.norm()) < peer.tol
        packed = peer.layer.rows.packed if mixed else peer.packed
        assert size == packed.nbytes + m * (K + 2 * N)
        assert json.loads(note)["schedule"]["program"] == "gemm_cpu"
    peer.ws[0].view(torch.int32).bitwise_xor_(0x11111111)
    calls, y, *_ = peer.run(shape, 3)
    calls[0]()
    expected = peer.arows(shape, 3, torch.arange(3)) @ peer.ref.t()
    error = float((y().float() - expected).norm() / expected.norm())
    assert not error < peer.tol, "a wrong weight shows"  # NaN, where codes are floats


def test_blocks_of_vllm_are_asked_as_its_operator_asks(monkeypatch: pytest.MonkeyPatch):
    """With an operator in its place that reads scales by rows of w's transpose, and x's by columns."""

    def product(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, x_scales: torch.Tensor, scales: torch.Tensor, bias: None):
        assert x_scales.stride() == (1, len(x)) and w.stride() == (1, K) and scales.shape == (K // 128, N // 128)
        y.copy_(restored(x, x_scales) @ restored(w.t(), scales.t()).t())

    harness = types.SimpleNamespace(copies=lambda tensor: [tensor, tensor.clone()], load_so=lambda name: None)
    monkeypatch.setitem(sys.modules, "gemm_peers", harness)
    monkeypatch.setattr(torch.ops, "_C", types.SimpleNamespace(cutlass_scaled_mm=product))
    shape: Any = Shape()
    shape.A = torch.randn(4, K, generator=torch.Generator().manual_seed(1)).half()
    peer = VllmBlocks()
    assert peer.supports(shape, 4) is True and "multiples of 4" in str(peer.supports(shape, 3))
    peer.prepare(shape)
    calls, y, size, _ = peer.run(shape, 4)
    expected = peer.arows(shape, 4, torch.arange(4)) @ peer.ref.t()
    for call in calls:
        call()
        assert float((y().float() - expected).norm() / expected.norm()) < peer.tol
    assert size == N * K + 4 * N * K // 128**2 + 4 * K + 4 * 4 * K // 128 + 2 * 4 * N
    error = (peer.ref - shape.W.float()).norm() / shape.W.float().norm()
    assert 0.01 < float(error) < 0.04, "three bits of a mantissa"


def test_kernels_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    asked: list[Any] = []
    monkeypatch.setattr(int8_plugin, "build", lambda workloads, target: asked.extend(workloads))
    monkeypatch.setattr(int8_plugin, "detect_target", lambda: None)
    assert int8_plugin.main(["--compile", "640x256,1280x256", "1,16"]) == 0
    assert len(asked) == 2 * 2 * (10 + 1) and {w.m for w in asked} == {1, 16} and "44 kernels are in the cache" in capsys.readouterr().out
