"""Directories with packed weights, opened and checked before any tensor is read."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..layouts.formats import GemmFormat
from ..weights.checkpoint_config import CheckpointError
from ..weights.checkpoint_files import tensor_files
from ..weights.checkpoint_open import TensorFile, open_tensors
from ..weights.extra_state import EXTRA
from ..weights.mixed import JOINT, PARTS, MixedLinear
from ..weights.modules import QuantLinear, parse_described
from ..weights.packed import WEIGHTS, PackedWeight, pack
from .config import TilebitConfig

_DTYPES = {"U8": torch.uint8, "I32": torch.int32, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


class PackedSource:
    """The packed layers in ``folder``, which ``model`` (on meta) has and which compute in ``dtype``:
    the entries of ``state_dict`` of ``QuantLinear`` and ``MixedLinear``, packed for the architecture
    that each layer's extra state names. Raises ``CheckpointError`` (a ``ValueError``)."""

    def __init__(self, folder: Path, model: PreTrainedModel, config: TilebitConfig, dtype: torch.dtype) -> None:
        self.config, self._dtype, self._files = config, dtype, tensor_files(folder)
        self._open: dict[Path, TensorFile] = {}
        index = f".{PARTS[0]}_channels"
        self._mixed = {name.removesuffix(index) for name in self._files if name.endswith(index)}
        parts = {f"{name}.{part}" for name in self._mixed for part in PARTS}
        packed = [name.removesuffix("." + EXTRA) for name in self._files if name.endswith("." + EXTRA)]
        self.layers = [*(name for name in packed if name not in parts), *sorted(self._mixed)]
        wanted = config.kinds_of(model)
        lacking = [name for name in wanted if name not in self.layers]
        if lacking:
            raise CheckpointError(
                f"{folder} says that {len(lacking)} layers are packed which it does not hold, {lacking[0]} first; accepted: what "
                "save_pretrained wrote: copy it again"
            )
        fitting(self.layers, model, folder)
        for name in self.layers:
            self._check(name, model, wanted.get(name))

    def _check(self, name: str, model: PreTrainedModel, wanted: str | None) -> None:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        try:
            parts = [_packed_of(self._state(part, meta=True), self._dtype) for part in self._parts(name)]
            index = sum(prod(self._opened(f"{name}.{part}_channels").shape(f"{name}.{part}_channels")) for part in self._index(name))
        except (ValueError, KeyError) as error:
            raise CheckpointError(
                f"{name} cannot be loaded: {error}; accepted: what save_pretrained wrote: copy the directory again"
            ) from None
        n, kind = sum(part.n for part in parts), JOINT.join(part.format.name for part in parts)
        fits = all((part.k, part.dtype, part.arch) == (layer.in_features, parts[0].dtype, parts[0].arch) for part in parts)
        if not fits or n != layer.out_features or kind != wanted or (name in self._mixed and index != n):
            raise CheckpointError(
                f"{name} is {kind} [{n}, {parts[0].k}] and config.json says {wanted or 'none'} [{layer.out_features}, "
                f"{layer.in_features}]; accepted: the config that was saved with the weights: copy the directory again"
            )

    def described(self, name: str) -> list[tuple[int, GemmFormat]]:
        """Output channels and format of each part of the layer ``name``; no weight is read."""
        parts = [_packed_of(self._state(part, meta=True), self._dtype) for part in self._parts(name)]
        return [(part.n, part.format) for part in parts]

    def read(self, name: str, device: torch.device) -> QuantLinear | MixedLinear:
        """The layer ``name`` on ``device``. Raises ``CheckpointError`` for a mixed one whose channels are
        not each there once."""
        if name not in self._mixed:
            return self._read(name, device)
        read = {part.rpartition(".")[2]: self._read(part, device) for part in self._parts(name)}
        low, high = (read.get(part) for part in PARTS)
        channels = torch.cat([self._opened(f"{name}.{part}_channels").tensor(f"{name}.{part}_channels") for part in PARTS])
        try:
            return MixedLinear.of_layers(low, high, channels.to(device))
        except ValueError as error:
            raise CheckpointError(
                f"{name} cannot be loaded: {error}; accepted: what save_pretrained wrote: copy the directory again"
            ) from None

    def _parts(self, name: str) -> list[str]:
        """The packed layers that ``name`` is of: itself, or those of its formats."""
        return [f"{name}.{part}" for part in PARTS if f"{name}.{part}.{EXTRA}" in self._files] if name in self._mixed else [name]

    def _index(self, name: str) -> tuple[str, ...]:
        return PARTS if name in self._mixed else ()

    def _read(self, name: str, device: torch.device) -> QuantLinear:
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
            opened = self._opened(stored)
            if meta and part != EXTRA:
                state[part] = torch.empty(opened.shape(stored), dtype=_DTYPES[opened.dtype(stored)], device="meta")
            else:
                state[part] = opened.tensor(stored)
        return state

    def _opened(self, stored: str) -> TensorFile:
        """The file of a tensor, open. Raises ``KeyError`` where none holds it."""
        file = self._files[stored]
        if file not in self._open:
            self._open[file] = open_tensors(file)
        return self._open[file]


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
    held = dtype if format.own_scales else scales.dtype
    return PackedWeight(
        state["weight"], scales, state.get("zeros"), said["n"], said["k"], format, held, said["arch"], state.get("perm"),
        state.get("row_scales"),
    )  # fmt: skip
