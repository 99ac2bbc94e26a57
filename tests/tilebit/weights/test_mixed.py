"""MixedLinear: output channels in two formats, exactly, in any order; saved, loaded, moved, copied, traced; what is no such layer."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tilebit import MixedLinear, PrecisionPlan, QuantLinear, packs, prepare, quantize_model
from tilebit.kernels import build
from tilebit.layouts.formats import GemmFormat, QuantFormat
from tilebit.ops import dispatch, gemm_mixed
from tilebit.ops.gemm_mixed import LAUNCHES
from tilebit.weights.calibrate import calibrate
from tilebit.weights.gptq import gptq
from tilebit.weights.mixed import HIGH, LOW
from tilebit.weights.mixed_tensor import MixedTensor
from tilebit.weights.packed import PackedWeight, pack
from tilebit.weights.precision import LayerPrecision
from tilebit.weights.quantize import QuantizedTensor, quantize

N, K, M = 100, 300, 5
SHARES = (0, 1, 10, 50, 100)


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
    channels = {
        "ascending": torch.randperm(N, generator=generator)[:count].sort().values,
        "reversed": torch.arange(N).flip(0)[:count],
        "alternating": torch.arange(0, N, max(1, N // max(1, count)))[:count],
        "random": torch.randperm(N, generator=generator)[:count],
    }[order]
    others = torch.ones(N, dtype=torch.bool)
    others[channels] = False
    rows, first = torch.cat([others.nonzero().flatten(), channels]), N - count  # of the higher format in the order that is asked for
    w, parts = torch.empty(N, K, dtype=torch.float64), []
    for format, own in ((LOW, rows[:first]), (HIGH, rows[first:])):
        q = exact_weight(len(own), format, generator) if len(own) else None
        if q is not None:
            w[own] = q.dequantize().double()
        parts.append(None if q is None else pack(q, dtype))
    b = torch.randint(-8, 9, (N,), generator=generator).double() if bias else torch.zeros(N).double()
    return MixedLinear(parts[0], parts[1], rows, b.to(dtype) if bias else None), w, b


@pytest.mark.parametrize("share", [pytest.param(share, marks=[pytest.mark.slow] * (share in (1, 50))) for share in SHARES])
def test_every_share_is_exact(share: int) -> None:
    x = exact_x(M, torch.Generator().manual_seed(9))
    for order in ("ascending", "reversed", "alternating", "random") if share not in (0, 100) else ("ascending",):
        layer, w, bias = made(share, order)
        assert torch.equal(layer.dequantize().double(), w)
        y = layer(x.half())
        assert torch.equal(y, (x.double() @ w.T + bias).half())
        assert torch.equal(layer(x.half().reshape(1, M, K)), y[None]) and layer(x.half()[:0]).shape == (0, N)
    assert layer.format_name == {0: LOW.name, 1: "w4.04a8_g128", 10: "w4.4a8_g128", 50: "w6a8_g128", 100: HIGH.name}[share]
    assert layer.share == share / 100


def test_one_format_alone_is_the_plain_layer() -> None:
    """The same kernel, bit for bit."""
    torch.manual_seed(0)
    linear, x = nn.Linear(K, N).half(), torch.randn(M, K).half()
    for channels, format in ((torch.arange(0), LOW), (torch.arange(N), HIGH)):
        assert torch.equal(MixedLinear.from_float(linear, channels)(x), QuantLinear.from_float(linear, format)(x))


def roll(entry: str) -> Callable[[MixedLinear], None]:
    """Every number of a buffer in the place of the next."""

    def planted(layer: MixedLinear) -> None:
        buffer = layer.get_buffer(entry)
        buffer.copy_(buffer.roll(1))

    return planted


def swap_first(layer: MixedLinear) -> None:
    low, high = layer.low_channels[0].clone(), layer.high_channels[0].clone()
    layer.low_channels[0], layer.high_channels[0] = high, low


def low_scales_in_high(layer: MixedLinear) -> None:
    scales = layer.get_buffer("high.scales")
    scales.copy_(layer.get_buffer("low.scales")[:, : scales.shape[1]])


BUGS: dict[str, Callable[[MixedLinear], None]] = {
    "the index of the next channel": roll("low_channels"),
    "the index of the other part, in one place": swap_first,
    "the low part's scales on the high one": low_scales_in_high,
    "the bias in another order": roll("low.bias"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug: str) -> None:
    layer, w, bias = made(10)
    x = exact_x(M, torch.Generator().manual_seed(9))
    BUGS[bug](layer)
    assert not torch.equal(layer(x.half()), (x.double() @ w.T + bias).half())


def test_launches_are_told_apart_and_change_nothing() -> None:
    layer, x = made(10)[0], torch.randn(M, K).half()
    results = []
    for layer.launches in LAUNCHES:
        results.append(layer(x))
    assert all(torch.equal(results[0], other) for other in results[1:])
    with pytest.raises(ValueError, match="launches is 'both'; accepted: 'in_turn', 'dependent', 'parallel'"):
        layer.launches = "both"  # type: ignore[assignment]
    assert layer.launches == "parallel"


def test_kernels_are_prepared(launches) -> None:
    layer, x = made(10)[0], torch.randn(M, K).half()
    dispatch.forget()
    prepare(nn.Sequential(layer), m=[M])
    assert {w.width for w, _ in launches.seen} == {N} and sorted(w.n for w, _ in launches.seen) == [10, 90]
    launches.seen.clear()
    layer(x)
    assert launches.seen == []


def test_state_dict_round_trips_through_safetensors(tmp_path) -> None:
    source, w, _ = made(10)
    target = made(10, "reversed", bias=True)[0]
    save_file(source.state_dict(), tmp_path / "layer.safetensors")
    target.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    assert torch.equal(target.dequantize().double(), w)
    x = torch.randn(M, K).half()
    assert torch.equal(source(x), target(x)) and torch.equal(copy.deepcopy(target)(x), source(x))


@pytest.mark.parametrize("wrong", ["twice", "missing", "dtype", "length", "part", "format"])
def test_entries_of_no_such_layer_change_nothing(wrong: str) -> None:
    source, target = made(10)[0], made(10, "reversed")[0]
    state, before = dict(source.state_dict()), {name: t.clone() for name, t in target.state_dict().items()}
    if wrong == "twice":
        state["low_channels"] = state["low_channels"].clone()
        state["low_channels"][3] = state["low_channels"][4]
    elif wrong == "missing":
        del state["high_channels"]
    elif wrong == "dtype":
        state["low_channels"] = state["low_channels"].long()
    elif wrong == "length":
        state |= {f"{part}_channels": t for part, t in zip(("low", "high"), torch.arange(N, dtype=torch.int32).split(50), strict=True)}
    elif wrong == "part":
        state["high.weight"] = state["high.weight"][:, :1]
    else:
        state["low._extra_state"] = state["high._extra_state"]
    with pytest.raises(RuntimeError, match=r"accepted|needs|build the module"):
        target.load_state_dict(state)
    assert all(torch.equal(before[name], t) for name, t in target.state_dict().items())


def test_casts_round_scales_and_keep_the_index() -> None:
    layer, w, _ = made(10, bias=False)
    layer.to(torch.bfloat16)
    assert layer.dtype == torch.bfloat16 and layer.low_channels.dtype == torch.int32
    assert torch.equal(layer.dequantize().double(), w)


def test_traces() -> None:
    layer, x = made(10)[0], torch.randn(M, K).half()
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    assert torch.equal(compiled(x), layer(x))
    exported = torch.export.export(nn.Sequential(layer), (x,))
    assert "gemm_mixed" in exported.graph_module.code and torch.equal(exported.module()(x), layer(x))
    operands = [
        t
        for name, part in layer.parts
        for t in (part.weight, part.scales, part.zeros, part.row_scales, part.bias, layer.get_buffer(f"{name}_channels"))
    ]
    codes = torch.ops.tilebit.quantize(x, None, None, group=128)
    names = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.tilebit.gemm_mixed, (*codes, *operands, N, K, LOW.name, HIGH.name, torch.float16), test_utils=names)


def packed(n: int, format: GemmFormat, k: int = K, dtype: torch.dtype = torch.float16) -> PackedWeight:
    shape = (n, format.groups(k))
    zeros = None if format.symmetric else torch.zeros(shape, dtype=torch.uint8)
    return pack(QuantizedTensor(torch.zeros(n, k, dtype=torch.uint8), torch.ones(shape), zeros, format), dtype)


ORDER = torch.arange(N)
NO_LAYERS: dict[str, tuple[Callable[[], MixedLinear], str]] = {
    "no part": (lambda: MixedLinear(None, None, ORDER), "low and high are None; accepted: at least one PackedWeight"),
    "another k": (lambda: MixedLinear(packed(90, LOW), packed(10, HIGH, 256), ORDER), r"\[90, 300\].* and \[10, 256\].*accepted: one k"),
    "another dtype": (lambda: MixedLinear(packed(90, LOW), packed(10, HIGH, dtype=torch.bfloat16), ORDER), "accepted: one k, dtype"),
    "another x": (
        lambda: MixedLinear(packed(90, LOW), packed(10, QuantFormat.parse("w8a8_channel")), ORDER),
        "the formats are w4a8_g128_asym and w8a8_channel; accepted: two with the same int8 x",
    ),
    "x of 16 bits": (lambda: MixedLinear(packed(N, QuantFormat(4, 64)), None, ORDER), "accepted: two with the same int8 x"),
    "a channel twice": (lambda: MixedLinear(packed(90, LOW), packed(10, HIGH), ORDER.clamp(1)), "do not hold each of 0 to 99 once"),
    "too few channels": (lambda: MixedLinear(packed(90, LOW), packed(10, HIGH), ORDER[1:]), "do not hold each of 0 to 99 once"),
    "channels that are floats": (lambda: MixedLinear(packed(90, LOW), packed(10, HIGH), ORDER.float()), r"channels are float32 \[100\]"),
    "one part out of order": (lambda: MixedLinear(packed(N, LOW), None, ORDER.flip(0)), "pack its rows in that order"),
    "a bias of another length": (lambda: MixedLinear(packed(N, LOW), None, ORDER, torch.ones(3)), r"bias is float32 \[3\].*accepted"),
    "channels outside": (lambda: MixedLinear.from_float(nn.Linear(K, N), torch.tensor([N])), "accepted: some of 0 to 99"),
    "channels below": (lambda: MixedLinear.from_float(nn.Linear(K, N), torch.tensor([-1])), "accepted: some of 0 to 99"),
    "a mask": (lambda: MixedLinear.from_float(nn.Linear(K, N), torch.ones(N, dtype=torch.bool)), "accepted: whole numbers"),
}


@pytest.mark.parametrize("case", NO_LAYERS)
def test_what_makes_no_layer_is_refused(case: str) -> None:
    make, message = NO_LAYERS[case]
    with pytest.raises(ValueError, match=message):
        make()


def test_what_is_no_weight_is_refused() -> None:
    with pytest.raises(TypeError, match="low is int '3'; accepted: a PackedWeight"):
        MixedLinear(3, None, ORDER)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="linear is"):
        MixedLinear.from_float(QuantLinear(packed(N, LOW)), ORDER)  # type: ignore[arg-type]


def test_calls_that_do_not_fit_are_refused_before_a_launch(launches) -> None:
    layer = made(10)[0]
    for x in (torch.zeros(2, K + 1).half(), torch.zeros(2, K), torch.tensor(1.0).half()):
        with pytest.raises(ValueError, match=r"x is .*accepted: float16 \[..., 300\]"):
            layer(x)
    with pytest.raises(TypeError, match="x is list"):
        layer([1.0])
    with pytest.raises(ValueError, match="no derivatives"):
        layer(torch.zeros(2, K).half().requires_grad_())
    assert launches.seen == []


def test_an_operator_s_index_is_checked_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = made(10)[0], torch.randn(M, K).half()
    layer.low_channels[0] = layer.low_channels[1]
    monkeypatch.setattr(gemm_mixed, "CHECKED", True)
    with pytest.raises(ValueError, match="do not hold each of 0 to 99 once"):
        layer(x)


def test_operands_of_either_part_are_checked() -> None:
    layer, x = made(10)[0], torch.randn(M, K).half()
    layer(x)
    for part, name in (("low", "zeros"), ("high", "scales"), ("high", "weight")):
        broken = copy.deepcopy(layer)
        getattr(broken, part)._buffers[name] = torch.zeros(3, dtype=getattr(getattr(layer, part), name).dtype)
        with pytest.raises(ValueError, match=rf"{name} is .* needs"):
            broken(x)


def test_a_pack_serves_both_kernels(tmp_path, launches) -> None:
    """As where nothing may be compiled: the pack has the kernels, with their index, and no other is looked for."""
    layer, x = made(10)[0], torch.randn(M, K).half()
    expected = layer(x)
    plans = [
        dispatch.plan_for(part.weight.device, part.out_features, K, part.format.name, x.dtype, True, False, N) for _, part in layer.parts
    ]
    built = build([plan.workload.with_m(M) for plan in plans], plans[0].target)
    packs.export(tmp_path / "pack", built)
    pack_of_both = packs.load(tmp_path / "pack")
    try:
        assert sorted(entry.workload.to_json()["n"] for entry in pack_of_both.kernels) == [10, 90]
        assert {entry.workload.to_json()["width"] for entry in pack_of_both.kernels} == {N}
        assert torch.equal(layer(x), expected)
        assert [packs.find(workload, plans[0].target) is not None for workload, _ in launches.seen[-2:]] == [True, True]
    finally:
        packs.unload(pack_of_both)


def planned(**channels: torch.Tensor) -> PrecisionPlan:
    return PrecisionPlan(tuple(LayerPrecision(name, N, K, own) for name, own in channels.items()), LOW, HIGH)


def model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(one=nn.Linear(K, N), two=nn.Linear(K, N), head=nn.Linear(K, N))).half()


def test_a_model_is_quantized_by_a_plan() -> None:
    """Rows of either format are those that quantizing rounds alone; layers that the plan has not are in the other format."""
    floats, quantized = model(), model()
    own = torch.tensor([3, 50, 99])
    assert quantize_model(quantized, "w4a16_g64", ("head",), precision=planned(one=own)) == ["one", "two"]
    mixed, plain = quantized.one, quantized.two
    assert isinstance(mixed, MixedLinear) and isinstance(plain, QuantLinear) and type(quantized.head) is nn.Linear
    assert plain.format.name == "w4a16_g64" and mixed.high_channels.tolist() == own.tolist() and mixed.dtype == torch.float16
    expected = quantize(floats.one.weight, LOW).dequantize(torch.float16)
    expected[own] = quantize(floats.one.weight[own], HIGH).dequantize(torch.float16)
    assert torch.equal(mixed.dequantize(), expected)
    assert torch.equal(
        torch.cat([mixed.get_buffer("low.bias"), mixed.get_buffer("high.bias")]).sort().values, floats.one.bias.sort().values
    )


def test_channels_ascend_and_given_weights_may_have_them_in_another_order() -> None:
    floats, quantized = model(), model()
    own, drawn = torch.tensor([3, 50, 99]), torch.tensor([50, 99, 3])
    assert MixedLinear.from_float(floats.one, drawn).high_channels.tolist() == own.tolist()
    rest = torch.tensor([row for row in range(N) if row not in own.tolist()])
    w = floats.one.weight
    weight = MixedTensor(quantize(w[rest], LOW), quantize(w[drawn], HIGH), torch.cat([rest, drawn]))
    quantize_model(quantized, "w4a16_g64", ("head",), weights={"one": weight}, precision=planned(one=drawn))
    assert quantized.one.high_channels.tolist() == drawn.tolist()
    assert torch.equal(quantized.one.dequantize(), MixedLinear.from_float(floats.one, own).dequantize())
    with torch.no_grad():
        x = torch.randn(M, K).half()
        assert torch.equal(quantized.one(x), MixedLinear.from_float(floats.one, own)(x))


CHANNEL = (GemmFormat.parse("w4a8_channel_asym"), GemmFormat.parse("w8a8_channel"))


@pytest.mark.parametrize("formats", [(LOW, HIGH), CHANNEL], ids=["groups", "channels"])
@pytest.mark.parametrize("count", [0, 3, N])
def test_a_plan_is_calibrated_part_by_part(formats: tuple[GemmFormat, GemmFormat], count: int) -> None:
    """Each part is what GPTQ makes of its rows alone, columns reordered only where no groups share scales; the model takes the
    weights beside their plan."""
    floats = model()
    own = torch.randperm(N, generator=torch.Generator().manual_seed(2))[:count].sort().values
    plan = PrecisionPlan((LayerPrecision("one", N, K, own),), *formats)
    x = torch.randn(400, K, generator=torch.Generator().manual_seed(1)).half()
    weights = calibrate(nn.Sequential(OrderedDict(one=floats.one)), [x], precision=plan)
    weight, products = weights["one"], x.float().t() @ x.float()
    assert isinstance(weight, MixedTensor)
    rest = torch.tensor([row for row in range(N) if row not in own.tolist()], dtype=torch.int64)
    for part, format, rows in ((weight.low, formats[0], rest), (weight.high, formats[1], own)):
        if not len(rows):
            assert part is None
            continue
        assert part is not None and part.perm is None and part.format == format
        expected = gptq(floats.one.weight[rows], products, format, act_order=formats == CHANNEL)
        assert torch.equal(part.codes, expected.codes) and torch.equal(part.scales, expected.scales)
        assert torch.equal(weight.dequantize()[rows], expected.dequantize())
    quantized = copy.deepcopy(floats)
    quantize_model(quantized, "w4a16_g64", ("head",), weights=weights, precision=plan)
    assert isinstance(quantized.one, MixedLinear) and isinstance(quantized.two, QuantLinear)
    assert torch.equal(quantized.one.dequantize(), weight.dequantize(torch.float16))
    assert (0 if quantized.one.high is None else quantized.one.high.out_features) == count


@pytest.mark.parametrize(
    ("low", "channels", "message"),
    [
        (quantize(torch.ones(2, 8), LOW), torch.tensor([0, 1, 1]), "do not hold each of 0 to 2 once"),
        (quantize(torch.ones(2, 9), LOW), torch.tensor([0, 1, 2]), "accepted: one k and one device"),
        (None, torch.tensor([0.0]), "accepted: int64"),
    ],
)
def test_no_mixed_tensor(low: QuantizedTensor | None, channels: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MixedTensor(low, quantize(torch.ones(1, 8), HIGH), channels)


@pytest.mark.parametrize(
    ("plan", "weights", "message"),
    [
        (planned(three=torch.tensor([0])), {}, "precision names 'three'; accepted: layers that are replaced: one, two"),
        (planned(head=torch.tensor([0])), {}, "precision names 'head'; accepted"),
        (PrecisionPlan((LayerPrecision("one", N, 8, torch.tensor([0])),), LOW, HIGH), {}, r"\[100, 8\]; the layer is \[100, 300\]"),
        (planned(one=torch.tensor([0])), {"one": 1}, r"weights\['one'\] are not in w4a8_g128_asym with the channels in w8a8_g128"),
        (planned(one=torch.tensor([100])), {}, "accepted: some of 0 to 99"),
    ],
)
def test_a_plan_of_another_model_leaves_it_as_it_was(plan: PrecisionPlan, weights: dict[str, int], message: str) -> None:
    floats = model()
    given = {name: quantize(floats.one.weight, LOW) for name in weights}
    with pytest.raises(ValueError, match=message):
        quantize_model(floats, "w4a16_g64", ("head",), precision=plan, weights=given)
    assert all(type(layer) is nn.Linear for layer in floats)
