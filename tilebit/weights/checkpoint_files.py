"""Where a checkpoint's tensors and its quantization config are: safetensors files, sharded indexes,
one pickle, config.json and its older siblings."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..json_reader import JsonError, read_json
from .checkpoint_config import CheckpointError
from .checkpoint_open import PICKLES, UNREADABLE, open_tensors

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Newest first: AutoGPTQ and AutoAWQ wrote their own files before transformers' config.json took the
# field over.
_CONFIGS = ("config.json", "quantize_config.json", "quant_config.json")


def tensor_files(path: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it, for a directory or one file, .safetensors or a pickle.
    Opens every file, so truncated and missing ones are reported here.
    """
    if path.is_file():
        if path.suffix not in (".safetensors", *PICKLES):
            raise CheckpointError(
                f"{path} is not a .safetensors file; accepted: one of those, a pickled state_dict ({', '.join(PICKLES)}) or a directory: "
                "convert the model with save_pretrained()"
            )
        return dict.fromkeys(_names(path), path)
    if not path.is_dir():
        raise CheckpointError(
            f"{path} does not exist; accepted: a directory or a .safetensors file on this machine: download the model first"
        )
    files = sorted(path.glob("*.safetensors"))
    if (path / WHOLE) in files:  # as transformers chooses, whatever an older index beside it says
        files = [path / WHOLE]
    elif (path / INDEX).is_file():
        return _indexed(path)
    if len(files) > 1:
        raise CheckpointError(
            f"{path} has {len(files)} .safetensors files ({files[0].name}, ...) and no {INDEX}; copy the index too, or pass one file"
        )
    if not files:
        files = sorted(file for kind in PICKLES for file in path.glob(f"*{kind}"))
        if len(files) != 1:
            found = f", but {len(files)} pickles ({files[0].name}, ...)" if files else ""
            raise CheckpointError(
                f"{path} has no .safetensors file{found}; accepted: safetensors, or one pickled state_dict ({', '.join(PICKLES)}): convert "
                "the model with save_pretrained()"
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
    return open_tensors(file).shape(name)


def tensor_dtypes(files: Mapping[str, Path], names: Collection[str]) -> dict[str, str]:
    """The dtypes of stored tensors in safetensors' words ("U8", "I32"), read from the headers; each
    file is opened once."""
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(files[name], []).append(name)
    found = {}
    for file, held in by_file.items():
        opened = open_tensors(file)
        found |= {name: opened.dtype(name) for name in held}
    return found


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
        return open_tensors(file).names()
    except UNREADABLE as error:
        if file.suffix in PICKLES:
            raise CheckpointError(
                f"{file} ({file.stat().st_size} bytes) is no pickle of tensors alone ({type(error).__name__}); accepted: safetensors, or a "
                "state_dict that torch.load reads with weights_only=True: copy it again, or convert the model with save_pretrained()"
            ) from error
        raise CheckpointError(
            f"{file} ({file.stat().st_size} bytes) is not a whole safetensors file: {error}; copy or download it again"
        ) from error
