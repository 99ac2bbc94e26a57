"""Which layers are quantized: plain ones, and none that computes more than its weight says."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial, update_wrapper
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, weight_norm

from tilebit.layouts.formats import QuantFormat
from tilebit.weights.calibrate import calibrate
from tilebit.weights.layers import linears_of
from tilebit.weights.modules import QuantLinear, quantize_model

pytestmark = pytest.mark.usefixtures("one_thread")

FORMAT = QuantFormat(4, 32, True)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16)).half()


def _own_forward(layer: nn.Linear) -> None:
    layer.forward = MethodType(lambda self, x: 2 * nn.Linear.forward(self, x), layer)


def _doubled(_: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (2 * args[0],)


def _doubled_output(_: nn.Module, args: tuple[torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    return 2 * y


def _weight_normed(layer: nn.Linear) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        weight_norm(layer)


CHANGES: dict[str, tuple[Callable[[nn.Linear], object], str]] = {
    "hook": (lambda layer: layer.register_forward_hook(_doubled_output), "has hooks"),
    "pre-hook": (lambda layer: layer.register_forward_pre_hook(_doubled), "has hooks"),
    "backward hook": (lambda layer: layer.register_full_backward_hook(lambda *_: None), "has hooks"),
    "backward pre-hook": (lambda layer: layer.register_full_backward_pre_hook(lambda *_: None), "has hooks"),
    "forward": (_own_forward, "has a forward of its own"),
    "weight_norm": (_weight_normed, "has a weight that is no parameter"),
    "prune": (partial(prune.random_unstructured, name="weight", amount=0.5), "has a weight that is no parameter"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_layer_that_computes_more_is_refused_by_name_and_may_be_skipped(case: str) -> None:
    model, (change, words) = _model(), CHANGES[case]
    layer: Any = model[1]
    change(layer)
    x = torch.ones(2, 32).half()
    before = model(x)
    for call in (lambda: quantize_model(model, FORMAT), lambda: calibrate(model, [x], FORMAT)):
        with pytest.raises(ValueError, match=rf"1 {words}.*name the layer in skip"):
            call()
        assert torch.equal(model(x), before) and type(model[0]) is nn.Linear
    assert list(linears_of(model, ("1",))) == ["0"]
    assert list(calibrate(model, [x], FORMAT, skip=("1",))) == ["0"]
    quantize_model(model, FORMAT, skip=("1",))
    assert model[1] is layer and isinstance(model[0], QuantLinear)


def test_what_accelerate_puts_around_a_layer_is_no_such_thing() -> None:
    """As its ``add_hook_to_module`` does it for a ``device_map``; and what ``remove_hook_from_module`` leaves."""
    model = _model()
    layer: Any = model[1]
    layer._old_forward, layer._hf_hook = layer.forward, SimpleNamespace()
    layer.forward = update_wrapper(partial(lambda module, x: module._old_forward(x), layer), layer._old_forward)
    assert list(linears_of(model, ())) == ["0", "1"]
    layer.forward = layer._old_forward
    del layer._old_forward, layer._hf_hook
    assert list(linears_of(model, ())) == ["0", "1"]
    _own_forward(layer)
    layer._old_forward, layer._hf_hook = layer.forward, SimpleNamespace()
    with pytest.raises(ValueError, match="1 has a forward of its own"):
        linears_of(model, ())
