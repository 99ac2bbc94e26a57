"""Captured steps without a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilebit.cache.batch import Batch
from tilebit.transformers.compiled import Captured, DecodeSteps


class Replay:
    """A captured step without a GPU: what its replay does, in the memory that a graph would use."""

    def __init__(self, steps: DecodeSteps, kv: Any, batch: Batch, ids: Tensor, found: list[Any]) -> None:
        self.steps, self.kv, self.batch, self.found = steps, kv, batch, found
        self.ids, self.growth = ids.clone(), batch.growth()
        self.logits = torch.empty(len(ids), steps.model.config.vocab_size, dtype=steps.model.dtype)
        batch.refresh()

    def replay(self) -> None:
        self.found.append(self)
        self.batch.grow(torch.from_numpy(self.growth))
        self.logits.copy_(self.steps.step(self.ids, self.kv, self.batch))

    def captured(self) -> Captured:
        return Captured(self, self.ids, self.logits, self.growth, torch.from_numpy(self.growth))  # type: ignore[arg-type]
