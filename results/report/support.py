"""The support table of README.md: what the rules accept, asked of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

from tilebit.layouts.formats import FORMATS, PER_CHANNEL, GemmFormat
from tilebit.layouts.kv_formats import KVFormat
from tilebit.schedules.attention.workload import OPS, AttentionWorkload
from tilebit.schedules.gemm.workload import DTYPES, Workload
from tilebit.schedules.operations import AnyWorkload, legal, operation
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import ARCHES, Target, target_from_name
from tilebit.weights.paired import HIGH_OF, row_count

from .markdown import table

# Shapes that a supported format must accept: a decode step, a prompt, and sizes that are no
# multiple of any tile.
PROBES = ((1, 4096, 4096), (4096, 4096, 4096), (7, 333, 555))
# (batch, q_len, kv_len, heads_q, heads_kv, head_dim, page_size) that a supported cache must serve:
# every head_dim, all kinds of head groups, one new token and many, the smallest and the largest
# pages.
ATTENTION_PROBES = ((8, 1, 8192, 32, 8, 128, 128), (1, 16, 333, 16, 1, 256, 16), (64, 3, 70, 14, 2, 64, 256))
SHORT_DTYPES = {"float16": "fp16", "bfloat16": "bf16"}
EVERY_CACHE = "kv16, kv8, kv4, kv2, kvfp8, or mixed; keys per channel or per token"


def supported(format: GemmFormat, arch: str, dtype: str, mixed: bool = False) -> bool:
    """Whether every probe shape has a legal schedule on ``arch``; with ``mixed`` as the rows of a mixed
    layer with an eighth of its output channels in 8 bits."""
    target = target_from_name(arch)
    for m, n, k in PROBES:
        rows = row_count(n - n // 8, n // 8) if mixed else n
        workload = Workload(m, rows, k, format, dtype, width=n if mixed else 0)
        if all(legal(workload, schedule, target) for schedule in _offered(workload, target)):
            return False
    return True


def _offered(workload: AnyWorkload, target: Target) -> Iterator[Schedule]:
    """The candidates of one program after another: whoever looks for one that is legal, and finds it
    with the first program, searches no other. The last ones find theirs sooner."""
    for rule in reversed(operation(workload.op).rules):
        if target.arch in rule.tried and not rule.unserved(workload, target.arch):
            yield from rule.candidates(workload, target)


@cache
def claims() -> tuple[tuple[GemmFormat, str, tuple[str, ...]], ...]:
    """(format, arch, dtypes) for every pair of a format and an architecture; no dtypes where it is
    not supported."""
    pairs = ((format, arch) for format in FORMATS.values() for arch in ARCHES)
    return tuple((format, arch, tuple(dtype for dtype in DTYPES if supported(format, arch, dtype))) for format, arch in pairs)


@cache
def attention_claims() -> tuple[tuple[str, KVFormat, str, tuple[str, ...]], ...]:
    """(op, format of the cache, arch, dtypes) for each of all; no dtypes where it is not supported.
    Prefill reads 16-bit rows: its format is "kv16" alone."""
    formats = {op: (KVFormat(),) if op == "prefill" else KVFormat.all() for op in OPS}
    return tuple((op, format, arch, _attention_dtypes(op, format, arch)) for op in OPS for format in formats[op] for arch in ARCHES)


def _attention_dtypes(op: str, format: KVFormat, arch: str) -> tuple[str, ...]:
    """Those in which every probe has a legal schedule of a program that exists."""
    target, served = target_from_name(arch), set(DTYPES)
    for batch, q_len, kv_len, heads_q, heads_kv, head_dim, page_size in ATTENTION_PROBES:
        workload = AttentionWorkload(op, batch, q_len, kv_len, heads_q, heads_kv, head_dim, format, page_size=page_size)
        found: set[str] = set()
        for schedule in _offered(workload, target):
            found |= {d for d in served - found if not legal(replace(workload, dtype=d), schedule, target)}
            if found == served:
                break
        served = found
    return tuple(dtype for dtype in DTYPES if dtype in served)


def support_table() -> str:
    """Operations and formats down, devices across; a cell names the types of activations. Formats
    and operations that are served alike share a line."""
    lines = [[f"gemm: {name}", *columns] for name, columns in _gemm_lines()]
    lines += [[f"mixed linear: {name}", *columns] for name, columns in _mixed_lines()]
    lines += [[f"{', '.join(ops)}: {name}", *columns] for (name, columns), ops in _attention_lines().items()]
    return table(["what", *(arch if arch != "cpu" else "CPU (x86-64)" for arch in ARCHES)], lines, numbers=False)


def _cells(columns: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(", ".join(SHORT_DTYPES[dtype] for dtype in names) or "-" for names in columns)


def _gemm_lines() -> list[tuple[str, tuple[str, ...]]]:
    """(formats in words, cells). Of integers group sizes are joined first, then zero points, then
    widths; others, and those with int8 x, go by their names."""
    by_format: dict[GemmFormat, list[tuple[str, ...]]] = {}
    for format, _, dtypes in claims():
        by_format.setdefault(format, []).append(dtypes)
    groups: dict[tuple, list[str]] = {}
    named: dict[tuple[str, ...], list[str]] = {}
    for format, columns in by_format.items():
        if not format.integer or format.x:
            named.setdefault(_cells(columns), []).append(format.name)
            continue
        size = "per channel" if format.group_size == PER_CHANNEL else str(format.group_size)
        groups.setdefault((format.bits, format.symmetric, _cells(columns)), []).append(size)
    zeros: dict[tuple, list[str]] = {}
    for (bits, symmetric, cells), sizes in groups.items():
        zeros.setdefault((bits, ", ".join(sizes), cells), []).append("symmetric" if symmetric else "asymmetric")
    widths: dict[tuple, list[str]] = {}
    for (bits, sizes, cells), kinds in zeros.items():
        widths.setdefault((" or ".join(kinds), sizes, cells), []).append(f"w{bits}a16")
    integers = [(f"{', '.join(names)}; {kinds}; groups {sizes}", cells) for (kinds, sizes, cells), names in widths.items()]
    return integers + [(", ".join(names), cells) for cells, names in named.items()]


def _mixed_lines() -> list[tuple[str, tuple[str, ...]]]:
    """(formats that share a layer in words, cells): those whose rows the kernels multiply, by the
    8-bit format of the other channels."""
    rows: dict[GemmFormat, list[GemmFormat]] = {}
    for low, high in HIGH_OF.items():
        rows.setdefault(high, []).append(low)
    lines = []
    for high, formats in rows.items():
        columns = [tuple(d for d in DTYPES if all(supported(f, arch, d, mixed=True) for f in formats)) for arch in ARCHES]
        lines.append((f"{' or '.join(f.name for f in formats)} with {high.name}", _cells(columns)))
    return lines


def _attention_lines() -> dict[tuple[str, tuple[str, ...]], list[str]]:
    """(caches in words, cells) -> the operations that are served so."""
    by_format: dict[tuple[str, KVFormat], list[tuple[str, ...]]] = {}
    for op, format, _, dtypes in attention_claims():
        by_format.setdefault((op, format), []).append(dtypes)
    formats: dict[tuple[str, tuple[str, ...]], list[KVFormat]] = {}
    for (op, format), columns in by_format.items():
        formats.setdefault((op, _cells(columns)), []).append(format)
    lines: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (op, cells), served in formats.items():
        every = len(served) == len(KVFormat.all())
        name = "16-bit rows" if op == "prefill" else EVERY_CACHE if every else ", ".join(format.name for format in served)
        lines.setdefault((name, cells), []).append(op)
    return lines
