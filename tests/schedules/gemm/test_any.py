"""The rules of the programs for bit planes: what they accept and say, candidates for every device, and what their models expect."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from tilebit.layouts.formats import CODEBOOK_BITS, GemmFormat
from tilebit.schedules.gemm import any_binary, any_wgmma
from tilebit.schedules.gemm.any import ARCHES, PROGRAM, copies, shared_bytes, table_bytes
from tilebit.schedules.gemm.any_binary_cost import any_binary_estimate
from tilebit.schedules.gemm.any_cost import any_estimate
from tilebit.schedules.gemm.operation import ANY, ANY_WGMMA
from tilebit.schedules.gemm.rules import TICKETS, workspace_words
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import candidates, find_rule, legal
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
        single = {any_binary.PROGRAM} if m == 1 and bits in any_binary.BITS and n > 33 else set()  # 33 x 31 has no eight warps' work
        assert {schedule.program for schedule in found} == {PROGRAM} | single | ({any_wgmma.PROGRAM} if many else set())


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
    (reason,) = legal(work(4), replace(GOOD, block_n=16, num_warps=16, num_stages=3), H200)
    assert "1 blocks need" in reason
    (reason,) = legal(work(3, m=1, n=1 << 20), replace(GOOD, split_k=2, block_m=1), H200)
    assert "of 32768 tiles; accepted: at most 16384 tiles, or no split." in reason
    (reason,) = legal(Workload(1, 64, 64, GemmFormat.parse("w4a16_g128")), replace(GOOD, block_m=1), H200)
    assert reason == "format is w4a16_g128; gemm_any has no codec for it."


def test_tables_by_hand() -> None:
    """An entry of 16 rows is 16 words for four lanes each; of pairs of 3 bits the largest index is 7 * 16 + 7."""
    assert table_bytes(3) == 120 * 16 * 4 * 4 and table_bytes(4) == table_bytes(8) == 65536 and table_bytes(5) == 8192
    assert shared_bytes(work(3), GOOD, H200) == 2 * 30720 + 8 * 8 * 512
    assert shared_bytes(work(3, 4), replace(GOOD, block_m=4), H200) == 2 * 30720 + 8 * 4 * 576


def test_two_copies_of_a_table_where_four_do_not_fit() -> None:
    """Of pairs of 4 bits, for two tiles of rows: half of 128 KiB. Two blocks on an SM have no more room each."""
    one, two = replace(GOOD, num_warps=4), replace(GOOD, num_warps=4, min_blocks=2)
    assert [copies(work(4), s, H200) for s in (one, two, replace(two, block_n=16))] == [4, 2, 4]
    assert [copies(work(bits), two, H200) for bits in (3, 4, 5, 8)] == [4, 2, 4, 4]
    assert shared_bytes(work(4), one, H200) - shared_bytes(work(4), two, H200) == 65536
    assert copies(work(4), one, target_from_name("sm_86")) == 2
    assert legal(work(4), two, H200) == [] == legal(work(4), replace(one, num_warps=2), target_from_name("sm_86"))


def test_fewer_bits_and_fewer_rows_take_less() -> None:
    large = [select(work(bits, 1, 57344, 8192), H200) for bits in CODEBOOK_BITS]
    times = [find_rule(s.program).estimate(work(bits, 1, 57344, 8192), s, H200).us for bits, s in zip(CODEBOOK_BITS, large, strict=True)]
    assert times == sorted(times)
    for bits in CODEBOOK_BITS:
        for rule in (ANY, ANY_WGMMA):
            problems = [work(bits, m) for m in (1, 8, 16, 64, 256)]
            of_rows = [min((rule.estimate(w, s, H200).us for s in rule.candidates(w, H200)), default=0.0) for w in problems]
            assert of_rows == sorted(of_rows), (bits, rule.program)


def test_what_the_program_of_many_rows_accepts() -> None:
    good = Schedule(any_wgmma.PROGRAM, 128, 64, 256, 4, 8)
    pair = replace(good, cluster=2)
    assert all(legal(work(4, 64), s, H200) == [] for s in (good, replace(good, stream_k=True), pair, replace(pair, stream_k=True)))
    wrong = {
        "block_n is 96; accepted: 64, 128, 192, 256.": replace(good, block_n=96),
        "block_m is 48; accepted: 32, 64, 96,": replace(good, block_m=48),
        "block_k is 64; accepted: 256.": replace(good, block_k=64),
        "num_warps is 4; accepted with block_n 128: 8, 16 rows a warp.": replace(good, num_warps=4),
        "block_n is 192; accepted for n 4096 (padded to 4096): divisors of it.": replace(good, block_n=192, num_warps=12),
        "split_k is 16, but k 512 has 2 steps of 256: a share would be empty.": replace(good, split_k=16),
        "a thread needs about 236 registers, 160 are free": replace(good, block_n=192, num_warps=12, block_m=256),
        "stream_k goes with split_k 2; accepted: split_k 1.": replace(good, stream_k=True, split_k=2),
        "cluster is 4; accepted: 1, 2.": replace(good, cluster=4),
        "cluster is 2 and split_k 2; accepted: one of them 1.": replace(pair, split_k=2),
        "cluster is 2 and block_n 64; accepted: block_n 128, or cluster 1.": replace(pair, block_n=64, num_warps=4),
        "min_blocks is 4; accepted: 1 to 3.": replace(good, min_blocks=4),
        "min_blocks is 3 and block_m 96; accepted: block_m up to 64, or fewer": replace(good, min_blocks=3, block_m=96),
    }
    for sentence, schedule in wrong.items():
        reasons = legal(work(4, 64, k=512), schedule, H200)
        assert any(reason.startswith(sentence) for reason in reasons), (sentence, reasons)
    (reason,) = legal(work(4, 64, n=384), replace(good, block_m=32, num_stages=2, split_k=2, block_n=192, num_warps=12), H200)
    assert reason == "12288 bytes of fp32 sums do not fit into the slots of x; use more num_stages."
    many = work(4, 16385 * 64, n=128)
    assert legal(many, replace(good, split_k=2), H200) == [], "two add up without a workspace"
    (reason,) = legal(many, replace(good, split_k=4), H200)
    assert reason.startswith("split_k is 4 of 16385 tiles; accepted: at most 8192 tiles")
    (reason,) = legal(many, replace(good, split_k=3), H200)
    assert reason.startswith("split_k is 3 of 16385 tiles; accepted: at most 16384 tiles, split_k 2")
    (reason,) = legal(work(2, 64), good, H200)
    assert reason == "codes have 2 bits; accepted: 3 and more. Use gemm_any."
    (reason,) = legal(work(6, 64), replace(good, num_stages=8, block_m=128), H200)
    assert reason.startswith("1 blocks need")


def test_shared_memory_of_the_program_of_many_rows_by_hand() -> None:
    """128 x 256: four copies of 64 numbers of 128 rows, planes of two steps, four slots of x, 32 columns on their way to y. Of a pair half
    of the tables, through whose place columns pass, half of the planes, and two places for operands of 64 rows. What is wider has planes
    of two steps only where they fit. 16 bytes say where a tile lies."""
    tile = Schedule(any_wgmma.PROGRAM, 128, 256, 256, 4, 8)
    pair, x, columns, static = replace(tile, cluster=2), 4 * 256 * 64 * 2, 128 * 32 * 2, any_wgmma.STATIC_SMEM + 16
    tables = 64 * 128 * 4 * 2
    assert any_wgmma.shared_bytes(work(6, 512), tile) == tables + 2 * 6 * 128 * 256 // 8 + x + columns + static
    assert any_wgmma.shared_bytes(work(6, 512), pair) == tables // 2 + 2 * 6 * 64 * 256 // 8 + 2 * 64 * 64 * 2 + x + static
    assert any_wgmma.shared_bytes(work(3, 512), pair) == columns + 2 * 3 * 64 * 256 // 8 + 2 * 64 * 64 * 2 + x + static  # no tables
    low, halved = replace(tile, block_m=32), replace(tile, block_m=32, split_k=2)  # of which a block stores 16 columns
    assert any_wgmma.shared_bytes(work(6, 32), low) - any_wgmma.shared_bytes(work(6, 32), halved) == 128 * 16 * 2
    assert [any_wgmma.copies(work(bits, 512), tile) for bits in (3, 6, 7, 8)] == [0, 4, 2, 2]
    assert [any_wgmma.copies(work(bits, 512), pair) for bits in (3, 6, 7, 8)] == [0, 4, 4, 2]
    assert any_wgmma.copies(work(8, 64), replace(pair, block_m=64)) == 4
    crowded = Schedule(any_wgmma.PROGRAM, 64, 64, 256, 4, 4, min_blocks=3)
    assert [any_wgmma.permuted(work(bits, 64), replace(crowded, min_blocks=2)) for bits in (3, 4, 5, 6)] == [4, 2, 1, 0]
    assert [any_wgmma.permuted(work(bits, 64), crowded) for bits in (3, 4, 5, 6)] == [4, 1, 0, 0]
    assert [any_wgmma.kept_registers(work(bits, 64), crowded) for bits in (3, 4, 5, 6)] == [8, 16, 0, 0]
    assert [any_wgmma.held_steps(work(8, 512), replace(pair, num_stages=slots)) for slots in (2, 3, 4)] == [2, 2, 1]
    assert {any_wgmma.held_steps(work(6, 512), replace(s, num_stages=slots)) for s in (tile, pair) for slots in (2, 4)} == {2}


def test_what_parts_of_a_tile_leave_in_a_workspace() -> None:
    """Of three parts each a tile; of four two clusters, whose blocks have half of one; of two nothing."""
    tile, sums = Schedule(any_wgmma.PROGRAM, 128, 64, 256, 4, 8), 32 * 128 * 64  # 32 tiles
    words = [workspace_words(work(4, 64), replace(tile, split_k=parts), H200) for parts in (1, 2, 3, 4, 6)]
    assert words == [0, 0, TICKETS + 3 * sums, TICKETS + 2 * sums, TICKETS + 3 * sums]


def test_two_parts_are_always_tried_below_1024_rows() -> None:
    for m, always in ((32, True), (256, True), (1024, False)):
        found = any_wgmma.any_wgmma_candidates(work(5, m, 57344, 8192), H200)
        whole, in_two = ({(s.block_n, s.block_m, s.min_blocks) for s in found if s.split_k == parts} for parts in (1, 2))
        assert (whole == in_two) == always


def test_parts_of_k_that_even_out_what_sms_get_are_tried() -> None:
    """Of 160 tiles two parts are 2.4 blocks an SM and four 4.8: the busiest SM has three and five."""
    found = any_wgmma.any_wgmma_candidates(work(4, 64, 10240, 8192), H200)
    parts = [{s.split_k for s in found if (s.block_n, s.block_m, s.min_blocks) == (64, 64, blocks)} for blocks in (1, 2, 3)]
    assert parts == [{1, 2}, {1, 2, 3}, {1, 2, 3, 4}], "at most twice as many blocks as have places"


def test_three_blocks_have_an_sm_where_tables_leave_room() -> None:
    for m in (32, 64):
        found = {bits: any_wgmma.any_wgmma_candidates(work(bits, m), H200) for bits in range(3, 9)}
        assert [bits for bits, tried in found.items() if any(s.min_blocks == 3 for s in tried)] == [3, 4, 5, 6], m
    assert not any(s.min_blocks == 3 and s.block_m > 32 for s in any_wgmma.any_wgmma_candidates(work(6, 64), H200))


def test_pairs_are_tried_for_more_rows_than_a_tile_has() -> None:
    for m, pairs in ((64, False), (256, True), (257, True), (1024, True)):
        found = any_wgmma.any_wgmma_candidates(work(8, m), H200)
        assert any(s.cluster == 2 for s in found) == pairs
        assert all(s.block_n == any_wgmma.CLUSTER_N and m > s.block_m >= 160 for s in found if s.cluster == 2)
    one, two = (replace(Schedule(any_wgmma.PROGRAM, 128, 256, 256, 2, 8), cluster=cluster) for cluster in (1, 2))
    for bits in (5, 6, 7, 8):
        assert ANY_WGMMA.estimate(work(bits, 1024), two, H200).us < ANY_WGMMA.estimate(work(bits, 1024), one, H200).us
    assert ANY_WGMMA.estimate(work(8, 257), two, H200).us == ANY_WGMMA.estimate(work(8, 512), two, H200).us
    assert ANY_WGMMA.estimate(work(8, 513), two, H200).us == ANY_WGMMA.estimate(work(8, 1024), two, H200).us  # three tiles are two pairs


@pytest.mark.parametrize("min_blocks", [1, 2, 3])
@pytest.mark.parametrize("num_warps", [4, 8, 12])
def test_registers_are_handed_on_and_not_made(num_warps: int, min_blocks: int) -> None:
    threads = num_warps * 32 + any_wgmma.PRODUCERS
    loading, computing = any_wgmma.registers(Schedule(any_wgmma.PROGRAM, num_warps * 16, 32, 256, 2, num_warps, min_blocks=min_blocks))
    given = min(255, Target.REGISTERS_PER_SM // (threads * min_blocks)) // 8 * 8
    assert loading * any_wgmma.PRODUCERS + computing * num_warps * 32 <= given * threads
    assert loading % 8 == computing % 8 == 0 and 24 <= loading <= computing <= 240


SINGLE = Schedule(any_binary.PROGRAM, 32, 1, 1, 6, 8)


def test_what_the_program_of_one_row_accepts() -> None:
    assert legal(work(3, 1), SINGLE, H200) == [] and legal(work(4, 5), SINGLE, H200) == []
    wrong = {
        "codes have 5 bits; accepted: 2, 3, 4. Use gemm_any.": (work(5, 1), SINGLE),
        "block_n is 24; accepted: 16, 32, 48, 64, 80, 96, 112, 128.": (work(3, 1), replace(SINGLE, block_n=24)),
        "block_m is 2; accepted: 1.": (work(3, 2), replace(SINGLE, block_m=2)),
        "num_stages is 1; accepted: 2 to 8.": (work(3, 1), replace(SINGLE, num_stages=1)),
        "num_warps is 8; accepted with block_n 48: multiples of 3, 16 channels a warp.": (work(3, 1, n=6144), replace(SINGLE, block_n=48)),
        "block_n is 48; accepted for n 4096 (padded to 4096): divisors of it.": (work(3, 1), replace(SINGLE, block_n=48, num_warps=9)),
        "4 warps share k, but k 700 has 3 steps of 256; use fewer num_warps or a larger block_n.": (work(3, 1, k=700), SINGLE),
        "a block needs 341248 bytes of shared memory, 232448 are there": (work(4, 1, k=1 << 16), replace(SINGLE, num_stages=7)),
        "a thread needs about 232 registers, 168 are free; use fewer num_warps.": (work(4, 1), replace(SINGLE, num_warps=12)),
        "min_blocks is 2; accepted by gemm_any_binary, which does not use it: 1.": (work(3, 1), replace(SINGLE, min_blocks=2)),
    }
    for sentence, (workload, schedule) in wrong.items():
        reasons = legal(workload, schedule, H200)
        assert any(reason.startswith(sentence) for reason in reasons), (sentence, reasons)


def test_tiles_of_one_row_fill_the_sms() -> None:
    """What was fastest on an H200 is tried: 48 channels at n = 6144, whose 128 tiles are one for each of nearly all of 132 SMs."""
    tried = any_binary.binary_candidates(work(3, 1, n=6144), H200)
    assert Schedule(any_binary.PROGRAM, 48, 1, 1, 6, 12) in tried
    assert any_binary.fill(work(3, 1, n=6144), Schedule(any_binary.PROGRAM, 48, 1, 1, 6, 12), H200) == pytest.approx(128 / 132 * 16 / 16)
    assert any_binary.binary_candidates(work(3, 2), H200) == [] == any_binary.binary_candidates(work(5, 1), H200)
    deep = any_binary.binary_candidates(work(4, 1, 8192, 28672), H200)
    assert deep and max(s.num_stages for s in deep) == 6


def test_one_row_of_few_bits_is_not_looked_up_where_weights_are_large() -> None:
    for bits, n, k in ((3, 57344, 8192), (4, 57344, 8192), (3, 8192, 28672), (3, 28672, 4096)):
        workload = work(bits, 1, n, k)
        counted = min(any_binary_estimate(workload, s, H200).us for s in any_binary.binary_candidates(workload, H200))
        looked_up = min(any_estimate(workload, s, H200).us for s in ANY.candidates(workload, H200))
        assert counted < looked_up, (bits, n, k)
