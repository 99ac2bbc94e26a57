"""Copies of packed weights and of layers, before and after they were used, moved and cast: right and independent."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import pytest
import torch
from door_cases import FORMATS, exact, workload
from torch import Tensor

from tilebit import QuantLinear, gemm
from tilebit.weights.any_packed import pack_any
from tilebit.weights.packed import PackedWeight, pack
from tilebit.weights.quantize import QuantizedTensor
from tilebit.weights.quantize_any import quantize_any


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "save": saved,
}
cases = pytest.mark.parametrize("case", FORMATS[:2], ids=lambda case: case[0])


def permuted(packed: PackedWeight) -> PackedWeight:
    """The same weight of an act-order checkpoint."""
    perm = torch.randperm(packed.k)
    q = packed.unpack()
    return pack(QuantizedTensor(q.codes, q.scales, q.zeros, q.format, perm), packed.dtype)


@cases
@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("perm", [False, True])
def test_a_copy_is_independent_and_multiplies_the_same(cpu_kernels, case, copied, used, perm):
    x, packed, bias, expected = exact(workload(case, 5))
    if perm:
        packed = permuted(packed)
        assert packed.perm is not None
        x = torch.empty_like(x).index_copy_(1, packed.perm, x)
    layer = QuantLinear(packed, bias)
    if used:
        assert torch.equal(layer(x), expected) and torch.equal(gemm(x, packed, bias), expected)
    other, its_layer = COPIES[copied]((packed, layer))
    for field in fields(PackedWeight):
        mine, theirs = getattr(packed, field.name), getattr(other, field.name)
        if isinstance(mine, Tensor):
            assert torch.equal(mine, theirs) and mine.data_ptr() != theirs.data_ptr(), field.name
        else:
            assert mine == theirs, field.name
    assert torch.equal(gemm(x, other, bias), expected) and torch.equal(its_layer(x), expected)
    for tensor in (packed.weight, layer.scales):
        tensor.zero_()
    assert torch.equal(gemm(x, other, bias), expected) and torch.equal(its_layer(x), expected)
    cast = torch.bfloat16 if x.dtype == torch.float16 else torch.float16
    moved = COPIES[copied](its_layer.to(cast))
    assert moved.scales.dtype == cast and torch.equal(moved.unpack().dequantize(), its_layer.unpack().dequantize())
    with pytest.raises(ValueError, match="needs"):
        moved(x)
    assert torch.equal(COPIES[copied](moved.to(x.dtype))(x), expected), "scales of the exact problem fit both types"


@pytest.mark.parametrize("copied", COPIES)
def test_weights_of_any_precision_are_copied(copied):
    q = quantize_any(torch.randn(8, 64), 3, 4)
    packed = pack_any(q, torch.float16)
    for mine, theirs in ((q, COPIES[copied](q)), (packed, COPIES[copied](packed))):
        assert type(theirs) is type(mine) and theirs.codebooks.keys() == mine.codebooks.keys()
        assert all(torch.equal(book, mine.codebooks[bits]) for bits, book in theirs.codebooks.items())
    assert torch.equal(COPIES[copied](q).codes, q.codes)
    other = COPIES[copied](packed)
    assert torch.equal(other.planes, packed.planes) and other.planes.data_ptr() != packed.planes.data_ptr()
    assert (other.n, other.k, other.arch) == (8, 64, "cpu")


def test_threads_that_copy_move_and_call_do_not_disturb_each_other(cpu_kernels):
    x, packed, bias, expected = exact(workload(FORMATS[1], 5))
    layer = QuantLinear(packed, bias)

    def work(_: int) -> bool:
        other = copy.deepcopy(layer)
        right = torch.equal(other(x), expected) and torch.equal(layer(x), expected)
        other.to(torch.float16).to(torch.bfloat16)
        right &= torch.equal(other(x), expected) and torch.equal(gemm(x, copy.deepcopy(packed), bias), expected)
        other.weight.zero_()
        return right

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(64)))


def test_a_weight_of_another_layout_is_refused(cpu_kernels):
    """As a copy is that was loaded onto another device: it keeps what it was packed for."""
    x, packed, _, expected = exact(workload(FORMATS[0], 5))
    other = saved(QuantLinear(pack(packed.unpack(), packed.dtype, arch="sm_90a")))
    with pytest.raises(ValueError, match="weight is int32"):
        other(x)
    assert torch.equal(other.to("cpu")(x), expected)
