"""Choosing attention schedules: tuned, nearest, estimated; and what the estimate knows."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tilebit.layouts.kv_formats import KVFormat
from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.distance import MAX_DISTANCE, distance
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import candidates, estimate, legal
from tilebit.schedules.records import TuningRecord, parse_records
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.select import choose, explain, select
from tilebit.schedules.target import target_from_name

H200 = target_from_name("sm_90a")
KV4 = KVFormat.from_name("kv4_channel")
W = AttentionWorkload("decode", 8, 1, 8192, 32, 8, 128, KV4)
ODD = Schedule("attention_decode_bulk", 64, 8, 128, 3, 4, min_blocks=3)


def record(workload=W, schedule=ODD, us: float | None = 5.0, target=H200) -> TuningRecord:
    status = "ok" if us is not None else "wrong"
    return TuningRecord(workload, schedule, target.name, target.arch, target.units, status=status, us=us)


def test_a_tuned_record_serves_its_bucket():
    assert legal(W, ODD, H200) == []
    choice = choose(W, H200, [record()])
    assert (choice.schedule, choice.source) == (ODD, "tuned")
    assert choose(replace(W, batch=5, kv_len=5000), H200, [record()]).source == "tuned"
    assert choose(replace(W, kv_len=9000), H200, [record()]).source == "nearest"


def test_records_of_both_operations_live_together():
    gemm = TuningRecord(Workload(1, 4096, 4096), Schedule("gemm_stream_bulk", 32, 1, 128), H200.name, H200.arch, H200.units, us=1.0)
    lines = "".join(json.dumps(r.to_json()) + "\n" for r in (gemm, record()))
    assert parse_records(lines.encode(), "test") == [gemm, record()]
    assert choose(W, H200, [gemm, record()]).schedule == ODD
    assert distance(gemm, W, H200) is None and distance(record(), Workload(1, 4096, 4096), H200) is None


@pytest.mark.parametrize(("field", "value"), [("batch", 2.5), ("page_size", "64"), ("heads_q", None)])
def test_a_record_of_other_sizes_is_none(field, value):
    data = record().to_json()
    data["workload"][field] = value
    with pytest.raises((ValueError, TypeError), match=r"accepted|supported"):
        TuningRecord.from_json(data)


def test_the_nearest_counts_only_where_it_says_something():
    for other in (
        replace(W, op="prefill"),
        replace(W, format=KVFormat.from_name("kv8_channel")),
        replace(W, format=KVFormat.from_name("k4_channel_v8")),
        replace(W, head_dim=64),
        replace(W, heads_q=64),
    ):
        assert distance(record(other), W, H200) is None
    assert distance(record(), W, replace(H200, arch="sm_89")) is None
    assert distance(record(), W, H200) == 0
    near = [
        replace(W, window=100), replace(W, lse=True), replace(W, sinks=True), replace(W, soft_cap=9.0), replace(W, scale=1.0),
        replace(W, page_size=16), replace(W, dtype="bfloat16"), replace(W, format=KVFormat.from_name("kv4_token")),
        replace(W, batch=16), replace(W, kv_len=4096), replace(W, heads_q=16, heads_kv=4), replace(W, q_len=2),
    ]  # fmt: skip
    distances = [distance(record(other), W, H200) or 0.0 for other in near]
    assert distances == sorted(distances) and distances[0] > 0 and distances[-1] == 1.0
    assert (distance(record(replace(W, batch=1, kv_len=1 << 17)), W, H200) or 9.0) > MAX_DISTANCE


def test_the_nearest_is_taken_over():
    near, far = replace(W, kv_len=16384, lse=True), replace(W, kv_len=65536)
    choice = choose(W, H200, [record(far, replace(ODD, num_stages=4), us=1.0), record(near, us=50.0)])
    assert (choice.schedule, choice.source) == (ODD, "nearest")
    rows = explain(W, H200, [record(near, us=50.0)])
    assert rows[0].chosen and "decode batch=8 kv_len=16384" in rows[0].why and "distance 0.56" in rows[0].why


def test_without_records_the_estimate_decides():
    best = min(candidates(W, H200) or [], key=lambda s: estimate(W, s, H200).us)
    assert choose(W, H200, []).schedule == best and choose(W, H200, []).source == "model"
    assert select(W, H200, [record(schedule=best, us=None)]) != best, "a schedule that failed"
    wrong = [record(schedule=s, us=None) for s in candidates(W, H200) or []]
    assert (choose(W, H200, wrong).source, choose(W, H200, wrong).schedule) == ("failed", best)
    with pytest.raises(ValueError, match=r"no schedule for AttentionWorkload.*schedules/operations"):
        choose(W, replace(H200, arch="cpu", features=()), [])


# Of an exploration in plain CUDA on an H200, heads 32/8 of 128 (KV8, KV4, KV2), and of FA3 in 16 bits, in microseconds.
MEASURED = {
    (1, 32768): (40.7, 22.2, 15.3, 12.3),
    (1, 131072): (134.0, 70.2, 41.1, 28.8),
    (8, 8192): (67.8, 37.9, 23.6, 17.8),
    (32, 4096): (125.0, 67.4, 39.0, 26.8),
    (64, 2048): (126.0, 67.2, 39.2, 27.5),
    (128, 1024): (128.0, 67.8, 41.1, 29.4),
}


@pytest.mark.parametrize("case", MEASURED)
def test_the_estimate_is_near_what_was_measured(case):
    for name, us in zip(("kv16", "kv8_channel", "kv4_channel", "kv2_channel"), MEASURED[case], strict=True):
        workload = replace(W, batch=case[0], kv_len=case[1], format=KVFormat.from_name(name))
        best = min(estimate(workload, s, H200).us for s in candidates(workload, H200) or [])
        assert 0.75 < best / us < 1.25, f"{name}: {best:.1f} us, measured {us}"


def test_what_makes_a_schedule_slow():
    def us(workload, **changes):
        return estimate(workload, replace(ODD, num_stages=6, min_blocks=1, **changes), H200).us

    many = replace(W, heads_q=8 * 24)
    assert us(many, block_m=8) > 1.2 * us(many, block_m=32), "a pass reads the cache again"
    assert us(W, block_m=32) > us(W, block_m=8), "empty columns are multiplied"
    assert us(W, num_warps=1) > 1.3 * us(W, num_warps=4), "too few bytes in flight"
    assert us(replace(W, batch=16)) > us(W) and us(replace(W, window=512)) < us(W)
