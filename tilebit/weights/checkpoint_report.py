"""What an opened checkpoint holds that cannot be read, all of it at once: layers grouped by the
reason."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from .checkpoint_config import CheckpointError, Schemes
from .checkpoint_layers import PARTS, stored_name


def report(path: Path, family: str, layers: Sequence[str], files: Mapping[str, Path], schemes: Schemes | None) -> None:
    """Say which of ``layers`` are of a kind that is not supported, what is, and what to do: raise
    ``CheckpointError`` where all are, else warn; those that are not reported can be read. Reads the
    config and the headers of the files."""
    shapes = _scale_shapes(family, layers, files)
    reasons: dict[str, list[str]] = {}
    for name in layers:
        reason = _reason(name, shapes[name], schemes)
        if reason:
            reasons.setdefault(reason, []).append(name)
    if not reasons:
        return
    count = sum(map(len, reasons.values()))
    lines = [f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {reason}" for reason, names in reasons.items()]
    text = f"{count} of the {len(layers)} quantized layers of {path} cannot be read: " + "; ".join(lines)
    if count == len(layers):
        raise CheckpointError(text)
    warnings.warn(text, stacklevel=4)  # the caller of load_checkpoint


def _reason(name: str, scales: Sequence[int], schemes: Schemes | None) -> str | None:
    """In words that are the same for all layers of a kind."""
    try:
        if schemes is not None and not schemes(name).format.integer:
            return None
    except CheckpointError as error:
        return str(error).replace(name, "the layer")
    if list(scales) in ([], [1]):
        return (
            f"it has one scale for the whole weight, {list(scales)}; accepted: one for each channel, or each group of 32, 64 or 128 "
            f"columns: quantize again with one of these"
        )
    return None


def _scale_shapes(family: str, layers: Sequence[str], files: Mapping[str, Path]) -> dict[str, list[int]]:
    """The shapes of the layers' scales; each file is opened once."""
    wanted: dict[Path, list[tuple[str, str]]] = {}
    for name in layers:
        stored = stored_name(name, family, PARTS[family][1])
        wanted.setdefault(files[stored], []).append((name, stored))
    found = {}
    for file, names in wanted.items():
        try:
            with safe_open(file, framework="pt") as opened:
                found |= {name: list(opened.get_slice(stored).get_shape()) for name, stored in names}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read the header of {file}: {error}; copy the file again") from error
    return found
