"""Reading quantized checkpoints: AutoAWQ (gemm), GPTQ v1 and v2, compressed-tensors pack-quantized,
its int-quantized and float-quantized W8A8, Hugging Face's blocks of fp8, QServe's W4A8 per channel and
by groups, and 4-bit floats:
mxfp4-pack-quantized and nvfp4-pack-quantized, and gpt-oss's blocks of dense layers; from safetensors
files, sharded indexes or one pickled state_dict. Checkpoints of 4-bit floats that quantize
activations too are read weight-only: x stays in 16 bits, input_global_scale is not used.

Tensors are read one layer at a time; files are opened, and their headers checked, when the
checkpoint is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..accepted import expect
from .checkpoint_config import PLAIN, CheckpointError, LayerScheme, Schemes, check_gptq_format, parse_quantization
from .checkpoint_decode import decode, size_of
from .checkpoint_files import find_config, tensor_dtypes, tensor_files, tensor_shape
from .checkpoint_floats import refuse_stack
from .checkpoint_layers import PARTS, PLAIN_KINDS, REQUIRED, stored_name
from .checkpoint_open import UNREADABLE, TensorFile, open_tensors
from .checkpoint_report import report
from .quantize import QuantizedTensor

_E4M3 = "F8_E4M3"  # in safetensors' words
__all__ = ["Checkpoint", "CheckpointError", "load_checkpoint"]


def load_checkpoint(path: str | Path, *, config: Mapping[str, Any] | None = None, checkpoint_format: str | None = None) -> Checkpoint:
    """Open a checkpoint: a directory as saved for Hugging Face, or one file, .safetensors or a
    pickled state_dict (with the config of its directory, if there is one). Of pickles only tensors
    are read (``weights_only=True``).

    ``config`` replaces the quantization config on disk. ``checkpoint_format`` ("gptq" or "gptq_v2")
    replaces what a GPTQ config says of its zero points (v1 stores them minus one). Without any
    config, layers are recognized by their tensors' names and shapes; GPTQ then needs
    ``checkpoint_format``. Raises ``CheckpointError`` (a ``ValueError``) for anything missing,
    truncated, mislabelled or not supported; where only some layers are not supported it warns, once
    for all of them, and reading one of these raises. Raises ``TypeError`` for a ``path`` or
    ``config`` of another type.
    """
    expect("path", path, str | Path, "the path of a directory or of a .safetensors file")
    expect("config", config, Mapping | None, "the quantization config as a mapping, or None for that on disk")
    path = Path(path)
    files = tensor_files(path)
    if config is None:
        config = find_config(path if path.is_dir() else path.parent)
    if config is None:
        check_gptq_format(checkpoint_format)
        return Checkpoint(path, files, _guess_family(path, files), None, checkpoint_format)
    if config.get("quant_method") is None:  # the tools' own files of old (quantize_config.json, quant_config.json) name no method
        config = {**config, "quant_method": _guess_family(path, files)}
    family, schemes = parse_quantization(config, checkpoint_format)
    return Checkpoint(path, files, family, schemes, checkpoint_format)


class Checkpoint:
    """An open checkpoint, made by ``load_checkpoint``. ``family`` is "awq", "gptq",
    "compressed-tensors", "mxfp4" (gpt-oss), "qserve" or "fp8". Keeps its files memory-mapped.
    """

    def __init__(self, path: Path, files: dict[str, Path], family: str, schemes: Schemes | None, checkpoint_format: str | None) -> None:
        self.path, self.family = path, family
        self._files, self._schemes, self._checkpoint_format = files, schemes, checkpoint_format
        self._open: dict[Path, TensorFile] = {}
        found = _kinds(files, family)
        self._layers = {name: found[name] for name in sorted(found, key=_natural)}  # and the kind of each: a key of PARTS
        if not self._layers:
            suffix = stored_name("", family, PARTS[family][family == "fp8"])
            raise CheckpointError(
                f"{path} is labelled {family} but holds no tensor named *{suffix}; correct quant_method, or check that it was saved "
                "quantized"
            )
        for layer, kind in self._layers.items():
            missing = [name for part in REQUIRED[kind] if (name := stored_name(layer, kind, part)) not in files]
            packed = f"{layer}.weight_packed"
            if missing == [f"{layer}.weight_shape"] and tensor_dtypes(files, [packed])[packed] == "U8":
                missing = []  # bytes of 4-bit floats say their shape
            if missing:
                held = next(name for part in PARTS[kind] if (name := stored_name(layer, kind, part)) in files)
                raise CheckpointError(
                    f"{path} has {held} but not {', '.join(missing)}; a {family} layer needs all of them: copy the checkpoint again"
                )
        report(path, self._layers, files, schemes)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, family={self.family!r}, layers={len(self._layers)})"

    def layers(self) -> list[str]:
        """Names of the quantized layers ("model.layers.0.self_attn.q_proj"), in natural order."""
        return list(self._layers)

    def names(self) -> list[str]:
        """Names of all stored tensors, in natural order."""
        return sorted(self._files, key=_natural)

    def tensor(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """A stored tensor, as it is."""
        if name not in self._files:
            raise CheckpointError(f"{self.path} has no tensor {name!r}; names() lists what it has")
        file = self._files[name]
        try:
            if file not in self._open:
                self._open[file] = open_tensors(file)
            return self._open[file].tensor(name).to(device)
        except UNREADABLE as error:
            raise CheckpointError(f"cannot read {name} from {file}: {error}; copy the file again") from error

    def bias(self, name: str, device: torch.device | str = "cpu") -> Tensor | None:
        """The bias [n] of a quantized layer, or None. Raises ``CheckpointError`` if it does not fit
        the layer's scales."""
        kind = self._kind(name)
        stored = stored_name(name, kind, "bias")
        if stored not in self._files:
            return None
        bias = self.tensor(stored, device)
        weight, scales = (stored_name(name, kind, part) for part in PARTS[kind][:2])
        if kind == "mxfp4":
            refuse_stack(name, tuple(tensor_shape(self._files[weight], weight)))
        counted = weight if kind in PLAIN_KINDS else scales  # whose scales may be fewer than channels
        shape = tensor_shape(self._files[counted], counted)
        if not shape:
            raise CheckpointError(f"{counted} is one number; accepted beside a bias: one for each channel: copy the checkpoint again")
        n = shape[-1 if kind in ("awq", "gptq") else 0]
        if list(bias.shape) != [n] or not bias.is_floating_point():
            raise CheckpointError(f"{stored} is {bias.dtype} {list(bias.shape)}; accepted: floating point [{n}]: copy the checkpoint again")
        return bias

    def quantized(self, name: str, device: torch.device | str = "cpu") -> QuantizedTensor:
        """One layer, unpacked on ``device``: the stored codes, scales and zero points unchanged,
        act-order columns grouped through ``perm``. Of QServe's the same weights
        (``checkpoint_qserve.py``).

        Raises ``CheckpointError`` when its tensors do not fit each other or the config.
        """
        kind, scheme = self._kind(name), None if self._schemes is None else self._schemes(name)
        return decode(name, kind, self._parts(name, device), scheme, self._checkpoint_format)

    def declared(self, name: str) -> tuple[LayerScheme, int, int]:
        """What the config says of a layer, and n and k of its tensors, whose shapes are checked against
        it; no weight is read. Raises ``CheckpointError``, without a config too."""
        kind = self._kind(name)
        if self._schemes is None:
            raise CheckpointError(f"{self.path} has no quantization config; accepted here: a checkpoint with one: pass config=")
        scheme = self._schemes(name)
        return scheme, *size_of(name, kind, self._parts(name), scheme)

    def _parts(self, name: str, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """The layer's tensors, those that it has."""
        parts = {part: stored_name(name, self._kind(name), part) for part in PARTS[self._kind(name)]}
        return {part: self.tensor(stored, device) for part, stored in parts.items() if stored in self._files}

    def _kind(self, name: str) -> str:
        if name not in self._layers:
            raise CheckpointError(f"{name!r} is not a quantized layer of {self.path}; layers() lists them, tensor() reads the rest")
        return self._layers[name]


def _kinds(files: Mapping[str, Path], family: str) -> dict[str, str]:
    """The quantized layers that tensors' names point to, and the kind of each. compressed-tensors' are
    packed or plain: a plain weight is one that has scales, or is of 8 bits and lacks them. Of fp8 all
    are plain."""
    if family == "fp8":
        return dict.fromkeys(_plain(files, ".weight_scale_inv", ()), family)
    suffix = stored_name("", family, PARTS[family][0])
    found = {name.removesuffix(suffix): family for name in files if name.endswith(suffix)}
    if family != "compressed-tensors":
        return found
    plain = _plain(files, ".weight_scale", found)
    return found | {layer: PLAIN[dtype == _E4M3] for layer, dtype in plain.items()}


def _plain(files: Mapping[str, Path], scale: str, packed: Collection[str]) -> dict[str, str | None]:
    """The layers that have a tensor ``scale`` or a weight of 8 bits, but for ``packed`` ones, and their
    weights' dtypes."""
    scaled = {layer for name in files if (layer := name.removesuffix(scale)) != name and layer not in packed}
    weights = {name for name in files if name.endswith(".weight") and name.removesuffix(".weight") not in packed}
    dtypes = {name.removesuffix(".weight"): dtype for name, dtype in tensor_dtypes(files, weights).items()}
    return {layer: dtypes.get(layer) for layer in scaled | {name for name, dtype in dtypes.items() if dtype in ("I8", _E4M3)}}


def _guess_family(path: Path, files: dict[str, Path]) -> str:
    """The family that tensor names (and, between AWQ and GPTQ without act-order, shapes) point to."""
    for name, file in files.items():
        if name.endswith(".weight_packed"):
            return "compressed-tensors"
        if name.endswith("_blocks") and f"{name.removesuffix('blocks')}scales" in files:
            return "mxfp4"
        if name.endswith(".qweight") and f"{name.removesuffix('qweight')}s1_scales" in files:
            return "qserve"
        if name.endswith(".qweight") and f"{name.removesuffix('qweight')}scales" in files:
            if f"{name.removesuffix('qweight')}g_idx" in files:
                return "gptq"
            scales = name.removesuffix("qweight") + "scales"
            # GPTQ packs along k, so its qweight is as wide as its scales; AWQ packs along n.
            return "gptq" if tensor_shape(file, name)[-1:] == tensor_shape(files[scales], scales)[-1:] else "awq"
    raise CheckpointError(
        f"{path} has no quantization config and no quantized layer (*.qweight with *.scales or *.s1_scales, *.weight_packed, or "
        "*_blocks with *_scales); accepted: AutoAWQ, GPTQ, compressed-tensors, gpt-oss and QServe "
        "checkpoints: quantize the model first, or pass config="
    )


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key under which layer 10 follows layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
