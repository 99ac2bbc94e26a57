"""The inputs of some linear layers, seen at every call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Self

from torch import Tensor, nn


class LayerInputs(ABC):
    """``_take`` is called with the input x [..., k] of each call of ``layers`` while this is open."""

    def __init__(self, layers: Mapping[str, nn.Linear]) -> None:
        self._layers = layers
        self._hooks = ExitStack()
        self._last: tuple[Tensor, int] | None = None  # an input and its version

    def __enter__(self) -> Self:
        for name, layer in self._layers.items():
            self._hooks.callback(layer.register_forward_pre_hook(self._taking(name), with_kwargs=True).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()
        self._last = None

    @abstractmethod
    def _take(self, name: str, x: Tensor) -> None: ...

    def _repeats(self, x: Tensor) -> bool:
        """Whether ``x`` is the tensor that was asked about before, and nothing has written to it since."""
        version = -1 if x.is_inference() else x._version
        same = self._last is not None and self._last[0] is x and self._last[1] == version and version >= 0
        self._last = x, version
        return same

    def _taking(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._take(name, args[0] if args else kwargs["input"])

        return take
