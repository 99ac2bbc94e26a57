"""Directories that other tools quantized, opened and checked before any weight is read."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from ..layouts.formats import GemmFormat
from ..schedules.gemm.workload import Workload
from ..weights.checkpoint import load_checkpoint
from ..weights.checkpoint_config import CheckpointError
from ..weights.modules import QuantLinear
from .config import TilebitConfig
from .sources import fitting


class ForeignSource:
    """The quantized layers in ``folder``, which ``model`` (on meta) has and which are to compute in
    ``dtype``; ``config.source`` is what the tool's config says of them. ``config`` then says which
    formats they have. Raises ``CheckpointError`` (a ``ValueError``)."""

    shared, embedding = (), None  # no embedding is packed

    def __init__(self, folder: Path, model: PreTrainedModel, config: TilebitConfig, dtype: torch.dtype) -> None:
        self._dtype, self._checkpoint = dtype, load_checkpoint(folder, config=config.source)
        self.layers = self._checkpoint.layers()
        fitting(self.layers, model, folder)
        tied = {name.removesuffix(".weight") for names in model.all_tied_weights_keys.items() for name in names}
        formats = {name: self._check(name, model, tied) for name in self.layers}
        self._expect_all(model, tied)
        self.config = TilebitConfig.naming(formats, model)

    def _check(self, name: str, model: PreTrainedModel, tied: set[str]) -> GemmFormat:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if name in tied:
            raise CheckpointError(
                f"{self._checkpoint.path} holds a packed {name}, and config.json ties its weight to another module's; accepted: either: "
                "correct tie_word_embeddings"
            )
        scheme, n, k = self._checkpoint.declared(name)
        if (n, k) != (layer.out_features, layer.in_features):
            raise CheckpointError(
                f"{name} is {scheme.format.name} [{n}, {k}] and config.json makes it [{layer.out_features}, {layer.in_features}]; "
                "accepted: the config that was saved with the weights: copy the directory again"
            )
        Workload(0, n, k, scheme.format, str(self._dtype).removeprefix("torch."))
        return scheme.format

    def _expect_all(self, model: PreTrainedModel, tied: set[str]) -> None:
        """Raise ``CheckpointError`` for a layer like the packed ones ("q_proj") that has no weight at all,
        which transformers would fill with random numbers."""
        stored, packed = set(self._checkpoint.names()), set(self.layers)
        kinds = {name.rpartition(".")[2] for name in packed}
        for name, layer in model.named_modules():
            own = type(layer) is nn.Linear and name.rpartition(".")[2] in kinds and name not in tied
            if own and name not in packed and f"{name}.weight" not in stored:
                raise CheckpointError(
                    f"{self._checkpoint.path} has neither a packed weight of {name} nor floats; accepted: one of them for each linear "
                    "layer of the model: copy the directory again, or correct config.json"
                )

    def read(self, name: str, device: torch.device) -> QuantLinear:
        """The layer ``name`` on ``device``."""
        return QuantLinear.from_checkpoint(self._checkpoint, name, self._dtype, device)
