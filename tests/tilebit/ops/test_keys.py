"""What an operation's plans are found by: a call that differs in one field of its workload is another kernel's, and gives what it says."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from defined_kernels import DefinedKernels
from torch import Tensor

from tilebit import attention
from tilebit.cache.kvcache import KVCache
from tilebit.layouts.formats import QuantFormat
from tilebit.ops import dispatch, plans
from tilebit.schedules.attention.workload import OPS, AttentionWorkload
from tilebit.tiles.attention import reference

HEADS, DIM = 2, 64
SCORES: dict[str, dict[str, Any]] = {
    "window": {"window": 5},
    "sink_tokens": {"window": 5, "sink_tokens": 3},
    "sinks": {"sinks": True},
    "soft_cap": {"soft_cap": 2.0},
    "scale": {"scale": 0.4},
    "lse": {"return_lse": True},
}
# What calls of each op may differ in; the rest an op does not look at (``AttentionWorkload``).
SIZES = {"batch": 5, "q_len": 9, "kv_len": 1000, "heads_kv": 1, "head_dim": 128, "dtype": torch.bfloat16}
NORMED: dict[str, Any] = {"queries": True, "qk_norm": True, "norm_eps": 0.25, "norm_offset": 1.0}
OF_APPEND = {"rotary", "queries", "rotary_dim", "qk_norm", "norm_eps", "norm_offset"}
CACHED = {"format": "kv8_token", "page_size": 64}
FIELDS: dict[str, dict[str, Any]] = {
    "decode": SIZES | CACHED | SCORES | {"heads_q": 8, "full_windows": True},
    "prefill": SIZES | SCORES | {"heads_q": 8},
    "append": SIZES
    | CACHED
    | {
        "full_windows": True,
        "rotary": "interleaved",
        "rotary_dim": 32,
        "queries": True,
        "heads_q": {"heads_q": 8, "queries": True},
        "qk_norm": NORMED,
        "norm_eps": NORMED | {"norm_eps": 0.5},
        "norm_offset": NORMED | {"norm_offset": 2.0},
    },
    "pack": {name: value for name, value in SIZES.items() if name not in ("q_len", "kv_len")} | CACHED,
    "gather": {name: value for name, value in SIZES.items() if name != "q_len"} | CACHED,
}
LOOKED_AT = {op: {f.name for f in fields(AttentionWorkload)} - {"op"} for op in OPS}
LOOKED_AT["decode"] -= OF_APPEND
LOOKED_AT["prefill"] -= {*OF_APPEND, "format", "page_size", "full_windows"}
LOOKED_AT["append"] -= {*SCORES}
LOOKED_AT["gather"] -= {"heads_q", "q_len", "full_windows", *OF_APPEND, *SCORES}
LOOKED_AT["pack"] -= {"heads_q", "q_len", "kv_len", "full_windows", *OF_APPEND, *SCORES}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> DefinedKernels:
    found = DefinedKernels()
    monkeypatch.setattr(plans, "find_kernel", found.find)
    monkeypatch.setattr(plans, "held", {})
    return found


def call(op: str, **changed: Any) -> None:
    """One call of ``op`` whose workload is the usual one but for ``changed``."""
    w: dict[str, Any] = {"batch": 2, "q_len": 2, "kv_len": 256, "heads_q": 4, "heads_kv": 2, "head_dim": 64, "format": "kv4_channel"}
    w |= {"dtype": torch.float16, "page_size": 128, "rotary": "half" if op == "append" else "", "queries": False, **changed}
    batch, q_len, kv_len, dim, dtype = (w[name] for name in ("batch", "q_len", "kv_len", "head_dim", "dtype"))
    cache = KVCache(1, 1, w["heads_kv"], dim, w["format"], dtype, w["page_size"])
    lengths, slots = (torch.zeros(batch, dtype=torch.int32) for _ in range(2))
    tables = torch.zeros(batch, kv_len // w["page_size"] if op in ("decode", "append") else 1, dtype=torch.int32)
    of_cache = (cache.pages[0], cache.windows[0], tables, slots, lengths)
    sinks = torch.zeros(w["heads_q"]) if w.get("sinks") else None
    options = {name: w[name] for name in ("scale", "window", "sink_tokens", "soft_cap", "return_lse", "full_windows") if name in w}
    cu = torch.zeros(batch + 1, dtype=torch.int32)
    rows = torch.zeros(batch * q_len, w["heads_kv"], dim, dtype=dtype)
    if op == "decode":
        q = torch.zeros(batch, q_len, w["heads_q"], dim, dtype=dtype)
        attention.decode(q, *of_cache, None, sinks, w["format"], w["page_size"], **options)
    elif op == "prefill":
        q, k = (torch.zeros(batch * n, h, dim, dtype=dtype) for n, h in ((q_len, w["heads_q"]), (kv_len, w["heads_kv"])))
        attention.prefill(q, k, k, cu, cu, sinks, **options)
    elif op == "append":
        appended = (rows, rows, cu, lengths, tables, slots, *of_cache[:2], None, torch.zeros(4, w.get("rotary_dim", dim)))
        if w["queries"]:
            q = torch.zeros(batch * q_len, w["heads_q"], dim, dtype=dtype)
            norm = torch.ones(dim, dtype=dtype) if "qk_norm" in w else None
            by = {name: w[name] for name in ("norm_eps", "norm_offset", "full_windows") if name in w}
            attention.append_and_rotate(*appended, q, norm, norm, w["format"], w["page_size"], w["rotary"], **by)
        else:
            attention.append(*appended, w["format"], w["page_size"], w["rotary"], full_windows=w.get("full_windows", False))
    elif op == "pack":
        attention.pack(cache.all_pages, cache.all_windows, tables, slots, lengths, None, w["format"], w["page_size"], dim, dtype)
    else:
        attention.gather(*of_cache, cu, None, w["format"], w["page_size"], batch * kv_len, dim, dtype)


@pytest.mark.parametrize("op", OPS)
def test_every_field_that_an_op_looks_at_is_part_of_its_key(kernels, op):
    assert set(FIELDS[op]) == LOOKED_AT[op], "a field of the workload that this test does not vary"
    call(op)
    usual = kernels.asked[-1].to_json()
    for name, value in FIELDS[op].items():
        asked = len(kernels.asked)
        changed = value if isinstance(value, dict) else {name: value}
        for _ in range(2):
            call(op, **changed)
        assert len(kernels.asked) == asked + 1, f"{name}: one other plan, and the same at the next call"
        found = kernels.asked[-1].to_json()
        differ = {field for field in found if found[field] != usual.get(field)}
        expected = {"lse" if field == "return_lse" else field for field in changed}
        follow = {"heads_q"} if op in ("append", "pack", "gather") and {"heads_kv", "queries"} & {*changed} else set()
        assert differ == expected | follow, name
        call(op)
        assert len(kernels.asked) == asked + 1, f"{name}: and the usual one is still held"


def prefilled(q: Tensor, k: Tensor, v: Tensor, through: str, **options: Any) -> tuple[Tensor, Tensor]:
    if through == "cache":
        cache = KVCache(8, 2, HEADS, DIM, "kv16")
        return cache.prefill(cache.allocate(2), q, k, v, cu_seqlens=[0, 30, 50], **options)
    cu = torch.tensor([0, 30, 50], dtype=torch.int32)
    return attention.prefill(q, k, v, cu, cu, **options)


@pytest.mark.parametrize("through", ["op", "cache"])
def test_options_of_prefill_that_alternate_are_each_call_s_own(kernels, through):
    """One option differs from call to call, and each result is its own reference's."""
    q, k, v = torch.randn(50, 4, DIM).half(), *(torch.randn(50, HEADS, DIM).half() for _ in range(2))
    sinks = torch.randn(4)
    base: dict[str, Any] = {"window": 9, "sink_tokens": 2, "soft_cap": 1.5, "scale": 0.2, "sinks": sinks}
    others = [{**base, name: value} for name, value in (("window", 12), ("sink_tokens", 3), ("soft_cap", 2.5), ("scale", 0.3))]
    without = [{**base, name: value} for name, value in (("window", 0), ("sink_tokens", 0), ("soft_cap", 0.0), ("scale", None))]
    seen = []
    for options in (other for each in (*others, *without, {**base, "sinks": None}, {}) for other in (base, each)):
        out, lse = prefilled(q, k, v, through, return_lse=True, **options)
        plain, nothing = prefilled(q, k, v, through, **options)
        cu = torch.tensor([0, 30, 50])
        expected, expected_lse = reference.prefill(q, k, v, cu, cu, **options)
        assert torch.equal(out, expected.half()) and torch.equal(lse, expected_lse.float()), options
        assert torch.equal(plain, out) and nothing.numel() == 0
        seen.append(out)
    assert all(not torch.equal(seen[0], out) for out in seen[1::2]), "every option makes a difference here"


# ---- products ----


def test_every_field_of_a_product_is_part_of_its_key():
    usual: dict[str, Any] = {"n": 64, "k": 128, "format": "w4a16_g32", "dtype": torch.float16, "bias": False, "dependent": False}
    others = {"n": 96, "k": 256, "format": "w4a16_g64", "dtype": torch.bfloat16, "bias": True, "dependent": True}

    def plan(**changed: Any) -> dispatch.Plan:
        return dispatch.plan_for(torch.device("cpu"), **{**usual, **changed})

    first = plan()
    assert {f.name for f in fields(type(first.workload))} - {"m", "format"} >= {"n", "k", "dtype", "bias"}
    for name, value in others.items():
        other = plan(**{name: value})
        assert other is not first and other is plan(**{name: value}), name
        found = other.dependent if name == "dependent" else getattr(other.workload, name)
        assert found == {"format": QuantFormat.parse("w4a16_g64"), "dtype": "bfloat16"}.get(name, value), name
        assert plan() is first
