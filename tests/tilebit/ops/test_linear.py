"""Products with a 16-bit weight through the door: torch's on CPUs and where nothing is tuned; where a record says that it is faster, the
kernel's, which is told here what it would be given on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import linear as torch_linear

import tilebit
from tilebit import packs
from tilebit.ops import linear as linear_ops
from tilebit.ops import plans
from tilebit.ops.linear import library_us, served
from tilebit.schedules.gemm.dense import DenseWorkload
from tilebit.schedules.operations import candidates
from tilebit.schedules.records import TuningRecord, shipped_records
from tilebit.schedules.select import refresh
from tilebit.schedules.target import target_from_name

H200 = target_from_name("sm_90a")
HEAD = DenseWorkload(16, 96, 64, "bfloat16")
Record = Callable[[DenseWorkload, float], None]


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes the user's record of a workload: so many times what the library is expected to take."""
    path = tmp_path / "records.jsonl"
    monkeypatch.setenv("TILEBIT_RECORDS", str(path))
    refresh()

    def write(workload: DenseWorkload, share: float) -> None:
        schedule = (candidates(workload, H200) or [])[0]
        us = share * library_us(workload, H200)
        with path.open("a") as file:
            file.write(json.dumps(TuningRecord(workload, schedule, H200.name, H200.arch, H200.units, us=us).to_json()) + "\n")
        refresh()

    yield write
    refresh()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 64), (2, 3, 64), (64,), (0, 64), (3, 7)])
def test_it_is_torch_s_where_no_kernel_runs(shape: tuple[int, ...], dtype: torch.dtype):
    x, weight = torch.randn(shape).to(dtype), torch.randn(10, shape[-1]).to(dtype)
    y = tilebit.linear(x, weight, dependent=True)
    assert torch.equal(y, torch_linear(x, weight)) and y.shape == (*shape[:-1], 10)


def test_a_kernel_serves_where_it_is_faster_than_the_library_is_known_to_be(record: Record, monkeypatch: pytest.MonkeyPatch):
    assert not served(HEAD, H200), "nothing is tuned"
    record(HEAD, 1.01)
    assert not served(HEAD, H200)
    record(HEAD, 0.99)
    assert served(HEAD, H200) and served(HEAD.with_m(2), H200), "as many rows as its tile has"
    assert not served(HEAD.with_m(1), H200) and not served(HEAD.with_m(17), H200) and not served(HEAD.with_m(65), H200)
    assert not served(DenseWorkload(16, 96, 64), H200), "in another dtype: measured times alone decide"
    assert not served(HEAD, target_from_name("sm_80")) and not served(HEAD, target_from_name("cpu"))
    monkeypatch.setattr(packs, "entries", lambda workload, target: [workload] if workload.static() == HEAD.static() else [])
    assert served(HEAD.with_m(1), H200) and not served(DenseWorkload(1, 96, 64), H200)


# us of cuBLAS on an H200, cold weights
CUBLAS = {(1, 32000, 4096): 67.3, (64, 32000, 4096): 70.4, (1, 128256, 2048): 127.5, (64, 151936, 2560): 198.0, (1, 128256, 4096): 249.8,
          (16, 128256, 4096): 254.8, (64, 128256, 4096): 283.0, (32, 151936, 4096): 306.7, (1, 128256, 8192): 489.8}  # fmt: skip


@pytest.mark.parametrize("sizes", CUBLAS)
def test_the_library_is_not_thought_slower_than_it_is(sizes: tuple[int, int, int]):
    assert 0.92 < library_us(DenseWorkload(*sizes), replace(H200, name="NVIDIA H200")) / CUBLAS[sizes] < 1


def test_shipped_records_serve():
    """All but one, whose time is above what the library takes at least."""
    device = replace(H200, name="NVIDIA H200")
    tuned = {r.workload for r in shipped_records() if isinstance(r.workload, DenseWorkload)}
    above = [w for w in tuned if not served(w, device)]
    assert len(tuned) == 40 and above == [DenseWorkload(64, 128256, 8192, "bfloat16")]


@pytest.mark.parametrize("rows", [16, 5])
def test_what_the_kernel_is_given(rows: int, record: Record, monkeypatch: pytest.MonkeyPatch):
    record(HEAD, 0.5)
    seen: list[str] = []

    def find(workload: DenseWorkload, target: Any) -> Any:
        assert workload == HEAD

        def product(how: str) -> Callable[..., None]:
            def run(x: Tensor, weight: Tensor, y: Tensor) -> None:
                seen.append(how)
                assert x.shape == (rows, 64) and x.is_contiguous() and y.is_contiguous()
                y.copy_(x @ weight.t())

            return run

        kernel: dict[str, Any] = {"run": product("plain"), "run_dependent": product("dependent"), "prepare": lambda index: None}
        manifest = {"schedule": (candidates(workload, H200) or [])[0].to_json()}
        return SimpleNamespace(params=("x", "weight", "y"), path="", manifest=manifest, **kernel)

    for module in (linear_ops, plans):
        monkeypatch.setattr(module, "device_target", lambda device: H200)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(plans, "find_kernel", find)
    monkeypatch.setattr(plans, "held", {})
    x, weight = torch.randn(rows, 64).bfloat16(), torch.randn(96, 64).bfloat16()
    expected = torch_linear(x, weight)
    assert torch.equal(tilebit.linear(x, weight), expected)
    assert torch.equal(tilebit.linear(x[None], weight, dependent=True), expected[None])
    columns = x.t().contiguous().t()
    assert torch.equal(tilebit.linear(columns, weight, dependent=True), expected), "a copy of x is an ordinary kernel: plainly"
    assert seen == ["plain", "dependent", "plain"]
    across = weight.t().contiguous().t()
    assert torch.equal(tilebit.linear(x, across), torch_linear(x, across)) and len(seen) == 3, "a weight is not copied at each call"


def test_it_traces_and_has_a_fake():
    x, weight = torch.randn(3, 64).half(), torch.randn(8, 64).half()
    compiled = torch.compile(tilebit.linear, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, weight), torch_linear(x, weight))
    with FakeTensorMode() as mode:
        assert tilebit.linear(mode.from_tensor(x)[None], mode.from_tensor(weight)).shape == (1, 3, 8)
    torch.library.opcheck(torch.ops.tilebit.linear.default, (x, weight), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("x", "weight", "words"),
    [
        (torch.zeros(3, 64), torch.zeros(8, 64), "x is float32"),
        (torch.zeros(()).half(), torch.zeros(8, 64).half(), r"accepted: float16 or bfloat16 \[..., k\]"),
        (torch.zeros(3, 64).half(), torch.zeros(8, 32).half(), r"weight is float16 \[8, 32\].*accepted with x of .*float16 \[n, 64\]"),
        (torch.zeros(3, 64).half(), torch.zeros(8, 64).bfloat16(), "weight is bfloat16"),
        (torch.zeros(3, 64).half(), torch.zeros(64).half(), r"weight is float16 \[64\]"),
        (torch.zeros(3, 64).half().requires_grad_(), torch.zeros(8, 64).half(), "derivative with respect to x"),
    ],
)
def test_what_does_not_fit_is_said(x: Tensor, weight: Tensor, words: str):
    with pytest.raises(ValueError, match=words):
        tilebit.linear(x, weight)
    with pytest.raises(TypeError, match="weight is list"):
        tilebit.linear(x, [1.0])  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 13, 64])
def test_on_a_gpu(rows: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linear_ops, "served", lambda workload, target: target.arch == H200.arch)
    x, weight = torch.randn(rows, 1000, device="cuda").half(), torch.randn(505, 1000, device="cuda").half()
    exact = x.double() @ weight.double().t()
    y = tilebit.linear(x, weight, dependent=True)
    assert float((y - exact).norm() / exact.norm()) < 1e-3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = tilebit.linear(x, weight, dependent=True)
    graph.replay()
    assert torch.equal(y, again)
