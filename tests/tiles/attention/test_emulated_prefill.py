"""The softmax, masks and stores of the prefill programs (``device/kv/prefill.cuh``) run on the host, with the two products done by numpy in
the tensor cores' layout: everything between accumulator and operand, for every block of ragged batches, against the fp64 reference.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from emulation.device_code import ALONE, DeviceCode, needs_host_compiler
from lanes import one_of_each

from tilebit.layouts.kv_formats import KVFormat
from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.schedule import Schedule
from tilebit.tiles.attention import reference
from tilebit.tiles.attention.prefill import HEADERS
from tilebit.tiles.attention.prefill_calls import (
    CLEAR,
    FIELDS,
    FIRST_KEY,
    FIRST_ROW,
    MASK,
    MASK_WHERE_NEEDED,
    MASKED,
    NO_MASK,
    STATE_FLOATS,
    STEPS,
    PrefillCalls,
)  # fmt: skip
from tilebit.tiles.compiler.headers import device_source

GAP = 200  # rows of NaN after the last sequence's keys: a box of TMA reaches into them
NOBODY = -7  # what `tile` holds where a block had nothing to do


def workload(**changes) -> AttentionWorkload:
    return replace(AttentionWorkload("prefill", 1, 128, 128, 2, 1, 64, KVFormat(), lse=True), **changes)


CASES = (
    # block_m, block_n, workload, (queries, keys) of each sequence
    (128, 128, workload(), [(128, 128), (1, 1), (0, 7), (257, 300)]),
    (64, 64, workload(dtype="bfloat16"), [(130, 130), (70, 200), (3, 0), (9, 4)]),
    (128, 80, workload(head_dim=128), [(200, 333)]),
    (64, 64, workload(window=50), [(200, 200), (20, 260)]),
    (64, 32, workload(window=40, sink_tokens=5), [(150, 290), (1, 77)]),
    (64, 32, workload(window=151), [(70, 333)]),  # some tiles of a block lie inside the window of all rows, others of some
    (128, 64, workload(window=1, sink_tokens=70), [(140, 280)]),
    (64, 64, workload(soft_cap=8.0, sinks=True), [(100, 150), (4, 2)]),
    (128, 128, workload(window=200, sinks=True, dtype="bfloat16", head_dim=256), [(130, 420)]),
)


class Block:
    """A block's threads between the products: per-thread arrays, and the calls on all of them."""

    def __init__(self, code: DeviceCode, threads: int) -> None:
        self.code, self.threads = code, threads
        self.kept: list[np.ndarray] = []

    def shared(self, array: np.ndarray) -> tuple[int, int]:
        self.kept.append(array)
        return array.ctypes.data, 0

    def own(self, array: np.ndarray) -> tuple[int, int]:
        """``array`` [threads, ...]: each thread's row."""
        assert len(array) == self.threads and array.flags.c_contiguous
        self.kept.append(array)
        return array.ctypes.data, array.strides[0]

    def __call__(self, name: str, *arguments: tuple[int, int]) -> None:
        self.code.call(name, arguments, self.threads)
        self.kept.clear()


def number(value: float) -> tuple[int, int]:
    """A float argument travels as its bits."""
    return int(np.float32(value).view(np.int32)), 0


THREAD = (0, 1)


def accumulators(threads: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) [threads, columns / 2] of the numbers that each thread holds of a tile."""
    t, i = np.arange(threads)[:, None], np.arange(columns // 2)[None]
    return t // 32 * 16 + t % 32 // 4 + 8 * (i // 2 % 2), i // 4 * 8 + t % 4 * 2 + i % 2


def run(block_m: int, block_n: int, w: AttentionWorkload, q, k, v, cu_q, cu_kv, sinks, wgmma: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a batch, block by block; ``wgmma`` chooses the masked and unmasked loops of that program."""
    calls = PrefillCalls(w, Schedule("attention_prefill", block_n, block_m, w.head_dim, 2, block_m // 16))
    code = DeviceCode(device_source(HEADERS), 800)
    threads, hd, columns = block_m * 2, w.head_dim, block_n
    tokens, total = q.shape[0], k.shape[0]
    out, lse = torch.full_like(q, float("nan")), torch.full((tokens, w.heads_q), float("nan"))
    bits = out.view(torch.int16).numpy()
    row, column = accumulators(threads, columns)
    out_row, out_column = accumulators(threads, hd)
    queries = np.zeros((tokens + block_m, w.heads_q, hd), np.float32)
    queries[:tokens] = q.float().numpy()
    keys, values = (np.zeros((total + block_n, w.heads_kv, hd), np.float32) for _ in range(2))
    keys[:total], values[:total] = k.float().numpy(), v.float().numpy()
    scale, argument = number(calls.scale), number(calls.argument)
    for index in range(-(-tokens // block_m) + len(cu_q)):
        tile = np.full((threads, FIELDS), NOBODY, np.int32)
        block = Block(code, threads)
        block(calls.find(threads), block.shared(cu_q), block.shared(cu_kv), (len(cu_q) - 1, 0), (index, 0), block.own(tile))
        assert (tile == tile[0]).all()
        if tile[0, STEPS] == NOBODY:
            continue
        for head in range(w.heads_q):
            state, weighted = np.zeros((threads, STATE_FLOATS), np.float32), np.zeros((threads, hd // 2), np.float32)
            block("tilebit::begin_rows", block.own(state))
            for step in range(tile[0, STEPS]):
                at = int(tile[0, FIRST_KEY]) + code.value(calls.key, [tile.ctypes.data, step], ALONE)
                mine = queries[tile[0, FIRST_ROW] : tile[0, FIRST_ROW] + block_m, head]
                with np.errstate(invalid="ignore"):
                    products = mine @ keys[at : at + columns, head // w.group].T
                scores = np.ascontiguousarray(products[row, column])
                masking = MASK if step < tile[0, MASKED] or step >= tile[0, CLEAR] else NO_MASK
                block(
                    calls.softmax(masking if wgmma else MASK_WHERE_NEEDED), block.own(scores), block.own(state), block.own(tile), (step, 0),
                    scale, argument, THREAD,
                )  # fmt: skip
                block(calls.rescale, block.own(weighted), block.own(state))
                operand = np.zeros((threads, columns // 2), np.uint16)
                block(calls.round_weights, block.own(scores), block.own(operand))
                weights = np.zeros((block_m, columns), np.float32)
                weights[row, column] = torch.from_numpy(operand.view(np.int16)).view(q.dtype).float().numpy()
                held = values[at : at + columns, head // w.group].copy()
                if step == 0:
                    held = zeroed_tail(block, columns, hd, held, tile)
                weighted += (weights @ held)[out_row, out_column]
            staging = np.zeros((block_m, hd), np.uint16)
            block(
                calls.finish(128 if wgmma else threads), block.own(weighted), block.own(state), block.own(tile), block.shared(staging),
                block.shared(bits), block.shared(sinks), block.shared(lse.numpy()), (head, 0), (w.heads_q, 0), scale, THREAD,
            )  # fmt: skip
    return out, lse


def zeroed_tail(block: Block, columns: int, head_dim: int, held: np.ndarray, tile: np.ndarray) -> np.ndarray:
    """``held`` [columns, head_dim] as ``zero_tail`` leaves it in 16-bit panels of 64 channels."""
    panels = np.ascontiguousarray(held.reshape(columns, head_dim // 64, 64).swapaxes(0, 1).astype(np.float16))
    block(f"tilebit::zero_tail<{columns}, {head_dim}, 128, 6>", block.shared(panels), block.own(tile), THREAD)
    kept = ~(panels == 0).all(axis=(0, 2))
    return np.where(kept[:, None], held, np.float32(0))


@needs_host_compiler
@pytest.mark.parametrize("wgmma", [True, False], ids=["wgmma", "mma"])
@pytest.mark.parametrize(
    "case",
    one_of_each(CASES, lambda case: case[2].head_dim),
    ids=lambda c: f"{c[0]}x{c[1]}-d{c[2].head_dim}-window{c[2].window}-{c[2].dtype}",
)
def test_every_block_of_a_ragged_batch(case: tuple[int, int, AttentionWorkload, list[tuple[int, int]]], wgmma: bool):
    block_m, block_n, w, lengths = case
    generator, dtype = torch.Generator().manual_seed(7), getattr(torch, w.dtype)
    cu_q, cu_kv = (np.cumsum([0, *counts], dtype=np.int32) for counts in zip(*lengths, strict=True))
    q = torch.randn(int(cu_q[-1]), w.heads_q, w.head_dim, generator=generator).to(dtype)
    k, v = (torch.randn(int(cu_kv[-1]) + GAP, w.heads_kv, w.head_dim, generator=generator).to(dtype) for _ in range(2))
    k[cu_kv[-1] :] = v[cu_kv[-1] :] = float("nan")
    sinks = torch.randn(w.heads_q, generator=generator)

    out, lse = run(block_m, block_n, w, q, k, v, cu_q, cu_kv, sinks.numpy(), wgmma)

    options = {"window": w.window, "sink_tokens": w.sink_tokens, "soft_cap": w.soft_cap, "sinks": sinks if w.sinks else None}
    wanted, wanted_lse = reference.prefill(q, k, v, torch.from_numpy(cu_q), torch.from_numpy(cu_kv), **options)
    seen = torch.isfinite(wanted_lse)
    assert torch.equal(torch.isfinite(lse), seen)
    torch.testing.assert_close(lse.double()[seen], wanted_lse[seen], rtol=1e-5, atol=1e-5)
    assert (out[~seen] == 0).all()
    rounding = torch.finfo(dtype).eps  # of weights (each half of it, with errors of either sign) and of the output
    torch.testing.assert_close(out.double(), wanted, rtol=rounding, atol=rounding)
