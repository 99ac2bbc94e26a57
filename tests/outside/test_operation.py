"""An operation of another package (``toy.scaled_add``): chosen, explained, tuned, verified, called from torch, packed and loaded, without
a line of it in tilebit."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from processes import WITHOUT_COMPILERS, environment, python
from toy.scaled_add import NAME, VECTORS, ScaledAdd

from tilebit import packs
from tilebit.autotune.problems import gate_of
from tilebit.autotune.store import RecordStore
from tilebit.autotune.tune import tune
from tilebit.autotune.worker import DeviceWorker
from tilebit.kernels import build
from tilebit.ops import plans
from tilebit.schedules.operations import candidates, legal, params, workload_from_json
from tilebit.schedules.records import TuningRecord
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.select import choose, explain, refresh
from tilebit.schedules.target import Target, target_from_name
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileRequest, compile_kernel

W = ScaledAdd(8, 96, "bfloat16")
AVX = Target("cpu", "a processor", 4, 0, 0, 1 << 22, 100.0, 1.0, 100.0, features=("avx2",))


@pytest.fixture
def own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The user's records are a file of this test's."""
    monkeypatch.setenv("TILEBIT_RECORDS", str(tmp_path / "records.jsonl"))
    refresh()
    plans.forget()
    yield tmp_path / "records.jsonl"
    monkeypatch.undo()
    refresh()
    plans.forget()


def record(workload: ScaledAdd, schedule: Schedule, target: Target, us: float) -> TuningRecord:
    return TuningRecord(workload, schedule, target.name, target.arch, target.units, us=us)


def answer(x: torch.Tensor, scale: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return (x.double() * scale.double()[:, None] + residual.double()).to(x.dtype)


def exact(m: int, n: int = W.n, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, residual = (torch.randint(-64, 65, (m, n)).to(dtype) for _ in range(2))
    return x, 2.0 ** torch.randint(-4, 3, (m,)), residual


# ---- choosing ----


def test_what_is_legal_and_what_is_chosen():
    assert workload_from_json(W.to_json()) == W
    options = candidates(W, AVX)
    assert options and not any(legal(W, s, AVX) for s in options)
    assert {s.block_n for s in options} == set(VECTORS) and {s.num_warps for s in options} == {4, 1}
    assert params(W, options[0], AVX) == ("x", "scale", "residual", "y")
    assert choose(W, AVX, []).source == "model"

    first = options[0]
    assert legal(W, replace(first, block_n=64), AVX) == ["block_n is 64; accepted for n 96: 8, 16, 32."]
    assert legal(W, replace(first, block_k=32), AVX) == [f"block_k is 32; accepted by {NAME}, which does not use it: 1."]
    assert legal(W, replace(first, split_k=2), AVX) == [f"split_k is 2; accepted by {NAME}, which does not use it: 1."]
    assert legal(W, replace(first, program="gemm_cpu"), AVX) == [f"program is 'gemm_cpu'; accepted for {NAME}: {NAME}."]
    assert legal(replace(W, n=97), first, AVX) == ["n is 97; accepted: multiples of 8."]
    with pytest.raises(ValueError, match=r"no schedule for ScaledAdd"):
        choose(W, target_from_name("sm_90a"), [])


def test_records_of_its_numbers_decide():
    slow, fast, other = candidates(W, AVX)[:3]  # type: ignore[index]
    records = [record(W, slow, AVX, 9.0), record(W, fast, AVX, 3.0)]
    choice = choose(W, AVX, records)
    assert (choice.source, choice.schedule) == ("tuned", fast)
    rows = explain(W, AVX, records)
    assert rows[0].chosen and rows[0].why == "chosen: the fastest measured here, 3.00 us"
    assert next(r.why for r in rows if r.schedule == slow) == "measured 9.00 us, the chosen one 3.00 us"
    assert choose(replace(W, m=16), AVX, records).source == "nearest"
    elsewhere = [record(replace(W, dtype="float16"), other, AVX, 1.0)]
    assert choose(W, AVX, elsewhere).source == "model", "another class of numbers says nothing"


# ---- verifying and tuning ----


@pytest.mark.slow
def test_the_gate_refuses_a_planted_bug(here: Target, tmp_path: Path):
    bug = Schedule("toy.planted_bug", 16, 1, 1, num_warps=1)
    right = replace(bug, program=NAME)
    paths = [compile_kernel(CompileRequest(s.program, W, s, here), ArtifactCache()).path for s in (right, bug)]
    with DeviceWorker("cpu", tmp_path) as worker:
        good, bad = (worker.measure(path, W, s, here) for path, s in zip(paths, (right, bug), strict=True))
    assert good.status == "ok" and good.us and good.rel_err is not None and good.rel_err < 4e-3, good.reason
    assert bad.status == "wrong" and "elements are wrong" in bad.reason and bad.us is None


def test_the_gate_of_an_operation_is_its_own(here: Target):
    gate = gate_of(W, 0, "cpu", "cpu")

    def right(problem, y):
        named = problem.named(y)
        y.copy_(answer(named["x"], named["scale"], named["residual"]))

    assert gate.verify(right).ok

    def late(problem, y):
        right(problem, y)
        y[-1, -1] = float("nan")

    assert "of them NaN" in gate.verify(late).reasons[0]


@pytest.mark.slow
def test_it_is_tuned_and_the_tuned_kernel_is_called(here: Target, own_records: Path):
    """The records choose, whatever the times are: one that says that a loser was the fastest is believed too."""
    from toy import scaled_add_op  # noqa: F401  registers the operator

    workload = W
    report = tune([workload, replace(workload, m=7)], here, progress=False, jobs=1, max_candidates=3)
    (result,) = report.results
    assert report.complete and (result.measured, result.failed) == (3, 0) and result.best is not None
    choice = choose(workload, here)
    assert (choice.source, choice.schedule) == ("tuned", result.best.schedule)
    again = tune([workload], here, progress=False, max_candidates=3)
    assert (again.results[0].measured, again.results[0].reused) == (0, 3)

    loser = next(r for r in RecordStore().records() if r.schedule != result.best.schedule)
    for schedule in (result.best.schedule, loser.schedule):
        args = exact(8)
        assert torch.equal(torch.ops.toy.scaled_add(*args), answer(*args))
        (plan,) = plans.held.values()
        assert plan.kernel.manifest["schedule"] == schedule.to_json()
        RecordStore().append(replace(loser, us=1e-3))
        refresh()
        plans.forget()


@pytest.mark.slow
def test_the_command_line_tunes_it_in_a_process_of_its_own(here: Target, tmp_path: Path):
    """The command is the one that messages print; worker processes find the package by its module on PYTHONPATH."""
    surroundings = environment(tmp_path)
    command = shlex.split(packs.command_line("tune", W, "cpu"))
    assert command[:3] == ["tilebit", "workload", "tune"]
    done = python(["-m", *command, "--json", "--jobs", "1"], surroundings, tmp_path)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["results"]
    assert row["m"] == W.m and row["measured"] == len(candidates(W, here) or []) and row["failed"] == 0 and row["us"] > 0
    records = RecordStore(tmp_path / "records.jsonl").records()
    assert {r.workload for r in records} == {W}
    explained = python(["-m", *shlex.split(packs.command_line("explain", W, "cpu")), "--json"], surroundings, tmp_path)
    assert json.loads(explained.stdout)[0]["schedule"] == row["schedule"], explained.stderr


# ---- calls ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_calls_it(here: Target, dtype: torch.dtype):
    from toy import scaled_add_op  # noqa: F401

    call = torch.ops.toy.scaled_add
    for m in (1, 5, 8, 0):
        x, scale, residual = exact(m, dtype=dtype)
        assert torch.equal(call(x, scale, residual), answer(x, scale, residual))
    x, scale, residual = exact(6, 2 * W.n, dtype)
    x, residual = x[:, ::2], residual[:, : W.n]  # copied: a kernel reads rows without gaps
    assert torch.equal(call(x, scale, residual), answer(x, scale, residual))
    torch.library.opcheck(call, exact(4, dtype=dtype), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scale": torch.ones(3)}, r"scale is float32 \[3\] on cpu; scaled_add of 96 columns in bfloat16 needs float32 \[m\] on cpu.* with "
                                   r"m = 4; pass a factor for each row"),
        ({"residual": torch.ones(4, 96)}, r"residual is float32 \[4, 96\] on cpu; .* needs bfloat16 \[m, 96\]"),
        ({"x": torch.ones(4, 96)}, r"x is of torch.float32; accepted: torch.float16 and torch.bfloat16"),
        ({"x": torch.ones(4).bfloat16()}, r"x is bfloat16 \[4\] on cpu; accepted: \[m, n\]"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("warm", [False, True])
def test_operands_that_do_not_fit_are_named(here: Target, change: dict[str, torch.Tensor], words: str, warm: bool):
    from toy import scaled_add_op  # noqa: F401

    plans.forget()
    given = dict(zip(("x", "scale", "residual"), exact(4), strict=True))
    if warm:
        torch.ops.toy.scaled_add(**given)
    with pytest.raises(ValueError, match=words):
        torch.ops.toy.scaled_add(**{**given, **change})


# ---- packs ----

SERVE = """
from tilebit import packs
packs.load(sys.argv[1])
import torch
import toy.scaled_add_op
given = torch.load(sys.argv[2])
torch.save(torch.ops.toy.scaled_add(*given), sys.argv[3])
assert "tilebit.tiles" not in sys.modules
"""


def test_a_pack_serves_without_a_compiler(here: Target, tmp_path: Path):
    made = packs.export(tmp_path / "pack", dict(zip([W], build([W], here), strict=True)))
    assert len(made) == 1 and made.kernels[0].workload == W
    given = exact(11)
    torch.save(given, tmp_path / "given.pt")
    files = [str(tmp_path / name) for name in ("pack", "given.pt", "y.pt")]
    done = python(["-c", WITHOUT_COMPILERS + SERVE, *files], {**environment(tmp_path), "TILEBIT_NO_COMPILE": "1"}, tmp_path)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "y.pt"), answer(*given))

    strange = python(["-c", WITHOUT_COMPILERS + SERVE, *files], environment(tmp_path, toy=False), tmp_path)
    assert strange.returncode == 1
    assert "NotInstalled: the module 'toy.scaled_add', which OPERATION is read from, cannot be imported" in strange.stderr
    assert "name its folder in PYTHONPATH" in strange.stderr


def test_without_a_compiler_a_call_says_how_to_build_its_kernel(here: Target, tmp_path: Path):
    call = "import torch, toy.scaled_add_op; r = torch.zeros(2, 64).half(); torch.ops.toy.scaled_add(r, torch.ones(2), r)"
    done = python(["-c", call], {**environment(tmp_path), "TILEBIT_NO_COMPILE": "1"}, tmp_path)
    assert "KernelUnavailable: no kernel for scaled_add m=2 n=64 float16 on cpu is loaded or cached" in done.stderr
    assert """`tilebit workload pack PATH '{"op": "toy.scaled_add", "m": 2, "n": 64, "dtype": "float16"}' --target cpu`""" in done.stderr
