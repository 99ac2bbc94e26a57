"""Where a checkpoint's tensors and its quantization config are: safetensors files, sharded indexes,
config.json and its older siblings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..json_reader import JsonError, read_json
from .checkpoint_config import CheckpointError

INDEX = "model.safetensors.index.json"
# Newest first: AutoGPTQ and AutoAWQ wrote their own files before transformers' config.json took the
# field over.
_CONFIGS = ("config.json", "quantize_config.json", "quant_config.json")


def tensor_files(path: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it, for a directory or one .safetensors file. Opens every
    file, so truncated and missing ones are reported here.
    """
    if path.is_file():
        if path.suffix != ".safetensors":
            raise CheckpointError(
                f"{path} is not a .safetensors file; accepted: one of those or a directory: convert the model with save_pretrained()"
            )
        return dict.fromkeys(_names(path), path)
    if not path.is_dir():
        raise CheckpointError(
            f"{path} does not exist; accepted: a directory or a .safetensors file on this machine: download the model first"
        )
    if (path / INDEX).is_file():
        return _indexed(path)
    files = sorted(path.glob("*.safetensors"))
    if (path / "model.safetensors") in files:
        files = [path / "model.safetensors"]
    if len(files) > 1:
        raise CheckpointError(
            f"{path} has {len(files)} .safetensors files ({files[0].name}, ...) and no {INDEX}; copy the index too, or pass one file"
        )
    if not files:
        pickles = [file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern)]
        raise CheckpointError(
            f"{path} has no .safetensors file{f', only {pickles[0]}' if pickles else ''}; accepted: safetensors: convert the model with "
            "save_pretrained()"
        )
    return dict.fromkeys(_names(files[0]), files[0])


def find_config(directory: Path) -> dict[str, Any] | None:
    """The quantization config of a checkpoint directory, or None."""
    for file in _CONFIGS:
        if not (directory / file).is_file():
            continue
        config = read_object(directory / file)
        if file == "config.json":
            config = config.get("quantization_config", config.get("compression_config"))
        if config is None:
            continue
        if not isinstance(config, Mapping):
            raise CheckpointError(
                f"the quantization config in {directory / file} is a {type(config).__name__}; accepted: an object: repair the file"
            )
        return dict(config)
    return None


def tensor_shape(file: Path, name: str) -> list[int]:
    """The shape of a stored tensor, read from the header."""
    with safe_open(file, framework="pt") as opened:
        return list(opened.get_slice(name).get_shape())


def tensor_dtype(file: Path, name: str) -> str:
    """The dtype of a stored tensor in safetensors' words ("U8", "I32"), read from the header."""
    with safe_open(file, framework="pt") as opened:
        return opened.get_slice(name).get_dtype()


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``. Raises ``CheckpointError``."""
    try:
        return read_json(file)
    except (OSError, JsonError) as error:
        raise CheckpointError(f"cannot read {file}: {error}; copy it again") from error


def _indexed(path: Path) -> dict[str, Path]:
    listed = read_object(path / INDEX).get("weight_map")
    if not isinstance(listed, Mapping) or not listed:
        raise CheckpointError(f"{path / INDEX} has no weight_map; accepted: tensor names -> shard files: copy it again")
    stored: dict[str, set[str]] = {}
    for name, file in listed.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(
                f"{path / INDEX} maps {name} to {file!r}; accepted: a file name in the same directory: copy the index again"
            )
        if file not in stored:
            if not (path / file).is_file():
                raise CheckpointError(f"{path / INDEX} lists {file}, which is not in {path}; copy the missing shard")
            stored[file] = set(_names(path / file))
        if name not in stored[file]:
            raise CheckpointError(
                f"{path / INDEX} says {name} is in {file}, which does not hold it; copy index and shards from one revision"
            )
    return {name: path / file for name, file in listed.items()}


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} ({file.stat().st_size} bytes) is not a whole safetensors file: {error}; copy or download it again"
        ) from error
