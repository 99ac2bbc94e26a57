"""Quantized activations through the door: the public function and the operator behind it, on the CPU's own kernels."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from defined_quantize import DefinedQuantize
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tilebit
from tilebit.autotune.problems.activations import quantized
from tilebit.ops import plans
from tilebit.ops import quantize as quantize  # registers the operator
from tilebit.schedules.activations.workload import QuantizeWorkload

K = 200
OP = torch.ops.tilebit.quantize


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> DefinedQuantize:
    found = DefinedQuantize()
    monkeypatch.setattr(plans, "find_kernel", found.find)
    monkeypatch.setattr(plans, "held", {})
    return found


def options(dtype: torch.dtype = torch.float16) -> dict[str, Any]:
    return {"norm_weight": 1 + torch.randn(K).to(dtype) / 4, "eps": 1e-5, "smooth": torch.rand(K) + 0.5}


def expected(x: Tensor, out: str, group: int | None, norm_weight: Tensor | None = None, eps: float = 1e-6, smooth: Tensor | None = None):
    size, name = -1 if group is None else group, str(x.dtype).removeprefix("torch.")
    w = QuantizeWorkload(1, x.shape[-1], name, out, size, norm_weight is not None, eps, smooth is not None)
    codes, scales = quantized(x.reshape(-1, x.shape[-1]), w, {"norm_weight": norm_weight, "smooth": smooth})  # type: ignore[dict-item]
    return codes.view(x.shape), scales.view((*scales.shape[:-1], *x.shape[:-1]))


def same(found: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> bool:
    return torch.equal(found[0].view(torch.int8), right[0]) and torch.equal(found[1], right[1])


@pytest.mark.parametrize(("out", "group"), [("int8", None), pytest.param("e4m3", 128, marks=pytest.mark.slow)])
def test_a_call_from_end_to_end(out: str, group: int | None):
    """With a compiled kernel."""
    x = torch.randn(2, 5, K).bfloat16()
    codes, scales = tilebit.quantize_activations(x, out, group)
    assert codes.dtype is (torch.int8 if out == "int8" else torch.float8_e4m3fn) and scales.dtype is torch.float32
    assert codes.shape == x.shape and scales.shape == ((2, 5) if group is None else (2, 2, 5))
    assert same((codes, scales), expected(x, out, group))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("out", ["int8", "e4m3"])
@pytest.mark.parametrize("group", [None, 128])
def test_everything_that_may_be_asked_for(kernels: DefinedQuantize, dtype: torch.dtype, out: str, group: int | None):
    wide = torch.randn(7, 3, 2 * K + 3).to(dtype)
    for x in (wide[..., :K], wide[::2, :, 3 : K + 3], wide[0, 0, :K], wide.transpose(0, 1)[..., -K:], wide[:0, :, :K]):
        for chosen in ({}, options(dtype)):
            found = tilebit.quantize_activations(x, out, group, **chosen)
            assert same(found, expected(x, out, group, **chosen))
            assert found[0].is_contiguous() and found[1].is_contiguous()


def test_every_field_is_part_of_the_key(kernels: DefinedQuantize):
    usual: dict[str, Any] = {"x": torch.randn(4, K).half(), "norm_weight": torch.ones(K).half()}
    others: dict[str, dict[str, Any]] = {
        "m": {"x": torch.randn(5, K).half()},
        "k": {"x": torch.randn(4, K + 1).half(), "norm_weight": torch.ones(K + 1).half()},
        "dtype": {"x": torch.randn(4, K).bfloat16(), "norm_weight": torch.ones(K).bfloat16()},
        "out": {"out": "e4m3"},
        "group": {"group": 128},
        "norm": {"norm_weight": None},
        "eps": {"eps": 1e-3},
        "smooth": {"smooth": torch.ones(K)},
    }
    assert set(others) == {f.name for f in fields(QuantizeWorkload)} - {"residual", "offset", "gate"}, "those of test_rows_to_codes"
    tilebit.quantize_activations(**usual)
    first = kernels.asked[-1].to_json()
    for name, change in others.items():
        asked = len(kernels.asked)
        for _ in range(2):
            tilebit.quantize_activations(**{**usual, **change})
        tilebit.quantize_activations(**usual)
        assert len(kernels.asked) == asked + 1, name
        assert {field for field, value in kernels.asked[-1].to_json().items() if value != first[field]} == {name}


def test_dependent_launch_is_for_rows_that_are_read_as_they_lie(kernels: DefinedQuantize):
    x = torch.randn(4, 2 * K).half()
    tilebit.quantize_activations(x, dependent=True)
    tilebit.quantize_activations(x[:, :K], dependent=True)
    tilebit.quantize_activations(x)
    assert kernels.early == [True, False, False]


def test_it_is_an_operator(kernels: DefinedQuantize):
    x = torch.randn(6, K).half()
    for args in ((x, None, None), (x, *map(options().get, ("norm_weight", "smooth")), "int8", 128)):
        torch.library.opcheck(OP.default, args)
    codes, scales = OP(x.to("meta"), None, None, "e4m3", 128)
    assert codes.dtype is torch.float8_e4m3fn and codes.shape == x.shape and scales.shape == (2, 6)


@pytest.mark.slow
def test_it_compiles_for_any_number_of_rows(kernels: DefinedQuantize):
    chosen = options()

    def layer(x: Tensor) -> Tensor:
        codes, scales = tilebit.quantize_activations(x, "e4m3", 128, **chosen)
        return codes.float() * scales.t().repeat_interleave(128, 1)[:, :K]

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (3, 8):
        x = torch.randn(m, K).half()
        assert torch.equal(compiled(x), layer(x))


def test_derivatives_are_refused(kernels: DefinedQuantize):
    x, weight = torch.randn(3, K).half(), torch.ones(K).half()
    with pytest.raises(ValueError, match=r"a derivative with respect to x is asked for; tilebit\.quantize has no derivatives"):
        tilebit.quantize_activations(x.requires_grad_())
    with pytest.raises(ValueError, match="a derivative with respect to norm_weight"):
        tilebit.quantize_activations(x.detach(), norm_weight=weight.requires_grad_())
    with torch.no_grad():
        tilebit.quantize_activations(x, norm_weight=weight)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": torch.ones(2, K)}, ValueError, r"x is float32 \[2, 200\] on cpu; accepted: float16 or bfloat16 \[..., k\] with k >= 1"),
        ({"x": torch.tensor(1.0).half()}, ValueError, r"x is float16 \[\] on cpu; accepted"),
        ({"x": torch.ones(2, 0).half()}, ValueError, r"x is float16 \[2, 0\] on cpu; accepted"),
        ({"x": [1.0]}, TypeError, "x is list"),
        ({"out": "int4"}, ValueError, "out is 'int4' and group -1; accepted: out 'int8' or 'e4m3', group 128 or -1"),
        ({"out": torch.int8}, TypeError, "out is dtype 'torch.int8'; accepted: 'int8' or 'e4m3'"),
        ({"group": 64}, ValueError, "group 64; accepted: .* group 128 or -1"),
        ({"group": "128"}, TypeError, "group is str '128'; accepted: 128, or None"),
        ({"norm_weight": torch.ones(K)}, ValueError, r"norm_weight is float32 \[200\] on cpu; accepted .*: float16 \[200\] on cpu"),
        ({"norm_weight": torch.ones(K - 1).half()}, ValueError, r"norm_weight is float16 \[199\]"),
        ({"smooth": torch.ones(K).half()}, ValueError, r"smooth is float16 \[200\] on cpu; accepted .*: float32 \[200\] on cpu"),
        ({"norm_weight": torch.ones(K).half(), "eps": -1.0}, ValueError, r"eps is -1.0; accepted: finite numbers from 0"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(kernels: DefinedQuantize, change: dict[str, Any], error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        tilebit.quantize_activations(**{"x": torch.ones(2, K).half(), **change})
    assert not kernels.early


def test_codes_on_cuda_are_whole_16_bytes():
    """What is promised without a GPU: shapes, by the operator's fake."""
    with FakeTensorMode():
        x = torch.empty(3, 2, K + 1, dtype=torch.float16, device="cuda")
        codes, scales = OP(x, None, None, "e4m3", 128)
        assert codes.shape == (3, 2, 208) and codes.dtype is torch.float8_e4m3fn and scales.shape == (2, 3, 2)
        assert codes.device == scales.device == x.device


@pytest.mark.gpu
@pytest.mark.parametrize("k", [K, K + 1, 4096])
def test_a_call_on_a_gpu(k: int):
    """Padding, strides, a graph."""
    wide = torch.randn(5, 2 * k).half().cuda()
    smooth = torch.rand(k, device="cuda") + 0.5
    for x in (wide[:, :k], wide[:, k:].contiguous()):
        for group in (None, 128):
            codes, scales = tilebit.quantize_activations(x, "int8", group, smooth=smooth, dependent=True)
            right = expected(x, "int8", group, smooth=smooth)
            assert codes.shape == (5, -(-k // 16) * 16) and not codes[:, k:].any()
            assert same((codes[:, :k], scales), right)
    x = wide[:, :k].contiguous()
    graph, given = torch.cuda.CUDAGraph(), torch.randn_like(x)
    tilebit.quantize_activations(x)
    with torch.cuda.graph(graph):
        codes, scales = tilebit.quantize_activations(x)
    x.copy_(given)
    graph.replay()
    assert same((codes[:, :k], scales), expected(given, "int8", None))
