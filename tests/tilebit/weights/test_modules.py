"""QuantLinear and quantize_model: made from floats and checkpoints, saved, loaded, moved, copied, traced."""

from __future__ import annotations

import copy

import pytest
import torch
from door_cases import FORMATS, K, N, exact, workload
from safetensors.torch import load_file, save_file
from torch import nn

from tilebit import QuantFormat, QuantLinear, gemm, load_checkpoint, quantize_model
from tilebit.ops import dispatch
from tilebit.weights.packed import pack
from tilebit.weights.quantize import quantize
from tilebit.weights.synthetic import write_checkpoint

cases = pytest.mark.parametrize("case", FORMATS, ids=lambda case: f"{case[0]}-{case[1]}{'-bias' if case[2] else ''}")
TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def made(case, seed: int = 0) -> tuple[nn.Linear, QuantLinear]:
    torch.manual_seed(seed)
    name, dtype, bias = case
    linear = nn.Linear(K, N, bias=bias)
    return linear, QuantLinear.from_float(linear, name, dtype=TYPES[dtype])


def same(a: QuantLinear, b: QuantLinear) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@cases
def test_from_float_computes_the_quantized_layer(cpu_kernels, case):
    linear, layer = made(case)
    x = torch.randn(5, K).to(layer.scales.dtype)
    bias = None if layer.bias is None else layer.bias.double()
    expected = nn.functional.linear(x.double(), layer.unpack().dequantize().double(), bias)
    y = layer(x)
    assert y.dtype == x.dtype and y.shape == (5, N)
    assert (y.double() - expected).norm() <= 2 * torch.finfo(x.dtype).eps * expected.norm()
    error = (linear(x.float()) - y.float()).norm() / linear(x.float()).norm()
    assert error < (0.15 if layer.format.bits == 4 else 0.02), "near the float layer"


def test_from_float_defaults():
    assert QuantLinear.from_float(nn.Linear(64, 32)).scales.dtype == torch.float16, "fp32 weights compute in fp16"
    assert QuantLinear.from_float(nn.Linear(64, 32).bfloat16()).scales.dtype == torch.bfloat16
    assert QuantLinear.from_float(nn.Linear(64, 32)).format == QuantFormat()


def test_the_clipping_search_is_no_worse():
    torch.manual_seed(1)
    linear = nn.Linear(256, 64)
    plain, searched = (QuantLinear.from_float(linear, "w4a16_g128", clip_search=search) for search in (False, True))
    errors = [(layer.unpack().dequantize() - linear.weight).square().sum() for layer in (plain, searched)]
    assert errors[1] < errors[0]


@pytest.mark.parametrize(("family", "desc_act"), [("awq", False), ("gptq", True), ("gptq_v2", False), ("compressed-tensors", True)])
def test_from_checkpoint(cpu_kernels, tmp_path, family, desc_act):
    n, k = 64, 256
    weights = write_checkpoint(tmp_path, family, {"layer": (n, k)}, symmetric=False, desc_act=desc_act, bias=True)
    layer = QuantLinear.from_checkpoint(load_checkpoint(tmp_path), "layer")
    assert (layer.perm is not None) == desc_act and layer.bias is not None
    assert torch.equal(layer.unpack().dequantize(), weights["layer"])
    x = torch.randn(3, k).half()
    expected = nn.functional.linear(x.double(), weights["layer"].double(), layer.bias.double())
    assert (layer(x).double() - expected).norm() <= 2 * torch.finfo(torch.float16).eps * expected.norm()
    fresh = QuantLinear(layer.packed)  # no bias: the state dict must not fit silently
    with pytest.raises(RuntimeError, match="bias"):
        fresh.load_state_dict(layer.state_dict())


@cases
def test_state_dict_round_trip_through_safetensors(tmp_path, case):
    source, target = made(case)[1], made(case, seed=1)[1]
    assert not same(source, target)
    save_file(source.state_dict(), tmp_path / "layer.safetensors")
    target.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    assert same(source, target)
    parent = nn.ModuleDict({"a": made(case, seed=2)[1], "b": nn.Linear(2, 2)})
    parent.load_state_dict(
        {**{f"a.{name}": value for name, value in source.state_dict().items()}, **nn.ModuleDict({"b": nn.Linear(2, 2)}).state_dict()}
    )
    assert same(parent["a"], source)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["w4a16_g128", "w8a16_g64_asym"])
def test_a_state_dict_packed_for_another_device_is_repacked(name):
    q = quantize(torch.randn(N, K), QuantFormat.parse(name))
    for_gpu = QuantLinear(pack(q, torch.float16, arch="sm_90a"))
    for_cpu = QuantLinear(pack(quantize(torch.randn(N, K), q.format), torch.float16))
    assert for_gpu.weight.shape != for_cpu.weight.shape
    for_cpu.load_state_dict(for_gpu.state_dict())
    assert same(for_cpu, QuantLinear(pack(q, torch.float16)))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda: QuantLinear.from_float(nn.Linear(K, N), "w4a16_g64"), "w4a16|group_size"),
        (lambda: QuantLinear.from_float(nn.Linear(K, N), "w8a16_g128"), "bits"),
        (lambda: QuantLinear.from_float(nn.Linear(K + 8, N), "w4a16_g128"), "208"),
    ],
)
def test_a_state_dict_of_another_layer_is_refused_and_changes_nothing(change, sentence):
    layer = QuantLinear.from_float(nn.Linear(K, N), "w4a16_g128")
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    with pytest.raises(RuntimeError, match=sentence):
        layer.load_state_dict(change().state_dict())
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())


def test_a_damaged_description_is_refused():
    layer = QuantLinear.from_float(nn.Linear(K, N))
    state = layer.state_dict()
    state["_extra_state"] = state["_extra_state"][:-4]
    with pytest.raises(RuntimeError, match="no description of a packed weight"):
        layer.load_state_dict(state)


def test_moving_between_layouts_repacks():
    q = quantize(torch.randn(N, K), QuantFormat())
    layer = QuantLinear(pack(q, torch.float16, arch="sm_80"))
    layer.to("cpu")  # what a GPU layer goes through on its way to the CPU: a move, then a layout that does not fit
    assert layer.arch == "cpu" and same(layer, QuantLinear(pack(q, torch.float16)))


def test_casting_casts_scales_and_keeps_codes():
    layer = made(FORMATS[1])[1]
    weight = layer.weight.clone()
    layer.to(torch.float16)
    assert layer.scales.dtype == layer.zeros.dtype == layer.bias.dtype == torch.float16  # type: ignore[union-attr]
    assert torch.equal(layer.weight, weight) and layer.packed.dtype == torch.float16


def test_deepcopy_is_independent():
    layer = made(FORMATS[1])[1]
    copied = copy.deepcopy(layer)
    assert same(layer, copied)
    copied.weight.zero_()
    assert not same(layer, copied)


def test_extra_repr():
    assert repr(made(FORMATS[1])[1]) == (f"QuantLinear(in_features={K}, out_features={N}, bias=True, format=w4a16_g32_asym, arch=cpu)")


def test_compiles_without_graph_breaks(cpu_kernels):
    x, packed, bias, expected = exact(workload(FORMATS[1], 33))
    layer = QuantLinear(packed, bias)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (33, 5):
        assert torch.equal(compiled(x[:m]), expected[:m])
    assert torch.equal(gemm(x, layer.packed, bias), expected)


def test_a_parameter_in_the_place_of_a_buffer_is_used(cpu_kernels):
    x, packed, bias, expected = exact(workload(FORMATS[1], 5))
    assert bias is not None
    layer = QuantLinear(packed, torch.zeros_like(bias))
    layer.bias = nn.Parameter(bias, requires_grad=False)
    assert torch.equal(layer(x), expected)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.lm_head = nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 32), nn.ReLU()), nn.Linear(64, 8)
        self.shared = self.a


def test_quantize_model_replaces_and_skips():
    model = Small().half()
    assert quantize_model(model, "w4a16_g32") == ["a", "b.0", "shared"]
    assert isinstance(model.a, QuantLinear) and isinstance(model.b[0], QuantLinear) and type(model.lm_head) is nn.Linear
    assert model.shared is model.a, "a shared layer stays shared"
    model = Small().half()
    assert quantize_model(model, skip=lambda name, layer: layer.out_features == 64) == ["b.0", "lm_head"]
    model = Small().half()
    assert quantize_model(model, skip=["b.0", "lm_head"]) == ["a", "shared"]


def test_quantize_model_leaves_the_model_alone_when_a_layer_cannot_be_quantized():
    model = Small().half()
    with torch.no_grad():
        model.get_parameter("b.0.weight")[3, 4] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        quantize_model(model)
    assert type(model.a) is nn.Linear and type(model.b[0]) is nn.Linear


def test_quantize_model_says_that_fp32_is_no_dtype_of_products():
    model = Small()
    with pytest.raises(ValueError, match=r"^a is float32; accepted: float16 and bfloat16.*model.to.torch.bfloat16.*pass dtype="):
        quantize_model(model)
    assert type(model.a) is nn.Linear and model.a.weight.dtype is torch.float32


@pytest.mark.parametrize("before", [torch.float32, torch.bfloat16])
def test_quantize_model_casts_to_the_dtype_that_is_named(cpu_kernels, before):
    model = Small().to(before)
    quantize_model(model, "w4a16_g32", dtype=torch.float16)
    assert {p.dtype for p in model.parameters()} == {torch.float16} and model.a.scales.dtype is torch.float16
    y = nn.Sequential(nn.Linear(K, K), nn.Linear(K, N))
    quantize_model(y, "w4a16_g128", skip=["0"], dtype=torch.float16)
    assert y(torch.randn(1, K).half()).dtype is torch.float16, "its first call is one"


def test_quantize_model_leaves_the_model_alone_when_what_it_holds_cannot_be_cast():
    held = QuantLinear.from_float(nn.Linear(K, N, dtype=torch.bfloat16), "w4a16_mxfp4")
    held.scales[0, 0] = 2.0**20
    model = nn.Sequential(nn.Linear(K, K), held)
    with pytest.raises(ValueError, match=r"scales do not fit torch\.float16"):
        quantize_model(model, dtype=torch.float16)
    assert type(model[0]) is nn.Linear and model[0].weight.dtype is torch.float32 and held.dtype is torch.bfloat16


class Pretrained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(K, N)

    def save_pretrained(self, folder: str) -> None:
        raise AssertionError(f"wrote {folder}")


def test_a_quantized_model_is_not_saved_as_what_cannot_be_read():
    outer = nn.ModuleDict({"model": Pretrained()})
    quantize_model(outer, dtype=torch.float16)
    for model in (outer["model"], copy.deepcopy(outer)["model"]):
        with pytest.raises(ValueError, match=r"save_pretrained .* cannot read; accepted: its state_dict"):
            model.save_pretrained("there")  # type: ignore[operator]


@pytest.mark.gpu
def test_moves_between_cpu_and_gpu():
    layer = made(FORMATS[0])[1]
    before, codes = copy.deepcopy(layer), layer.unpack().codes
    layer.cuda()
    assert layer.arch == dispatch.device_target(torch.device("cuda", 0)).arch and layer.weight.shape != before.weight.shape
    x = torch.randn(5, K, device="cuda").half()
    expected = x.double() @ layer.unpack().dequantize().double().t()
    assert (layer(x).double() - expected).norm() <= 2 * torch.finfo(torch.float16).eps * expected.norm()
    layer.cpu()
    assert torch.equal(layer.unpack().codes, codes) and same(layer, before)
