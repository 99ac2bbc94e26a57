"""Every CUDA program, through the whole gate of the tuner: the exact oracle (of attention: what the cache says, in fp64), random
values, poison, guard bands, the same bits twice. What `make gpu-smoke` runs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from gpu_kernels import compiled
from toolchain import needs_nvcc

from tilebit.autotune.problems import gate_of
from tilebit.autotune.problems.gemm import split_workspace
from tilebit.autotune.worker_process import launch
from tilebit.layouts.formats import QuantFormat
from tilebit.layouts.kv import RESIDUAL
from tilebit.layouts.kv_formats import KVFormat
from tilebit.schedules.activations.glue import GlueWorkload
from tilebit.schedules.activations.workload import QuantizeWorkload
from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.gemm.dense import DenseWorkload
from tilebit.schedules.gemm.expand import ExpandWorkload
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import legal, programs
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import detect_target, target_from_name
from tilebit.tiles.compiler.kernel import Kernel

if TYPE_CHECKING:
    from gpu_kernels import Built, Case

W4, W8 = QuantFormat(4, 128, symmetric=False), QuantFormat(8, 64)
MXFP4, NVFP4, LQQ = map(QuantFormat.parse, ("w4a16_mxfp4", "w4a16_nvfp4", "w4a8_lqq_g128"))
W8A8, ASYM = map(QuantFormat.parse, ("w8a8_channel", "w4a8_channel_asym"))
W8_GROUPS, W4_GROUPS = map(QuantFormat.parse, ("w8a8_g128", "w4a8_g128_asym"))
FP8, FP8_GROUPS, W4_FP8 = map(QuantFormat.parse, ("w8a8_fp8", "w8a8_fp8_g128", "w4a8_fp8"))
W3_ANY, W4_ANY, W5_ANY, W8_ANY = (QuantFormat.parse(f"w{bits}a16_any") for bits in (3, 4, 5, 8))
DECODE = AttentionWorkload("decode", 4, 2, 700, 8, 2, 128, KVFormat.from_name("kv4_channel"), lse=True)
APPEND = AttentionWorkload("append", 3, 140, 400, 2, 2, 128, KVFormat.from_name("kv4_token"))
GATHER = AttentionWorkload("gather", 3, 0, 400, 2, 2, 64, KVFormat.from_name("kvfp8"), "bfloat16")
PREFILL = AttentionWorkload("prefill", 2, 200, 200, 8, 2, 128, KVFormat(), lse=True)
CASES: tuple[Case, ...] = (
    (Workload(130, 505, 1001, W4, bias=True), Schedule("gemm_wgmma", 128, 128, 64, 3, 8, raster=4)),
    (Workload(33, 320, 1056, W8, "bfloat16"), Schedule("gemm_mma", 64, 16, 32, 3, 4)),
    (Workload(8, 505, 1001, W4, "bfloat16", bias=True), Schedule("gemm_stream", 64, 8, 64, 3, 8)),
    (Workload(2, 505, 1001, W4, bias=True), Schedule("gemm_stream_bulk", 32, 2, 64, 4, 8, split_k=2)),
    (Workload(5, 505, 1001, W4), Schedule("gemm_stream", 128, 8, 64, 2, 4, split_k=3)),  # sums by ticket
    (Workload(16, 512, 1152, W4, bias=True), Schedule("gemm_stream_bulk", 256, 16, 128, 2, 8)),  # warps apart by a step
    (Workload(130, 505, 1001, MXFP4, "bfloat16", bias=True), Schedule("gemm_wgmma", 128, 128, 64, 3, 8)),
    (Workload(33, 320, 1056, MXFP4, token_scales=True), Schedule("gemm_mma", 64, 16, 64, 3, 4)),
    (Workload(16, 505, 1001, MXFP4), Schedule("gemm_stream_bulk", 64, 16, 64, 2, 8, split_k=2)),
    (Workload(5, 505, 1001, MXFP4, "bfloat16", token_scales=True), Schedule("gemm_stream", 64, 8, 64, 3, 8)),
    (Workload(130, 505, 1001, NVFP4, bias=True, token_scales=True), Schedule("gemm_wgmma", 128, 128, 64, 3, 8)),
    (Workload(16, 505, 1001, NVFP4, "bfloat16", token_scales=True), Schedule("gemm_stream_bulk", 64, 16, 64, 2, 8, split_k=2)),
    (Workload(1, 505, 1001, W3_ANY, bias=True), Schedule("gemm_any", 32, 1, 1, 2, 4)),
    (Workload(8, 505, 1001, W4_ANY, "bfloat16", bias=True), Schedule("gemm_any", 16, 8, 1, 2, 8)),
    (Workload(17, 505, 1001, W8_ANY, token_scales=True), Schedule("gemm_any", 16, 16, 1, 2, 2, split_k=2)),
    (Workload(16, 505, 1001, W4_ANY, bias=True), Schedule("gemm_any", 32, 8, 1, 1, 2, min_blocks=2)),  # tables of two copies
    (Workload(1, 5050, 1001, W3_ANY, bias=True), Schedule("gemm_any_binary", 16, 1, 1, 4, 4)),
    (Workload(2, 505, 1001, W4_ANY, "bfloat16", residual=True), Schedule("gemm_any_binary", 64, 1, 1, 3, 8)),
    (Workload(33, 505, 1001, W3_ANY, bias=True), Schedule("gemm_any_wgmma", 128, 64, 256, 4, 8)),
    (Workload(300, 505, 1001, W4_ANY, "bfloat16", residual=True), Schedule("gemm_any_wgmma", 64, 128, 256, 3, 4, split_k=2)),
    (Workload(70, 505, 1001, W3_ANY, token_scales=True), Schedule("gemm_any_wgmma", 128, 64, 256, 4, 8, split_k=3)),
    (Workload(70, 505, 1001, W5_ANY, bias=True), Schedule("gemm_any_wgmma", 128, 64, 256, 4, 8, split_k=4)),
    (Workload(130, 512, 1152, W8_ANY, gate="silu"), Schedule("gemm_any_wgmma", 128, 96, 256, 3, 8)),
    (Workload(400, 8192, 1152, W5_ANY), Schedule("gemm_any_wgmma", 64, 128, 256, 4, 4, stream_k=True)),
    (Workload(300, 505, 1001, W5_ANY, "bfloat16"), Schedule("gemm_any_wgmma", 128, 160, 256, 4, 8, cluster=2)),
    (Workload(700, 8192, 1152, W8_ANY, bias=True), Schedule("gemm_any_wgmma", 128, 256, 256, 4, 8, stream_k=True, cluster=2)),
    (DenseWorkload(13, 505, 1000), Schedule("gemm_dense", 128, 16, 64, 4, 8)),
    (DenseWorkload(60, 640, 4096, "bfloat16"), Schedule("gemm_dense", 64, 64, 64, 3, 4, min_blocks=3)),
    (ExpandWorkload(505, 1001, 3), Schedule("expand_any", 1, 1, 1, num_warps=4)),
    (ExpandWorkload(505, 1001, 8, "bfloat16"), Schedule("expand_any", 1, 1, 1, num_warps=8)),
    (Workload(130, 505, 1001, FP8, bias=True), Schedule("gemm_wgmma", 128, 128, 128, 3, 8)),
    (Workload(130, 505, 576, FP8_GROUPS, "bfloat16"), Schedule("gemm_wgmma", 64, 16, 128, 3, 4, stream_k=True)),
    (Workload(33, 320, 1000, W4_FP8, bias=True), Schedule("gemm_wgmma", 128, 64, 128, 2, 8, split_k=2)),
    (Workload(33, 320, 576, FP8, "bfloat16"), Schedule("gemm_mma", 64, 32, 64, 3, 4, split_k=3)),
    (Workload(5, 505, 1001, FP8_GROUPS), Schedule("gemm_mma", 64, 8, 128, 3, 4)),
    (Workload(33, 320, 1000, W4_FP8, "bfloat16"), Schedule("gemm_mma", 64, 64, 128, 2, 4)),
    (Workload(5, 505, 1001, FP8, "bfloat16"), Schedule("gemm_stream", 128, 8, 64, 2, 4, split_k=3)),
    (Workload(8, 505, 1001, W4_FP8, bias=True), Schedule("gemm_stream", 64, 8, 128, 3, 8)),
    (Workload(2, 505, 1001, W4_FP8, bias=True), Schedule("gemm_stream_bulk", 32, 2, 128, 4, 8, split_k=2)),
    (Workload(16, 512, 1152, FP8), Schedule("gemm_stream_bulk", 256, 16, 64, 2, 8)),
    (Workload(130, 505, 1001, LQQ, bias=True), Schedule("gemm_wgmma", 128, 128, 256, 2, 8)),
    (Workload(130, 505, 1001, LQQ, "bfloat16"), Schedule("gemm_wgmma", 64, 16, 128, 3, 4, stream_k=True)),
    (Workload(33, 320, 1000, W8A8, bias=True), Schedule("gemm_wgmma", 64, 64, 128, 3, 4, split_k=2)),
    (Workload(33, 320, 576, LQQ, bias=True), Schedule("gemm_mma", 64, 32, 64, 3, 4, split_k=3)),
    (Workload(5, 505, 1001, W8A8, "bfloat16"), Schedule("gemm_mma", 64, 8, 128, 3, 4)),
    (Workload(130, 505, 1001, ASYM, "bfloat16", bias=True), Schedule("gemm_wgmma", 128, 128, 128, 3, 8)),
    (Workload(33, 320, 1000, ASYM), Schedule("gemm_wgmma", 64, 16, 64, 4, 4, stream_k=True)),
    (Workload(130, 505, 1001, W8_GROUPS, bias=True), Schedule("gemm_wgmma", 128, 128, 128, 3, 8)),
    (Workload(130, 505, 576, W4_GROUPS, "bfloat16"), Schedule("gemm_wgmma", 64, 16, 128, 3, 4, stream_k=True)),
    (Workload(33, 320, 576, W4_GROUPS, bias=True), Schedule("gemm_mma", 64, 32, 128, 3, 4, split_k=5)),
    (Workload(5, 505, 1001, W8_GROUPS, "bfloat16"), Schedule("gemm_mma", 64, 8, 128, 3, 4)),
    (Workload(33, 320, 1000, W4_GROUPS, bias=True), Schedule("gemm_wgmma", 128, 64, 128, 2, 8, split_k=2)),
    (Workload(8, 505, 1001, LQQ, "bfloat16", bias=True), Schedule("gemm_stream", 64, 8, 128, 3, 8)),
    (Workload(5, 505, 1001, W8A8), Schedule("gemm_stream", 128, 8, 64, 2, 4, split_k=3)),
    (Workload(2, 505, 1001, LQQ, bias=True), Schedule("gemm_stream_bulk", 32, 2, 128, 4, 8, split_k=2)),
    (Workload(16, 512, 1152, ASYM, "bfloat16"), Schedule("gemm_stream_bulk", 256, 16, 64, 2, 8)),
    (Workload(130, 505, 1001, W4, bias=True, residual=True), Schedule("gemm_wgmma", 128, 128, 64, 3, 8)),
    (Workload(130, 512, 1001, W4, "bfloat16", bias=True, gate="silu"), Schedule("gemm_wgmma", 128, 128, 64, 3, 8)),
    (Workload(33, 320, 1056, W8, "bfloat16", gate="gelu_tanh"), Schedule("gemm_mma", 64, 16, 32, 3, 4)),
    (Workload(33, 320, 1056, W8, residual=True), Schedule("gemm_mma", 64, 32, 32, 3, 4)),
    (Workload(5, 512, 1001, W4, gate="gelu", norm=True, eps=1e-5), Schedule("gemm_stream", 128, 8, 64, 2, 4, split_k=3)),
    (Workload(16, 512, 1152, W4, "bfloat16", gate="silu", norm=True, eps=1e-5), Schedule("gemm_stream_bulk", 256, 16, 128, 2, 8)),
    (Workload(2, 505, 1001, W4, residual=True, norm=True, eps=1e-6), Schedule("gemm_stream_bulk", 32, 2, 64, 4, 8, split_k=2)),
    (Workload(8, 512, 1001, W4_ANY, "bfloat16", gate="silu"), Schedule("gemm_any", 16, 8, 1, 2, 8, split_k=2)),
    (Workload(1, 505, 1001, W4_GROUPS, bias=True), Schedule("gemm_stream_bulk", 32, 1, 128, 3, 8, split_k=2)),
    (Workload(16, 448, 960, W8_GROUPS, "bfloat16"), Schedule("gemm_stream_bulk", 448, 16, 64, 2, 7)),
    (Workload(8, 505, 1001, W4_GROUPS, "bfloat16"), Schedule("gemm_stream", 64, 8, 128, 3, 8)),
    (Workload(5, 505, 1001, W8_GROUPS, bias=True), Schedule("gemm_stream", 128, 8, 64, 2, 4, split_k=3)),
    (Workload(16, 505, 1001, W4_GROUPS, bias=True, width=600), Schedule("gemm_stream_bulk", 64, 16, 128, 2, 8, split_k=2)),
    (Workload(5, 505, 1001, W8_GROUPS, "bfloat16", width=600), Schedule("gemm_stream", 128, 8, 64, 2, 4, split_k=3)),
    (Workload(130, 496, 1001, W4_GROUPS, bias=True, width=350, nibbles=True), Schedule("gemm_wgmma", 128, 128, 128, 4, 8, joined=True)),
    (Workload(130, 496, 1001, LQQ, "bfloat16", width=350, nibbles=True), Schedule("gemm_wgmma", 64, 64, 128, 3, 4, tail=2, joined=True)),
    (DECODE, Schedule("attention_decode", 64, 8, 128, 2, 4)),
    (DECODE, Schedule("attention_decode_bulk", 64, 8, 128, 2, 4)),
    (APPEND, Schedule("attention_append", RESIDUAL, 1, 128, num_warps=8)),
    (APPEND, Schedule("attention_append", RESIDUAL, 1, 128, num_warps=16)),
    (replace(APPEND, q_len=1, full_windows=True), Schedule("attention_append", RESIDUAL, 1, 128, num_warps=8)),
    (replace(DECODE, full_windows=True), Schedule("attention_decode_bulk", 64, 8, 128, 2, 4)),
    (replace(APPEND, op="pack"), Schedule("attention_pack", RESIDUAL, 1, 128, num_warps=8)),
    (GATHER, Schedule("attention_gather", RESIDUAL, 1, 64, num_warps=4)),
    (PREFILL, Schedule("attention_prefill", 128, 128, 128, 2, 8)),
    (PREFILL, Schedule("attention_prefill", 64, 64, 128, 2, 4, min_blocks=2)),  # two blocks share the registers of an SM
    (PREFILL, Schedule("attention_prefill_mma", 64, 128, 128, 2, 8)),
    (QuantizeWorkload(130, 8192), Schedule("quantize_rows", 1, 1, 1, num_warps=8)),
    (QuantizeWorkload(130, 1001, "bfloat16", "e4m3", 128, norm=True, smooth=True), Schedule("quantize_rows", 1, 4, 1, num_warps=8)),
    (QuantizeWorkload(3, 65536, "float16", "int8", norm=True), Schedule("quantize_rows", 1, 1, 1, num_warps=32)),
    (QuantizeWorkload(130, 4096, "bfloat16", "int8", 128), Schedule("quantize_rows", 1, 2, 1, num_warps=8)),
    (QuantizeWorkload(33, 300, "float16", "e4m3", smooth=True), Schedule("quantize_rows", 1, 4, 1, num_warps=4)),
    # blocks that go through all rows, three and more of them each
    (QuantizeWorkload(1000, 1001, "bfloat16", "int8", 128, norm=True, smooth=True), Schedule("quantize_rows", 1, 2, 1, 2, 4)),
    (QuantizeWorkload(1000, 8192, norm=True, smooth=True), Schedule("quantize_rows", 1, 1, 1, 2, 16, min_blocks=2)),
    # what comes in is a sum, or gated
    (QuantizeWorkload(65, 4096, "bfloat16", norm=True, residual=True), Schedule("quantize_rows", 1, 1, 1, num_warps=8)),
    (QuantizeWorkload(1000, 1001, norm=True, smooth=True, residual=True, offset=1.0), Schedule("quantize_rows", 1, 2, 1, 2, 4)),
    (QuantizeWorkload(16, 14336, "bfloat16", "e4m3", 128, gate="silu"), Schedule("quantize_rows", 1, 1, 1, num_warps=16)),
    (QuantizeWorkload(33, 1001, "float16", "int8", smooth=True, gate="gelu_tanh"), Schedule("quantize_rows", 1, 2, 1, num_warps=8)),
    (GlueWorkload("norm", 130, 1032, "bfloat16", residual=True), Schedule("norm_rows", 1, 1, 1, num_warps=2)),
    (GlueWorkload("norm", 1, 4096, residual=True, offset=1.0), Schedule("norm_rows", 1, 1, 1, num_warps=16)),
    (GlueWorkload("gated", 130, 1032), Schedule("gated_rows", 1, 1, 1, num_warps=4)),
    (GlueWorkload("gated", 3, 4096, "bfloat16", activation="gelu_tanh"), Schedule("gated_rows", 1, 1, 1, num_warps=8)),
)
# What no test named test_compiles_as_promised compiles for this architecture: tails, streams that know their bytes by a list of columns,
# decode without bulk copies, caches of full windows, and packs. The last case of a program.
OF_NONE = (
    "gemm_wgmma",
    "gemm_stream",
    "gemm_stream_bulk",
    "attention_decode",
    "attention_decode_bulk",
    "attention_append",
    "attention_pack",
)
SOME = [{case[1].program: case for case in CASES}[name] for name in OF_NONE]


def label(case: Case) -> str:
    return case[1].program


def test_every_cuda_program_is_there() -> None:
    """Needs no GPU: a program that was added, or a case that the rules no longer accept, shows where the suite is edited."""
    assert set(map(label, CASES)) == set(programs(arch="sm_90a"))
    for workload, schedule in CASES:
        assert legal(workload, schedule, target_from_name("sm_90a")) == [], schedule


@needs_nvcc
@pytest.mark.slow
def test_the_kernels_compile() -> None:
    """As before the first test on a GPU: what tests declare is compiled at once."""
    declares = [SimpleNamespace(get_closest_marker=lambda _, case=case: pytest.mark.kernels(of=lambda: [case])) for case in SOME]
    built = compiled(declares, target_from_name("sm_90a"))
    assert list(built) == SOME and all(isinstance(found, Kernel) for found in built.values()), built


@pytest.mark.gpu
@pytest.mark.kernels(of=lambda case: [case])
@pytest.mark.parametrize("case", CASES, ids=label)
def test_right_on_a_gpu(kernels: Built, case: Case) -> None:
    (workload, schedule), target = case, detect_target()
    if case not in kernels:
        pytest.skip(f"{schedule.program} does not run on {target.arch}")
    kernel = kernels[case]
    assert isinstance(kernel, Kernel), kernel
    verdict = gate_of(workload, 1, target.arch, "cuda").verify(
        partial(launch, kernel.load(), split_workspace(workload, schedule, target, "cuda"))
    )
    assert verdict.ok, verdict.reasons
