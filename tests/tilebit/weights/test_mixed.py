"""MixedLinear: output channels in two formats, exactly, in any order; saved, loaded, moved, copied, traced; what is no such layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from mixed_layers import K, M, N, exact_x, made, placed
from safetensors.torch import load_file, save_file
from torch import nn

from tilebit import MixedLinear, QuantLinear, quantize_activations
from tilebit.layouts.formats import GemmFormat, QuantFormat
from tilebit.schedules.gemm.parts import ADDED, NOWHERE
from tilebit.weights.mixed import HIGH, LOW
from tilebit.weights.mixed_tensor import MixedTensor
from tilebit.weights.packed import PackedWeight, pack
from tilebit.weights.paired import HIGH_OF, dequantize_rows
from tilebit.weights.quantize import QuantizedTensor, quantize

SHARES = (0, 1, 10, 50, 100)
ORDERS = ("ascending", "reversed", "alternating", "random", "scattered")


@pytest.mark.parametrize("share", [pytest.param(share, marks=[pytest.mark.slow] * (share in (1, 50))) for share in SHARES])
def test_every_share_is_exact(share: int) -> None:
    x = exact_x(M, torch.Generator().manual_seed(9))
    for order in ORDERS:
        layer, w, bias = made(share, order)
        assert torch.equal(layer.dequantize().double(), w)
        y = layer(x.half())
        assert torch.equal(y, (x.double() @ w.T + bias).half())
        assert torch.equal(layer(x.half().reshape(1, M, K)), y[None]) and layer(x.half()[:0]).shape == (0, N)
    assert layer.format_name == {0: LOW.name, 1: "w4.04a8_g128", 10: "w4.4a8_g128", 50: "w6a8_g128", 100: HIGH.name}[share]
    assert layer.share == share / 100


@pytest.mark.parametrize("formats", HIGH_OF.items(), ids=[low.name for low in HIGH_OF])
def test_every_pair_of_formats_multiplies(formats: tuple[GemmFormat, GemmFormat]) -> None:
    """Near the product of the exact weight with what x is quantized to: all that is rounded is y, and scales of rows in fp32."""
    torch.manual_seed(0)
    linear, x = nn.Linear(K, N), torch.randn(M, K).half()
    layer = MixedLinear.from_float(linear, torch.arange(0, N, 9), *formats)
    codes, scales = quantize_activations(x, group=layer.x_group if layer.x_group > 0 else None)
    of_columns = scales.repeat_interleave(128, 0)[:K].T if layer.x_group > 0 else scales[:, None]
    w = dequantize_rows(layer.rows.unpack(), layer.channels).double()
    expected = (codes[:, :K].double() * of_columns.double()) @ w.T + linear.bias.half().double()
    for y in (layer(x), layer.of_codes(codes, scales)):
        assert torch.allclose(y.double(), expected, rtol=2**-10, atol=2**-14)
    assert layer.kind == f"{formats[0].name}+{formats[1].name}" and layer.share == 0.12
    assert layer.format_name == f"w4.48a8{formats[1].name.removeprefix('w8a8')}"


def test_channels_of_one_format_keep_the_layer_s_kind() -> None:
    linear = nn.Linear(K, N)
    for low, high in HIGH_OF.items():
        for channels, share in ((torch.arange(0), 0), (torch.arange(N), 1)):
            layer = MixedLinear.from_float(linear, channels, low, high)
            assert layer.kind == f"{low.name}+{high.name}" and layer.share == share and layer.format_name == (low, high)[share].name


def roll(entry: str) -> Callable[[MixedLinear], None]:
    """Every number of a buffer in the place of the next."""

    def planted(layer: MixedLinear) -> None:
        buffer = layer.get_buffer(entry)
        buffer.copy_(buffer.roll(1))

    return planted


def next_channel(layer: MixedLinear) -> None:
    rows = placed(layer, "low")
    layer.channels[rows] = layer.channels[rows].roll(1)


def swap_first(layer: MixedLinear) -> None:
    rows = torch.stack([placed(layer, "low")[0], placed(layer, "high")[0]])
    layer.channels[rows] = layer.channels[rows.flip(0)]


def high_scales_in_low_nibbles(layer: MixedLinear) -> None:
    rows, scales = placed(layer, "high"), layer.get_buffer("rows.scales")
    scales[:, rows + 8] = scales[:, rows]


def high_zeros_in_low_nibbles(layer: MixedLinear) -> None:
    rows, zeros = placed(layer, "high"), layer.get_buffer("rows.zeros")
    zeros[:, rows + 8] = zeros[:, rows]


def low_nibbles_lost(layer: MixedLinear) -> None:
    layer.channels[placed(layer, "high")[3] + 8] = NOWHERE


def stale(layer: MixedLinear) -> None:
    """A single row is added to the one before it, as if it were low nibbles."""
    layer.channels[8] = ADDED


BUGS: dict[str, Callable[[MixedLinear], object]] = {
    "the index of the next channel": next_channel,
    "the index of a channel of the other format, in one place": swap_first,
    "the scales of high nibbles on low ones": high_scales_in_low_nibbles,
    "the zeros of high nibbles on low ones": high_zeros_in_low_nibbles,
    "low nibbles that are lost": low_nibbles_lost,
    "a single row as low nibbles": stale,
    "the bias in another order": roll("rows.bias"),
    "the scales of the next channel": lambda layer: layer.get_buffer("rows.scales").copy_(layer.get_buffer("rows.scales").roll(1, 1)),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug: str) -> None:
    layer, w, bias = made(10)
    x = exact_x(M, torch.Generator().manual_seed(9))
    BUGS[bug](layer)
    assert not torch.equal(layer(x.half()), (x.double() @ w.T + bias).half())


def test_state_dict_round_trips_through_safetensors(tmp_path) -> None:
    source, w, _ = made(10)
    target = made(10, "reversed", bias=True)[0]
    save_file(source.state_dict(), tmp_path / "layer.safetensors")
    target.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    assert torch.equal(target.dequantize().double(), w)
    x = torch.randn(M, K).half()
    assert torch.equal(source(x), target(x)) and torch.equal(copy.deepcopy(target)(x), source(x))


@pytest.mark.parametrize("order", ["drawn", "scattered"])
def test_what_is_loaded_says_whether_its_rows_are_nibbles(order: str) -> None:
    source, target = made(10, order)[0], made(10, "scattered" if order == "drawn" else "drawn")[0]
    assert source.nibbles != target.nibbles
    target.load_state_dict(source.state_dict())
    assert source.nibbles == target.nibbles == (order == "drawn")
    x = torch.randn(M, K).half()
    assert torch.equal(source(x), target(x))


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, Any]], None]:
    return lambda state: state.update({name: change(state[name].clone())})


def put(place: int, value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.index_fill(0, torch.tensor([place]), value)


OTHERS = MixedLinear.from_float(nn.Linear(K, N), torch.arange(10), "w4a8_channel_asym", "w8a8_channel").state_dict()


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a channel twice": (changed("channels", put(3, 5)), "do not hold each of 0 to 99 once"),
    "no channel": (changed("channels", put(3, NOWHERE)), "do not hold each of 0 to 99 once"),
    "another number": (changed("channels", put(95, -3)), "channels reach -3; accepted"),
    "added among the first 8": (changed("channels", put(119, ADDED)), "channels are -1 at row 119; accepted"),
    "added to padding": (changed("channels", put(127, ADDED)), "channels are -1 at row 127; accepted"),
    "no index": (lambda state: state.pop("channels"), "has no channels; accepted: all of the layer or nothing"),
    "the index alone": (
        lambda state: [state.pop(name) for name in list(state) if name.startswith("rows.")],
        "has no rows.weight; accepted: all",
    ),
    "an index of another dtype": (changed("channels", torch.Tensor.long), "channels is int64 .*; this module needs int32"),
    "an index of other rows": (changed("channels", lambda channels: channels[:112]), r"needs int32 \[128\]"),
    "an index that is no tensor": (lambda state: state.update(channels="3"), "channels is str; this module needs"),
    "other rows": (changed("rows.weight", lambda weight: weight[:, :1]), "needs"),
    "rows of another format": (lambda state: state.update({"rows._extra_state": OTHERS["rows._extra_state"]}), "build the module"),
    "two packed weights, as layers were saved": (
        lambda state: state.update(low_channels=torch.arange(90), high_channels=torch.arange(10)),
        "quantize the model again",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_entries_of_no_such_layer_change_nothing(wrong: str) -> None:
    source, target = made(10)[0], made(10, "reversed")[0]
    state, before = dict(source.state_dict()), {name: t.clone() for name, t in target.state_dict().items()}
    change, message = WRONG[wrong]
    change(state)
    with pytest.raises(RuntimeError, match=message):
        target.load_state_dict(state)
    assert all(torch.equal(before[name], t) for name, t in target.state_dict().items())


def test_casts_round_scales_and_keep_the_index() -> None:
    layer, w, _ = made(10, bias=False)
    layer.to(torch.bfloat16)
    assert layer.dtype == torch.bfloat16 and layer.channels.dtype == torch.int32
    assert torch.equal(layer.dequantize().double(), w)


def test_traces() -> None:
    layer, x = made(10)[0], torch.randn(M, K).half()
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    assert torch.equal(compiled(x), layer(x))
    exported = torch.export.export(nn.Sequential(layer), (x,))
    assert "gemm_mixed" in exported.graph_module.code and torch.equal(exported.module()(x), layer(x))
    rows = layer.rows
    operands = (rows.weight, rows.scales, rows.zeros, rows.row_scales, rows.bias, layer.channels)
    codes = torch.ops.tilebit.quantize(x, None, None, group=128)
    names = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.tilebit.gemm_mixed, (*codes, *operands, N, K, LOW.name, torch.float16), test_utils=names)


def packed(n: int, format: GemmFormat, k: int = K, dtype: torch.dtype = torch.float16) -> PackedWeight:
    shape = (n, format.groups(k))
    zeros = None if format.symmetric else torch.zeros(shape, dtype=torch.uint8)
    return pack(QuantizedTensor(torch.zeros(n, k, dtype=torch.uint8), torch.ones(shape), zeros, format), dtype)


ROWS = torch.cat([torch.arange(N), torch.full((12,), NOWHERE)])  # of a layer with all channels in 4 bits


SECOND = torch.arange(16).masked_fill(torch.arange(16) > 7, ADDED)


NO_LAYERS: dict[str, tuple[Callable[[], MixedLinear], str]] = {
    "x of 16 bits": (lambda: MixedLinear(packed(112, QuantFormat(4, 64)), ROWS, N), "rows are in w4a16_g64; accepted: w4a8_g128_asym, "),
    "rows of 8 bits": (lambda: MixedLinear(packed(112, HIGH), ROWS, N), "rows are in w8a8_g128; accepted: w4a8_g128_asym, "),
    "another x": (
        lambda: MixedLinear.from_float(nn.Linear(K, N), torch.arange(3), LOW, "w8a8_channel"),
        "the formats are w4a8_g128_asym and w8a8_channel; accepted: 'w4a8_g128_asym' with 'w8a8_g128'.*the same int8 x",
    ),
    "reordered columns": (lambda: MixedLinear(replace(packed(112, LOW), perm=torch.arange(K)), ROWS, N), "act_order=False"),
    "a channel twice": (lambda: MixedLinear(packed(112, LOW), ROWS.clamp(NOWHERE, 98), N), "do not hold each of 0 to 99 once"),
    "a channel too many": (lambda: MixedLinear(packed(112, LOW), ROWS, N - 1), "do not hold each of 0 to 98 once"),
    "no channels": (lambda: MixedLinear(packed(16, LOW), torch.full((16,), NOWHERE), 0), "do not hold each of 0 to -1 once"),
    "another number": (lambda: MixedLinear(packed(112, LOW), ROWS.clamp(max=99) - 3 * (ROWS < 0), N), "channels reach -5; accepted"),
    "added among the first 8": (lambda: MixedLinear(packed(16, LOW), SECOND.flip(0), 8), "channels are -1 at row 0; accepted"),
    "added to padding": (lambda: MixedLinear(packed(16, LOW), SECOND.clone().index_fill_(0, torch.tensor([7]), NOWHERE), 7), "at row 15"),
    "too few numbers": (
        lambda: MixedLinear(packed(112, LOW), ROWS[1:], N),
        r"channels are int64 \[111\].*accepted: whole",
    ),
    "channels that are floats": (lambda: MixedLinear(packed(112, LOW), ROWS.float(), N), r"channels are float32 \[112\]"),
    "a bias of another length": (lambda: MixedLinear(packed(112, LOW), ROWS, N, torch.ones(3)), r"bias is float32 \[3\].*accepted"),
    "a bias of rows": (lambda: MixedLinear(packed(112, LOW), ROWS, N, torch.ones(112)), r"accepted: floating point \[100\]"),
    "channels outside": (lambda: MixedLinear.from_float(nn.Linear(K, N), torch.tensor([N])), "accepted: some of 0 to 99"),
    "channels below": (lambda: MixedLinear.from_float(nn.Linear(K, N), torch.tensor([-1])), "accepted: some of 0 to 99"),
    "a mask": (lambda: MixedLinear.from_float(nn.Linear(K, N), torch.ones(N, dtype=torch.bool)), "accepted: whole numbers"),
    "a mask of rows": (lambda: MixedLinear(packed(112, LOW), torch.ones(112, dtype=torch.bool), N), "accepted: whole numbers"),
}


@pytest.mark.parametrize("case", NO_LAYERS)
def test_what_makes_no_layer_is_refused(case: str) -> None:
    make, message = NO_LAYERS[case]
    with pytest.raises(ValueError, match=message):
        make()


def test_what_is_no_weight_is_refused() -> None:
    with pytest.raises(TypeError, match="rows is int '3'; accepted: a PackedWeight"):
        MixedLinear(3, ROWS, N)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="n is float"):
        MixedLinear(packed(112, LOW), ROWS, 100.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="linear is"):
        MixedLinear.from_float(QuantLinear(packed(N, LOW)), torch.arange(3))  # type: ignore[arg-type]


def test_a_layer_of_its_rows_has_their_bias() -> None:
    for bias in (True, False):
        layer, x = made(10, bias=bias)[0], torch.randn(M, K).half()
        again = MixedLinear.of_layer(layer.rows, layer.channels, N)
        assert torch.equal(again(x), layer(x)) and list(again.state_dict()) == list(layer.state_dict())


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
