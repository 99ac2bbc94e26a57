"""A model as it is once it is loaded, on meta: its layers' formats and shapes, no memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..layouts.formats import GemmFormat
from ..schedules.gemm.workload import Workload
from ..schedules.operands import present
from ..weights.any_kind import AnyKind
from ..weights.any_modules import AnyPrecisionLinear
from ..weights.any_packed import AnyPrecisionWeight, any_format
from ..weights.modules import QuantLinear
from ..weights.packed import WEIGHTS, PackedWeight
from .config import METHOD, Stored, TilebitConfig
from .foreign import ForeignSource
from .opening import checked, dtype_of, quantized_by
from .sources import PackedSource


class MixedOutline(nn.Module):
    """In place of a ``MixedLinear``, whose index is not read."""

    def __init__(self, rows: int, n: int, k: int, format: GemmFormat, bias: bool, dtype: torch.dtype, smooth: Tensor | None) -> None:
        super().__init__()
        self.rows, self.n, self.k, self.format, self.bias, self.dtype, self.smooth = rows, n, k, format, bias, dtype, smooth
        self.x_group = format.x_group


def outline(folder: Path, quantization: TilebitConfig | None, dtype: torch.dtype | None, arch: str) -> PreTrainedModel:
    """The model that ``open_model`` gives of the same arguments, on meta, its weights packed for ``arch``
    (those of act order as if their columns were not reordered). Layers of the same factors of x share one
    tensor of them. Raises as that does, of what needs no weight."""
    config, model = checked(folder, quantization)
    chosen, held = dtype_of(config, dtype), quantized_by(config)
    nn.Module.to(model, chosen).eval()
    formats, rows, factors = _described(folder, model, held, quantization, chosen)
    for name, format in formats.items():
        layer: Any = model.get_submodule(name)
        n, k = layer.out_features, layer.in_features
        if name in rows:
            assert isinstance(format, GemmFormat)
            made: nn.Module = MixedOutline(rows[name], n, k, format, layer.bias is not None, chosen, factors.get(name))
        elif isinstance(format, AnyKind):
            made = AnyPrecisionLinear(_packed_any(n, k, format, chosen, arch), layer.bias).eval()
            made.bits = format.bits
        else:
            made = QuantLinear(_packed(n, k, format, chosen, arch, factors.get(name)), layer.bias).eval()
        model.set_submodule(name, made)
    return model


def _described(
    folder: Path, model: PreTrainedModel, held: dict[str, Any] | None, quantization: TilebitConfig | None, dtype: torch.dtype
) -> tuple[dict[str, Stored], dict[str, int], dict[str, Tensor]]:
    """(the format of every layer that is quantized, of a mixed one that of its rows; their number by mixed layer; factors
    by layer of smoothed x, which are read to be compared: the same ones are one tensor on meta)."""
    if held is None:
        formats: dict[str, Stored] = {} if quantization is None else quantization.formats_of(model)
    elif held.get("quant_method") != METHOD:
        formats = ForeignSource(folder, model, TilebitConfig(source=held), dtype).config.formats_of(model)
    else:
        source = PackedSource(folder, model, TilebitConfig(**held), dtype)
        found = {name: source.described(name) for name in source.layers if name != source.embedding}
        if source.embedding is not None:  # which needs no kernel
            found |= {name: source.described(source.embedding) for name in source.shared}
        formats = {
            name: packed.format if isinstance(packed, PackedWeight) else AnyKind.of(packed.widths, source.set_to(name))
            for name, packed in found.items()
        }
        return formats, {name: found[name].n for name in source.mixed}, _shared(source)
    return formats, {}, {}


def _shared(source: PackedSource) -> dict[str, Tensor]:
    known: dict[bytes, Tensor] = {}
    found = {name: held for name in source.layers if (held := source.factors(name)) is not None}
    return {name: known.setdefault(held.numpy().tobytes(), torch.empty_like(held, device="meta")) for name, held in found.items()}


def _packed(n: int, k: int, format: GemmFormat, dtype: torch.dtype, arch: str, smooth: Tensor | None = None) -> PackedWeight:
    stated = present(Workload(1, n, k, format, str(dtype).removeprefix("torch.")).operands(arch))
    held = {o.name: torch.empty(*map(int, o.shape), dtype=getattr(torch, o.dtype), device="meta") for o in stated if o.name in WEIGHTS}
    return PackedWeight(
        held["weight"], held["scales"], held.get("zeros"), n, k, format, dtype, arch, row_scales=held.get("row_scales"), smooth=smooth
    )  # fmt: skip


def _packed_any(n: int, k: int, kind: AnyKind, dtype: torch.dtype, arch: str) -> AnyPrecisionWeight:
    views = {bits: _packed(n, k, any_format(bits), dtype, arch) for bits in kind.widths}
    return AnyPrecisionWeight(views[kind.max_bits].weight, {bits: view.scales for bits, view in views.items()}, n, k, arch)
