"""transformers' quantizer of the method "tilebit": which modules a model has before its weights are
loaded, and what becomes of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.base import HfQuantizer

from ..schedules.gemm.workload import Workload
from ..weights.any_kind import AnyKind
from ..weights.any_modules import AnyPrecisionLinear
from ..weights.any_packed import any_format, pack_any
from ..weights.embedding import ROWS as EMBEDDED
from ..weights.embedding import QuantEmbedding, scale_of
from ..weights.experts import warn_of_stacks
from ..weights.mixed import ROWS, MixedLinear
from ..weights.modules import QuantLinear
from ..weights.packed import DTYPES, pack
from ..weights.quantize import quantize
from ..weights.quantize_any import quantize_any
from .config import METHOD, Stored, TilebitConfig
from .foreign import ForeignSource
from .recognize import recognized
from .sources import PackedSource
from .tying import tied_weights, untie


class Awaited(nn.Module):
    """In place of a linear layer whose packed weight is read when everything else has been: without
    parameters, so that transformers takes none of the layer's tensors for another one's."""


class TilebitQuantizer(HfQuantizer):
    """Float weights are quantized one by one as transformers reads them: beside what is packed, one
    layer's floats are in memory. A weight that is the input embedding's, too, is quantized behind all
    others. Packed ones, of tilebit's directories (``sources.py``) and
    other tools' (``foreign.py``), are read after the others, layer by layer."""

    quantization_config: TilebitConfig

    def __init__(self, quantization_config: TilebitConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.formats: dict[str, Stored] = {}  # of layers whose floats are still to be quantized
        self._tied: dict[str, Stored] = {}  # of those of them whose weight is another module's, too, and has been read
        self._parameters: dict[str, set[str]] = {}  # by parameter: the layers that it is then read for
        self.dtype = torch.float16
        self._source: PackedSource | ForeignSource | None = None

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if dtype not in DTYPES:
            raise ValueError(
                f"the model would be loaded as {dtype}; accepted: float16 and bfloat16, which products are computed in: pass "
                f"dtype=torch.bfloat16 to from_pretrained"
            )
        self.dtype = dtype
        return dtype

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: Tensor) -> float:
        found = self.formats.get(param_name.removesuffix(".weight"))
        if found is None:
            return super().param_element_size(model, param_name, param)
        return (found.max_bits if isinstance(found, AnyKind) else found.bits) / 8

    def _process_model_before_weight_loading(self, model: PreTrainedModel, checkpoint_files: Any = None, **_: Any) -> None:
        if not self.pre_quantized:
            self._expect_floats(model)
            return
        if not checkpoint_files:
            raise ValueError("a packed model has no files; accepted: a directory that save_pretrained wrote, not state_dict=")
        opened = PackedSource if self.quantization_config.source is None else ForeignSource
        with torch.device("cpu"):  # here it is meta, which tensors of a library first imported now would be on for good
            self._source = opened(Path(checkpoint_files[0]).parent, model, self.quantization_config, self.dtype)
        self.quantization_config = self._source.config
        untie(model, (*self._source.layers, *self._source.shared), bool(self._source.shared))
        awaited = (*self._source.layers, *self._source.shared)
        with torch.device("meta"):
            for name in awaited:
                _put(model, name, Awaited())
        held = "|".join(re.escape(name) for name in self._source.layers)
        model._keys_to_ignore_on_load_unexpected = {
            *(model._keys_to_ignore_on_load_unexpected or ()),
            rf"^(?:{held})\.(?:{ROWS}\.)?[^.]+$",
        }

    def _expect_floats(self, model: PreTrainedModel) -> None:
        self.formats, embedding = self.quantization_config.formats_of(model), self.quantization_config.embedding_of(model)
        if embedding is not None:
            self.formats[embedding[0]] = embedding[1]
        tied = tied_weights(model)
        for name, format in self.formats.items():
            n, k = model.get_parameter(f"{name}.weight").shape
            one = any_format(format.max_bits) if isinstance(format, AnyKind) else format
            Workload(0, n, k, one, str(self.dtype).removeprefix("torch."))
            for parameter in tied.get(name, ()):
                self._parameters.setdefault(parameter, set()).add(name)

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: Any) -> bool:
        return param_name in self._parameters or (param_name.endswith(".weight") and param_name.removesuffix(".weight") in self.formats)

    def arrived(self, param_name: str) -> bool:
        """Whether the weight ``param_name``, which has been read, stays in the model until transformers has tied
        what shares it."""
        layers = self._parameters.get(param_name, set())
        self._tied |= {name: self.formats.pop(name) for name in layers & set(self.formats)}
        return param_name in self._parameters

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        if self.formats:
            names = list(self.formats)
            raise ValueError(
                f"the directory holds no weight for {len(names)} layers that are quantized, {', '.join(names[:3])} first; accepted: one "
                "with all of them: copy it again, or name the model that it is of"
            )
        self._pack_tied(model)
        if self._source is not None:
            for name in self._source.layers:
                _put(model, name, self._source.read(name, _device_near(model, name)).eval())
            for name in self._source.shared:  # of a directory of tilebit's own
                _put(model, name, model.get_submodule(f"{self._source.embedding}.{EMBEDDED}"))
            self._source = None
        for part in model.modules():  # which can be saved by themselves
            if isinstance(part, PreTrainedModel):
                part.hf_quantizer = self  # type: ignore[assignment]
        warn_of_stacks(model, 2)

    def _pack_tied(self, model: PreTrainedModel) -> None:
        """Quantize the weights that transformers has tied: once for an embedding and an output layer in one format."""
        made: dict[tuple[int, str], QuantLinear | AnyPrecisionLinear] = {}
        shared = False
        for name in sorted(self._tied, key=lambda name: isinstance(model.get_submodule(name), nn.Embedding)):  # they come last
            floats, format = model.get_submodule(name), self._tied[name]
            weight, bias = model.get_parameter(f"{name}.weight"), getattr(floats, "bias", None)
            key = id(weight), format.name
            if isinstance(floats, nn.Embedding) and key in made:
                shared = True
            else:
                made[key] = self.packed(weight.detach(), format, bias)
            _put(model, name, _in_place_of(floats, made[key]))
        untie(model, self._tied, shared)
        self._tied, self._parameters = {}, {}

    def packed(self, weight: Tensor, stored: Stored, bias: Tensor | None) -> QuantLinear | AnyPrecisionLinear:
        """The layer that ``weight`` becomes."""
        if not isinstance(stored, AnyKind):
            codes = quantize(weight, stored, self.quantization_config.clip_search, self.dtype)
            return QuantLinear(pack(codes, self.dtype), bias).eval()
        layer = AnyPrecisionLinear(pack_any(quantize_any(weight, stored.seed_bits, stored.max_bits), self.dtype), bias).eval()
        layer.bits = stored.bits
        return layer

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor] | None, dict[str, Any]]:
        """``save_pretrained`` asks for this before it writes the config: which then says what the layers
        are now, whatever quantized, cast or replaced them. A weight that an embedding and a layer share is
        the embedding's."""
        named = dict(model.named_modules(remove_duplicate=False))
        kinds = {name: layer.kind for name, layer in named.items() if isinstance(layer, MixedLinear | AnyPrecisionLinear)}
        embeddings = {name: module for name, module in named.items() if isinstance(module, QuantEmbedding)}
        rows = {*(f"{name}.{ROWS}" for name in kinds), *(f"{name}.{EMBEDDED}" for name in embeddings)}
        kinds |= {name: layer.format.name for name, layer in named.items() if isinstance(layer, QuantLinear) and name not in rows}
        left = [name for name, module in model.named_modules() if recognized(module) is not None]
        if left:
            raise ValueError(
                f"{len(left)} layers are of another quantizer, {left[0]} first; accepted in a directory of {METHOD}: its own and floats: "
                "load the model with tilebit.transformers.load"
            )
        if kinds:
            embedded = next((module.format.name for module in embeddings.values()), None)
            model.config.quantization_config = TilebitConfig.naming(kinds, model, embedded)
        elif hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        held = {id(module.rows) for module in embeddings.values()}
        again = tuple(f"{name}." for name, module in named.items() if id(module) in held and name not in rows)
        if not again:
            return None, {}
        return {name: value for name, value in model.state_dict().items() if not name.startswith(again)}, {}

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


class _Quantize(ConversionOps):
    """A weight's floats, as they were read, become a ``QuantLinear`` or an ``AnyPrecisionLinear`` in the model;
    at once, unless another module shares them."""

    def __init__(self, quantizer: TilebitQuantizer) -> None:
        self._quantizer = quantizer

    def convert(
        self, input_dict: dict[str, Any], *, full_layer_name: str, model: PreTrainedModel, missing_keys: set[str], **_: Any
    ) -> dict[str, Tensor]:
        (value,) = input_dict.values()
        weight = value[0] if isinstance(value, list) else value
        name, chosen = full_layer_name.removesuffix(".weight"), self._quantizer
        if chosen.arrived(full_layer_name):
            return {full_layer_name: weight}
        floats = model.get_submodule(name)
        needed = list(model.get_parameter(full_layer_name).shape)
        if list(weight.shape) != needed:
            raise ValueError(
                f"{full_layer_name} is {list(weight.shape)} and the model needs {needed}; accepted: the shape that config.json says"
            )
        bias = getattr(floats, "bias", None)
        if bias is not None and bias.is_meta:  # read later; or never, and then it is nothing
            bias = weight.new_zeros(len(weight))
        _put(model, name, _in_place_of(floats, chosen.packed(weight, chosen.formats[name], bias)))
        del chosen.formats[name]
        missing_keys.discard(full_layer_name)
        return {}


def _in_place_of(floats: nn.Module, packed: QuantLinear | AnyPrecisionLinear) -> nn.Module:
    """What stands in the place of a layer or an embedding of ``floats``."""
    if isinstance(floats, nn.Linear):
        return packed
    assert isinstance(packed, QuantLinear)
    return QuantEmbedding(packed, scale_of(floats)).eval()


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)


def _device_near(model: nn.Module, name: str) -> torch.device:
    """Where the parameters are of what encloses a layer."""
    while name:
        name = name.rpartition(".")[0]
        for parameter in model.get_submodule(name).parameters():
            if not parameter.is_meta:
                return parameter.device
    return torch.device("cpu")
