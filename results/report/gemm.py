"""The page of products, from rows alone."""

from __future__ import annotations

from collections.abc import Mapping

from .markdown import details, number, short_commit, slug, table
from .problems import SLOWER, Problem, baseline, is_baseline, problems
from .rows import OURS, Rates, Row, rates
from .summary import bandwidth_table, bars_table, ratio_tables

HOW_TO_READ = (
    "**A cell** of a shape's table is the median in µs; in brackets, how many times faster than the unquantized product (cuBLAS, or torch) "
    "of the same process, and the share of the floor reached. **The floor** is the longer of moving the bytes (weights with scales, x, y, "
    "each once) and computing the operations, at the device's measured rates; the compute rate is that of a large product of random "
    "numbers in cuBLAS, so a share can pass 100 %. **rel. error** is the largest of the column. **tilebit_pdl** launches each product "
    "before the one in front of it has ended (programmatic dependent launch); no summary counts it. A line shows the newest process that "
    "measured tilebit, with peers if any did."
)
AGAINST_PEERS = (
    "The time of the fastest peer over tilebit's: above 1, tilebit is faster. Peers are the published kernels for the same weight bits, "
    "group size and activation type, symmetric and asymmetric ones pooled, timed in the same process with replays interleaved "
    "(newer rows: in an order that every round draws; a row names its timer); "
    f"differences within {1 - SLOWER:.0%} are not counted as lost."
)
LARGE_WEIGHTS = "Weights of 50 MB and more at m = 1: what is moved per second, against the device's measured read rate."


def gemm_section(devices: Mapping[str, list[Row]]) -> str:
    """Everything about products, device by device; "" without rows. Plots are expected in
    ``../plots/``."""
    return "\n\n".join([HOW_TO_READ, *(_device(gpu, rows) for gpu, rows in devices.items())]) if devices else ""


def speed_plot(gpu: str, bits: int) -> str:
    """The plot of time against m of one device and width, without its ending."""
    return f"{slug(gpu)}_w{bits}a16_speed"


def _device(gpu: str, rows: list[Row]) -> str:
    shown, ceiling = problems(rows), rates(rows)
    parts = [f"## {gpu}"]
    if ceiling:
        parts.append(
            f"Measured rates of the device: {ceiling.read_gbps:,.0f} GB/s read, {ceiling.mma_tflops:,.4g} TFLOP/s in 16-bit products."
        )
    else:
        parts.append("No measured rates of this device: no floors and no roofline.")
    if bars := bars_table(rows):
        parts += ["### Against the fastest peer", AGAINST_PEERS, bars, *ratio_tables(rows)]
    if ceiling and (reached := bandwidth_table(rows, ceiling)):
        parts += ["### Large weights at m = 1", LARGE_WEIGHTS, reached]
    parts.append("### Time against m")
    parts += [f"![time against m, {bits}-bit weights](../plots/{speed_plot(gpu, bits)}.svg)" for bits in sorted({p.bits for p in shown})]
    if ceiling:
        parts.append(f"![roofline](../plots/{slug(gpu)}_roofline.svg)")
    parts += [details(f"{p.n} x {p.k} (n x k), {p.bits}-bit weights, {p.dtype}", _problem(p, ceiling)) for p in shown]
    parts.append(details("Processes that these rows come from", _stamps([row for problem in shown for row in problem.rows])))
    return "\n\n".join(parts)


def _stamps(rows: list[Row]) -> str:
    """Which processes the shown rows come from: commit, date, versions."""
    columns = ("run", "commit", "date", "driver", "cuda", "torch", "tilelang")
    lines = []
    for run in sorted({row.run for row in rows}):
        members = [row for row in rows if row.run == run]
        ours = next((row for row in members if row.impl == OURS), members[0])
        stamp = (run, short_commit(ours.commit), max(row.date for row in members)[:10], ours.driver, ours.cuda, ours.torch, ours.tilelang)
        lines.append([str(value) if value else "-" for value in stamp])
    return table(columns, lines, numbers=False)


def _problem(problem: Problem, ceiling: Rates | None) -> str:
    lines = [[str(m), *(_cell(line.get(name), line, ceiling) for name in problem.series)] for m, line in problem.lines.items()]
    errors = [
        [row.rel_err for line in problem.lines.values() if (row := line.get(name)) and row.rel_err is not None] for name in problem.series
    ]
    lines.append(["rel. error", *(f"{max(values):.1e}" if values else "-" for values in errors)])
    return table(["m", *problem.series], lines)


def _cell(row: Row | None, line: dict[str, Row], ceiling: Rates | None) -> str:
    if row is None:
        return "-"
    base = baseline(line)
    notes = [f"{base.us / row.us:.2f}x"] if base and not is_baseline(row) else []
    if ceiling:
        notes.append(f"{ceiling.floor_us(row) / row.us:.0%}")
    return number(row.us) + (f" ({', '.join(notes)})" if notes else "")
