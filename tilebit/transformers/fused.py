"""One decode step of a model of a known kind: its own weights, in as few kernels as there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor, nn

from ..cache.batch import Batch
from ..cache.kvcache import KVCache
from ..ops.rows import add_norm, gated
from ..schedules.activations.workload import PER_TOKEN
from ..weights.joined import joined
from .anatomy import Anatomy, Block, Norm, rotary_table

Rows = Tensor | tuple[Tensor, Tensor]  # of x, or int8 codes of it with their scales


class SideBySide(nn.Module):
    """Layers of one input that do not make one product: their outputs, put together."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    @property
    def x_group(self) -> int | None:
        """What all layers take as codes; None where they do not take the same."""
        groups = {x_group(layer) for layer in self.layers}
        return groups.pop() if len(groups) == 1 else None

    def of_codes(self, codes: Tensor, token_scales: Tensor) -> Tensor:
        return torch.cat([_product(layer, (codes, token_scales)) for layer in self.layers], -1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in self.layers], -1)


@dataclass(frozen=True, slots=True, eq=False)
class FusedBlock:
    """A layer's products, each one call, and what stands between them."""

    of: Block
    qkv: nn.Module
    o: nn.Module
    gate_up: nn.Module
    down: nn.Module


def fused_blocks(anatomy: Anatomy) -> list[FusedBlock]:
    """The layers with joined products, whose weights the model's own become views of."""
    return [FusedBlock(block, _one(block.qkv), _one([block.o]), _one(block.gate_up), _one([block.down])) for block in anatomy.blocks]


class FusedStep(nn.Module):
    """A new token for each row of a batch: nine kernels a layer, eleven with norms after attention and
    MLP. Where products take int8 x, norms and gates write its codes: one kernel more, which quantizes
    what attention gives. Kernels are launched before their predecessors end (``dependent``), weights
    are read where the model has them.

    Sums of the residual stream are rounded to the model's dtype, norms and rotary embeddings are
    computed in fp32 and rounded once, codes not before: where the model rounds between, logits differ
    by as much.
    """

    def __init__(self, anatomy: Anatomy, device: torch.device, positions: int) -> None:
        super().__init__()
        self._of = anatomy
        self.blocks = fused_blocks(anatomy)
        self.products = nn.ModuleList(part for b in self.blocks for part in (b.qkv, b.o, b.gate_up, b.down))
        self.rotary = rotary_table(anatomy.rotary, positions, anatomy.blocks[0].head_dim, device)

    @torch.no_grad()
    def forward(self, ids: Tensor, cache: KVCache, batch: Batch) -> Tensor:
        """Logits [rows, vocabulary] behind the tokens ``ids`` int64 [rows], whose keys and values join
        ``cache``, in the sequences of ``batch``, which has been advanced by one token each."""
        residual = self._of.embed(ids)
        rows = _normed(residual, self.blocks[0].of.before_attention, self.blocks[0].qkv)
        for i, block in enumerate(self.blocks):
            of = block.of
            x = block.o(self._attended(block, _product(block.qkv, rows), cache, batch, i))
            if of.after_attention is not None:
                x = _normed(x, of.after_attention)
            x = _product(block.gate_up, _added(x, residual, of.before_mlp, block.gate_up))
            x = _product(block.down, _gated(x, of.activation, block.down))
            if of.after_mlp is not None:
                x = _normed(x, of.after_mlp)
            last = i + 1 == len(self.blocks)
            norm, taker = (self._of.norm, self._of.head) if last else (self.blocks[i + 1].of.before_attention, self.blocks[i + 1].qkv)
            rows = _added(x, residual, norm, taker)
        logits = _product(self._of.head, rows)
        return self._of.logit_cap * torch.tanh(logits / self._of.logit_cap) if self._of.logit_cap else logits

    def _attended(self, block: FusedBlock, qkv: Tensor, cache: KVCache, batch: Batch, layer: int) -> Tensor:
        of = block.of
        sizes = [of.heads * of.head_dim, of.heads_kv * of.head_dim, of.heads_kv * of.head_dim]
        q, k, v = (part.unflatten(-1, (-1, of.head_dim)) for part in qkv.split(sizes, -1))
        norms: dict[str, Any] = {}
        if of.q_norm is not None and of.k_norm is not None:
            norms = {"q_norm": of.q_norm.weight, "k_norm": of.k_norm.weight, "norm_eps": of.q_norm.eps, "norm_offset": of.q_norm.offset}
        q = cache.append(batch, k, v, cos_sin=self.rotary, q=q, layer=layer, dependent=True, **norms)
        out, _ = cache.attend(batch, q[:, None], scale=of.scale, window=of.window, soft_cap=of.soft_cap, layer=layer, dependent=True)
        return out.flatten(1)


def _one(layers: Sequence[nn.Module]) -> nn.Module:
    found = joined(layers, dependent=True)
    return SideBySide(layers) if found is None else found


def x_group(layer: nn.Module) -> int | None:
    """Values of x that share a scale where ``layer`` takes int8 codes that are made before it is called
    (-1: a row's); None where it takes x itself."""
    return getattr(layer, "x_group", None)


def _product(layer: nn.Module, rows: Rows) -> Tensor:
    if isinstance(rows, Tensor):
        return layer(rows)
    return layer.of_codes(*rows)  # type: ignore[operator]


def _codes(taker: nn.Module | None) -> dict[str, Any] | None:
    """How ``add_norm`` and ``gated`` are asked for what ``taker`` takes."""
    group = None if taker is None else x_group(taker)
    return None if group is None else {"out": "int8", "group": None if group == PER_TOKEN else group}


@overload
def _normed(x: Tensor, norm: Norm) -> Tensor: ...
@overload
def _normed(x: Tensor, norm: Norm, taker: nn.Module) -> Rows: ...
def _normed(x: Tensor, norm: Norm, taker: nn.Module | None = None) -> Rows:
    """The norm of x, as ``taker`` takes it."""
    return _rows(x, None, norm, taker)


def _added(x: Tensor, residual: Tensor, norm: Norm, taker: nn.Module) -> Rows:
    """The norm of ``residual``, to which x is added where it lies, as ``taker`` takes it."""
    return _rows(x, residual, norm, taker)


def _rows(x: Tensor, residual: Tensor | None, norm: Norm, taker: nn.Module | None) -> Rows:
    codes = _codes(taker)
    if codes is None:
        return add_norm(x, residual, norm.weight, norm.eps, norm.offset, inplace=True, dependent=True)[0]
    return add_norm(x, residual, norm.weight, norm.eps, norm.offset, inplace=True, dependent=True, **codes)[:2]


def _gated(x: Tensor, activation: str, taker: nn.Module) -> Rows:
    codes = _codes(taker)
    return gated(x, activation, dependent=True) if codes is None else gated(x, activation, dependent=True, **codes)
