"""Which rows stand side by side: weight shapes with the times of one process, and tilebit against
the fastest of its peers."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .rows import OURS, Row

Name = TypeVar("Name", bound=Hashable)
Timed = TypeVar("Timed")

BASELINES = ("cublas", "torch")  # impl names that ratios are quoted against, the first that is there
SLOWER = 0.95  # a ratio below this is a loss; what lies between it and 1 is noise of the clocks
# (name, smallest m, largest m): reading bound, between, computing bound
BANDS = (("m <= 16", 1, 16), ("16 < m <= 128", 17, 128), ("m > 128", 129, 1 << 62))


@dataclass(frozen=True, slots=True)
class Problem:
    """One weight shape in one width: for each m the rows of one process by series, so that every
    ratio compares times taken side by side. ``bits`` are those of the quantized weights; rows of
    the unquantized product stand beside them."""

    dtype: str
    bits: int
    n: int
    k: int
    lines: dict[int, dict[str, Row]]

    @property
    def series(self) -> list[str]:
        """Baselines first, then tilebit, then the peers."""
        rows = {name: row for line in self.lines.values() for name, row in line.items()}

        def order(name: str) -> tuple[bool, bool, bool, str]:
            return (not is_baseline(rows[name]), rows[name].impl != OURS, is_peer(rows[name]), name)

        return sorted(rows, key=order)

    @property
    def rows(self) -> list[Row]:
        return [row for line in self.lines.values() for row in line.values()]

    @property
    def runs(self) -> list[str]:
        return sorted({row.run for row in self.rows})


def is_baseline(row: Row) -> bool:
    """Whether this is the product of unquantized weights."""
    return row.weight_bits == 16 and row.impl.startswith(BASELINES)


def is_peer(row: Row) -> bool:
    """Whether this is another library's kernel for quantized weights and 16-bit activations.
    torch's own are none: on a CPU its int4 kernel can be slower than its unquantized product, and
    beating it would say little."""
    return not row.impl.startswith((OURS, *BASELINES)) and re.fullmatch(r"w[48]a16", row.format) is not None


def baseline(line: dict[str, Row]) -> Row | None:
    """The unquantized product that ratios of this line are quoted against."""
    found = [row for row in line.values() if is_baseline(row)]
    return min(found, key=lambda row: next(i for i, name in enumerate(BASELINES) if row.impl.startswith(name)), default=None)


def problems(rows: Iterable[Row]) -> list[Problem]:
    """The shapes of one device that have quantized weights, by dtype and width, small to large.

    Each (shape, m) is shown by its newest run that has a row of tilebit and one of a peer; without
    such a run, by the newest that has one of tilebit; else by the newest."""
    measured: dict[tuple[str, int, int], dict[int, dict[str, list[Row]]]] = {}
    for row in rows:
        if row.op == "gemm":
            measured.setdefault((row.dtype, row.n, row.k), {}).setdefault(row.m, {}).setdefault(row.run, []).append(row)
    result = []
    for (dtype, n, k), by_m in measured.items():
        widths = {row.weight_bits for runs in by_m.values() for members in runs.values() for row in members}
        for bits in sorted(widths - {16}):
            lines = {m: line for m, runs in sorted(by_m.items()) if (line := _line(runs.values(), bits))}
            result.append(Problem(dtype, bits, n, k, lines))
    return sorted(result, key=lambda p: (p.dtype != "float16", p.bits, p.n * p.k, p.n))


def _line(runs: Iterable[list[Row]], bits: int) -> dict[str, Row]:
    """The rows to show of the runs of one (shape, m): of those in ``bits`` and of the unquantized
    product."""
    found = []
    for run in runs:
        of_width = [row for row in run if row.weight_bits == bits]
        if of_width:
            rank = (any(row.impl == OURS for row in run if row in of_width), any(map(is_peer, of_width)), max(row.date for row in run))
            found.append((rank, {row.series: row for row in run if row.weight_bits in (bits, 16)}))
    return max(found, key=lambda item: item[0])[1] if found else {}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A time of tilebit and that of the fastest peer of its class (bits, group size, dtype;
    symmetric and asymmetric peers pooled) in the same run."""

    ours: Row
    peer: Row

    @property
    def ratio(self) -> float:
        """Above 1: tilebit is faster."""
        return self.peer.us / self.ours.us


def fastest_peer(ours: Row, rows: Iterable[Row]) -> Row | None:
    """The fastest peer of ``ours``' class at its shape and m in its run."""

    def alike(row: Row) -> tuple:
        return (row.op, row.run, row.weight_bits, row.group_size, row.dtype, row.n, row.k, row.m)

    return min((row for row in rows if is_peer(row) and alike(row) == alike(ours)), key=lambda row: row.us, default=None)


def comparisons(rows: Sequence[Row]) -> dict[str, list[Comparison]]:
    """By tilebit's format and dtype ("w4a16_g128, float16"): for each (shape, m) the newest run
    that has both, small to large."""
    peers: dict[tuple, list[Row]] = {}
    for row in rows:
        if is_peer(row):
            peers.setdefault((row.run, row.n, row.k, row.m), []).append(row)
    newest: dict[tuple, Comparison] = {}
    for ours in sorted((row for row in rows if row.impl == OURS and row.op == "gemm"), key=lambda row: row.date):
        peer = fastest_peer(ours, peers.get((ours.run, ours.n, ours.k, ours.m), []))
        if peer is not None:
            newest[(ours.series, ours.dtype, ours.n, ours.k, ours.m)] = Comparison(ours, peer)
    result: dict[str, list[Comparison]] = {}
    for found in sorted(newest.values(), key=lambda c: (c.ours.dtype != "float16", c.ours.series, c.ours.n * c.ours.k, c.ours.n, c.ours.m)):
        result.setdefault(f"{found.ours.series.removeprefix(OURS + ' ')}, {found.ours.dtype}", []).append(found)
    return result


def newest_beside(processes: Iterable[Mapping[Name, Timed]], name: Name) -> dict[Name, tuple[Timed, Timed]]:
    """(that of ``name``, the other's) of every other one, of the newest process that timed both; the newest comes last."""
    return {other: (times[name], time) for times in processes if name in times for other, time in times.items() if other != name}


def geometric_mean(ratios: Iterable[float]) -> float:
    """Of one or more positive numbers."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs))
