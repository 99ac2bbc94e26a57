"""What follows a product: which parts, in which order, and the operands that they bring."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from sample.two_levels import FORMAT as TWO_LEVELS

from tilebit.layouts.formats import PER_CHANNEL, GemmFormat, QuantFormat
from tilebit.schedules.gemm.parts import Part, parts
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operands import kernel_params, present

GROUPS, CHANNEL, NVFP4 = QuantFormat(4, 128, True), QuantFormat(8, PER_CHANNEL, False), GemmFormat.parse("w4a16_nvfp4")
SCALES = Part("scales", "multiply", "float16")
ROW_SCALES = Part("row_scales", "multiply", "float32")
TOKEN_SCALES = Part("token_scales", "multiply", "float32", axis="m", packed=False)
BIAS = Part("bias", "add", "float16", packed=False)


@pytest.mark.parametrize(
    ("format", "bias", "expected"),
    [
        (GROUPS, False, ()),
        (GROUPS, True, (BIAS,)),
        (CHANNEL, False, (SCALES,)),
        (CHANNEL, True, (SCALES, BIAS)),
        (TWO_LEVELS, False, (ROW_SCALES,)),
        (TWO_LEVELS, True, (ROW_SCALES, BIAS)),
        (NVFP4, True, (ROW_SCALES, BIAS)),
    ],
)
def test_a_product_has_its_parts_in_order(format: GemmFormat, bias: bool, expected: tuple[Part, ...]):
    assert parts(Workload(1, 100, 256, format, "float16", bias)) == expected


@pytest.mark.parametrize("format", [GROUPS, CHANNEL, NVFP4])
def test_token_scales_come_after_those_of_the_weight_and_before_the_bias(format: GemmFormat):
    """They are operands of products that have them alone; what was stored of others says nothing of them."""
    plain, scaled = (Workload(3, 100, 256, format, bias=True, token_scales=there) for there in (False, True))
    assert parts(scaled) == (*parts(plain)[:-1], TOKEN_SCALES, BIAS)
    names = [o.name for o in plain.operands("sm_90a")]
    assert [o.name for o in scaled.operands("sm_90a")] == [*names[: names.index("bias")], "token_scales", *names[names.index("bias") :]]
    assert next(o for o in scaled.operands("cpu") if o.name == "token_scales").shape == ("m",)
    assert "token_scales" not in plain.to_json() and Workload.from_json(plain.to_json()) == plain
    assert Workload.from_json(scaled.to_json()) == scaled != plain
    assert scaled.bytes == plain.bytes + 3 * 4 and scaled.served != plain.served


def test_a_residual_comes_after_the_bias_and_has_both_axes():
    plain, added = (Workload(3, 100, 256, GROUPS, "bfloat16", bias=True, residual=there) for there in (False, True))
    assert parts(added) == (*parts(plain), Part("residual", "add", "bfloat16", axis="mn", packed=False))
    assert [o.shape for o in added.operands("sm_90a") if o.name == "residual"] == [("m", 100)]
    assert "residual" not in [o.name for o in plain.operands("sm_90a")]
    assert kernel_params(added.operands("cpu"), True)[-3:] == ("residual", "workspace", "y")
    assert added.bytes == plain.bytes + 2 * 3 * 100


def test_a_gate_halves_y_and_a_norm_has_its_weight():
    gated, normed = Workload(3, 96, 250, GROUPS, gate="silu"), Workload(3, 96, 250, GROUPS, norm=True, eps=1e-5)
    assert gated.columns == 48 and gated.operands("cpu")[-1].shape == ("m", 48)
    for arch, columns in (("cpu", 250), ("sm_90a", 256)):
        assert [o.shape for o in normed.operands(arch) if o.name == "norm_weight"] == [(columns,)]
    halved = replace(gated, n=128, gate_halves=True)
    assert halved.columns == 64 and halved.served == gated.served.replace("96x", "128x") + " in halves"
    for w in (gated, normed, replace(gated, norm=True, eps=0.5), halved):
        plain = replace(w, gate="", gate_halves=False, norm=False, eps=0.0)
        assert Workload.from_json(w.to_json()) == w and w.served != plain.served
        assert {"gate", "gate_halves", "norm", "eps"}.isdisjoint(plain.to_json())
        assert w.to_json()["eps"] == w.eps if w.norm else "eps" not in w.to_json()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"gate": "relu"}, "gate is 'relu'; accepted: '', 'silu', 'gelu_tanh', 'gelu'"),
        ({"gate": "silu", "n": 104}, "n is 104 with a gate; accepted: multiples of 16"),
        (
            {"gate": "silu", "gate_halves": True, "n": 96},
            "gate_halves goes with gate 'silu' and n = 96; accepted: a gate, and multiples of 64",
        ),
        ({"gate_halves": True, "n": 128}, "gate_halves goes with gate ''"),
        ({"gate": "silu", "residual": True}, "accepted: one of them"),
        ({"width": 200, "residual": True}, "accepted: one of them"),
        ({"nibbles": True}, "nibbles goes with n = 96, width 0 and w4a16_g128; accepted: multiples of 16 rows with a width"),
        ({"nibbles": True, "width": 60}, "in a format of 4 bits with int8 x"),
        ({"nibbles": True, "width": 60, "n": 104, "format": GemmFormat.parse("w4a8_g128_asym")}, "accepted: multiples of 16 rows"),
        (
            {"norm": True, "format": GemmFormat.parse("w4a8_lqq_g128")},
            "a norm goes with w4a8_lqq_g128; accepted: formats with x of 16 bits",
        ),
        ({"norm": True, "eps": -1.0}, "eps is -1.0; accepted: a finite number from 0"),
        ({"eps": 1e-5}, "eps is 1e-05; accepted: a finite number from 0, without a norm 0"),
    ],
)
def test_what_no_product_has(changed: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=re.escape(says)):
        Workload(**{"m": 3, "n": 96, "k": 256, "format": GROUPS, **changed})


def test_nibbles_of_bytes_are_a_product_of_their_own():
    """What was stored of products whose rows may be anything says the same of them."""
    rows = Workload(3, 96, 256, GemmFormat.parse("w4a8_g128_asym"), width=60)
    nibbles = replace(rows, nibbles=True)
    assert rows != nibbles and rows.served != nibbles.served and nibbles.options() == f"{rows.options()} --nibbles"
    assert "nibbles" not in rows.to_json()
    for workload in (rows, nibbles):
        assert Workload.from_json(workload.to_json()) == workload
    assert [o.name for o in rows.operands("sm_90a")] == [o.name for o in nibbles.operands("sm_90a")] and rows.bytes == nibbles.bytes


@pytest.mark.parametrize("applied", [(), ("scales",), ("bias", "scales")])
def test_what_the_loop_has_applied_is_left_out(applied: tuple[str, ...]):
    left = parts(Workload(1, 100, 256, CHANNEL, bias=True), applied)
    assert left == tuple(part for part in (SCALES, BIAS) if part.operand not in applied)


@pytest.mark.parametrize(("format", "bias", "arch"), [*product((GROUPS, CHANNEL, TWO_LEVELS, NVFP4), (False, True), ("cpu", "sm_90a"))])
def test_operands_follow_from_the_parts(format: GemmFormat, bias: bool, arch: str):
    """In their order, each where a product has the part, as long as what it belongs to; absent ones are no parameters."""
    workload = Workload(3, 100, 256, format, "bfloat16", bias)
    stated = {o.name: o for o in workload.operands(arch)}
    assert list(stated) == ["x", "weight", "scales", "zeros", "row_scales", "bias", "y"]
    own = [part for part in parts(workload) if part.operand != "scales"]
    assert [name for name in ("row_scales", "bias") if not stated[name].absent] == [part.operand for part in own]
    n_pad = stated["scales"].shape[1]
    for part in parts(workload):
        operand = stated[part.operand]
        assert operand.dtype == part.dtype and operand.shape[-1] == (n_pad if part.packed else 100)
    assert set(kernel_params(workload.operands(arch), False)) == {o.name for o in present(workload.operands(arch))}


def test_row_scales_count_as_bytes_of_the_weight():
    plain, scaled = (Workload(1, 100, 256, f) for f in (QuantFormat(4, 64, False), TWO_LEVELS))
    assert scaled.weight_bytes == plain.weight_bytes + 100 * 4


def test_a_format_of_two_levels_is_not_taken_for_one_of_one():
    """What is stored of it is its name, and what is printed makes it again."""
    assert GemmFormat.from_json(TWO_LEVELS.to_json()) == TWO_LEVELS != QuantFormat(4, 64, False)
    assert eval(repr(TWO_LEVELS)) == TWO_LEVELS
