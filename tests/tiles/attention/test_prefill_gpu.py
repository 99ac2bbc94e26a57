"""The prefill and gather programs on a GPU: random ragged batches over head dims, group ratios, windows, caps and sinks against fp64, rows
that belong to nobody poisoned, guard bands around the outputs, rare races, and the gathered rows bit for bit.

``attention_prefill_mma`` and ``attention_gather`` are generated for sm_80 and later and run on a newer GPU from the same source.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from tilebit.autotune.problems.verify import check_guards, guarded_output
from tilebit.layouts.kv import RESIDUAL, KVLayout
from tilebit.layouts.kv_formats import KVFormat
from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.operations import legal
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target, detect_target, target_from_name
from tilebit.tiles.attention import reference
from tilebit.tiles.attention.unpacked import random_pages, unpack_cache
from tilebit.tiles.compiler.kernel import Kernel

pytestmark = pytest.mark.timeout(600)

WGMMA, MMA, GATHER = "attention_prefill", "attention_prefill_mma", "attention_gather"
HALF, BFLOAT = "float16", "bfloat16"
SEEDS = 12  # batches a kernel
POISONED = 300  # rows of NaN behind the last sequence's keys
LENGTHS = (0, 1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 511, 700)


def prefill(head_dim: int, group: int, **changes) -> AttentionWorkload:
    return AttentionWorkload("prefill", 1, 1, 1, 2 * group, 2, head_dim, KVFormat(), **changes)


PREFILLS = [
    (prefill(128, 4, lse=True), Schedule(WGMMA, 128, 128, 128, 2, 8)),
    (prefill(128, 7, dtype=BFLOAT, window=130, sink_tokens=4, lse=True), Schedule(WGMMA, 128, 128, 128, 2, 8)),
    (prefill(128, 1, window=400, soft_cap=30.0), Schedule(WGMMA, 64, 128, 128, 3, 8)),
    (prefill(128, 8, sinks=True, lse=True), Schedule(WGMMA, 176, 128, 128, 2, 8)),
    (prefill(64, 16, dtype=BFLOAT, sinks=True, lse=True), Schedule(WGMMA, 96, 192, 64, 2, 12)),
    (prefill(64, 1, window=64, sink_tokens=70), Schedule(WGMMA, 64, 64, 64, 3, 4)),
    (prefill(64, 4, scale=0.3), Schedule(WGMMA, 128, 128, 64, 1, 8)),
    (prefill(256, 4, lse=True), Schedule(WGMMA, 80, 128, 256, 2, 8)),
    (prefill(256, 2, dtype=BFLOAT, window=300, soft_cap=50.0, sinks=True, lse=True), Schedule(WGMMA, 80, 128, 256, 2, 8)),
    (prefill(128, 4, lse=True), Schedule(MMA, 64, 128, 128, 2, 8)),
    (prefill(128, 7, dtype=BFLOAT, window=130, sink_tokens=4, sinks=True), Schedule(MMA, 32, 64, 128, 3, 4)),
    (prefill(64, 16, soft_cap=20.0, lse=True), Schedule(MMA, 128, 128, 64, 2, 8)),
    (prefill(256, 1, lse=True), Schedule(MMA, 32, 64, 256, 1, 4)),
]
FORMATS = ("kv16", "kvfp8", "kv8_channel", "kv8_token", "kv4_channel", "kv4_token", "kv2_channel", "kv2_token", "k8_channel_v4", "k16_v2")
PAGES = (16, 32, 64, 128, 256)
GATHERS = [
    (
        AttentionWorkload("gather", 1, 1, 1, 3, 3, head_dim, KVFormat.from_name(name), dtype, PAGES[(i + head_dim // 64) % len(PAGES)]),
        Schedule(GATHER, RESIDUAL, 1, head_dim, 1, (4, 8)[i % 2]),
    )
    for i, name in enumerate(FORMATS)
    for head_dim, dtype in ((64, HALF), (128, (HALF, BFLOAT)[i % 2]), (256, BFLOAT))
]
CASES = [*PREFILLS, *GATHERS]


def label(case: tuple[AttentionWorkload, Schedule]) -> str:
    w, s = case
    return f"{s.program}-{w.format.name}-{w.dtype}-d{w.head_dim}-group{w.group}-page{w.page_size}-{s.block_m}x{s.block_n}-window{w.window}"


def test_the_cases_are_legal_and_use_every_value() -> None:
    """Needs no GPU: a case that the rules no longer accept shows where the suite is edited."""
    for workload, schedule in CASES:
        assert not legal(workload, schedule, target_from_name("sm_90a")), (workload, schedule)
    assert {w.group for w, _ in PREFILLS} >= {1, 4, 7, 8, 16}
    for head_dim in (64, 128, 256):
        assert {w.dtype for w, s in PREFILLS if s.program == WGMMA and w.head_dim == head_dim} == {HALF, BFLOAT}
    assert {w.page_size for w, _ in GATHERS} == set(PAGES)


@cache
def _target() -> Target:
    return detect_target()


def _kernel(kernels: dict, case: tuple[AttentionWorkload, Schedule]) -> Kernel:
    if case not in kernels:
        pytest.skip(f"{case[1].program} does not run on {_target().arch}")
    assert isinstance(kernels[case], Kernel), kernels[case]
    return kernels[case]


def _batch(w: AttentionWorkload, seed: int) -> dict[str, Tensor]:
    """A ragged batch, often with a history, now and then with fewer keys than queries. Behind the last key come rows of NaN."""
    pick, generator = random.Random(seed), torch.Generator("cuda").manual_seed(seed)
    dtype = getattr(torch, w.dtype)
    queries = [pick.choice(LENGTHS) for _ in range(pick.choice((1, 3, 7, 40)))]
    queries[pick.randrange(len(queries))] = pick.choice(LENGTHS[1:])
    keys = [max(0, n + pick.choice((0, 0, pick.choice(LENGTHS), -3))) for n in queries]
    cu_q, cu_kv = (torch.tensor([0, *n], device="cuda").cumsum(0).int() for n in (queries, keys))
    q = torch.randn(sum(queries), w.heads_q, w.head_dim, generator=generator, device="cuda").to(dtype)
    k, v = (torch.randn(sum(keys) + POISONED, w.heads_kv, w.head_dim, generator=generator, device="cuda").to(dtype) for _ in range(2))
    k[sum(keys) :] = v[sum(keys) :] = float("nan")
    sinks = torch.randn(w.heads_q, generator=generator, device="cuda")
    return {"q": q, "k": k, "v": v, "cu_q": cu_q, "cu_kv": cu_kv, "sinks": sinks}


def _rounded_error(w: AttentionWorkload, q: Tensor, k: Tensor, v: Tensor, wanted: Tensor, options: dict) -> float:
    """The largest error of the same attention with weights and output rounded to the operands' type, as torch's kernels round them."""
    if len(k) == 0:
        return 0.0
    keys, values = (x.float().repeat_interleave(w.group, dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q.float(), keys) * w.softmax_scale
    if w.soft_cap:
        scores = w.soft_cap * torch.tanh(scores / w.soft_cap)
    seen = reference.visible(len(q), len(k), w.window, w.sink_tokens).cuda()
    scores = scores.masked_fill(~seen, -torch.inf)
    if w.sinks:
        scores = torch.cat((scores, options["sinks"][:, None, None].expand(-1, len(q), 1)), dim=2)
    weights = torch.exp(scores - scores.amax(dim=2, keepdim=True).clamp_min(-1e30))
    sums = weights.sum(dim=2)
    products = torch.einsum("hij,jhd->ihd", weights[:, :, : len(k)].to(q.dtype).float(), values)
    out = (products / sums.T[..., None].clamp_min(1e-30)).to(q.dtype)
    return float((out.double() - wanted).abs().max())


@pytest.mark.gpu
@pytest.mark.kernels(of=lambda case: [case])
@pytest.mark.parametrize("case", PREFILLS, ids=label)
def test_ragged_batches(kernels: dict, case: tuple[AttentionWorkload, Schedule]) -> None:
    """In every sequence at most twice the error of rounding weights and output, or the output's rounding; lse to 1e-4; twice the same."""
    w, kernel = case[0], _kernel(kernels, case)
    for seed in range(SEEDS):
        tensors = _batch(w, seed)
        outputs = []
        for _ in range(2):
            out, lse = (
                guarded_output(shape, dtype, "cuda")
                for shape, dtype in ((tuple(tensors["q"].shape), tensors["q"].dtype), (tuple(tensors["q"].shape[:2]), torch.float32))
            )
            named = {**tensors, "out": out.y, "lse": lse.y}
            kernel(*(named[name] for name in kernel.params))
            torch.cuda.synchronize()
            assert not check_guards(out) and not check_guards(lse), (seed, check_guards(out), check_guards(lse))
            outputs.append((out.y, lse.y))
        (out, lse), again = outputs
        assert torch.equal(out, again[0]), seed
        options = {"scale": w.scale, "window": w.window, "sink_tokens": w.sink_tokens, "soft_cap": w.soft_cap}
        options["sinks"] = tensors["sinks"] if w.sinks else None
        bounds_q, bounds_kv = tensors["cu_q"].tolist(), tensors["cu_kv"].tolist()
        for b in range(len(bounds_q) - 1):
            rows, keys = slice(bounds_q[b], bounds_q[b + 1]), slice(bounds_kv[b], bounds_kv[b + 1])
            if rows.start == rows.stop:
                continue
            q, k, v = tensors["q"][rows], tensors["k"][keys], tensors["v"][keys]
            wanted, wanted_lse = reference.attend(q, k, v, **options)
            floor = torch.finfo(out.dtype).eps / 2 * float(wanted.abs().max())
            error = float((out[rows].double() - wanted).abs().max())
            assert error <= 2 * max(_rounded_error(w, q, k, v, wanted, options), floor), (seed, b, len(q), len(k), error)
            if w.lse:
                seen = torch.isfinite(wanted_lse)
                assert torch.equal(torch.isfinite(lse[rows]), seen), (seed, b)
                assert torch.allclose(lse[rows][seen].double(), wanted_lse[seen], rtol=1e-5, atol=1e-4), (seed, b)


@pytest.mark.gpu
@pytest.mark.kernels(of=lambda case: [case])
@pytest.mark.parametrize("case", [PREFILLS[0], PREFILLS[1], PREFILLS[7], PREFILLS[9]], ids=label)
def test_rare_races_stay_away(kernels: dict, case: tuple[AttentionWorkload, Schedule]) -> None:
    """Many blocks, many launches, every result compared on the device with the first."""
    w, kernel = case[0], _kernel(kernels, case).load()
    tokens, dtype = 4000, getattr(torch, w.dtype)
    generator = torch.Generator("cuda").manual_seed(1)
    q, k, v = (
        torch.randn(tokens, heads, w.head_dim, generator=generator, device="cuda").to(dtype)
        for heads in (w.heads_q, w.heads_kv, w.heads_kv)
    )
    bounds = torch.tensor([0, 1500, 1501, tokens], device="cuda", dtype=torch.int32)
    named = {"q": q, "k": k, "v": v, "cu_q": bounds, "cu_kv": bounds, "sinks": torch.zeros(w.heads_q, device="cuda")}
    first: Tensor | None = None
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(500):
        out = torch.full_like(q, float("nan"))
        lse = torch.empty(tokens, w.heads_q, device="cuda")
        kernel.run(*({**named, "out": out, "lse": lse}[name] for name in kernel.params))
        first = out if first is None else first
        wrong += (out != first).sum()  # NaN is unequal to everything
    assert int(wrong) == 0


@pytest.mark.gpu
@pytest.mark.kernels(of=lambda case: [case])
@pytest.mark.parametrize("case", GATHERS, ids=label)
def test_gathered_rows(kernels: dict, case: tuple[AttentionWorkload, Schedule]) -> None:
    """q * scale + zero in fp32, rounded once: bit for bit, for lengths around every border, and no row besides."""
    w, kernel = case[0], _kernel(kernels, case)
    dtype, generator = getattr(torch, w.dtype), torch.Generator("cuda").manual_seed(3)
    layout, room = KVLayout(w.format, w.head_dim, w.page_size), 7  # rows between two sequences' histories
    lengths = torch.tensor([0, 1, 127, 128, 129, w.page_size, w.page_size + 1, 1000, 2048, 16, 383], dtype=torch.int32, device="cuda")
    batch, per_sequence = len(lengths), 2048 // w.page_size
    pages = random_pages(batch * per_sequence, w.heads_kv, layout, dtype, generator)
    windows = random_pages(batch + 3, w.heads_kv, KVLayout(KVFormat(), w.head_dim, RESIDUAL), dtype, generator)
    tables = torch.randperm(batch * per_sequence, generator=generator, device="cuda").int().view(batch, -1)
    slots = torch.randperm(batch + 3, generator=generator, device="cuda")[:batch].int()
    head_scales = torch.rand(2, w.heads_kv, generator=generator, device="cuda") + 0.5
    cu_kv = torch.nn.functional.pad((lengths + room).cumsum(0), (1, 0)).int()
    out_k, out_v = (guarded_output((int(cu_kv[-1]), w.heads_kv, w.head_dim), dtype, "cuda") for _ in range(2))
    named = {
        "pages": pages, "windows": windows, "block_tables": tables, "slots": slots, "lengths": lengths, "cu_kv": cu_kv,
        "head_scales": head_scales, "out_k": out_k.y, "out_v": out_v.y,
    }  # fmt: skip
    kernel(*(named[name] for name in kernel.params))
    torch.cuda.synchronize()
    assert not check_guards(out_k) and not check_guards(out_v)
    written = unpack_cache(pages, windows, tables, slots, lengths, layout, dtype, head_scales)
    for begin, (k, v) in zip(cu_kv.tolist(), written, strict=False):
        for out, rows in ((out_k.y, k), (out_v.y, v)):
            assert torch.equal(out[begin : begin + len(rows)], rows.float().to(dtype))
            assert out[begin + len(rows) : begin + len(rows) + room].isnan().all()


def test_the_workload_of_a_kernel_is_that_of_any_batch() -> None:
    """What a batch looks like chooses a schedule and nothing in the code: one kernel serves all."""
    w = PREFILLS[0][0]
    assert replace(w, batch=9, q_len=77, kv_len=700).static() == w.static()
