"""The page of chains of linears: rows of ``chain`` beside the sum of the fastest peers of each
linear."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .markdown import number, table
from .problems import is_peer
from .rows import Row, json_rows

FIELDS = ("gpu", "run", "date", "impl", "m", "us", "chain")
COLUMNS = ("tilebit", "tilebit_pdl")
ABOUT = (
    "µs of the four linears of a decoder layer in a row, several layers with weights of their own in one CUDA graph; above m = 1 two of "
    "them are preceded by a copy of their input. Dependent launch requests a kernel's weights while the kernel before it still runs; the "
    "saving is in µs. The fastest peer of each linear was timed alone, and the times are summed, without copies."
)
HEADER = ("format", "m", "unquantized", "tilebit", "tilebit, dependent launch", "saved per launch", "fastest peers, summed")


def read_chains(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of ``folder`` by device. Raises ``ValueError`` with file and line for a row that
    lacks a field."""
    devices: dict[str, list[dict[str, Any]]] = {}
    for _, row in json_rows(folder, FIELDS):
        devices.setdefault(row["gpu"], []).append(row)
    return devices


def chain_section(chains: Mapping[str, Sequence[dict[str, Any]]], devices: Mapping[str, Sequence[Row]]) -> str:
    """One table for each device with chains; "" without any. ``devices`` are the products by
    device."""
    parts = [f"## {gpu}\n\n{text}" for gpu, found in chains.items() if (text := chain_table(found, devices.get(gpu, ())))]
    return "\n\n".join([ABOUT, *parts]) if parts else ""


def chain_table(chains: Sequence[dict[str, Any]], rows: Sequence[Row]) -> str:
    """µs of one layer by format and m, of the newest run of each; "" without chains. ``rows`` are
    the products of the same device."""
    grouped: dict[tuple, list[dict[str, Any]]] = {}
    for row in chains:
        c = row["chain"]
        grouped.setdefault((c["format"], c["group_size"], not c["symmetric"], row["m"], str(c["linears"])), []).append(row)
    lines = []
    for (format, group, asymmetric, m, _), members in sorted(grouped.items()):
        newest = max(members, key=lambda row: row["date"])["run"]
        by_impl = {row["impl"]: row for row in members if row["run"] == newest}
        base = next((row for impl, row in by_impl.items() if impl not in COLUMNS), None)
        saving = by_impl.get("tilebit_pdl", {}).get("saving_us")
        linears = members[0]["chain"]["linears"]
        peers = [_fastest(rows, format, group, n, k, m) for n, k in linears]
        lines.append(
            [
                f"{format}_g{group}{'_asym' * asymmetric}",
                str(m),
                f"{number(base['us'])} {base['impl']}" if base else "-",
                *(number(by_impl[impl]["us"]) if impl in by_impl else "-" for impl in COLUMNS),
                f"{saving:.2f}" if saving is not None else "-",
                number(sum(row.us for row in peers if row)) if all(peers) else "-",
            ]
        )
    return table(HEADER, lines) if lines else ""


def _fastest(rows: Sequence[Row], format: str, group: int, n: int, k: int, m: int) -> Row | None:
    """The fastest fp16 peer at one shape, in the newest run that has any."""
    found = [
        row
        for row in rows
        if is_peer(row) and (row.format, row.group_size, row.dtype, row.n, row.k, row.m) == (format, group, "float16", n, k, m)
    ]
    newest = max(found, key=lambda row: row.date).run if found else None
    return min((row for row in found if row.run == newest), key=lambda row: row.us, default=None)
