"""What a low-bit KV cache costs in quality: ``python -m results.measure.kv_cache`` writes
results/rows/kv_cache/cpu.jsonl, on the CPU.

No language model is at hand, so attention itself is measured, on random problems of grouped-query
heads with the structure that papers on KV quantization report (KIVI, Liu et al. 2024; KVQuant,
Hooper et al. 2024): a few channels of the keys are 10 to 30 times larger than the others, nearly
constant over tokens and the same for all of them, values have no such channels. With rotary
embedding (base 500,000) those channels turn with their positions, as in a model that caches rotated
keys. Each query is random plus a part of one token's key, so that some attend to few tokens and
some to many.

Keys and values are rounded to fp16, quantized by the twin that kernels are tested against
(``layouts/kv_quantize.py``: the same bits), and compared with attention to the fp16 rows, all in
fp64: the quantization is the only difference. Errors are of outputs; top-1 is the share of (query,
head) pairs whose largest attention weight stays on the same token.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilebit.layouts.kv import RESIDUAL, KVLayout
from tilebit.layouts.kv_formats import KVFormat
from tilebit.layouts.kv_quantize import dequantize_group, quantize_group
from tilebit.tiles.attention.reference import rotate

from ..report.rows import ROWS

FORMATS = (
    "kv8_channel", "kv8_token", "kvfp8", "k8_channel_v4", "kv4_channel", "kv4_token", "k4_channel_v2", "kv2_channel", "kv2_token"
)  # fmt: skip
SEEDS = (0, 1, 2, 3)
ROTARY_BASE = 500_000.0
OUTLIER_SIZE = (10.0, 30.0)  # of an ordinary channel's deviation
OUTLIER_SPREAD = 0.1  # deviation of an outlier channel over tokens, of its size
FOLLOWED = (0.4, 1.2)  # how much of one token's key a query holds


@dataclass(frozen=True, slots=True)
class AccuracyProblem:
    """What is drawn: ``outliers`` large channels of every key head, ``rotary`` embedding or none;
    ``rows`` queries see all ``tokens``."""

    name: str
    outliers: int
    rotary: bool
    tokens: int = 2048
    rows: int = 16
    heads_q: int = 32
    heads_kv: int = 8
    head_dim: int = 128


PROBLEMS = (
    AccuracyProblem("no outliers", 0, False),
    AccuracyProblem("4 outlier channels", 4, False),
    AccuracyProblem("4 outlier channels, rotary", 4, True),
)


def drawn(p: AccuracyProblem, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(q [rows, heads_q, head_dim] fp64, k, v [tokens, heads_kv, head_dim] fp64, numbers of fp16)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def between(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)

    k, v = normal(p.tokens, p.heads_kv, p.head_dim), normal(p.tokens, p.heads_kv, p.head_dim)
    for head in range(p.heads_kv):
        channels = torch.randperm(p.head_dim, generator=generator)[: p.outliers]
        sign = torch.randint(0, 2, (p.outliers,), generator=generator) * 2.0 - 1
        size = between(*OUTLIER_SIZE, p.outliers) * sign
        k[:, head, channels] = size * (1 + OUTLIER_SPREAD * k[:, head, channels])
    directions = normal(p.tokens, p.heads_kv, p.head_dim)  # the part of a key that a query may follow: without outliers
    k = k + directions
    q = normal(p.rows, p.heads_q, p.head_dim)
    if p.rotary:
        angles = torch.arange(p.tokens)[:, None] * ROTARY_BASE ** (-torch.arange(0, p.head_dim, 2) / p.head_dim)
        table, places = torch.cat((angles.cos(), angles.sin()), dim=1), torch.arange(p.tokens)
        k, directions = rotate(k, places, table, "half"), rotate(directions, places, table, "half")
        q = rotate(q, places[-p.rows :], table, "half")
    group = p.heads_q // p.heads_kv
    followed = torch.randint(0, p.tokens, (p.rows, p.heads_q), generator=generator)
    q = q + between(*FOLLOWED, p.rows, p.heads_q)[..., None] * directions[followed, torch.arange(p.heads_q) // group]
    return q.half().double(), k.half().double(), v.half().double()


def quantized(k: Tensor, v: Tensor, format: KVFormat) -> tuple[Tensor, Tensor]:
    """(k, v) as a cache of ``format`` means them, fp64 [tokens, heads_kv, head_dim]; tokens must be
    whole groups of 128. fp8 has head scales that map each head's largest number to e4m3's."""
    out_k, out_v = torch.empty_like(k), torch.empty_like(v)
    for head in range(k.shape[1]):
        scales = tuple(float((x[:, head].abs().max() / 448).float()) for x in (k, v))
        for first in range(0, k.shape[0], RESIDUAL):
            own = slice(first, first + RESIDUAL)
            keys, values = (np.ascontiguousarray(x[own, head].float().numpy()) for x in (k, v))
            group = quantize_group(keys, values, format, "float16", (scales[0], scales[1]))
            for out, numbers in zip((out_k, out_v), dequantize_group(group, format, "float16", (scales[0], scales[1])), strict=True):
                out[own, head] = torch.from_numpy(numbers).double()
    return out_k, out_v


def attended(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out [rows, heads_q, head_dim], weights [heads_q, rows, tokens]), fp64: every query sees
    every token."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (k, v))
    weights = (torch.einsum("ihd,jhd->hij", q, keys) * q.shape[-1] ** -0.5).softmax(dim=2)
    return torch.einsum("hij,jhd->ihd", weights, values), weights


def compared(p: AccuracyProblem, seed: int, formats: Sequence[str] = FORMATS) -> list[dict[str, Any]]:
    """The rows of one problem, one per format; numbers to as many digits as machines agree in."""
    q, k, v = drawn(p, seed)
    out, weights = attended(q, k, v)
    rows = []
    for name in formats:
        format = KVFormat.from_name(name)
        got, its = attended(q, *quantized(k, v, format))
        errors = (got - out).norm(dim=-1) / out.norm(dim=-1)
        found = {
            "rel_err": float((got - out).norm() / out.norm()),
            "rel_err_worst": float(errors.max()),
            "one_minus_cosine": 1 - float(torch.cosine_similarity(got, out, dim=-1).mean()),
            "top1": float((its.argmax(2) == weights.argmax(2)).double().mean()),
            "largest_weight": float(weights.amax(2).mean()),
        }
        sizes = {"kv_len": p.tokens, "q_len": p.rows, "heads_q": p.heads_q, "heads_kv": p.heads_kv, "head_dim": p.head_dim}
        what = {"op": "kv_accuracy", "problem": p.name, "outliers": p.outliers, "rotary": p.rotary, "seed": seed, "format": name, **sizes}
        token = KVLayout(format, p.head_dim).token_bytes
        rows.append({**what, "token_bytes": token, **{key: float(f"{value:.4g}") for key, value in found.items()}})
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m results.measure.kv_cache", description="Measure the quality of low-bit KV caches.")
    parser.add_argument("--out", type=Path, default=ROWS / "kv_cache" / "cpu.jsonl", help="the file to write")
    options = parser.parse_args(arguments)
    rows = [row for problem in PROBLEMS for seed in SEEDS for row in compared(problem, seed)]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"accuracy: {len(rows)} rows in {options.out}")


if __name__ == "__main__":
    main()
