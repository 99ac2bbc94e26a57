"""Measure attention on this machine where the peer harness has no case: ``python -m
results.measure.attention [--only WHAT]`` appends rows to results/rows/attention.

    paged    a decode step on pages of 16 to 256 tokens in random order, beside the same step on a contiguous cache
    queries  a decode step of 1 to 16 new tokens a sequence
    append   one new token for many sequences, none of whose windows it fills, and all of whose windows it fills; a whole prompt
    gather   a cache as 16-bit rows

What stands in one bout is timed side by side. Every kernel passes the gate of
``autotune.attention_verify`` on its bout's own problem before it is timed. Kernels are compiled (in
parallel) ahead, with the schedules that ``select`` gives: tune first. Operands rotate so that no
cache holds what a call reads; an append of one token, which touches little, rotates over places in
the windows too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tilebit.autotune.measure import copies_needed, time_calls
from tilebit.autotune.problems.attention import AttentionProblem, attention_problem, edge_attention
from tilebit.autotune.problems.attention_verify import AttentionGate
from tilebit.command.bench import process_fields, write_rows
from tilebit.kernels import build, find_kernel
from tilebit.layouts.kv import PAGE_SIZES, RESIDUAL
from tilebit.layouts.kv_formats import KVFormat
from tilebit.runtime import LoadedKernel
from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.operations import workspace_words
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target, detect_target, file_stem

from ..peers.attention_plugin import clocks
from ..report.rows import ROWS

HEADS, HEAD_DIM = (32, 8), 128
PAGED_CASES = ((1, 32768), (8, 8192), (32, 4096), (128, 1024))  # batch, kv_len
QUERIES = (1, 2, 4, 8, 16)
APPEND_FORMATS = ("kv16", "kv8_channel", "kv4_channel", "kv4_token", "kv2_channel", "kvfp8")
MOVED_FORMATS = ("kv8_channel", "kv4_channel", "kv2_channel")
BATCHES = (1, 32, 128)
TOKENS = 1024  # of a sequence that a token joins
PROMPT = 8192
MOST_CALLS = 512  # in a graph
WHATS = ("paged", "queries", "append", "gather")


@dataclass(frozen=True, slots=True, eq=False)
class Contender:
    """One line of a bout: ``problems`` that are timed, the first of which is verified and the
    others of which read other memory; ``variant``, how its row is called; and the ``bytes`` that
    one call must move at least (0: the workload's)."""

    problems: list[AttentionProblem]
    variant: str = ""
    bytes: int = 0

    @property
    def problem(self) -> AttentionProblem:
        return self.problems[0]


def workload(op: str, batch: int, q_len: int, kv_len: int, format: str, page_size: int = RESIDUAL) -> AttentionWorkload:
    return AttentionWorkload(op, batch, q_len, kv_len, *HEADS, HEAD_DIM, KVFormat.from_name(format), page_size=page_size)


def contiguous(problem: AttentionProblem) -> AttentionProblem:
    """The same problem with each sequence's pages one after the other."""
    tables = problem.operands["block_tables"]
    in_order = torch.arange(tables.numel(), dtype=torch.int32, device=tables.device).view_as(tables)
    return replace(problem, operands={**problem.operands, "block_tables": in_order})


def rotating(problem: AttentionProblem, l2: int, bytes_moved: int = 0) -> list[AttentionProblem]:
    """``problem`` and copies of it of which as many calls move more than twice the last cache."""
    copies = copies_needed(bytes_moved or problem.workload.bytes, l2)
    return [problem, *(problem.copied() for _ in range(copies - 1))]


def one_length(w: AttentionWorkload, device: str) -> AttentionProblem:
    """A random problem of ``w`` in which all sequences have ``w.kv_len`` tokens and ``w.q_len`` new
    ones."""
    return attention_problem(w, [w.kv_len] * w.batch, [w.q_len] * w.batch, 0, device)


def paged_bouts(device: str, l2: int, cases: Sequence[tuple[int, int]] = PAGED_CASES) -> list[Callable[[], list[Contender]]]:
    """For each case: a contiguous cache, then pages of every size in random order."""

    def bout(batch: int, kv_len: int) -> list[Contender]:
        plain = contiguous(one_length(workload("decode", batch, 1, kv_len, "kv4_channel"), device))
        found = [Contender(rotating(plain, l2))]
        for page_size in PAGE_SIZES:
            problem = one_length(workload("decode", batch, 1, kv_len, "kv4_channel", page_size), device)
            found.append(Contender(rotating(problem, l2), f"page {page_size}"))
        return found

    return [partial(bout, *case) for case in cases]


def query_bouts(device: str, l2: int, case: tuple[int, int] = (32, 4096)) -> list[Callable[[], list[Contender]]]:
    """For each format: every number of new tokens."""

    def bout(format: str) -> list[Contender]:
        problems = [contiguous(one_length(workload("decode", case[0], q_len, case[1], format), device)) for q_len in QUERIES]
        return [Contender(rotating(problem, l2)) for problem in problems]

    return [partial(bout, format) for format in ("kv8_channel", "kv4_channel")]


def append_bouts(device: str, l2: int, batches: Sequence[int] = BATCHES, prompt: int = PROMPT) -> list[Callable[[], list[Contender]]]:
    """For each format and batch: one token that fills no window, one that fills them all; then a
    prompt."""

    def tokens(format: str, batch: int) -> list[Contender]:
        some = one_length(workload("append", batch, 1, TOKENS + RESIDUAL // 2, format), device)
        full = one_length(workload("append", batch, 1, TOKENS, format), device)
        w = full.workload
        packed = batch * w.heads_kv * RESIDUAL * (w.row_bytes + w.layout.token_bytes)  # windows are read whole, and written to pages
        return [Contender(places(some, l2), "none fills up"), Contender(rotating(full, l2, packed), "all fill up", packed)]

    def whole(format: str) -> list[Contender]:
        return [Contender(rotating(one_length(workload("append", 1, prompt, prompt, format), device), l2), "a prompt")]

    return [*(partial(tokens, f, b) for f in APPEND_FORMATS for b in batches), *(partial(whole, f) for f in APPEND_FORMATS)]


def places(problem: AttentionProblem, l2: int) -> list[AttentionProblem]:
    """``problem``, a call of which writes one row of each window, at every place in the windows, in
    as many copies of them as exceed twice the last cache or as a graph of MOST_CALLS calls takes.
    """
    o = problem.operands
    first = int(o["lengths"][0])
    lengths = [first, *(n for n in range(TOKENS + 1, TOKENS + RESIDUAL) if n != first)]
    copies = min(copies_needed(o["windows"].nbytes, l2), MOST_CALLS // len(lengths))
    sets = [o, *({**o, "windows": o["windows"].clone()} for _ in range(copies - 1))]
    return [replace(problem, operands={**own, "lengths": torch.full_like(o["lengths"], n)}) for own in sets for n in lengths]


def gather_bouts(device: str, l2: int, cases: Sequence[tuple[int, int]] = ((1, 8192), (1, 16384))) -> list[Callable[[], list[Contender]]]:
    """For each case: the formats of a history."""

    def bout(batch: int, kv_len: int) -> list[Contender]:
        problems = [one_length(workload("gather", batch, 1, kv_len, format), device) for format in MOVED_FORMATS]
        return [Contender(rotating(problem, l2)) for problem in problems]

    return [partial(bout, *case) for case in cases]


class Launcher:
    """A kernel and its workspace for one workload."""

    def __init__(self, w: AttentionWorkload, target: Target, device: str) -> None:
        self.kernel: LoadedKernel = find_kernel(w.bucketed(), target)
        words = 0
        if "workspace" in self.kernel.params:
            words = workspace_words(w.bucketed(), Schedule.from_json(self.kernel.manifest["schedule"]), target)
        self.workspace = torch.zeros(words, dtype=torch.int32, device=device)
        if target.is_cuda:
            self.kernel.prepare()

    def launch(self, problem: AttentionProblem, outputs: dict[str, torch.Tensor]) -> None:
        named = {**problem.named(outputs), "workspace": self.workspace}
        self.kernel.run(*(named[name] for name in self.kernel.params))

    def call(self, problem: AttentionProblem) -> Callable[[], None]:
        """A launch that writes to tensors of its own; what is changed in place is the problem's."""
        written = {
            name: torch.empty(shape, dtype=dtype, device=problem.device)
            for name, (shape, dtype) in problem.written.items()
            if name not in problem.operands
        }
        named = {**problem.operands, **written, "workspace": self.workspace}
        return partial(self.kernel.run, *(named[name] for name in self.kernel.params))


def measured(contenders: Sequence[Contender], target: Target, device: str) -> list[dict[str, Any]]:
    """The rows of one bout. A kernel that is wrong is named and left out."""
    launchers, errors, calls = {}, {}, {}
    for index, c in enumerate(contenders):
        w = c.problem.workload
        launcher = launchers[index] = Launcher(w, target, device)
        verdict = AttentionGate(edge_attention(w, 0, device), c.problem).verify(launcher.launch)
        if not verdict.ok:
            print(f"  wrong, left out: {w.title} {c.variant}: {' '.join(verdict.reasons)}", flush=True)
            continue
        errors[index] = verdict.rel_err
        calls[str(index)] = [launcher.call(problem) for problem in c.problems]
    times = time_calls(calls, device) if calls else {}
    rows = []
    for name, timing in times.items():
        c, w = contenders[int(name)], contenders[int(name)].problem.workload
        moved = c.bytes or w.bytes
        rows.append(
            {
                "op": w.op,
                "impl": "tilebit",
                "format": w.format.name,
                "variant": c.variant,
                "dtype": w.dtype,
                "page_size": w.page_size,
                "batch": w.batch,
                "kv_len": w.kv_len,
                "q_len": w.q_len,
                "heads_q": w.heads_q,
                "heads_kv": w.heads_kv,
                "head_dim": w.head_dim,
                "us": round(timing.us, 4),
                "us_p20": round(timing.us_p20, 4),
                "us_p80": round(timing.us_p80, 4),
                "bytes": moved,
                "gbps": round(moved / timing.us / 1e3, 1),
                "read_gbps": target.read_gbps,
                "floor_us": round(moved / target.read_gbps / 1e3, 4),
                "rel_err": errors[int(name)],
                "schedule": launchers[int(name)].kernel.manifest.get("schedule"),
            }
        )
    return rows


def workloads(whats: Sequence[str]) -> list[AttentionWorkload]:
    """What the bouts will ask for, once each: to be compiled ahead."""
    wanted: list[AttentionWorkload] = []
    if "paged" in whats:
        wanted += [workload("decode", b, 1, n, "kv4_channel", page) for b, n in PAGED_CASES for page in (RESIDUAL, *PAGE_SIZES)]
    if "queries" in whats:
        wanted += [workload("decode", 32, q_len, 4096, format) for format in ("kv8_channel", "kv4_channel") for q_len in QUERIES]
    if "append" in whats:
        wanted += [workload("append", b, 1, TOKENS, format) for format in APPEND_FORMATS for b in BATCHES]
        wanted += [workload("append", b, 1, TOKENS + RESIDUAL // 2, format) for format in APPEND_FORMATS for b in BATCHES]
        wanted += [workload("append", 1, PROMPT, PROMPT, format) for format in APPEND_FORMATS]
    if "gather" in whats:
        wanted += [workload("gather", 1, 1, n, format) for n in (8192, 16384) for format in MOVED_FORMATS]
    return list(dict.fromkeys(w.bucketed() for w in wanted))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m results.measure.attention", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(WHATS), help=f"what to measure (default: {','.join(WHATS)})")
    parser.add_argument("--out", type=Path, default=ROWS / "attention", help="folder of the rows, one file per device")
    options = parser.parse_args(arguments)
    whats = options.only.split(",")
    if unknown := set(whats) - set(WHATS):
        parser.error(f"--only names {', '.join(sorted(unknown))}; accepted: {', '.join(WHATS)}")
    target = detect_target()
    if not target.is_cuda:
        parser.error(f"this machine's device is {target.name}; accepted: an NVIDIA GPU (the bouts' sizes are a GPU's)")
    device = "cuda:0"
    build(workloads(whats), target, jobs=None)
    common = {**process_fields(target), "timer": "tilebit"}
    path = options.out / f"{file_stem(target.name)}.jsonl"
    makers = {"paged": paged_bouts, "queries": query_bouts, "append": append_bouts, "gather": gather_bouts}
    for what in whats:
        for bout in makers[what](device, target.l2):
            found = measured(bout(), target, device)
            now = clocks()  # right after the bout: before the first, they are an idle GPU's
            rows = [{**common, "clocks": now, **row} for row in found]
            write_rows(path, rows)
            for r in rows:
                sizes = f"{r['batch']} x {r['kv_len']}, q_len {r['q_len']}"
                print(f"{r['op']} {r['format']} {sizes} {r['variant']}: {r['us']:.2f} us, {r['gbps']:,.0f} GB/s", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
