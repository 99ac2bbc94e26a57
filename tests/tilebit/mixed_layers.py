"""Layers with channels in 8 and 4 bits whose products are exact, in any order of rows."""

from __future__ import annotations

from dataclasses import replace

import torch

from tilebit import MixedLinear
from tilebit.layouts.formats import GemmFormat
from tilebit.schedules.gemm.parts import ADDED
from tilebit.weights.mixed import HIGH, LOW
from tilebit.weights.mixed_tensor import MixedTensor
from tilebit.weights.packed import pack
from tilebit.weights.paired import split_nibbles
from tilebit.weights.quantize import QuantizedTensor

N, K, M = 100, 300, 5


def exact_weight(rows: int, format: GemmFormat, generator: torch.Generator) -> QuantizedTensor:
    """Any codes and zero points, scales that are powers of two."""
    codes = torch.randint(0, format.max_code + 1, (rows, K), generator=generator, dtype=torch.uint8)
    shape = (rows, format.groups(K))
    scales = torch.tensor([2.0**-5, 2.0**-6])[torch.randint(0, 2, shape, generator=generator)]
    zeros = None if format.symmetric else torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    return QuantizedTensor(codes, scales, zeros, format)


def exact_x(m: int, generator: torch.Generator) -> torch.Tensor:
    """Whole numbers whose groups of 128 are quantized with a scale of 1: each holds 127."""
    x = torch.randint(-4, 5, (m, K), generator=generator)
    x[:, ::128] = 127
    return x


def made(
    share: int, order: str = "ascending", bias: bool = True, dtype: torch.dtype = torch.float16
) -> tuple[MixedLinear, torch.Tensor, torch.Tensor]:
    """(a layer, its weight [N, K] and bias in fp64, rows in y's order)."""
    generator = torch.Generator().manual_seed(share)
    count = share * N // 100
    drawn = torch.randperm(N, generator=generator)[:count]
    channels = {
        "ascending": drawn.sort().values,
        "reversed": torch.arange(N).flip(0)[:count],
        "alternating": torch.arange(0, N, max(1, N // max(1, count)))[:count],
    }.get(order, drawn)
    others = torch.ones(N, dtype=torch.bool)
    others[channels] = False
    rest = others.nonzero().flatten()
    if order == "scattered":
        rest = rest[torch.randperm(len(rest), generator=generator)]
    first = N - count
    w, parts = torch.empty(N, K, dtype=torch.float64), []
    for format, own in ((LOW, rest), (HIGH, channels)):
        q = exact_weight(len(own), format, generator) if len(own) else None
        if q is not None:
            w[own] = q.dequantize().double()
        parts.append(q)
    rows, placed = split_nibbles(MixedTensor(parts[0], parts[1], torch.cat([rest, channels])))
    assert placed[:first].tolist() == rest.tolist()
    if order == "scattered":
        rows, placed = scattered(rows, placed, generator)
    b = torch.randint(-8, 9, (N,), generator=generator).double() if bias else torch.zeros(N).double()
    return MixedLinear(pack(rows, dtype), placed, N, b.to(dtype) if bias else None), w, b


def scattered(rows: QuantizedTensor, channels: torch.Tensor, generator: torch.Generator) -> tuple[QuantizedTensor, torch.Tensor]:
    """The same in any order that kernels take: each row of the first 8 of 16 and the one 8 behind it go together, wherever, so that
    pairs, single rows and padding are neighbours."""
    twos = torch.arange(rows.n).view(-1, 2, 8).transpose(1, 2).reshape(-1, 2)
    twos = twos[torch.randperm(len(twos), generator=generator)]
    order = twos.view(-1, 8, 2).transpose(1, 2).flatten()
    assert rows.zeros is not None
    return replace(rows, codes=rows.codes[order], scales=rows.scales[order], zeros=rows.zeros[order]), channels[order]


def placed(layer: MixedLinear, of: str) -> torch.Tensor:
    """Rows whose index is a channel: "low", or of those that are two rows the first, "high"."""
    added = (layer.channels == ADDED).nonzero().flatten() - 8
    rows = (layer.channels >= 0).nonzero().flatten()
    return added if of == "high" else rows[~torch.isin(rows, added)]
