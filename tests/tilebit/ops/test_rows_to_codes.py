"""Norms of the residual sum and gates that give codes: the same as one step after the other, bit for bit."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from defined_quantize import DefinedQuantize
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tilebit
from tilebit.autotune.problems.glue import gated_reference
from tilebit.ops import plans
from tilebit.ops import rows_to_codes as rows_to_codes  # registers the operators
from tilebit.schedules.activations.workload import QuantizeWorkload

K = 200
NORM, GATED = torch.ops.tilebit.add_norm_quantize, torch.ops.tilebit.gated_quantize


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> DefinedQuantize:
    found = DefinedQuantize()
    monkeypatch.setattr(plans, "find_kernel", found.find)
    monkeypatch.setattr(plans, "held", {})
    return found


def rows(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype and a.shape == b.shape and torch.equal(a.reshape(-1).view(torch.int8), b.reshape(-1).view(torch.int8))


def check_norm(x: Tensor, residual: Tensor | None, out: str, group: int | None, smooth: Tensor | None, inplace: bool = False) -> None:
    weight = 1 + rows(x.shape[-1], dtype=x.dtype) / 4
    total = x if residual is None else x + residual
    codes, scales, new = tilebit.add_norm(x, residual, weight, 1e-5, inplace=inplace, out=out, group=group, smooth=smooth)
    right = tilebit.quantize_activations(total, out, group, weight, 1e-5, smooth)
    assert same(codes, right[0]) and same(scales, right[1])
    assert new is None if residual is None else new is not None and same(new, total) and (new is residual) == inplace


@pytest.mark.parametrize(("out", "group"), [("int8", None), pytest.param("e4m3", 128, marks=pytest.mark.slow)])
def test_calls_from_end_to_end(out: str, group: int | None):
    """With compiled kernels: of what comes in, and of what takes its place."""
    x, residual, gates = rows(3, 5, K), rows(3, 5, K) * 3, rows(4, 2 * K)
    check_norm(x, residual, out, group, torch.rand(K) + 0.5)
    codes, scales = tilebit.gated(gates, "gelu_tanh", out=out, group=group)
    y = tilebit.gated(gates, "gelu_tanh")
    right = tilebit.quantize_activations(y, out, group)
    near = scales / right[1] - 1
    assert near.abs().max() <= 2**-10 and (codes.float() - right[0].float()).abs().max() <= (1 if out == "int8" else 32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("out", ["int8", "e4m3"])
@pytest.mark.parametrize("group", [None, 128])
def test_everything_that_may_be_asked_for(kernels: DefinedQuantize, dtype: torch.dtype, out: str, group: int | None):
    wide, smooth = rows(7, 3, 2 * K + 3, dtype=dtype), torch.rand(K) + 0.5
    for x in (wide[..., :K], wide[::2, :, 3 : K + 3], wide[0, 0, :K], wide.transpose(0, 1)[..., -K:], wide[:0, :, :K]):
        for chosen in (None, smooth):
            for inplace in (False, True):
                held = rows(*x.shape, dtype=dtype) * 3
                before = held.clone()
                check_norm(x, held, out, group, chosen, inplace)
                assert inplace or same(held, before)
            check_norm(x, None, out, group, chosen)
    for x in (wide[..., : 2 * K], wide[:, 0, 3:], wide[0, 0, 1:-2], wide[:0, :, 3:]):
        for activation in ("silu", "gelu_tanh"):
            codes, scales = tilebit.gated(x, activation, out=out, group=group, smooth=smooth)
            y = gated_reference(x, activation)
            right = tilebit.quantize_activations(y, out, group, smooth=smooth)
            assert same(codes, right[0]) and same(scales, right[1])


def test_what_is_asked_for_is_part_of_the_key(kernels: DefinedQuantize):
    x, weight, smooth = rows(4, K), torch.ones(K).half(), torch.ones(K)

    def norm(**changed: Any) -> None:
        given = {"x": x, "residual": x.clone(), "weight": weight, "out": "int8", **changed}
        tilebit.add_norm(**given)

    def gate(**changed: Any) -> None:
        tilebit.gated(**{"x": rows(4, 2 * K), "out": "int8", **changed})

    wide = rows(4, K + 1)
    shared: dict[str, dict[str, Any]] = {"out": {"out": "e4m3"}, "group": {"group": 128}, "smooth": {"smooth": smooth}}
    ways: tuple[tuple[Any, dict[str, dict[str, Any]]], ...] = (
        (norm, shared | {
            "m": {"x": rows(5, K), "residual": rows(5, K)},
            "k": {"x": wide, "residual": wide.clone(), "weight": torch.ones(K + 1).half()},
            "dtype": {"x": x.bfloat16(), "residual": x.bfloat16(), "weight": weight.bfloat16()},
            "residual": {"residual": None}, "eps": {"eps": 1e-3}, "offset": {"offset": 1.0},
        }),
        (gate, shared | {"m": {"x": rows(5, 2 * K)}, "k": {"x": rows(4, 2 * K + 2)}, "dtype": {"x": rows(4, 2 * K, dtype=torch.bfloat16)},
                         "gate": {"activation": "gelu_tanh"}}),
    )  # fmt: skip
    assert {name for _, others in ways for name in others} == {f.name for f in fields(QuantizeWorkload)} - {"norm"}
    for call, others in ways:
        call()
        first = kernels.asked[-1]
        for name, change in others.items():
            asked = len(kernels.asked)
            for _ in range(2):
                call(**change)
            call()
            assert len(kernels.asked) == asked + 1, name
            assert {f.name for f in fields(first) if getattr(kernels.asked[-1], f.name) != getattr(first, f.name)} == {name}


def test_dependent_launch_is_for_rows_that_are_read_as_they_lie(kernels: DefinedQuantize):
    x, held, weight = rows(4, 2 * K), rows(4, K), torch.ones(K).half()
    dense = x[:, :K].contiguous()
    tilebit.add_norm(dense, held, weight, inplace=True, dependent=True, out="int8")
    tilebit.add_norm(dense, held, weight, dependent=True, out="int8")  # after a copy of the residual
    tilebit.add_norm(x[:, :K], held, weight, inplace=True, dependent=True, out="int8")
    tilebit.gated(x, dependent=True, out="int8")
    tilebit.gated(x[:, : K + K // 2], dependent=True, out="int8")
    tilebit.gated(x, out="int8")
    assert kernels.early == [True, False, False, True, False, False]


def test_they_are_operators(kernels: DefinedQuantize):
    x, held, weight, smooth = rows(6, K), rows(6, K), torch.ones(K).half(), torch.rand(K) + 0.5
    torch.library.opcheck(NORM.default, (x, held, weight), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(NORM.default, (x, None, weight, smooth, "e4m3", 128))
    torch.library.opcheck(GATED.default, (x, smooth[: K // 2], "gelu_tanh", "e4m3", 128))
    with FakeTensorMode():
        x = torch.empty(3, 2, 2 * K + 2, dtype=torch.float16, device="cuda")
        codes, scales = tilebit.gated(x, out="e4m3", group=128)
        assert codes.shape == (3, 2, 208) and codes.dtype is torch.float8_e4m3fn and scales.shape == (2, 3, 2)
        codes, scales, new = tilebit.add_norm(x, x, torch.empty(2 * K + 2, dtype=torch.float16, device="cuda"), out="int8")
        assert codes.shape == (3, 2, 416) and scales.shape == (3, 2) and new is not None and new.shape == x.shape


def test_both_trace_and_keep_the_residual(kernels: DefinedQuantize):
    x, weight = rows(3, K), torch.ones(K).half()

    def layer(x: Tensor, residual: Tensor, inplace: bool) -> tuple[Tensor, ...]:
        codes, scales, held = tilebit.add_norm(x, residual, weight, inplace=inplace, out="int8")
        assert held is not None
        return codes, scales, held, *tilebit.gated(held, out="e4m3", group=128)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for inplace in (False, True):
        a, b = rows(3, K) * 2, rows(3, K) * 2
        assert all(same(found, right) for found, right in zip(compiled(x, a, inplace), layer(x, b, inplace), strict=True))
        assert same(a, b), "the residual of the caller: written, or kept"


BAD: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    ({"x": torch.ones(2, K)}, ValueError, r"x is float32 \[2, 200\]"),
    ({"weight": torch.ones(K - 1).half()}, ValueError, r"weight is float16 \[199\]"),
    ({"residual": torch.ones(3, K).half()}, ValueError, r"residual is float16 \[3, 200\]"),
    ({"residual": torch.ones(K, 2).half().t(), "inplace": True}, ValueError, "accepted in place: a contiguous one"),
    ({"smooth": torch.ones(K).half()}, ValueError, r"smooth is float16 \[200\].*float32 \[200\]"),
    ({"smooth": 2.0}, TypeError, "smooth is float"),
    ({"out": "int4"}, ValueError, "out is 'int4'"),
    ({"out": None, "group": 128}, TypeError, "out is NoneType 'None'; accepted: 'int8' or 'e4m3' where group or smooth is given"),
    ({"out": None, "smooth": torch.ones(K)}, TypeError, "out is NoneType"),
    ({"group": 64}, ValueError, "group 64"),
    ({"group": "128"}, TypeError, "group is str"),
    ({"eps": -1.0}, ValueError, "eps is -1.0"),
    ({"offset": float("nan")}, ValueError, "offset is nan"),
)


@pytest.mark.parametrize(("change", "error", "words"), BAD)
def test_what_does_not_fit_is_named_and_changes_nothing(
    kernels: DefinedQuantize, change: dict[str, Any], error: type[Exception], words: str
):
    usual = {"x": torch.ones(2, K).half(), "residual": torch.ones(2, K).half(), "weight": torch.ones(K).half(), "out": "int8"}
    given = {**usual, "inplace": True, **change}
    before = given["residual"].clone()
    with pytest.raises(error, match=words):
        tilebit.add_norm(**given)
    assert torch.equal(given["residual"], before) and not kernels.early
    if not change.keys() & {"weight", "residual", "eps", "offset"}:
        x = change.get("x", torch.ones(2, 2 * K).half())
        with pytest.raises(error, match=words):
            tilebit.gated(x, **{name: given[name] for name in ("out", "group", "smooth") if name in given})


def test_numbers_of_a_norm_are_refused_where_torch_computes_it():
    held = torch.ones(2, K).half()
    for eps, offset in ((-1.0, 0.0), (float("nan"), 0.0), (1e-6, float("inf"))):
        with pytest.raises(ValueError, match="accepted: finite numbers, eps from 0"):
            tilebit.add_norm(torch.ones(2, K).half(), held, torch.ones(K).half(), eps, offset, inplace=True)
    assert (held == 1).all()


def test_derivatives_are_refused(kernels: DefinedQuantize):
    x, weight = rows(3, K).requires_grad_(), torch.ones(K).half()
    with pytest.raises(ValueError, match=r"a derivative with respect to x is asked for; tilebit\.add_norm_quantize has no derivatives"):
        tilebit.add_norm(x, None, weight, out="int8")
    with pytest.raises(ValueError, match=r"tilebit\.gated_quantize has no derivatives"):
        tilebit.gated(x, out="int8")


@pytest.mark.gpu
@pytest.mark.parametrize("k", [K, K + 1, 4096])
def test_calls_on_a_gpu(k: int):
    """Padding, strides, the residual in place, a graph."""
    wide, held, weight = rows(5, 2 * k).cuda(), rows(5, k).cuda(), torch.ones(k).half().cuda()
    for x in (wide[:, :k], wide[:, k:].contiguous()):
        for group in (None, 128):
            total = x + held
            codes, scales, new = tilebit.add_norm(x, held, weight, dependent=True, out="int8", group=group)
            right = tilebit.quantize_activations(total, "int8", group, weight)
            assert same(codes, right[0]) and same(scales, right[1]) and new is not None and same(new, total)
    for activation in ("silu", "gelu_tanh"):
        codes, scales = tilebit.gated(wide, activation, out="int8", group=128)
        right = tilebit.quantize_activations(tilebit.gated(wide, activation), "int8", 128)
        if k % 8 == 0:
            assert same(codes, right[0]) and same(scales, right[1]), "the same device function, bit for bit"
        assert (scales / right[1] - 1).abs().max() <= 2**-10 and not codes[:, k:].any()
    x = wide[:, :k].contiguous()
    graph, given = torch.cuda.CUDAGraph(), torch.randn_like(x)
    kept = held.clone()
    tilebit.add_norm(x, kept, weight, inplace=True, out="int8")
    kept.copy_(held)
    with torch.cuda.graph(graph):
        codes, scales, _ = tilebit.add_norm(x, kept, weight, inplace=True, out="int8")
    x.copy_(given)
    for _ in range(2):
        kept.add_(0)
        before = kept.clone()
        graph.replay()
        assert same(kept, before + given)
        right = tilebit.quantize_activations(kept, "int8", None, weight)
        assert same(codes, right[0]) and same(scales, right[1])


@pytest.mark.parametrize("out", [None, "int8"])
def test_a_residual_lies_in_memory_of_its_own(kernels, out: str | None):
    """Or is x itself: else rows of x would be read when others have been written over them."""
    z, weight = rows(5, 64), 1 + rows(64) / 4
    before = z.clone()
    for x, residual in ((z[:4], z[1:]), (z[1:], z[:4]), (z[:4, :1].expand(4, 64), z[:4])):
        with pytest.raises(ValueError, match="x and residual lie in the same memory in part; accepted in place: memory of"):
            tilebit.add_norm(x, residual, weight, inplace=True, out=out)
        assert torch.equal(z, before) and not kernels.early
    tilebit.add_norm(z[:2], z[2:4], weight, inplace=True, out=out)
    assert torch.equal(z[2:4], before[:2] + before[2:4])
    tilebit.add_norm(z, z, weight, inplace=True, out=out)
    assert torch.equal(z[:2], 2 * before[:2])
