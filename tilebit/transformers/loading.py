"""Models from directories that are quantized already."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..accepted import expect
from ..weights.checkpoint_files import find_config
from .config import METHOD

_WHERE = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token", "trust_remote_code")


def load(directory: str | Path, *, model_class: Any = AutoModelForCausalLM, **options: Any) -> PreTrainedModel:
    """The model that ``directory`` (or a repository of the hub) holds, quantized by AutoAWQ, GPTQModel,
    llm-compressor or another tool that ``load_checkpoint`` reads, with tilebit's linear layers: none of
    these tools is needed. Codes, scales and zero points are kept; what is not quantized loads as
    usual. Directories of tilebit's own load as ``from_pretrained`` does it.

    ``options`` are ``from_pretrained``'s of ``model_class``: ``dtype``, ``device_map``, ... . The layers
    compute in ``dtype``, float16 or bfloat16, by default config.json's, to which scales are rounded.
    Everything is checked that shapes and configs can say before memory is taken.

    Raises ``ValueError`` (``CheckpointError``) for a directory that is not quantized, whose method is
    not known, or whose config, files and tensors do not fit each other.
    """
    expect("directory", directory, str | Path, "the path of a directory, or the name of a model")
    if "quantization_config" in options:
        raise ValueError(
            "load takes no quantization_config; accepted: a directory that is quantized already, which says it itself: floats are "
            f"quantized by {model_class.__name__}.from_pretrained(DIR, quantization_config=TilebitConfig(...))"
        )
    config = options.pop("config", None)
    if config is None:
        config = AutoConfig.from_pretrained(directory, **{name: options[name] for name in _WHERE if name in options})
    config = copy.deepcopy(config)
    said = _quantization(config, Path(directory))
    if not said:
        raise ValueError(
            f"{directory} is not quantized: config.json has no quantization_config; accepted: a directory of AutoAWQ, GPTQModel, "
            f"llm-compressor or tilebit; floats are quantized while they load by {model_class.__name__}.from_pretrained(DIR, "
            "quantization_config=TilebitConfig(...))"
        )
    config.quantization_config = said if said.get("quant_method") == METHOD else {"quant_method": METHOD, "source": said}
    return model_class.from_pretrained(directory, config=config, **options)


def _quantization(config: PreTrainedConfig, folder: Path) -> dict[str, Any] | None:
    """What is said of the quantization, taken out of ``config``: there, in that of its text model, or
    in the files that the tools wrote of old."""
    found = find_config(folder) if folder.is_dir() else None
    for part in (config.get_text_config(decoder=True), config):
        held = getattr(part, "quantization_config", None)
        if held is not None:
            found = held if isinstance(held, dict) else held.to_dict()
            del part.quantization_config
    return found
