"""Which layers of a model are quantized."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..accepted import expect
from .casting import PackedLayer
from .experts import warn_of_stacks
from .mixed_tensor import MixedTensor
from .packed import DTYPES
from .quantize import QuantizedTensor
from .saving import settle_saving

Quantized = QuantizedTensor | MixedTensor
PRODUCT = "of_weight_and_bias"  # an attribute of a function that computes what ``nn.Linear.forward`` does, in its own way


def linears_of(model: nn.Module, skip: Iterable[str] | Callable[[str, nn.Linear], bool]) -> dict[str, nn.Linear]:
    """Every ``nn.Linear`` inside ``model`` by each of its names, in the model's order, without what
    ``skip`` keeps. Raises ``ValueError`` when there is none, and for one that computes more than
    its weight and bias say (hooks, a ``forward`` of its own, a weight made at each call)."""
    keeps = _keeps(skip)
    found = {
        name: layer
        for name, layer in model.named_modules(remove_duplicate=False)
        if type(layer) is nn.Linear and name and not keeps(name, layer)
    }
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no torch.nn.Linear inside that is not skipped; accepted: a model with some (for "
            f"a single layer: QuantLinear.from_float)"
        )
    for name, layer in found.items():
        if more := _beside_weight(layer):
            raise ValueError(
                f"{name} has {more}, which a quantized layer would lose; accepted: plain torch.nn.Linear: remove "
                "it, or name the layer in skip"
            )
    return found


def given_weights(layers: Mapping[str, nn.Linear], weights: Mapping[str, Quantized]) -> dict[nn.Linear, Quantized]:
    """``weights`` by layer. Raises ``TypeError`` and ``ValueError`` for one that is of no layer, or of
    another shape than its layer's."""
    for name, weight in weights.items():
        expect(f"weights[{name!r}]", weight, Quantized, "a QuantizedTensor or a MixedTensor")
        if name not in layers:
            raise ValueError(f"weights name {name!r}; accepted: layers that are replaced: {', '.join(list(layers)[:5])}, ...")
        if tuple(layers[name].weight.shape) != (weight.n, weight.k):
            raise ValueError(f"weights[{name!r}] is [{weight.n}, {weight.k}]; the layer needs {list(layers[name].weight.shape)}")
    return {layers[name]: weight for name, weight in weights.items()}


def once(layers: Mapping[str, nn.Linear]) -> dict[str, nn.Linear]:
    """``layers`` with the first name of each."""
    names: dict[nn.Linear, str] = {}
    for name, layer in layers.items():
        names.setdefault(layer, name)
    return {name: layer for layer, name in names.items()}


def is_product(forward: Any) -> bool:
    """Whether a function in the place of ``nn.Linear.forward`` computes what that does, as it says
    of itself."""
    return forward is nn.Linear.forward or getattr(forward, PRODUCT, False)


def _beside_weight(layer: nn.Linear) -> str | None:
    """What ``layer`` computes beside its weight and bias, in words. What accelerate puts around a
    layer (``device_map``) moves its tensors alone, and is no such thing."""
    forward = getattr(layer, "_old_forward", None) if hasattr(layer, "_hf_hook") else vars(layer).get("forward")
    if forward is not None and not is_product(getattr(forward, "__func__", None)):
        return "a forward of its own"
    if "weight" not in layer._parameters:
        return "a weight that is no parameter (one made at each call, as torch.nn.utils.prune and weight_norm do)"
    hooks = (layer._forward_pre_hooks, layer._forward_hooks, layer._backward_pre_hooks, layer._backward_hooks)
    return "hooks" if any(hooks) else None


def expect_computed(layers: Mapping[str, nn.Linear], dtype: torch.dtype | None) -> None:
    """Raise ``ValueError`` for a layer whose type products are not computed in, where ``dtype``
    names no other."""
    for name, layer in layers.items():
        if dtype is None and layer.weight.dtype not in DTYPES:
            raise ValueError(
                f"{name} is {str(layer.weight.dtype).removeprefix('torch.')}; accepted: float16 and bfloat16, which products are "
                f"computed in: cast the model first with model.to(torch.bfloat16), or pass dtype=torch.float16 or torch.bfloat16, "
                f"which casts all of it"
            )


def replace_layers(
    model: nn.Module, layers: Mapping[str, nn.Linear], by: Mapping[nn.Linear, nn.Module], dtype: torch.dtype | None
) -> list[str]:
    """Put what ``by`` has for each of ``layers`` in its place, and cast ``model`` to ``dtype``
    where one of them had another (None: never); returns their names. Raises ``ValueError``, before
    anything has changed, where what ``model`` has packed before does not fit ``dtype``."""
    if dtype is not None and any(layer.weight.dtype != dtype for layer in layers.values()):
        for module in model.modules():
            if isinstance(module, PackedLayer):
                module.expect_cast(dtype)
    else:
        dtype = None
    for name, layer in layers.items():
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, by[layer])
    if dtype is not None:
        model.to(dtype)
    settle_saving(model)
    warn_of_stacks(model, 3)
    return list(layers)


def _keeps(skip: Iterable[str] | Callable[[str, nn.Linear], bool]) -> Callable[[str, nn.Linear], bool]:
    """``skip`` of ``quantize_model`` as a predicate."""
    if callable(skip):
        return skip
    kept = (skip,) if isinstance(skip, str) else tuple(skip)
    return lambda name, layer: any(name == end or name.endswith("." + end) for end in kept)
