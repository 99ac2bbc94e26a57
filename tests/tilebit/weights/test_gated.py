"""A gate's weight and what it gates as one: rows in turn, bit for bit those of the two."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tilebit
from tilebit.weights.gated import in_turn, interleaved

K = 192


def made(format: str, n: int = 48, seed: int = 0) -> tilebit.PackedWeight:
    torch.manual_seed(seed)
    return tilebit.QuantLinear.from_float(torch.nn.Linear(K, n, dtype=torch.bfloat16), format).packed


@pytest.mark.parametrize("format", ["w4a16_g64", "w4a16_g128_asym", "w8a16_channel", "w4a16_mxfp4", "w4a16_nvfp4", "w4a8_lqq_g64"])
def test_rows_are_those_of_both_in_turn(format: str):
    gate, up = made(format), made(format, seed=1)
    both = interleaved(gate, up)
    assert both.n == 96 and both.format == gate.format and both.dtype is gate.dtype
    rows = both.dequantize().unflatten(0, (-1, 2, 8))
    assert torch.equal(rows[:, 0].flatten(0, 1), gate.dequantize()) and torch.equal(rows[:, 1].flatten(0, 1), up.dequantize())


def test_columns_keep_their_order():
    order = torch.randperm(K)
    gate, up = (replace(made("w4a16_g64", seed=seed), perm=order) for seed in (0, 1))
    assert interleaved(gate, up).perm is not None and torch.equal(interleaved(gate, up).perm, order)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="different orders"):
        interleaved(gate, replace(up, perm=None))
    with pytest.raises(ValueError, match="different orders"):
        interleaved(gate, replace(up, perm=order.flip(0)))


def test_what_does_not_go_together():
    gate = made("w4a16_g64")
    for other, says in (
        (made("w4a16_g128"), "format_name of gate is w4a16_g64 and of up w4a16_g128"),
        (made("w4a16_g64", 64), "n of gate is 48"),
    ):
        with pytest.raises(ValueError, match=says):
            interleaved(gate, other)
    with pytest.raises(ValueError, match="multiple of 8 rows"):
        interleaved(made("w4a16_g64", 44), made("w4a16_g64", 44))
    with pytest.raises(ValueError, match=r"gate has shape \[8\] and up \[16\]"):
        in_turn(torch.zeros(8), torch.zeros(16))
