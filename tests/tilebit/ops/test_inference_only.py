"""Attention has no derivatives: whoever asks for one is told, of every operand, before a launch and
before the cache changes. Lazy signs are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from defined_kernels import DefinedKernels
from torch import Tensor

from tilebit import attention
from tilebit.cache.kvcache import KVCache
from tilebit.layouts.kv import RESIDUAL
from tilebit.ops import attention as attention_ops
from tilebit.ops import plans

HEADS_Q, HEADS, DIM = 4, 2, 64
CU = torch.tensor([0, 5], dtype=torch.int32)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> DefinedKernels:
    found = DefinedKernels()
    monkeypatch.setattr(plans, "find_kernel", found.find)
    monkeypatch.setattr(plans, "held", {})
    return found


def made() -> tuple[KVCache, dict[str, Tensor]]:
    """A cache of fp8 with a sequence of five tokens, and every operand that is floating point."""
    torch.manual_seed(0)
    cache = KVCache(2, 2, HEADS, DIM, "kvfp8")
    (sequence,) = cache.allocate(1)
    k, v = (torch.randn(5, HEADS, DIM).half() for _ in range(2))
    cache.append([sequence], k, v, cu_seqlens=[0, 5])
    assert cache.head_scales is not None
    operands = {"q": torch.randn(1, 1, HEADS_Q, DIM).half(), "rows": torch.randn(5, HEADS_Q, DIM).half(), "k": k, "v": v}
    return cache, {**operands, "sinks": torch.randn(HEADS_Q), "head_scales": cache.head_scales[0], "cos_sin": torch.rand(16, DIM)}


def call(op: str, cache: KVCache, o: dict[str, Tensor], raw: bool = False) -> Any:
    """A call of an op with these operands, by the function or by the operator."""
    batch = cache.batch([0])
    batch.refresh()
    held = (cache.pages[0], cache.windows[0], batch.block_tables, batch.slots, batch.lengths)
    tables = (batch.lengths, batch.block_tables, batch.slots)
    where: Any = torch.ops.tilebit if raw else attention
    f: Callable[..., Any] = getattr(where, f"attention_{op}" if raw else op)
    if op == "decode":
        return f(o["q"], *held, o["head_scales"], o["sinks"], "kvfp8", cache.page_size)
    if op == "append":
        kv = (o["k"], o["v"], CU, *tables, cache.pages[0], cache.windows[0])
        return f(*kv, o["head_scales"], o["cos_sin"], "kvfp8", cache.page_size, "half")
    if op == "pack":  # as if the window were full
        layered, full = (cache.all_pages, cache.all_windows), torch.full_like(batch.lengths, RESIDUAL)
        return f(*layered, *held[2:4], full, o["head_scales"][None], "kvfp8", cache.page_size, DIM, torch.float16)
    if op == "gather":
        return f(*held, CU, o["head_scales"], "kvfp8", cache.page_size, 5, DIM, torch.float16)
    return f(o["rows"], o["k"], o["v"], CU, CU, o["sinks"])


OPERANDS = [
    *(("decode", name) for name in ("q", "head_scales", "sinks")),
    *(("append", name) for name in ("k", "v", "head_scales", "cos_sin")),
    ("pack", "head_scales"),
    ("gather", "head_scales"),
    *(("prefill", name) for name in ("rows", "k", "v", "sinks")),
]


@pytest.mark.parametrize(("op", "name"), OPERANDS)
@pytest.mark.parametrize("way", ["backward", "grad", "jvp", "forward mode"])
@pytest.mark.parametrize("raw", [False, True], ids=["function", "operator"])
def test_every_derivative_is_refused(monkeypatch, op, name, way, raw):
    cache, operands = made()
    call(op, cache, operands)  # a plan is there: only the derivative is in the way
    before = cache.pages[0].clone(), cache.windows[0].clone()
    monkeypatch.setattr(plans.OperationPlan, "__init__", lambda *_: pytest.fail("a kernel was looked for"))

    def result(tensor: Tensor) -> Tensor:
        found = call(op, cache, {**operands, name: tensor}, raw)
        return tensor.sum() if found is None else found[0].float().sum()

    given = operands[name].clone()
    said = "q" if name == "rows" else name
    with pytest.raises(ValueError, match=rf"respect to {said} is asked for; tilebit.attention.{op} has no derivatives: pass {said}.detach"):
        if way == "backward":
            result(given.requires_grad_())
        elif way == "forward mode":
            with forward_ad.dual_level():
                result(forward_ad.make_dual(given, torch.ones_like(given)))
        elif way == "grad":
            torch.func.grad(result)(given)
        else:
            torch.func.jvp(result, (given,), (torch.ones_like(given),))
    assert torch.equal(cache.pages[0], before[0]) and torch.equal(cache.windows[0], before[1]), "nothing was written"
    with torch.no_grad():
        result(given)


@pytest.mark.parametrize("op", ["decode", "gather", "prefill"])
def test_out_variants_refuse_too(op):
    cache, o = made()
    batch = cache.batch([0])
    batch.refresh()
    held = (cache.pages[0], cache.windows[0], batch.block_tables, batch.slots, batch.lengths)
    scales = o["head_scales"].clone().requires_grad_()
    with pytest.raises(ValueError, match=r"is asked for; tilebit.attention.\w+ has no derivatives"):
        if op == "decode":
            torch.ops.tilebit.attention_decode.out(o["q"], *held, scales, None, "kvfp8", cache.page_size, out=torch.empty_like(o["q"]))
        elif op == "gather":
            outs = {"out_k": torch.empty_like(o["k"]), "out_v": torch.empty_like(o["v"])}
            attention_ops.GATHER_OUT(*held, CU, scales, "kvfp8", cache.page_size, **outs)
        else:
            rows = o["rows"].clone().requires_grad_()
            torch.ops.tilebit.attention_prefill.out(rows, o["k"], o["v"], CU, CU, None, out=torch.empty_like(o["rows"]))


def test_the_cache_refuses_too():
    cache, o = made()
    length = cache.length(0)
    with pytest.raises(ValueError, match=r"respect to q .* pass q.detach.* torch.no_grad"):
        cache.attend([0], o["q"].requires_grad_())
    with pytest.raises(ValueError, match=r"respect to k"):
        cache.append([0], o["k"][None, :1].clone().requires_grad_(), o["v"][None, :1])
    with torch.inference_mode():
        cache.attend([0], o["q"])
    assert length == 5


@pytest.mark.parametrize(("op", "name"), OPERANDS)
def test_lazy_signs_are_written_out(op, name):
    """Decided by the bits that come out, or that lie in the cache after an append or a pack."""
    for raw in (False, True):
        (cache, operands), (other, same) = made(), made()
        same[name] = torch._neg_view(-same[name])  # pyright: ignore[reportPrivateImportUsage]
        assert same[name].is_neg()
        expected, found = call(op, cache, operands), call(op, other, same, raw)
        if op in ("append", "pack"):
            expected, found = (cache.pages[0], cache.windows[0]), (other.pages[0], other.windows[0])
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_only_what_nothing_observes_goes_past_the_operator():
    """The same bits both ways."""
    cache, operands = made()
    expected = call("decode", cache, operands)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        observed = call("decode", cache, operands)
    assert "tilebit::attention_decode" in {event.key for event in profile.key_averages()}
    assert torch.equal(observed[0], expected[0])
