"""Which captured steps of compiled models are replayed: as CUDA graphs on a GPU; on a CPU by a stand-in that does what a graph does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tilebit.cache.batch import Batch
from tilebit.transformers.compiled import Captured, DecodeSteps
from tilebit.weights.any_modules import AnyPrecisionLinear


class Graph:
    """A captured step without a GPU: what its replay does, in the memory that a graph would use, and in the widths that layers had."""

    def __init__(self, steps: DecodeSteps, kv: Any, batch: Batch, ids: Tensor) -> None:
        self.steps, self.kv, self.batch = steps, kv, batch
        self.ids, self.growth = ids.clone(), batch.growth()
        self.logits = torch.empty(len(ids), steps.model.config.vocab_size, dtype=steps.model.dtype)
        self.widths = [(layer, layer.bits) for layer in steps.model.modules() if isinstance(layer, AnyPrecisionLinear)]
        batch.refresh()

    def replay(self) -> None:
        self.batch.grow(torch.from_numpy(self.growth))
        now = [layer.bits for layer, _ in self.widths]
        for layer, bits in self.widths:
            layer.bits = bits
        self.logits.copy_(self.steps.step(self.ids, self.kv, self.batch))
        for (layer, _), bits in zip(self.widths, now, strict=True):
            layer.bits = bits

    def captured(self) -> Captured:
        return Captured(self, self.ids, self.logits, self.growth, torch.from_numpy(self.growth))  # type: ignore[arg-type]


class Watched:
    """The graph of a captured step, which says when it is replayed."""

    def __init__(self, captured: Captured, replayed: list[Watched]) -> None:
        self.graph, self.ids, self.replayed = captured.graph, captured.ids, replayed

    def replay(self) -> None:
        self.replayed.append(self)
        self.graph.replay()


def watch(patch: pytest.MonkeyPatch) -> list[Watched]:
    """The captured steps that are replayed from now on, once for each time."""
    found: list[Watched] = []
    real = DecodeSteps._captured

    def captured(steps: DecodeSteps, kv: Any, batch: Batch, ids: Tensor) -> Captured:
        made = real(steps, kv, batch, ids) if ids.is_cuda else Graph(steps, kv, batch, ids).captured()
        assert isinstance(made.graph, torch.cuda.CUDAGraph if ids.is_cuda else Graph)
        made.graph = Watched(made, found)  # type: ignore[assignment]
        return made

    patch.setattr(DecodeSteps, "_captured", captured)
    patch.setattr(DecodeSteps, "_captures", lambda steps, ids: True)
    return found
