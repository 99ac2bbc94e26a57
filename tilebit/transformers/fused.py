"""One decode step of a model of a known kind: its own weights, in as few kernels as there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..cache.batch import Batch
from ..cache.kvcache import KVCache
from ..ops.rows import add_norm, gated
from ..weights.joined import joined
from .anatomy import Anatomy, Block, Norm, rotary_table


class SideBySide(nn.Module):
    """Layers of one input that do not make one product: their outputs, put together."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

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


class FusedStep(nn.Module):
    """A new token for each row of a batch: nine kernels a layer, eleven with norms after attention and
    MLP. Kernels are launched before their predecessors end (``dependent``), weights are read where
    the model has them.

    Sums of the residual stream are rounded to the model's dtype, norms and rotary embeddings are
    computed in fp32 and rounded once: where the model rounds between, logits differ by as much.
    """

    def __init__(self, anatomy: Anatomy, device: torch.device, positions: int) -> None:
        super().__init__()
        self._of = anatomy
        self.blocks = [
            FusedBlock(block, _one(block.qkv), _one([block.o]), _one(block.gate_up), _one([block.down])) for block in anatomy.blocks
        ]
        self.products = nn.ModuleList(part for b in self.blocks for part in (b.qkv, b.o, b.gate_up, b.down))
        self.rotary = rotary_table(anatomy.rotary, positions, anatomy.blocks[0].head_dim, device)

    @torch.no_grad()
    def forward(self, ids: Tensor, cache: KVCache, batch: Batch) -> Tensor:
        """Logits [rows, vocabulary] behind the tokens ``ids`` int64 [rows], whose keys and values join
        ``cache``, in the sequences of ``batch``, which has been advanced by one token each."""
        residual = self._of.embed(ids)
        x = _normed(residual, self.blocks[0].of.before_attention)
        for i, block in enumerate(self.blocks):
            of = block.of
            x = block.o(self._attended(block, block.qkv(x), cache, batch, i))
            if of.after_attention is not None:
                x = _normed(x, of.after_attention)
            x = _added(x, residual, of.before_mlp)
            x = block.down(gated(block.gate_up(x), of.activation, dependent=True))
            if of.after_mlp is not None:
                x = _normed(x, of.after_mlp)
            x = _added(x, residual, self.blocks[i + 1].of.before_attention if i + 1 < len(self.blocks) else self._of.norm)
        logits = self._of.head(x)
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


def _normed(x: Tensor, norm: Norm) -> Tensor:
    y, _ = add_norm(x, None, norm.weight, norm.eps, norm.offset, dependent=True)
    return y


def _added(x: Tensor, residual: Tensor, norm: Norm) -> Tensor:
    """The norm of ``residual``, to which x is added where it lies."""
    y, _ = add_norm(x, residual, norm.weight, norm.eps, norm.offset, inplace=True, dependent=True)
    return y
