"""Whether a model is what its fused step was built of: its layers, their tensors and numbers, and
that nothing else than its classes says what they compute."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

INERT = "transformers.utils.output_capturing"  # hooks of this module do nothing in calls that a fused step takes


def bypassed(model: PreTrainedModel) -> list[nn.Module]:
    """The modules whose work a fused step does without calling each: the model's body, but for the
    embedding."""
    body: Any = getattr(model, "model", None)
    if body is None:
        return []
    outside = set(body.embed_tokens.modules()) if hasattr(body, "embed_tokens") else set()
    return [module for module in body.modules() if module not in outside]


def says_otherwise(module: nn.Module) -> str | None:
    """What is done by ``module`` besides what its class does."""
    if "forward" in vars(module):
        return "a forward of its own"
    hooks = chain(module._forward_pre_hooks.values(), module._forward_hooks.values())
    return "hooks" if any(getattr(hook, "__module__", None) != INERT for hook in hooks) else None


class Built:
    """``model`` as it is now. ``layers_same`` and ``plain`` take microseconds, for every step;
    ``tensors_same`` reads each tensor's place and version, which takes some hundred."""

    def __init__(self, model: PreTrainedModel) -> None:
        modules, inside = list(model.modules()), bypassed(model)
        self._owners = [module._modules for module in modules if module._modules]
        self._layers = _flat(self._owners)
        self._inside = inside
        self._vars = [vars(module) for module in inside]
        self._hooks = [hooks for module in inside for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._count = self._counted()
        self._holders = [held for module in modules for held in (module._parameters, module._buffers) if held]
        self._tensors = _flat(self._holders)
        self._states = _states(self._tensors)
        known = [vars(module) for module in inside if type(module).__module__.startswith("transformers.")]
        self._numbers = [(held, name, value) for held in known for name, value in held.items() if type(value) in (int, float)]

    def layers_same(self) -> bool:
        """Whether each module is the one that was there."""
        return _flat(self._owners) == self._layers

    def plain(self) -> bool:
        """Whether no hook and no forward of its own has come to a module that a step does not
        call."""
        count = self._counted()
        if count == self._count:
            return True
        if any(says_otherwise(module) for module in self._inside):
            return False
        self._count = count  # something else was written down in a module
        return True

    def tensors_same(self) -> bool:
        """Whether each tensor is the one that was there, where it was and as it was; and each
        number, as attention's scale."""
        found = _flat(self._holders)
        same = len(found) == len(self._tensors) and all(map(operator.is_, found, self._tensors))
        return same and _states(found) == self._states and all(held.get(name) == value for held, name, value in self._numbers)

    def _counted(self) -> int:
        return sum(map(len, self._hooks)) + sum(map(len, self._vars))


def _flat(held: Iterable[Mapping[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, held)))  # type: ignore[arg-type]


def _states(tensors: Iterable[Any]) -> tuple[list[int], list[int]]:
    """Where each lies, and how often it was written to; of ``torch.inference_mode`` none says
    that."""
    there: list[Tensor] = [tensor for tensor in tensors if type(tensor) in (Tensor, nn.Parameter)]  # others may lie nowhere
    return [*map(Tensor.data_ptr, there)], [tensor._version for tensor in there if not tensor.is_inference()]
