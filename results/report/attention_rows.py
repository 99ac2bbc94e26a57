"""Measured rows of attention over a KV cache: reading them, and which of them may be compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .rows import OURS, json_rows, timed_row

OURS_DEPENDENT = "tilebit_pdl"  # with dependent launch, which saves time only between kernels of one stream
FLOAT = "kv16"
FP8 = "kvfp8"
OPS = ("decode", "prefill", "append", "gather")
Place = tuple[str, int, int, int, int, int, int]  # op, batch, kv_len, q_len, heads_q, heads_kv, head_dim
Line = tuple[str, tuple[int, int, int], tuple[int, int]]  # format, heads, case


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """One measurement of ``op``: "decode" (``q_len`` newest tokens of ``batch`` sequences of
    ``kv_len`` tokens attend to the cache), "prefill" (``q_len`` rows of a prompt, causal), "append"
    (``q_len`` new tokens a sequence) or "gather" (the cache's rows in 16 bits).

    ``impl`` is "tilebit", "tilebit_pdl" or the peer's name, ``format`` that of the cache
    (``KVFormat.name``; "kvfp8" for any fp8 cache), ``dtype`` that of q, ``variant`` what else tells
    rows apart ("page 64"). ``us`` is the median in microseconds, ``bytes`` what must be moved once
    (decode: keys and values with their parameters), ``floor_us`` that at the device's measured read
    rate ``read_gbps``, ``rel_err`` the relative error against fp32 or fp64 on the values that the
    cache stands for. All rows of one process share ``run``; ``stated`` rows are figures of another
    run on such a device, measured by somebody else.
    """

    op: str
    impl: str
    format: str
    dtype: str
    batch: int
    kv_len: int
    q_len: int
    heads_q: int
    heads_kv: int
    head_dim: int
    us: float
    run: str
    gpu: str
    date: str
    variant: str = ""
    page_size: int | None = None
    bytes: float | None = None
    gbps: float | None = None
    tflops: float | None = None
    floor_us: float | None = None
    read_gbps: float | None = None
    us_p20: float | None = None
    us_p80: float | None = None
    rel_err: float | None = None
    driver: str | None = None
    cuda: str | None = None
    torch: str | None = None
    tilelang: str | None = None
    commit: str | None = None
    clocks: Any = None
    schedule: Any = None
    timer: str | None = None
    stated: bool = False

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> AttentionRow:
        """As ``timed_row``."""
        return timed_row(cls, data)

    @property
    def place(self) -> Place:
        """What was asked for, whoever did it and in whatever format: rows of one place and one run
        may be compared."""
        return self.op, self.batch, self.kv_len, self.q_len, self.heads_q, self.heads_kv, self.head_dim

    @property
    def heads(self) -> tuple[int, int, int]:
        """(query heads, key heads, head_dim)."""
        return self.heads_q, self.heads_kv, self.head_dim

    @property
    def case(self) -> tuple[int, int]:
        """(batch, kv_len)."""
        return self.batch, self.kv_len

    @property
    def series(self) -> str:
        """The name of this row's line: "tilebit kv4_channel", "fa3 kv16 page 64"."""
        return " ".join(filter(None, (self.impl, self.format, self.variant)))

    @property
    def is_ours(self) -> bool:
        return self.impl in (OURS, OURS_DEPENDENT)

    @property
    def is_peer(self) -> bool:
        return not self.is_ours

    @property
    def share(self) -> float | None:
        """Of the measured read rate that the moved bytes reach; None where either is not known."""
        return self.floor_us / self.us if self.floor_us else None


def read_attention(folder: Path) -> dict[str, list[AttentionRow]]:
    """The rows of every ``*.jsonl`` of ``folder`` by device name, GPUs first, in file order.

    Raises ``ValueError`` with file and line for a row that cannot be read.
    """
    devices: dict[str, list[AttentionRow]] = {}
    for place, data in json_rows(folder):
        try:
            row = AttentionRow.from_json(data)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        devices.setdefault(row.gpu, []).append(row)
    return dict(sorted(devices.items(), key=lambda item: (all(row.cuda is None for row in item[1]), item[0])))


def shown_rows(rows: Iterable[AttentionRow], op: str) -> dict[Place, dict[str, AttentionRow]]:
    """By place and series, what to show of ``op``: of tilebit each series' newest row that a peer
    was timed beside (without such a one, its newest), of every peer its newest row beside one of
    tilebit's (stated ones: their newest). Places without a row of tilebit are left out."""
    rows = [row for row in rows if row.op == op]
    ours = {(row.place, row.run) for row in rows if row.impl == OURS}
    compared = {(row.place, row.run) for row in rows if row.is_peer and not row.stated}
    places = {place for place, _ in ours}
    shown: dict[Place, dict[str, AttentionRow]] = {}
    for row in sorted(rows, key=lambda row: ((row.place, row.run) in compared, row.date)):
        if row.place in places and (row.is_ours or row.stated or (row.place, row.run) in ours):
            shown.setdefault(row.place, {})[row.series] = row
    return shown


def query_lines(rows: Iterable[AttentionRow]) -> dict[Line, dict[int, AttentionRow]]:
    """By format, heads and case: tilebit's decode on contiguous caches by q_len, of the newest
    process with more than one. A row of another process, with its own timer, would look like an
    effect of q_len."""
    processes: dict[tuple[Line, str], dict[int, AttentionRow]] = {}
    for row in sorted(rows, key=lambda row: row.date):
        if row.op == "decode" and row.impl == OURS and not row.variant:
            processes.setdefault(((row.format, row.heads, row.case), row.run), {})[row.q_len] = row
    several = [(place, line) for (place, _), line in processes.items() if len(line) > 1]
    newest = sorted(several, key=lambda item: max(row.date for row in item[1].values()))
    return dict(newest)


def beside(row: AttentionRow, rows: Sequence[AttentionRow]) -> list[AttentionRow]:
    """The peers' rows that were timed in the same process at the same place."""
    return [other for other in rows if other.is_peer and not other.stated and (other.run, other.place) == (row.run, row.place)]


def stated(row: AttentionRow, rows: Sequence[AttentionRow]) -> list[AttentionRow]:
    """The figures that others stated for the same place."""
    return [other for other in rows if other.stated and other.place == row.place]
