"""Several linear layers of one input as one: q, k and v, or gate and up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..schedules.gemm.codecs import packed_layout
from .mixed_tensor import same_numbers
from .modules import QuantLinear
from .packed import PackedWeight


def joined(layers: Sequence[nn.Module], dependent: bool = False) -> nn.Module | None:
    """One layer that computes the outputs of ``layers`` [..., n_i] side by side, [..., sum of n_i],
    in one product; None where they do not make one: layers of several kinds, formats, dtypes or
    devices, of another order of input channels, with other factors of smoothed inputs, or, packed,
    whose n is no multiple of a packed tile's.

    ``layers`` are ``QuantLinear`` or ``nn.Linear`` of one input. Their large tensors become views
    of the joined ones, so that nothing is held twice but scales and zero points; their names and
    values are what they were, and they go on working by themselves. A ``QuantLinear`` that then
    loads a ``state_dict`` has tensors of its own again, and the joined layer computes what it did:
    join them anew. Of one layer it is the layer itself, or, with ``dependent``, one that shares its
    tensors. ``dependent`` is the new ``QuantLinear``'s.
    """
    if all(type(layer) is QuantLinear for layer in layers):
        return _packed([layer for layer in layers if isinstance(layer, QuantLinear)], dependent)
    if all(type(layer) is nn.Linear for layer in layers):
        return _floats([layer for layer in layers if isinstance(layer, nn.Linear)])
    return layers[0] if len(layers) == 1 else None


def _packed(layers: list[QuantLinear], dependent: bool) -> QuantLinear | None:
    first, held = layers[0], [layer.packed for layer in layers]
    if len(layers) == 1:
        alone = QuantLinear(held[0], None, dependent)
        alone.bias = first.bias
        return alone
    layout = packed_layout(first.arch, first.format)
    same = len({(p.k, p.format, p.dtype, p.device, p.arch) for p in held}) == 1
    whole = all(p.n % layout.tile_n == 0 for p in held[:-1]) and layout.outer == "n_major" and not first.format.codebook
    if not (same and whole and same_numbers([p.perm for p in held]) and same_numbers([p.smooth for p in held])):
        return None
    weight = torch.cat([p.weight for p in held])
    packed = replace(
        held[0],
        weight=weight,
        scales=_side_by_side([p.scales for p in held]),
        zeros=_side_by_side([p.zeros for p in held]),
        row_scales=_side_by_side([p.row_scales for p in held]),
        n=sum(p.n for p in held),
    )
    made = QuantLinear(packed, _biases([layer.bias for layer in layers], [p.n for p in held], packed), dependent)
    for layer, part in zip(layers, weight.split([p.weight.shape[0] for p in held]), strict=True):
        layer.weight = part
    return made


def _floats(layers: list[nn.Linear]) -> nn.Linear | None:
    first = layers[0]
    if len(layers) == 1:
        return first
    if len({(layer.weight.dtype, layer.weight.device, layer.bias is None) for layer in layers}) > 1:
        return None
    rows = [layer.out_features for layer in layers]
    made = nn.Linear(first.in_features, sum(rows), first.bias is not None, device="meta")
    for name in ("weight", "bias"):
        parts = [getattr(layer, name) for layer in layers]
        if parts[0] is None:
            continue
        whole = torch.cat([part.detach() for part in parts])
        setattr(made, name, nn.Parameter(whole, requires_grad=False))
        for part, view in zip(parts, whole.split(rows), strict=True):
            part.data = view
    return made


def _side_by_side(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Numbers of each output channel, the last axis, of all layers."""
    there = [part for part in parts if part is not None]
    return torch.cat(there, -1) if there else None


def _biases(biases: list[Tensor | None], rows: list[int], packed: PackedWeight) -> Tensor | None:
    if all(bias is None for bias in biases):
        return None
    zeros = [torch.zeros(n, dtype=packed.dtype, device=packed.device) for n in rows]
    return torch.cat([zero if bias is None else bias for bias, zero in zip(biases, zeros, strict=True)])
