"""The page of what compiled kernels say about their speed: rows of ``static``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name

from ..measure.static.limits import latency_us
from .markdown import table
from .rows import json_rows

KIB = 1024
SHOWN = ("program", "block_n", "block_m", "block_k", "num_stages", "num_warps")
SHORT = {"split_k": "k{}", "min_blocks": "b{}", "raster": "r{}", "stream_k": "stream-k", "tail": "tail {}", "joined": "joined"}
COLUMNS = (
    "m", "schedule", "from", "regs", "spills", "smem KiB", "blocks / SM", "KiB in flight",
    "instr / KiB", "bits", "arith", "mma", "shared", "global", "other", "issue", "bit pipe", "tensor", "conflicts",
)  # fmt: skip

FIELDS = (
    "arch", "m", "n", "k", "format", "dtype", "schedule", "source", "level", "registers", "spills", "smem", "blocks_per_sm",
    "bytes_in_flight", "bytes_needed", "looped", "per_kib", "issue_us", "bits_us", "tensor_us", "floor_us", "conflicts", "versions",
)  # fmt: skip
LEGEND = f"""Taken from compiled code, without a GPU.

- **schedule**: program, block_n x block_m x block_k, stages (s), warps (w), split-k (k), blocks asked for on an SM (b), raster
(r); and where it is **from**: tuned, or the cost model.
- **KiB in flight**: packed weights, scales and zero points that the blocks resident on an SM have requested at once, averaged
over the SMs; then what it takes to keep the memory busy: the device's read rate times {latency_us():.2f} us, which is the
latency under load that the H200's knee at 64 KiB per SM implies and is assumed for every device. It matters where the floor is
the memory's (small m).
- **instr / KiB**: instructions that a warp executes in the inner loop for each KiB of packed weights, then by kind: **bits**
(LOP3, SHF, PRMT), **arith** (half and float arithmetic), **mma** (HMMA, HGMMA), **shared** (LDS, LDSM), **global** (LDG,
LDGSTS, TMA; those of a producer warp are not in this loop), **other** (addresses, barriers, control). A star: no loop was
left, the whole kernel was counted.
- **issue**, **bit pipe**, **tensor**: the time that all these instructions need at four a clock and SM, that the bit
operations need at two, and that the tensor cores need, as shares of the floor (the longer of moving all bytes once and
computing all operations). A share above 100 % is a bound: no overlap can bring such a schedule to the floor.
- **conflicts**: wavefronts that shared-memory bank conflicts cost, simulated over packed lines, scales, x and the output
tile."""


def static_section(folder: Path) -> str:
    """What the rows of ``folder`` say, one architecture after another; "" without rows. Raises
    ``ValueError`` with file and line for a row that lacks a field."""
    arches: dict[str, list[dict[str, Any]]] = {}
    for _, row in json_rows(folder, FIELDS):
        arches.setdefault(row["arch"], []).append(row)
    return "\n\n".join([LEGEND, *(_architecture(rows) for rows in arches.values())]) if arches else ""


def _architecture(rows: Sequence[dict[str, Any]]) -> str:
    """The tables of one architecture, one a shape, rows in their order."""
    first, levels = rows[0], " and ".join(sorted({r["level"].upper() for r in rows}))
    target = target_from_name(first["arch"])
    versions = ", ".join(f"{name} {version}" for name, version in sorted(first["versions"].items()))
    about = (
        f"Compilers: {versions}. Instructions are counted in {levels}. The reference device is {target.name}: {target.units} SMs, "
        f"{target.read_gbps:,.0f} GB/s, {target.mma_tflops:,.0f} TFLOP/s in 16-bit products; {first['bytes_needed'] / KIB:.0f} KiB in "
        "flight keep its memory busy."
    )
    parts = [f"## {first['arch']}", about]
    for n, k in dict.fromkeys((r["n"], r["k"]) for r in rows):
        shape = [r for r in rows if (r["n"], r["k"]) == (n, k)]
        parts += [f"### {n} x {k} (n x k), {shape[0]['format']}, {shape[0]['dtype']}", table(COLUMNS, [_line(r) for r in shape])]
    return "\n\n".join(parts)


def _line(r: dict[str, Any]) -> list[str]:
    per_kib = r["per_kib"]
    kinds = [f"{per_kib[name]:.0f}" for name in ("bits", "arithmetic", "mma", "shared", "global", "other")]
    shares = [f"{r[name] / r['floor_us']:.0%}" for name in ("issue_us", "bits_us", "tensor_us")]
    return [
        str(r["m"]), schedule_text(r["schedule"]), r["source"], str(r["registers"]), str(r["spills"]), f"{r['smem'] / KIB:.0f}",
        str(r["blocks_per_sm"]), f"{r['bytes_in_flight'] / KIB:.0f} / {r['bytes_needed'] / KIB:.0f}",
        f"{per_kib['all']:.0f}{'' if r['looped'] else '*'}", *kinds, *shares, str(sum(r["conflicts"].values())),
    ]  # fmt: skip


def schedule_text(s: dict[str, Any]) -> str:
    """A schedule in a table's cell: "wgmma 128x256x128 s3 w8", then every other field that is not
    at its default."""
    text = f"{s['program'].removeprefix('gemm_')} {s['block_n']}x{s['block_m']}x{s['block_k']} s{s['num_stages']} w{s['num_warps']}"
    further = [
        (f.name, s.get(f.name, f.default)) for f in fields(Schedule) if f.name not in SHOWN and s.get(f.name, f.default) != f.default
    ]
    return " ".join([text, *(SHORT.get(name, f"{name} {{}}").format(value) for name, value in further)])
