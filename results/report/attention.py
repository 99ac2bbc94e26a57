"""The page of attention over a low-bit KV cache, from rows alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tilebit.layouts.kv_formats import KVFormat

from .attention_rows import FLOAT, FP8, OPS, OURS_DEPENDENT, AttentionRow, beside, query_lines, shown_rows, stated
from .markdown import details, number, short_commit, slug, table
from .problems import geometric_mean
from .rows import OURS

MAIN_HEADS = ((32, 8, 128), (64, 8, 128))  # those that geometric means are over
ALL_HEADS_KV = (32, 32, 128)  # a key head for every query head
LARGE_BATCH = 32  # from here on the read rate, not a launch, sets the time
BASELINE = "fa3 kv16"
STATED_MARK = "†"

ABOUT_DECODE = (
    "One new token for each of `batch` sequences of `kv_len` tokens, head_dim 128. **A cell** is the median in µs; in brackets, how many "
    "times faster than FA3 on a 16-bit cache in the same process, and the share of the measured read rate that the cache's bytes reach "
    "(codes and parameters, read once). **tilebit_pdl** launches each call before the one in front of it has ended (programmatic "
    f"dependent launch); no summary counts it. {STATED_MARK} marks figures of FlashInfer and BitDecoding that were **stated, another "
    "run** on the same kind of GPU."
)
ABOUT_BARS = (
    "A peer's time over tilebit's: above 1, tilebit is faster. Geometric means over the cases with heads 32/8 and 64/8; the worst case "
    "in brackets. FA3 and the fastest 16-bit peer ran in the same process, one after another; in the columns with a "
    f"{STATED_MARK}, figures stated for another run count too. The last column: least and most of the same cases, batch from {LARGE_BATCH}."
)
ABOUT_PREFILL = (
    "All rows of one prompt, causal, head_dim 128: median in µs; in brackets TFLOP/s (2 heads head_dim length²) and the time of the "
    "fastest 16-bit peer of the same process over this one. **history**: chunk by chunk, each but the first with its history gathered "
    "from a 4-bit cache and its own 16-bit rows put behind it, all of which is timed; storing new rows is not."
)
ABOUT_MOVERS = (
    "**append**: `q_len` new tokens for each sequence, in 16 bits or, where a window fills up, quantized and packed. **gather**: the whole "
    "cache as 16-bit rows. In brackets the share of the measured read rate that all moved bytes reach."
)
ABOUT_QUERIES = "Several new tokens at once (speculative decoding), µs; a line's times are of one process:"
ABOUT_PAGED = (
    "The time of a decode step on a contiguous cache over that of the same step on pages in random order, in one process: 1 means that "
    "paging is free, 0.90 that a step takes 11% longer."
)
ABOUT_PLOT = "decode, times faster than FA3 on a 16-bit cache"


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times longer ``peer`` took than ``ours``."""

    ours: AttentionRow
    peer: AttentionRow

    @property
    def value(self) -> float:
        return self.peer.us / self.ours.us


def attention_section(devices: Mapping[str, list[AttentionRow]]) -> str:
    """The page of attention; "" where no device has a row of tilebit. Plots are expected in
    ``../plots/``."""
    parts = []
    for gpu, rows in devices.items():
        found = [*_decode_parts(gpu, rows), *_prefill_parts(rows), *_paged_parts(rows), *_mover_parts(rows)]
        if found:
            parts += [f"## {gpu}", *found, details("Processes that these rows come from", _stamps(rows))]
    return "\n\n".join(parts)


def attention_plot(gpu: str) -> str:
    """The plot of decode on one device, without its ending."""
    return f"{slug(gpu)}_attention_decode"


def decode_rows(rows: Sequence[AttentionRow]) -> list[AttentionRow]:
    """The rows of single-token decode that are shown, tilebit's and peers'."""
    return [row for line in shown_rows(rows, "decode").values() for row in line.values() if row.q_len == 1]


def against(rows: Sequence[AttentionRow], series: str, peers: Callable[[AttentionRow], Iterable[AttentionRow]]) -> list[Ratio]:
    """Of each shown decode row of ``series``, the ratio to the fastest of the ``peers`` of that
    row."""
    ratios = []
    for ours in decode_rows(rows):
        if ours.series == series and (found := list(peers(ours))):
            ratios.append(Ratio(ours, min(found, key=lambda row: row.us)))
    return sorted(ratios, key=lambda ratio: (ratio.ours.heads, ratio.ours.case))


def bars_table(rows: Sequence[AttentionRow]) -> str:
    """One line per format of tilebit's contiguous caches: the ratios to what each must beat, and
    the share of the read rate with the main heads at batches from ``LARGE_BATCH``; "" without a
    peer beside any."""

    def same_run(accepted: Callable[[AttentionRow], bool]) -> Callable[[AttentionRow], list[AttentionRow]]:
        return lambda ours: [row for row in beside(ours, rows) if accepted(row)]

    def with_stated(accepted: Callable[[AttentionRow], bool]) -> Callable[[AttentionRow], list[AttentionRow]]:
        return lambda ours: [row for row in (*beside(ours, rows), *stated(ours, rows)) if accepted(row)]

    baseline = same_run(lambda row: row.series == BASELINE)
    lines = []
    for series in _formats(rows):
        found = against(rows, series, baseline)
        if not found:
            continue
        lines.append(
            [
                series.removeprefix(f"{OURS} "),
                _mean(found, MAIN_HEADS),
                _mean(found, (ALL_HEADS_KV,)),
                _mean(against(rows, series, same_run(lambda row: row.format == FLOAT)), MAIN_HEADS),
                _mean(against(rows, series, with_stated(lambda row: row.format == FP8)), MAIN_HEADS),
                _mean(against(rows, series, with_stated(lambda row: row.impl == "bitdecoding")), MAIN_HEADS),
                _shares([ratio.ours for ratio in found]),
            ]
        )
    header = [
        "cache", "FA3, 16-bit", "FA3, 16-bit, heads 32/32", "fastest 16-bit", f"fastest fp8 cache {STATED_MARK}",
        f"BitDecoding 4-bit {STATED_MARK}", "of the read rate",
    ]  # fmt: skip
    return table(header, lines, numbers=False) if lines else ""


def _formats(rows: Sequence[AttentionRow]) -> list[str]:
    """tilebit's series on contiguous caches, the widest codes first."""
    found = {row.series: row for row in decode_rows(rows) if row.impl == OURS and not row.variant}
    return sorted(found, key=lambda series: (-_width(found[series]), series))


def _width(row: AttentionRow) -> int:
    """Bits of a channel's key and value."""
    format = KVFormat.from_name(row.format)
    return format.key_bits + format.value_bits


def _mean(ratios: Sequence[Ratio], heads: Iterable[tuple[int, int, int]]) -> str:
    chosen = [ratio for ratio in ratios if ratio.ours.heads in heads]
    if not chosen:
        return "-"
    worst = min(chosen, key=lambda ratio: ratio.value)
    place = f"{worst.ours.batch} x {worst.ours.kv_len:,}"
    return f"**{geometric_mean(ratio.value for ratio in chosen):.2f}** ({worst.value:.2f} at {place})"


def _shares(rows: Sequence[AttentionRow]) -> str:
    shares = [row.share for row in rows if row.heads in MAIN_HEADS and row.batch >= LARGE_BATCH and row.share]
    return f"{min(shares):.0%} to {max(shares):.0%}" if shares else "-"


def _decode_parts(gpu: str, rows: Sequence[AttentionRow]) -> list[str]:
    shown = decode_rows(rows)
    if not shown:
        return []
    parts = ["### Decode", ABOUT_DECODE]
    if bars := bars_table(rows):
        parts += [ABOUT_BARS, bars, f"![decode over a low-bit cache](../plots/{attention_plot(gpu)}.svg)"]
    for heads in sorted({row.heads for row in shown}, key=lambda heads: (heads[0] != 32, heads)):
        lines = _lines([row for row in shown if row.heads == heads], rows, _decode_cell)
        parts.append(details(f"heads {heads[0]}/{heads[1]} x {heads[2]}: every case", lines))
    if more := _more_queries(rows):
        parts += [ABOUT_QUERIES, more]
    return parts


def _lines(shown: Sequence[AttentionRow], rows: Sequence[AttentionRow], cell: Callable[[AttentionRow, Sequence[AttentionRow]], str]) -> str:
    """Series down (tilebit, peers of the same process, stated), cases (batch x kv_len) across, then
    the largest error."""
    cases = sorted({row.case for row in shown})
    by_series: dict[str, dict[tuple[int, int], AttentionRow]] = {}
    for row in sorted(shown, key=_by_kind):
        by_series.setdefault(row.series + f" {STATED_MARK}" * row.stated, {})[row.case] = row
    lines = []
    for name, line in by_series.items():
        errors = [row.rel_err for row in line.values() if row.rel_err is not None]
        cells = [cell(line[case], rows) if case in line else "-" for case in cases]
        lines.append([name, *cells, f"{max(errors):.1e}" if errors else "-"])
    return table(["", *(f"{batch} x {length:,}" for batch, length in cases), "rel. error"], lines)


def _by_kind(row: AttentionRow) -> tuple:
    """Where a row's line stands: contiguous caches before paged ones, those by page size."""
    paged = (row.page_size or 0) if row.variant else 0
    return row.stated, row.is_peer, row.impl == OURS_DEPENDENT, -_width(row), row.format, paged, row.series


def _decode_cell(row: AttentionRow, rows: Sequence[AttentionRow]) -> str:
    if row.stated:
        return number(row.us)
    base = next((other for other in rows if other.series == BASELINE and (other.run, other.place) == (row.run, row.place)), None)
    notes = [f"{base.us / row.us:.2f}x"] if base and base is not row and row.is_ours else []
    notes += [f"{row.share:.0%}"] if row.share else []
    return number(row.us) + (f" ({', '.join(notes)})" if notes else "")


def _more_queries(rows: Sequence[AttentionRow]) -> str:
    """Decode by q_len, contiguous caches; "" where only one was measured."""
    by_line = query_lines(rows)
    counts = sorted({q_len for line in by_line.values() for q_len in line})
    lines = [
        [f"{format}, heads {heads[0]}/{heads[1]}, {case[0]} x {case[1]:,}", *(number(line[q].us) if q in line else "-" for q in counts)]
        for (format, heads, case), line in sorted(by_line.items())
    ]
    return table(["", *(f"q_len {q_len}" for q_len in counts)], lines) if lines else ""


def _prefill_parts(rows: Sequence[AttentionRow]) -> list[str]:
    shown = [row for line in shown_rows(rows, "prefill").values() for row in line.values()]
    if not shown:
        return []
    parts = ["### Prefill", ABOUT_PREFILL]
    for heads in sorted({row.heads for row in shown}, key=lambda heads: (heads[0] != 32, heads)):
        parts.append(f"Heads {heads[0]}/{heads[1]} x {heads[2]}:")
        parts.append(_lines([row for row in shown if row.heads == heads], rows, _prefill_cell))
    return parts


def _prefill_cell(row: AttentionRow, rows: Sequence[AttentionRow]) -> str:
    notes = [f"{row.tflops:,.0f}"] if row.tflops else []
    peers = [peer.us for peer in beside(row, rows) if peer.format == FLOAT] if row.is_ours else []
    notes += [f"{min(peers) / row.us:.2f}x"] if peers else []
    return number(row.us) + (f" ({', '.join(notes)})" if notes else "")


def paged_ratios(rows: Sequence[AttentionRow]) -> list[Ratio]:
    """tilebit's decode on pages in random order, each beside the contiguous cache of its format in
    the same process ("peer")."""
    ours = [row for row in rows if row.op == "decode" and row.impl == OURS]
    newest = {(row.place, row.series): row for row in sorted(ours, key=lambda row: row.date) if row.variant}
    plain = {(row.run, row.place, row.format): row for row in ours if not row.variant}
    found = [(row, plain.get((row.run, row.place, row.format))) for row in newest.values()]
    ratios = [Ratio(row, base) for row, base in found if base is not None]
    return sorted(ratios, key=lambda r: (r.ours.format, r.ours.page_size or 0, r.ours.heads, r.ours.case))


def _paged_parts(rows: Sequence[AttentionRow]) -> list[str]:
    lines: dict[str, list[Ratio]] = {}
    for ratio in paged_ratios(rows):
        lines.setdefault(f"{ratio.ours.format}, {ratio.ours.variant}", []).append(ratio)
    if not lines:
        return []
    cells = []
    for name, ratios in lines.items():
        worst = min(ratios, key=lambda ratio: ratio.value)
        place = f"{worst.ours.batch} x {worst.ours.kv_len:,}, heads {worst.ours.heads_q}/{worst.ours.heads_kv}"
        mean = geometric_mean(ratio.value for ratio in ratios)
        cells.append([name, str(len(ratios)), f"**{mean:.2f}**", f"{worst.value:.2f} ({place})"])
    return ["### Paged against contiguous", ABOUT_PAGED, table(["cache", "cases", "geometric mean", "worst case"], cells, numbers=False)]


def _mover_parts(rows: Sequence[AttentionRow]) -> list[str]:
    shown = [row for op in ("append", "gather") for line in shown_rows(rows, op).values() for row in line.values()]
    lines = []
    for row in sorted(shown, key=lambda row: (row.op, row.q_len, row.batch, row.kv_len, row.variant, -_width(row), row.series)):
        sizes = [row.op, row.format, f"{row.batch} x {row.q_len if row.op == 'append' else row.kv_len:,}", row.variant or "-"]
        lines.append([*sizes, str(row.heads_kv), number(row.us) + (f" ({row.share:.0%})" if row.share else "")])
    if not lines:
        return []
    header = ["op", "cache", "sequences x tokens", "windows", "kv heads", "µs"]
    return ["### Append and gather", ABOUT_MOVERS, table(header, lines, numbers=False)]


def _stamps(rows: Sequence[AttentionRow]) -> str:
    """Which processes the rows that are shown come from: commit, date, versions, clocks."""
    columns = ("run", "commit", "date", "driver", "cuda", "torch", "tilelang", "clocks in MHz (SM, memory), read once, some while idle")
    shown = [row for op in OPS for line in shown_rows(rows, op).values() for row in line.values()]
    shown += [ratio.ours for ratio in paged_ratios(rows)] + [row for line in query_lines(rows).values() for row in line.values()]
    lines = []
    for run in sorted({row.run for row in shown}):
        members = [row for row in rows if row.run == run]
        ours = next((row for row in members if row.impl == OURS), members[0])
        clocks = f"{ours.clocks['sm_mhz']}, {ours.clocks['memory_mhz']}" if ours.clocks else None
        date = max(row.date for row in members)[:10]
        stamp = (run, short_commit(ours.commit), date, ours.driver, ours.cuda, ours.torch, ours.tilelang, clocks)
        lines.append([str(value) if value else "-" for value in stamp])
    return table(columns, lines, numbers=False)
