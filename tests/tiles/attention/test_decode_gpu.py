"""Decode, append and gather on a GPU: ragged random problems over every format, head dim, group ratio and page size against fp64; caches in
which everything that holds no token is NaN; captured graphs whose lengths change; the same bits twice.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from itertools import cycle, pairwise, product
from random import Random

import pytest
import torch
from kv_cases import FORMATS, poisoned_problem
from torch import Tensor

from tilebit.autotune.problems.attention import AttentionProblem, attention_problem, exact_attention, torch_attention
from tilebit.autotune.problems.attention_verify import AttentionGate, sequence_errors
from tilebit.autotune.problems.gemm import split_workspace
from tilebit.autotune.problems.verify import TORCH_FACTOR, GuardedOutput, check_guards, guarded_output
from tilebit.autotune.worker_process import launch
from tilebit.layouts.kv import RESIDUAL, KVLayout
from tilebit.layouts.kv_formats import KVFormat
from tilebit.schedules.attention.decode import ASYNC
from tilebit.schedules.attention.workload import DTYPES, AttentionWorkload
from tilebit.schedules.gemm.rules import TICKETS
from tilebit.schedules.operations import candidates, legal, programs
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target, detect_target, target_from_name
from tilebit.tiles.attention.unpacked import unpack_cache
from tilebit.tiles.compiler.compile import CompileFailure
from tilebit.tiles.compiler.kernel import Kernel

pytestmark = pytest.mark.timeout(600)

SEEDS = 5  # of each decode kernel
HEADS_KV = {1: 8, 4: 4, 7: 2, 8: 2, 16: 2}  # by group: enough answers a sequence for its error to be no accident
PAGE_SIZES = (16, 32, 64, 128, 256)
Q_LENS = (1, 2, 5, 16)
# What scores pass through: (window, sink_tokens, sinks, soft_cap)
SOFTMAXES = ((0, 0, False, 0.0), (0, 0, True, 0.0), (700, 0, False, 0.0), (129, 4, True, 0.0), (0, 0, False, 30.0), (64, 20, True, 3.0))
LSE_ERROR = 4e-3
PEAKED = 2.5  # deviation of scores at which some outgrow the running maximum, which moves by powers of two, again and again
LONGEST = 131072
Case = tuple[AttentionWorkload, Schedule]
Built = Kernel | CompileFailure


@cache
def _decode_cases() -> tuple[Case, ...]:
    """Every format with every head dim and group ratio (of 256 channels one ratio a format); dtypes, page sizes and softmaxes take turns,
    schedules are drawn from those that the tuner would try, for either program."""
    random, target = Random(3), target_from_name("sm_90a")
    pages, dtypes, softmaxes = cycle(PAGE_SIZES), cycle((*DTYPES, DTYPES[0])), cycle(SOFTMAXES)
    wanted = [*product(FORMATS, (64, 128), HEADS_KV), *((f, 256, group) for f, group in zip(FORMATS, cycle(HEADS_KV), strict=False))]
    found = []
    for i, (format, head_dim, group) in enumerate(wanted):
        if i % 5 == 0:
            next(pages)  # or each ratio would keep its page size
        window, sink_tokens, sinks, soft_cap = next(softmaxes)
        heads = HEADS_KV[group]
        workload = AttentionWorkload(
            "decode", 8, 1, 2048, heads * group, heads, head_dim, format, next(dtypes), next(pages), window, sink_tokens, sinks, soft_cap,
            scale=None if format.key_scales == "channel" or i % 2 else PEAKED / head_dim**0.5, lse=i % 3 == 0,
        )  # fmt: skip
        schedule = random.choice(candidates(workload, target) or [])
        older = replace(schedule, program=ASYNC)
        found.append((workload, older if i % 2 and not legal(workload, older, target) else schedule))
    return tuple(found)


@cache
def _mover_cases() -> tuple[Case, ...]:
    """Appends, packs and gathers of every format in both dtypes; head dims, page sizes, rotary embeddings and warps take turns."""
    head_dims, pages, warps, rotary = (
        cycle((64, 128, 256, 128)),
        cycle(PAGE_SIZES),
        cycle((4, 8)),
        cycle(("", "half", "interleaved", "", "")),
    )
    found = []
    for op, (format, dtype) in product(("append", "pack", "gather"), product(FORMATS, DTYPES)):
        workload = AttentionWorkload(op, 8, 1, 2048, 2, 2, next(head_dims), format, dtype, next(pages))
        workload = replace(workload, rotary=next(rotary) if op == "append" else "")
        threads = next(warps) if op == "gather" else 8
        found.append((workload, Schedule(f"attention_{op}", RESIDUAL, 1, workload.head_dim, num_warps=threads)))
    late = [(replace(w, full_windows=True), s) for w, s in found if w.op == "append"][::5]
    return (*found, *late)


def _lengths(workload: AttentionWorkload, random: Random) -> list[int]:
    """Up to twelve sequences: those at which kernels go wrong among others."""
    page = workload.page_size
    edges = (0, 1, RESIDUAL - 1, RESIDUAL, RESIDUAL + 1, page - 1, page, page + 1, 2 * page + RESIDUAL, 1023, 1025)
    return [random.choice(edges) if random.random() < 0.6 else random.randrange(3000) for _ in range(random.randrange(1, 13))]


def test_the_cases_cover_everything() -> None:
    """Needs no GPU: a case that the rules no longer accept shows where the suite is edited."""
    target = target_from_name("sm_90a")
    for workload, schedule in (*_decode_cases(), *_mover_cases()):
        assert not legal(workload, schedule, target), (workload, schedule, legal(workload, schedule, target))
    decodes = [w for w, _ in _decode_cases()]
    assert len(decodes) * SEEDS >= 500
    assert {(w.format, w.head_dim, w.group) for w in decodes} >= set(product(FORMATS, (64, 128), HEADS_KV))
    assert {(w.format, w.page_size) for w in decodes} == set(product(FORMATS, PAGE_SIZES))
    assert {(w.group, w.page_size) for w in decodes} == set(product(HEADS_KV, PAGE_SIZES))
    assert {(w.format, w.dtype) for w in decodes} == set(product(FORMATS, DTYPES))
    assert {(w.window, w.sink_tokens, w.sinks, w.soft_cap) for w in decodes} == set(SOFTMAXES)
    assert {s.program for _, s in _decode_cases()} == set(programs("decode", "sm_90a"))
    assert {w.rotary for w, _ in _mover_cases()} == {"", "half", "interleaved"}


@cache
def _full_windows() -> tuple[Case, ...]:
    """Of the decodes one of each format that reads full windows."""
    return tuple({w.format: (replace(w, full_windows=True), s) for w, s in _decode_cases()}.values())


@cache
def _target() -> Target:
    return detect_target()


def _kernel(kernels: dict[Case, Built], case: Case) -> Kernel:
    if case not in kernels:
        pytest.skip(f"{case[1].program} does not run on {_target().arch} as scheduled")
    found = kernels[case]
    if isinstance(found, CompileFailure) and found.kind in ("illegal", "lint"):
        pytest.skip(f"the tuner would pass this schedule over: {found}")
    assert isinstance(found, Kernel), found
    return found


def _all_cases() -> tuple[Case, ...]:
    return (*_decode_cases(), *_full_windows(), *_mover_cases())


@pytest.mark.gpu
@pytest.mark.kernels(of=_all_cases)
def test_few_schedules_fail_the_lint(kernels: dict[Case, Built]) -> None:
    """Registers are only estimated before a compile: some schedules spill, and are passed over; hardly any may."""
    mine = [kernels[case] for case in _all_cases() if case in kernels]
    failed = [str(found) for found in mine if isinstance(found, CompileFailure) and found.kind == "lint"]
    assert len(failed) <= len(mine) // 20, failed


def _workspace(case: Case) -> dict[str, Tensor]:
    return split_workspace(*case, _target(), "cuda")


def _run(kernel: Kernel, workspace: dict[str, Tensor], problem: AttentionProblem) -> dict[str, GuardedOutput]:
    outputs = {name: guarded_output(shape, dtype, "cuda") for name, (shape, dtype) in problem.written.items()}
    launch(kernel.load(), workspace, problem, {name: guarded.y for name, guarded in outputs.items()})
    torch.cuda.synchronize()
    assert not any(words[:TICKETS].any() for words in workspace.values()), "tickets must be left zero"
    return outputs


def _reasons(problem: AttentionProblem, outputs: dict[str, GuardedOutput]) -> list[str]:
    """Why the outputs are wrong: the worst sequence is to be at most ``TORCH_FACTOR`` times as wrong as torch's worst."""
    found = [reason for guarded in outputs.values() for reason in check_guards(guarded)]
    out, right_lse = problem.attended(exact_attention)
    theirs, _ = problem.attended(torch_attention)
    each = [1] * len(out)
    ours, torchs = (sequence_errors(x, out, each) for x in (outputs["out"].y, theirs))
    allowed = TORCH_FACTOR * max(float(torchs.max()), torch.finfo(theirs.dtype).eps / 4)
    if not float(ours.max()) <= allowed:
        worst = int(ours.argmax())
        found.append(f"sequence {worst} (length {problem.lengths[worst]}) is off by {ours[worst]:.3g}; accepted: {allowed:.3g}")
    if "lse" in outputs:
        lse = outputs["lse"].y.double()
        if not bool(((lse == right_lse) | ((lse - right_lse).abs() <= LSE_ERROR)).all()):
            found.append(f"the log-sum-exp is off by {float((lse - right_lse).nan_to_num(0).abs().max()):.3g}")
    return found


def _label(case: Case) -> str:
    w, s = case
    softmax = f"window{w.window}+{w.sink_tokens}{'-sinks' * w.sinks}-cap{w.soft_cap:g}{w.rotary}"
    shape = f"{s.block_n}x{s.block_m}-{s.num_warps}w{s.num_stages}s{s.min_blocks}b"
    kind = f"{w.format.name}-{w.dtype}-d{w.head_dim}-group{w.group}-page{w.page_size}{'-full' * w.full_windows}"
    return f"{kind}-{softmax}-{s.program}-{shape}"


@pytest.mark.gpu
@pytest.mark.kernels(of=lambda case: [case])
@pytest.mark.parametrize("case", (*_decode_cases(), *_full_windows()), ids=_label)
def test_decode_over_seeds(kernels: dict[Case, Built], case: Case) -> None:
    """Ragged problems, one after another on one workspace."""
    kernel, workspace, random = _kernel(kernels, case), _workspace(case), Random(_all_cases().index(case))
    for seed, q_len in zip(range(SEEDS), cycle(Q_LENS), strict=False):
        lengths = _lengths(case[0], random)
        problem = poisoned_problem(replace(case[0], q_len=q_len), lengths, [0] * len(lengths), seed, "cuda")
        first, second = (_run(kernel, workspace, problem) for _ in range(2))
        assert not (reasons := _reasons(problem, first)), (lengths, q_len, seed, reasons)
        assert all(torch.equal(output.buffer, second[name].buffer) for name, output in first.items()), (lengths, q_len, seed)


@pytest.mark.gpu
@pytest.mark.kernels(of=lambda case: [case])
@pytest.mark.parametrize("case", _decode_cases()[6:110:26], ids=_label)
def test_the_longest(kernels: dict[Case, Built], case: Case) -> None:
    kernel, workload = _kernel(kernels, case), case[0]
    problem = poisoned_problem(workload, [LONGEST, 3, 0, LONGEST - 1], [0] * 4, 1, "cuda")
    assert not (reasons := _reasons(problem, _run(kernel, _workspace(case), problem))), reasons


@pytest.mark.gpu
@pytest.mark.kernels(of=lambda case: [case])
@pytest.mark.parametrize("case", _decode_cases()[3:110:13], ids=_label)
def test_a_captured_graph_follows_the_lengths(kernels: dict[Case, Built], case: Case) -> None:
    """One launch, captured once: lengths and tables change on the device, and every replay gives the bits of a launch of its own."""
    kernel, workspace, random = _kernel(kernels, case), _workspace(case), Random(7)
    most = [2900, 700, 2048, 300, 1, 1500]
    problem = attention_problem(replace(case[0], q_len=2), most, [0] * len(most), 5, "cuda")
    outputs = problem.outputs()
    captured = torch.cuda.CUDAGraph()
    replayed = partial(launch, kernel.load(), workspace, problem, outputs)
    replayed()
    torch.cuda.synchronize()
    with torch.cuda.graph(captured):
        replayed()
    for turn in range(6):
        lengths = [length if turn == 0 else random.randrange(length + 1) for length in most]
        problem.operands["lengths"].copy_(torch.tensor(lengths, dtype=torch.int32))
        for output in outputs.values():
            output.fill_(float("nan"))
        captured.replay()
        torch.cuda.synchronize()
        alone = _run(kernel, workspace, problem)
        assert not (reasons := _reasons(problem, alone)), (lengths, reasons)
        assert all(torch.equal(output, alone[name].y) for name, output in outputs.items()), lengths


@pytest.mark.gpu
@pytest.mark.kernels(of=lambda case: [case])
@pytest.mark.parametrize("case", _mover_cases(), ids=lambda case: f"{case[0].op}-{_label(case)}")
def test_append_pack_and_gather(kernels: dict[Case, Built], case: Case) -> None:
    """The tuner's gate: packed groups are the numpy twin's bit for bit, gathered rows are values rounded once."""
    kernel, random = _kernel(kernels, case), Random(11)
    problems = []
    for seed in range(2):
        lengths = _lengths(case[0], random)[:6]
        rows = [random.choice((0, 1) if case[0].full_windows else (0, 1, RESIDUAL - 1, RESIDUAL + 2, length)) for length in lengths]
        problems.append(poisoned_problem(case[0], lengths, [min(pair) for pair in zip(lengths, rows, strict=True)], seed, "cuda"))
    verdict = AttentionGate(*problems).verify(partial(launch, kernel.load(), {}))
    assert verdict.ok, verdict.reasons


def _append_of(format: KVFormat) -> list[Case]:
    return [next(c for c in _mover_cases() if c[0].op == "append" and c[0].format == format)]


@pytest.mark.gpu
@pytest.mark.kernels(of=_append_of)
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_token_by_token_is_all_at_once(kernels: dict[Case, Built], format: KVFormat) -> None:
    (case,) = _append_of(format)
    kernel, workload, tokens = _kernel(kernels, case), case[0], 700
    problem = poisoned_problem(workload, [tokens], [tokens], 7, "cuda")
    o, layout, dtype = problem.operands, KVLayout(workload.format, workload.head_dim, workload.page_size), getattr(torch, workload.dtype)

    def after(bounds: list[int]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Pages, and what the cache means, after rows [first, last) of each step."""
        state = {**o, **problem.outputs()}
        for first, last in pairwise(bounds):
            new = {"lengths": torch.tensor([last]), "cu_seqlens": torch.tensor([0, last - first])}
            state |= {"k": o["k"][first:last], "v": o["v"][first:last], **{n: t.int().cuda() for n, t in new.items()}}
            kernel(*(state[name] for name in kernel.params))
        s, scales = state, o.get("head_scales")
        return s["pages"], unpack_cache(s["pages"], s["windows"], s["block_tables"], s["slots"], s["lengths"], layout, dtype, scales)

    at_once, one_by_one, uneven = (
        after(bounds) for bounds in ([0, tokens], list(range(tokens + 1)), [0, 1, 100, 127, 130, 256, 600, tokens])
    )
    for pages, sequences in (one_by_one, uneven):
        assert torch.equal(pages, at_once[0])
        assert all(torch.equal(a, b) for pair in zip(sequences, at_once[1], strict=True) for a, b in zip(*pair, strict=True))
