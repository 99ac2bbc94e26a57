"""Workloads that the tests of the door share: few, so that their kernels are compiled once for a whole run."""

from __future__ import annotations

import torch

from tilebit.autotune.problems.gemm_drawn import exact_problem
from tilebit.layouts.formats import QuantFormat
from tilebit.schedules.gemm.workload import Workload
from tilebit.weights.packed import PackedWeight

N, K = 70, 200  # no multiple of any tile, group or vector
TORCH_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
# (format, dtype, bias)
FORMATS = (
    ("w4a16_g128", "float16", False),
    ("w4a16_g32_asym", "bfloat16", True),
    ("w8a16_channel", "float16", True),
    ("w8a16_g64_asym", "bfloat16", False),
)
ROWS = (1, 5, 33)


def workload(case: tuple[str, str, bool], m: int, n: int = N, k: int = K) -> Workload:
    name, dtype, bias = case
    return Workload(m, n, k, QuantFormat.parse(name), dtype, bias)


def exact(w: Workload, seed: int = 0, arch: str = "cpu", device: str = "cpu"):
    """(x, packed weight, bias or None, expected y) whose every fp32 sum is exact."""
    problem = exact_problem(w, seed, arch, device)
    o, dtype = problem.operands, TORCH_DTYPES[w.dtype]
    packed = PackedWeight(o["weight"], o["scales"], o.get("zeros"), w.n, w.k, w.format, dtype, arch, None, o.get("row_scales"))
    return problem.x, packed, o.get("bias"), problem.reference().to(dtype)
