"""The rules of ``gemm_any`` and ``gemm_any_wgmma``: what they accept and say, candidates for every device, and what their models expect."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from tilebit.layouts.formats import CODEBOOK_BITS, GemmFormat
from tilebit.schedules.gemm import any_wgmma
from tilebit.schedules.gemm.any import ARCHES, PROGRAM, shared_bytes, table_bytes
from tilebit.schedules.gemm.any_cost import any_estimate
from tilebit.schedules.gemm.operation import ANY, ANY_WGMMA
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import candidates, legal
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.select import select
from tilebit.schedules.target import Target, target_from_name

H200 = target_from_name("sm_90a")
GOOD = Schedule(PROGRAM, 32, 8, 1, 1, 8)


def work(bits: int, m: int = 8, n: int = 4096, k: int = 4096) -> Workload:
    return Workload(m, n, k, GemmFormat.parse(f"w{bits}a16_any"))


@pytest.mark.parametrize("arch", ARCHES)
def test_every_width_and_number_of_rows_has_legal_candidates(arch: str) -> None:
    target = target_from_name(arch)
    for bits, m, (n, k) in product(CODEBOOK_BITS, (1, 3, 8, 17, 4096), ((4096, 4096), (33, 31), (576, 1536))):
        found = candidates(work(bits, m, n, k), target)
        assert found and len(set(found)) == len(found)
        assert all(legal(work(bits, m, n, k), schedule, target) == [] for schedule in found)
        own = [schedule for schedule in found if schedule.program == PROGRAM]
        assert {schedule.block_m for schedule in own} == {min(1 << (m - 1).bit_length(), 16)}
        many = m > 16 and target.arch == "sm_90a" and bits > 2
        assert {schedule.program for schedule in found} == {PROGRAM} | ({any_wgmma.PROGRAM} if many else set())


def test_illegal_schedules_say_why() -> None:
    assert legal(work(3), GOOD, H200) == []
    wrong = {
        "block_n is 48; accepted: 16, 32, 64.": replace(GOOD, block_n=48),
        "block_m is 3; accepted: 1, 2, 4, 8, 16.": replace(GOOD, block_m=3),
        "block_k is 64; accepted by gemm_any, which does not use it: 1.": replace(GOOD, block_k=64),
        "num_warps is 17; accepted: 1 to 16.": replace(GOOD, num_warps=17),
        "split_k is 16, but k 512 has 2 steps of 256": replace(GOOD, split_k=16),
        "a thread needs about 116 registers, 64 are free": replace(GOOD, num_warps=16, min_blocks=2, block_m=1),
    }
    for sentence, schedule in wrong.items():
        reasons = legal(work(3, k=512), schedule, replace(H200, smem_per_sm=1 << 20, smem=1 << 20))
        assert any(reason.startswith(sentence) for reason in reasons), (sentence, reasons)
    (reason,) = legal(work(4), replace(GOOD, num_warps=12, num_stages=2), H200)
    assert "1 blocks need" in reason
    (reason,) = legal(work(3, m=1, n=1 << 20), replace(GOOD, split_k=2, block_m=1), H200)
    assert "of 32768 tiles; accepted: at most 16384 tiles, or no split." in reason
    (reason,) = legal(Workload(1, 64, 64, GemmFormat.parse("w4a16_g128")), replace(GOOD, block_m=1), H200)
    assert reason == "format is w4a16_g128; gemm_any has no codec for it."


def test_tables_by_hand() -> None:
    """An entry of 16 rows is 16 words for four lanes each; of pairs of 3 bits the largest index is 7 * 16 + 7."""
    assert table_bytes(3) == 120 * 16 * 4 * 4 and table_bytes(4) == table_bytes(8) == 65536 and table_bytes(5) == 8192
    assert shared_bytes(work(3), GOOD) == 2 * 30720 + 8 * 8 * 576


def test_fewer_bits_and_fewer_rows_take_less() -> None:
    large = [select(work(bits, 1, 57344, 8192), H200) for bits in CODEBOOK_BITS]
    times = [any_estimate(work(bits, 1, 57344, 8192), s, H200).us for bits, s in zip(CODEBOOK_BITS, large, strict=True)]
    assert times == sorted(times)
    for bits in CODEBOOK_BITS:
        for rule in (ANY, ANY_WGMMA):
            problems = [work(bits, m) for m in (1, 8, 16, 64, 256)]
            of_rows = [min((rule.estimate(w, s, H200).us for s in rule.candidates(w, H200)), default=0.0) for w in problems]
            assert of_rows == sorted(of_rows), (bits, rule.program)


def test_what_the_program_of_many_rows_accepts() -> None:
    good = Schedule(any_wgmma.PROGRAM, 128, 64, 256, 4, 8)
    assert legal(work(4, 64), good, H200) == []
    wrong = {
        "block_n is 256; accepted: 64, 128, 192.": replace(good, block_n=256),
        "block_m is 48; accepted: 32, 64, 96,": replace(good, block_m=48),
        "block_k is 64; accepted: 256.": replace(good, block_k=64),
        "num_warps is 4; accepted with block_n 128: 8, 16 rows a warp.": replace(good, num_warps=4),
        "block_n is 192; accepted for n 4096 (padded to 4096): divisors of it.": replace(good, block_n=192, num_warps=12),
        "split_k is 16, but k 512 has 2 steps of 256: a share would be empty.": replace(good, split_k=16),
        "a thread needs about 220 registers, 152 are free": replace(good, block_n=192, num_warps=12, block_m=256),
        "stream_k is True; accepted by gemm_any_wgmma, which does not use it: False.": replace(good, stream_k=True),
    }
    for sentence, schedule in wrong.items():
        reasons = legal(work(4, 64, k=512), schedule, H200)
        assert any(reason.startswith(sentence) for reason in reasons), (sentence, reasons)
    (reason,) = legal(work(2, 64), good, H200)
    assert reason == "codes have 2 bits; accepted: 3 and more. Use gemm_any."
    (reason,) = legal(work(6, 64), replace(good, num_stages=8, block_m=128), H200)
    assert reason.startswith("1 blocks need")


@pytest.mark.parametrize("min_blocks", [1, 2])
@pytest.mark.parametrize("num_warps", [4, 8, 12])
def test_registers_are_handed_on_and_not_made(num_warps: int, min_blocks: int) -> None:
    threads = num_warps * 32 + any_wgmma.PRODUCERS
    loading, computing = any_wgmma.registers(Schedule(any_wgmma.PROGRAM, num_warps * 16, 32, 256, 2, num_warps, min_blocks=min_blocks))
    given = min(255, Target.REGISTERS_PER_SM // (threads * min_blocks)) // 8 * 8
    assert loading * any_wgmma.PRODUCERS + computing * num_warps * 32 <= given * threads
    assert loading % 8 == computing % 8 == 0 and 24 <= loading <= computing <= 240
