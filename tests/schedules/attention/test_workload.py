"""Attention workloads: what is accepted, what is the same question, and what a call must move."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from tilebit.layouts.kv_formats import KVFormat
from tilebit.schedules.attention.workload import OPS, AttentionWorkload
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import workload_from_json

KV4 = KVFormat.from_name("kv4_channel")
LATER = {"queries", "rotary_dim", "qk_norm", "norm_eps", "norm_offset", "full_windows"}
DECODE = AttentionWorkload("decode", 3, 2, 1000, 32, 8, 128, KV4)


@pytest.mark.parametrize("op", OPS)
def test_json_keeps_everything(op):
    workload = AttentionWorkload(
        op,
        3,
        2,
        1000,
        32,
        8,
        128,
        KVFormat.from_name("k8_token_v2"),
        "bfloat16",
        64,
        100,
        4,
        True,
        30.0,
        0.5,
        True,
        "half",
        True,
        64,
        True,
        0.25,
        1.0,
        True,
    )
    assert workload_from_json(json.loads(json.dumps(workload.to_json()))) == workload
    stored_always = {f.name for f in fields(workload)} - LATER
    said = {"append": LATER, "decode": {"full_windows"}}.get(op, set())
    assert set(workload.to_json()) == stored_always | said


def test_what_was_stored_before_queries_is_read():
    older = {f.name: getattr(DECODE, f.name) for f in fields(DECODE) if f.name not in LATER} | {"format": KV4.to_json()}
    assert workload_from_json(older) == DECODE and DECODE.to_json() == older


def test_queries_are_an_append_s_and_have_heads_of_their_own():
    plain = replace(DECODE, op="append", rotary="half")
    turning = replace(DECODE, op="append", rotary="half", queries=True)
    assert (plain.heads_q, turning.heads_q) == (8, 32) and turning.bytes == plain.bytes + 3 * 2 * 32 * 128 * 4
    names = [o.name for o in turning.operands("cpu") if not o.absent]
    assert names[-2:] == ["q", "out"] and {o.name for o in turning.operands("cpu") if o.apart} == {"q", "k", "v"}
    assert not replace(turning, op="gather").queries and "--queries" in turning.options()


def test_full_windows_are_a_step_s():
    late = replace(DECODE, full_windows=True)
    assert late != DECODE and "--full-windows" in late.options() and "--full-windows" not in DECODE.options()
    assert not replace(late, op="gather").full_windows and replace(late, op="append", rotary="half").full_windows
    pack = replace(late, op="pack")
    assert pack == replace(DECODE, op="pack", q_len=1, kv_len=1) and pack.bucketed().q_len == 128 and pack.heads_q == pack.heads_kv
    assert pack.bytes == 3 * 8 * 128 * (4 * 128 + pack.layout.token_bytes)
    shapes = {o.name: o.shape for o in pack.operands("cpu") if not o.absent}
    assert shapes["pages"][:2] == ("layers", "num_pages") and shapes["windows"][:2] == ("layers", "slots")


def test_json_of_a_gemm_and_of_neither():
    gemm = Workload(3, 64, 128)
    assert workload_from_json(gemm.to_json()) == gemm
    with pytest.raises(ValueError, match="op is 'scan'; accepted: 'gemm', 'decode', 'append', 'pack', 'gather', 'prefill'"):
        workload_from_json({**DECODE.to_json(), "op": "scan"})


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("op", "scan", "op is 'scan'; accepted: 'decode'"),
        ("head_dim", 96, "head_dim is 96; accepted: 64, 128, 256"),
        ("page_size", 48, "page_size is 48; accepted: 16, 32"),
        ("dtype", "float32", "accepted: 'float16', 'bfloat16'"),
        ("rotary", "quarter", "accepted: '', 'half', 'interleaved'"),
        ("batch", -1, "batch is -1; accepted: finite numbers from 0"),
        ("soft_cap", float("nan"), "soft_cap is nan"),
        ("heads_kv", 5, "heads_q is 32 and heads_kv 5; accepted: heads_q a multiple"),
        ("scale", 0.0, "scale is 0.0; accepted: a number above 0"),
    ],
)
def test_what_is_not_accepted(field, value, words):
    with pytest.raises(ValueError, match=words):
        replace(DECODE, **{field: value})


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("queries", True, "queries is True, rotary '' and qk_norm False; accepted: queries with one of these"),
        ("qk_norm", True, "qk_norm is True and queries False; accepted: both"),
        ("rotary_dim", 48, "rotary_dim is 48; accepted: multiples of 32 up to head_dim 128"),
        ("rotary_dim", 160, "rotary_dim is 160"),
        ("norm_eps", -1.0, "norm_eps is -1.0 and norm_offset 0.0; accepted: finite numbers up to .*, norm_eps from 0"),
        ("norm_offset", float("inf"), "norm_offset inf; accepted"),
    ],
)
def test_what_an_append_does_not_accept(field, value, words):
    turning = {} if field in ("queries", "qk_norm") else {"rotary": "half", "queries": True, "qk_norm": True}
    with pytest.raises(ValueError, match=words):
        replace(DECODE, op="append", **turning | {field: value})


def test_equal_questions_are_equal():
    assert replace(DECODE, rotary="half") == DECODE
    assert replace(DECODE, op="append", window=5, lse=True, heads_q=64) == replace(DECODE, op="append")
    assert replace(DECODE, op="append", rotary="half") != replace(DECODE, op="append")
    assert replace(DECODE, op="prefill", format=KVFormat(), page_size=16) == replace(DECODE, op="prefill")
    assert replace(DECODE, op="prefill", window=5) != replace(DECODE, op="prefill")


def test_buckets():
    assert DECODE.bucketed() == replace(DECODE, batch=4, kv_len=1024)
    assert replace(DECODE, batch=1, kv_len=1025, q_len=3).bucketed() == replace(DECODE, batch=1, kv_len=2048, q_len=4)
    assert replace(DECODE, q_len=100).bucketed().q_len == 16
    assert replace(DECODE, op="append", q_len=100).bucketed().q_len == 128
    assert replace(DECODE, batch=0, kv_len=0).bucketed() == replace(DECODE, batch=1, kv_len=2)
    for workload in (DECODE, replace(DECODE, batch=5000, kv_len=10**9, q_len=77)):
        assert workload.bucketed().bucketed() == workload.bucketed()


def test_what_a_kernel_does_not_depend_on():
    other = replace(DECODE, batch=1, q_len=16, kv_len=5)
    assert other.static() == DECODE.static() and other != DECODE
    assert replace(DECODE, page_size=64).static() != DECODE.static()


def test_bytes_and_products_by_hand():
    one = AttentionWorkload("decode", 1, 1, 1024, 4, 1, 64, KV4)
    token = 64 + 64 * 4 // 128 + 4  # codes of k and v, scales and zeros of k by channel, of v by token
    query = 4 * 64 * 4  # read and written, two bytes each
    assert one.bytes == 1024 * token + query
    assert replace(one, kv_len=1024 + 5).bytes == one.bytes + 5 * 64 * 4, "the residual window is in 16 bits"
    assert replace(one, lse=True).bytes == one.bytes + 4 * 4
    assert replace(one, batch=3).bytes == 3 * one.bytes
    assert replace(one, window=100, sink_tokens=4).bytes == 104 * token + query
    assert replace(one, op="gather").bytes == 1024 * (token + 256)
    assert replace(one, op="append").bytes == 2 * 256, "read, and written to the window"
    assert replace(one, op="append", q_len=256).bytes == 256 * (256 + token)
    assert replace(one, op="prefill", q_len=10).bytes == 1024 * 256 + 10 * query


@pytest.mark.parametrize(
    ("q_len", "kv_len", "window", "sink_tokens"), [(1, 100, 0, 0), (7, 100, 0, 0), (100, 100, 0, 0), (30, 50, 25, 0), (5, 50, 9, 2)]
)
def test_products_are_of_what_is_visible(q_len, kv_len, window, sink_tokens):
    workload = AttentionWorkload("prefill", 2, q_len, kv_len, 4, 2, 64, KVFormat(), window=window, sink_tokens=sink_tokens)
    seen = [p + 1 if not window else min(p + 1, window + sink_tokens) for p in range(kv_len - q_len, kv_len)]
    assert workload.flops == 4 * 64 * 4 * 2 * sum(seen)


def test_names():
    assert DECODE.title == "decode batch=3 kv_len=1000 q_len=2 heads=32/8x128 kv4_channel"
    assert DECODE.served == "decode 32/8x128 kv4_channel float16"
    assert DECODE.softmax_scale == 128**-0.5 and replace(DECODE, scale=2.0).softmax_scale == 2.0


def test_the_usual_scale_is_the_same_said_or_not():
    for head_dim in (64, 128, 256):
        said, left = (AttentionWorkload("decode", 1, 1, 4096, 32, 8, head_dim, KVFormat(), scale=scale) for scale in (head_dim**-0.5, None))
        assert said == left and hash(said) == hash(left) and said.softmax_scale == head_dim**-0.5
    assert AttentionWorkload("decode", 1, 1, 4096, 32, 8, 128, KVFormat(), scale=0.1).scale == 0.1
