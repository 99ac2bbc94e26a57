"""What an opened checkpoint holds that cannot be read, all of it at once: layers grouped by the
reason."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from .checkpoint_config import CheckpointError, LayerScheme, Schemes
from .checkpoint_layers import PARTS, PLAIN_KINDS, stored_name
from .checkpoint_open import UNREADABLE, open_tensors


def report(path: Path, layers: Mapping[str, str], files: Mapping[str, Path], schemes: Schemes | None) -> None:
    """Say which of ``layers`` (name -> kind) cannot be read, what can, and what to do: raise
    ``CheckpointError`` where all cannot, else warn; those that are not reported can be read. Reads
    the config and the headers of the files."""
    shapes = _scale_shapes(layers, files)
    reasons: dict[str, list[str]] = {}
    for name, kind in layers.items():
        reason = _reason(name, kind, shapes[name], schemes)
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


def _reason(name: str, kind: str, scales: Sequence[int], schemes: Schemes | None) -> str | None:
    """In words that are the same for all layers of a kind."""
    try:
        scheme = None if schemes is None else schemes(name)
        check_kind(name, kind, scheme)
        if scheme is not None and not scheme.format.integer:
            return None
    except CheckpointError as error:
        return str(error).replace(name, "the layer")
    if list(scales) in ([], [1]) and kind not in PLAIN_KINDS:
        return (
            f"it has one scale for the whole weight, {list(scales)}; accepted: one for each channel, or each group of 32, 64 or 128 "
            f"columns: quantize again with one of these"
        )
    return None


def check_kind(name: str, kind: str, scheme: LayerScheme | None) -> None:
    """Raise ``CheckpointError`` where a layer's tensors and the config are not of one kind, or only the
    config could say what x is."""
    if kind in PLAIN_KINDS and scheme is None:
        raise CheckpointError(
            f"{name} holds a plain weight with scales and there is no config, which says how its activations are quantized; accepted: a "
            "compressed-tensors config of format 'int-quantized' or 'float-quantized': pass config="
        )
    if scheme is not None and scheme.storage != kind and not {scheme.storage, kind}.isdisjoint(PLAIN_KINDS):
        held = "a packed weight" if kind not in PLAIN_KINDS else "a plain weight with scales" + " of e4m3" * (kind != "int-quantized")
        raise CheckpointError(
            f"{name} holds {held} but its format is {scheme.storage!r} in the config; accepted: a plain int8 weight in 'int-quantized', "
            "of e4m3 in 'float-quantized', packed ones in the others: repair the config or copy the checkpoint again"
        )


def _scale_shapes(layers: Mapping[str, str], files: Mapping[str, Path]) -> dict[str, list[int]]:
    """The shapes of the layers' scales; each file is opened once."""
    wanted: dict[Path, list[tuple[str, str]]] = {}
    for name, kind in layers.items():
        stored = stored_name(name, kind, PARTS[kind][1])
        wanted.setdefault(files[stored], []).append((name, stored))
    found = {}
    for file, names in wanted.items():
        try:
            opened = open_tensors(file)
            found |= {name: opened.shape(stored) for name, stored in names}
        except UNREADABLE as error:
            raise CheckpointError(f"cannot read the header of {file}: {error}; copy the file again") from error
    return found
