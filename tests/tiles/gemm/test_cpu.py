"""The CPU GEMM programs: exact over formats, dtypes and ragged shapes on every instruction set this machine has, and good code on all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from cpu_cases import FEATURES, activations, built, guards_intact, operands, poisoned, runs_here, target

from tilebit.layouts.formats import BITS, GROUP_SIZES, QuantFormat
from tilebit.schedules.gemm.cpu import cpu_candidates, cpu_legal
from tilebit.schedules.gemm.operation import CPU as CPU_RULE
from tilebit.schedules.gemm.workload import DTYPES, Workload
from tilebit.schedules.operations import legal
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name
from tilebit.tiles.compiler.compile import CompileRequest
from tilebit.tiles.compiler.kernel import Kernel

# At every edit those of tests/tilebit/ops run.
pytestmark = pytest.mark.slow

ROWS = (1, 2, 3, 5, 17, 33)
SHAPES = ((96, 256), (100, 200), (33, 97), (257, 320), (7, 64), (64, 31))  # whole tiles; ragged n and k; less than a tile
BLOCK_M = {"avx512_bf16": (1, 8, 13, 5), "avx512": (8, 1, 5, 13), "avx2": (1, 4, 2, 3)}
BLOCK_K = (32, 8, 4, 64, 16)
FLOATS = ("w4a16_mxfp4", "w4a16_nvfp4", "sample.two_levels")


@dataclass(frozen=True)
class Case:
    isa: str
    workload: Workload
    schedule: Schedule

    def __str__(self) -> str:
        w, s = self.workload, self.schedule
        after = "-bias" * w.bias + "-tokens" * w.token_scales
        return f"{self.isa}-{w.format.name}-{w.dtype}-{w.n}x{w.k}-bm{s.block_m}-bk{s.block_k}-split{s.split_k}{after}"

    @property
    def request(self) -> CompileRequest:
        return CompileRequest("gemm_cpu", self.workload, self.schedule, target(self.isa))


def _cases() -> list[Case]:
    """Every (bits, group, symmetric) on every instruction set; the other choices go round beside them."""
    cases = []
    for isa in FEATURES:
        for i, (bits, group, symmetric) in enumerate(product(BITS, GROUP_SIZES, (True, False))):
            n, k = SHAPES[i % len(SHAPES)]
            dtype, format = DTYPES[(i // 2 + i // 8) % 2], QuantFormat(bits, group, symmetric)
            workload = Workload(1, n, k, format, dtype, bias=i % 3 == 0, token_scales=i % 4 == 2)
            block_m, block_k = BLOCK_M[isa][i % 4], BLOCK_K[i % 5]
            block_k = min(block_k, group) if group > 0 else block_k
            split = (4, 2)[i % 2] if block_m == 1 else 1
            cases.append(Case(isa, workload, Schedule("gemm_cpu", (32, 64, 96)[i % 3], block_m, block_k, num_warps=2, split_k=split)))
        for i, (name, dtype) in enumerate(product(FLOATS, DTYPES)):
            workload = Workload(1, *SHAPES[(i + 1) % len(SHAPES)], QuantFormat.parse(name), dtype, bias=i % 2 == 0)
            cases.append(Case(isa, workload, Schedule("gemm_cpu", 32, BLOCK_M[isa][i % 4], (16, 8)[i % 2], num_warps=2)))
    return cases


CASES = _cases()


def first_candidate(m: int, isa: str, format_name: str, dtype: str) -> Case:
    workload = Workload(m, 4096, 4096, QuantFormat.parse(format_name), dtype)
    return Case(isa, workload, cpu_candidates(workload, target(isa))[0])


SPEED = [
    (first_candidate(1, "avx512_bf16", "w4a16_g128", "bfloat16"), 3.8),
    (first_candidate(1, "avx512_bf16", "w4a16_g128", "float16"), 5.5),
    (first_candidate(1, "avx512", "w4a16_g128", "float16"), 7.5),
    (first_candidate(1, "avx2", "w4a16_g128", "float16"), 16.0),
    (first_candidate(32, "avx512_bf16", "w4a16_g128", "bfloat16"), 2.2),
    (first_candidate(32, "avx512", "w8a16_g64_asym", "float16"), 4.2),
    (first_candidate(32, "avx2", "w8a16_g64_asym", "bfloat16"), 8.2),
]


def kernel_of(case: Case) -> Kernel:
    kernel = built(case.request)
    if not runs_here(case.isa):
        pytest.skip(f"this machine has no {case.isa}; the kernel was compiled")
    return kernel


@pytest.mark.parametrize("case", CASES, ids=str)
def test_exact_and_accurate(case):
    kernel, w = kernel_of(case), case.workload
    for exact in (True, False):
        data = operands(w.with_m(max(ROWS)), seed=w.n + w.k, exact=exact)
        for m in ROWS:
            x = activations(w, m, seed=m, exact=exact)
            y, memory = poisoned(m, w.n, x.dtype)
            kernel(x, *data.of_rows(m), y)
            expected = data.expected(x)
            assert guards_intact(memory), f"m={m}: wrote outside of y"
            if exact:
                assert torch.equal(y, expected.to(y.dtype)), f"m={m}: {int((y != expected.to(y.dtype)).sum())} of {y.numel()} wrong"
                continue
            plain = x @ data.weight.to(x.dtype).T
            plain = plain if data.tokens is None else plain * data.tokens[:m, None].to(x.dtype)
            plain = plain if data.bias is None else plain + data.bias
            error, torch_error = ((result.double() - expected).norm() / expected.norm() for result in (y, plain))
            assert error <= 2 * torch_error + 1e-7, f"m={m}: {error:.2e}, torch {torch_error:.2e}"


@pytest.mark.parametrize("isa", FEATURES)
def test_rows_do_not_depend_on_each_other(isa):
    """Same row, same bits, whatever the batch and whichever thread."""
    case = next(c for c in CASES if c.isa == isa and c.schedule.block_m > 1 and c.workload.format.bits == 4)
    kernel, w = kernel_of(case), case.workload
    data, x = operands(w, 3, exact=False), activations(w, 33, 4, exact=False)
    whole = torch.empty(33, w.n, dtype=x.dtype)
    kernel(x, *data.of_rows(len(x)), whole)
    for row in (0, 7, 32):
        one = torch.empty(1, w.n, dtype=x.dtype)
        kernel(x[row : row + 1], *data.tensors, one)
        assert torch.equal(one[0], whole[row])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        serial = torch.empty_like(whole)
        kernel(x, *data.of_rows(len(x)), serial)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(serial, whole)


@pytest.mark.parametrize("isa", FEATURES)
def test_infinity_and_nan_come_through(isa):
    case = next(c for c in CASES if c.isa == isa and c.workload.dtype == "float16" and c.workload.format.bits == 4)
    kernel, w = kernel_of(case), case.workload
    data, x = operands(w, 5, exact=True), activations(w, 3, 6, exact=True)
    clean = torch.empty(3, w.n, dtype=x.dtype)
    kernel(x, *data.of_rows(len(x)), clean)
    x[0, 1], x[2, 0] = float("inf"), float("nan")
    y = torch.empty_like(clean)
    kernel(x, *data.of_rows(len(x)), y)
    assert not y[0].isfinite().any() and y[2].isnan().all()
    assert torch.equal(y[1], clean[1])


def test_largest_codes_and_fp16_range():
    """fp16 x with 11 significant bits and subnormals: nothing of x is lost on the way."""
    for isa in FEATURES:
        case = next(c for c in CASES if c.isa == isa and c.workload.dtype == "float16" and c.workload.format == QuantFormat(4, 32, True))
        if not runs_here(isa):
            continue
        w = case.workload
        data = operands(w, 7, exact=True)
        for value in (2047.0, 2.0**-24, -(2.0**-14) + 2.0**-24):
            x = torch.zeros(1, w.k, dtype=torch.float16)
            x[0, w.k - 1] = value
            y = torch.empty(1, w.n, dtype=torch.float16)
            built(case.request)(x, *data.tensors, y)
            assert torch.equal(y, data.expected(x).half()), f"{isa}: x = {value}"


def test_no_rows_is_no_work():
    case = next(c for c in CASES if runs_here(c.isa))
    data = operands(case.workload, 0, exact=True)
    x = activations(case.workload, 0, 0, exact=True)
    built(case.request)(x, *data.tensors, torch.empty(0, case.workload.n, dtype=x.dtype))


def test_wrong_tensors_are_refused():
    case = next(c for c in CASES if runs_here(c.isa) and c.workload.n == 100)
    kernel, w = built(case.request), case.workload
    data, x = operands(w, 1, exact=True), activations(w, 4, 1, exact=True)
    y, memory = poisoned(4, w.n, x.dtype)
    weight, scales, *rest = data.tensors
    other = torch.bfloat16 if x.dtype == torch.float16 else torch.float16
    calls = {
        "x has size": (x[:, :-1].contiguous(), *data.tensors, y),
        "x is not contiguous": (x.repeat(1, 2)[:, : w.k], *data.tensors, y),
        "x has device type 1, dtype": (x.to(other), *data.tensors, y),
        "weight has size": (x, weight[:, :-1].contiguous(), scales, *rest, y),
        "weight has device type 1, dtype": (x, weight.view(torch.float32), scales, *rest, y),
        "scales has size": (x, weight, scales[:, :-1].contiguous(), *rest, y),
        "y has size 3 in dimension 0; accepted: 4": (x, *data.tensors, y[:3]),
        "y is not contiguous": (x, *data.tensors, torch.empty(w.n, 4, dtype=x.dtype).T),
        "tensors; accepted": (x, *data.tensors),
        "y is not a tensor": (x, *data.tensors, 3),
    }
    for message, tensors in calls.items():
        with pytest.raises((ValueError, TypeError), match=message):
            kernel(*tensors)
    assert memory.isnan().all()


@pytest.mark.parametrize(("case", "limit"), SPEED, ids=[str(case) for case, _ in SPEED])
def test_generated_code(case, limit):
    """Vector instructions of the hot loop per 32 weights and row of x; nothing scalar, nothing on the stack but a constant or two."""
    resources = built(case.request).resources
    assert resources["isa"] == case.isa
    vector = {name: count for name, count in resources["loop"].items() if name.startswith("v")}
    products = vector.get("vdpbf16ps", 0) * 2 or sum(count for name, count in vector.items() if name.startswith("vfmadd"))
    per_32 = sum(vector.values()) / (products * resources["vector_bits"] / 32 / 32)
    if vector.get("vdpbf16ps") and case.workload.dtype == "float16":
        per_32 *= 2  # each product is done for both halves of x
    assert per_32 <= limit, vector
    assert resources["loop_spills"] <= 4
    assert not any("scalar" in sentence for sentence in built(case.request).manifest["lint"])


def test_candidates_are_legal_and_ordered():
    for isa, m, name in product(FEATURES, (1, 2, 5, 8, 33, 512), ("w4a16_g128", "w4a16_g32_asym", "w8a16_channel")):
        workload = Workload(m, 4096, 4096, QuantFormat.parse(name), "bfloat16")
        found = cpu_candidates(workload, target(isa))
        assert 4 <= len(found) <= 60 and len(set(found)) == len(found)
        assert all(not cpu_legal(workload, schedule, target(isa)) for schedule in found)
        assert found[0].block_m <= m


def test_illegal_schedules_say_why():
    workload = Workload(1, 64, 64, QuantFormat(4, 32))
    good = Schedule("gemm_cpu", 32, 1, 32, num_warps=2)
    assert CPU_RULE.reasons(workload, good, target("avx2")) == []
    wrong = {
        "block_n is 48": Schedule("gemm_cpu", 48, 1, 32, num_warps=2),
        "block_k is 24": Schedule("gemm_cpu", 32, 1, 24, num_warps=2),
        "must divide the group size 32": Schedule("gemm_cpu", 32, 1, 64, num_warps=2),
        "split_k is 3": Schedule("gemm_cpu", 32, 1, 32, num_warps=2, split_k=3),
        "vector registers; avx2 has 16": Schedule("gemm_cpu", 32, 5, 32, num_warps=2),
        "block_m is 0": Schedule("gemm_cpu", 32, 0, 32, num_warps=2),
        "num_warps is 0": Schedule("gemm_cpu", 32, 1, 32, num_warps=0),
        "num_stages is 2": Schedule("gemm_cpu", 32, 1, 32, num_warps=2, num_stages=2),
        "raster is 4": Schedule("gemm_cpu", 32, 1, 32, num_warps=2, raster=4),
    }
    for words, schedule in wrong.items():
        (sentence,) = CPU_RULE.reasons(workload, schedule, target("avx2"))
        assert words in sentence
    (sentence,) = CPU_RULE.reasons(Workload(1, 1 << 17, 1 << 15, QuantFormat(4, 32)), good, target("avx2"))
    assert "2^31" in sentence
    (sentence,) = CPU_RULE.reasons(workload, good, target_from_name("sm_80"))
    assert sentence == "gemm_cpu does not run on sm_80; accepted: cpu." and cpu_candidates(workload, target_from_name("sm_80")) == []
    (sentence,) = legal(workload, replace(good, program="gemm_mma"), target("avx2"))
    assert sentence == "gemm_mma does not run on cpu; accepted: sm_80, sm_86, sm_89, sm_90a."
    (sentence,) = legal(workload, replace(good, program="gemm_tpu"), target("avx2"))
    assert "program is 'gemm_tpu'; accepted for" in sentence
