"""The points that ``versions.py`` compares: their workloads, their kernels of both trees, their
rows."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilebit.layouts.kv_formats import KVFormat
from tilebit.schedules.operations import workload_from_json
from tilebit.schedules.schedule import Schedule

from .versions_process import AFTER, AGAIN, BEFORE, FORCED
from .versions_trees import Built, Tree, build


def gemm(n: int, k: int, m: int) -> dict[str, Any]:
    """A product with a 4-bit weight in groups of 128, in fp16, as workloads were stored when this
    comparison began: both trees read it."""
    format = {"bits": 4, "group_size": 128, "symmetric": True}
    return {"op": "gemm", "m": m, "n": n, "k": k, "format": format, "dtype": "float16", "bias": False}


def decode(batch: int, kv_len: int, cache: str) -> dict[str, Any]:
    """One new token for each of ``batch`` sequences, heads 32/8 of 128, over a cache "kv8", "kv4"
    or "kv2" with parameters per channel; in the form in which workloads were stored, as above."""
    code = f"int{cache.removeprefix('kv')}"
    return _attention("decode", batch, 1, kv_len, {"key": code, "value": code, "key_scales": "channel"})


def prefill(batch: int, length: int) -> dict[str, Any]:
    """Causal attention among ``length`` rows of each of ``batch`` sequences, heads 32/8 of 128."""
    return _attention("prefill", batch, length, length, KVFormat().to_json())


def _attention(op: str, batch: int, q_len: int, kv_len: int, format: dict[str, Any]) -> dict[str, Any]:
    sizes = {"batch": batch, "q_len": q_len, "kv_len": kv_len, "heads_q": 32, "heads_kv": 8, "head_dim": 128}
    scores = {"window": 0, "sink_tokens": 0, "sinks": False, "soft_cap": 0.0, "scale": None, "lse": False, "rotary": ""}
    return {"op": op, **sizes, "format": format, "dtype": "float16", "page_size": 128, **scores}


@dataclass(slots=True)
class Point:
    """A workload in its stored form, and what became of its kernels, by name."""

    workload: dict[str, Any]
    kernels: dict[str, Built]

    @property
    def title(self) -> str:
        return workload_from_json(self.workload).title

    @property
    def same_schedule(self) -> bool:
        """Whether both trees chose the same; a field that only one tree knows stands at its default
        there."""
        before, after = (Schedule.from_json(self.kernels[name]["schedule"]) for name in (BEFORE, AFTER))
        return before == after

    @property
    def reasons(self) -> list[str]:
        return [f"{name}: {made['failed']}" for name, made in self.kernels.items() if "failed" in made]


def compile_all(points: Sequence[Point], trees: tuple[Tree, Tree], job: dict[str, Any], extra: Sequence[Any], deadline: float) -> None:
    """Have both trees compile their kernels of all ``points`` (and of the workloads ``extra``),
    then this one the other's choices."""
    before, after = trees
    own = [{"workload": w, "schedule": None} for w in (*(p.workload for p in points), *extra)]
    made = build({before: own, after: own}, job, deadline)
    for index, p in enumerate(points):
        p.kernels = {BEFORE: made[before][index], AFTER: made[after][index]}
    apart = [p for p in points if not p.reasons and not p.same_schedule]
    if apart:
        wanted = [{"workload": p.workload, "schedule": p.kernels[BEFORE]["schedule"]} for p in apart]
        for p, kernel in zip(apart, build({after: wanted}, job, deadline)[after], strict=True):
            p.kernels[FORCED] = kernel


def with_a_copy(p: Point, folder: Path) -> dict[str, Any]:
    """The job of a point: its kernels, and a copy of the one before, which a process loads as
    another."""
    before = p.kernels[BEFORE]
    copy = folder / Path(before["path"]).name
    if not copy.is_dir():
        shutil.copytree(before["path"], copy)
    kernels = {**p.kernels, AGAIN: {**before, "path": str(copy)}}
    return {"workload": p.workload, "kernels": {name: made for name, made in kernels.items() if "failed" not in made}}


def rows_of(p: Point, found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The row of what the trees chose, and where they chose apart that of the schedule before in
    both."""
    kernels = found["kernels"]
    before = kernels[BEFORE]
    for kind, name in (("chosen", AFTER), ("forced", FORCED)):
        if name in kernels:
            after = kernels[name]
            yield {
                "kind": kind,
                "workload": p.workload,
                "title": p.title,
                **_times(before, "before"),
                **_times(after, "after"),
                "ratio": round(after["ratio"], 4),
                "spread": [round(ratio, 4) for ratio in after["spread"]],
                "again": round(kernels[AGAIN]["ratio"], 4),
                "schedule_before": p.kernels[BEFORE]["schedule"],
                "schedule_after": p.kernels[name]["schedule"],
                "same_schedule": kind == "forced" or p.same_schedule,
                "same_bits": after["same_bits"],
                "bouts": found["bouts"],
                "others": found["others"],
            }


def _times(kernel: dict[str, Any], when: str) -> dict[str, Any]:
    rounded = {f"{field}_{when}": round(kernel[field], 3) for field in ("us", "us_p20", "us_p80")}
    return {**rounded, f"rel_err_{when}": kernel["rel_err"]}
