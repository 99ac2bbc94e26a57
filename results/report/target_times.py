"""The times that targets are held against, of every study that has any: one form for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from .any_precision import DENSE
from .any_precision import FIELDS as ANY_PRECISION_FIELDS
from .prompt import FIELDS as PROMPT_FIELDS
from .rows import OURS, Row, json_rows, read_rows
from .step import FIELDS as STEP_FIELDS
from .step import PARTED
from .step_generate import OP as IN_GENERATE
from .targets import Where

LAYERS = 32  # of the 8B model whose steps and prompts count


@dataclass(frozen=True, slots=True)
class Time:
    """A time of the kernel or model ``series`` in the process ``run``. ``where`` and ``m``: as ``Target`` has them."""

    gpu: str
    run: str
    series: str
    where: Where
    m: int
    us: float
    commit: str | None


def times_of(study: str, rows: Path) -> Iterator[Time]:
    """Times of the rows of ``study`` under ``rows`` (the folder of all studies), in order; of those alone
    that were checked and found right. Raises ``ValueError`` for a row that cannot be read."""
    return READERS[study](rows / study)


def right(row: dict[str, Any]) -> bool:
    """Whether the measuring program checked what it timed: an error that it accepts, or a word for the check
    where a process wrote no error. Rows of a trial, whose schedule need not be the one that is chosen, are none."""
    if "tried" in row:
        return False
    error, accepted = row.get("rel_err"), row.get("rel_err_accepted")
    if error is None:
        return bool(row.get("checked"))
    return isfinite(error) and (accepted is None or error <= accepted)


def _int8(folder: Path) -> Iterator[Time]:
    """Rows of the peer harness: what fails its check is not imported."""
    for found in read_rows(folder).values():
        for row in found:
            if row.dtype == "float16" and _checked(row):
                yield Time(row.gpu, row.run, row.series, (row.n, row.k), row.m, row.us, row.commit)


def _checked(row: Row) -> bool:
    return right({"rel_err": row.rel_err})


def _any_precision(folder: Path) -> Iterator[Time]:
    """The 16-bit product's series names the width that it was timed in turn with."""
    held: dict[str, Any] = {}
    for _, row in json_rows(folder, ANY_PRECISION_FIELDS):
        place = row["gpu"], row["run"], (row["n"], row["k"]), row["m"]
        dense = row["format"] in DENSE
        if row["impl"] == OURS:
            held = {"place": place, "format": row["format"]}
        if right(row) and (not dense or held.get("place") == place):
            gpu, run, where, m = place
            series = f"16 bits beside {held['format']}" if dense else f"{row['impl']} {row['format']}"
            yield Time(gpu, run, series, where, m, row["us"], row["commit"])


def _step(folder: Path) -> Iterator[Time]:
    """Steps as ``compile`` makes them by default, with the shipped records; those with other parts in products, and
    those tuned where they run, are series of their own. A token of ``generate`` is more than a step."""
    for _, row in json_rows(folder, STEP_FIELDS):
        if right(row) and row["layers"] == LAYERS and row.get("op") != IN_GENERATE:
            parts = f" {row.get('parts') or 'nothing'} in products" if row["impl"] == PARTED else ""
            tuned = " tuned in steps" if row.get("tuned") else ""
            series = f"{row['impl']}{parts} {row['format']} {row['kv_format']}{tuned}"
            yield Time(row["gpu"], row["run"], series, (row["kv_len"],), row["batch"], row["us"], row["commit"])


def _prompt(folder: Path) -> Iterator[Time]:
    for _, row in json_rows(folder, PROMPT_FIELDS):
        if right(row) and row.get("layers") == LAYERS:
            series = f"{row['impl']} {row['format']} {row['kv_format']}"
            yield Time(row["gpu"], row["run"], series, (row["prompt"],), row["batch"], row["us"], row["commit"])


READERS: dict[str, Callable[[Path], Iterator[Time]]] = {"int8": _int8, "any_precision": _any_precision, "step": _step, "prompt": _prompt}
