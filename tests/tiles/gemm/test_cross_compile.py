"""Every CUDA program compiled for every architecture it runs on, without a GPU, over schedules that between them use each value that
matters.

One kernel a test, so that test workers share them out. Each must come out as the schedule promised: linted, without spills, within shared
memory, on the tensor cores, with wide loads, with the parameters of its workload.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from arrivals import early_arrivals
from goldens import check_source, parts_of
from lanes import one_of_each
from toolchain import encoded_machine_code, machine_code, needs_nvcc

from results.measure.static.conflicts import conflicts
from tilebit.layouts.formats import PER_CHANNEL, QuantFormat
from tilebit.schedules.gemm import any_wgmma
from tilebit.schedules.gemm.any_binary import shares, steps
from tilebit.schedules.gemm.rules import workspace_words
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import find_rule, legal
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileRequest
from tilebit.tiles.compiler.cuda import run_nvcc
from tilebit.tiles.compiler.kernel import Kernel
from tilebit.tiles.compiler.pool import CompilePool

HALF, BFLOAT = "float16", "bfloat16"
MXFP4, NVFP4 = map(QuantFormat.parse, ("w4a16_mxfp4", "w4a16_nvfp4"))
LQQ64, LQQ128, W8A8, ASYM = map(QuantFormat.parse, ("w4a8_lqq_g64", "w4a8_lqq_g128", "w8a8_channel", "w4a8_channel_asym"))
W8_GROUPS, W4_GROUPS = map(QuantFormat.parse, ("w8a8_g128", "w4a8_g128_asym"))
FP8, FP8_GROUPS, W4_FP8 = map(QuantFormat.parse, ("w8a8_fp8", "w8a8_fp8_g128", "w4a8_fp8"))
W3_ANY, W4_ANY, W5_ANY, W6_ANY, W8_ANY = (QuantFormat.parse(f"w{bits}a16_any") for bits in (3, 4, 5, 6, 8))
G32, G64Z, G128, G128Z, CHANNEL = (QuantFormat(4, *f) for f in ((32, True), (64, False), (128, True), (128, False), (PER_CHANNEL, True)))
B32Z, B64, B128Z, B_CHANNEL, B_CHANNEL_Z = (
    QuantFormat(8, *f) for f in ((32, False), (64, True), (128, False), (PER_CHANNEL, True), (PER_CHANNEL, False))
)

# arch, workload, schedule (block_n, block_m, block_k, stages, warps)
CASES = (
    ("sm_90a", Workload(4096, 4096, 4096, G128Z, HALF), Schedule("gemm_wgmma", 128, 256, 128, 3, 8, raster=8)),
    ("sm_90a", Workload(512, 8192, 4096, G128, BFLOAT), Schedule("gemm_wgmma", 128, 128, 64, 4, 8, raster=4, stream_k=True, cluster=2)),
    ("sm_90a", Workload(16, 4096, 4096, G64Z, HALF), Schedule("gemm_wgmma", 64, 16, 128, 6, 4, split_k=3, min_blocks=2)),
    ("sm_90a", Workload(16, 10240, 8192, B64, BFLOAT, bias=True), Schedule("gemm_wgmma", 256, 16, 64, 5, 16, cluster=2)),
    ("sm_90a", Workload(64, 505, 1001, G32, HALF, bias=True, token_scales=True), Schedule("gemm_wgmma", 128, 64, 64, 4, 4)),
    ("sm_90a", Workload(32, 505, 1001, B_CHANNEL_Z, HALF), Schedule("gemm_wgmma", 64, 32, 32, 8, 4, split_k=2)),
    ("sm_90a", Workload(256, 57344, 8192, B128Z, BFLOAT), Schedule("gemm_wgmma", 128, 128, 64, 4, 8, stream_k=True)),
    ("sm_90a", Workload(512, 6144, 4096, G128Z, HALF), Schedule("gemm_wgmma", 192, 128, 128, 4, 12, stream_k=True, cluster=2)),
    ("sm_80", Workload(1, 4096, 4096, G128, HALF), Schedule("gemm_mma", 64, 8, 128, 4, 4, split_k=2, min_blocks=2)),
    ("sm_86", Workload(256, 57344, 8192, B_CHANNEL, BFLOAT, bias=True), Schedule("gemm_mma", 128, 64, 64, 3, 8, raster=4)),
    ("sm_89", Workload(64, 505, 1001, B32Z, HALF, token_scales=True), Schedule("gemm_mma", 256, 32, 32, 3, 16)),
    ("sm_90a", Workload(512, 4096, 4096, G64Z, BFLOAT), Schedule("gemm_mma", 128, 128, 64, 2, 8)),
    ("sm_80", Workload(1, 4096, 4096, G128Z, HALF), Schedule("gemm_stream", 16, 1, 128, 4, 8, split_k=2)),
    ("sm_86", Workload(16, 505, 1001, G32, BFLOAT, bias=True, token_scales=True), Schedule("gemm_stream", 64, 16, 64, 3, 4)),
    ("sm_89", Workload(4, 4096, 4096, B_CHANNEL_Z, HALF), Schedule("gemm_stream", 128, 4, 64, 2, 4, min_blocks=2)),
    ("sm_90a", Workload(8, 4096, 4096, B64, BFLOAT), Schedule("gemm_stream", 32, 8, 32, 6, 4)),
    ("sm_90a", Workload(1, 4096, 4096, G128Z, HALF), Schedule("gemm_stream_bulk", 32, 1, 128, 2, 16)),
    ("sm_90a", Workload(16, 4096, 4096, G64Z, BFLOAT, bias=True), Schedule("gemm_stream_bulk", 64, 16, 64, 4, 8, split_k=4)),
    ("sm_90a", Workload(2, 57344, 8192, CHANNEL, HALF), Schedule("gemm_stream_bulk", 224, 2, 128, 2, 4, min_blocks=2)),
    ("sm_90a", Workload(8, 505, 1001, B32Z, HALF, token_scales=True), Schedule("gemm_stream_bulk", 64, 8, 32, 8, 4)),
    ("sm_90a", Workload(4, 640, 4096, B_CHANNEL, BFLOAT), Schedule("gemm_stream_bulk", 80, 4, 64, 3, 10)),
    ("sm_90a", Workload(512, 4096, 4096, MXFP4, BFLOAT), Schedule("gemm_wgmma", 128, 256, 64, 4, 8, raster=8)),
    ("sm_90a", Workload(256, 505, 1001, NVFP4, HALF, bias=True), Schedule("gemm_wgmma", 128, 128, 64, 4, 8)),
    ("sm_90a", Workload(4096, 4096, 14336, LQQ64, HALF), Schedule("gemm_wgmma", 128, 256, 256, 2, 8)),
    ("sm_90a", Workload(256, 505, 1001, LQQ128, BFLOAT, bias=True), Schedule("gemm_wgmma", 128, 128, 128, 4, 8, split_k=2)),
    ("sm_90a", Workload(64, 4096, 4096, W8A8, HALF), Schedule("gemm_wgmma", 64, 64, 128, 4, 4, split_k=3)),
    ("sm_90a", Workload(1, 4096, 4096, LQQ128, HALF), Schedule("gemm_stream_bulk", 32, 1, 128, 2, 16)),
    ("sm_90a", Workload(16, 4096, 4096, W8A8, BFLOAT, bias=True), Schedule("gemm_stream_bulk", 64, 16, 128, 2, 8, split_k=2)),
    ("sm_80", Workload(8, 505, 960, LQQ64, BFLOAT), Schedule("gemm_stream", 64, 8, 64, 3, 4)),
    ("sm_90a", Workload(1, 57344, 8192, W4_GROUPS, HALF), Schedule("gemm_stream_bulk", 224, 1, 128, 2, 6, min_blocks=2)),
    ("sm_90a", Workload(16, 448, 4096, W8_GROUPS, BFLOAT, bias=True), Schedule("gemm_stream_bulk", 448, 16, 64, 3, 7, split_k=2)),
    ("sm_80", Workload(8, 505, 960, W8_GROUPS, BFLOAT), Schedule("gemm_stream", 64, 8, 64, 3, 4)),
    ("sm_86", Workload(16, 4096, 4096, W4_GROUPS, HALF), Schedule("gemm_stream", 128, 16, 128, 2, 6, split_k=2)),
    ("sm_90a", Workload(300, 505, 1001, ASYM, BFLOAT, bias=True), Schedule("gemm_wgmma", 64, 128, 128, 4, 4)),
    ("sm_90a", Workload(4096, 4096, 14336, W4_GROUPS, HALF), Schedule("gemm_wgmma", 128, 128, 128, 5, 8)),
    ("sm_90a", Workload(96, 505, 1001, W8_GROUPS, BFLOAT, bias=True), Schedule("gemm_wgmma", 192, 80, 128, 4, 12, stream_k=True)),
    ("sm_90a", Workload(250, 505, 1001, W4_GROUPS, HALF, bias=True, width=600), Schedule("gemm_wgmma", 128, 128, 128, 4, 8)),
    (
        "sm_90a", Workload(1024, 31552, 4096, W4_GROUPS, HALF, width=28672, nibbles=True),
        Schedule("gemm_wgmma", 128, 128, 128, 6, 8, stream_k=True, joined=True),
    ),
    (
        "sm_90a", Workload(300, 496, 1001, LQQ128, BFLOAT, bias=True, width=400, nibbles=True),
        Schedule("gemm_wgmma", 64, 128, 128, 4, 4, split_k=2, joined=True),
    ),
    ("sm_90a", Workload(16, 505, 4096, W8_GROUPS, BFLOAT, width=4096), Schedule("gemm_wgmma", 64, 16, 128, 6, 4, split_k=2)),
    ("sm_90a", Workload(4096, 4096, 14336, FP8, BFLOAT), Schedule("gemm_wgmma", 128, 128, 128, 5, 8, raster=8)),
    ("sm_90a", Workload(300, 505, 1001, FP8_GROUPS, HALF, bias=True), Schedule("gemm_wgmma", 128, 96, 128, 4, 8, stream_k=True)),
    ("sm_90a", Workload(64, 505, 1001, W4_FP8, BFLOAT, bias=True), Schedule("gemm_wgmma", 128, 64, 128, 4, 8, split_k=2)),
    ("sm_89", Workload(64, 505, 1001, FP8, HALF, bias=True), Schedule("gemm_mma", 128, 64, 128, 3, 8)),
    ("sm_89", Workload(32, 505, 1001, FP8_GROUPS, BFLOAT), Schedule("gemm_mma", 64, 32, 128, 3, 4)),
    ("sm_89", Workload(128, 505, 1001, W4_FP8, HALF), Schedule("gemm_mma", 128, 128, 128, 2, 8)),
    ("sm_90a", Workload(16, 4096, 4096, FP8, HALF, bias=True), Schedule("gemm_stream_bulk", 64, 16, 128, 2, 8, split_k=2)),
    ("sm_90a", Workload(1, 4096, 4096, W4_FP8, BFLOAT), Schedule("gemm_stream_bulk", 32, 1, 128, 2, 16)),
    ("sm_89", Workload(8, 505, 960, W4_FP8, HALF, bias=True), Schedule("gemm_stream", 64, 8, 64, 3, 4)),
    ("sm_86", Workload(65, 505, 1001, W4_GROUPS, HALF, width=600), Schedule("gemm_mma", 128, 64, 128, 3, 8)),
    ("sm_86", Workload(64, 505, 1001, MXFP4, HALF), Schedule("gemm_mma", 128, 64, 64, 3, 8)),
    ("sm_80", Workload(8, 4096, 4096, LQQ128, HALF), Schedule("gemm_mma", 64, 8, 128, 5, 4, split_k=4, min_blocks=4)),
    ("sm_86", Workload(300, 505, 1001, W8A8, BFLOAT, bias=True), Schedule("gemm_mma", 128, 64, 128, 3, 8)),
    ("sm_89", Workload(4096, 4096, 4096, LQQ64, HALF), Schedule("gemm_mma", 256, 128, 128, 2, 16, raster=4)),
    ("sm_90a", Workload(64, 576, 576, LQQ128, BFLOAT), Schedule("gemm_mma", 64, 64, 64, 4, 4, split_k=3)),
    ("sm_90a", Workload(8, 4096, 4096, NVFP4, BFLOAT), Schedule("gemm_stream_bulk", 64, 8, 128, 2, 8)),
    ("sm_89", Workload(4, 4096, 4096, MXFP4, BFLOAT), Schedule("gemm_stream", 128, 4, 64, 2, 4, min_blocks=2)),
    ("sm_90a", Workload(16, 4096, 4096, MXFP4, HALF), Schedule("gemm_stream_bulk", 64, 16, 128, 2, 8, split_k=2)),
    ("sm_90a", Workload(1, 57344, 8192, W3_ANY, HALF), Schedule("gemm_any", 32, 1, 1, 3, 4, min_blocks=2)),
    ("sm_80", Workload(8, 505, 1001, W4_ANY, BFLOAT, bias=True), Schedule("gemm_any", 16, 8, 1, 2, 4, split_k=2)),
    ("sm_86", Workload(2, 4096, 4096, W8_ANY, BFLOAT), Schedule("gemm_any", 16, 2, 1, 1, 4)),
    ("sm_90a", Workload(16, 57344, 8192, W4_ANY, HALF), Schedule("gemm_any", 32, 16, 1, 1, 4, min_blocks=2)),
    ("sm_89", Workload(16, 4096, 4096, W3_ANY, HALF, token_scales=True), Schedule("gemm_any", 16, 16, 1, 1, 4)),
    ("sm_90a", Workload(4, 4096, 14336, W8_ANY, HALF), Schedule("gemm_any", 32, 4, 1, 1, 8)),
    ("sm_90a", Workload(1, 57344, 8192, W4_ANY, HALF), Schedule("gemm_any_binary", 64, 1, 1, 6, 8)),
    ("sm_90a", Workload(1, 6144, 4096, W3_ANY, BFLOAT, bias=True), Schedule("gemm_any_binary", 48, 1, 1, 6, 12)),
    ("sm_80", Workload(2, 505, 1001, W4_ANY, BFLOAT, residual=True), Schedule("gemm_any_binary", 32, 1, 1, 4, 8)),
    ("sm_86", Workload(1, 4096, 4096, W3_ANY, HALF, token_scales=True), Schedule("gemm_any_binary", 16, 1, 1, 4, 8)),
    ("sm_89", Workload(1, 4096, 4096, W4_ANY, HALF, gate="silu"), Schedule("gemm_any_binary", 32, 1, 1, 3, 8)),
    ("sm_90a", Workload(64, 8192, 8192, W3_ANY, HALF), Schedule("gemm_any_wgmma", 128, 64, 256, 8, 8, split_k=2)),
    ("sm_90a", Workload(256, 505, 1001, W4_ANY, BFLOAT, bias=True), Schedule("gemm_any_wgmma", 128, 256, 256, 4, 8)),
    ("sm_90a", Workload(1024, 4096, 4096, W8_ANY, HALF, residual=True), Schedule("gemm_any_wgmma", 64, 192, 256, 4, 4, raster=8)),
    ("sm_90a", Workload(256, 10240, 8192, W5_ANY, HALF), Schedule("gemm_any_wgmma", 128, 256, 256, 4, 8, stream_k=True)),
    ("sm_90a", Workload(32, 4096, 4096, W8_ANY, BFLOAT), Schedule("gemm_any_wgmma", 64, 32, 256, 6, 4)),
    ("sm_90a", Workload(64, 4096, 4096, W5_ANY, HALF), Schedule("gemm_any_wgmma", 64, 64, 256, 8, 4, split_k=2, min_blocks=2)),
    ("sm_90a", Workload(64, 6144, 4096, W4_ANY, BFLOAT, bias=True), Schedule("gemm_any_wgmma", 192, 64, 256, 4, 12, split_k=4)),
    ("sm_90a", Workload(32, 8192, 8192, W3_ANY, BFLOAT), Schedule("gemm_any_wgmma", 256, 32, 256, 8, 16, stream_k=True)),
    ("sm_90a", Workload(160, 6144, 4096, W4_ANY, HALF, gate="silu"), Schedule("gemm_any_wgmma", 192, 96, 256, 4, 12)),
    ("sm_90a", Workload(1024, 4096, 4096, W8_ANY, HALF), Schedule("gemm_any_wgmma", 128, 256, 256, 4, 8, stream_k=True, cluster=2)),
    ("sm_90a", Workload(512, 505, 1001, W5_ANY, BFLOAT, bias=True), Schedule("gemm_any_wgmma", 128, 256, 256, 4, 8, cluster=2)),
    ("sm_90a", Workload(64, 10240, 8192, W4_ANY, HALF), Schedule("gemm_any_wgmma", 64, 64, 256, 4, 4, split_k=4, min_blocks=3)),
    ("sm_90a", Workload(64, 8192, 28672, W5_ANY, BFLOAT), Schedule("gemm_any_wgmma", 64, 64, 256, 4, 4, split_k=3, min_blocks=3)),
    ("sm_90a", Workload(32, 28672, 4096, W6_ANY, HALF), Schedule("gemm_any_wgmma", 64, 32, 256, 3, 4, stream_k=True, min_blocks=3)),
    ("sm_90a", Workload(2048, 4096, 4096, G128, HALF, residual=True), Schedule("gemm_wgmma", 128, 256, 128, 3, 8, stream_k=True)),
    ("sm_90a", Workload(128, 505, 1001, G64Z, BFLOAT, bias=True, residual=True), Schedule("gemm_wgmma", 128, 64, 64, 4, 4, split_k=2)),
    ("sm_90a", Workload(64, 4096, 14336, G128, BFLOAT, bias=True), Schedule("gemm_wgmma", 128, 64, 128, 4, 8, split_k=4)),
    ("sm_90a", Workload(128, 505, 4096, W8_GROUPS, HALF), Schedule("gemm_wgmma", 128, 128, 128, 4, 8, split_k=6)),
    ("sm_90a", Workload(1024, 28672, 4096, G128, HALF, gate="silu"), Schedule("gemm_wgmma", 128, 256, 128, 3, 8, stream_k=True)),
    ("sm_90a", Workload(48, 512, 1001, LQQ128, BFLOAT, bias=True, gate="gelu"), Schedule("gemm_wgmma", 192, 48, 128, 4, 12)),
    ("sm_86", Workload(64, 505, 1001, G64Z, HALF, bias=True, residual=True), Schedule("gemm_mma", 128, 64, 64, 3, 8)),
    ("sm_80", Workload(256, 512, 1001, G128, BFLOAT, gate="silu"), Schedule("gemm_mma", 64, 128, 64, 3, 4)),
    ("sm_80", Workload(7, 512, 1001, G128, HALF, bias=True, gate="gelu_tanh"), Schedule("gemm_mma", 64, 8, 64, 3, 4)),
    ("sm_90a", Workload(16, 4096, 14336, G128, HALF, residual=True), Schedule("gemm_stream_bulk", 64, 16, 128, 2, 8, split_k=2)),
    (
        "sm_90a", Workload(1, 28672, 4096, G128, HALF, gate="silu", norm=True, eps=1e-5),
        Schedule("gemm_stream_bulk", 256, 1, 128, 2, 12),
    ),
    (
        "sm_90a", Workload(16, 28672, 4096, G128, BFLOAT, gate="silu", norm=True, eps=1e-5),
        Schedule("gemm_stream_bulk", 256, 16, 128, 2, 12),
    ),
    (
        "sm_90a", Workload(1, 28672, 4096, G128, HALF, gate="silu", gate_halves=True),
        Schedule("gemm_stream_bulk", 224, 1, 128, 2, 8),
    ),
    (
        "sm_90a", Workload(16, 28672, 4096, G128, BFLOAT, gate="silu", gate_halves=True),
        Schedule("gemm_stream_bulk", 256, 16, 128, 2, 16),
    ),
    (
        "sm_80", Workload(4, 28672, 4096, G128Z, HALF, bias=True, gate="gelu", gate_halves=True),
        Schedule("gemm_stream", 128, 4, 128, 2, 8),
    ),
    ("sm_90a", Workload(16, 6144, 4096, G128Z, HALF, norm=True, eps=1e-6), Schedule("gemm_stream_bulk", 96, 16, 128, 2, 8, split_k=2)),
    ("sm_89", Workload(3, 4096, 4096, B64, HALF, residual=True, norm=True, eps=1e-5), Schedule("gemm_stream", 64, 4, 64, 3, 4, split_k=2)),
    ("sm_80", Workload(8, 512, 1001, W4_ANY, BFLOAT, bias=True, gate="silu"), Schedule("gemm_any", 16, 8, 1, 2, 4, split_k=2)),
)  # fmt: skip
ANY, ANY_BINARY, ANY_WGMMA = "gemm_any", "gemm_any_binary", "gemm_any_wgmma"
TILED, STREAMED = ("gemm_wgmma", "gemm_mma"), ("gemm_stream", "gemm_stream_bulk")


def label(case: tuple[str, Workload, Schedule]) -> str:
    arch, w, s = case
    return f"{arch}-{s.program}-{w.format.name}-{w.dtype}-m{w.m}-{s.block_n}x{s.block_m}x{s.block_k}-split{s.split_k}{parts_of(w)}"


def test_the_cases_use_every_value_and_are_legal():
    for arch, workload, schedule in CASES:
        assert legal(workload, schedule, target_from_name(arch)) == [], (workload, schedule)
    for name in (*TILED, *STREAMED):
        mine = [(a, w, s) for a, w, s in CASES if s.program == name]
        assert {a for a, _, _ in mine} == set(find_rule(name).arches)
        assert {w.dtype for _, w, _ in mine} == {HALF, BFLOAT}
        assert {(w.format.bits, w.format.symmetric) for _, w, _ in mine} == {(b, s) for b in (4, 8) for s in (True, False)}
        assert {w.format.group_size for _, w, _ in mine} >= {32, 64, 128, PER_CHANNEL}
        assert {w.bias for _, w, _ in mine} == {True, False}
        assert {s.block_k for _, w, s in mine if not w.format.x} == {32, 64, 128}
        assert any(s.split_k > 1 for _, _, s in mine) and any(s.min_blocks > 1 for _, _, s in mine)
        assert any(w.n % 64 and w.k % 8 for _, w, _ in mine)
    served = [(a, w, s) for a, w, s in CASES if s.program == ANY]
    assert {a for a, _, _ in served} == set(find_rule(ANY).arches) and {w.dtype for _, w, _ in served} == {HALF, BFLOAT}
    assert {s.block_m for _, _, s in served} == {1, 2, 4, 8, 16} and {s.split_k > 1 for _, _, s in served} == {True, False}
    single = [(a, w) for a, w, s in CASES if s.program == ANY_BINARY]
    assert {a for a, _ in single} == set(find_rule(ANY_BINARY).arches)
    assert {(w.format.bits, w.dtype) for _, w in single} == {(b, d) for b in (3, 4) for d in (HALF, BFLOAT)}
    many = [(w, s) for _, w, s in CASES if s.program == ANY_WGMMA]
    assert {w.dtype for w, _ in many} == {HALF, BFLOAT} and {s.block_n for _, s in many} == set(any_wgmma.BLOCK_N)
    assert {(s.stream_k, s.cluster) for _, s in many} == {(a, b) for a in (True, False) for b in (1, 2)}
    assert {s.split_k for _, s in many} == {1, 2, 3, 4}, "alone, a cluster, blocks and clusters that meet in a workspace"
    assert {s.min_blocks for _, s in many} == {1, 2, 3}
    looked_up = {(any_wgmma.copies(w, s), any_wgmma.permuted(w, s)) for w, s in many}
    assert looked_up == {(0, 4), (4, 2), (4, 1), (4, 0), (2, 0)}
    for name in TILED:
        schedules = [s for _, _, s in CASES if s.program == name]
        three = name == "gemm_wgmma"  # warpgroups, and slabs
        assert {s.block_n for s in schedules} == {64, 128, 256} | ({192} if three else set())
        assert {s.num_warps for s in schedules} == {4, 8, 16} | ({12} if three else set())
        assert any(s.raster for s in schedules)
    wgmma = [(w, s) for _, w, s in CASES if s.program == "gemm_wgmma"]
    assert {(s.stream_k, s.cluster > 1) for _, s in wgmma} == {(a, b) for a in (True, False) for b in (True, False)}
    assert any(-(-w.k // s.block_k) % s.split_k for w, s in wgmma), "shares of different length"
    streamed = [s for _, _, s in CASES if s.program in STREAMED]
    assert {s.block_m for s in streamed} == {1, 2, 4, 8, 16}
    assert {next(rows for rows in (64, 32, 16) if s.block_n % rows == 0) for s in streamed} == {16, 32, 64}, "rows of a warp"
    assert any(s.block_n > 64 for s in streamed), "warps that share x"


@pytest.fixture(scope="module")
def pool() -> Iterator[CompilePool]:
    with CompilePool(jobs=1, cache=ArtifactCache(), keep=True) as one:
        yield one


@needs_nvcc
@pytest.mark.parametrize("case", one_of_each(CASES, lambda case: (case[2].program == ANY, case[2].program in TILED)), ids=label)
def test_compiles_as_promised(pool: CompilePool, case: tuple[str, Workload, Schedule]):
    arch, workload, schedule = case
    target = target_from_name(arch)
    (kernel,) = pool.compile([CompileRequest(schedule.program, workload, schedule, target)])
    assert isinstance(kernel, Kernel), kernel
    resources, code = kernel.resources, kernel.resources["instructions"]
    check_source(case, (kernel.path / "kernel.cu").read_text())
    assert kernel.manifest["lint"] == []  # not even a warning: these schedules are the ones we would ship
    assert kernel.manifest["prelude"] == "tilebit"
    assert resources["spills"] == 0 and resources["stack"] == 0
    assert 0 < resources["smem"] <= target.smem
    assert resources["registers"] * resources["threads"] * schedule.min_blocks <= 65536
    loading = 128 if schedule.program in ("gemm_wgmma", ANY_WGMMA) else 0
    assert resources["threads"] == schedule.num_warps * 32 + loading
    assert code["wgmma" if loading else "mma"] > 0
    wide = "ldmatrix" if schedule.program == ANY and schedule.block_m >= 8 else "wide_shared_loads"  # of x; weights come from memory
    assert code[wide] > 0 and code["float_atomics"] == 0
    assert bool(code["dependent_waits"]) == (schedule.program in ("gemm_wgmma", "gemm_stream_bulk"))
    zeros = [] if workload.format.symmetric else ["zeros"]
    bias = ["bias"] if workload.bias else []
    workspace = ["workspace"] if workspace_words(workload, schedule, target) else []
    rows = ["row_scales"] if workload.format.row_scaled else []
    tokens = ["token_scales"] if workload.token_scales else []
    channels = ["channels"] if workload.width else []
    residual, norm = ["residual"] * workload.residual, ["norm_weight"] * workload.norm
    assert kernel.params == ("x", "weight", "scales", *zeros, *rows, *tokens, *bias, *residual, *channels, *norm, *workspace, "y")
    if workload.format.x:
        assert not any(conflicts(schedule, (kernel.path / "kernel.cu").read_text()).values())
    if schedule.program == "gemm_mma":
        check_early_copies(kernel)
    if schedule.program == "gemm_mma" and workload.format.integer_sums:
        check_integer_products(kernel, schedule)
    if workload.format.x == FP8.x:
        check_float_products(kernel, schedule)
    if schedule.joined:
        check_both_ways((kernel.path / "kernel.cu").read_text(), workload.format.step_sums)
    elif schedule.program == "gemm_wgmma":
        check_pipeline((kernel.path / "kernel.cu").read_text(), workload.format.step_sums, workload.format.x_grouped)
    if schedule.program == "gemm_wgmma" and workload.format.step_sums:  # scales are read when products are done, from TMA's places
        assert early_arrivals(encoded_machine_code(kernel.path / "kernel.cubin")) == []
    if schedule.program == ANY_WGMMA:  # planes, and operands of another block, which come 16 bytes at a time
        early = early_arrivals(encoded_machine_code(kernel.path / "kernel.cubin"))
        assert [load for load in early if load.startswith("LDS.128")] == []
    if schedule.program == "gemm_stream_bulk":
        check_early_requests(kernel)
    if schedule.program == ANY_BINARY:
        check_counted_products(kernel, workload, schedule)


def check_early_copies(kernel: Kernel) -> None:
    """Nothing that is to be on its way early is a plain load: each tile that a step reads is copied by cp.async."""
    source = (kernel.path / "kernel.cu").read_text()
    body = source[source.rindex("main_kernel(") :]
    assert not re.search(r"\*\)(?:Ss|Zs|Xs|Ws|As)\)\[[^;]*\] = ", body)


def check_integer_products(kernel: Kernel, schedule: Schedule) -> None:
    """Bytes are multiplied as bytes, sums become floats once."""
    source = (kernel.path / "kernel.cu").read_text()
    body = source[source.rindex("main_kernel(") :]
    assert set(re.findall(r"mma_sync<(.*?), (?:true|false)", body)) == {
        "tl::DataType::kInt8, tl::DataType::kInt8, tl::DataType::kInt32, 16, 8, 32"
    }
    sums = schedule.block_n * schedule.block_m // (schedule.num_warps * 32)
    assert len(re.findall(r"\(float\)\(?v_", body)) == 4 and f"float Y[{sums}];" in body and f"int sums[{sums}];" in body
    sass = machine_code(kernel.path / "kernel.cubin")
    assert set(re.findall(r"\b[HIQ]MMA[.\w]*", sass)) == {"IMMA.16832.S8.S8"}


def check_counted_products(kernel: Kernel, workload: Workload, schedule: Schedule) -> None:
    """Planes are multiplied as bits, three times for each set of them, and nothing else is: of a step once where counts begin, once where
    they go on, if a warp has more than one."""
    several = steps(workload) > shares(schedule)
    sass = machine_code(kernel.path / "kernel.cubin")
    found = re.findall(r"\b[A-Z]MMA[.\w]*", sass)
    assert set(found) == {"BMMA.168256.AND.POPC"} and len(found) == (1 + several) * 3 * ((1 << workload.format.bits) - 1)


def check_float_products(kernel: Kernel, schedule: Schedule) -> None:
    """e4m3 is multiplied as e4m3: nothing is converted, and no other product is there."""
    source = (kernel.path / "kernel.cu").read_text()
    body = source[source.rindex("main_kernel(") :]
    assert "fp8_e4_t(" not in body and "__tl_cvt" not in body
    if schedule.program in TILED:
        assert set(re.findall(r"(?:mma_sync|wgmma_rs)<(tl::DataType::\w+, tl::DataType::\w+, tl::DataType::\w+)", body)) == {
            "tl::DataType::kFloat8_e4m3, tl::DataType::kFloat8_e4m3, tl::DataType::kFloat32"
        }
        assert not re.search(r"\*\)(?:Ss|Zs|Xs|Ws)\)\[[^;]*\] = ", body)


@needs_nvcc
@pytest.mark.slow
def test_integer_products_in_ptx(tmp_path: Path):
    """What the compiler is given, also where no tool reads machine code: mma.m16n8k32 of bytes, no other."""
    arch, workload, schedule = next(case for case in CASES if case[2].program == "gemm_mma" and case[1].format == LQQ128)
    with CompilePool(jobs=1, cache=ArtifactCache(), keep=True) as pool:
        (kernel,) = pool.compile([CompileRequest(schedule.program, workload, schedule, target_from_name(arch))])
    assert isinstance(kernel, Kernel), kernel
    (tmp_path / "kernel.cu").write_text((kernel.path / "kernel.cu").read_text())
    _, ptx = run_nvcc(tmp_path, arch)
    assert set(re.findall(r"mma\.sync[.\w]*", ptx)) == {"mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"}
    assert len(re.findall(r"cvt\.rn\.f32\.s32", ptx)) == schedule.block_n * schedule.block_m // (schedule.num_warps * 32)


@needs_nvcc
@pytest.mark.slow
def test_an_arrival_without_a_fence_is_found(tmp_path: Path):
    """Of group-wise sums, whose scales are the last that a step's place is read for."""
    arch, workload, schedule = next(case for case in CASES if case[2].program == "gemm_wgmma" and case[1].format == W4_GROUPS)
    with CompilePool(jobs=1, cache=ArtifactCache(), keep=True) as pool:
        (kernel,) = pool.compile([CompileRequest(schedule.program, workload, schedule, target_from_name(arch))])
    assert isinstance(kernel, Kernel), kernel
    before, body = re.split(r"(?=main_kernel\([^;]*\{)", (kernel.path / "kernel.cu").read_text(), maxsplit=1)
    unfenced, count = re.subn(r"\n\s*tilebit::fence_before_bulk_copies\(\);", "", body)
    assert count == 1
    (tmp_path / "kernel.cu").write_text(before + unfenced)
    run_nvcc(tmp_path, arch)
    assert early_arrivals(encoded_machine_code(tmp_path / "kernel.cubin"))


# Of what a tile's end needs: waits of the warp that brings it, and of those that compute.
FREE, READY = "tilebit::await_stage((&(free[0])", "tilebit::await_stage((&(ready[0])"


def check_both_ways(source: str, step_sums: bool) -> None:
    """Of tiles of codes and of tiles of bytes: a loop for each, in which the same waits, products and releases follow one another in two
    parts, and loads for each part of either."""
    body = source[source.rindex("main_kernel(") :]
    _, weights, x, other, computing = re.split(r"for \(int \w+ = 0; \w+ < tilebit::Order<[^>]*>::(?:iterations|pieces)", body)
    if "tilebit::scatter_tile<" in other:  # tiles of bytes, of schedules in which others come after them
        check_order(x, FREE, "tilebit::bring_numbers<")  # of the first tile
        check_order(other, "await_stage((&(handed[0])", FREE, "tilebit::bring_numbers<", "tilebit::scatter_tile<", "tilebit::release<")
        assert other.count("wait_for_predecessor") == 1  # the computing warps'
    else:
        check_order(other, FREE, "tilebit::bring_numbers<")
    _, *loops = re.split(r"for \(int j\w* = 0;", computing)
    assert (
        len(loops) == 2
        and weights.count("tma_load(halves_desc") == 4
        and weights.count("tma_load(scales_desc") in ((2,) if step_sums else (1, 2))
    )
    for loop, operand in zip(loops, ("tilebit::dequantize_bytes<", "tilebit::join_nibbles<"), strict=True):
        loop = loop[: loop.rindex("wait_wgmma<0>()")] if READY in loop else loop
        product = (operand, "warpgroup_arrive()", "wgmma_rs<", "warpgroup_commit_batch()", "wait_wgmma<1>()")
        first = (operand, "wait_wgmma<0>()", "tilebit::add_group<", "tilebit::release<", *product[1:4]) if step_sums else product
        check_order(
            loop, "await_stage(", *first, *(() if step_sums else ("tilebit::release<",)), "await_stage(", *product, "tilebit::release<"
        )
        assert [loop.count(what) for what in ("await_stage(", operand, "wgmma_rs<", "tilebit::release<")] == [2, 2, 2, 2]
        assert sum(loop.count(other) for other in ("tilebit::dequantize_bytes<", "tilebit::join_nibbles<")) == 2


def check_pipeline(source: str, step_sums: bool, of_groups: bool) -> None:
    """What rare races depended on: each role waits for one barrier a part of an iteration and arrives once, no part of a stage is released
    before the product that reads it has ended, and only what no earlier kernel writes is loaded before the wait for that kernel."""
    body = source[source.rindex("main_kernel(") :]
    before, weights, x, numbers, computing = re.split(r"for \(int \w+ = 0; \w+ < tilebit::Order<[^>]*>::(?:iterations|pieces)", body)
    assert "wait_for_predecessor" not in before
    for role, last in ((weights, "].arrive()"), (x, "].arrive()"), (numbers, "tilebit::bring_numbers<")):
        # each text ends where the next role begins, with its wait
        assert role.count("wait_for_predecessor") == 1 and role.index("wait_for_predecessor") > role.rindex(last)
    check_order(numbers, FREE, "tilebit::bring_numbers<")
    computing, end = computing.split(READY)
    _, sending, received = end.partition("tilebit::send_half<")  # of a tile that two blocks share
    if not sending and "release<" in end:  # what ends of tiles need is handed back where there is another one
        check_order(end, "tilebit::finish_tile<", "tilebit::release<1>((&(free[0])")
    assert received.count("await_stage(") == received.count("tilebit::store_chunk<") and bool(sending) == ("store_chunk<" in received)
    dequantize = "tilebit::dequantize_bytes<" if "tilebit::dequantize_bytes<" in computing else "tilebit::dequantize<"
    parts = computing.count(dequantize)
    load_weight = ("].wait(", ".expect_transaction(", "tma_load(halves_desc")
    load_x = ("].wait(", ".expect_transaction(", "(x_desc")
    assert step_sums == ("tilebit::add_group<" in computing) and of_groups == ("tilebit::bring_token_scales<" in x)
    if step_sums:  # scales are those of sums, and come with the last part
        check_order(weights, *load_weight, "].arrive()", *load_weight, "tma_load(scales_desc", "].arrive()")
    else:
        check_order(weights, *load_weight, "tma_load(scales_desc", "].arrive()", *load_weight[: 3 * (parts - 1)])
    if of_groups:
        check_order(x, *load_x, "].arrive()", *load_x, "tilebit::bring_token_scales<")
    else:
        check_order(x, *(*load_x, "].arrive()") * parts)
    assert weights.count("tma_load(scales_desc") == 1
    product = (dequantize, "warpgroup_arrive()", "wgmma_rs<", "warpgroup_commit_batch()", f"wait_wgmma<{parts - 1}>()")
    if step_sums:
        add, issue = ("wait_wgmma<0>()", "tilebit::add_group<", "tilebit::release<"), product[1:4]
        check_order(computing, "await_stage(", dequantize, *add, *issue, "await_stage(", *product, "tilebit::release<", *add)
    elif parts == 1:
        check_order(computing, "await_stage(", *product, "tilebit::release<")
    else:  # a release: of the part before, whose product ends while one is under way
        check_order(computing, *("await_stage(", *product, "tilebit::release<") * 2, "wait_wgmma<0>()", "tilebit::release<")
    assert computing.count(f"wait_wgmma<{parts - 1}>()") == (1 if step_sums else parts)
    assert "x_desc" not in weights and "halves_desc" not in x
    for role, waits, hands_over, times in (
        (weights, "].wait(", "].arrive()", parts),
        (x, "].wait(", "tilebit::bring_token_scales<", 1) if of_groups else (x, "].wait(", "].arrive()", parts),
        (computing, "await_stage(", "tilebit::release<", 2 * parts - 1),
    ):
        assert role.count(waits) == parts and role.count(hands_over) == times
    assert "].wait(" not in computing


def check_order(text: str, *steps: str) -> None:
    """``steps`` follow one another in ``text``: each is found behind the one before it, the first time that it occurs there."""
    place = -1
    for step in steps:
        place = text.find(step, place + 1)
        assert place >= 0, (step, steps)


def check_early_requests(kernel: Kernel) -> None:
    """In a dependent launch the weights are on their way before the wait for the preceding kernel: the compiler must not move them."""
    sass = machine_code(kernel.path / "kernel.cubin")
    assert 0 <= sass.find("UBLKCP") < sass.index("ACQBULK")
