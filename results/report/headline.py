"""The short tables that README.md and the page of results begin with: one line for each result that
decides, and times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .attention import BASELINE, MAIN_HEADS, against
from .attention_rows import AttentionRow, beside
from .markdown import number, short_commit, table
from .problems import BANDS, Problem, baseline, comparisons, geometric_mean, problems
from .rows import OURS, Row

NO_ROWS = "No rows yet: `tilebit bench --out results/rows/gemm/<device>.jsonl` writes them."
SHOWN_MS = (1, 16, 64, 256, 4096)  # columns of a table of times where more were measured
BY_BAND, WHOLE = "w4a16_g128, float16", "w8a16_g128, float16"  # products told apart by the rows of x, and not
CACHE = f"{OURS} kv4_channel"


@dataclass(frozen=True, slots=True)
class Point:
    """One case of a result: ``ratio`` is the other's time over tilebit's, ``place`` the shape,
    ``commit`` tilebit's."""

    ratio: float
    place: str
    commit: str | None


def results_table(devices: Mapping[str, list[Row]], attention: Mapping[str, list[AttentionRow]]) -> str:
    """One line a result: products by rows of x against the fastest peer, or the unquantized product
    where no peer was measured, and decode over a 4-bit cache against FA3; each with its device and
    the commits of its rows."""
    lines = [line for gpu, rows in devices.items() if comparisons(rows) for line in _against_peers(gpu, rows)]
    lines += [line for gpu, rows in attention.items() for line in _decode(gpu, rows)]
    lines += [line for gpu, rows in devices.items() if not comparisons(rows) for line in _against_baseline(gpu, rows)]
    header = ["what", "against", "times as fast", "worst case", "cases", "device", "commit"]
    return table(header, lines, numbers=False) if lines else NO_ROWS


def _against_peers(gpu: str, rows: Sequence[Row]) -> list[list[str]]:
    found = comparisons(rows)
    groups = [(f"`w4a16` product, {band}", [c for c in found.get(BY_BAND, []) if a <= c.ours.m <= b]) for band, a, b in BANDS]
    groups.append(("`w8a16` product, every m", found.get(WHOLE, [])))
    lines = []
    for what, points in groups:
        cases = [Point(c.ratio, f"{c.ours.n} x {c.ours.k}, m = {c.ours.m}, {c.peer.impl}", c.ours.commit) for c in points]
        lines += _line(what, "fastest published kernel", cases, gpu)
    return lines


def _decode(gpu: str, rows: Sequence[AttentionRow]) -> list[list[str]]:
    ratios = against(rows, CACHE, lambda ours: [row for row in beside(ours, rows) if row.series == BASELINE])
    cases = [Point(r.value, f"{r.ours.batch} x {r.ours.kv_len:,} tokens", r.ours.commit) for r in ratios if r.ours.heads in MAIN_HEADS]
    return _line("decode, `kv4_channel` cache", "FA3 on a 16-bit cache", cases, gpu)


def _against_baseline(gpu: str, rows: Sequence[Row]) -> list[list[str]]:
    name, _, shown = _headline(rows)
    cases, bases = [], set()
    for problem in shown:
        for m, line in problem.lines.items():
            if name in line and (base := baseline(line)):
                cases.append(Point(base.us / line[name].us, f"{problem.n} x {problem.k}, m = {m}", line[name].commit))
                bases.add(base.series)
    return _line(f"`{name.removeprefix(OURS + ' ')}` product, every m", " / ".join(sorted(bases)), cases, gpu)


def _line(what: str, peer: str, cases: Sequence[Point], gpu: str) -> list[list[str]]:
    if not cases:
        return []
    worst = min(cases, key=lambda case: case.ratio)
    mean = f"**{geometric_mean(case.ratio for case in cases):.2f}**"
    return [[what, peer, mean, f"{worst.ratio:.2f} ({worst.place})", str(len(cases)), gpu, _commits(case.commit for case in cases)]]


def _commits(commits: Iterable[str | None]) -> str:
    return ", ".join(sorted({short_commit(commit) or "unknown" for commit in commits}))


def times_table(gpu: str, rows: Sequence[Row]) -> str:
    """tilebit's times on one device in its smallest format, and how many times faster than the
    unquantized product they are: shapes down, m across; "" without rows of tilebit."""
    name, dtype, shown = _headline(rows)
    if not shown:
        return ""
    ms = sorted({m for problem in shown for m in problem.lines})
    ms = [m for m in ms if m in SHOWN_MS] if len(ms) > len(SHOWN_MS) else ms
    lines = [[f"{p.n} x {p.k}", *(_time(p.lines.get(m, {}), name) for m in ms)] for p in shown]
    all_lines = [line for problem in shown for line in problem.lines.values()]
    bases = sorted({base.series for line in all_lines if (base := baseline(line))})
    versus = f"; in brackets, times faster than {' / '.join(bases)}" if bases else ""
    commits = _commits(line[name].commit for line in all_lines if name in line)
    about = f"**{gpu}**, {name}, {dtype}: median µs{versus}. Commit {commits}."
    return f"{about}\n\n{table(['n x k', *(f'm = {m}' for m in ms)], lines)}"


def _headline(rows: Sequence[Row]) -> tuple[str, str, list[Problem]]:
    """(series, dtype, problems) of tilebit's first series in fewest bits, symmetric before
    asymmetric; no problems without one."""
    named = [(problem, name) for problem in problems(rows) if (name := _first_series(problem))]
    if not named:
        return "", "", []
    name, dtype = named[0][1], named[0][0].dtype
    return name, dtype, [problem for problem, own in named if own == name and problem.dtype == dtype]


def _first_series(problem: Problem) -> str:
    ours = sorted({(row.weight_bits, name) for line in problem.lines.values() for name, row in line.items() if row.impl == OURS})
    return ours[0][1] if ours else ""


def _time(line: dict[str, Row], name: str) -> str:
    if name not in line:
        return "-"
    base = baseline(line)
    return number(line[name].us) + (f" ({base.us / line[name].us:.2f}x)" if base else "")
