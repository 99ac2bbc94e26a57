"""A decode step of 16-bit weights, and one of vLLM's kernels, beside which ``results.measure.step``
times tilebit's: FA3 from vLLM's library with a 16-bit cache in both; cuBLAS, or Marlin on the same
codes. Norms, rotary embedding and activation are vLLM's fused kernels where its library has them, and
``torch.compile``'s otherwise.

Needs the peer harness on the path and its libraries staged (``PEERS``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tilebit.weights.quantize import QuantizedTensor

Product = Callable[[Tensor], Tensor]
GROUP = 128


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """The model's sizes, in the terms of a step."""

    hidden: int
    heads: int
    heads_kv: int
    head_dim: int
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """``products``: qkv, o, gate_up, down; ``norms``: the weights before attention and before the MLP."""

    products: Sequence[Product]
    norms: Sequence[Tensor]


class PeerStep:
    """The step at fixed places: sequence ``b`` holds ``lengths[b]`` tokens, and its new one is written
    behind them at each call. ``k`` and ``v`` [layers, batch, tokens, heads_kv, head_dim] are the cache."""

    def __init__(self, shape: Shape, layers: Sequence[Layer], embed: Tensor, norm: Tensor, head: Tensor, rotary: Tensor, glue: Any) -> None:
        self.shape, self.layers, self.embed, self.norm, self.head, self.rotary, self.glue = shape, layers, embed, norm, head, rotary, glue

    def hold(self, k: Tensor, v: Tensor, lengths: Sequence[int]) -> None:
        s, device = self.shape, k.device
        self.k, self.v, batch = k, v, len(lengths)
        self.positions = torch.tensor(lengths, device=device)
        self.used = (self.positions + 1).to(torch.int32)
        self.rows = torch.arange(batch, device=device)
        scheduled: Any = torch.ops._vllm_fa3_C.get_scheduler_metadata
        self.schedule = scheduled(
            batch, 1, k.shape[2], s.heads, s.heads_kv, s.head_dim, s.head_dim, k.dtype, self.used, None, None, None, None, None, None, 0,
            False, -1, -1, False, 0, None, 0,
        )  # fmt: skip

    def __call__(self, ids: Tensor) -> Tensor:
        """Logits [batch, vocabulary]."""
        s, glue = self.shape, self.glue
        x = F.embedding(ids, self.embed)
        residual = torch.zeros_like(x)
        for i, layer in enumerate(self.layers):
            qkv, o, gate_up, down = layer.products
            x, residual = glue.add_norm(x, residual, layer.norms[0], s.eps)
            heads = qkv(x).view(len(ids), s.heads + 2 * s.heads_kv, s.head_dim)
            q, k, v = glue.turned(heads, self.positions, self.rotary, s)
            self.k[i][self.rows, self.positions] = k
            self.v[i][self.rows, self.positions] = v
            x = o(self._attended(q, i).view(len(ids), -1))
            x, residual = glue.add_norm(x, residual, layer.norms[1], s.eps)
            x = down(glue.gated(gate_up(x)))
        x, _ = glue.add_norm(x, residual, self.norm, s.eps)
        return F.linear(x, self.head)

    def _attended(self, q: Tensor, layer: int) -> Tensor:
        nothing = [None] * 8
        return torch.ops._vllm_fa3_C.fwd(
            q.unsqueeze(1), self.k[layer], self.v[layer], *nothing, self.used, *nothing, None, None, None,
            1 / math.sqrt(self.shape.head_dim), False, -1, -1, 0.0, True, self.schedule, 0, None, 0, None, 1, 0, None,
        )[0]  # fmt: skip


class CompiledGlue:
    """What stands between products, by ``torch.compile``."""

    def __init__(self) -> None:
        self.add_norm: Any = torch.compile(_add_norm)
        self.gated: Any = torch.compile(_gated)
        self._turned: Any = torch.compile(_turned)

    def turned(self, heads: Tensor, positions: Tensor, rotary: Tensor, s: Shape) -> tuple[Tensor, Tensor, Tensor]:
        qk = self._turned(heads[:, : s.heads + s.heads_kv], rotary, positions)
        return qk[:, : s.heads].contiguous(), qk[:, s.heads :], heads[:, s.heads + s.heads_kv :]


class VllmGlue:
    """What stands between products, by vLLM's fused kernels. Raises ``AttributeError`` where its library
    has none."""

    def __init__(self, rotary: Tensor, dtype: torch.dtype) -> None:
        ops = torch.ops._C
        self._norm, self._act, self._rotary = ops.fused_add_rms_norm, ops.silu_and_mul, ops.rotary_embedding
        self._table = rotary.to(dtype)

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        self._norm(x, residual, weight, eps)
        return x, residual

    def gated(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
        self._act(out, x)
        return out

    def turned(self, heads: Tensor, positions: Tensor, rotary: Tensor, s: Shape) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = heads.split((s.heads, s.heads_kv, s.heads_kv), 1)
        self._rotary(positions, q, k, s.head_dim, self._table, True)
        return q, k, v


def dense_product(weight: Tensor) -> Product:
    return lambda x: F.linear(x, weight)


def marlin_product(weight: QuantizedTensor, harness: Any) -> Product:
    """vLLM's Marlin on the codes and scales of ``weight``, symmetric, 4 bits in groups of 128;
    ``harness`` is the module ``gemm_peers``."""
    n, k = weight.codes.shape
    device, ops = weight.codes.device, torch.ops._C
    by_k = weight.codes.t().reshape(k // 8, 8, n).to(torch.int64)
    rows = (by_k << (4 * torch.arange(8, device=device)[None, :, None])).sum(1)
    rows = torch.where(rows >= 1 << 31, rows - (1 << 32), rows).to(torch.int32).contiguous()
    empty = torch.empty(0, dtype=torch.int32, device=device)
    packed = ops.gptq_marlin_repack(rows, empty, k, n, 4, False)
    scales = harness.marlin_permute_scales(weight.scales.t().contiguous(), k, n, GROUP)
    space = torch.zeros(torch.cuda.get_device_properties(device).multi_processor_count, dtype=torch.int32, device=device)

    def product(x: Tensor) -> Tensor:
        out, m = x.new_empty(x.shape[0], n), x.shape[0]
        return ops.marlin_gemm(
            x, out, packed, None, scales, None, None, empty, empty, empty, space, harness.U4B8, m, n, k, True, False, True, False
        )

    return product


def _add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    h = x + residual
    f = h.float()
    return (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight, h


def _gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate.float()).to(x.dtype) * up


def _turned(x: Tensor, rotary: Tensor, positions: Tensor) -> Tensor:
    cos, sin = rotary[positions].unsqueeze(1).chunk(2, -1)
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
