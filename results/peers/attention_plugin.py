"""tilebit's attention as a plug-in of the peer harness: ``attn_peers.py
--plugin results/peers/attention_plugin.py --sequential`` times it in one
process with FA3 and torch's attention, on the harness's own q, k and v. (Without ``--sequential`` the harness drops what its captured FA3
graphs read before it replays them: they then end in 4 us, or never.)

    python -m results.peers.attention_plugin --compile 1x32768,8x8192 32/8,64/8 [--prefill 8192,16384] [--target sm_90a]

compiles the kernels for those cases [batch]x[kv_len] and heads ahead, in parallel; without it the
first call of a case compiles. ``TILEBIT_PEERS``, a comma-separated list of patterns
("tilebit_kv4_*"), selects among ``peers()``. A decode kernel has the schedule that was tuned for
its case; where none was, ``TILEBIT_SCHEDULES`` may name a JSON file {format: fields of a Schedule}
to take it from, and what ``select`` chooses serves the rest. The harness loads this file by its
path, so it imports the installed ``tilebit`` and nothing that lies beside it: hence one long file.

Decode peers attend to caches that the append kernel has made of the harness's k and v. Prefill
peers compute all rows of a prompt, so that they do the harness's work: ``tilebit_prefill16`` in one
call on 16-bit rows; ``tilebit_prefill_kv4`` in two halves and ``tilebit_prefill_kv4_2048`` in
chunks of 2048 rows, as a chunked prefill does: each chunk but the first has its history gathered
from a 4-bit cache, puts its own 16-bit rows behind it, and attends to both. Gathering and both
copies are timed; appending is not, as the other peers store nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilebit.command.bench import process_fields
from tilebit.kernels import KernelUnavailable, build, find_kernel
from tilebit.layouts.kv import RESIDUAL, KVLayout, window_words
from tilebit.layouts.kv_formats import KVFormat
from tilebit.ops import attention as attention_ops
from tilebit.ops.dispatch import device_target
from tilebit.ops.plans import bucket
from tilebit.runtime import LoadedKernel
from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.operations import workspace_words
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.select import choose
from tilebit.schedules.target import Target, detect_target, target_from_name

SELECT, GIVEN = "TILEBIT_PEERS", "TILEBIT_SCHEDULES"
DEPENDENT = "_dependent"  # suffix of the peers that use programmatic dependent launch
PAGE = RESIDUAL  # tokens of a page of a contiguous cache
HEAD_DIM = 128  # of every case of the harness
# name: (format of the cache, page size where pages lie in random order, None: in the order of the
# tokens)
DECODE: dict[str, tuple[str, int | None]] = {
    "tilebit_kv16": ("kv16", None),
    "tilebit_kv8_channel": ("kv8_channel", None),
    "tilebit_kv4_channel": ("kv4_channel", None),
    "tilebit_kv4_token": ("kv4_token", None),
    "tilebit_kv2_channel": ("kv2_channel", None),
    "tilebit_kvfp8": ("kvfp8", None),
    "tilebit_kv4_channel_page128": ("kv4_channel", 128),
    "tilebit_kv4_channel_page64": ("kv4_channel", 64),
    "tilebit_kv4_channel_page16": ("kv4_channel", 16),
}
# name: (format of the history, rows of a chunk); a chunk of 0 rows: half of the prompt
PREFILL: dict[str, tuple[str | None, int]] = {
    "tilebit_prefill16": (None, 0),
    "tilebit_prefill_kv4": ("kv4_channel", 0),
    "tilebit_prefill_kv4_2048": ("kv4_channel", 2048),
}

Operands = dict[str, Tensor]
Measured = tuple[list[Callable[[], None]], Callable[[], Tensor], Tensor, int, str]


class DecodePeer:
    """Decode attention over one format behind the harness's ``AttnPeer`` interface.

    In its methods ``c`` is the harness's case: ``op``, ``B`` sequences of ``L`` tokens, ``Hq`` and
    ``Hk`` heads, q [B, R, Hq, D], k and v [B, L, Hk, D] in fp16, ``ref(key, q, k, v)``: the
    attention in fp32, computed once for a key. ``dependent`` launches through the kernel's
    dependent entry: in a graph of calls of one kernel each call depends on the one before it, so
    such a peer shows what a launch saves and is no comparison with the other peers. The harness
    empties and restores the instance's ``__dict__`` after each case and loads this module
    unregistered: hence neither slots nor a dataclass.
    """

    kind = "attn"
    dtype = "fp16"
    tol = 0.01  # of the relative Frobenius error

    def __init__(self, name: str, format: str, page_size: int | None, dependent: bool = False) -> None:
        self.name, self.format, self.page_size, self.dependent = name, KVFormat.from_name(format), page_size, dependent

    def supports(self, c: Any) -> bool | str:
        """True, or the reason to leave the case out."""
        return c.op == "decode" or "decode only"

    def prepare(self, c: Any) -> None:
        """Have the append kernel make the case's cache, and copy it as often as the harness wants."""
        self.operands = made_cache(c.k, c.v, self.format, self.page_size or PAGE, shuffled=self.page_size is not None)
        # What is read of a window is too little to count: the pages alone must exceed the last
        # cache.
        self.copies = [pages for (pages,) in importlib.import_module("attn_peers").kvcopies(self.operands["pages"])]

    def run(self, c: Any) -> Measured:
        """(a call per copy of the cache, the last call's output [B, 1, Hq, D], what it should be,
        bytes of the cache, provenance)."""
        target = device_target(c.q.device)
        kernel = decode_kernel(decode_workload(c.B, c.L, c.Hq, c.Hk, self.format, self.page_size or PAGE), target)
        if self.dependent and kernel.run_dependent is None:
            raise KernelUnavailable(f"the kernel in {kernel.path} has no dependent launch")
        if target.is_cuda:
            kernel.prepare(c.q.device.index)
        out = torch.empty_like(c.q)
        named = {**self.operands, "q": c.q.contiguous(), "out": out, "workspace": workspace_of(kernel, target, c.q.device)}
        self.captured = named  # the harness keeps a captured graph, and nothing of what it was captured from, but this object
        launch = kernel.run_dependent if self.dependent else kernel.run
        calls = [partial(launch, *({**named, "pages": pages}[name] for name in kernel.params)) for pages in self.copies]
        note = {
            **_process(target),
            "impl": "tilebit_pdl" if self.dependent else "tilebit",
            "format": self.format.name,
            "variant": f"page {self.page_size}" if self.page_size else "",
            "page_size": self.page_size or PAGE,
            "dtype": "float16",
            "q_len": 1,
            "schedule": kernel.manifest.get("schedule"),
        }
        return calls, lambda: out, self._reference(c), self._bytes(c), json.dumps(note)

    def _reference(self, c: Any) -> Tensor:
        """fp32 attention to what the cache stands for. Codes and scales do not depend on pages: one
        reference for all of a format."""
        key = f"tilebit {self.format.name}"
        return c.ref(key) if key in c.c else c.ref(key, None, *meant(self.operands, self.format, self.page_size or PAGE))

    def _bytes(self, c: Any) -> int:
        """Of codes and parameters, and of the 16-bit rows of the window, each once."""
        rows = c.B * c.Hk
        packed, left = c.L // RESIDUAL * RESIDUAL, c.L % RESIDUAL
        return rows * (packed * KVLayout(self.format, c.q.shape[-1], PAGE).token_bytes + left * 4 * c.q.shape[-1])


class PrefillPeer:
    """All rows of a prompt behind the harness's ``AttnPeer`` interface, in one call or in chunks
    with a quantized history (see above)."""

    kind = "attn"
    dtype = "fp16"
    tol = 0.01

    def __init__(self, name: str, format: str | None, chunk: int) -> None:
        self.name, self.format, self.chunk = name, KVFormat.from_name(format) if format else None, chunk

    def supports(self, c: Any) -> bool | str:
        """True, or the reason to leave the case out."""
        if c.op != "prefill" or c.B != 1:
            return "prefill of one prompt only"
        if self.format is not None and len(self._chunks(c.L)) < 2:
            return f"a prompt of {c.L} rows has no history in chunks of {self.chunk}"
        return True

    def _chunks(self, length: int) -> list[tuple[int, int]]:
        """(first, last + 1) row of each chunk; all but the last are whole groups, so that their
        history is packed to its end."""
        if self.format is None:
            return [(0, length)]
        rows = self.chunk or -(-length // 2 // RESIDUAL) * RESIDUAL
        return [(first, min(first + rows, length)) for first in range(0, length, rows)]

    def prepare(self, c: Any) -> None:
        """Pack the prompt, where a history is read, and copy what is read as often as the harness
        wants."""
        self.operands = made_cache(c.k, c.v, self.format, PAGE, shuffled=False) if self.format else {}
        pages = (self.operands["pages"],) if self.format else ()
        self.copies = importlib.import_module("attn_peers").kvcopies(c.k, c.v, *pages)

    def run(self, c: Any) -> Measured:
        """(a call per copy of k, v and the cache, the last call's output [1, L, Hq, D], what its
        checked rows should be, bytes of k and v, provenance)."""
        target, device, chunks = device_target(c.q.device), c.q.device, self._chunks(c.L)
        q, out = c.q.flatten(0, 1), torch.empty_like(c.q)
        rows_of_all = tuple(torch.empty_like(c.k.flatten(0, 1)) for _ in range(2)) if self.format else ()
        bounds = {size: torch.tensor([0, size], dtype=torch.int32, device=device) for a, b in chunks for size in (b, b - a)}
        histories = {first: torch.tensor([first], dtype=torch.int32, device=device) for first, _ in chunks}
        self.captured = (q, out, rows_of_all, bounds, histories)  # a captured graph is kept without what it was captured from

        def chunk_rows(first: int, last: int, k: Tensor, v: Tensor, pages: Tensor | None) -> tuple[Tensor, ...]:
            if not first:
                return k[:last], v[:last]
            assert self.format is not None and pages is not None
            o, (all_k, all_v) = self.operands, (rows[:last] for rows in rows_of_all)
            attention_ops.GATHER_OUT(
                pages, o["windows"], o["block_tables"], o["slots"], histories[first], bounds[last], o.get("head_scales"), self.format.name,
                PAGE, out_k=all_k, out_v=all_v,
            )  # fmt: skip
            for rows, new in ((all_k, k), (all_v, v)):
                rows[first:last].copy_(new[first:last])
            return all_k, all_v

        def call(k: Tensor, v: Tensor, pages: Tensor | None = None) -> None:
            for first, last in chunks:
                keys, values = chunk_rows(first, last, k.flatten(0, 1), v.flatten(0, 1), pages)
                torch.ops.tilebit.attention_prefill.out(
                    q[first:last], keys, values, bounds[last - first], bounds[last], None, out=out.flatten(0, 1)[first:last]
                )

        note = {
            **_process(target),
            "impl": "tilebit",
            "format": self.format.name if self.format else "kv16",
            "variant": f"history, {f'chunks of {self.chunk}' if self.chunk else 'two halves'}" if self.format else "",
            "page_size": PAGE if self.format else None,
            "dtype": "float16",
            "q_len": c.L,
            "schedule": find_kernel(prefill_workload(c.L, c.Hq, c.Hk), target).manifest.get("schedule"),
        }
        kv_bytes = c.k.nbytes + c.v.nbytes
        return [partial(call, *copy) for copy in self.copies], lambda: out, self._reference(c), kv_bytes, json.dumps(note)

    def _reference(self, c: Any) -> Tensor:
        """fp32 attention of the rows ``c.rows``: those of the first chunk see 16-bit rows, those of
        the last one the history as the cache means it and then 16-bit rows. Rows in between are not
        checked by the harness."""
        whole = c.ref("f16")
        if self.format is None:
            return whole
        (_, first_end), *_, (last_start, _) = self._chunks(c.L)
        early, late = c.rows < first_end, c.rows >= last_start
        if not bool((early | late).all()):
            raise ValueError("the harness checks rows of a middle chunk; accepted: rows of the first and the last one")
        key = f"tilebit history {self.format.name} {last_start}"
        if key not in c.c:
            history = meant(self.operands, self.format, PAGE)
            mixed = [torch.cat((old[:, :last_start], new[:, last_start:].float()), 1) for old, new in zip(history, (c.k, c.v), strict=True)]
            c.ref(key, None, *mixed)
        return torch.where(early[None, :, None, None], whole, c.ref(key))


def made_cache(k: Tensor, v: Tensor, format: KVFormat, page_size: int, shuffled: bool) -> Operands:
    """The operands of a cache that the append kernel has filled with ``k`` and ``v`` [batch,
    length, heads_kv, head_dim], by the names of the ops' arguments; ``shuffled``: pages in random
    order (fixed seed), else each sequence's in order, one after the other."""
    batch, length, heads_kv, head_dim = k.shape
    layout, device = KVLayout(format, head_dim, page_size), k.device
    per_sequence = max(1, -(-(length // RESIDUAL * RESIDUAL) // page_size))
    count = batch * per_sequence
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)) if shuffled else torch.arange(count)

    def ints(values: Tensor) -> Tensor:
        return values.to(device, torch.int32)

    operands = {
        "pages": torch.zeros(count, heads_kv, layout.page_words, dtype=torch.int32, device=device),
        "windows": torch.zeros(batch, heads_kv, window_words(head_dim), dtype=torch.int32, device=device),
        "block_tables": ints(order.view(batch, per_sequence)),
        "slots": ints(torch.arange(batch)),
        "lengths": ints(torch.full((batch,), length)),
    }
    if format.has_head_scales:
        operands["head_scales"] = torch.ones(2, heads_kv, device=device)
    o = operands
    attention_ops.APPEND(
        k.flatten(0, 1), v.flatten(0, 1), ints(torch.arange(batch + 1) * length), o["lengths"], o["block_tables"], o["slots"], o["pages"],
        o["windows"], o.get("head_scales"), None, format.name, page_size,
    )  # fmt: skip
    return operands


def meant(operands: Operands, format: KVFormat, page_size: int) -> tuple[Tensor, Tensor]:
    """(k, v), fp32 [batch, length, heads_kv, head_dim]: what a cache of sequences of one length
    stands for."""
    from tilebit.tiles.attention.unpacked import unpack_cache

    o = operands
    head_dim = o["windows"].shape[2] // RESIDUAL
    layout, rows = KVLayout(format, head_dim, page_size), []
    for b in range(o["lengths"].numel()):  # one by one: a sequence's codes take many times their bytes
        tables, slots, lengths = (o[name][b : b + 1] for name in ("block_tables", "slots", "lengths"))
        ((k, v),) = unpack_cache(o["pages"], o["windows"], tables, slots, lengths, layout, torch.float16, o.get("head_scales"))
        rows.append((k.float(), v.float()))
    return torch.stack([k for k, _ in rows]), torch.stack([v for _, v in rows])


def decode_kernel(workload: AttentionWorkload, target: Target) -> LoadedKernel:
    """The kernel with the tuned schedule, else with the given one of its format
    (``TILEBIT_SCHEDULES``), else with ``select``'s."""
    schedule = given_schedule(workload, target)
    if schedule is None:
        return find_kernel(workload, target)
    return compiled([(workload, schedule)], target, 1)[0].load()


def given_schedule(workload: AttentionWorkload, target: Target) -> Schedule | None:
    """The schedule that ``TILEBIT_SCHEDULES`` gives for ``workload``'s format; None where one was
    tuned, or none is given."""
    given = os.environ.get(GIVEN)
    if not given or workload.op != "decode" or choose(workload, target).source == "tuned":
        return None
    fields = json.loads(Path(given).read_text()).get(workload.format.name)
    return Schedule.from_json(fields) if fields else None


def compiled(wanted: list[tuple[AttentionWorkload, Schedule]], target: Target, jobs: int | None) -> list[Any]:
    """A kernel per (workload, schedule), from the cache or compiled in ``jobs`` processes. Raises
    ``KernelUnavailable``."""
    from tilebit.tiles.compiler.compile import CompileFailure, CompileRequest
    from tilebit.tiles.compiler.pool import CompilePool

    if not wanted:
        return []
    with CompilePool(jobs) as pool:
        results = pool.compile([CompileRequest(schedule.program, workload.bucketed(), schedule, target) for workload, schedule in wanted])
    for result in results:
        if isinstance(result, CompileFailure):
            raise KernelUnavailable(f"{result}; accepted in {GIVEN}: schedules that are legal and pass the lint")
    return results


def workspace_of(kernel: LoadedKernel, target: Target, device: torch.device) -> Tensor:
    """int32: the workspace that ``kernel`` takes, its tickets zero (no words for a kernel that
    takes none)."""
    if "workspace" not in kernel.params:
        return torch.empty(0, dtype=torch.int32, device=device)
    workload = AttentionWorkload.from_json(kernel.manifest["workload"])
    words = workspace_words(workload, Schedule.from_json(kernel.manifest["schedule"]), target)
    return torch.zeros(words, dtype=torch.int32, device=device)


def decode_workload(batch: int, length: int, heads_q: int, heads_kv: int, format: KVFormat, page_size: int) -> AttentionWorkload:
    """A decode step of one token for each sequence."""
    return AttentionWorkload("decode", batch, 1, length, heads_q, heads_kv, HEAD_DIM, format, page_size=page_size)


def prefill_workload(rows: int, heads_q: int, heads_kv: int, length: int = 0) -> AttentionWorkload:
    """What the op asks for when ``rows`` rows attend to ``length`` tokens (0: to themselves): sizes
    as their buckets."""
    return AttentionWorkload("prefill", 1, bucket(rows), bucket(length or rows), heads_q, heads_kv, HEAD_DIM, KVFormat())


def workloads(cases: Iterable[tuple[int, int]], heads: Iterable[tuple[int, int]], prompts: Iterable[int]) -> list[AttentionWorkload]:
    """What the selected peers will ask for on decode ``cases`` (batch, kv_len), ``prompts`` of so
    many rows and ``heads``, once each."""
    selected, cases, prompts = peers(), list(cases), list(prompts)
    wanted: dict[AttentionWorkload, None] = {}
    for heads_q, heads_kv in heads:
        for peer in selected:
            if isinstance(peer, DecodePeer):
                page = peer.page_size or PAGE
                for batch, length in cases:
                    wanted[decode_workload(batch, length, heads_q, heads_kv, peer.format, page).bucketed()] = None
                    wanted[_cache_workload("append", batch, length, heads_kv, peer.format, page).bucketed()] = None
            else:
                for length in prompts:
                    for first, last in peer._chunks(length):
                        wanted[prefill_workload(last - first, heads_q, heads_kv, last).bucketed()] = None
                        if first and peer.format:
                            wanted[_cache_workload("gather", 1, last, heads_kv, peer.format, PAGE).bucketed()] = None
                    if peer.format:
                        wanted[_cache_workload("append", 1, length, heads_kv, peer.format, PAGE).bucketed()] = None
    return list(wanted)


def _cache_workload(op: str, batch: int, length: int, heads_kv: int, format: KVFormat, page_size: int) -> AttentionWorkload:
    rows = bucket(length) if op == "append" else 1
    return AttentionWorkload(op, bucket(batch), rows, bucket(length), heads_kv, heads_kv, HEAD_DIM, format, page_size=page_size)


@cache
def _process(target: Target) -> dict[str, Any]:
    """Provenance of this process, which the harness does not record: the rows of its other peers
    take it from ours."""
    fields = process_fields(target)
    named = {name: fields[name] for name in ("run", "gpu", "driver", "cuda", "torch", "tilelang", "commit", "date")}
    return {**named, "read_gbps": target.read_gbps, "clocks": clocks() if target.is_cuda else None}


def clocks() -> dict[str, int] | None:
    """The GPU's clocks in MHz as they are now, by nvidia-smi; None without it."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10)
        sm, memory = (int(value) for value in done.stdout.splitlines()[0].split(","))
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        return None
    return {"sm_mhz": sm, "memory_mhz": memory}


def _every() -> Iterator[DecodePeer | PrefillPeer]:
    for name, (format, page_size) in DECODE.items():
        yield DecodePeer(name, format, page_size)
    for name, (format, page_size) in DECODE.items():
        yield DecodePeer(name + DEPENDENT, format, page_size, dependent=True)
    for name, (format, chunk) in PREFILL.items():
        yield PrefillPeer(name, format, chunk)


def peers() -> list[DecodePeer | PrefillPeer]:
    """The harness's entry point: decode in every format, the same with dependent launch, prefill;
    ``$TILEBIT_PEERS`` selects by name."""
    patterns = os.environ.get(SELECT, "*").split(",")
    return [peer for peer in _every() if any(fnmatchcase(peer.name, pattern.strip()) for pattern in patterns)]


def main(arguments: list[str] | None = None) -> int:
    """0: every kernel is in the cache; 1: some could not be had, and the reasons are printed."""
    parser = argparse.ArgumentParser(
        prog="python -m results.peers.attention_plugin", description="Compile what the plug-in's peers will call."
    )
    parser.add_argument("--compile", nargs=2, metavar=("CASES", "HEADS"), required=True, help="1x32768,8x8192 32/8,64/8; none: no decode")
    parser.add_argument("--prefill", default="", help="rows of prompts: 8192,16384 (default: none)")
    parser.add_argument("--target", help="an arch name; default: this machine's device")
    parser.add_argument("--jobs", type=int, default=None, help="processes; default: one per core")
    options = parser.parse_args(arguments)

    def pairs(text: str, between: str) -> list[tuple[int, int]]:
        split = (item.split(between) for item in text.split(",") if item != "none")
        return [(int(first), int(second)) for first, second in split]

    prompts = [int(length) for length in options.prefill.split(",") if length]
    wanted = workloads(pairs(options.compile[0], "x"), pairs(options.compile[1], "/"), prompts)
    target = target_from_name(options.target) if options.target else detect_target()
    given = {workload: schedule for workload in wanted if (schedule := given_schedule(workload, target))}
    try:
        compiled(list(given.items()), target, options.jobs)
        build([workload for workload in wanted if workload not in given], target, jobs=options.jobs)
    except KernelUnavailable as error:
        print(f"attention_plugin: {error}", file=sys.stderr)
        return 1
    print(f"attention_plugin: kernels of {len(wanted)} workloads for {target.name} are in the cache")
    return 0


if __name__ == "__main__":
    sys.exit(main())
