"""Directories of models as commands are given them: checked in full before memory is taken, then
loaded onto one device."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils.import_utils import is_accelerate_available

from ..weights.checkpoint_config import CheckpointError
from ..weights.checkpoint_files import read_object, tensor_files, tensor_shape
from ..weights.extra_state import EXTRA
from .config import TilebitConfig
from .loading import load

_FLOATS = (torch.float16, torch.bfloat16)


def read_config(folder: Path) -> PreTrainedConfig:
    """The config of a model's directory. Raises ``CheckpointError`` (a ``ValueError``) where there is none."""
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is no directory; accepted: a model's, with config.json, weights and a tokenizer: download it, or correct the path"
        )
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json; accepted: a directory that save_pretrained wrote: copy that file, too")
    said = read_object(folder / "config.json").get("model_type")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a config class raises for a value that it cannot take
        raise CheckpointError(
            f"{folder / 'config.json'} is no config of a model_type that is known ({said!r}): {_short(error)}; accepted: the "
            "one that was saved with the weights: copy it again, or install a newer transformers"
        ) from error


def quantized_by(config: PreTrainedConfig) -> dict[str, Any] | None:
    """What config.json says of the quantization."""
    held = getattr(config, "quantization_config", None)
    return held if held is None or isinstance(held, dict) else held.to_dict()


def checked(folder: Path, quantization: TilebitConfig | None) -> tuple[PreTrainedConfig, PreTrainedModel]:
    """The config of the model in ``folder`` and the model on meta, in floats, after everything has been
    compared that config and headers of files say. Raises as ``open_model`` does, of what needs no
    weight."""
    config = read_config(folder)
    held = quantized_by(config)
    if held is not None and quantization is not None:
        method = held.get("quant_method")
        raise CheckpointError(
            f"{folder} is quantized already ({method}, {held.get('format', 'its own format')}); accepted: a format for a model of floats: "
            "leave it out, or name the directory that this one was made of"
        )
    return config, _fitting_tensors(folder, config)


def dtype_of(config: PreTrainedConfig, dtype: torch.dtype | None) -> torch.dtype:
    """``dtype``; by default config.json's where it is float16 or bfloat16, else bfloat16."""
    said = getattr(config, "dtype", None)
    return dtype or (said if said in _FLOATS else torch.bfloat16)


def open_model(
    folder: Path, quantization: TilebitConfig | None = None, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> PreTrainedModel:
    """The causal language model in ``folder``, ready to run on ``device`` (default: the CPU): packed, by
    tilebit or another tool (``load``), or in floats, or quantized while it loads as ``quantization``
    says. ``dtype`` is ``dtype_of``'s.

    Raises ``ValueError`` (``CheckpointError``), before any weight is read, for a directory that lacks
    something or whose config and tensors do not fit each other, and for ``quantization`` of a model
    that is quantized already; after loading, where weights are missing that files may have held
    under names of old.
    """
    config, _ = checked(folder, quantization)
    place = device or torch.device("cpu")
    options: dict[str, Any] = {"dtype": dtype_of(config, dtype), "local_files_only": True, "output_loading_info": True}
    if quantization is not None:
        options["quantization_config"] = quantization
    if place.type != "cpu" and is_accelerate_available():
        options["device_map"] = {"": place}
    opened = AutoModelForCausalLM.from_pretrained if quantized_by(config) is None else load  # of other tools' directories, too
    loaded: Any = opened(folder, **options)
    model, found = loaded
    _expect_none_missing(folder, model, found["missing_keys"])
    return model.to(place).eval()


def open_tokenizer(folder: Path) -> Any:
    """The tokenizer in ``folder``. Raises ``CheckpointError`` where there is none that loads."""
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # each kind of tokenizer has errors of its own
        raise CheckpointError(
            f"{folder} has no tokenizer that loads ({_short(error)}); accepted: tokenizer.json and tokenizer_config.json beside the "
            "weights: copy them from the model that this one was made of"
        ) from error


def most_tokens(config: PreTrainedConfig) -> int | None:
    """How many tokens a sequence of the model may have; None where config.json does not say."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)


def expect_tokens(ids: torch.Tensor, config: PreTrainedConfig) -> None:
    """Raise ``ValueError`` for tokens ``ids``, one or more, of which the vocabulary of a model of
    ``config`` lacks one."""
    highest, size = int(ids.max()), config.get_text_config(decoder=True).vocab_size
    if highest >= size:
        raise ValueError(
            f"the tokenizer makes token {highest} of the text, and the model has {size}, from 0 on; accepted: the tokenizer that belongs "
            "to the model: copy it into the directory again"
        )


def _fitting_tensors(folder: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """The model on meta. Raises ``CheckpointError`` for a missing shard, for a tensor of floats that has
    another shape than the model's of its name, and for a missing tensor (unless files hold some whose
    names the model does not have: what these become is known to transformers alone)."""
    files = tensor_files(folder)
    plain = type(config).from_dict({name: value for name, value in config.to_dict().items() if name != "quantization_config"})
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(plain)
    except Exception as error:  # sizes that do not fit one another fail anywhere in a model
        raise CheckpointError(
            f"{folder / 'config.json'} makes no causal language model: {_short(error)}; accepted: the config that was saved with the "
            "weights: copy it again"
        ) from error
    wanted, packed = model.state_dict(), {name.rpartition(".")[0] for name in files if name.endswith("." + EXTRA)}
    for name, value in wanted.items():
        if name in files and name.rpartition(".")[0] not in packed and (shape := tensor_shape(files[name], name)) != list(value.shape):
            raise CheckpointError(
                f"{name} is {shape} and config.json makes it {list(value.shape)}; accepted: the config that was saved with the weights: "
                "copy the directory again"
            )
    layers = {name for name, layer in model.named_modules() if isinstance(layer, nn.Linear | nn.Embedding)}
    of_layers = {name: [part for part in accumulate(name.split("."), "{}.{}".format) if part in layers] for name in files}
    if all(name in wanted or of_layers[name] for name in files):
        stored = {layer for found in of_layers.values() for layer in found}  # a packed layer's own reader says what it lacks
        ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
        tied = set(model.all_tied_weights_keys)
        _expect_none_missing(folder, model, [
            name for name in wanted
            if name not in files and name not in tied and name.rpartition(".")[0] not in stored and not any(p.search(name) for p in ignored)
        ])  # fmt: skip
    return model


def _expect_none_missing(folder: Path, model: PreTrainedModel, names: Iterable[str]) -> None:
    missing = sorted(names)
    if missing:
        raise CheckpointError(
            f"{folder} has no weights for {', '.join(missing[:3])}{' and others' if len(missing) > 3 else ''}, which would be random "
            f"numbers instead; accepted: all weights of {type(model).__name__}: copy the directory again, or correct config.json"
        )


def _short(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:300].rstrip(".:;")
