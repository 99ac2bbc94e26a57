"""The entries that ``state_dict`` has of one layer of any precision, read from files."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from .any_state import WEIGHTS
from .checkpoint_config import CheckpointError
from .checkpoint_files import tensor_files
from .checkpoint_open import UNREADABLE, open_tensors
from .extra_state import EXTRA


def layer_entries(path: Path, name: str) -> dict[str, Tensor]:
    """The entries of the layer ``name`` of a directory, .safetensors file or pickled state_dict (of
    which only tensors are read), without its name; "" is a file of one layer. Raises
    ``CheckpointError`` for files that cannot be read or have no such layer."""
    files, prefix = tensor_files(path), f"{name}." if name else ""
    held = {part: prefix + part for part in (EXTRA, *WEIGHTS, "bias") if prefix + part in files}
    if not {EXTRA, WEIGHTS[0]} <= held.keys():
        ends = f".{WEIGHTS[0]}"
        there = [repr(entry.removesuffix(ends)) for entry in files if entry.endswith(ends)] + ["''"] * (WEIGHTS[0] in files)
        raise CheckpointError(
            f"{path} has no layer {name!r} of any precision; accepted: {', '.join(there[:5]) or 'files with some'}: state_dicts of "
            "AnyPrecisionLinear. load_any_precision reads Any-Precision LLM's own files"
        )
    try:
        return {part: open_tensors(files[entry]).tensor(entry) for part, entry in held.items()}
    except UNREADABLE as error:
        raise CheckpointError(f"{name or path} cannot be read ({error}); accepted: whole files: copy them again") from None
