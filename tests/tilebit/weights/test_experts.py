"""What is said of experts that a model stacks, and of which modules."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from tilebit import quantize_model, quantize_model_any
from tilebit.weights.experts import stacked_bytes


class Experts(nn.Module):
    """Two stacks, their biases, and a number for each expert."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(count, 32, 16, dtype=torch.bfloat16)) for _ in range(2))
        self.bias, self.load = nn.Parameter(torch.zeros(count, 32)), nn.Buffer(torch.zeros(count, 1, 1))


class Layer(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.proj = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        self.conv = nn.Conv1d(4, 4, 3)  # a weight [n, k, places]
        if count:
            self.moe = nn.ModuleDict({"experts": Experts(count)})
            self.branch = Experts(count)


def model(*counts: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*map(Layer, counts))


def test_stacks_are_those_of_modules_that_are_experts():
    """By their name or their class, not every tensor of three axes; nor are experts that are linear layers."""
    linear = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(8, 8)])})
    assert stacked_bytes(nn.Sequential(*model(2, 0), linear)) == {"0.moe.experts": 2 * 2048, "0.branch": 2 * 2048}


@pytest.mark.parametrize("quantized", [lambda m: quantize_model(m, "w8a16_channel"), quantize_model_any], ids=["scaled", "any"])
def test_one_warning_names_them_and_their_share(quantized):
    found = model(2, 0, 3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        quantized(found)
    (only,) = said
    bytes_of = sum(value.nbytes for value in (*found.parameters(), *found.buffers()))
    share = 100 * 2 * 5 * 2 * 32 * 16 * 2 / bytes_of
    message = str(only.message)
    assert f"the experts of 4 modules stay as they are, {share:.1f}% of the bytes" in message and only.filename == __file__
    assert "takes: *.moe.experts, *.branch. " in message


def test_nothing_is_said_of_others():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize_model(model(0, 0), "w8a16_channel")
