"""``gemm_any_binary`` without a GPU, on numbers that its integers of one scale could lose: outliers, what is far below them, what is not
finite."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tilebit.autotune.problems.gemm_drawn import random_problem
from tilebit.layouts.formats import GemmFormat
from tilebit.layouts.planes import pack_planes, unpack_planes
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name

sys.path.append(str(Path(__file__).parents[1]))
from emulation.device_code import needs_host_compiler
from emulation.generated_gemm import GeneratedGemm

pytestmark = needs_host_compiler
TARGET = replace(target_from_name("sm_80"), units=3)
SCHEDULE = Schedule("gemm_any_binary", 16, 1, 1, 3, 4)
N, K = 100, 1500
DTYPE = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def computed(bits: int, dtype: str, x: torch.Tensor, silent: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
    """(y of the kernel, the weight as numbers [n, k]), float64. Weights of k that are ``silent`` are zero."""
    workload = Workload(x.shape[0], N, K, GemmFormat.parse(f"w{bits}a16_any"), dtype)
    problem = replace(random_problem(workload, bits, TARGET.arch), x=x.to(DTYPE[dtype]))
    planes = problem.operands["weight"].numpy().view(np.uint32)
    codes = unpack_planes(planes.reshape(bits, *problem.layout.storage_shape(N, K)), problem.layout, N, K)
    books = problem.operands["scales"].clone()
    if silent:
        codes[:, list(silent)], books[:, 0] = 0, 0.0
    packed = torch.from_numpy(pack_planes(codes, bits, problem.layout).view(np.int32)).reshape(problem.operands["weight"].shape)
    y = torch.full((x.shape[0], N), -1.0, dtype=DTYPE[dtype])
    GeneratedGemm(workload, SCHEDULE, TARGET)(replace(problem, operands={**problem.operands, "weight": packed, "scales": books}), y)
    return y.double().numpy(), np.take_along_axis(books.double().numpy()[:N], codes.astype(np.int64), axis=1)


def numbers(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPE)
@pytest.mark.parametrize("bits", (2, 3, 4))
def test_what_is_lost_is_a_part_in_four_million_of_the_largest(bits: int, dtype: str) -> None:
    """Outliers of other steps than the first warp's, a thousand times as large as the rest; a row of small numbers beside a row of large
    ones. The outliers' weights are zero: they set the unit, and their products hide nothing. y is what numbers that are rounded to the
    unit give, and not what those of eight bits less do."""
    x = numbers(bits, 2)
    x[0, 700], x[0, 1400] = 1000.0, -900.0
    x[1] *= 2.0**-12
    y, weight = computed(bits, dtype, x, silent=(700, 1400))
    exact = x.to(DTYPE[dtype]).double().numpy()
    unit = 2.0 ** (np.floor(np.log2(np.abs(exact).max(axis=1, keepdims=True))) - 21)
    rounding = 2.0 ** -(11 if dtype == "float16" else 8)

    def near(units: np.ndarray) -> np.ndarray:
        rounded = np.rint(exact / units) * units
        expected = rounded @ weight.T
        sums = 2.0**-22 * np.abs(rounded) @ np.abs(weight).T  # of fp32
        return np.abs(y - expected) <= rounding * np.abs(expected) + sums + (2.0**-25 if dtype == "float16" else 0.0)

    assert near(unit).all() and not near(unit * 256)[0].all()


def test_zeros_give_zeros() -> None:
    y, _ = computed(3, "float16", torch.zeros(1, K))
    assert (y == 0).all()


def test_the_smallest_numbers_count() -> None:
    """Subnormal ones of fp16."""
    x = torch.zeros(1, K)
    x[0, 3], x[0, 900] = 2.0**-24, 2.0**-20
    y, weight = computed(4, "float16", x)
    expected = x.double().numpy() @ weight.T
    assert np.abs(y - expected).max() <= 2.0**-25 + 1e-12 and np.abs(expected).max() > 2.0**-24


@pytest.mark.parametrize("value", (float("inf"), float("-inf"), float("nan")))
def test_what_is_not_finite_leaves_no_number(value: float) -> None:
    """In its row; the other rows are as ever."""
    x = numbers(7, 2)
    x[0, 1234] = value
    y, _ = computed(3, "bfloat16", x)
    assert np.isnan(y[0]).all() and np.isfinite(y[1]).all()
