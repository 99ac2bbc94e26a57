"""What the tables are measured over."""

from __future__ import annotations

import pytest

from results.measure.gemm import cpu_rates, gemm_workloads
from tilebit.schedules.operations import candidates
from tilebit.schedules.target import ARCHES, target_from_name


@pytest.mark.parametrize("arch", ARCHES)
def test_every_workload_is_distinct_and_has_a_program(arch: str) -> None:
    target = target_from_name(arch)
    workloads = gemm_workloads(target)
    assert len(set(workloads)) == len(workloads)
    assert all(candidates(w, target) for w in workloads)
    if target.is_cuda:  # the shapes and rows that the first table promises
        asked = {(w.n, w.k, w.m) for w in workloads if w.format.bits == 4 and w.dtype == "float16"}
        assert {(n, k, m) for n, k in ((4096, 4096), (28672, 4096), (4096, 14336), (8192, 28672)) for m in (1, 16, 64, 256, 4096)} <= asked


def test_cpu_rates_are_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    ones, randn = torch.ones, torch.randn
    monkeypatch.setattr(torch, "ones", lambda count: ones(count >> 8))
    monkeypatch.setattr(torch, "randn", lambda *shape: randn(*(size >> 3 for size in shape)))  # bf16 products take minutes without AVX-512
    rates = cpu_rates()
    assert set(rates) == {"read_gbps", "mma_tflops"} and all(value > 0 for value in rates.values())
