"""Steps and prompts of a model of a known kind: its own weights, in as few kernels as there are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..cache.batch import Batch
from ..cache.kvcache import KVCache
from ..cache.rotary import rotated
from ..ops.rows import add_norm, gated
from ..schedules.activations.workload import PER_TOKEN
from ..weights.joined import joined
from ..weights.mixed_tensor import same_numbers
from .anatomy import Anatomy, Block, Norm, rotary_table
from .output_layer import logits_of
from .parted import BY_DEFAULT, Part, Parted, Rows, parted
from .parted import gated as gated_product


class SideBySide(nn.Module):
    """Layers of one input that do not make one product: their outputs, put together."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    @property
    def x_group(self) -> int | None:
        """What all layers take as codes; None where they do not take the same, as of x smoothed by different factors."""
        groups = {x_group(layer) for layer in self.layers}
        return groups.pop() if len(groups) == 1 and same_numbers([factors(layer) for layer in self.layers]) else None

    @property
    def smooth(self) -> Tensor | None:
        """The factors of x that codes of ``x_group`` are smoothed by."""
        return None if self.x_group is None else factors(self.layers[0])

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


def fused_blocks(anatomy: Anatomy, parts: Collection[Part] = BY_DEFAULT) -> list[FusedBlock]:
    """The layers with joined products, whose weights the model's own become views of, and which do ``parts``
    where they can."""
    blocks: list[FusedBlock] = []
    summed = True  # the residual stream, before the block's first norm
    for of in anatomy.blocks:
        qkv = parted(_one(of.qkv), _asked(parts, norm=summed), of.before_attention)
        o = parted(_one([of.o]), _asked(parts, residual=of.after_attention is None))
        down = parted(_one([of.down]), _asked(parts, residual=of.after_mlp is None))
        normed = _asked(parts, norm=_adds(o))
        gate_up = _one(of.gate_up)
        if "gate" in parts and x_group(down) is None:
            gate_up = gated_product(gate_up, normed, of.before_mlp, of.activation)
        else:
            gate_up = parted(gate_up, normed, of.before_mlp)
        blocks.append(FusedBlock(of, qkv, o, gate_up, down))
        summed = _adds(down)
    return blocks


class FusedStep(nn.Module):
    """New tokens for each row of a batch: one each (``forward``), or those of a prompt (``prompt``). A step
    takes nine kernels a layer, eight where a product applies the gate, two more with norms after
    attention and MLP, and one behind all layers that packs the windows it filled: until then their
    tokens are read in 16 bits. Where products take int8 x, norms and gates write its codes: one kernel
    more, which quantizes what attention gives. Where they do all ``parts`` there are six. Kernels are
    launched before their predecessors end (``dependent``), weights are read where the model has them.

    Sums of the residual stream are rounded to the model's dtype, norms and rotary embeddings are
    computed in fp32 and rounded once, codes not before: where the model rounds between, logits differ
    by as much. Of ``parts`` what is added to the residual stream and what a gate is applied to are not
    rounded before, and a norm rounds x times its weight instead of what it divides.
    """

    def __init__(self, anatomy: Anatomy, device: torch.device, positions: int, parts: Collection[Part] = BY_DEFAULT) -> None:
        super().__init__()
        self._of = anatomy
        self.blocks = fused_blocks(anatomy, parts)
        self.products = nn.ModuleList(part for b in self.blocks for part in (b.qkv, b.o, b.gate_up, b.down))
        self.rotary = rotary_table(anatomy.rotary, positions, anatomy.blocks[0].head_dim, device)

    @torch.no_grad()
    def forward(self, ids: Tensor, cache: KVCache, batch: Batch) -> Tensor:
        """Logits [rows, vocabulary] behind the tokens ``ids`` int64 [rows], whose keys and values join
        ``cache``, in the sequences of ``batch``, which has been advanced by one token each."""
        residual = _embedded(self._of.embed, ids)
        residual, added = self._through(residual, lambda block, qkv, layer: self._attended(block, qkv, cache, batch, layer))
        cache.pack(batch, dependent=True)
        return self._logits(residual, added)

    @torch.no_grad()
    def prompt(self, ids: Tensor, cache: KVCache, batch: Batch, kept: Tensor | None = None) -> Tensor:
        """Logits [tokens, vocabulary] of the tokens ``ids`` int64 [tokens], sequence after sequence, or of
        those at the places ``kept``; their keys and values join ``cache``, in the sequences of ``batch``,
        which has been advanced by as many. Each attends to the rows before it in 16 bits, and to what
        the cache held dequantized (``KVCache.prefill``). Not to be captured."""
        positions = batch.positions() if any(block.of.q_norm is not None for block in self.blocks) else None

        def attended(block: FusedBlock, qkv: Tensor, layer: int) -> Tensor:
            of, heads = block.of, qkv.unflatten(-1, (-1, block.of.head_dim))
            qk, v = heads[:, : of.heads + of.heads_kv], heads[:, of.heads + of.heads_kv :]
            if of.q_norm is None or of.k_norm is None:
                return cache.prefill_turning(batch, qk, v, self.rotary, of.scale, of.window, of.soft_cap, layer).flatten(1)
            assert positions is not None
            parts = zip(qk.split([of.heads, of.heads_kv], 1), (of.q_norm, of.k_norm), strict=True)
            q, k = (rotated(_headwise(rows, norm), positions, self.rotary, "half").to(qkv.dtype) for rows, norm in parts)
            out, _ = cache.prefill(batch, q, k, v, scale=of.scale, window=of.window, soft_cap=of.soft_cap, layer=layer)
            return out.flatten(1)

        residual, added = self._through(_embedded(self._of.embed, ids), attended)
        if kept is not None:
            residual, added = residual[kept], None if added is None else added[kept]
        return self._logits(residual, added)

    def _through(self, residual: Tensor, attended: Callable[[FusedBlock, Tensor, int], Tensor]) -> tuple[Tensor, Tensor | None]:
        """All layers: the residual stream, and what is yet to be added to it."""
        added: Tensor | None = None
        for i, block in enumerate(self.blocks):
            of = block.of
            qkv = _product(block.qkv, _before(added, residual, of.before_attention, block.qkv))
            added = _behind(block.o, attended(block, qkv, i), residual, of.after_attention)
            x = _product(block.gate_up, _before(added, residual, of.before_mlp, block.gate_up))
            gates = isinstance(block.gate_up, Parted) and block.gate_up.gates(len(residual))
            rows = x if gates else _gated(x, of.activation, block.down)
            added = _behind(block.down, rows, residual, of.after_mlp)
        return residual, added

    def _logits(self, residual: Tensor, added: Tensor | None) -> Tensor:
        rows = _before(added, residual, self._of.norm, self._of.head)
        logits = logits_of(self._of.head, rows) if isinstance(rows, Tensor) else _product(self._of.head, rows)
        return self._of.logit_cap * torch.tanh(logits / self._of.logit_cap) if self._of.logit_cap else logits

    def _attended(self, block: FusedBlock, qkv: Tensor, cache: KVCache, batch: Batch, layer: int) -> Tensor:
        of = block.of
        sizes = [of.heads * of.head_dim, of.heads_kv * of.head_dim, of.heads_kv * of.head_dim]
        q, k, v = (part.unflatten(-1, (-1, of.head_dim)) for part in qkv.split(sizes, -1))
        norms: dict[str, Any] = {}
        if of.q_norm is not None and of.k_norm is not None:
            norms = {"q_norm": of.q_norm.weight, "k_norm": of.k_norm.weight, "norm_eps": of.q_norm.eps, "norm_offset": of.q_norm.offset}
        step: dict[str, Any] = {"layer": layer, "dependent": True, "full_windows": True}
        q = cache.append(batch, k, v, cos_sin=self.rotary, q=q, **step, **norms)
        out, _ = cache.attend(batch, q[:, None], scale=of.scale, window=of.window, soft_cap=of.soft_cap, **step)
        return out.flatten(1)


def _embedded(embed: nn.Module, ids: Tensor) -> Tensor:
    """The rows of an embedding. PyTorch's own look-up of 16 tokens takes 8.2 us, the same by an index 1.8
    (H200); of one token 1.9 and 2.8."""
    plain = type(embed) is nn.Embedding and embed.max_norm is None and "forward" not in vars(embed)
    hooked = embed._forward_hooks or embed._forward_pre_hooks
    return embed.weight[ids] if plain and not hooked and len(ids) > 1 else embed(ids)


def _headwise(rows: Tensor, norm: Norm) -> Tensor:
    """The norm of each head of ``rows`` [tokens, heads, head_dim], in fp32."""
    return functional.rms_norm(rows.float(), rows.shape[-1:], norm.weight.float() + norm.offset, norm.eps)


def _one(layers: Sequence[nn.Module]) -> nn.Module:
    found = joined(layers, dependent=True)
    return SideBySide(layers) if found is None else found


def x_group(layer: nn.Module) -> int | None:
    """Values of x that share a scale where ``layer`` takes int8 codes that are made before it is called
    (-1: a row's); None where it takes x itself."""
    return getattr(layer, "x_group", None)


def factors(layer: nn.Module) -> Tensor | None:
    """fp32 [k]: what x is multiplied by before it becomes the codes that ``layer`` takes; None: nothing."""
    return getattr(layer, "smooth", None)


def _product(layer: nn.Module, rows: Rows) -> Tensor:
    if isinstance(rows, Tensor):
        return layer(rows)
    return layer.of_codes(*rows)  # type: ignore[operator]


def _codes(taker: nn.Module) -> dict[str, Any] | None:
    """How ``add_norm`` and ``gated`` are asked for what ``taker`` takes."""
    group = x_group(taker)
    return None if group is None else {"out": "int8", "group": None if group == PER_TOKEN else group, "smooth": factors(taker)}


def _asked(parts: Collection[Part], **able: bool) -> tuple[Part, ...]:
    """Those of ``parts`` that a product may do where it stands."""
    return tuple(part for part in parts if able.get(part, False))


def _adds(product: nn.Module) -> bool:
    return isinstance(product, Parted) and "residual" in product.does


def _before(added: Tensor | None, residual: Tensor, norm: Norm, taker: nn.Module) -> Rows:
    """What ``taker`` takes: the norm of ``residual``, to which ``added`` is first added where it lies, or the
    residual stream itself where it norms that."""
    if isinstance(taker, Parted) and taker.norms(len(residual)):
        return residual
    return _rows(residual, None, norm, taker) if added is None else _rows(added, residual, norm, taker)


def _behind(product: nn.Module, rows: Rows, residual: Tensor, norm: Norm | None) -> Tensor | None:
    """What ``product`` leaves to be added to ``residual``, normed where there is a norm behind it; None where it
    has added it."""
    if isinstance(product, Parted) and _adds(product):
        product.add(rows, residual)
        return None
    y = _product(product, rows)
    if norm is None:
        return y
    return add_norm(y, None, norm.weight, norm.eps, norm.offset, dependent=True)[0]


def _rows(x: Tensor, residual: Tensor | None, norm: Norm, taker: nn.Module) -> Rows:
    codes = _codes(taker)
    if codes is None:
        return add_norm(x, residual, norm.weight, norm.eps, norm.offset, inplace=True, dependent=True)[0]
    return add_norm(x, residual, norm.weight, norm.eps, norm.offset, inplace=True, dependent=True, **codes)[:2]


def _gated(x: Tensor, activation: str, taker: nn.Module) -> Rows:
    codes = _codes(taker)
    return gated(x, activation, dependent=True) if codes is None else gated(x, activation, dependent=True, **codes)
