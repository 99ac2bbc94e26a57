"""``tune``: the products of a compiled model's decode steps, measured one by one and then where they run.

The schedule that is fastest alone need not be the fastest in a step: what stands before a product
leaves it more or less time to fill its pipeline (results/notes/step-places.md). So the fastest
few take the product's place in turn, and what a step then takes decides."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..accepted import expect
from ..autotune.measure import Timing, time_replays
from ..autotune.provenance import now, source_commit
from ..kernels import KernelUnavailable
from ..layouts.kv import RESIDUAL
from ..layouts.kv_formats import KVFormat
from ..ops import dispatch
from ..ops.dispatch import DTYPE_NAMES, Plan, bound
from ..ops.launchers import Launcher
from ..schedules.gemm.workload import Workload
from ..schedules.operations import alone
from ..schedules.records import TuningRecord, settled, shipped_records
from ..schedules.schedule import Schedule
from ..schedules.select import refresh, select
from ..schedules.target import Target
from .anatomy import anatomy
from .cache import TilebitCache
from .compiled import DecodeSteps
from .output_layer import workload_of

if TYPE_CHECKING:
    from ..autotune.store import RecordStore

FINALISTS, FINALIST_WITHIN = 8, 1.25  # of a product's schedules: as many, up to so many times as slow as the fastest alone
TOKENS = 4096  # of a sequence, where the model allows as many


@dataclass(frozen=True, slots=True)
class TunedProduct:
    """A product of a step and the schedule that is the fastest there. ``calls`` of it are in a step; ``us``
    is its record's time (None: the budget ended before one was measured), ``before_us`` that of the
    schedule that would have been used (None: it was not tried), ``tried`` how many schedules were."""

    workload: Workload
    calls: int
    schedule: Schedule
    us: float | None
    before_us: float | None
    tried: int


def tune(
    model: PreTrainedModel, batch_sizes: Iterable[int] | None = None, kv_format: KVFormat | str = "kv4_channel", tokens: int | None = None,
    *, budget_s: float | None = None, store: RecordStore | None = None, jobs: int | None = None, max_candidates: int | None = None,
    progress: bool = True,
) -> list[TunedProduct]:  # fmt: skip
    """Tune the quantized products of the decode steps of ``model``, which is compiled
    (``tilebit.transformers.compile``), for ``batch_sizes`` (default: those that it was compiled for) over
    a cache in ``kv_format`` of sequences of ``tokens`` tokens (default: 4096, or what the model allows).

    Each product is first tuned by itself, not ``dependent``, as ``tilebit tune`` does: kernels are
    verified, and what has a record is not measured again; ``budget_s`` seconds, shared by the batch
    sizes, ``jobs`` and ``max_candidates`` are for that. The output layer's product, where it is not
    quantized (``tilebit.linear``), is tuned by itself as well, and not tried in the step. Of the others
    the fastest few take their product's place in the step, in turn. The record of the fastest alone
    keeps its time, the others' say as much plus what a step takes longer with them than with that one,
    for each call of the product. ``store`` (default: the user's records) keeps the records, of the
    ``dependent`` product: the model's next step uses what was found, and calls of the product by itself
    do not. A later call measures them again.

    Raises ``TypeError`` and ``ValueError`` for arguments that do not fit, before anything is measured,
    and what the tuner raises (``autotune.tune``)."""
    from ..autotune.store import RecordStore  # they import compilers, which who runs packs need not have
    from ..autotune.tune import tune as tune_alone

    expect("model", model, PreTrainedModel, "a causal language model of transformers")
    steps: DecodeSteps | None = model.__dict__.get("tilebit_steps")
    if steps is None:
        raise ValueError("the model is not compiled; accepted: one of a known kind, after tilebit.transformers.compile(model, batch_sizes)")
    sizes = steps.sizes if batch_sizes is None else sorted(set(batch_sizes))
    if not sizes or not set(sizes) <= set(steps.sizes):
        raise ValueError(f"batch_sizes is {sizes}; accepted: some of {steps.sizes}, for which the model is compiled")
    most = steps.max_tokens - 1
    length = min(TOKENS, most) if tokens is None else tokens
    if type(length) is not int or not 1 <= length <= most:
        raise ValueError(f"tokens is {length!r}; accepted: 1 to {most}, since a step needs a place more")
    length -= (length + 1) % RESIDUAL == 0  # no window is filled by the step, which is repeated
    found: list[TunedProduct] = []
    kept = RecordStore() if store is None else store
    for rows in sizes:
        place = _Place(steps, rows, kv_format, length)
        calls = place.calls()
        workloads = {plan: plan.workload.with_m(rows).bucketed() for plan in calls}
        before = {plan: select(workload, plan.target) for plan, workload in workloads.items()}
        budget = None if budget_s is None else budget_s / len(sizes)
        if calls:
            target = next(iter(calls)).target
            options: dict[str, Any] = {"jobs": jobs, "max_candidates": max_candidates, "progress": progress}
            head = workload_of(anatomy(model).head, rows, DTYPE_NAMES[model.dtype], target)
            asked = [*map(alone, workloads.values()), *([] if head is None else [head])]
            tune_alone(asked, target, budget_s=budget, store=kept, **options)
        known = settled(shipped_records(), kept.records())
        for plan, workload in workloads.items():
            tried = _in_place(place, plan, _finalists(known, workload, plan.target, before[plan]), calls[plan])
            for record in tried if len(tried) > 1 else ():
                kept.append(record)
            us = {record.schedule: record.us or 0.0 for record in tried}
            best = min(us, key=us.__getitem__, default=before[plan])
            found.append(TunedProduct(workload, calls[plan], best, us.get(best), us.get(before[plan]), len(tried)))
    refresh()
    dispatch.forget()
    steps.renew()
    return found


def filled(model: PreTrainedModel, kv_format: KVFormat | str, lengths: Sequence[int], room: int, k: Tensor, v: Tensor) -> TilebitCache:
    """A cache whose layers all hold the rows ``k`` and ``v`` [tokens, heads_kv, head_dim], sequence after
    sequence, with ``room`` for more tokens of each."""
    cache = TilebitCache(model.config, format=kv_format, max_tokens=max(lengths) + room, sequences=len(lengths))
    cache.pool.begin(len(lengths), k.dtype, k.device)
    batch = cache.pool.advance(lengths)
    for layer in range(len(cache.own)):
        cache.pool.cache.append(batch, k, v, layer=layer)
    cache.seen = max(lengths)
    cache.settle()
    return cache


class _Place:
    """A step of ``rows`` sequences, in which the kernels of products can be exchanged."""

    def __init__(self, steps: DecodeSteps, rows: int, kv_format: KVFormat | str, length: int) -> None:
        model, self.rows, self._steps, self._length = steps.model, rows, steps, length
        self.device = model.device
        generator = torch.Generator(self.device).manual_seed(0)
        self._ids = torch.randint(model.config.vocab_size, (rows,), device=self.device, generator=generator)
        of = steps.step.blocks[0].of
        k, v = (torch.randn(rows * length, of.heads_kv, of.head_dim, device=self.device, generator=generator).to(model.dtype) for _ in "kv")
        self._cache = filled(model, kv_format, [length] * rows, 1, k, v).pool
        self._batch = self._cache.cache.batch(self._cache.handles)

    def run(self) -> None:
        """A step, that the cache forgets."""
        kv = self._cache.cache
        kv.advance(self._batch)
        self._steps.step(self._ids, kv, self._batch)
        for handle in self._cache.handles:
            kv.truncate(handle, self._length)

    def calls(self) -> dict[Plan, int]:
        """The plans of the step's products, and how often each is called."""
        self.run()  # kernels load
        found: dict[Plan, int] = {}

        def counted(plan: Plan, launch: Launcher) -> Launcher:
            def call(*operands: Tensor | None) -> None:
                found[plan] = found.get(plan, 0) + 1
                launch(*operands)

            return call

        own = {plan: plan.launchers[self.rows] for plan in dispatch.plans.values() if self.rows in plan.launchers}
        try:
            for plan, launch in own.items():
                plan.launchers[self.rows] = counted(plan, launch)
            self.run()
        finally:
            for plan, launch in own.items():
                plan.launchers[self.rows] = launch
        return found

    def times(self, plan: Plan, launchers: Mapping[Schedule, Launcher]) -> dict[Schedule, Timing]:
        """Of a step with each of ``launchers`` in the place of the product of ``plan``."""
        steps = {schedule: self._with(plan, launch) for schedule, launch in launchers.items()}
        return time_replays(steps, str(self.device), random.Random(0))

    def _with(self, plan: Plan, launch: Launcher) -> Callable[[], Any]:
        def step() -> None:
            own, plan.launchers[self.rows] = plan.launchers[self.rows], launch
            try:
                self.run()
            finally:
                plan.launchers[self.rows] = own

        if self.device.type != "cuda":
            return step
        step()  # kernels load
        kv, graph = self._cache.cache, torch.cuda.CUDAGraph()
        kv.advance(self._batch)
        own, plan.launchers[self.rows] = plan.launchers[self.rows], launch
        try:
            with torch.cuda.graph(graph):
                self._steps.step(self._ids, kv, self._batch)
        finally:
            plan.launchers[self.rows] = own
            for handle in self._cache.handles:  # replays read the numbers of the captured step
                kv.truncate(handle, self._length)
        return graph.replay


def _finalists(known: Collection[TuningRecord], workload: Workload, target: Target, before: Schedule) -> list[TuningRecord]:
    """The records of the fastest schedules, the fastest first, and that of ``before`` where it has one. A
    schedule that was in a step before has its time there, the others those alone."""
    of = {w: {r.schedule: r for r in known if r.ok and r.workload == w and r.measured_on(target)} for w in (alone(workload), workload)}
    ordered = sorted((of[alone(workload)] | of[workload]).values(), key=lambda r: r.us or 0.0)
    near = [r for r in ordered[:FINALISTS] if (r.us or 0.0) <= FINALIST_WITHIN * (ordered[0].us or 0.0)]
    return near + [r for r in ordered if r.schedule == before and r not in near]


def _in_place(place: _Place, plan: Plan, finalists: Sequence[TuningRecord], calls: int) -> list[TuningRecord]:
    """Records of the dependent workload, with the times that they have in the step; one alone as it is."""
    from ..tiles.compiler.compile import CompileFailure, CompileRequest
    from ..tiles.compiler.pool import CompilePool

    if len(finalists) < 2:
        return list(finalists)
    requests = [CompileRequest(r.schedule.program, r.workload, r.schedule, plan.target) for r in finalists]
    with CompilePool(None, keep=True) as pool:
        made = pool.compile(requests)
    launchers: dict[Schedule, Launcher] = {}
    for record, kernel in zip(finalists, made, strict=True):
        if isinstance(kernel, CompileFailure):
            raise KernelUnavailable(str(kernel))  # it compiled when it was measured alone
        loaded = kernel.load()
        if plan.target.is_cuda:
            loaded.prepare(plan.device.index)
        launchers[record.schedule] = bound(loaded, plan, place.rows)
    times = place.times(plan, launchers)
    first = finalists[0]
    found = []
    for record in finalists:
        longer = (times[record.schedule].us - times[first.schedule].us) / calls
        us = (first.us or 0.0) + longer
        if us > 0:
            workload = replace(record.workload, dependent=True)
            fields: dict[str, Any] = {"us": us, "us_p20": None, "us_p80": None, "date": now(), "commit": source_commit()}
            found.append(replace(record, workload=workload, **fields))
    return found
