"""Measured rows: reading them, and the floor that each stands above."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from tilebit.layouts.formats import GemmFormat, QuantFormat
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.target import ARCHES, target_from_name

R = TypeVar("R")
ROWS = Path(__file__).resolve().parent.parent / "rows"  # the checkout's rows, a folder for each study
OURS = "tilebit"  # impl of our rows; "tilebit_pdl": with dependent launch, which saves time only between kernels of one stream


def timed_row(kind: type[R], data: dict[str, Any]) -> R:
    """A row of the dataclass ``kind``. Unknown fields are ignored; a missing required one, or a
    time ``us`` that is no positive number, raises ``ValueError``."""
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    try:
        row: Any = kind(**{key: value for key, value in data.items() if key in known})
    except TypeError as error:
        raise ValueError(f"not a measured row ({error}); accepted: the fields {sorted(known)}") from None
    if not (isinstance(row.us, int | float) and row.us > 0):
        raise ValueError(f"us is {row.us!r}; accepted: a positive number of microseconds")
    return row


LQQ = "w4a8_lqq"  # the one format of 8-bit x whose name leaves its group out


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement of ``y[m, n] = x[m, k] @ w[n, k]^T``.

    ``impl`` is "tilebit", "tilebit_pdl" or the peer's name, ``format`` compressed-tensors' name of
    the number format ("w4a16"; "fp16", "bf16" or "w16a16" for unquantized weights), ``group_size``
    -1 or None without groups. ``us`` is the median in microseconds, ``us_p20`` and ``us_p80`` its
    spread, ``rel_err`` the largest relative error of a block (where ``timer`` is the peer harness:
    that of the whole product). All rows of one process share ``run``. ``read_gbps`` and
    ``mma_tflops`` may carry the device's measured rates, for devices without a reference
    ``Target``.
    """

    op: str
    impl: str
    format: str
    dtype: str
    m: int
    n: int
    k: int
    us: float
    run: str
    gpu: str
    date: str
    group_size: int | None = None
    us_p20: float | None = None
    us_p80: float | None = None
    rel_err: float | None = None
    driver: str | None = None
    cuda: str | None = None
    torch: str | None = None
    tilelang: str | None = None
    commit: str | None = None
    schedule: Any = None
    timer: str | None = None
    symmetric: bool | None = None
    read_gbps: float | None = None
    mma_tflops: float | None = None

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Row:
        """As ``timed_row``."""
        return timed_row(cls, data)

    @property
    def weight_bits(self) -> int:
        """Bits of one stored weight: 4 for "w4a16", 16 for an unquantized format."""
        match = re.match(r"w(\d+)a", self.format or "")
        return int(match.group(1)) if match else 16

    @property
    def quant_format(self) -> GemmFormat | None:
        """The weight format; None for unquantized weights and for formats that tilebit has not."""
        if self.weight_bits not in (4, 8):
            return None
        group = -1 if self.group_size in (None, 0, -1) else self.group_size
        symmetric = self.symmetric if self.symmetric is not None else not self.format.endswith("_asym")
        try:
            return QuantFormat(self.weight_bits, group, symmetric)
        except ValueError:
            return None

    @property
    def series(self) -> str:
        """The name of this row's column or line: "tilebit w4a16_g128", "tilebit w4a8_lqq_g64", "cublas fp16"."""
        name = self.quant_format.name if self.quant_format and re.fullmatch(r"w\d+a16", self.format) else self.format
        return f"{self.impl} {name}" + (f"_g{self.group_size}" if self.format == LQQ else "")

    @property
    def weight_bytes(self) -> float:
        """Bytes of the stored weight with its scales and zero points."""
        format = self.quant_format
        return self.n * self.k * self.weight_bits / 8 if format is None else Workload(self.m, self.n, self.k, format).weight_bytes

    @property
    def bytes(self) -> float:
        """Bytes that the product must move at least: weights with their scales, x and y once."""
        return self.weight_bytes + 2 * self.m * (self.n + self.k)

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class Rates:
    """What the device reaches at best: plain reads in GB/s and large 16-bit products in TFLOP/s."""

    read_gbps: float
    mma_tflops: float

    def floor_us(self, row: Row) -> float:
        """The time below which ``row``'s product cannot finish: the longer of moving its bytes and
        computing its operations."""
        return max(row.bytes / self.read_gbps / 1e3, row.flops / self.mma_tflops / 1e6)


def rates(rows: Iterable[Row]) -> Rates | None:
    """The measured rates of the one device of ``rows``, or None.

    They are those that the newest row with rates carries, else those of the reference ``Target`` of
    the device's name.
    """
    rows = sorted(rows, key=lambda row: row.date)
    for row in reversed(rows):
        if row.read_gbps and row.mma_tflops:
            return Rates(row.read_gbps, row.mma_tflops)
    for arch in ARCHES:
        target = target_from_name(arch)
        if rows and target.is_cuda and target.name == rows[-1].gpu:
            return Rates(target.read_gbps, target.mma_tflops)
    return None


def json_rows(folder: Path, required: Sequence[str] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file and line, object) of every line of every ``*.jsonl`` of ``folder``, in order; none
    where there is no such folder.

    Raises ``ValueError`` with file and line for a line that is no JSON object or lacks a
    ``required`` field.
    """
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if not line.strip():
                continue
            place = f"{path.name}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{place}: {row!r} is not a JSON object")
            missing = [field for field in required if field not in row]
            if missing:
                raise ValueError(f"{place}: {', '.join(missing)} missing; accepted: rows as the measuring programs write them")
            yield place, row


def read_rows(folder: Path) -> dict[str, list[Row]]:
    """The rows of every ``*.jsonl`` of ``folder`` by device name, GPUs first, in file order.

    Raises ``ValueError`` with file and line for a row that cannot be read.
    """
    devices: dict[str, list[Row]] = {}
    for place, data in json_rows(folder):
        try:
            row = Row.from_json(data)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        devices.setdefault(row.gpu, []).append(row)
    return dict(sorted(devices.items(), key=lambda item: (all(row.cuda is None for row in item[1]), item[0])))
