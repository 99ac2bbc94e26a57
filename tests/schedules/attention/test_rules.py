"""The attention rules: what is legal, what is tried, and the sizes that programs and callers share."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from tilebit.layouts.kv_formats import KVFormat
from tilebit.schedules.attention import decode as attention_decode
from tilebit.schedules.attention import rules as attention
from tilebit.schedules.attention.workload import OPS, AttentionWorkload
from tilebit.schedules.gemm.rules import TICKETS
from tilebit.schedules.operations import candidates, estimate, legal, programs, workspace_words
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.select import select
from tilebit.schedules.target import ARCHES, target_from_name

H200, A100, L40S = (target_from_name(name) for name in ("sm_90a", "sm_80", "sm_89"))
CPU = replace(target_from_name("cpu"), features=("avx2",), units=8)
GPUS = ("sm_80", "sm_86", "sm_89", "sm_90a")
KV4 = KVFormat.from_name("kv4_channel")
W = AttentionWorkload("decode", 8, 1, 8192, 32, 8, 128, KV4)
GOOD = Schedule("attention_decode_bulk", 64, 8, 128, 4, 4, min_blocks=1)


def target(name: str):
    return CPU if name == "cpu" else target_from_name(name)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("head_dim", [128, *(pytest.param(d, marks=pytest.mark.slow) for d in (64, 256))])
@pytest.mark.parametrize("op", OPS)
def test_every_format_has_legal_candidates_on_every_target(op, head_dim, arch):
    for index, format in enumerate(KVFormat.all()):
        group, q_len = ((1, 1), (4, 1), (7, 3), (8, 16), (16, 4))[index % 5]
        workload = AttentionWorkload(op, 4, q_len, 4096, 2 * group, 2, head_dim, format, page_size=(16, 128, 256)[index % 3])
        found = candidates(workload, target(arch))
        assert found, f"{workload} on {arch}"
        assert len(set(found)) == len(found) and found == candidates(workload, target(arch))
        for schedule in found:
            assert legal(workload, schedule, target(arch)) == []
            assert 0 < estimate(workload, schedule, target(arch)).us < 1e7
        assert {s.program for s in found} <= set(programs(op, arch))


def test_the_preferred_program_is_tried():
    assert {s.program for s in candidates(W, H200) or []} == {"attention_decode_bulk"}
    assert {s.program for s in candidates(W, A100) or []} == {"attention_decode"}
    assert {s.program for s in candidates(replace(W, op="prefill", q_len=4096), H200) or []} == {"attention_prefill"}
    assert legal(W, replace(GOOD, program="attention_decode"), H200) == [], "it runs on a newer device too"


@pytest.mark.parametrize("columns", [(1, 8), (8, 8), (9, 16), (16, 16), (17, 32), (33, 32)])
def test_products_are_as_wide_as_the_columns(columns):
    asked, width = columns
    widths = {s.block_m for s in candidates(replace(W, head_dim=64, heads_q=8 * asked), H200) or []}
    assert widths == ({width} if asked <= 32 else {32, 16}), "wider ones waste columns, narrower ones read the cache again"


def test_products_are_no_wider_than_registers_allow():
    """Compiled for sm_90a, a product of 32 columns spills at head_dim 128, and one of 16 at 256."""
    for head_dim, widths in ((128, {16, 8}), (256, {8})):
        assert {s.block_m for s in candidates(replace(W, head_dim=head_dim, heads_q=256), H200) or []} == widths


@pytest.mark.parametrize(
    ("program", "format", "head_dim", "block_m", "longest"),
    [
        ("attention_decode_bulk", "kv2_channel", 128, 16, 32),
        ("attention_decode_bulk", "kv2_token", 128, 16, 64),
        ("attention_decode_bulk", "kv4_channel", 64, 16, 128),
        ("attention_decode_bulk", "kv4_channel", 64, 32, 16),
        ("attention_decode_bulk", "kv4_token", 64, 32, 32),
        ("attention_decode", "kv2_channel", 128, 16, 64),
    ],
)
def test_units_are_no_longer_than_registers_allow(program: str, format: str, head_dim: int, block_m: int, longest: int):
    """Compiled, the next longer units of so wide products spill, and these do not: drafts of several tokens over 2 bits had no kernel
    among the best, all of which had longer ones."""
    workload, device = replace(W, q_len=4, head_dim=head_dim, format=KVFormat.from_name(format)), H200 if "bulk" in program else A100
    schedules = {n: Schedule(program, n, block_m, head_dim, 2, 4) for n in attention_decode.BLOCK_N}
    assert {n for n, s in schedules.items() if not legal(workload, s, device)} == {n for n in schedules if n <= longest}


def test_rings_keep_enough_bytes_in_flight():
    for name in ("kv8_channel", "kv4_channel", "kv2_channel"):
        workload = replace(W, format=KVFormat.from_name(name))
        found = candidates(workload, H200) or []
        best = min(found, key=lambda s: estimate(workload, s, H200).us)
        flying = best.num_warps * best.min_blocks * best.num_stages * sum(attention_decode.unit_bytes(workload, best)) / 2
        assert flying >= 56 << 10, f"{name}: {best} keeps {flying} bytes in flight"
        assert 4 <= best.num_warps * best.min_blocks <= 16


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"program": "gemm_wgmma"}, "program is 'gemm_wgmma'; accepted for decode: attention_decode_bulk, attention_decode"),
        ({"program": "attention_append"}, "accepted for decode"),
        ({"block_n": 48}, "block_n is 48; accepted: 16, 32, 64, 128."),
        ({"block_n": 256}, "block_n is 256"),
        ({"block_m": 4}, "block_m is 4; accepted: 8, 16, 32."),
        ({"block_k": 64}, "block_k is 64; accepted: 128."),
        ({"num_stages": 1}, "num_stages is 1; accepted: 2 to"),
        ({"num_warps": 17}, "num_warps is 17; accepted: 1 to 16."),
        ({"min_blocks": 9}, "min_blocks is 9; accepted: 1 to 8."),
        ({"split_k": 2}, "split_k is 2; accepted by attention_decode_bulk, which does not use it: 1."),
        ({"stream_k": True}, "stream_k is True; accepted by attention_decode_bulk"),
        ({"num_stages": 16, "num_warps": 16}, "bytes of shared memory, 232448 are there; use fewer num_stages"),
        ({"min_blocks": 4}, "4 blocks need"),
        ({"block_n": 16, "num_stages": 2, "num_warps": 16, "min_blocks": 8}, "8 blocks have 4096 threads, an SM holds 2048"),
    ],
)
def test_why_a_schedule_is_illegal(change, words):
    reasons = legal(W, replace(GOOD, **change), H200)
    assert words in " ".join(reasons), reasons


def test_targets_are_told():
    assert legal(W, GOOD, A100) == ["attention_decode_bulk does not run on sm_80; accepted: sm_90a."]
    assert "num_stages, num_warps or a smaller block_n" in legal(W, replace(GOOD, program="attention_decode", num_stages=8), L40S)[0]
    plain = replace(CPU, features=())
    assert "need 'avx2' or 'avx512'" in legal(W, Schedule("attention_decode_cpu", 16, 1, 128), plain)[0]
    assert candidates(W, plain) is None


def test_wide_products_need_registers():
    wide = replace(GOOD, block_k=256, block_m=32, num_stages=2, num_warps=2, block_n=16)
    assert "registers" in " ".join(legal(replace(W, head_dim=256, heads_q=256), wide, H200))
    assert legal(replace(W, head_dim=256), replace(wide, block_m=8), H200) == []


def test_bytes_of_a_unit_by_hand():
    assert attention_decode.unit_bytes(W, GOOD) == (64 * 64 + 128 * 4, 64 * 64 + 64 * 4)
    assert attention_decode.unit_bytes(replace(W, format=KVFormat.from_name("k8_token_v2")), GOOD) == (64 * 128 + 64 * 4, 64 * 32 + 64 * 4)
    assert attention_decode.unit_bytes(replace(W, format=KVFormat.from_name("kvfp8")), GOOD) == (64 * 128, 64 * 128)
    assert attention_decode.unit_bytes(replace(W, format=KVFormat()), GOOD) == (64 * 256, 64 * 256)


@pytest.mark.parametrize("name", [f.name for f in KVFormat.all()])
@pytest.mark.parametrize("block_n", [16, 64, 128])
def test_slots_hold_units_and_windows(name, block_n):
    workload, schedule = replace(W, format=KVFormat.from_name(name)), replace(GOOD, block_n=block_n)
    slot = attention_decode.slot_bytes(workload, schedule)
    assert slot >= max(attention_decode.unit_bytes(workload, schedule)) and slot % 16 == 0
    assert slot >= 16 * 128 * 2, "sixteen keys or values of the residual window"
    ring = attention_decode.ring_bytes(workload, schedule)
    assert ring == 4 * 4 * slot <= attention_decode.shared_bytes(workload, schedule, H200)
    assert attention_decode.shared_bytes(workload, replace(schedule, block_m=32), H200) - ring >= 4 * 32 * (128 + 4) * 4


@pytest.mark.parametrize(("warps", "stages"), [(3, 3), (1, 5), (4, 3), (9, 2)])
def test_results_lie_where_loads_of_16_bytes_may_begin(warps, stages):
    """Behind the barriers, of which odd numbers of warps and stages have an odd number."""
    schedule = replace(GOOD, program=attention_decode.BULK, num_warps=warps, num_stages=stages)
    ring, at = attention_decode.ring_bytes(W, schedule), attention_decode.results_at(W, schedule)
    assert at % 16 == 0 and ring + 8 * warps * stages <= at < ring + 8 * warps * stages + 16
    assert attention_decode.results_at(W, replace(schedule, program=attention_decode.ASYNC)) == ring


def test_workspaces_do_not_depend_on_sizes():
    words = workspace_words(W, replace(GOOD, min_blocks=2), H200)
    assert words == TICKETS + 132 * 2 * 2 * 8 * (128 + 2)
    assert workspace_words(replace(W, batch=1000, kv_len=7, q_len=16), replace(GOOD, min_blocks=2), H200) == words
    assert workspace_words(replace(W, op="append"), Schedule("attention_append", 128, 1, 128), H200) == 0
    assert workspace_words(W, Schedule("attention_decode_cpu", 16, 1, 128), CPU) == 0


def test_keys_and_values_side_by_side_take_heads_of_128_channels_at_most():
    for head_dim, warps in ((64, [8, 16]), (128, [8, 16]), (256, [8])):
        workload = replace(W, op="append", head_dim=head_dim, heads_q=W.heads_kv)
        assert [s.num_warps for s in candidates(workload, H200) or []] == warps
    refused = legal(workload, Schedule("attention_append", 128, 1, 256, num_warps=16), H200)
    assert refused == ["num_warps is 16; accepted for head_dim above 128: 8."]
    assert select(replace(workload, head_dim=128), H200, []).num_warps == 8, "untuned"


def test_passes_over_columns():
    assert attention_decode.column_passes(W, GOOD) == 1
    assert attention_decode.column_passes(replace(W, q_len=5), GOOD) == 3
    assert attention_decode.grid_blocks(replace(GOOD, min_blocks=3), H200) == 3 * 132


@pytest.mark.parametrize("arch", GPUS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_prefill_tiles_fit(arch, head_dim):
    workload, device = replace(W, op="prefill", q_len=8192, head_dim=head_dim), target_from_name(arch)
    found = candidates(workload, device) or []
    best = min(found, key=lambda s: estimate(workload, s, device).us)
    assert best.num_warps * 16 == best.block_m and best.num_stages >= 2
    assert attention.prefill_shared_bytes(workload, best) <= device.smem
    assert head_dim == 256 or best.block_m == 128
    assert "num_warps is 2; accepted for block_m" in " ".join(legal(workload, replace(best, num_warps=2), device))


TALL = Schedule(attention.WGMMA, 64, 64, 128, 2, 4)


@pytest.mark.parametrize(("num_warps", "min_blocks"), list(product((4, 8, 12), (1, 2, 3, 4))))
def test_prefill_hands_registers_on_and_makes_none(num_warps, min_blocks):
    """What both sides take fits into what the launch gave to all threads alike, in the steps that setmaxnreg knows; a kernel that
    asks for more waits for ever."""
    threads = num_warps * 32 + 128
    producer, consumer = attention.prefill_registers(replace(TALL, num_warps=num_warps, min_blocks=min_blocks))
    given = min(255, H200.REGISTERS_PER_SM // (threads * min_blocks)) // 8 * 8
    assert producer * 128 + consumer * num_warps * 32 <= given * threads
    assert producer % 8 == consumer % 8 == 0 and 24 <= producer <= consumer <= 240


def test_prefill_registers_by_hand():
    assert attention.prefill_registers(replace(TALL, num_warps=8)) == (24, 240)
    assert attention.prefill_registers(replace(TALL, num_warps=12)) == (24, 160)
    assert attention.prefill_registers(replace(TALL, min_blocks=2)) == (24, 232)
    assert programs("prefill")[attention.WGMMA].registers is attention.prefill_registers, "lint looks at what the kernel asks for"


def test_prefill_needs_registers():
    workload, tall = replace(W, op="prefill", q_len=8192), replace(TALL, block_n=176, block_m=128, num_warps=8)
    assert legal(workload, tall, H200) == []
    assert "registers, 240 are free" in " ".join(legal(replace(workload, soft_cap=30.0), tall, H200)), "it spills"
    two = replace(TALL, block_k=256, num_stages=1, min_blocks=2)
    (reason,) = legal(replace(workload, head_dim=256), two, H200)
    assert reason.startswith("a launch gives a thread 128 registers, one wgmma of 256 columns takes 158;")


def test_few_queries_take_no_tile_that_is_mostly_empty():
    short = candidates(replace(W, op="prefill", q_len=40), H200) or []
    assert short and max(s.block_m for s in short) == 64
