"""Quantization of activations: its workload, what its programs accept, and what is chosen."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from tilebit.schedules.activations.operation import MOST_CHUNKS, chunks, row_threads
from tilebit.schedules.activations.workload import QuantizeWorkload
from tilebit.schedules.operands import present
from tilebit.schedules.operations import candidates, estimate, legal, params, workload_from_json
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.select import choose
from tilebit.schedules.target import Target, target_from_name

W = QuantizeWorkload(4096, 8192)
H200 = target_from_name("sm_90a")
AVX = Target("cpu", "a processor", 4, 0, 0, 1 << 22, 100.0, 1.0, 100.0, features=("avx2",))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"m": -1}, "m >= 0, k >= 1"),
        ({"k": 0}, "m >= 0, k >= 1"),
        ({"dtype": "float32"}, "dtype is 'float32'; accepted: 'float16', 'bfloat16'"),
        ({"out": "int4"}, "out is 'int4'; accepted: 'int8', 'e4m3'"),
        ({"group": 64}, "group is 64; accepted: -1, 128"),
        ({"eps": -1.0}, "eps is -1.0; accepted: finite numbers from 0"),
        ({"eps": float("nan")}, "eps is nan"),
        ({"offset": float("inf")}, "offset is inf; accepted: finite numbers"),
        ({"gate": "relu"}, "gate is 'relu'; accepted: '', 'silu', 'gelu_tanh', 'gelu'"),
        ({"gate": "silu", "residual": True}, "gate is 'silu' and there is a residual; accepted: one of both"),
    ],
)
def test_fields_out_of_range_are_named(change: dict, words: str):
    with pytest.raises(ValueError, match=words):
        replace(W, **change)


@pytest.mark.parametrize(
    "w",
    [
        W,
        replace(W, out="e4m3", group=128, norm=True, eps=1e-5, smooth=True, dtype="bfloat16"),
        replace(W, norm=True, residual=True, offset=1.0),
        replace(W, gate="gelu_tanh"),
    ],
)
def test_it_is_stored_and_found_again(w: QuantizeWorkload):
    assert workload_from_json(w.to_json()) == w

    later = {name for name, value in (("residual", False), ("offset", 0.0), ("gate", "")) if getattr(w, name) == value}
    assert set(w.to_json()) == {"op", *(f.name for f in fields(w))} - later
    assert w.static() == replace(w, m=0) and w.bucketed() == w and replace(w, m=3000).bucketed() == w
    assert replace(w, norm=False, eps=3.0) == replace(w, norm=False), "eps says nothing without a norm"


def test_what_was_stored_before_there_was_a_residual_is_read():
    old = {"op": "quantize", "m": 4, "k": 64, "dtype": "float16", "out": "int8", "group": -1, "norm": False, "eps": 1e-6, "smooth": False}
    assert QuantizeWorkload(4, 64).to_json() == old and workload_from_json(old) == QuantizeWorkload(4, 64)
    assert replace(W, offset=1.0) == W, "an offset says nothing without a norm"


def test_operands_are_those_of_a_product():
    w = QuantizeWorkload(3, 300, group=128, norm=True, smooth=True)
    shapes = {arch: {o.name: o.shape for o in present(w.operands(arch))} for arch in ("cpu", "sm_80")}
    assert shapes["cpu"] == {"x": ("m", 300), "norm_weight": (300,), "smooth": (300,), "codes": ("m", 300), "scales": (3, "m")}
    assert shapes["sm_80"] == {"x": ("m", 304), "norm_weight": (304,), "smooth": (304,), "codes": ("m", 304), "scales": (3, "m")}
    assert params(W, Schedule("quantize_cpu", 1, 1, 1, num_warps=2), AVX) == ("x", "codes", "scales")
    assert next(o.shape for o in W.operands("cpu") if o.name == "scales") == ("m",)
    assert next(o.shape for o in replace(W, k=9).operands("sm_80") if o.name == "codes") == ("m", 16)


def test_a_cpu_has_threads_to_choose():
    found = candidates(W, AVX) or []
    assert found == [Schedule("quantize_cpu", 1, 1, 1, num_warps=count) for count in (4, 1)]
    assert choose(W, AVX, []).schedule.num_warps == 4 and choose(replace(W, m=1), AVX, []).schedule.num_warps == 1
    assert legal(W, replace(found[0], block_m=2), AVX) == ["block_m is 2; accepted by quantize_cpu, which does not use it: 1."]
    assert "accepted: 1 to 512 threads" in legal(W, replace(found[0], num_warps=0), AVX)[0]
    assert "needs 'avx2'" in legal(W, found[0], replace(AVX, features=()))[0]


@pytest.mark.parametrize("k", [1, 128, 300, 1024, 4096, 5120, 8192, 16384, 28672, 53248, 65536])
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a"])
def test_a_gpu_has_several_schedules_of_every_row(arch: str, k: int):
    w, target = replace(W, k=k), target_from_name(arch)
    found = candidates(w, target) or []
    assert len(found) > 1 or k > 32768
    for s in found:
        assert legal(w, s, target) == [] and s.program == "quantize_rows"
        assert 1 <= chunks(w, s) <= MOST_CHUNKS and row_threads(s) >= 32
        assert 0 < estimate(w, s, target).us < float("inf")


def test_what_a_block_cannot_hold_is_illegal():
    s = Schedule("quantize_rows", 1, 1, 1, num_warps=8)
    assert legal(W, s, H200) == [] and "k is 20000: use more" in legal(replace(W, k=20000), s, H200)[0]
    assert legal(W, replace(s, block_m=16), H200) == ["block_m is 16; accepted for num_warps 8: at most 8, a warp or more a row."]
    assert legal(W, replace(s, num_warps=3, block_m=3), H200) == [
        "block_m is 3; accepted: 1, 2, 4, 8, 16.", "num_warps is 3; accepted: 1, 2, 4, 8, 16, 32."
    ]  # fmt: skip
    assert legal(replace(W, k=65537), s, H200) == ["k is 65537; accepted by quantize_rows: at most 65536."]
    through = replace(s, num_warps=16, num_stages=2, min_blocks=2)  # all rows
    assert legal(W, through, H200) == []
    assert legal(W, replace(s, num_stages=2, min_blocks=4), H200) == [], "two chunks of a thread"
    assert legal(W, replace(s, num_stages=3), H200)[0].startswith("num_stages is 3; accepted: 1, a block of block_m rows, and 2")
    assert legal(W, replace(s, min_blocks=2), H200) == ["min_blocks is 2; accepted with num_stages 1: 1."]
    assert legal(W, replace(through, min_blocks=9), H200) == ["min_blocks is 9; accepted with num_stages 2: 1 to 8."]
    assert legal(W, replace(through, min_blocks=3), H200) == ["3 blocks of 16 warps; accepted on an SM: 42 warps that go through all rows."]
    assert (
        "need 251200 bytes of an SM's shared memory, 233472 are there"
        in legal(replace(W, norm=True, smooth=True), replace(through, num_warps=4, min_blocks=5), H200)[0]
    )
    assert legal(W, replace(s, stream_k=True), H200) == ["stream_k is True; accepted by quantize_rows, which does not use it: False."]
    wide = replace(s, num_warps=32)
    for k, most in ((65536, 65536), (32768, 32768)):
        w = replace(W, k=k, gate="silu" if most == 32768 else "")
        assert legal(w, wide, H200) == [] and candidates(w, H200)
        assert legal(replace(w, k=k + 1), wide, H200) == [f"k is {k + 1}; accepted by quantize_rows: at most {most}."]
    assert legal(replace(W, k=32768, gate="silu"), replace(s, num_warps=16), H200) == [], "four chunks of fewer threads"
    with pytest.raises(ValueError, match="no schedule for QuantizeWorkload"):
        choose(replace(W, k=70000), H200, [])


def test_few_rows_have_more_threads_each_than_many():
    one, many = (choose(replace(W, m=m), H200, []).schedule for m in (1, 4096))
    assert chunks(W, one) == 1 and row_threads(one) == 512
    assert chunks(W, many) == 2 and row_threads(many) == 256
    short = choose(QuantizeWorkload(4096, 128), H200, []).schedule
    assert short.block_m > 1 and row_threads(short) == 32
