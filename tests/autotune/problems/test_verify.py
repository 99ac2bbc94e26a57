"""The gate: problems that are exact, and mistakes that each check finds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sample.two_levels import FORMAT as TWO_LEVELS

from tilebit.autotune.problems.gemm import unpack_tiles
from tilebit.autotune.problems.gemm_drawn import exact_problem, random_problem
from tilebit.autotune.problems.verify import (
    GUARD_ELEMENTS,
    Gate,
    check_exact,
    check_guards,
    check_worst_tile,
    guarded_output,
    worst_tile_error,
)
from tilebit.layouts.formats import BITS, GROUP_SIZES, GemmFormat, QuantFormat
from tilebit.layouts.packing import gemm_layout
from tilebit.schedules.gemm.workload import Workload

FORMATS = [*(QuantFormat(b, g, s) for b in BITS for g in GROUP_SIZES for s in (True, False)), TWO_LEVELS]
ODD = (37, 200, 300)


def dense(problem) -> tuple[torch.Tensor, torch.Tensor]:
    """(w [n, k], codes) in fp64, by PackedLayout.unpack and plain indexing: independent of the problem's own reference."""
    w = problem.workload
    codes = torch.from_numpy(problem.layout.unpack(problem.operands["weight"].numpy(), w.n, w.k)).double()
    group = torch.arange(w.k) // (w.k if w.format.group_size < 0 else w.format.group_size)
    scales = problem.operands["scales"][group, : w.n].t().double()
    zeros = problem.operands["zeros"][group, : w.n].t().double() if "zeros" in problem.operands else 2 ** (w.format.bits - 1)
    return (codes - zeros) * scales * row_scales(problem), codes


def row_scales(problem) -> torch.Tensor | float:
    """[n, 1], or 1 for scales of one level."""
    return problem.operands["row_scales"][: problem.workload.n, None].double() if problem.workload.format.row_scaled else 1.0


@pytest.mark.parametrize("arch", ["cpu", "sm_90a"])
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_reference_is_the_formula(format, arch):
    for make in (exact_problem, random_problem):
        problem = make(Workload(*ODD, format, "float16", bias=True), 3, arch)
        w, _ = dense(problem)
        expected = problem.x.double() @ w.t() + problem.operands["bias"].double()
        torch.testing.assert_close(problem.reference(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("arch", ["cpu", "sm_90a"])
@pytest.mark.parametrize("name", ["w4a8_channel_asym", "w8a8_channel"])
def test_reference_of_int8_x_is_the_formula(name, arch):
    for make in (exact_problem, random_problem):
        problem = make(Workload(*ODD, GemmFormat.parse(name), "float16", bias=True), 3, arch)
        w, _ = dense(problem)
        o = problem.operands
        expected = problem.x.double() @ w.t() * o["token_scales"][:, None].double() + o["bias"].double()
        torch.testing.assert_close(problem.reference(), expected, rtol=1e-12, atol=1e-12)
        assert problem.x.dtype is torch.int8 and len(o["scales"][0, :200].unique()) > 1  # or a neighbour's scale would do
        assert "zeros" not in o or (o["zeros"].dtype is torch.uint8 and len(o["zeros"][0, :200].unique()) == 16)


@pytest.mark.parametrize("name", ["w8a8_g128", "w4a8_g128_asym"])
def test_reference_of_groups_is_the_formula(name):
    """Group by group, as MixLLM's equation has it; the last group is shorter."""
    for make in (exact_problem, random_problem):
        problem = make(Workload(*ODD, GemmFormat.parse(name), "float16", bias=True), 3, "cpu")
        o, (m, n, k) = problem.operands, ODD
        codes = unpack_tiles(o["weight"], problem.layout)[:n, :k].double()
        expected = o["bias"].double().repeat(m, 1)
        for group, first in enumerate(range(0, k, 128)):
            zero = o["zeros"][group, :n, None].double() if "zeros" in o else 128.0
            sums = problem.x[:, first : first + 128].double() @ (codes[:, first : first + 128] - zero).t()
            expected += sums * o["scales"][group, :n].double() * o["token_scales"][group, :, None].double()
        torch.testing.assert_close(problem.reference(), expected, rtol=1e-12, atol=1e-12)
        assert o["token_scales"].shape == (-(-k // 128), m) and len(o["token_scales"].unique()) > 1
        assert "zeros" not in o or (o["zeros"].dtype is torch.uint8 and len(o["zeros"][0, :n].unique()) == 16)


@pytest.mark.parametrize("arch", ["cpu", "sm_90a"])
@pytest.mark.parametrize("bits", BITS)
def test_padding_is_zero(bits, arch):
    problem = exact_problem(Workload(1, 200, 300, QuantFormat(bits, 64, False)), 0, arch)
    full = unpack_tiles(problem.operands["weight"], problem.layout)
    assert full[:200, :300].any() and not full[200:].any() and not full[:, 300:].any()
    assert not problem.operands["scales"][:, 200:].any() and not problem.operands["zeros"][:, 200:].any()
    assert not exact_problem(Workload(1, 200, 300, TWO_LEVELS), 0, arch).operands["row_scales"][200:].any()


@pytest.mark.parametrize("arch", ["cpu", "sm_90a"])
@pytest.mark.parametrize("bits", BITS)
def test_unpack_tiles_inverts_the_layout(bits, arch):
    layout = gemm_layout(arch, bits)
    codes = np.random.default_rng(0).integers(0, 1 << bits, layout.padded(100, 130)).astype(np.uint8)
    words = torch.from_numpy(layout.pack(codes).view(np.int32))
    assert np.array_equal(unpack_tiles(words, layout).numpy(), codes)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("k", [64, 4096, 14336, 28672])
@pytest.mark.parametrize("format", [*(f for f in FORMATS if f.group_size in (128, -1)), TWO_LEVELS], ids=lambda f: f.name)
def test_exact_problems_are_exact_in_fp32_in_any_order(format, k, dtype):
    problem = exact_problem(Workload(3, 64, k, format, dtype, bias=True), 1)
    w, _ = dense(problem)
    x = problem.x.double()
    sums = x.abs() @ w.abs().t() + problem.operands["bias"].abs().double()
    unit = problem.operands["scales"][:, :64].min().item() * row_scales(problem)  # every product of a row and its bias are multiples
    assert (sums.t() / unit).max() < 1 << 24 and torch.equal(w / unit, (w / unit).round())
    assert torch.equal(x, x.round()) and x.abs().max() <= 4
    shuffled = torch.randperm(k)
    fp32 = x[:, shuffled].float() @ w[:, shuffled].float().t() + problem.operands["bias"].float()
    assert torch.equal(fp32.double(), problem.reference())
    assert torch.isfinite(problem.reference().to(problem.x.dtype)).all()


@pytest.mark.parametrize("k", [576, 14336, 28672, 65536])
@pytest.mark.parametrize("name", ["w8a8_g128", "w4a8_g128_asym"])
def test_exact_problems_of_groups_are_exact_in_fp32_in_any_order(name, k):
    problem = exact_problem(Workload(16, 64, k, GemmFormat.parse(name), bias=True), 1)
    order = torch.randperm(k, generator=torch.Generator().manual_seed(0))
    x, w = problem.floats(torch.float32), problem._weight_rows(0, 64, torch.float32)
    fp32 = x[:, order] @ w[:, order].t() + problem.operands["bias"].float()
    assert torch.equal(fp32.double(), problem.reference()) and torch.isfinite(problem.reference().half()).all()
    assert (problem.x != 0).any(0).float().mean() > 0.6, "rows differ in where they are not zero"


def test_problems_depend_on_their_seed_only():
    workload = Workload(4, 96, 128)
    a, b, c = (exact_problem(workload, seed) for seed in (1, 1, 2))
    assert torch.equal(a.x, b.x) and torch.equal(a.operands["weight"], b.operands["weight"])
    assert not torch.equal(a.x, c.x) and not torch.equal(a.operands["weight"], c.operands["weight"])
    d = a.copied()
    assert torch.equal(d.x, a.x) and d.operands["weight"].data_ptr() != a.operands["weight"].data_ptr()


def test_k_beyond_exactness_is_refused():
    with pytest.raises(ValueError, match=r"k is 70000; accepted by the exact oracle for w8a16_channel_asym: up to 657"):
        exact_problem(Workload(1, 1, 70000, QuantFormat(8, -1, False)), 0)


def test_exact_check_separates_wrong_from_rounded():
    problem = exact_problem(Workload(5, 64, 4096), 0)
    reference = problem.reference()
    y = reference.half()
    assert check_exact(y, reference) == []
    y[4, 63] += torch.finfo(torch.float16).eps * y[4, 63].abs().clamp(min=1)
    assert check_exact(y, reference)[0].startswith("1 of 320 elements are wrong; the first at [4, 63]")
    y[:] = float("nan")
    assert "320 of them NaN" in check_exact(y, reference)[0]


def test_a_lost_tile_fails_the_worst_tile_and_hides_in_the_norm():
    problem = random_problem(Workload(512, 2048, 64), 0)
    reference, theirs = problem.reference(), problem.torch_result()
    assert check_worst_tile(theirs, reference, theirs) == []
    y = theirs.clone()
    y[128:160, 256:288] *= 1.004  # 32 x 32 elements, 0.4 % off
    lost = ((y.double() - reference).norm() / reference.norm()).item()
    assert lost < 2 * ((theirs.double() - reference).norm() / reference.norm()).item(), "the global norm does not see it"
    assert "worst 128 x 128 block" in check_worst_tile(y, reference, theirs)[0]


def test_worst_tile_error_by_hand():
    reference = torch.ones(200, 300, dtype=torch.float64)
    y = reference.clone()
    y[199, 299] = 2.0  # the last block is 72 x 44
    assert worst_tile_error(y, reference) == pytest.approx(1 / (72 * 44) ** 0.5)
    y[0, 0] = float("nan")
    assert worst_tile_error(y, reference) == float("inf")
    assert worst_tile_error(torch.zeros(0, 8), torch.zeros(0, 8)) == 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_guards_and_poison(dtype):
    output = guarded_output((3, 7), dtype)
    assert output.y.isnan().all() and output.y.is_contiguous() and output.y.data_ptr() % 64 == 0
    assert check_guards(output) == []
    output.y.fill_(1.0)
    assert check_guards(output) == []
    output.buffer[GUARD_ELEMENTS - 2] = 0
    output.buffer[GUARD_ELEMENTS + 21 + 4] = 0
    assert check_guards(output) == [
        "1 elements before the output were written, the nearest 2 from it.",
        "1 elements after the output were written, the nearest 5 from it.",
    ]
    output.buffer[GUARD_ELEMENTS - 2] = torch.tensor([float("nan")], dtype=dtype).view(torch.int16)[0]
    assert "before" in check_guards(output)[0], "writing an ordinary NaN shows too"


def test_guarded_output_refuses_other_dtypes():
    with pytest.raises(ValueError, match=r"float64; accepted: torch\.float16, torch\.bfloat16"):
        guarded_output((1, 1), torch.float64)


GATED = Workload(6, 96, 128, QuantFormat(4, 32, False), bias=True)


@pytest.fixture(scope="module")
def gate() -> Gate:
    return Gate(exact_problem(GATED, 0), random_problem(GATED, 0))


def right(problem, y):
    w, _ = dense(problem)
    y.copy_(problem.x[: len(y)].double() @ w.t() + problem.operands["bias"].double())


class TestGate:
    def test_right(self, gate):
        verdict = gate.verify(right)
        assert verdict.ok and 0 < verdict.rel_err < 1e-3

    def test_fp16_partial_sums(self, gate):
        def run(problem, y):
            w, _ = dense(problem)
            total = torch.zeros_like(y)
            for k in range(0, 128, 16):
                total += (problem.x[: len(y), k : k + 16].double() @ w[:, k : k + 16].t()).half()
            y.copy_(total + problem.operands["bias"])

        assert not gate.verify(run).ok

    def test_ragged_rows_only(self, gate):
        """Wrong only when the rows do not fill the tile."""

        def run(problem, y):
            right(problem, y)
            if len(y) != 6:
                y[-1] = 0

        assert gate.verify(run).reasons[0].startswith("m = 4: ")

    def test_exact_numbers_right_and_floats_wrong(self, gate):
        """Scales cut to powers of two pass the exact oracle and fail on floats."""

        def run(problem, y):
            right(problem, y)
            if problem is gate.random:
                y *= 1.01

        reasons = gate.verify(run).reasons
        assert len(reasons) == 1 and "worst 128 x 128 block" in reasons[0]

    def test_different_bits_each_run(self, gate):
        turns = []

        def run(problem, y):
            right(problem, y)
            if problem is gate.random:
                turns.append(1)
                y[0, 0] += 1e-3 * (len(turns) % 2)

        assert gate.verify(run).reasons == ("two runs on the same input differ.",)

    def test_an_untouched_output(self, gate):
        assert "576 of them NaN" in gate.verify(lambda problem, y: None).reasons[0]
