"""What the inputs of layers say that products of them do not: how large each column becomes, and rows
of them to try a quantization of x on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .layer_inputs import LayerInputs

ROWS = 1024  # that are held of a layer's inputs, at most


@dataclass(slots=True, eq=False)
class Inputs:
    """Of a layer's inputs x [..., k] over all calls: ``largest`` fp32 [k], the largest magnitude of each
    column, and rows of x at equal distances, in their order: half of ``most`` to ``most`` of them, or all where
    there are fewer. ``together``: the layers that took the same tensors at every call, this one among them."""

    largest: Tensor
    most: int
    together: list[str] = field(default_factory=list)
    _held: list[Tensor] = field(default_factory=list)
    _seen: int = 0
    _distance: int = 1

    @property
    def rows(self) -> Tensor:
        """[rows, k], in x's dtype; fp32 [0, k] of a layer that was not called."""
        return torch.cat(self._held) if self._held else self.largest.new_zeros(0, len(self.largest))

    def add(self, x: Tensor) -> None:
        """The rows ``x`` [rows, k] of a call."""
        if not len(x):
            return
        torch.maximum(self.largest, x.abs().amax(0).float(), out=self.largest)
        self._held.append(x[-self._seen % self._distance :: self._distance].clone())
        self._seen += len(x)
        while sum(map(len, self._held)) > self.most:
            self._held, self._distance = [torch.cat(self._held)[::2].clone()], 2 * self._distance


class InputRows(LayerInputs):
    """``Inputs`` of some ``layers``, by name in ``of``, of every call while this is open; ``together`` is known
    once it is closed."""

    def __init__(self, layers: Mapping[str, nn.Linear], most: int = ROWS) -> None:
        super().__init__(layers)
        self.of = {name: Inputs(torch.zeros(layer.in_features, device=layer.weight.device), most) for name, layer in layers.items()}
        self._count = 0  # of inputs that differ from the one before
        self._taken: dict[str, list[int]] = {name: [] for name in layers}  # which of these, by layer

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        sharing: dict[tuple[int, ...], list[str]] = {}
        for name, taken in self._taken.items():
            sharing.setdefault(tuple(taken), []).append(name)
        for taken, names in sharing.items():
            for name in names:
                self.of[name].together = names if taken else [name]

    def _take(self, name: str, x: Tensor) -> None:
        self._count += not self._repeats(x)
        self._taken[name].append(self._count)
        self.of[name].add(x.detach().reshape(-1, x.shape[-1]))
