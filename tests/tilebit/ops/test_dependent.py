"""``QuantLinear.dependent``: an option that is passed on, kept with the layer and not with its state, and safe to switch on."""

from __future__ import annotations

import copy
import io
import pickle
from types import SimpleNamespace

import pytest
import torch
from door_cases import FORMATS, K, N, exact, workload
from torch import nn

import tilebit
from tilebit import QuantLinear, quantize_model
from tilebit.ops import dispatch
from tilebit.weights.synthetic import write_checkpoint


def layer(dependent: bool = False) -> QuantLinear:
    torch.manual_seed(0)
    return QuantLinear.from_float(nn.Linear(K, N), "w4a16_g32_asym", dtype=torch.bfloat16, dependent=dependent)


def test_it_is_off_unless_asked_for(tmp_path):
    assert layer().dependent is False and layer(True).dependent is True
    write_checkpoint(tmp_path, "awq", {"layer": (64, 256)}, symmetric=False, desc_act=False, bias=True)
    checkpoint = tilebit.load_checkpoint(tmp_path)
    assert [QuantLinear.from_checkpoint(checkpoint, "layer", **o).dependent for o in ({}, {"dependent": True})] == [False, True]  # type: ignore[arg-type]
    for option in (False, True):
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
        quantize_model(model, dtype=torch.float16, dependent=option)
        assert [part.dependent for part in model if isinstance(part, QuantLinear)] == [option, option]


def test_it_is_no_part_of_the_state():
    plain, early = layer(), layer(True)
    assert plain.state_dict().keys() == early.state_dict().keys()
    plain.load_state_dict(early.state_dict())
    early.load_state_dict(plain.state_dict())
    assert (plain.dependent, early.dependent) == (False, True)
    assert copy.deepcopy(early).dependent and pickle.loads(pickle.dumps(early)).dependent
    assert repr(early) == repr(plain)[:-1] + ", dependent=True)"


@pytest.mark.parametrize("option", [False, True])
def test_every_call_passes_it_on(cpu_kernels, monkeypatch, option):
    x, packed, bias, expected = exact(workload(FORMATS[1], 5))
    made, asked = QuantLinear(packed, bias), []
    made.dependent = option
    dispatch.forget()
    real = dispatch.plan_for
    monkeypatch.setattr(dispatch, "plan_for", lambda *arguments: asked.append(arguments[-1]) or real(*arguments))
    assert torch.equal(made(x), expected) and asked == [option]
    assert torch.equal(tilebit.gemm(x, packed, bias, dependent=option), expected) and asked == [option], "the same plan"
    dispatch.forget()


def test_switching_it_takes_effect_in_compiled_code(cpu_kernels):
    x, packed, bias, expected = exact(workload(FORMATS[1], 5))
    made, seen = QuantLinear(packed, bias), []

    def backend(graph, inputs):
        seen.append(next(node.args[-1] for node in graph.graph.nodes if node.op == "call_function"))
        return graph

    compiled = torch.compile(made, fullgraph=True, backend=backend)
    assert torch.equal(compiled(x), expected)
    made.dependent = True
    assert torch.equal(compiled(x), expected)
    assert seen == [False, True]


def test_whatever_writes_buffers_waits_while_it_is_on(monkeypatch):
    """Kernels of such a layer read its buffers before the kernel that wrote them need have ended."""
    waits = []
    monkeypatch.setattr(QuantLinear, "_settle", lambda self: waits.append(self._dependent))

    def waited() -> list[bool]:
        found = waits.copy()
        waits.clear()
        return found

    made = layer(True)
    assert waited()[-1:] == [True], "made with it on"
    made.dependent = False
    made.dependent = True
    assert waited() == [False, True], "switched"
    made.to(torch.float16)
    assert waited() == [True], "cast or moved"
    made.load_state_dict(made.state_dict())
    assert waited() == [True], "loaded"
    copied = copy.deepcopy(made)
    assert waited() == [True] and copied.dependent, "copied"
    stored = io.BytesIO()
    torch.save(made, stored)
    stored.seek(0)
    torch.load(stored, weights_only=False)
    assert waited() == [True], "unpickled"


@pytest.mark.parametrize(("device", "dependent", "waits"), [("cuda:1", True, 1), ("cuda:1", False, 0), ("cpu", True, 0), ("meta", True, 0)])
def test_waiting_is_for_the_layer_s_own_gpu(monkeypatch, device, dependent, waits):
    seen = []
    stream = SimpleNamespace(synchronize=lambda: seen.append("waited"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: seen.append(device) or stream)
    QuantLinear._settle(SimpleNamespace(weight=SimpleNamespace(device=torch.device(device)), _dependent=dependent))  # type: ignore[arg-type]
    assert seen == [torch.device(device), "waited"] * waits


# ---- on a GPU ----

REPLAYS = 200
WIDTH = 2048


def chain(bias: bool) -> nn.Sequential:
    """Four layers whose weights are long enough to load for the next one to start meanwhile."""
    torch.manual_seed(0)
    layers = [QuantLinear.from_float(nn.Linear(WIDTH, WIDTH, bias=bias, device="cuda"), f"w4a16_g128{end}") for end in ("", "_asym") * 2]
    return nn.Sequential(*layers)


def switch(model: nn.Module, option: bool) -> None:
    for part in model.modules():
        if isinstance(part, QuantLinear):
            part.dependent = option


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("m", [1, 16, 300])
def test_a_captured_chain_is_bit_for_bit_the_chain_without(m):
    """The first node of the graph is a dependent launch too; inputs change, so that a result read too early would show."""
    model, x = chain(bias=True), torch.zeros(m, WIDTH, dtype=torch.float16, device="cuda")

    def captured(option: bool) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        switch(model, option)
        model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        return graph, y

    (plain, expected), (early, y) = captured(False), captured(True)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPLAYS):
        x.normal_()
        y.fill_(float("nan"))
        plain.replay()
        early.replay()
        wrong += (y != expected).any()
    assert int(wrong) == 0


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("m", [1, 16, 300])
def test_eager_calls_are_bit_for_bit_the_calls_without(m):
    """Between kernels of others, with inputs that the preceding kernel writes and inputs that an earlier one wrote."""
    model, wrong = chain(bias=False), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPLAYS):
        x = torch.randn(m, WIDTH, dtype=torch.float16, device="cuda")
        results = []
        for option in (False, True):
            for part in model:
                assert isinstance(part, QuantLinear)
                part._dependent = option  # without the wait of the switch: the weights were written long ago
            y = model(x)
            results.append((model[0](x) + y, model[1](x)))
        wrong += sum((a != b).any() for a, b in zip(*results, strict=True))
    assert int(wrong) == 0


@pytest.mark.gpu
def test_switched_on_right_after_packing():
    """No kernel of the layer may meet weights that are still being written."""
    torch.manual_seed(0)
    linear, x = nn.Linear(WIDTH, WIDTH, device="cuda", dtype=torch.float16), torch.randn(1, WIDTH, dtype=torch.float16, device="cuda")
    expected = QuantLinear.from_float(linear)(x)
    for _ in range(20):
        assert torch.equal(QuantLinear.from_float(linear, dependent=True)(x), expected)
