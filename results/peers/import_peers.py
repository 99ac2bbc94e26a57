"""Rows of the peer harness as rows of the results: ``python -m results.peers.import_peers FILE
[--run ID]`` appends to results/rows/gemm.

FILE is the JSON that ``gemm_peers.py --plugin results/peers/peers_plugin.py`` writes. Its rows say
nothing of the machine; tilebit's carry it, with schedule and commit, in their note, and the other
peers of the same process take it from there. Rows of a process that are in the results already are
not appended again. ``us`` is the harness's median and ``us_min`` its fastest replay; ``rel_err`` is
the relative Frobenius error of up to 128 rows (other rows of the results hold that of the worst
block).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..report.rows import OURS, ROWS
from .imported import append_by_device

KEY = ("run", "peer", "n", "k", "m")  # what tells rows of one file apart
GROUP = 128  # values of k per scale of every 4- and 8-bit weight of the harness
PROCESS = ("run", "gpu", "driver", "cuda", "torch", "tilelang", "commit", "date", "timer")
CLASSES = ("w4a16", "w8a16", "w16a16")  # those that the tables compare
ALONE = "peer harness, each alone"  # the timer of rows that ``gemm_peers.py --sequential`` measured
PLUGIN_NAME = re.compile(r"tilebit_(w[48]a16)_(sym|asym)(_bf16)?(_pdl)?")


@dataclass(frozen=True, slots=True)
class PeerKind:
    """What a peer of the harness is in our words; ``group_size`` None: one scale per output
    channel, or none at all."""

    impl: str
    format: str
    symmetric: bool | None = None
    dtype: str = "float16"
    group_size: int | None = GROUP

    @property
    def kernel_class(self) -> str:
        """ "w4a16", "w8a16", "w4a8", ...; "w16a16" for unquantized products."""
        return self.format.partition("_")[0] if self.format.startswith("w") else "w16a16"


# By the harness's name. "_best" is the fastest of the library's own schedules, found by timing
# them; without it, its default choice.
PEER_KINDS = {
    "torch_fp16": PeerKind("cublas", "fp16", group_size=None),
    "torch_bf16": PeerKind("cublas", "bf16", dtype="bfloat16", group_size=None),
    "marlin_u4b8": PeerKind("marlin", "w4a16", True),
    "marlin_u4zp": PeerKind("marlin", "w4a16", False),
    "marlin_w8a16": PeerKind("marlin", "w8a16", True),
    "machete_u4b8": PeerKind("machete", "w4a16", True),
    "machete_u4b8_best": PeerKind("machete_best", "w4a16", True),
    "machete_u4zp": PeerKind("machete", "w4a16", False),
    "machete_w8a16": PeerKind("machete", "w8a16", True),
    "humming_w4a16": PeerKind("humming", "w4a16", True),
    "humming_w8a16": PeerKind("humming", "w8a16", True),
    "gemlite_w4a16": PeerKind("gemlite", "w4a16", True),
    "marlin_w4a8_int8": PeerKind("marlin", "w4a8_int8", True),
    "humming_w4a8_int8": PeerKind("humming", "w4a8_int8", True),
    "humming_w4a8_fp8": PeerKind("humming", "w4a8_fp8", True),
    "vllm_w4a8_fp8": PeerKind("vllm", "w4a8_fp8", True),
    "vllm_w4a8_fp8_best": PeerKind("vllm_best", "w4a8_fp8", True),
    "vllm_int8": PeerKind("vllm", "w8a8_int8", True, group_size=None),
    "vllm_fp8": PeerKind("vllm", "w8a8_fp8", True, group_size=None),
    "torch_int8": PeerKind("torch", "w8a8_int8", True, group_size=None),
    "torch_fp8_row": PeerKind("torch_row", "w8a8_fp8", True, group_size=None),
    "torch_fp8_tensor": PeerKind("torch_tensor", "w8a8_fp8", True, group_size=None),
    # of results/peers/floats_plugin.py
    "tilebit_w4a16_mxfp4": PeerKind("tilebit", "w4a16_mxfp4", dtype="bfloat16", group_size=32),
    "tilebit_w4a16_nvfp4": PeerKind("tilebit", "w4a16_nvfp4", dtype="bfloat16", group_size=16),
    "tilebit_w4a16_g32": PeerKind("tilebit", "w4a16", True, "bfloat16", group_size=32),
    # of results/peers/int8_plugin.py
    "tilebit_w4a8_lqq_g64": PeerKind("tilebit", "w4a8_lqq", False, group_size=64),
    "tilebit_w4a8_lqq_g128": PeerKind("tilebit", "w4a8_lqq", False),
    "tilebit_w8a8_channel": PeerKind("tilebit", "w8a8_channel", True, group_size=None),
    "tilebit_w4a8_channel_asym": PeerKind("tilebit", "w4a8_channel_asym", False, group_size=None),
    "tilebit_w8a8_g128": PeerKind("tilebit", "w8a8_g128", True),
    "tilebit_w4a8_g128_asym": PeerKind("tilebit", "w4a8_g128_asym", False),
    "tilebit_w8a8_fp8": PeerKind("tilebit", "w8a8_fp8", True, group_size=None),
    "tilebit_w8a8_fp8_g128": PeerKind("tilebit", "w8a8_fp8_g128", True),
    "vllm_fp8_block": PeerKind("vllm", "w8a8_fp8_g128", True),
    "tilebit_w4a8_fp8": PeerKind("tilebit", "w4a8_fp8", True),
    "tilebit_w4.4a8_g128": PeerKind("tilebit", "w4.4a8_g128"),
    "marlin_mxfp4": PeerKind("marlin", "w4a16_mxfp4", dtype="bfloat16", group_size=32),
    "marlin_nvfp4": PeerKind("marlin", "w4a16_nvfp4", dtype="bfloat16", group_size=16),
}


def peer_kind(name: str) -> PeerKind | None:
    """The kind of a peer of the harness or of our plug-in; None for a name that neither has."""
    ours = PLUGIN_NAME.fullmatch(name)
    if ours is None:
        return PEER_KINDS.get(name)
    format, zeros, bf16, dependent = ours.groups()
    return PeerKind("tilebit_pdl" if dependent else "tilebit", format, zeros == "sym", "bfloat16" if bf16 else "float16")


def import_rows(
    measured: Iterable[dict[str, Any]], process: dict[str, Any], classes: Iterable[str] = CLASSES
) -> tuple[list[dict[str, Any]], Counter[str]]:
    """(our rows, how many rows were left out by reason) of the harness's rows.

    ``process`` holds fields of ``PROCESS`` that win over those in the notes; without a note of
    tilebit it must have "gpu", "run" and "date". Rows of other operations and of other ``classes``,
    unknown peers, untimed ones and those that failed the harness's accuracy check are left out.
    Raises ``ValueError`` when a row has neither note nor process.
    """
    rows = [row for row in measured if row.get("op") == "gemm"]
    notes = {_place(row): note for row in rows if (note := _note(row))}
    anywhere = next(iter(notes.values()), {})
    result, left_out = [], Counter()
    for row in rows:
        kind = peer_kind(row["peer"])
        if kind is None:
            left_out["unknown peer"] += 1
        elif kind.kernel_class not in classes:
            left_out[f"class {kind.kernel_class}"] += 1
        elif row.get("error") or not row.get("us"):
            left_out["not timed, or wrong"] += 1
        else:
            # The harness starts a new process when a kernel kills one, so a file can hold several:
            # all rows of one (n, k, m) come from one.
            note = notes.get(_place(row), anywhere)
            fields = {name: process.get(name, note.get(name)) for name in PROCESS}
            missing = [name for name in ("run", "gpu", "date") if not fields[name]]
            if missing:
                raise ValueError(
                    f"no row of tilebit says the {', '.join(missing)} of {row['peer']} at {_place(row)}; accepted: a file measured with "
                    f"results/peers/peers_plugin.py, or {', '.join('--' + name for name in missing)}"
                )
            result.append(_converted(row, kind, fields))
    return result, left_out


def _place(row: dict[str, Any]) -> tuple[int, int, int]:
    return row["N"], row["K"], row["M"]


def _note(row: dict[str, Any]) -> dict[str, Any]:
    """What a plug-in of ours wrote beside a timed row; empty for other peers, whose notes are prose."""
    if not row["peer"].startswith(OURS) or not row.get("note"):
        return {}
    return json.loads(row["note"])


def _converted(row: dict[str, Any], kind: PeerKind, fields: dict[str, Any]) -> dict[str, Any]:
    ours = row["peer"].startswith(OURS)
    # A commit of tilebit and a compiler's version say nothing about the kernels of others.
    own = {"schedule": _note(row).get("schedule")} if ours else {"commit": None, "tilelang": None, "schedule": None}
    return {
        "op": "gemm",
        **fields,
        "timer": fields["timer"] or "peer harness",  # what notes named before orders were drawn
        "peer": row["peer"],
        "impl": kind.impl,
        "format": kind.format,
        "group_size": kind.group_size,
        "symmetric": kind.symmetric,
        **own,
        "dtype": kind.dtype,
        "m": row["M"],
        "n": row["N"],
        "k": row["K"],
        "us": row["us"],
        "us_min": row.get("us_min"),
        "rel_err": row.get("rel_err"),
    }


def main(arguments: list[str] | None = None) -> int:
    """0: imported; 2: the file cannot be read as the harness's rows."""
    parser = argparse.ArgumentParser(
        prog="python -m results.peers.import_peers", description="Append the peer harness's rows to results/rows/gemm."
    )
    parser.add_argument("file", type=Path, help="JSON written by gemm_peers.py")
    for name in ("run", "gpu", "date"):
        parser.add_argument(f"--{name}", help="of every row (default: what tilebit's rows of the same process say)")
    parser.add_argument("--classes", default=",".join(CLASSES), help=f"kernel classes to import (default: {','.join(CLASSES)})")
    parser.add_argument("--out", type=Path, default=ROWS / "gemm", help="folder of the rows, one file per device")
    parser.add_argument("--alone", action="store_true", help="the file is of gemm_peers.py --sequential: each kernel was timed by itself")
    options = parser.parse_args(arguments)
    process = {name: value for name in ("run", "gpu", "date") if (value := getattr(options, name))}
    if options.alone:
        process["timer"] = ALONE
    try:
        rows, left_out = import_rows(json.loads(options.file.read_text()), process, options.classes.split(","))
    except (OSError, ValueError, KeyError) as error:
        print(f"import_peers: {options.file}: {error}", file=sys.stderr)
        return 2
    append_by_device("import_peers", options.out, rows, KEY, left_out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
