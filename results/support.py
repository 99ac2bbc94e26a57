"""The support matrix of README.md: what the rules accept, asked of them."""

from __future__ import annotations

from collections.abc import Iterator

from tilebit.layouts.formats import BITS, GROUP_SIZES, PER_CHANNEL, QuantFormat
from tilebit.schedules.rules.gemm import candidates, legal
from tilebit.schedules.target import ARCHES, target_from_name
from tilebit.schedules.workload import DTYPES, Workload

from .tables import table

# Shapes that a supported format must accept: a decode step, a prompt, and sizes that are no multiple of any tile.
PROBES = ((1, 4096, 4096), (4096, 4096, 4096), (7, 333, 555))


def supported(format: QuantFormat, arch: str, dtype: str) -> bool:
    """Whether every probe shape has a legal schedule on ``arch``."""
    target = target_from_name(arch)
    for m, n, k in PROBES:
        workload = Workload(m, n, k, format, dtype)
        found = candidates(workload, target) or []
        if not any(not legal(workload, schedule, target) for schedule in found):
            return False
    return True


def claims() -> Iterator[tuple[QuantFormat, str, tuple[str, ...]]]:
    """(format, arch, dtypes) for every pair of a format and an architecture; no dtypes where it is not supported."""
    for bits in BITS:
        for symmetric in (True, False):
            for group in GROUP_SIZES:
                format = QuantFormat(bits, group, symmetric)
                for arch in ARCHES:
                    yield format, arch, tuple(dtype for dtype in DTYPES if supported(format, arch, dtype))


def support_table() -> str:
    """Formats down, devices across; a cell names the activation types, a format's line the group sizes that all of its cells accept."""
    cells: dict[tuple[int, bool, tuple[tuple[str, ...], ...]], list[str]] = {}
    by_format: dict[QuantFormat, list[tuple[str, ...]]] = {}
    for format, _, dtypes in claims():
        by_format.setdefault(format, []).append(dtypes)
    for format, dtypes in by_format.items():
        group = "channel" if format.group_size == PER_CHANNEL else str(format.group_size)
        cells.setdefault((format.bits, format.symmetric, tuple(dtypes)), []).append(group)
    short = {"float16": "fp16", "bfloat16": "bf16"}
    lines = []
    for (bits, symmetric, dtypes), groups in cells.items():
        columns = [", ".join(short[d] for d in names) or "-" for names in dtypes]
        lines.append(["gemm", f"w{bits}a16", "symmetric" if symmetric else "asymmetric", ", ".join(groups), *columns])
    return table(
        ["op", "format", "zero point", "groups", *(arch if arch != "cpu" else "CPU (x86-64)" for arch in ARCHES)], lines, numbers=False
    )
