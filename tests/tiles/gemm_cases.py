"""Cases of the CUDA GEMM programs: (workload, schedule) over formats, shapes and schedules, and exact problems for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, product

import numpy as np
import torch

from tilebit.autotune.problems.gemm import Problem
from tilebit.autotune.problems.gemm_drawn import exact_problem
from tilebit.layouts.formats import GROUP_SIZES, GemmFormat, QuantFormat
from tilebit.schedules.gemm.codecs import packed_layout
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import legal
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target

Case = tuple[Workload, Schedule]
FORMATS = (*(QuantFormat(*f) for f in product((4, 8), GROUP_SIZES, (True, False))), GemmFormat.parse("w4a16_mxfp4"))
INT8_FORMATS = tuple(map(GemmFormat.parse, ("w4a8_lqq_g64", "w4a8_lqq_g128", "w8a8_channel", "w4a8_channel_asym")))
GROUP_WISE = tuple(map(GemmFormat.parse, ("w8a8_g128", "w4a8_g128_asym")))  # x has scales of groups, too
# (scale, offset) of a group, all under which the bytes of every code are bytes: no weight that has others is accepted.
LQQ_PAIRS = np.array([(scale, offset) for scale in range(18) for offset in range(256 - 15 * scale)])
FP8_FORMATS = tuple(map(GemmFormat.parse, ("w8a8_fp8", "w8a8_fp8_g128", "w4a8_fp8")))


def in_turn(
    schedules: Sequence[Schedule], shapes: Sequence[tuple[int, int, int]], formats: Sequence[GemmFormat], targets: Mapping[str, Target]
) -> Iterator[Case]:
    """Every format in both dtypes; schedules, shapes and bias take turns, the next legal schedule each time; then unused schedules."""
    turn, next_shape, used = 0, cycle(shapes), set()
    for i, (dtype, format) in enumerate(product(("float16", "bfloat16"), formats)):
        workload = Workload(*next(next_shape), format, dtype, bias=i % 3 == 0, token_scales=i % 4 == 1)
        for _ in schedules:
            schedule = schedules[turn % len(schedules)]
            turn += 1
            if not legal(workload, schedule, targets[schedule.program]):
                used.add(schedule)
                yield workload, schedule
                break
        else:
            raise AssertionError(f"no schedule is legal for {workload}")
    for schedule, (shape, format) in product(schedules, product(shapes, formats)):
        workload = Workload(*shape, format, bias=True, token_scales=True)
        if schedule not in used and not legal(workload, schedule, targets[schedule.program]):
            used.add(schedule)
            yield workload, schedule


def label(case: Case) -> str:
    w, s = case
    division = f"{s.block_n}x{s.block_m}x{s.block_k}-split{s.split_k}{'-stream' * s.stream_k}-cluster{s.cluster}-tail{s.tail}"
    return f"{w.format.name}-{w.dtype}-{w.m}x{w.n}x{w.k}{'-bias' * w.bias}{'-tokens' * w.token_scales}-{s.program}-{division}"


def problem_of(workload: Workload, seed: int) -> tuple[Problem, torch.Tensor]:
    """An exact problem that starts from codes, and its reference [m, n] in fp64. x: small integers; codes and zero points: any; scales:
    powers of two."""
    w, f = workload, workload.format
    rng = np.random.default_rng(seed)
    layout = packed_layout("sm_90a", f)
    largest = 4 if f.bits == 4 else 1  # so that most sums stay finite in fp16
    if f.x:
        problem = exact_problem(w, seed, "sm_90a")
        return problem, problem.reference()
    x = rng.integers(-largest, largest + 1, (w.m, w.k))
    codes = rng.integers(0, f.max_code + 1, (w.n, w.k)).astype(np.uint8)
    scales = rng.choice([0.5, 1.0, 2.0] if not f.integer else [1.0, 2.0, 4.0] if f.bits == 4 else [1.0], (w.n, f.groups(w.k)))
    scales[:, ::2] *= 0.5
    zeros = None if f.symmetric else rng.integers(0, f.max_code + 1, scales.shape)
    row_scales = rng.choice([0.25, 0.5, 1.0], w.n) if f.row_scaled else None
    tokens = rng.choice([0.5, 1.0, 2.0], w.m) if w.token_scales else None
    bias = rng.integers(-64, 65, w.n) if w.bias else None
    group = np.arange(w.k) // (w.k if f.group_size < 0 else f.group_size)
    rows = None if row_scales is None else row_scales[:, None]
    weight = f.weight_of(np.array(f.weight.values)[codes], scales[:, group], None if zeros is None else zeros[:, group], rows)
    reference = torch.from_numpy(x @ weight.T * (1 if tokens is None else tokens[:, None]) + (0 if bias is None else bias))

    dtype = getattr(torch, w.dtype)

    def padded(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.pad(values.T.astype(np.float32), ((0, 0), (0, -w.n % 64)))).to(dtype)

    operands = {"weight": torch.from_numpy(layout.pack(codes).view(np.int32)), "scales": padded(scales)}
    if zeros is not None:
        operands["zeros"] = padded(zeros)
    if row_scales is not None:
        operands["row_scales"] = torch.from_numpy(np.pad(row_scales.astype(np.float32), (0, -w.n % 64)))
    if tokens is not None:
        operands["token_scales"] = torch.from_numpy(tokens.astype(np.float32))
    if bias is not None:
        operands["bias"] = torch.from_numpy(bias).to(dtype)
    return Problem(w, layout, torch.from_numpy(x).to(dtype), operands), reference


def one_large_step(format: GemmFormat) -> tuple[Problem, torch.Tensor]:
    """A product of e4m3 and its y: 2^16 in the first step of 128 k, then ones, each of which is less than 2^-13 of that, so that they are
    lost where one sum of all k stays on tensor cores."""
    k = 2048
    problem = exact_problem(Workload(4, 64, k, format), 0, "sm_90a")
    problem.x.fill_(1.0)
    problem.x[:, :128] = 0.0
    problem.x[:, 0] = 256.0
    problem.operands["weight"].view(torch.uint8).fill_(0x38)  # 1
    problem.operands["weight"][0, 0].view(torch.uint8).fill_(0x78)  # 256: the first 32 columns
    problem.operands["scales"].fill_(2.0**-6)
    problem.operands["token_scales"].fill_(1.0)
    return problem, torch.full((4, 64), (65536 + k - 128) / 64, dtype=torch.float16)
