"""Every kernel that ``generate`` needs of a model: what a pack of it holds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..layouts.formats import FP8
from ..layouts.kv_formats import KVFormat
from ..ops.dispatch import DTYPE_NAMES
from ..ops.gemm_int8 import OUTS
from ..ops.linear import served
from ..schedules.activations.glue import CHUNK, GATED, NORM, GlueWorkload
from ..schedules.activations.workload import QuantizeWorkload
from ..schedules.attention.workload import Q_BUCKETS, AttentionWorkload
from ..schedules.gemm.workload import Workload
from ..schedules.operations import AnyWorkload
from ..schedules.select import portfolio
from ..schedules.target import Target
from ..weights.any_modules import AnyPrecisionLinear
from ..weights.any_packed import any_format
from ..weights.modules import QuantLinear
from .anatomy import Anatomy, Block, Norm, anatomy, rotary_table
from .attend import MOST_AT_ONCE
from .cache import PAGE_SIZE
from .fused import FusedBlock, factors, fused_blocks, x_group
from .outline import MixedOutline
from .output_layer import workload_of
from .parted import Parted


def kernels_of(
    model: PreTrainedModel,
    caches: Iterable[KVFormat],
    batches: Sequence[int],
    max_tokens: int,
    target: Target,
    widths: Collection[int] | None = None,
) -> list[AnyWorkload]:
    """What prompts and steps of ``model`` (``outline``'s) launch on ``target``, fused (``compile``)
    and others: products of any number of rows, and with each of ``caches`` attention, norms and
    gates, for ``batches`` rows of up to ``max_tokens`` tokens. Kernels of attention and of rows serve
    other sizes, too. Of layers of any precision products in each of the ``widths`` that are named, by
    default in all that a layer stores, whatever it is set to. Raises ``ValueError`` for a model whose
    kind is not known, and for ``widths`` that a layer does not store, or where no layer has any."""
    _expect_stored(model, widths)
    parts, dtype = anatomy(model), DTYPE_NAMES[model.dtype]
    found: list[AnyWorkload] = []
    for layer in model.modules():
        found += _quantized(layer, dtype, [rows for batch in batches for rows in (batch, batch * max_tokens)])
        for product in _products(layer, dtype, widths):
            shape = portfolio(product, target)
            assert shape is not None
            found += [product.with_m(m) for m in shape.bounds]
    formats = list(caches)
    if formats:
        blocks = fused_blocks(parts)
        products = [product for block in blocks for product in (block.qkv, block.o, block.gate_up, block.down)]
        fused = (one for product in products for layer in product.modules() for one in _products(layer, dtype, widths))
        for plain in dict.fromkeys(fused):
            shape = portfolio(plain, target)
            assert shape is not None
            found += [plain.with_m(m) for m in shape.bounds if m > MOST_AT_ONCE]
        found += [asked for product in products for rows in batches for asked in _of_step(product, rows, dtype, widths)]
        for rows in (*batches, *(batch * max_tokens for batch in batches)):
            found += _between(parts, blocks, rows, dtype, target.is_cuda)
        heads = (workload_of(parts.head, rows, dtype, target) for rows in batches)
        found += [workload for workload in heads if workload is not None and served(workload, target)]
        turned = rotary_table(type(parts.rotary)(config=model.config), 1, parts.blocks[0].head_dim, torch.device("cpu")).shape[-1]
        found += [
            workload
            for format in formats
            for batch in batches
            for block in parts.blocks
            for workload in _attention(block, format, dtype, batch, max_tokens, turned)
        ]
    return list(dict.fromkeys(workload.bucketed() for workload in found))


def _expect_stored(model: nn.Module, widths: Collection[int] | None) -> None:
    stored = {name: layer.widths for name, layer in model.named_modules() if isinstance(layer, AnyPrecisionLinear)}
    if widths is not None and not (stored and widths):
        raise ValueError(f"widths are {sorted(widths)}; accepted: one or more, of a model with layers of any precision; else None")
    for name, held in stored.items():
        if not set(widths or ()) <= set(held):
            raise ValueError(f"widths are {sorted(widths or ())} and {name} stores {held[0]} to {held[-1]} bits; accepted: some of these")


def _products(layer: nn.Module, dtype: str, widths: Collection[int] | None) -> list[Workload]:
    """Of one row each."""
    if isinstance(layer, AnyPrecisionLinear):
        shape, bias = (layer.out_features, layer.in_features), layer.bias is not None
        return [Workload(1, *shape, any_format(bits), dtype, bias) for bits in layer.widths if widths is None or bits in widths]
    if isinstance(layer, MixedOutline):
        return [Workload(1, layer.rows, layer.k, layer.format, dtype, layer.bias, width=layer.n, nibbles=True)]
    if isinstance(layer, QuantLinear):
        return [Workload(1, layer.out_features, layer.in_features, layer.format, dtype, layer.bias is not None, dependent=layer.dependent)]
    return []


def _of_step(product: nn.Module, rows: int, dtype: str, widths: Collection[int] | None) -> list[Workload]:
    """Of a step of ``rows`` rows."""
    if isinstance(product, Parted):
        return [product.workload(rows)]
    return [plain.with_m(rows) for layer in product.modules() for plain in _products(layer, dtype, widths)]


def _quantized(layer: nn.Module, dtype: str, rows: Sequence[int]) -> list[AnyWorkload]:
    """What quantizes the x of a layer that takes 8 bits."""
    group, out = x_group(layer), "int8"
    if isinstance(layer, QuantLinear) and layer.format.x == FP8:
        group, out = layer.format.x_group, OUTS[FP8]
    return (
        [] if group is None else [QuantizeWorkload(m, _columns(layer), dtype, out, group, smooth=factors(layer) is not None) for m in rows]
    )


def _between(parts: Anatomy, blocks: Sequence[FusedBlock], rows: int, dtype: str, cuda: bool) -> Iterator[AnyWorkload]:
    """Norms and gates of a fused step or prompt, each as the product behind it takes its x."""

    def normed(norm: Norm, residual: bool, taker: nn.Module | None) -> Iterator[AnyWorkload]:
        k, group = norm.weight.shape[0], None if taker is None else x_group(taker)
        if group is not None:
            there = residual and not (cuda and k % CHUNK)
            smooth = taker is not None and factors(taker) is not None
            yield QuantizeWorkload(rows, k, dtype, "int8", group, True, norm.eps, smooth, there, norm.offset)
        elif cuda and k % CHUNK == 0:
            yield GlueWorkload(NORM, rows, k, dtype, residual, norm.eps, norm.offset)

    yield from normed(blocks[0].of.before_attention, False, blocks[0].qkv)
    for i, block in enumerate(blocks):
        of, last = block.of, i + 1 == len(blocks)
        for norm in (of.after_attention, of.after_mlp):
            if norm is not None:
                yield from normed(norm, False, None)
        yield from normed(of.before_mlp, True, block.gate_up)
        norm, taker = (parts.norm, parts.head) if last else (blocks[i + 1].of.before_attention, blocks[i + 1].qkv)
        yield from normed(norm, True, taker)
        k, group = _columns(block.down), x_group(block.down)
        if group is not None:
            yield QuantizeWorkload(rows, k, dtype, "int8", group, smooth=factors(block.down) is not None, gate=of.activation)
        elif cuda and k % CHUNK == 0 and not (isinstance(block.gate_up, Parted) and block.gate_up.gates(rows)):
            yield GlueWorkload(GATED, rows, k, dtype, activation=of.activation)


def _attention(of: Block, format: KVFormat, dtype: str, batch: int, tokens: int, turned: int) -> list[AnyWorkload]:
    """Prompts, chunks of them, short ones, and steps, fused and not."""
    sizes: dict[str, Any] = {"heads_q": of.heads, "heads_kv": of.heads_kv, "head_dim": of.head_dim, "format": format, "dtype": dtype}
    sizes["page_size"] = PAGE_SIZE
    whole = {**sizes, "heads_q": of.heads + of.heads_kv}  # a prompt's keys are turned with its queries
    scores: dict[str, Any] = {"window": of.window, "soft_cap": of.soft_cap, "scale": of.scale}
    turning: dict[str, Any] = {"rotary": "half", "queries": True, "rotary_dim": turned}
    if of.q_norm is not None:
        turning |= {"qk_norm": True, "norm_eps": of.q_norm.eps, "norm_offset": of.q_norm.offset}
    return [
        AttentionWorkload("append", batch, 1, tokens, **sizes, **turning, full_windows=True),
        AttentionWorkload("pack", batch, 1, tokens, **sizes),
        *((AttentionWorkload("append", batch, tokens, tokens, **whole, **turning),) if of.q_norm is None else ()),
        *(AttentionWorkload("append", batch, new, tokens, **sizes) for new in (1, tokens)),
        AttentionWorkload("decode", batch, 1, tokens, **sizes, **scores, full_windows=True),
        *(AttentionWorkload("decode", batch, new, tokens, **sizes, **scores) for new in (1, Q_BUCKETS[-1])),
        AttentionWorkload("prefill", batch, tokens, tokens, **sizes, **scores),
        AttentionWorkload("gather", batch, 1, tokens, **sizes),
    ]


def _columns(layer: nn.Module) -> int:
    """Of x."""
    return layer.k if isinstance(layer, MixedOutline) else layer.in_features  # type: ignore[return-value]
