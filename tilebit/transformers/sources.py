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
from ..weights.embedding import ROWS as EMBEDDED
from ..weights.embedding import QuantEmbedding, scale_of
from ..weights.extra_state import EXTRA
from ..weights.mixed import AGAIN, FORMER, JOINT, ROWS, MixedLinear
from ..weights.modules import QuantLinear, parse_described
from ..weights.packed import WEIGHTS, PackedWeight, pack
from ..weights.paired import HIGH_OF
from .config import TilebitConfig
from .tying import tied_weights

_DTYPES = {"U8": torch.uint8, "I32": torch.int32, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


class PackedSource:
    """The packed layers in ``folder``, which ``model`` (on meta) has and which compute in ``dtype``:
    the entries of ``state_dict`` of ``QuantLinear``, ``MixedLinear`` and ``QuantEmbedding``, packed for the
    architecture that each one's extra state names. ``shared`` are layers that are the packed rows of the
    input ``embedding``. Raises ``CheckpointError`` (a ``ValueError``)."""

    def __init__(self, folder: Path, model: PreTrainedModel, config: TilebitConfig, dtype: torch.dtype) -> None:
        self.config, self._dtype, self._files = config, dtype, tensor_files(folder)
        self._open: dict[Path, TensorFile] = {}
        self._outputs: dict[str, int] = {}  # output channels by layer
        wanted, embedded = config.kinds_of(model), config.embedding_of(model)
        self.embedding, self._scale = None, None
        former = [name for name in wanted if any(f"{name}.{entry}" in self._files for entry in FORMER)]
        if former:
            raise CheckpointError(
                f"{folder} was saved when a mixed layer was two packed weights, which one now is; {len(former)} layers are such, "
                f"{former[0]} first; accepted: directories that this version wrote: {AGAIN}"
            )
        self.mixed = {name for name, kind in wanted.items() if JOINT in kind}
        if embedded is not None:
            self.embedding, self._scale = embedded[0], scale_of(model.get_submodule(embedded[0]))
            wanted[embedded[0]] = embedded[1].name
        packed = [name.removesuffix("." + EXTRA) for name in self._files if name.endswith("." + EXTRA)]
        parts = {self._part(name): name for name in wanted}
        self.layers = [parts.get(name, name) for name in packed]
        self.shared = self._sharing(wanted, tied_weights(model))
        lacking = [name for name in wanted if name not in (*self.layers, *self.shared)]
        if lacking:
            raise CheckpointError(
                f"{folder} says that {len(lacking)} layers are packed which it does not hold, {lacking[0]} first; accepted: what "
                "save_pretrained wrote: copy it again"
            )
        fitting([name for name in self.layers if name != self.embedding], model, folder)
        for name in self.layers:
            self._check(name, model, wanted.get(name))

    def _sharing(self, wanted: dict[str, str], tied: dict[str, frozenset[str]]) -> list[str]:
        """The layers that the directory does not hold, since config.json ties them to the embedding."""
        of = self.embedding
        if of is None or of not in self.layers or of not in tied:
            return []
        return [name for name in wanted if name not in self.layers and wanted[name] == wanted[of] and tied.get(name) == tied[of]]

    def _check(self, name: str, model: PreTrainedModel, wanted: str | None) -> None:
        n, k = model.get_parameter(f"{name}.weight").shape
        try:
            packed = self.described(name)
            index = tuple(self._opened(f"{name}.channels").shape(f"{name}.channels")) if name in self.mixed else (packed.n,)
        except (ValueError, KeyError) as error:
            raise CheckpointError(
                f"{name} cannot be loaded: {error}; accepted: what save_pretrained wrote: copy the directory again"
            ) from None
        kind, fits = packed.format.name, packed.n == n
        if name in self.mixed:  # whose index says which rows make the output channels
            kind, fits = JOINT.join((kind, HIGH_OF.get(packed.format, packed.format).name)), packed.n >= n
        self._outputs[name] = n
        if not fits or packed.k != k or kind != wanted or index != (packed.n,):
            raise CheckpointError(
                f"{name} is {kind} [{packed.n}, {packed.k}] and config.json says {wanted or 'none'} [{n}, {k}]; accepted: "
                "the config that was saved with the weights: copy the directory again"
            )

    def described(self, name: str) -> PackedWeight:
        """The weight of the layer ``name`` on meta, of a mixed one that of its rows; none is read."""
        return _packed_of(self._state(self._part(name), meta=True), self._dtype)

    def read(self, name: str, device: torch.device) -> QuantLinear | MixedLinear | QuantEmbedding:
        """The layer ``name`` on ``device``. Raises ``CheckpointError`` for a mixed one whose channels are
        not each there once."""
        layer = self._read(self._part(name), device)
        if name == self.embedding:
            return QuantEmbedding(layer, self._scale)
        if name not in self.mixed:
            return layer
        channels = self._opened(f"{name}.channels").tensor(f"{name}.channels")
        try:
            return MixedLinear.of_layer(layer, channels, self._outputs[name])
        except ValueError as error:
            raise CheckpointError(
                f"{name} cannot be loaded: {error}; accepted: what save_pretrained wrote: copy the directory again"
            ) from None

    def _part(self, name: str) -> str:
        """The packed layer that ``name`` is of: itself, or that of its rows."""
        return f"{name}.{ROWS}" if name in self.mixed else f"{name}.{EMBEDDED}" if name == self.embedding else name

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
