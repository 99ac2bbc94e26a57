"""``TILEBIT_CHECK=1``: numbers that would lead a kernel out of its operands are errors before a launch; without it nobody looks at them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from defined_kernels import DefinedKernels

from tilebit import attention
from tilebit.cache.kvcache import KVCache
from tilebit.ops import attention as attention_ops
from tilebit.ops import check, plans

LENGTHS, HEADS, DIM, PAGE = (130, 0, 300), 2, 64, 64
PAGES, SLOTS, TOTAL = 9, 4, sum(LENGTHS)
LARGE = (1 << 31) - 1
FUZZ = Path(__file__).with_name("fuzz_checked_ops.py")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> DefinedKernels:
    found = DefinedKernels()
    monkeypatch.setattr(plans, "find_kernel", found.find)
    monkeypatch.setattr(plans, "held", {})
    monkeypatch.setattr(attention_ops, "CHECKED", True)
    return found


def operands() -> dict[str, Any]:
    """Of three sequences, whose caches and rows are exactly as large as they must be."""
    cache = KVCache(PAGES, SLOTS, HEADS, DIM, "kv4_channel", page_size=PAGE)
    k, v, q = (torch.randn(TOTAL, HEADS, DIM).half() for _ in range(3))
    cu = torch.tensor([0, 130, 130, 430], dtype=torch.int32)
    tables = torch.tensor([[0, 1, -1, -1], [-1] * 4, [5, 6, 7, 8]], dtype=torch.int32)
    return {
        "pages": cache.pages[0], "windows": cache.windows[0], "block_tables": tables, "slots": torch.tensor([2, 0, 1], dtype=torch.int32),
        "lengths": torch.tensor(LENGTHS, dtype=torch.int32), "cu": cu, "cu_q": cu.clone(), "k": k, "v": v, "q": q,
        "cos_sin": torch.randn(max(LENGTHS), DIM),
    }  # fmt: skip


def call(op: str, o: dict[str, Any]) -> Any:
    cached = (o["pages"], o["windows"], o["block_tables"], o["slots"], o["lengths"])
    if op == "decode":
        return attention.decode(o["q"][:3, None], *cached, None, None, "kv4_channel", PAGE)
    if op == "append":
        rows = (o["k"], o["v"], o["cu"], o["lengths"], o["block_tables"], o["slots"], o["pages"], o["windows"])
        return attention.append(*rows, None, o["cos_sin"], "kv4_channel", PAGE, "half")
    if op == "pack":
        return attention.pack(o["pages"][None], o["windows"][None], *cached[2:], None, "kv4_channel", PAGE, DIM, torch.float16)
    if op == "late":
        rows = (o["k"], o["v"], o["cu"], o["lengths"], o["block_tables"], o["slots"], o["pages"], o["windows"])
        return attention.append(*rows, None, o["cos_sin"], "kv4_channel", PAGE, "half", full_windows=True)
    if op == "gather":
        return attention.gather(*cached, o["cu"], None, "kv4_channel", PAGE, TOTAL, DIM, torch.float16)
    return attention.prefill(o["q"], o["k"], o["v"], o["cu_q"], o["cu"])


WRONG = (
    # ops, operand, where, what, words of the error
    (("decode", "gather", "append"), "lengths", 2, -1, "lengths[2] = -1; accepted: "),
    (("decode",), "lengths", 2, 384, "lengths[2] = 384; accepted: at most 383: block_tables has 4 pages of 64"),
    (("decode",), "lengths", 0, LARGE, "lengths[0] = 2147483647; accepted: at most 383"),
    (("decode",), "lengths", 0, 256, "block_tables[0, 2] = -1; accepted: 0 to 8, a page that sequence 0 of 256 tokens has"),
    (("decode", "gather", "append"), "block_tables", (0, 1), PAGES, "block_tables[0, 1] = 9; accepted: 0 to 8"),
    (("decode", "gather", "append"), "block_tables", (2, 3), -1, "block_tables[2, 3] = -1; accepted: 0 to 8"),
    (("decode", "gather", "append"), "slots", 0, SLOTS, "slots[0] = 4; accepted: 0 to 3"),
    (("decode", "gather", "append"), "slots", 2, -LARGE, "slots[2] = -2147483647; accepted: 0 to 3"),
    (("pack",), "lengths", 2, -1, "lengths[2] = -1; accepted: "),
    (("pack",), "lengths", 0, 256, "block_tables[0, 2] = -1; accepted: 0 to 8, a page that sequence 0 of 256 tokens has"),
    (("gather",), "lengths", 0, 131, "lengths[0] = 131; accepted: at most 130, the rows of cu_kv[0] to cu_kv[1]"),
    (("gather",), "cu", 0, -1, "cu_kv[0] = -1; accepted: 0"),
    (("gather",), "cu", 3, TOTAL + 1, "cu_kv[3] = 431; accepted: at most 430, which total is"),
    (("gather",), "cu", 1, 129, "lengths[0] = 130; accepted: at most 129"),
    (("append",), "cu", 0, -1, "cu_seqlens[0] = -1; accepted: 0"),
    (("append",), "cu", 2, 129, "cu_seqlens[2] = 129; accepted: at least 130, which cu_seqlens[1] is"),
    (("append",), "cu", 3, TOTAL + 1, "cu_seqlens[3] = 431; accepted: at most 430, which tokens is"),
    (("append",), "lengths", 0, 129, "lengths[0] = 129; accepted: at least 130, the new rows"),
    (("append",), "lengths", 2, 301, "lengths[2] = 301; accepted: at most 300, the positions of cos_sin"),
    (("append",), "slots", 0, 1, "slots = 1; accepted: each slot once"),
    (("prefill",), "cu_q", 0, -5, "cu_q[0] = -5; accepted: 0"),
    (("prefill",), "cu_q", 1, 131, "cu_q[2] = 130; accepted: at least 131"),
    (("prefill",), "cu_q", 3, LARGE, "cu_q[3] = 2147483647; accepted: at most 430, which tokens is"),
    (("prefill",), "cu", 0, -5, "cu_kv[0] = -5; accepted: 0"),
    (("prefill",), "cu", 2, 500, "cu_kv[3] = 430; accepted: at least 500"),
    (("prefill",), "cu", 3, TOTAL + 1, "cu_kv[3] = 431; accepted: at most 430, which total is"),
)
CASES = [(op, *rest) for ops, *rest in WRONG for op in ops]


@pytest.mark.parametrize(("op", "operand", "where", "value", "words"), CASES, ids=lambda value: str(value)[:24])
def test_what_leads_out_of_the_operands_is_refused(kernels: DefinedKernels, op: str, operand: str, where: Any, value: int, words: str):
    o = operands()
    o[operand][where] = value
    before = {name: tensor.clone() for name, tensor in o.items()}
    with pytest.raises(ValueError) as refused:
        call(op, o)
    assert str(refused.value).startswith(f"{op} got ") and words in str(refused.value)
    assert not kernels.calls and all(torch.equal(o[name].nan_to_num(), before[name].nan_to_num()) for name in before)


def test_every_operand_of_every_op_has_a_wrong_value():
    seen = {(op, operand) for op, operand, *_ in CASES}
    cached = {(op, operand) for op in ("decode", "gather", "append") for operand in ("lengths", "block_tables", "slots")}
    assert seen == cached | {("pack", "lengths")} | {("gather", "cu"), ("append", "cu"), ("prefill", "cu"), ("prefill", "cu_q")}


@pytest.mark.parametrize(
    ("operand", "value", "words"), [("block_tables", PAGES, "block_tables[0, 1] = 9"), ("slots", SLOTS, "slots[0] = 4")]
)
def test_a_pack_of_a_full_window_is_checked(kernels: DefinedKernels, operand: str, value: int, words: str):
    o = operands()
    o["lengths"][0] = 128
    call("pack", o)
    o[operand][0 if operand == "slots" else (0, 1)] = value
    with pytest.raises(ValueError) as refused:
        call("pack", o)
    assert words in str(refused.value)


def test_full_windows_are_checked_as_they_are_read(kernels: DefinedKernels):
    """The slot of a sequence whose window is full, not the page that it will go to; one token a sequence."""
    o = operands()
    o["lengths"][2] = 256
    cached = (o["pages"], o["windows"], o["block_tables"], o["slots"], o["lengths"])
    o["block_tables"][2, 2:] = LARGE
    attention.decode(o["q"][:3, None], *cached, None, None, "kv4_channel", PAGE, full_windows=True)
    with pytest.raises(ValueError, match=r"block_tables\[2, 2\] = 2147483647"):
        attention.decode(o["q"][:3, None], *cached, None, None, "kv4_channel", PAGE)
    o["slots"][2] = 99
    with pytest.raises(ValueError, match=r"slots\[2\] = 99"):
        attention.decode(o["q"][:3, None], *cached, None, None, "kv4_channel", PAGE, full_windows=True)
    with pytest.raises(ValueError, match=r"cu_seqlens\[1\] = 130; accepted: one new token a sequence at most, with full_windows"):
        call("late", operands())


@pytest.mark.parametrize("op", ["append", "decode", "gather", "pack", "prefill"])
def test_what_no_kernel_reads_may_be_anything(kernels: DefinedKernels, op: str):
    """Entries beyond a sequence's packed tokens, and the slot of a sequence without a window."""
    o = operands()
    o["block_tables"][0, 2:], o["block_tables"][1] = LARGE, -7
    if op != "append":  # whose stand-in here looks at every window
        o["slots"][1] = 99
    call(op, o)
    assert kernels.calls == [op]


def test_an_append_touches_no_older_page(kernels: DefinedKernels):
    o = operands()
    o["cu"] = torch.tensor([0, 0, 0, 100], dtype=torch.int32)  # 200 tokens were there, of which 128 are packed
    o["block_tables"][2, :2], o["block_tables"][0] = -1, -1
    call("append", o)
    o["block_tables"][2, 2] = -1
    with pytest.raises(ValueError, match=r"block_tables\[2, 2\] = -1"):
        call("append", o)


@pytest.mark.parametrize("name", ["lengths", "slots", "block_tables", "cu"])
def test_other_mistakes_keep_their_own_words(kernels: DefinedKernels, name: str):
    o = operands()
    o[name] = o[name].long()
    with pytest.raises(ValueError, match=rf"{name} is int64|cu_kv is int64"):
        call("gather", o)
    o = operands()
    o[name] = o[name][:-1].clone()
    with pytest.raises(ValueError, match="needs int32"):
        call("gather", o)


def test_off_nothing_is_looked_at(kernels: DefinedKernels, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention_ops, "CHECKED", False)
    ops = ["append", "decode", "pack", "gather", "prefill"]
    for op in ops:
        monkeypatch.setattr(attention_ops, f"check_{op}", None)
    for op in ops:
        call(op, operands())
    assert kernels.calls == ops


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), ("", False), (None, False)])
def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch, value: str | None, on: bool):
    monkeypatch.delenv(check.VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(check.VARIABLE, value)
    fresh: Any = types.ModuleType("check")
    fresh.__package__ = check.__package__
    exec(Path(check.__file__).read_text(), fresh.__dict__)
    assert fresh.CHECKED is on


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_random_numbers_never_crash(seed: int):
    """The CPU's own kernels, in another process: an error, or a result and nothing written beside the cache and the outputs."""
    env = {**os.environ, "TILEBIT_CHECK": "1"}
    done = subprocess.run([sys.executable, str(FUZZ), str(seed)], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    refused, computed = json.loads(done.stdout.splitlines()[-1])
    assert min(refused.values()) > 40 and min(computed.values()) > 20, (refused, computed)
