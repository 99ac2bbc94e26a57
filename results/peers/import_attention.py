"""Attention rows of the peer harness as rows of the results: ``python -m
results.peers.import_attention FILE [--stated] [--run ID]`` appends to results/rows/attention.

FILE is the JSON that ``attn_peers.py --plugin results/peers/attention_plugin.py`` writes. Its rows
say nothing of the machine; tilebit's carry it, with what they are, in their note, and the other
peers of the same process take it from there. Rows that are in the results already are not appended
again. ``us`` is the harness's median and ``us_min`` its fastest replay; ``rel_err`` is the relative
Frobenius error (prefill: of the first and last 64 rows).

``--stated`` imports figures that somebody else measured on such a device and that nothing of ours
stood beside: of the libraries in ``STATED`` only, with ``--run``, ``--gpu`` and ``--date`` given.
Tables quote them as another run's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilebit.schedules.target import ARCHES, target_from_name

from ..report.attention_rows import FLOAT, FP8
from ..report.rows import ROWS
from .imported import append_by_device

KEY = ("run", "peer", "op", "batch", "kv_len", "heads_q", "heads_kv")  # what tells rows of one file apart
HEAD_DIM = 128  # of every case of the harness
OPS = ("decode", "prefill")
PROCESS = ("run", "gpu", "driver", "cuda", "torch", "tilelang", "commit", "date", "clocks", "read_gbps")
KIND = ("impl", "format", "variant", "page_size", "dtype", "q_len", "schedule")  # what a note of ours says of its own row
STATED = ("flashinfer", "bitdecoding")  # libraries whose figures are quoted, not measured beside ours


@dataclass(frozen=True, slots=True)
class PeerKind:
    """What a peer of the harness is in our words; ``dtype`` is that of q."""

    impl: str
    format: str = FLOAT
    dtype: str = "float16"
    page_size: int | None = None

    @property
    def variant(self) -> str:
        return f"page {self.page_size}" if self.page_size else ""


E4M3 = "float8_e4m3fn"
PEER_KINDS = {
    "sdpa_flash": PeerKind("sdpa_flash"),
    "sdpa_cudnn": PeerKind("sdpa_cudnn"),
    "fa3_fp16": PeerKind("fa3"),
    "fa3_fp8": PeerKind("fa3", FP8, E4M3),
    "fa3_fp16_paged": PeerKind("fa3", page_size=64),
    "fi_tc_fp16": PeerKind("flashinfer_tc", page_size=64),
    "fi_cc_fp16": PeerKind("flashinfer_cc", page_size=64),
    "fi_xqa_fp16": PeerKind("flashinfer_xqa", page_size=64),
    "fi_tc_fp8kv": PeerKind("flashinfer_tc", FP8, page_size=64),
    "fi_cc_fp8kv": PeerKind("flashinfer_cc", FP8, page_size=64),
    "fi_xqa_fp8kv": PeerKind("flashinfer_xqa", FP8, page_size=64),
    "fi_fp16": PeerKind("flashinfer"),
    "fi_fp8": PeerKind("flashinfer", FP8, E4M3),
    "bitdec_4bit": PeerKind("bitdecoding", "kv4_channel"),
}


def import_rows(
    measured: Iterable[dict[str, Any]], process: dict[str, Any], stated: bool = False
) -> tuple[list[dict[str, Any]], Counter[str]]:
    """(our rows, how many rows were left out by reason) of the harness's rows.

    ``process`` holds fields of ``PROCESS`` that win over those in the notes; without a note of
    tilebit it must have "gpu", "run" and "date". Rows of other operations, unknown peers, untimed
    ones and those that failed the harness's accuracy check are left out; with ``stated`` also what
    is not of ``STATED``. Raises ``ValueError`` when a row has neither note nor process.
    """
    rows = [row for row in measured if row.get("op") in OPS]
    notes = {_place(row): note for row in rows if (note := _note(row))}
    anywhere = next(iter(notes.values()), {})
    result, left_out = [], Counter()
    for row in rows:
        own = _note(row)
        kind = PEER_KINDS.get(row["peer"])
        if row.get("error") or not row.get("us"):
            left_out["not timed, or wrong"] += 1
        elif not own and kind is None:
            left_out["unknown peer"] += 1
        elif stated and not (kind and kind.impl.startswith(STATED)):
            left_out["measured beside ours"] += 1
        else:
            # The harness starts a new process when a kernel kills one, so a file can hold several:
            # all rows of one place come from one.
            note = notes.get(_place(row), anywhere)
            fields = {name: process.get(name, note.get(name)) for name in PROCESS}
            missing = [name for name in ("run", "gpu", "date") if not fields[name]]
            if missing:
                raise ValueError(
                    f"no row of tilebit says the {', '.join(missing)} of {row['peer']} at {_place(row)}; accepted: a file measured with "
                    f"results/peers/attention_plugin.py, or {', '.join('--' + name for name in missing)}"
                )
            result.append(_converted(row, own, kind, fields, stated))
    return result, left_out


def _place(row: dict[str, Any]) -> tuple[str, int, int, str]:
    return row["op"], row["batch"], row["kv_len"], row["heads"]


def _note(row: dict[str, Any]) -> dict[str, Any]:
    """What our plug-in wrote beside a timed row; empty for other peers, whose notes are prose."""
    if not row["peer"].startswith("tilebit_") or not row.get("note"):
        return {}
    return json.loads(row["note"])


def _converted(row: dict[str, Any], own: dict[str, Any], kind: PeerKind | None, fields: dict[str, Any], stated: bool) -> dict[str, Any]:
    heads_q, heads_kv = (int(count) for count in row["heads"].split("/"))
    decode = row["op"] == "decode"
    if own:
        what = {name: own.get(name) for name in KIND}
    else:
        assert kind is not None
        # A commit of tilebit and a compiler's version say nothing about the kernels of others.
        what = {"impl": kind.impl, "format": kind.format, "variant": kind.variant, "page_size": kind.page_size, "dtype": kind.dtype}
        what |= {"q_len": 1 if decode else row["kv_len"], "schedule": None, "commit": None, "tilelang": None}
    read_gbps = fields["read_gbps"] or _read_gbps(fields["gpu"])
    bytes_moved = row.get("kv_bytes") or (row["gbps"] * row["us"] * 1e3 if decode and row.get("gbps") else None)
    return {
        **fields,
        "op": row["op"],
        "timer": "peer harness",
        "peer": row["peer"],
        **what,
        "batch": row["batch"],
        "kv_len": row["kv_len"],
        "heads_q": heads_q,
        "heads_kv": heads_kv,
        "head_dim": HEAD_DIM,
        "us": row["us"],
        "us_min": row.get("us_min"),
        "bytes": bytes_moved,
        "gbps": row.get("gbps") if decode else None,
        "tflops": row.get("tflops"),
        "read_gbps": read_gbps,
        "floor_us": round(bytes_moved / read_gbps / 1e3, 4) if decode and bytes_moved and read_gbps else None,
        "rel_err": row.get("rel_err"),
        **({"stated": True} if stated else {}),
    }


def _read_gbps(gpu: str) -> float | None:
    """The measured read rate of a device with a reference target."""
    known = (target_from_name(arch) for arch in ARCHES if arch != "cpu")
    return next((target.read_gbps for target in known if target.name == gpu), None)


def main(arguments: list[str] | None = None) -> int:
    """0: imported; 2: the file cannot be read as the harness's rows."""
    parser = argparse.ArgumentParser(
        prog="python -m results.peers.import_attention", description="Append the peer harness's attention rows to results/rows/attention."
    )
    parser.add_argument("file", type=Path, help="JSON written by attn_peers.py")
    for name in ("run", "gpu", "date"):
        parser.add_argument(f"--{name}", help="of every row (default: what tilebit's rows of the same process say)")
    parser.add_argument("--stated", action="store_true", help=f"quote figures of {' and '.join(STATED)} that stood beside nothing of ours")
    parser.add_argument("--out", type=Path, default=ROWS / "attention", help="folder of the rows, one file per device")
    options = parser.parse_args(arguments)
    process = {name: value for name in ("run", "gpu", "date") if (value := getattr(options, name))}
    try:
        rows, left_out = import_rows(json.loads(options.file.read_text()), process, options.stated)
    except (OSError, ValueError, KeyError) as error:
        print(f"import_attention: {options.file}: {error}", file=sys.stderr)
        return 2
    append_by_device("import_attention", options.out, rows, KEY, left_out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
