"""The plug-in of 4-bit floats: every peer of it has a kind, and the codes that both libraries get stand for the same weight."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from results.peers import floats_plugin
from results.peers.import_peers import peer_kind


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("gemm_peers")
    monkeypatch.setitem(sys.modules, "gemm_peers", module)
    return module


def test_every_peer_has_a_kind_of_its_format(harness: ModuleType):
    for peer in floats_plugin.peers():
        kind = peer_kind(peer.name)
        assert kind is not None and kind.dtype == "bfloat16", peer.name
        name = kind.format if kind.symmetric is None else f"{kind.format}_g{kind.group_size}"
        assert peer.dtype == f"{name}-bf16"
    assert vars(harness)["replay_times"] is floats_plugin.peers_plugin.replay_in_drawn_orders


@pytest.mark.parametrize("name", floats_plugin.FORMATS)
def test_a_shape_is_quantized_once(name: str):
    shape: Any = SimpleNamespace(W=torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).half() * 0.05, c={})
    weight = floats_plugin.quantized(shape, name)
    assert floats_plugin.quantized(shape, name) is weight and weight.format.name == name
    assert float((weight.dequantize() - shape.W.float()).norm() / shape.W.float().norm()) < 0.15
