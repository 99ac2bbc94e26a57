"""``tilebit.gemm`` and ``torch.ops.tilebit.gemm_int8`` of weights whose x is int8 or e4m3."""

from __future__ import annotations

import copy
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.optests.generate_tests import DEFAULT_TEST_UTILS

import tilebit
from tilebit.autotune.problems.gemm_drawn import exact_problem
from tilebit.layouts.formats import FORMATS
from tilebit.ops import gemm_int8
from tilebit.ops.gemm_int8 import OUTS
from tilebit.schedules.gemm.workload import Workload
from tilebit.weights.quantize import quantize

OP = torch.ops.tilebit.gemm_int8
CODED = [name for name, f in FORMATS.items() if f.x]  # int8 and e4m3
# Among them each set of arguments that the operator tells apart: with and without zeros, row scales, scales of groups of x; both types.
OPERATORS = ("w4a8_lqq_g128", "w4a8_channel_asym", "w8a8_channel", "w4a8_g128_asym", "w8a8_fp8", "w8a8_fp8_g128")
N, K = 70, 200


def made(name: str, dtype: torch.dtype = torch.float16) -> tuple[tilebit.PackedWeight, Tensor]:
    q = quantize(torch.randn(N, K, generator=torch.Generator().manual_seed(0)), FORMATS[name])
    return tilebit.pack(q, dtype), q.dequantize().double()


def operands(packed: tilebit.PackedWeight, x: Tensor, scales: Tensor | None, bias: Tensor | None = None) -> tuple[Any, ...]:
    held = (packed.weight, packed.scales, packed.zeros, packed.row_scales)
    return x, *held, scales, bias, packed.n, packed.k, packed.format_name, packed.dtype


def coded(x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and scales of ``x`` as a product with a weight in format ``name`` takes them, and what
    they stand for in fp64."""
    grouped = FORMATS[name].x_grouped
    codes, scales = tilebit.quantize_activations(x, OUTS[FORMATS[name].x], 128 if grouped else None)
    if not grouped:
        return codes, scales, codes.double() * scales[..., None]
    return codes, scales, codes.double() * scales.movedim(0, -1).repeat_interleave(128, -1)[..., :K]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CODED)
def test_codes_and_floats_give_the_same(name: str, dtype: torch.dtype):
    packed, w = made(name, dtype)
    x, bias = torch.randn(2, 3, K).to(dtype), torch.randn(N).to(dtype)
    codes, scales, floats = coded(x, name)
    y = tilebit.gemm(x, packed, bias)
    expected = floats @ w.T + bias.double()
    assert y.dtype is dtype and y.shape == (2, 3, N)
    assert float((y.double() - expected).norm() / expected.norm()) < (1e-3 if dtype is torch.float16 else 4e-3)
    wide = torch.zeros(2, 3, 2 * K, dtype=codes.dtype)
    wide[..., K:] = codes
    for given in (codes, wide[..., K:]):
        assert torch.equal(tilebit.gemm(given, packed, bias, token_scales=scales), y)
    assert torch.equal(OP(*operands(packed, codes, scales, bias)), y)
    layer = tilebit.QuantLinear(packed, bias)
    assert torch.equal(layer(x), y) and torch.equal(copy.deepcopy(layer)(x), y)
    assert tilebit.gemm(x[:0], packed).shape == (0, 3, N)


@pytest.mark.parametrize(("dtype", "name"), [*zip(cycle(("float16", "bfloat16")), CODED)], ids=str)
def test_products_are_exact(dtype: str, name: str):
    """Codes of 8 bits, any zero points and offsets, scales of each channel: sums that fp32 holds."""
    for seed in range(20):
        problem = exact_problem(Workload(6, N, K, FORMATS[name], dtype, bias=True), seed)
        o, kept = problem.operands, getattr(torch, dtype)
        y = OP(problem.x, o["weight"], o["scales"], o.get("zeros"), o.get("row_scales"), o["token_scales"], o["bias"], N, K, name, kept)
        assert torch.equal(y, problem.reference().to(kept))


def test_zero_points_are_bytes_and_scales_follow_the_module():
    layer = tilebit.QuantLinear(made("w4a8_channel_asym")[0])
    x, state = torch.randn(4, K), layer.state_dict()
    before = layer(x.half())
    assert (state["scales"].dtype, state["zeros"].dtype) == (torch.float16, torch.uint8)
    layer.to(torch.bfloat16)
    assert layer.scales.dtype is layer.dtype is torch.bfloat16 and layer.zeros is not None and layer.zeros.dtype is torch.uint8
    assert float((layer(x.bfloat16()).float() - before.float()).norm() / before.float().norm()) < 0.02
    other = tilebit.QuantLinear(tilebit.pack(quantize(torch.ones(N, K), FORMATS["w4a8_channel_asym"]), torch.float16))
    with pytest.raises(RuntimeError, match=r"zeros is float16 \[1, 96\]; this module needs uint8"):
        other.load_state_dict({**state, "zeros": state["zeros"].half()})
    moved = tilebit.QuantLinear(tilebit.pack(tilebit.QuantLinear(made("w4a8_channel_asym")[0]).unpack(), torch.float16, arch="sm_90a"))
    other.load_state_dict(moved.state_dict())  # another layout is repacked
    assert torch.equal(other(x.half()), before)


def test_the_module_keeps_its_dtype_without_a_buffer_that_tells():
    layer = tilebit.QuantLinear(made("w4a8_lqq_g64")[0])
    x = torch.randn(4, K)
    before, state = layer(x.half()), layer.state_dict()
    assert layer.dtype is torch.float16 and state["scales"].dtype is torch.uint8
    layer.to(torch.bfloat16)
    assert layer.dtype is torch.bfloat16 and layer(x.bfloat16()).dtype is torch.bfloat16
    assert layer.row_scales is not None and layer.row_scales.dtype is torch.float32
    with pytest.raises(ValueError, match=r"x is float16 \[4, 200\] on cpu; accepted: bfloat16"):
        layer(x.half())
    other = tilebit.QuantLinear(tilebit.pack(quantize(torch.ones(N, K), FORMATS["w4a8_lqq_g64"]), torch.float16))
    other.load_state_dict(state)
    assert torch.equal(other(x.half()), before)
    lying = {**state, "scales": state["scales"].half()}
    with pytest.raises(RuntimeError, match=r"scales is float16 \[4, 96\]; this module needs uint8"):
        other.load_state_dict(lying)
    moved = tilebit.QuantLinear(tilebit.pack(layer.unpack(), torch.float16, arch="sm_90a"))
    other.load_state_dict(moved.state_dict())  # another layout is repacked
    assert torch.equal(other(x.half()), before)


def test_a_model_is_quantized():
    model = torch.nn.Sequential(torch.nn.Linear(K, N), torch.nn.ReLU(), torch.nn.Linear(N, 16)).half()
    x = torch.randn(5, K).half()
    with torch.no_grad():
        expected = model(x)
    assert tilebit.quantize_model(model, "w8a8_channel") == ["0", "2"]
    with torch.no_grad():
        assert float((model(x) - expected).norm() / expected.norm()) < 0.03


@pytest.mark.parametrize("name", [name for name in CODED if FORMATS[name].integer])
def test_a_model_is_calibrated(name: str):
    """Columns in the order of their inputs' size: codes and 16-bit x are both brought into it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(K, N)).half()
    x = torch.randn(300, K).half() * torch.exp(torch.randn(K)).half()
    weights = tilebit.calibrate(model, [x[:200], x[200:]], name, clip_search=True)
    assert (weights["0"].perm is None) == ("channel" in name)
    tilebit.quantize_model(model, name, weights=weights)
    perm, grouped = weights["0"].perm, FORMATS[name].x_grouped
    if grouped:  # groups are those of reordered columns
        assert perm is not None
        codes, scales, floats = coded(x[:6].index_select(-1, perm), name)
        floats = torch.empty_like(floats).index_copy_(-1, perm, floats)
    else:
        codes, scales, floats = coded(x[:6], name)
    expected = floats @ weights["0"].dequantize().double().T
    layer = model[0]
    assert isinstance(layer, tilebit.QuantLinear) and layer.bias is not None
    y = layer(x[:6])
    assert float((y.double() - expected - layer.bias.double()).norm() / expected.norm()) < 1e-3
    if grouped:
        with pytest.raises(ValueError, match=r"columns are reordered \(act order\).*accepted: float16 \[..., 200\] without token_scales"):
            tilebit.gemm(codes, layer.packed, layer.bias, token_scales=scales)
        return
    assert torch.equal(tilebit.gemm(codes, layer.packed, layer.bias, token_scales=scales), y)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATORS)
def test_it_is_an_operator_and_compiles(name: str):
    packed, _ = made(name)
    x = torch.randn(6, K).half()
    codes, scales, _ = coded(x, name)
    checks = (
        ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        if codes.dtype == torch.float8_e4m3fn
        else DEFAULT_TEST_UTILS
    )  # torch cannot compare e4m3
    torch.library.opcheck(OP.default, operands(packed, codes, scales), test_utils=checks)
    compiled = torch.compile(lambda x: tilebit.gemm(x, packed) * 2, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (6, 3):
        assert torch.equal(compiled(x[:m]), tilebit.gemm(x[:m], packed) * 2)


def test_rows_and_scales_off_a_boundary_are_copied():
    packed, _ = made("w4a8_lqq_g64")
    codes, scales = tilebit.quantize_activations(torch.randn(3, K).half())
    off = torch.zeros(3 * K + 1, dtype=torch.int8)[1:].view(3, K).copy_(codes)
    tokens = torch.zeros(4)[1:].copy_(scales)
    assert off.data_ptr() % 16 and tokens.data_ptr() % 16
    assert torch.equal(tilebit.gemm(off, packed, token_scales=tokens), tilebit.gemm(codes, packed, token_scales=scales))


def test_a_failing_launch_is_not_tried_again(monkeypatch: pytest.MonkeyPatch):
    packed, _ = made("w4a8_lqq_g64")
    codes, scales = tilebit.quantize_activations(torch.randn(3, K).half())
    calls = []

    def failing(*_: Any) -> None:
        calls.append(1)
        raise RuntimeError("out of order")

    monkeypatch.setattr(gemm_int8.Plan, "launcher", lambda *_: failing)
    monkeypatch.setattr(gemm_int8.dispatch, "plans", {})
    with pytest.raises(RuntimeError, match="out of order"):
        tilebit.gemm(codes, packed, token_scales=scales)
    assert len(calls) == 1


def test_a_row_that_is_not_a_number_is_none_in_y():
    packed, _ = made("w4a8_lqq_g128")
    x = torch.randn(3, K).half()
    x[1, 7] = float("inf")
    y = tilebit.gemm(x, packed)
    assert y[1].isnan().all() and y[[0, 2]].isfinite().all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(2, K)}, r"x is float32 \[2, 200\] on cpu; accepted: float16 \[..., 200\] on cpu"),
        ({"x": torch.zeros(2, K).bfloat16()}, r"x is bfloat16 .*accepted: float16"),
        ({"x": torch.zeros(2, K - 8).half()}, r"x is float16 \[2, 192\]"),
        ({"x": torch.zeros(2, K, dtype=torch.int8)}, r"x is int8 .*without token_scales; accepted by w4a8_lqq_g128: int8 codes with fp32"),
        ({"token_scales": torch.ones(2)}, r"x is float16 .*with token_scales; accepted"),
        ({"x": torch.zeros(2, 201, dtype=torch.int8), "token_scales": torch.ones(2)}, r"x is int8 \[2, 201\].*accepted: int8 \[..., 200\]"),
        ({"x": torch.zeros(2, K, dtype=torch.int8), "token_scales": torch.ones(3)}, r"token_scales is float32 \[3\]"),
        ({"x": torch.zeros(2, K, dtype=torch.int8), "token_scales": torch.ones(2).half()}, r"token_scales is float16 \[2\]"),
        ({"bias": torch.zeros(N)}, r"bias is float32 \[70\]"),
        ({"x": torch.ones(2, K).half().requires_grad_()}, r"a derivative with respect to x is asked for"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], words: str):
    packed, _ = made("w4a8_lqq_g128")
    tilebit.gemm(torch.zeros(2, K).half(), packed)
    monkeypatch.setattr(gemm_int8.Plan, "launcher", lambda *_: pytest.fail("a kernel was looked for"))
    given = {"x": torch.zeros(2, K).half(), **change}
    with pytest.raises(ValueError, match=words):
        tilebit.gemm(given.pop("x"), packed, **given)


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        (torch.ones(6), r"token_scales is float32 \[6\].*needs float32 \[2, m\].*m = 6; pass a value for each group of 128 of each row"),
        (torch.ones(6, 2), r"token_scales is float32 \[6, 2\].*group=128"),
        (torch.ones(1, 6), r"token_scales is float32 \[1, 6\]"),
        (torch.ones(2, 6).half(), r"token_scales is float16 \[2, 6\]"),
        (torch.tensor(1.0), r"token_scales is float32 \[\]"),
        (None, r"without token_scales; accepted by w8a8_g128: int8 codes with fp32 token_scales \[groups, ...\] .*\(x, group=128\)"),
    ],
)
def test_scales_of_groups_that_do_not_fit_are_named(scales: Tensor | None, words: str):
    packed, codes = made("w8a8_g128")[0], torch.zeros(6, K, dtype=torch.int8)
    for _ in range(2):  # before and after a call that fits
        with pytest.raises(ValueError, match=words):
            tilebit.gemm(codes, packed, token_scales=scales)
        tilebit.gemm(codes, packed, token_scales=torch.ones(2, 6))
    with pytest.raises(ValueError, match=r"token_scales is float32 \[2, 6\]"):
        tilebit.gemm(codes, made("w8a8_channel")[0], token_scales=torch.ones(2, 6))


@pytest.mark.parametrize("name", ["w8a8_g128", "w4a8_g128_asym"])
def test_scales_of_groups_may_have_any_strides_and_leading_dimensions(name: str):
    packed, x = made(name)[0], torch.randn(2, 3, K).half()
    codes, scales, _ = coded(x, name)
    assert scales.shape == (2, 2, 3)
    y = tilebit.gemm(codes, packed, token_scales=scales)
    strided = scales.movedim(0, -1).contiguous().movedim(-1, 0)
    wide = torch.full((4, 2, 6), 7.0)
    wide[::2, :, ::2] = scales
    for given in (strided, wide[::2, :, ::2]):
        assert not given.is_contiguous() and torch.equal(tilebit.gemm(codes, packed, token_scales=given), y)
    assert torch.equal(tilebit.gemm(codes[1, 2], packed, token_scales=scales[:, 1, 2]), y[1, 2])
    assert tilebit.gemm(codes[:0], packed, token_scales=scales[:, :0]).shape == (0, 3, N)


def test_what_a_format_does_not_have_is_refused_at_each_call():
    """Kernels do not take it, so that they cannot refuse it."""
    x = torch.randn(3, K).half()
    for name in ("w8a8_channel", "w4a8_lqq_g64"):
        packed, _ = made(name)
        codes, scales, _ = coded(x, name)
        given = operands(packed, codes, scales)
        absent = {3: "zeros", 4: "row_scales"}
        for _ in range(2):  # before and after a call that fits
            for place in [place for place in absent if given[place] is None]:
                with pytest.raises(ValueError, match=rf"{absent[place]} is float32 \[{N}\].*has none; pass None"):
                    OP(*given[:place], torch.ones(N), *given[place + 1 :])
            OP(*given)


def test_the_other_operator_is_named():
    packed, _ = made("w4a8_lqq_g128")
    x = torch.zeros(2, K).half()
    with pytest.raises(ValueError, match=r"whose x is int8; accepted: a format with x of 16 bits; use torch\.ops\.tilebit\.gemm_int8"):
        torch.ops.tilebit.gemm(x, packed.weight, packed.scales, packed.zeros, packed.row_scales, None, N, "w4a8_lqq_g128")
    plain = tilebit.pack(quantize(torch.randn(N, K), tilebit.QuantFormat()), torch.float16)
    with pytest.raises(ValueError, match=r"format is w4a16_g128, whose x is of 16 bits; accepted: a format with int8 x"):
        OP(*operands(plain, torch.zeros(2, K, dtype=torch.int8), torch.ones(2)))
    with pytest.raises(ValueError, match=r"token_scales are given; w4a16_g128 has none"):
        tilebit.gemm(x, plain, token_scales=torch.ones(2))
    with pytest.raises(ValueError, match=r"dtype is torch.float32; accepted: torch.float16, torch.bfloat16"):
        OP(*operands(packed, torch.zeros(2, K, dtype=torch.int8), torch.ones(2))[:-1], torch.float32)
