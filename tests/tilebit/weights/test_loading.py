"""What a state_dict may hold for a QuantLinear: each entry is checked, and what is refused changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from door_cases import FORMATS, TORCH_DTYPES, K, N
from torch import nn

from tilebit import QuantFormat, QuantizedTensor, QuantLinear
from tilebit.weights.packed import pack
from tilebit.weights.quantize import quantize


def made(case: tuple[str, str, bool], seed: int = 0) -> QuantLinear:
    torch.manual_seed(seed)
    name, dtype, bias = case
    return QuantLinear.from_float(nn.Linear(K, N, bias=bias), name, dtype=TORCH_DTYPES[dtype])


def _loads(state: dict[str, Any], says: str | None, like: tuple[str, str, bool] = FORMATS[1], **options: Any) -> None:
    """Into a layer of this kind; one that is refused (which ``says`` why) keeps every buffer."""
    layer = made(like, 1)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    if says is None:
        layer.load_state_dict(dict(state), **options)  # torch keeps the word of ``assign`` with a state_dict
        return
    with pytest.raises(RuntimeError, match=says):
        layer.load_state_dict(dict(state), **options)
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ["weight", "scales", "zeros", "bias"])
def test_each_entry_of_a_state_dict_is_checked(name, strict):
    state = made(FORMATS[1]).state_dict()
    good = state[name]
    integers = (torch.int64, torch.uint8, torch.bool)
    wrong = [
        good.to(dtype) for dtype in (*integers, *((torch.float32, torch.float16, torch.bfloat16) if name == "weight" else (torch.int32,)))
    ]
    for value in [*wrong, good[1:], good[None], torch.cat((good, good))]:
        for options in ({"strict": strict}, {"strict": strict, "assign": True}):
            dtype = str(value.dtype).removeprefix("torch.")
            _loads({**state, name: value}, rf"{name} is {dtype} .*this module needs (int32|floating point) \[", **options)
    _loads({**state, name: good.tolist()}, f"{name} is list; this module needs a tensor", strict=strict)
    if name != "bias":
        _loads({key: value for key, value in state.items() if key != name}, f"but not {name}; accepted: all or none", strict=strict)
    _loads(state, None, strict=strict)


def test_a_state_dict_without_its_description_is_refused():
    state = made(FORMATS[1]).state_dict()
    del state["_extra_state"]
    _loads(state, "but not _extra_state; accepted: all or none", strict=False)
    _loads({}, None, strict=False)
    _loads({"bias": state["bias"]}, None, strict=False)


def test_numbers_that_do_not_fit_the_layer_are_refused():
    """Other floating-point types are cast as torch does, as long as the numbers stay what they are."""
    state = made(FORMATS[1]).state_dict()  # bfloat16
    _loads({**state, "scales": state["scales"].float(), "zeros": state["zeros"].half(), "bias": state["bias"].double()}, None)
    _loads({**state, "scales": state["scales"].double() * 1e42}, "scales is float64 .* do not fit this module's bfloat16: cast the module")
    _loads({**state, "scales": state["scales"].double() * 1e-60}, "scales is float64 .* do not fit this module's bfloat16")
    _loads({**state, "zeros": state["zeros"].float() + 1 / 4096}, "zeros is float32 .* do not fit")
    exact = ("w4a16_nvfp4", "float16", True)
    levels = made(exact).state_dict()
    _loads({**levels, "row_scales": levels["row_scales"].half()}, "row_scales is float16 .*this module needs float32", exact)
    _loads({**levels, "scales": levels["scales"].float() * (1 + 2**-12)}, "scales is float32 .* do not fit", exact)


def test_a_permutation_is_one():
    q = quantize(torch.randn(N, K), QuantFormat())
    q = QuantizedTensor(q.codes, q.scales, None, q.format, torch.randperm(K))
    layer = QuantLinear(pack(q, torch.float16))
    state = layer.state_dict()
    for perm in (torch.zeros(K, dtype=torch.int64), torch.arange(K) + 1, torch.arange(K, dtype=torch.int32)):
        with pytest.raises(RuntimeError, match=r"perm is int(64|32) .*(permutation|needs int64)"):
            layer.load_state_dict({**state, "perm": perm})
    layer.load_state_dict(state)


@pytest.mark.parametrize("options", [{"strict": True}, {"strict": False}, {"strict": False, "assign": True}])
def test_codes_and_the_order_of_their_columns_come_together(options):
    """Codes of one layer in the order of another are numbers of none."""
    q = quantize(torch.randn(N, K), QuantFormat())
    plain, ordered = (
        QuantLinear(pack(QuantizedTensor(q.codes, q.scales, None, q.format, perm), torch.float16)) for perm in (None, torch.randperm(K))
    )
    other = made(FORMATS[0], 1).state_dict()
    states = {"alone": {"perm": torch.randperm(K)}, "without": plain.state_dict(), "other": other}
    cases = [(plain, ordered.state_dict(), "has perm, an order of the columns"), (ordered, states["alone"], "has perm but not")]
    cases += [(ordered, states[name], "has weight but not perm") for name in ("without", "other")]
    for layer, state, says in cases:
        before = {name: value.clone() for name, value in layer.state_dict().items()}
        with pytest.raises(RuntimeError, match=says):
            layer.load_state_dict(dict(state), **options)
        assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())
    fresh = QuantLinear(pack(QuantizedTensor(q.codes, q.scales, None, q.format, torch.arange(K)), torch.float16))
    fresh.load_state_dict(ordered.state_dict(), **options)
    assert torch.equal(fresh.unpack().dequantize(), ordered.unpack().dequantize())


def test_zero_points_are_codes():
    state = made(FORMATS[1]).state_dict()
    for zeros in (
        state["zeros"] + 0.5,
        torch.full_like(state["zeros"], 16),
        -state["zeros"] - 1,
        torch.full_like(state["zeros"], float("nan")),
    ):
        for assign in (False, True):
            _loads({**state, "zeros": zeros}, "zeros is bfloat16 .* no codes; this module needs whole numbers from 0 to 15", assign=assign)


def test_scales_are_finite():
    state = made(FORMATS[1]).state_dict()
    for value in (float("nan"), float("inf")):
        _loads({**state, "scales": torch.full_like(state["scales"], value)}, "scales is bfloat16 .* NaN or infinite values")


def test_tensors_that_take_the_buffers_place_are_of_the_layer():
    """A copy casts them; ``assign`` does not, and so the layer must compute with what it gets."""
    case = ("w4a16_g128", "float16", True)
    state = made(case).state_dict()
    _loads(state, None, case, assign=True)
    _loads(
        {**state, "scales": state["scales"].float()}, "scales is float32 .* takes float16 or bfloat16: load it without", case, assign=True
    )
    strided = state["scales"].t().contiguous().t()
    _loads({**state, "scales": strided}, "scales is float16 .*, not contiguous; with assign=True", case, assign=True)
    _loads({**state, "scales": strided}, None, case)
    _loads({**state, "bias": state["bias"].bfloat16()}, "bias is bfloat16 .* takes float16: load it without", case, assign=True)
    for name in ("w4a8_lqq_g64", "w8a8_fp8"):
        case, other = (name, "float16", True), made((name, "bfloat16", True)).state_dict()
        _loads(other, "bias is bfloat16 .* takes float16: load it without", case, assign=True)
        _loads(other, None, case)
    taken = made(("w4a16_g128", "float16", True))
    taken.load_state_dict(made(("w4a16_g128", "bfloat16", True)).state_dict(), assign=True)
    assert taken.dtype is torch.bfloat16 and taken(torch.zeros(1, K, dtype=torch.bfloat16)).dtype is torch.bfloat16
