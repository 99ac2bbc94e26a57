"""Directories with packed weights, opened and checked before any tensor is read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..layouts.formats import GemmFormat
from ..weights.checkpoint_config import CheckpointError
from ..weights.checkpoint_files import tensor_files
from ..weights.checkpoint_open import TensorFile, open_tensors
from ..weights.extra_state import EXTRA
from ..weights.modules import QuantLinear, parse_described
from ..weights.packed import WEIGHTS, PackedWeight, pack
from .config import TilebitConfig

_DTYPES = {"U8": torch.uint8, "I32": torch.int32, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


class PackedSource:
    """The packed layers in ``folder``, which ``model`` (on meta) has and which compute in ``dtype``:
    the entries of ``QuantLinear.state_dict``, packed for the architecture that each layer's extra
    state names. Raises ``CheckpointError`` (a ``ValueError``)."""

    def __init__(self, folder: Path, model: PreTrainedModel, config: TilebitConfig, dtype: torch.dtype) -> None:
        self.config, self._dtype, self._files = config, dtype, tensor_files(folder)
        self._open: dict[Path, TensorFile] = {}
        self.layers = [name.removesuffix("." + EXTRA) for name in self._files if name.endswith("." + EXTRA)]
        wanted = config.formats_of(model)
        lacking = [name for name in wanted if name not in self.layers]
        if lacking:
            raise CheckpointError(
                f"{folder} says that {len(lacking)} layers are packed which it does not hold, {lacking[0]} first; accepted: what "
                "save_pretrained wrote: copy it again"
            )
        fitting(self.layers, model, folder)
        for name in self.layers:
            self._check(name, model, wanted.get(name))

    def _check(self, name: str, model: PreTrainedModel, wanted: GemmFormat | None) -> None:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        try:
            packed = _packed_of(self._state(name, meta=True), self._dtype)
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{name} cannot be loaded: {error}; copy the directory again") from None
        if (packed.n, packed.k) != (layer.out_features, layer.in_features) or packed.format != wanted:
            said = "none" if wanted is None else wanted.name
            raise CheckpointError(
                f"{name} is {packed.format.name} [{packed.n}, {packed.k}] and config.json says {said} [{layer.out_features}, "
                f"{layer.in_features}]; accepted: the config that was saved with the weights: copy the directory again"
            )

    def read(self, name: str, device: torch.device) -> QuantLinear:
        """The layer ``name`` on ``device``."""
        # Copied: tensors lie anywhere in a mapped file, and kernels ask for whole cache lines.
        state = {part: tensor.clone() for part, tensor in self._state(name).items()}
        packed = _packed_of(state, self._dtype)
        if packed.dtype != self._dtype:
            packed = pack(packed.unpack(), self._dtype, arch=packed.arch)
        return QuantLinear(packed, state.get("bias")).to(device)  # which packs again where the device reads another layout

    def _state(self, name: str, meta: bool = False) -> dict[str, Tensor]:
        """The layer's tensors; with ``meta`` none is read but the one that describes it."""
        state = {}
        for part in (EXTRA, *WEIGHTS, "perm", "bias"):
            stored = f"{name}.{part}"
            if stored not in self._files:
                continue
            file = self._files[stored]
            if file not in self._open:
                self._open[file] = open_tensors(file)
            opened = self._open[file]
            if meta and part != EXTRA:
                state[part] = torch.empty(opened.shape(stored), dtype=_DTYPES[opened.dtype(stored)], device="meta")
            else:
                state[part] = opened.tensor(stored)
        return state


def fitting(layers: Iterable[str], model: PreTrainedModel, folder: Path) -> None:
    """Raise ``CheckpointError`` for a layer that is no linear layer of ``model``."""
    linear = {name for name, layer in model.named_modules() if type(layer) is nn.Linear}
    for name in layers:
        if name not in linear:
            raise CheckpointError(
                f"{folder} has a packed layer {name}, which is no linear layer of {type(model).__name__} (experts that it stacks are "
                "none either); accepted: the model that was saved: correct config.json"
            )


def _packed_of(state: dict[str, Tensor], dtype: torch.dtype) -> PackedWeight:
    said = parse_described(state[EXTRA])
    format, scales = GemmFormat.from_json(said["format"]), state["scales"]
    held = scales.dtype if scales.dtype.is_floating_point else dtype
    return PackedWeight(
        state["weight"], scales, state.get("zeros"), said["n"], said["k"], format, held, said["arch"], state.get("perm"),
        state.get("row_scales"),
    )  # fmt: skip
