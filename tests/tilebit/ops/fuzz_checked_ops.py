"""Calls of the attention ops with random numbers in lengths, tables, slots and bounds, on the CPU. Run with ``TILEBIT_CHECK=1``.

Usage: fuzz_checked_ops.py seed. Prints a JSON list: how many calls of each op were refused, and how many were computed. Every tensor that a
kernel writes lies between guard bands.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter

import torch
from torch import Tensor

from tilebit import attention  # noqa: F401  # registers the ops
from tilebit.layouts.kv import KVLayout, window_words
from tilebit.layouts.kv_formats import KVFormat

HEADS, DIM, FORMAT, CALLS = 1, 64, "kv4_channel", 250
GUARD, BAND = 0x5A5A5A5A, 4096  # words before and after what is guarded
INT32 = (-(1 << 31), -129, -1, 0, 1, 2, 3, 127, 128, 129, 256, 300, 1 << 20, (1 << 31) - 1)


def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(zeros, the whole memory that they lie in the middle of)."""
    size = torch.Size(shape).numel() * dtype.itemsize // 4
    whole = torch.full((size + 2 * BAND,), GUARD, dtype=torch.int32)
    inner = whole[BAND : BAND + size].zero_().view(dtype).view(shape)
    return inner, whole


def intact(whole: Tensor) -> bool:
    return bool((whole[:BAND] == GUARD).all() and (whole[-BAND:] == GUARD).all())


def main(seed: int) -> None:
    draw, refused, computed = random.Random(seed), Counter(), Counter()
    torch.manual_seed(seed)
    layout = KVLayout(KVFormat.from_name(FORMAT), DIM, 64)
    pages, pages_memory = guarded((6, HEADS, layout.page_words), torch.int32)
    windows, windows_memory = guarded((3, HEADS, window_words(DIM)), torch.int32)
    tokens = 260
    k, v = (torch.randn(tokens, HEADS, DIM).half() for _ in range(2))
    out_k, k_memory = guarded((tokens, HEADS, DIM), torch.float16)
    out_v, v_memory = guarded((tokens, HEADS, DIM), torch.float16)
    out, out_memory = guarded((tokens, HEADS, DIM), torch.float16)
    decoded, decoded_memory = guarded((2, 1, HEADS, DIM), torch.float16)
    ops = torch.ops.tilebit
    for n in range(4 * CALLS):
        lengths = [draw.randrange(0, 260), draw.randrange(0, 160)]
        bounds = [0, draw.randrange(0, lengths[0] + 1)]
        bounds.append(min(bounds[1] + draw.randrange(0, lengths[1] + 1), tokens))
        op = ("append", "decode", "gather", "prefill")[n % 4]
        if op == "gather":
            lengths = [bounds[1], bounds[2] - bounds[1]]
        tables, slots = [[0, 1, 2, 3], [4, 5, 4, 5]], draw.sample(range(3), 2)
        o = {"lengths": lengths, "slots": slots, "tables": tables, "cu": bounds, "cu_q": list(bounds)}
        for _ in range(draw.randrange(3)):
            name = draw.choice(list(o))
            row = o[name] if name != "tables" else draw.choice(o[name])
            row[draw.randrange(len(row))] = draw.choice(INT32)
        t = {name: torch.tensor(value, dtype=torch.int32) for name, value in o.items()}
        cached = (pages, windows, t["tables"], t["slots"], t["lengths"])
        try:
            if op == "append":
                ops.attention_append(k, v, t["cu"], t["lengths"], t["tables"], t["slots"], pages, windows, None, None, FORMAT, 64)
            elif op == "decode":
                ops.attention_decode.out(k[:2, None], *cached, None, None, FORMAT, 64, out=decoded)
            elif op == "gather":
                ops.attention_gather.out(*cached, t["cu"], None, FORMAT, 64, out_k=out_k, out_v=out_v)
            else:
                ops.attention_prefill.out(k, k, v, t["cu_q"], t["cu"], None, out=out)
            computed[op] += 1
        except ValueError as error:
            assert "accepted" in str(error), error
            refused[op] += 1
        assert all(map(intact, (pages_memory, windows_memory, k_memory, v_memory, out_memory, decoded_memory))), (op, o)
    print(json.dumps([refused, computed]))


if __name__ == "__main__":
    main(int(sys.argv[1]))
