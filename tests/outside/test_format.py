"""A format of another package (``toy.nf4``): packed, chosen, explained, verified, tuned, multiplied with, packed and loaded, without a
line of it in tilebit."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import WITHOUT_COMPILERS, environment, python
from toy.nf4 import CODEC, FORMAT, LEVELS, NAME

import tilebit
from tilebit import packs
from tilebit.autotune.problems.gemm_drawn import exact_problem
from tilebit.autotune.store import RecordStore
from tilebit.autotune.tune import tune
from tilebit.autotune.worker import DeviceWorker
from tilebit.kernels import build
from tilebit.layouts.formats import FORMATS, GemmFormat, Numbers, QuantFormat, Scale
from tilebit.schedules.gemm.codecs import codec_of, packed_layout
from tilebit.schedules.gemm.cpu import PROGRAM
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import candidates, legal, workload_from_json
from tilebit.schedules.records import TuningRecord
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.select import choose, explain
from tilebit.schedules.target import Target, target_from_name
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileRequest, compile_kernel
from tilebit.tiles.cpu.gemm.plan import Plan
from tilebit.weights.quantize import QuantizedTensor, quantize

N, K = 72, 192
W = Workload(3, N, K, FORMAT, "bfloat16")
AVX = Target("cpu", "a processor", 4, 0, 0, 1 << 22, 100.0, 1.0, 100.0, features=("avx2",))


# ---- what it is ----


def test_its_name_is_its_module():
    assert GemmFormat.parse(NAME) is FORMAT and FORMAT.name == NAME and NAME not in FORMATS
    assert GemmFormat.from_json(FORMAT.to_json()) == FORMAT and pickle.loads(pickle.dumps(FORMAT)) == FORMAT
    assert codec_of(FORMAT) is CODEC and FORMAT.weight.values == LEVELS
    assert FORMAT.symmetric and FORMAT.symmetric_zero_point == 0 and FORMAT.largest == 1.0
    assert workload_from_json(W.to_json()) == W
    assert len({FORMAT.kind, *(f.kind for f in FORMATS.values())}) == 1 + len({f.kind for f in FORMATS.values()})


def test_packing_keeps_every_code():
    """The laws of packed layouts: each code stored once, found again where the layout says, and unpacked as it was packed."""
    layout = packed_layout("cpu", FORMAT)
    i, j = np.indices((2 * layout.tile_n, 3 * layout.tile_k))
    word, shift = layout.position(i, j, *i.shape)
    assert np.array_equal(np.sort(word * 32 + shift, axis=None), np.arange(i.size) * FORMAT.bits)
    codes = torch.randint(0, 16, (N, K), dtype=torch.uint8)
    packed = tilebit.pack(weight(codes), torch.bfloat16)
    assert torch.equal(packed.unpack().codes, codes) and packed.format is FORMAT
    assert np.array_equal(packed.weight.numpy(), layout.pack(codes.numpy()).view(np.int32))


def test_numbers_that_bf16_does_not_hold_are_not_multiplied_in_it():
    """vdpbf16ps would round a table of any other numbers."""
    for level, dot in ((0.5, "pairs"), (1 / 3, "float")):
        format = GemmFormat(Numbers(NAME, 4, (Scale(64),), (*LEVELS[:-1], level)))
        workload, target = Workload(1, N, K, format, "bfloat16"), replace(AVX, features=("avx2", "avx512", "avx512_bf16"))
        assert Plan.of(workload, Schedule(PROGRAM, 32, 1, 32, num_warps=4), target).dot == dot


def test_weights_are_rounded_to_the_nearest_numbers():
    w = torch.randn(N, K)
    w[3, 64:128] = 0
    q = quantize(w, FORMAT, scale_dtype=torch.float32)
    groups = w.view(N, -1, 64)
    assert torch.equal(q.scales, groups.abs().amax(-1).masked_fill(groups.abs().amax(-1) == 0, 1.0)), "the largest number is 1"
    far = (groups / q.scales[..., None]).unsqueeze(-1) - torch.tensor(LEVELS)
    chosen = far.abs().gather(-1, q.codes.view(N, -1, 64, 1).long())[..., 0]
    assert torch.allclose(chosen, far.abs().amin(-1), atol=1e-6)
    assert not q.dequantize()[3, 64:128].any()


# ---- choosing ----


def test_what_is_legal_and_what_is_chosen():
    first = (candidates(W, AVX) or [])[0]
    assert first.program == PROGRAM and not legal(W, first, AVX)
    assert choose(W, AVX, []).source == "model" and explain(W, AVX, [])[0].chosen
    assert candidates(W, target_from_name("sm_90a")) is None
    mma = Schedule("gemm_mma", 64, 16, 64)
    assert legal(W, mma, target_from_name("sm_80")) == [f"format is {NAME}; gemm_mma has no codec for it."]


def test_records_of_other_numbers_say_nothing():
    plain = Workload(3, N, K, QuantFormat(4, 64), "bfloat16")
    best, other = (candidates(W, AVX) or [])[:2]
    records = [TuningRecord(w, s, AVX.name, "cpu", AVX.units, us=us) for w, s, us in ((plain, other, 1.0), (W, best, 9.0))]
    assert choose(W, AVX, records).schedule == best and choose(W, AVX, records[:1]).source == "model"


# ---- kernels ----


def weight(codes: torch.Tensor, group: int = 64) -> QuantizedTensor:
    scales = 2.0 ** torch.randint(-2, 2, (codes.shape[0], -(-codes.shape[1] // group)))
    return QuantizedTensor(codes, scales, None, FORMAT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gemm_multiplies_by_the_codes_numbers(here: Target, dtype: torch.dtype):
    """Every code in every place of a word, and scales that differ: exact."""
    q = weight(torch.randint(0, 16, (N, K), dtype=torch.uint8))
    packed, x = tilebit.pack(q, dtype), torch.randint(-4, 5, (W.m, K)).to(dtype)
    table = torch.tensor(LEVELS, dtype=torch.float64)
    expected = x.double() @ (table[q.codes.long()] * q.scales.double().repeat_interleave(64, 1)[:, :K]).t()
    assert torch.equal(tilebit.gemm(x, packed), expected.to(dtype))
    problem = exact_problem(Workload(W.m, N, K, FORMAT, W.dtype), 0)
    assert problem.reference().isfinite().all() and float(problem.reference().abs().max()) > 0


@pytest.mark.slow
def test_the_gate_refuses_another_table(here: Target, tmp_path: Path):
    """A kernel of integers, whose operands are the same but for what a code means."""
    schedule = (candidates(W, here) or [])[0]
    integers = Workload(W.m, N, K, QuantFormat(4, 64), W.dtype)
    paths = [compile_kernel(CompileRequest(PROGRAM, w, schedule, here), ArtifactCache()).path for w in (W, integers)]
    with DeviceWorker("cpu", tmp_path) as worker:
        good, bad = (worker.measure(path, W, schedule, here) for path in paths)
    assert good.status == "ok" and good.rel_err is not None and good.rel_err < 5e-3, good.reason
    assert bad.status == "wrong" and "elements are wrong" in bad.reason


@pytest.mark.slow
def test_it_is_tuned(here: Target, tmp_path: Path):
    store = RecordStore(tmp_path / "records.jsonl")
    report = tune([W], here, store=store, progress=False, jobs=1, max_candidates=2)
    (result,) = report.results
    assert report.complete and (result.measured, result.failed) == (2, 0) and result.best is not None
    choice = choose(W, here, store.records())
    assert (choice.source, choice.schedule) == ("tuned", result.best.schedule)


SERVE = """
import torch, tilebit
from tilebit.layouts.formats import GemmFormat
from tilebit.tiles.cpu.gemm.plan import Plan
from tilebit.weights.quantize import QuantizedTensor
tilebit.packs.load(sys.argv[1])
given = torch.load(sys.argv[2])
q = QuantizedTensor(given["codes"], given["scales"], None, GemmFormat.parse("toy.nf4"))
torch.save(tilebit.gemm(given["x"], tilebit.pack(q, torch.bfloat16)), sys.argv[3])
"""


@pytest.mark.slow
def test_a_pack_serves_without_a_compiler(here: Target, tmp_path: Path):
    packs.export(tmp_path / "pack", dict(zip([W], build([W], here), strict=True)))
    q, x = weight(torch.randint(0, 16, (N, K), dtype=torch.uint8)), torch.randint(-4, 5, (5, K)).bfloat16()
    torch.save({"codes": q.codes, "scales": q.scales, "x": x}, tmp_path / "given.pt")
    files = [str(tmp_path / name) for name in ("pack", "given.pt", "y.pt")]
    done = python(["-c", WITHOUT_COMPILERS + SERVE, *files], {**environment(tmp_path), "TILEBIT_NO_COMPILE": "1"}, tmp_path)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "y.pt"), tilebit.gemm(x, tilebit.pack(q, torch.bfloat16)))
