"""``AnyPrecisionLinear``: one store, a width of a call, a layer, a model; state, copies, derivatives, torch.compile."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import tilebit
from tilebit import AnyPrecisionLinear
from tilebit.ops import dispatch
from tilebit.weights.any_packed import pack_any
from tilebit.weights.checkpoint_config import CheckpointError
from tilebit.weights.extra_state import from_tensor, to_tensor
from tilebit.weights.quantize_any import AnyPrecisionTensor

N, K = 24, 300
BF16 = torch.bfloat16


def weight(seed: int = 0) -> AnyPrecisionTensor:
    """Integers as codebooks, 3 to 5 bits."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 32, (N, K), generator=generator, dtype=torch.uint8)
    return AnyPrecisionTensor(codes, {b: torch.randint(-8, 9, (N, 1 << b), generator=generator).half() for b in (3, 4, 5)})


def layer(seed: int = 0) -> AnyPrecisionLinear:
    return AnyPrecisionLinear(pack_any(weight(seed), BF16), torch.arange(N).float())


def rows(m: int = 3) -> torch.Tensor:
    return torch.randint(-4, 5, (m, K), generator=torch.Generator().manual_seed(m)).to(BF16)


def expected(bits: int, x: torch.Tensor, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return (x.double() @ weight(seed).dequantize(bits, torch.float64).T + torch.arange(N)).to(dtype)


def test_width_of_a_call_of_a_layer_and_of_a_model() -> None:
    one, x = layer(), rows()
    assert one.bits == 5 and torch.equal(one(x), expected(5, x))
    for bits in (3, 4, 5, 3):
        assert torch.equal(one(x, bits=bits), expected(bits, x)) and one.bits == 5
    one.bits = 4
    assert torch.equal(one(x), expected(4, x)) and torch.equal(one(x[0]), expected(4, x)[0])
    model = nn.ModuleDict({"a": layer(), "b": layer(1), "other": nn.Linear(2, 2)})
    assert tilebit.set_precision(model, 3) == 2
    assert torch.equal(model["a"](x), expected(3, x)) and torch.equal(model["b"](x), expected(3, x, 1))


def test_widths_that_are_not_held_are_refused_and_change_nothing() -> None:
    model = nn.ModuleList([layer(), AnyPrecisionLinear(pack_any(AnyPrecisionTensor(weight().codes >> 1, dict(_narrow())), BF16))])
    tilebit.set_precision(model, 4)
    with pytest.raises(ValueError, match="bits is 5; accepted: 3 to 4"):
        tilebit.set_precision(model, 5)
    assert [one.bits for one in model] == [4, 4]
    for bad in (2, 6):
        with pytest.raises(ValueError, match=f"bits is {bad}; accepted: 3 to 5"):
            model[0](rows(), bits=bad)
    with pytest.raises(TypeError, match=r"bits is float 4\.0"):
        model[0].bits = 4.0  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="Linear has no AnyPrecisionLinear inside"):
        tilebit.set_precision(nn.Linear(2, 2), 4)
    with pytest.raises(ValueError, match=r"x is torch\.bfloat16 \[3, 299\]; accepted: torch\.bfloat16 \[\.\.\., 300\]"):
        model[0](rows()[:, :-1])
    with pytest.raises(TypeError, match="packed is Tensor"):
        AnyPrecisionLinear(rows())  # pyright: ignore[reportArgumentType]


def test_progress_counts_layers_on_a_terminal_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    for forced, shown, seen in (("1", True, True), ("1", False, False), (None, True, False)):
        monkeypatch.delenv("FORCE_COLOR", raising=False)
        if forced is not None:
            monkeypatch.setenv("FORCE_COLOR", forced)
        shared = nn.Linear(8, 4)
        model = nn.ModuleDict({"a": shared, "b": nn.Linear(8, 4), "c": shared})
        assert tilebit.quantize_model_any(model, max_bits=4, dtype=BF16, progress=shown) == ["a", "b", "c"]
        said = capsys.readouterr().err
        assert ("quantizing layers" in said and "2/2" in said) == seen and (said == "") != seen


def _narrow() -> dict[int, torch.Tensor]:
    return {bits: book for bits, book in weight().codebooks.items() if bits < 5}


def test_state_goes_through_one_safetensors_file(tmp_path) -> None:
    model, other, x = nn.ModuleList([layer(), layer(1)]), nn.ModuleList([layer(2), layer(3)]), rows()
    other[0](x)  # what was kept of the old planes must not be used again
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    for bits in (3, 4, 5):
        assert torch.equal(other[0](x, bits), expected(bits, x)) and torch.equal(other[1](x, bits), expected(bits, x, 1))
    assigned = layer(2)
    assigned(x)
    assigned.load_state_dict(layer(1).state_dict(), assign=True)
    assert torch.equal(assigned(x), expected(5, x, 1))


def test_state_of_a_gpu_is_repacked() -> None:
    there = pack_any(weight(1), BF16, arch="sm_90a")
    state = layer(1).state_dict()
    foreign = AnyPrecisionLinear(there, torch.arange(N).float()).state_dict()
    assert foreign["planes"].shape != state["planes"].shape
    one = layer()
    one.load_state_dict(foreign)
    assert torch.equal(one(rows()), expected(5, rows(), 1))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("planes", lambda t: None, "lacks planes"),
        ("planes", lambda t: t.float(), r"weight is torch\.float32"),
        ("planes", lambda t: t[:4], "of 4 planes"),
        ("codebook_4", lambda t: t[:, :8], r"scales is torch\.bfloat16 \[24, 8\]"),
        ("codebook_4", lambda t: None, "lacks codebook_4"),
        ("bias", lambda t: t[:3], r"bias is torch\.bfloat16 \[3\]"),
        ("bias", lambda t: None, "lacks bias"),
        ("_extra_state", lambda t: None, "lacks _extra_state"),
        ("_extra_state", lambda t: t[:-1], "the extra state is not an AnyPrecisionLinear's"),
        ("_extra_state", lambda t: to_tensor({**from_tensor(t), "layout": "planes_old"}), "lie as planes_old has them; accepted for cpu"),
        ("_extra_state", lambda t: to_tensor({k: v for k, v in from_tensor(t).items() if k != "layout"}), "as an earlier version has them"),
    ],
)
def test_state_that_does_not_fit_changes_nothing(name: str, change, words: str) -> None:
    one, state = layer(), layer(1).state_dict()
    value = change(state.pop(name))
    if value is not None:
        state[name] = value
    with pytest.raises(RuntimeError, match=words):
        one.load_state_dict(state)
    assert torch.equal(one(rows()), expected(5, rows()))


@pytest.mark.parametrize("name", ["", "a.b"])
@pytest.mark.parametrize("kind", ["safetensors", "pt", "directory"])
def test_a_layer_is_opened_from_a_file(tmp_path, name: str, kind: str) -> None:
    prefix, x = f"{name}." if name else "", rows()
    state = {prefix + entry: tensor for entry, tensor in layer(1).state_dict().items()} | {"other": torch.ones(2)}
    path = tmp_path / f"model.{'pt' if kind == 'pt' else 'safetensors'}"
    (torch.save if kind == "pt" else save_file)(state, path)
    opened = AnyPrecisionLinear.from_file(tmp_path if kind == "directory" else path, name)
    assert opened.dtype == BF16 and opened.bits == 5
    assert all(torch.equal(opened(x, bits), expected(bits, x, 1)) for bits in (3, 4, 5))
    half = AnyPrecisionLinear.from_file(path, name, torch.float16, "cpu")
    assert torch.equal(half(x.half(), 4), expected(4, x, 1, torch.float16))
    with pytest.raises(CheckpointError, match=rf"has no layer 'c' of any precision; accepted: '{name}'"):
        AnyPrecisionLinear.from_file(path, "c")


def test_a_layer_is_made_from_tensors_of_its_own_and_of_another_device() -> None:
    x, state = rows(), layer(1).state_dict()
    made = AnyPrecisionLinear.from_state(state)
    state["planes"].zero_()
    state["bias"].zero_()
    assert torch.equal(made(x), expected(5, x, 1))
    there = AnyPrecisionLinear(pack_any(weight(1), BF16, arch="sm_90a"))
    bare = AnyPrecisionLinear.from_state(there.state_dict())
    assert bare.bias is None and bare.arch == "cpu" and torch.equal(bare.packed.unpack().codes, weight(1).codes)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("planes", lambda t: None, "no layer '' of any precision; accepted: files with some"),
        ("_extra_state", lambda t: None, "no layer '' of any precision"),
        ("planes", lambda t: t.float(), r"weight is torch\.float32"),
        ("planes", lambda t: t[:4].clone(), "of 4 planes"),
        ("codebook_4", lambda t: None, "lacks codebook_4"),
        ("codebook_8", lambda t: torch.ones(N, 256), "holds codebook_8 and stores 3 to 5 bits"),
        ("codebook_4", lambda t: t.half(), r"torch\.float16 of 4 bits and torch\.bfloat16"),
        ("codebook_5", lambda t: t * torch.nan, "does not fit"),
        ("bias", lambda t: t[:3].clone(), r"bias is torch\.bfloat16 \[3\]"),
        ("_extra_state", lambda t: t[:-1].clone(), "the extra state is not an AnyPrecisionLinear's"),
        ("_extra_state", lambda t: to_tensor({**from_tensor(t), "layout": "planes_old"}), "lie as planes_old has them"),
    ],
)
def test_files_of_other_contents_are_refused(tmp_path, name: str, change, words: str) -> None:
    state = layer(1).state_dict()
    value = change(state.pop(name, None))
    save_file({**state, **({} if value is None else {name: value})}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=words):
        AnyPrecisionLinear.from_file(tmp_path / "a.safetensors")


def test_a_file_that_is_cut_short_is_refused(tmp_path) -> None:
    save_file(layer().state_dict(), tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="is not a whole safetensors file"):
        AnyPrecisionLinear.from_file(tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=r"lacks x\._extra_state"):
        AnyPrecisionLinear.from_state(layer().state_dict(), "x")


def test_copies_and_casts_compute_what_the_original_does() -> None:
    one, x = layer(), rows()
    one(x)
    file = io.BytesIO()
    torch.save(one, file)
    file.seek(0)
    for twin in (copy.deepcopy(one), torch.load(file, weights_only=False)):
        assert torch.equal(twin(x, 3), expected(3, x)) and twin.planes.data_ptr() != one.planes.data_ptr()
        twin.planes.zero_()
        assert not torch.equal(twin(x, 3), expected(3, x)) and torch.equal(one(x, 3), expected(3, x))
    half = copy.deepcopy(one).half()
    assert half.dtype == torch.float16 and torch.equal(half(x.half(), 4), expected(4, x, dtype=torch.float16))


def test_derivatives_are_those_of_the_width() -> None:
    one, x = layer(), rows().requires_grad_()
    one(x, bits=3).sum().backward()
    assert x.grad is not None and torch.equal(x.grad.double(), weight().dequantize(3, torch.float64).sum(0).expand(3, K).to(BF16).double())


@pytest.mark.slow
def test_compiled_layers_follow_their_width() -> None:
    one, x = layer(), rows()
    compiled = torch.compile(one, fullgraph=True, backend="aot_eager")
    for bits in (3, 5):
        assert torch.equal(compiled(x, bits=bits), expected(bits, x))
    for bits in (4, 3):
        one.bits = bits
        assert torch.equal(compiled(x), expected(bits, x))


def test_a_model_is_quantized_in_place() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)).to(BF16)
    x = torch.randn(4, 64).to(BF16)
    plain, shared = model(x), copy.deepcopy(model)
    assert tilebit.quantize_model_any(model, max_bits=6, sensitivity={"0": torch.ones(32, 64)}) == ["0", "2"]
    errors = []
    for bits in (3, 4, 6):
        tilebit.set_precision(model, bits)
        errors.append(float(((model(x) - plain).norm() / plain.norm()).detach()))
    assert errors[0] > errors[1] > errors[2] and errors[2] < 0.1
    with pytest.raises(ValueError, match="sensitivity names 'head'"):
        tilebit.quantize_model_any(shared, sensitivity={"head": torch.ones(2, 2)})
    assert all(type(one) is not AnyPrecisionLinear for one in shared)


def test_a_model_computes_in_a_dtype_of_products() -> None:
    """An fp32 layer's first call would be an error; a dtype that is named is the whole model's."""
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 32))
    with pytest.raises(ValueError, match=r"^1 is float32; accepted: float16 and bfloat16.*pass dtype="):
        tilebit.quantize_model_any(model, 3, 3)
    assert type(model[1]) is nn.Linear
    assert tilebit.quantize_model_any(model, 3, 3, dtype=BF16) == ["1"]
    assert model(torch.ones(2, 64, dtype=BF16)).dtype is BF16


def test_prepare_compiles_the_width_that_a_layer_is_set_to() -> None:
    model, x = nn.ModuleDict({"a": layer(), "b": layer(1)}), rows(2)
    tilebit.set_precision(model, 4)
    tilebit.prepare(model, m=[2], bias=True)
    plan = dispatch.plan_for(x.device, N, K, "w4a16_any", BF16, True)
    assert 2 in plan.launchers
    with pytest.raises(ValueError, match="Linear has no QuantLinear or AnyPrecisionLinear layer"):
        tilebit.prepare(nn.Linear(2, 2))


@pytest.mark.gpu
def test_on_a_gpu_a_layer_is_repacked_and_every_number_of_rows_is_exact() -> None:
    one = layer().to("cuda")
    assert one.arch != "cpu"
    for bits in (3, 4, 5):
        for m in (1, 2, 5, 8, 9, 16, 17, 64, 257):
            assert torch.equal(one(rows(m).cuda(), bits=bits).cpu(), expected(bits, rows(m))), (bits, m)
    assert torch.equal(one.cpu()(rows()), expected(5, rows()))


@pytest.mark.gpu
def test_on_a_gpu_each_width_has_a_graph() -> None:
    """A graph replays the width that it was captured in, whatever the layer is set to since."""
    one, x = layer().to("cuda"), rows(2).cuda()
    graphs, results = {bits: torch.cuda.CUDAGraph() for bits in (3, 4, 5)}, {}
    for bits, graph in graphs.items():
        tilebit.set_precision(one, bits)
        tilebit.prepare(one, m=[2])
        with torch.cuda.graph(graph):
            results[bits] = one(x)
    for bits in (4, 3, 5, 3):
        results[bits].fill_(torch.nan)
        graphs[bits].replay()
        assert torch.equal(results[bits].cpu(), expected(bits, rows(2)))
