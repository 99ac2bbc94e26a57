"""What is changed inside a compiled model: tensors are joined again, and what a fused step would leave out is done by the model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from comparison import own_cache, prompts
from compiled_models import KINDS, ROWS, alike, model_of
from stepping import steps_of
from tiny_models import llama, made
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

import tilebit
from tilebit.transformers import compile
from tilebit.transformers.anatomy import anatomy
from tilebit.transformers.compiled import DecodeSteps

pytestmark = pytest.mark.filterwarnings("ignore:.*runs as before")


def few(cases: Iterable[str]) -> list[Any]:
    """The first, and the others where time does not matter."""
    return [case if i == 0 else pytest.param(case, marks=pytest.mark.slow) for i, case in enumerate(cases)]


def other_of(quantized: bool) -> Any:
    other = made(llama(), torch.float16, seed=5)
    if quantized:
        tilebit.quantize_model(other, KINDS["llama"][1])
    return other


def load_mlps(model: Any, other: Any) -> None:
    for layer, from_ in zip(model.model.layers, other.model.layers, strict=True):
        layer.mlp.load_state_dict(from_.mlp.state_dict())


def set_weights(model: Any, other: Any) -> None:
    for layer, from_ in zip(model.model.layers, other.model.layers, strict=True):
        layer.self_attn.k_proj.weight = nn.Parameter(from_.self_attn.k_proj.weight.detach().clone())


def set_data(model: Any, other: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data = layer.self_attn.q_proj.weight.data + 0.5


def write_scales(model: Any, other: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj.scales.mul_(2)


def scale(model: Any, other: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.5


CHANGES: dict[str, tuple[bool, Callable[[Any, Any], object]]] = {  # and whether of a quantized model
    "the body loaded": (True, lambda model, other: model.model.load_state_dict(other.model.state_dict())),
    "parts loaded": (True, load_mlps),
    "assigned": (False, lambda model, other: model.model.load_state_dict(copy.deepcopy(other.model.state_dict()), assign=True)),
    "parameters": (False, set_weights),
    "data": (False, set_data),
    "written to": (True, write_scales),
    "a number": (False, scale),
}


@pytest.mark.parametrize("case", few(CHANGES))
def test_changed_tensors_are_noticed_at_the_next_prompt(case: str, taken: list[int]):
    quantized, change = CHANGES[case]
    plain, other = model_of("llama", quantized), other_of(quantized)
    model: Any = compile(copy.deepcopy(plain), (ROWS,))
    before = steps_of(model)
    for each in (plain, model):
        with torch.no_grad():
            change(each, other)
    expected = steps_of(plain)
    assert float((expected[0] - before[0]).abs().max()) > 0.2
    alike(steps_of(model), expected)
    assert taken == [ROWS] * 20


def test_what_is_as_it_was_is_not_built_again(monkeypatch: pytest.MonkeyPatch):
    model: Any = compile(model_of("llama"), (ROWS,))
    monkeypatch.setattr(DecodeSteps, "_build", lambda _: pytest.fail("it is as it was"))
    steps_of(model)
    model.train().eval()
    with torch.no_grad():
        model(**prompts(1, 20), output_hidden_states=True)  # which leaves hooks of transformers' behind
    assert model.model.layers[0]._forward_hooks
    steps_of(model)


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


class OtherMLP(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OtherLayer(LlamaDecoderLayer):
    def forward(self, *given: Any, **named: Any) -> Any:
        return 2 * super().forward(*given, **named)


def hooked(part: Any) -> None:
    part.register_forward_hook(lambda _, __, out: 2 * out)


def own_forward(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: 2 * LlamaMLP.forward(mlp, x)


def other_class(part: Any, kind: type) -> None:
    part.__class__ = kind


def wrapped(model: Any) -> None:
    model.model.layers[0].mlp = Doubled(model.model.layers[0].mlp)


STRANGE: dict[str, Callable[[Any], None]] = {
    "a hook of an MLP": lambda model: hooked(model.model.layers[0].mlp),
    "a hook of a projection": lambda model: hooked(model.model.layers[1].self_attn.q_proj),
    "a hook of a layer": lambda model: hooked(model.model.layers[0]),
    "a forward of its own": own_forward,
    "another MLP": lambda model: other_class(model.model.layers[0].mlp, OtherMLP),
    "another layer": lambda model: other_class(model.model.layers[0], OtherLayer),
    "an adapter": wrapped,
}


@pytest.mark.parametrize("case", few(STRANGE))
def test_what_a_step_would_leave_out_is_not_compiled(case: str, taken: list[int]):
    plain, model = model_of("llama", False), model_of("llama", False)
    for each in (plain, model):
        STRANGE[case](each)
    expected = steps_of(plain)
    with pytest.warns(UserWarning, match="is not compiled, and runs as before.*accepted"):
        compile(model, (ROWS,))
    alike(steps_of(model), expected)
    assert taken == []
    with pytest.raises(ValueError, match="accepted"):
        anatomy(model)


@pytest.mark.parametrize("case", few(case for case in STRANGE if "another" not in case))
def test_what_a_step_would_leave_out_is_noticed_afterwards(case: str, taken: list[int]):
    plain, model = model_of("llama", False), compile(model_of("llama", False), (ROWS,))
    for each in (plain, model):
        STRANGE[case](each)
    alike(steps_of(model), steps_of(plain))
    assert taken == []


def test_a_model_whose_parts_are_known_again_is_compiled_again(taken: list[int]):
    model: Any = compile(model_of("llama"), (ROWS,))
    expected = steps_of(model)
    own = model.model.layers[0].mlp
    wrapped(model)
    with pytest.warns(
        UserWarning, match=r"runs as before it was compiled: it has a .*Doubled; accepted: the classes of transformers.*llama"
    ):
        steps_of(model)
    assert len(taken) == 10
    model.model.layers[0].mlp = own
    handle = own.register_forward_hook(lambda *_: None)
    steps_of(model)
    assert len(taken) == 10
    handle.remove()
    alike(steps_of(model), expected)
    assert len(taken) == 20


@torch.no_grad()
def test_outputs_that_the_config_asks_for_are_given(taken: list[int]):
    model: Any = compile(model_of("llama", quantized=False), (1,))
    cache = own_cache(model)
    model(**prompts(1, 20), past_key_values=cache)
    model.config.output_hidden_states = True
    assert len(model(input_ids=torch.tensor([[5]]), past_key_values=cache).hidden_states) == 3
    assert taken == []
