"""Rows of a packed weight that are looked up: those of the weight dequantized, whatever layout it has."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tilebit import QuantEmbedding, QuantLinear, prepare
from tilebit.layouts.formats import QuantFormat
from tilebit.ops.prepare import _plans
from tilebit.weights.packed import pack
from tilebit.weights.quantize import quantize

FORMATS = ("w4a16_g32", "w4a16_g128_asym", "w4a16_channel", "w8a16_channel", "w8a16_g64_asym")
SHAPES = ((130, 192), (67, 80))  # neither whole tiles nor whole groups


def floats(n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> nn.Embedding:
    torch.manual_seed(n + k)
    return nn.Embedding(n, k, dtype=dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_rows_are_those_of_the_weight_dequantized(format: str, shape: tuple[int, int]):
    source = floats(*shape)
    weight = quantize(source.weight.detach(), QuantFormat.parse(format)).dequantize(torch.bfloat16)
    layer = QuantEmbedding.from_float(source, format)
    ids = torch.randint(shape[0], (3, 7))
    for arch in ("cpu", "sm_80", "sm_90a"):
        layer.rows._repack_for(arch)
        assert torch.equal(layer(torch.arange(shape[0])), weight) and torch.equal(layer(ids.int()), weight[ids])
    assert layer(ids[:0]).shape == (0, 7, shape[1]) and layer(ids[0, 0]).shape == (shape[1],)


@pytest.mark.parametrize("format", ["w4a16_g64_asym", "w8a16_channel"])
def test_compiled_look_ups_are_the_same(format: str):
    layer = QuantEmbedding.from_float(floats(130, 192), format)
    compiled = torch.compile(layer, fullgraph=True)
    for ids in (torch.randint(130, (1,)), torch.randint(130, (2, 5))):
        assert torch.equal(compiled(ids), layer(ids))
    for wrong in (-1, 130):
        with pytest.raises(RuntimeError):
            compiled(torch.tensor([wrong]))  # of a shape that was compiled: each takes seconds


@pytest.mark.parametrize("wrong", [-1, 67, 127])
def test_an_id_that_is_no_row_is_an_error(wrong: int):
    """Rows that pad tiles among them."""
    layer = QuantEmbedding.from_float(floats(67, 80), "w8a16_channel")
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        layer(torch.tensor([3, wrong]))


def test_it_is_moved_cast_copied_and_loaded():
    layer, ids = QuantEmbedding.from_float(floats(130, 192), "w4a16_g32_asym"), torch.arange(130)
    other = QuantEmbedding.from_float(floats(130, 192, torch.float16), "w4a16_g32_asym", dtype=torch.bfloat16)
    expected = layer(ids)
    other.rows._repack_for("sm_90a")
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(ids), expected) and torch.equal(copy.deepcopy(layer)(ids), expected)
    assert set(layer.state_dict()) == {f"rows.{name}" for name in ("weight", "scales", "zeros", "_extra_state")}
    half = copy.deepcopy(layer).to(torch.float16)
    assert half(ids).dtype == torch.float16 and torch.equal(half(ids), half.rows.unpack().dequantize(torch.float16))
    assert torch.equal(layer(ids), expected) and "130, 192" in repr(layer)


def test_one_weight_serves_an_output_layer_too():
    """It is moved once, stays shared in a copy, and has kernels prepared for the layer alone."""
    layer = QuantEmbedding.from_float(floats(128, 64), "w8a16_channel")
    model = nn.ModuleDict({"head": layer.rows, "embedding": layer})
    twin: Any = copy.deepcopy(model).to(torch.float16)
    assert twin.embedding.rows is twin.head and twin.head.dtype == torch.float16
    ids = torch.tensor([5])
    twin.head._repack_for("sm_90a")
    assert torch.equal(twin.embedding(ids), twin.head.unpack().dequantize(torch.float16)[ids])
    assert [plan.workload.n for plan in _plans(model, False, False)] == [128]
    with pytest.raises(ValueError, match="has no QuantLinear"):
        prepare(layer)


class Turned(nn.Embedding):
    """Does whatever it likes."""


REFUSED: dict[str, tuple[nn.Embedding, str, str]] = {
    "int8 x": (floats(64, 64), "w8a8_channel", "embeddings are to be in w8a8_channel; accepted: 4- or 8-bit"),
    "floats": (floats(64, 64), "w4a16_mxfp4", "embeddings are to be in w4a16_mxfp4"),
    "norms": (nn.Embedding(64, 64, max_norm=1.0), "w8a16_channel", "without max_norm"),
    "another class": (Turned(64, 64), "w8a16_channel", "is a Turned, which may do more"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_is_not_made_for_is_refused(case: str):
    source, format, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        QuantEmbedding.from_float(source, format)


def test_ids_are_whole_numbers():
    layer = QuantEmbedding.from_float(floats(64, 64), "w8a16_channel")
    with pytest.raises(ValueError, match="accepted: int64 or int32"):
        layer(torch.tensor([1.0]))


def test_reordered_columns_are_refused():
    found = quantize(floats(64, 64).weight.detach(), QuantFormat.parse("w4a16_g32"))
    turned = type(found)(found.codes, found.scales, None, found.format, torch.arange(63, -1, -1))
    with pytest.raises(ValueError, match="act order"):
        QuantEmbedding(QuantLinear(pack(turned, torch.bfloat16)))
    with pytest.raises(TypeError, match="a QuantLinear"):
        QuantEmbedding(pack(found, torch.bfloat16))  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_look_ups_of_a_gpu_are_captured(format: str):
    source = floats(130, 192)
    weight = quantize(source.weight.detach(), QuantFormat.parse(format)).dequantize(torch.bfloat16)
    layer, ids = QuantEmbedding.from_float(source, format).cuda(), torch.zeros(5, dtype=torch.int64, device="cuda")
    assert torch.equal(layer(ids).cpu(), weight[ids.cpu()])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = layer(ids)
    for _ in range(3):
        ids.random_(130)
        graph.replay()
        assert torch.equal(rows.cpu(), weight[ids.cpu()])
