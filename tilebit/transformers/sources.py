"""Directories with packed weights, opened and checked before any tensor is read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..layouts.formats import GemmFormat
from ..weights.any_kind import AnyKind
from ..weights.any_modules import AnyPrecisionLinear
from ..weights.any_packed import AnyPrecisionWeight
from ..weights.any_state import WEIGHTS as WIDTHS
from ..weights.any_state import StoredAny, of_widths
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
    the entries of ``state_dict`` of ``QuantLinear``, ``MixedLinear``, ``AnyPrecisionLinear`` and
    ``QuantEmbedding``, packed for the architecture that each one's extra state names. ``shared`` are layers
    that are the packed rows of the input ``embedding``. Raises ``CheckpointError`` (a ``ValueError``)."""

    def __init__(self, folder: Path, model: PreTrainedModel, config: TilebitConfig, dtype: torch.dtype) -> None:
        self.config, self._dtype, self._files = config, dtype, tensor_files(folder)
        self._open: dict[Path, TensorFile] = {}
        self._outputs: dict[str, int] = {}  # output channels by layer
        wanted, embedded = config.kinds_of(model), config.embedding_of(model)
        self._kinds = {name: store for name, kind in wanted.items() if (store := AnyKind.parse(kind)) is not None}
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
        if lacking and any(name.startswith(f"{model.base_model_prefix}.{lacking[0]}") for name in self.layers):
            saved = ", ".join(getattr(model.config, "architectures", None) or ["a larger model"])
            raise CheckpointError(
                f"{folder} holds {saved}, of which {type(model).__name__} is the part {model.base_model_prefix!r}; accepted: the class "
                f"that was saved, as AutoModelForCausalLM.from_pretrained gives it: its .{model.base_model_prefix} is this part"
            )
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
        layer = model.get_submodule(name)
        n, k = model.get_parameter(f"{name}.weight").shape
        try:
            packed = self.described(name)
            index = tuple(self._opened(f"{name}.channels").shape(f"{name}.channels")) if name in self.mixed else (packed.n,)
            if isinstance(packed, AnyPrecisionWeight):
                self._check_widths(name, packed, getattr(layer, "bias", None))
        except (ValueError, KeyError) as error:
            raise self._unloadable(name, error) from None
        kind, fits = self._kind(name, packed), packed.n == n
        if name in self.mixed:  # whose index says which rows make the output channels
            fits = packed.n >= n
        self._outputs[name] = n
        said = self._kinds[name].store if name in self._kinds else wanted
        if not fits or packed.k != k or kind != said or index != (packed.n,):
            raise CheckpointError(
                f"{name} is {kind} [{packed.n}, {packed.k}] and config.json says {said or 'none'} [{n}, {k}]; accepted: "
                "the config that was saved with the weights: copy the directory again"
            )

    def _check_widths(self, name: str, packed: AnyPrecisionWeight, own: Tensor | None) -> None:
        """Raise ``ValueError`` for codebooks of other widths beside those of the layer, and for a bias that is
        missing or of another shape."""
        known = {f"{name}.{entry}" for entry in StoredAny(packed.n, packed.k, packed.widths, packed.arch).entries}
        others = [entry for part in WIDTHS if (entry := f"{name}.{part}") in self._files and entry not in known]
        if others:
            raise ValueError(f"{others[0]} is there, and the layer stores {packed.widths[0]} to {packed.widths[-1]} bits")
        bias = f"{name}.bias"
        shape = self._opened(bias).shape(bias) if bias in self._files else None
        if shape != (None if own is None else list(own.shape)):
            needed = "none" if own is None else list(own.shape)
            raise ValueError(f"its bias is {'missing' if shape is None else shape} and config.json makes it {needed}")

    def _kind(self, name: str, packed: PackedWeight | AnyPrecisionWeight) -> str:
        if isinstance(packed, AnyPrecisionWeight):
            return AnyKind.of(packed.widths).store
        if name in self.mixed:
            return JOINT.join((packed.format.name, HIGH_OF.get(packed.format, packed.format).name))
        return packed.format.name

    def described(self, name: str) -> PackedWeight | AnyPrecisionWeight:
        """The weight of the layer ``name`` on meta, of a mixed one that of its rows; none is read."""
        state = self._state(self._part(name), meta=True)
        if of_widths(state[EXTRA]):
            return StoredAny.parse(state[EXTRA]).weight(state)
        return _packed_of(state, self._dtype)

    def set_to(self, name: str) -> int:
        """The width that a layer of any precision is set to."""
        return self._kinds[name].bits

    def factors(self, name: str) -> Tensor | None:
        """fp32 [k]: what the x of the layer ``name`` is multiplied by; None: nothing."""
        stored = f"{self._part(name)}.smooth"
        return self._opened(stored).tensor(stored) if stored in self._files else None

    def read(self, name: str, device: torch.device) -> QuantLinear | MixedLinear | AnyPrecisionLinear | QuantEmbedding:
        """The layer ``name`` on ``device``. Raises ``CheckpointError`` for a mixed one whose channels are
        not each there once, and for one of any precision whose codebooks do not fit the dtype."""
        if name in self._kinds:
            return self._read_any(name, device)
        layer = self._read(self._part(name), device)
        if name == self.embedding:
            return QuantEmbedding(layer, self._scale)
        if name not in self.mixed:
            return layer
        channels = self._opened(f"{name}.channels").tensor(f"{name}.channels")
        try:
            return MixedLinear.of_layer(layer, channels, self._outputs[name])
        except ValueError as error:
            raise self._unloadable(name, error) from None

    def _unloadable(self, name: str, error: Exception) -> CheckpointError:
        return CheckpointError(f"{name} cannot be loaded: {error}; accepted: what save_pretrained wrote: copy the directory again")

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

    def _read_any(self, name: str, device: torch.device) -> AnyPrecisionLinear:
        state = {part: tensor.clone() for part, tensor in self._state(name).items()}  # as in ``_read``
        try:
            weight = StoredAny.parse(state[EXTRA]).weight(state).cast(self._dtype)
        except ValueError as error:
            raise CheckpointError(f"{name}: {error}") from None
        layer = AnyPrecisionLinear(weight, state.get("bias")).to(device)
        layer.bits = self.set_to(name)
        return layer

    def _state(self, name: str, meta: bool = False) -> dict[str, Tensor]:
        """The layer's tensors; with ``meta`` none is read but the one that describes it."""
        state = {}
        for part in (EXTRA, *WEIGHTS, *WIDTHS, "perm", "smooth", "bias"):
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
    if said.get("smooth", False) != ("smooth" in state):
        raise ValueError("what it says of itself and its tensors differ in whether its x is smoothed")
    return PackedWeight(
        state["weight"], scales, state.get("zeros"), said["n"], said["k"], format, held, said["arch"], state.get("perm"),
        state.get("row_scales"), state.get("smooth"),
    )  # fmt: skip
