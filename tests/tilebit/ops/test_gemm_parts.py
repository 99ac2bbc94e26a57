"""``tilebit.gemm`` with a norm before it, a gate or a residual behind it: one kernel that gives what several do; in place or not, of any
shape; what does not fit is refused before anything is written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tilebit
from tilebit.ops import dispatch, gemm_parts
from tilebit.ops.rows import activated
from tilebit.weights.gated import in_turn, interleaved

N, K = 48, 72
EPS = 1e-5
BF16 = torch.bfloat16
ADD, PARTS = torch.ops.tilebit.gemm_add_, torch.ops.tilebit.gemm_parts
assert gemm_parts


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed(format: str = "w4a16_g32_asym", n: int = N, seed: int = 1) -> tilebit.PackedWeight:
    linear = torch.nn.Linear(K, n, bias=False, dtype=BF16)
    linear.weight.data = numbers(n, K, seed=seed) / K**0.5
    return tilebit.QuantLinear.from_float(linear, format).packed


def near(y: Tensor, expected: Tensor) -> bool:
    """One rounding of bf16 apart, or what fp32 sums may differ by."""
    return bool(((y.double() - expected).abs() <= expected.abs() * 2**-8 + 1e-5).all())


def product(x: Tensor, weight: tilebit.PackedWeight) -> Tensor:
    """In fp64; ``weight`` without an order of its columns."""
    return x.double() @ weight.unpack().dequantize(torch.float64).t()


X, BIAS = numbers(2, 3, K), numbers(N, seed=2)
R = numbers(2, 3, N, seed=4)
NORM = (numbers(K, seed=3) + 2).to(BF16)


def normed(x: Tensor) -> tuple[Tensor, Tensor]:
    """x times the norm's weight, in x's dtype, and the factors of its rows."""
    return x * NORM, (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt()


@pytest.mark.parametrize("norm", [False, True])
def test_a_residual(norm: bool):
    weight, residual = packed(), numbers(2, 3, N, seed=4) * 4
    x, factor = normed(X) if norm else (X, torch.ones(()))
    expected = product(x, weight) * factor + BIAS.double() + residual.double()
    options: dict[str, Any] = {"norm_weight": NORM, "eps": EPS} if norm else {}
    before = residual.clone()
    y = tilebit.gemm(X, weight, BIAS, residual=residual, **options)
    assert y.shape == (2, 3, N) and y.dtype is BF16 and near(y, expected) and torch.equal(residual, before)
    apart = torch.stack((residual, residual), -1)[..., 0]
    assert torch.equal(tilebit.gemm(X.transpose(0, 1), weight, BIAS, residual=apart.transpose(0, 1), **options), y.transpose(0, 1))
    held = tilebit.gemm(X, weight, BIAS, residual=residual, inplace=True, **options)
    assert held is residual and torch.equal(held, y)
    assert tilebit.gemm(X[:0], weight, BIAS, residual=residual[:0], inplace=True, **options).shape == (0, 3, N)


def test_a_gate_is_two_products_and_an_activation():
    gate, up = packed(), packed(seed=5)
    y = tilebit.gemm(X, interleaved(gate, up), in_turn(BIAS, 2 * BIAS), gate="silu")
    assert y.shape == (2, 3, N)
    assert near(y, activated(product(X, gate) + BIAS.double(), "silu") * (product(X, up) + 2 * BIAS.double()))


def test_gates_as_the_first_half_of_a_weight():
    both, bias = packed(n=128), numbers(128, seed=2)
    y = tilebit.gemm(X, both, bias, gate="silu", gate_halves=True)
    gate, up = (product(X, both) + bias.double()).chunk(2, -1)
    assert y.shape == (2, 3, 64) and near(y, activated(gate, "silu") * up)
    apart = both.unpack()
    halves = [tilebit.pack(replace(apart, codes=c, scales=s, zeros=z), BF16) for c, s, z in zip(*halves_of(apart), strict=True)]
    assert torch.equal(y, tilebit.gemm(X, interleaved(*halves), in_turn(*bias.chunk(2)), gate="silu"))  # the same sums


def halves_of(weight: Any) -> tuple[tuple[Tensor, ...], ...]:
    return weight.codes.chunk(2), weight.scales.chunk(2), weight.zeros.chunk(2)


def test_a_norm_then_a_gate():
    gate, up = packed(), packed(seed=5)
    x, factor = normed(X)
    y = tilebit.gemm(X, interleaved(gate, up), gate="silu", norm_weight=NORM, eps=EPS)
    assert near(y, activated(product(x, gate) * factor, "silu") * product(x, up) * factor)
    rows, _ = tilebit.add_norm(X, None, NORM, EPS)
    apart = activated(product(rows, gate), "silu") * product(rows, up)
    assert float((y.double() - apart).norm() / apart.norm()) < 0.01


def test_a_row_without_a_finite_sum_of_squares_gets_nothing_finite():
    x = numbers(3, K, dtype=torch.float32)
    x[1, 5], x[2, 0] = float("inf"), 3e38
    y = tilebit.gemm(x.to(BF16), packed(), BIAS, norm_weight=NORM, eps=EPS, residual=R[0])
    assert y[0].isfinite().all() and not y[1:].isfinite().any()


def test_codes_of_x_with_a_residual():
    weight, residual = packed("w8a8_channel"), numbers(2, 3, N, seed=4)
    codes, scales = tilebit.quantize_activations(X)
    expected = (codes.double() * scales[..., None].double()) @ weight.unpack().dequantize(torch.float64).t()
    y = tilebit.gemm(codes, weight, BIAS, token_scales=scales, residual=residual)
    assert near(y, expected + BIAS.double() + residual.double())
    assert torch.equal(tilebit.gemm(X, weight, BIAS, residual=residual), y)  # quantized first


def test_columns_in_another_order():
    order = torch.randperm(K, generator=torch.Generator().manual_seed(0))
    weight, residual = replace(packed(), perm=order), numbers(2, 3, N)
    assert near(tilebit.gemm(X, weight, BIAS, residual=residual), product(X[..., order], packed()) + BIAS.double() + residual.double())
    with pytest.raises(ValueError, match="reordered"):
        tilebit.gemm(X, weight, norm_weight=NORM)


def test_they_are_operators():
    weight, residual = packed(), numbers(2, 3, N)
    held = (X, weight.weight, weight.scales, weight.zeros, None, None, BIAS)
    rest = (weight.n, weight.k, weight.format_name, weight.dtype)
    torch.library.opcheck(PARTS.default, (*held, residual, NORM, *rest, EPS), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(PARTS.default, (*held, None, None, *rest, EPS, False, "silu"))
    torch.library.opcheck(ADD.default, (*held, residual, None, *rest), test_utils=("test_schema", "test_faketensor"))
    with FakeTensorMode():
        x = torch.empty(3, K, dtype=BF16, device="cuda")
        one = torch.empty(1, dtype=BF16, device="cuda")
        found = PARTS(x, one, one, None, None, None, None, None, None, 2 * N, K, "w4a16_g32", BF16, gate="silu")
        assert found.shape == (3, N) and found.device.type == "cuda"


def test_they_trace():
    weight, both = packed(), interleaved(packed(), packed(seed=5))

    def step(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        y = tilebit.gemm(x, both, gate="silu", norm_weight=NORM, eps=EPS)
        tilebit.gemm(x, weight, BIAS, residual=residual, inplace=True)
        return y, residual

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(compiled(X, R.clone()), step(X, R.clone()), strict=True))


def test_every_part_is_of_the_key():
    usual: dict[str, Any] = {"n": 64, "k": 128, "format": "w4a16_g32", "dtype": torch.float16, "bias": False}
    first = dispatch.plan_for(torch.device("cpu"), **usual)
    ways: tuple[dict[str, Any], ...] = (
        {"residual": True},
        {"gate": "silu"},
        {"gate": "gelu"},
        {"gate": "silu", "gate_halves": True},
        {"norm": True},
        {"norm": True, "eps": 0.5},
    )
    plans = [dispatch.plan_for(torch.device("cpu"), **usual, **way) for way in ways]
    assert len({id(plan) for plan in (first, *plans)}) == 1 + len(ways)
    for plan, way in zip(plans, ways, strict=True):
        assert {name: getattr(plan.workload, name) for name in way} == way
        assert dispatch.plan_for(torch.device("cpu"), **usual, **way) is plan


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another shape": ({"residual": R[0]}, r"residual is bfloat16 \[3, 48\].*accepted.*bfloat16 \[2, 3, 48\]"),
    "another dtype": ({"residual": R.half()}, "residual is float16"),
    "another device": ({"residual": R.to("meta")}, "residual is .*on meta"),
    "in place, with strides": (
        {"residual": torch.stack((R, R), -1)[..., 0], "inplace": True}, "residual is .* with strides .*accepted in place: a contiguous one",
    ),
    "in place, off a boundary": (
        {"residual": numbers(6 * N + 1)[1:].view(2, 3, N), "inplace": True}, "2 bytes past a 16-byte boundary; accepted in place",
    ),
    "a residual and a gate": ({"residual": R, "gate": "silu"}, "accepted: one of them"),
    "a residual in place and a gate": ({"residual": R, "inplace": True, "gate": "silu"}, "gate is 'silu' with a residual"),
    "halves without a gate": ({"gate_halves": True}, "gate_halves goes with gate '' and n = 48; accepted: a gate, and multiples of 64"),
    "another gate": ({"gate": "relu"}, "gate is 'relu'; accepted: '', 'silu', 'gelu_tanh', 'gelu'"),
    "a norm of other columns": ({"norm_weight": NORM[1:]}, r"norm_weight is bfloat16 \[71\].*accepted.*\[72\]"),
    "a norm of another dtype": ({"norm_weight": NORM.float()}, "norm_weight is float32"),
    "an eps below 0": ({"norm_weight": NORM, "eps": -1.0}, "eps is -1.0; accepted: a finite number from 0"),
    "other columns of x": ({"x": X[..., 1:], "residual": R}, r"x is bfloat16 \[2, 3, 71\].*accepted: bfloat16 \[..., 72\]"),
    "x of another dtype": ({"x": X.half(), "residual": R}, "x is float16"),
    "scales of tokens": ({"residual": R, "token_scales": torch.ones(2, 3)}, "token_scales are given; .* has none"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch, case: str):
    changed, says = WRONG[case]
    monkeypatch.setattr(dispatch.Plan, "launcher", lambda *_: pytest.fail("a kernel was looked for"))
    before = changed["residual"].clone() if "residual" in changed and not changed["residual"].is_meta else None
    with pytest.raises(ValueError, match=says):
        tilebit.gemm(**{"x": X, "packed": packed(), **changed})
    assert before is None or torch.equal(changed["residual"], before)


def test_kinds_of_arguments():
    for changed, says in (
        ({"residual": 1.0}, "residual is float"),
        ({"gate": 1}, "gate is int"),
        ({"gate_halves": "silu"}, "gate_halves is str"),
        ({"norm_weight": [1]}, "norm_weight is list"),
    ):
        with pytest.raises(TypeError, match=says):
            tilebit.gemm(X, packed(), **changed)  # type: ignore[arg-type]


def test_x_is_not_where_y_goes():
    square, memory = packed(n=K), numbers(3, K)
    with pytest.raises(ValueError, match="x and residual share memory"):
        tilebit.gemm(memory, square, residual=memory, inplace=True)


def test_codes_are_not_normed():
    with pytest.raises(ValueError, match="w8a8_channel multiplies codes of x: pass those of"):
        tilebit.gemm(X, packed("w8a8_channel"), norm_weight=NORM)


def test_derivatives_are_refused():
    for name in ("x", "residual", "norm_weight", "bias"):
        operands: dict[str, Any] = {"x": X.clone(), "residual": R.clone(), "norm_weight": NORM.clone(), "bias": BIAS.clone()}
        operands[name].requires_grad_()
        with pytest.raises(ValueError, match=f"{name}.*derivatives|derivatives.*{name}"):
            tilebit.gemm(operands.pop("x"), packed(), **operands)


def test_what_a_format_does_not_have_is_refused_at_each_call():
    """Kernels do not take it, so that they cannot refuse it."""
    weight = packed("w4a16_g32")
    for zeros in (None, torch.zeros_like(weight.scales)):
        given = (X, weight.weight, weight.scales, zeros, None, None, BIAS, R, None, N, K, "w4a16_g32", BF16)
        if zeros is None:
            PARTS(*given)
            continue
        with pytest.raises(ValueError, match=r"zeros is bfloat16 .*w4a16_g32 has none; pass None"):
            PARTS(*given)
