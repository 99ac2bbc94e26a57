"""The steps of attention's ablation, and the schedules that each of them tries:

0  a kernel of its own dequantizes the cache to 16-bit rows in memory, and torch's attention reads them
1  one kernel that dequantizes in registers, from codes [token][channel] (``row_major.py``)
2  induced packing: codes lie as the tensor cores' operand (BitDecoding IV-A, TurboMind 4.2)
3  query transformation: the heads that share a key head are columns of one product (BitDecoding V-A)
4  warp layout: several warps of a block along the tokens (BitDecoding IV-B)
5  bulk copies, and rings as deep as they pay
6  dependent launch: the fastest of 3 to 5 launched so that it requests packed tokens before the call ahead of it ends

Up to 2 every query head is answered by itself, the cache read once for each. Up to 3 a block is one
warp, several of which share an SM, and up to 4 a warp's ring is the shallowest there is:
``SHALLOW`` slots, the keys and the values of one unit. From 1 on the units of all sequences are
divided over a persistent grid; blocks that share a sequence add up in a workspace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from tilebit.autotune.problems.attention import AttentionProblem
from tilebit.schedules.attention.decode import ASYNC, BLOCK_M, BLOCK_N, BULK, MAX_MIN_BLOCKS, STAGES
from tilebit.schedules.attention.rules import MOVERS
from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.operations import candidates, estimate, legal
from tilebit.schedules.records import TuningRecord, shipped_records
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target

from . import row_major

SHALLOW = STAGES[0]
WARPS = (8, 4, 2)  # of a block with several, as they are tried
MOST_WARPS = MAX_MIN_BLOCKS  # of an SM: no more in blocks of several than in blocks of one; twice as many spill (ptxas, block_n 16 to 64)
TRIED = 6  # schedules of a step, at most


@dataclass(frozen=True, slots=True)
class Form:
    """How a step poses a decode problem: the workload that its kernel is compiled for, and the
    problem with that kernel's operands."""

    workload: Callable[[AttentionWorkload], AttentionWorkload]
    problem: Callable[[AttentionProblem], AttentionProblem]


def _apart_workload(w: AttentionWorkload) -> AttentionWorkload:
    return replace(w, batch=w.batch * w.group, heads_q=w.heads_kv)


def apart(problem: AttentionProblem) -> AttentionProblem:
    """``problem`` with every query head of a group by itself: each sequence stands there ``group``
    times, on the same pages, with one query head for each of the cache's. What its call returns is
    put in order by ``together``."""
    w, o = problem.workload, problem.operands
    repeated = {name: o[name].repeat_interleave(w.group, dim=0) for name in ("block_tables", "slots", "lengths")}
    heads = o["q"].unflatten(2, (w.heads_kv, w.group)).permute(0, 3, 1, 2, 4)
    q = heads.flatten(0, 1).contiguous()
    return AttentionProblem(_apart_workload(w), {**o, **repeated, "q": q}, {"out": (tuple(q.shape), q.dtype)})


def together(out: Tensor, w: AttentionWorkload) -> Tensor:
    """What a call of ``w`` returns, [batch, q_len, heads_q, head_dim], of ``out`` [batch * group,
    q_len, heads_kv, head_dim]."""
    return out.unflatten(0, (-1, w.group)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def gathered(problem: AttentionProblem) -> AttentionProblem:
    """The gather of a decode problem's cache; the queries stay among the operands."""
    o, w = problem.operands, problem.workload
    cu_kv = torch.nn.functional.pad(o["lengths"].cumsum(0), (1, 0)).int()
    rows = (int(cu_kv[-1]), w.heads_kv, w.head_dim)
    return AttentionProblem(replace(w, op="gather"), {**o, "cu_kv": cu_kv}, dict.fromkeys(("out_k", "out_v"), (rows, o["q"].dtype)))


GATHERED = Form(lambda w: replace(w, op="gather"), gathered)
ROWS_APART = Form(_apart_workload, lambda problem: row_major.repacked(apart(problem)))
APART = Form(_apart_workload, apart)
TOGETHER = Form(lambda w: w, lambda problem: problem)


@dataclass(frozen=True, slots=True)
class Step:
    """One rung: ``uses(schedule)`` says whether a schedule, in this ``form``, has the idea of this
    step and none of a later one."""

    number: int
    idea: str
    form: Form
    uses: Callable[[Schedule], bool]


def _shallow(s: Schedule, program: str) -> bool:
    return s.program == program and s.num_stages == SHALLOW


STEPS = (
    Step(0, "dequantized to memory, then 16-bit attention", GATHERED, lambda s: s.program == MOVERS["gather"]),
    Step(1, "one kernel, codes row-major", ROWS_APART, lambda s: _shallow(s, row_major.NAME) and s.num_warps == 1),
    Step(2, "induced packing", APART, lambda s: _shallow(s, ASYNC) and s.num_warps == 1),
    Step(3, "query heads of a group side by side", TOGETHER, lambda s: _shallow(s, ASYNC) and s.num_warps == 1),
    Step(4, "several warps of a block along the tokens", TOGETHER, lambda s: _shallow(s, ASYNC) and s.num_warps > 1),
    Step(5, "bulk copies, deeper rings", TOGETHER, lambda s: s.program == BULK or (s.program == ASYNC and s.num_stages > SHALLOW)),
)
DEPENDENT = Step(6, "dependent launch", TOGETHER, lambda s: s.program in (ASYNC, BULK))  # a way to launch, not to divide the work


def legal_here(workload: AttentionWorkload, schedule: Schedule, target: Target) -> list[str]:
    """The rules, or those of the row-major program."""
    rules = row_major.legal if schedule.program == row_major.NAME else legal
    return rules(workload, schedule, target)


def drawn(workload: AttentionWorkload, target: Target, records: Iterable[TuningRecord] | None = None) -> dict[Step, list[Schedule]]:
    """The schedules to try of every step that has any.

    First, for at most half of the places, the workload's tuned ones by their time (``records``,
    default: the shipped), or what is left of them without the later ideas; then the cost model's
    best of each ``block_n``, of which it knows least; then its best."""
    tuned = [r for r in (shipped_records() if records is None else records) if r.ok and r.workload == workload and r.measured_on(target)]
    known = [part for r in sorted(tuned, key=lambda r: r.us or 0.0) for part in _parts(r.schedule)]
    found = {}
    for step in STEPS:
        asked = step.form.workload(workload)
        offered = [*known, *(candidates(asked, target) or []), *_shallow_schedules(asked)]
        fitting = dict.fromkeys(s for s in offered if step.uses(s) and not legal_here(asked, s, target))
        first = [s for s in fitting if s in known][: TRIED // 2]
        rest = sorted(fitting, key=lambda s, asked=asked: estimate(asked, s, target).us)
        one_each = {s.block_n: s for s in reversed(rest)}
        found[step] = [*dict.fromkeys([*first, *sorted(one_each.values(), key=rest.index), *rest])][:TRIED]
    return {step: schedules for step, schedules in found.items() if schedules}


def _parts(s: Schedule) -> list[Schedule]:
    """A tuned schedule, without its copies and depth, and also without its warps, of which the SM
    gets as many in blocks of one."""
    shallow = replace(s, program=ASYNC, num_stages=SHALLOW)
    lone = replace(shallow, num_warps=1, min_blocks=min(s.num_warps * s.min_blocks, MAX_MIN_BLOCKS))
    return [s, shallow, lone, replace(lone, program=row_major.NAME)]


def _shallow_schedules(w: AttentionWorkload) -> list[Schedule]:
    block_m = next((m for m in BLOCK_M if m >= w.group), BLOCK_M[-1])
    sizes = product((row_major.NAME, ASYNC), BLOCK_N, (1, *WARPS), range(1, MAX_MIN_BLOCKS + 1))
    return [
        Schedule(name, n, block_m, w.head_dim, SHALLOW, warps, min_blocks=blocks)
        for name, n, warps, blocks in sizes
        if warps * blocks <= MOST_WARPS
    ]
