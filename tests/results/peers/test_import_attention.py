"""Attention rows of the peer harness become rows of the results, each with the provenance of the process that measured it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from results.peers import attention_plugin
from results.peers.import_attention import PEER_KINDS, import_rows, main
from results.report.attention_rows import AttentionRow, beside, read_attention, shown_rows, stated

PROCESS = {"run": "r1", "gpu": "NVIDIA H200", "driver": "580.1", "cuda": "13.0", "torch": "2.11.0", "tilelang": "0.1.15"}
PROCESS |= {"commit": "c" * 40, "date": "2026-01-01T00:00:00", "clocks": {"sm_mhz": 1980, "memory_mhz": 3201}, "read_gbps": 4706.0}
OURS = {"impl": "tilebit", "format": "kv4_channel", "variant": "", "page_size": 128, "dtype": "float16", "q_len": 1, "schedule": {"a": 1}}


def measured(peer: str, us: float | None = 40.0, op: str = "decode", case: tuple[int, int] = (8, 8192), **changes: Any) -> dict[str, Any]:
    """A row as the harness writes it; ``note`` changes fields of our note."""
    note = changes.pop("note", {})
    own = json.dumps({**PROCESS, **OURS, **note}) if peer.startswith("tilebit_") else "num_splits auto"
    row = {"op": op, "peer": peer, "dtype": "fp16", "batch": case[0], "kv_len": case[1], "heads": "32/8", "us": us, "gbps": 3000.0}
    row |= {"tflops": 10.0, "rel_err": 3e-4, "error": "", "us_min": us, "calls": 20, "copies": 2, "kv_bytes": 4706 * 10**5, "note": own}
    return {**row, **changes}


def test_a_row_has_every_field_of_its_process():
    rows, left_out = import_rows([measured("fa3_fp16", 80.0), measured("tilebit_kv4_channel", 20.0)], {})
    peer, ours = rows
    assert not left_out
    assert (peer["impl"], peer["format"], peer["q_len"], peer["us"], peer["rel_err"]) == ("fa3", "kv16", 1, 80.0, 3e-4)
    assert (peer["batch"], peer["kv_len"], peer["heads_q"], peer["heads_kv"], peer["head_dim"]) == (8, 8192, 32, 8, 128)
    assert all(peer[name] == PROCESS[name] for name in PROCESS if name not in ("commit", "tilelang"))
    assert peer["commit"] is peer["tilelang"] is peer["schedule"] is None  # ours says nothing about theirs
    assert (ours["commit"], ours["schedule"], ours["page_size"]) == ("c" * 40, {"a": 1}, 128)
    assert ours["bytes"] == 4706e5 and ours["floor_us"] == 100.0 and ours["gbps"] == 3000.0
    assert [AttentionRow.from_json(row).series for row in rows] == ["fa3 kv16", "tilebit kv4_channel"]
    assert AttentionRow.from_json(ours).place == AttentionRow.from_json(peer).place


def test_a_prefill_has_its_rows_as_queries_and_no_floor():
    (row,), _ = import_rows([measured("sdpa_cudnn", op="prefill", case=(1, 8192))], {"run": "r", "gpu": "NVIDIA H200", "date": "d"})
    assert (row["op"], row["q_len"], row["tflops"]) == ("prefill", 8192, 10.0)
    assert row["floor_us"] is row["gbps"] is None and row["read_gbps"] == 4706.0


@pytest.mark.parametrize("name", PEER_KINDS)
def test_every_peer_is_imported(name: str):
    kind = PEER_KINDS[name]
    rows, left_out = import_rows([measured(name), measured("tilebit_kv16")], {})
    assert not left_out and [row["peer"] for row in rows] == [name, "tilebit_kv16"]
    assert (rows[0]["impl"], rows[0]["format"], rows[0]["variant"]) == (kind.impl, kind.format, kind.variant)


@pytest.mark.parametrize("name", [*attention_plugin.DECODE, *attention_plugin.PREFILL])
def test_every_peer_of_the_plug_in_is_imported(name: str):
    rows, left_out = import_rows([measured(name)], {})
    assert not left_out and [row["peer"] for row in rows] == [name]


def test_rows_that_say_nothing_are_left_out_and_counted():
    rows, left_out = import_rows(
        [
            measured("tilebit_kv4_channel"),
            measured("fa3_fp8", error="rel_err 0.3 > 0.05"),
            measured("sdpa_flash", us=None, error="skipped: budget"),
            measured("somebody_else"),
            {"op": "gemm", "peer": "fa3_fp16"},
        ],
        {},
    )
    assert [row["peer"] for row in rows] == ["tilebit_kv4_channel"]
    assert left_out == {"not timed, or wrong": 2, "unknown peer": 1}


def test_a_restarted_process_is_another_run():
    later = {"run": "r2"}
    rows, _ = import_rows(
        [measured("fa3_fp16"), measured("tilebit_kv16"), measured("fa3_fp16", case=(1, 32768)),
         measured("tilebit_kv16", case=(1, 32768), note=later)],
        {},
    )  # fmt: skip
    assert [row["run"] for row in rows] == ["r1", "r1", "r2", "r2"]


def test_stated_figures_are_quoted_and_never_beside_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "rows.json"
    # As they were published: without bytes, notes and errors.
    bare = {"op": "decode", "dtype": "fp16", "batch": 8, "kv_len": 8192, "heads": "32/8", "gbps": 2000.0}
    file.write_text(json.dumps([{**bare, "peer": name, "us": 41.0} for name in ("bitdec_4bit", "fi_xqa_fp8kv", "fa3_fp16")]))
    assert main([str(file), "--stated", "--out", str(tmp_path / "rows")]) == 2 and "--gpu" in capsys.readouterr().err
    known = ["--run", "stated", "--gpu", "NVIDIA H200", "--date", "2026-01-01", "--out", str(tmp_path / "rows")]
    for expected in ("2 of 2", "0 of 2"):
        assert main([str(file), "--stated", *known]) == 0
        said = capsys.readouterr().out
        assert f"{expected} rows appended" in said and "1 rows left out: measured beside ours" in said
    rows = read_attention(tmp_path / "rows")["NVIDIA H200"]
    assert [(row.impl, row.format, row.stated, row.bytes) for row in rows] == [
        ("bitdecoding", "kv4_channel", True, 82e6), ("flashinfer_xqa", "kvfp8", True, 82e6)
    ]  # fmt: skip
    ours = AttentionRow.from_json(import_rows([measured("tilebit_kv4_channel")], {})[0][0])
    assert beside(ours, [*rows, ours]) == [] and stated(ours, [*rows, ours]) == rows
    assert shown_rows(rows, "decode") == {}  # nothing of ours stands there
    assert set(shown_rows([*rows, ours], "decode")[ours.place]) == {row.series for row in (*rows, ours)}


def test_every_peer_has_a_line_of_its_own():
    series = {(kind.impl, kind.format, kind.variant) for kind in PEER_KINDS.values()}
    assert len(series) == len(PEER_KINDS)


def test_a_row_beside_peers_is_shown_before_a_newer_one_without():
    def row(impl: str, us: float, run: str, date: str) -> AttentionRow:
        (data,), _ = import_rows([measured("tilebit_kv4_channel", us, note={"impl": impl, "run": run, "date": date})], {})
        return AttentionRow.from_json(data)

    old, peer = row("tilebit", 10.0, "r1", "2026-01-01"), row("fa3", 30.0, "r1", "2026-01-01")
    alone, lonely_peer = row("tilebit", 5.0, "r2", "2026-02-01"), row("fa3", 1.0, "r3", "2026-03-01")
    (line,) = shown_rows([old, peer, alone, lonely_peer], "decode").values()
    assert line["tilebit kv4_channel"] is old and line["fa3 kv4_channel"] is peer
    newer, its_peer = row("tilebit", 9.0, "r4", "2026-04-01"), row("fa3", 31.0, "r4", "2026-04-01")
    (line,) = shown_rows([newer, its_peer, old, peer, alone], "decode").values()
    assert line["tilebit kv4_channel"] is newer and line["fa3 kv4_channel"] is its_peer


@pytest.mark.parametrize("text", ["{", '[{"op": "decode", "peer": "fa3_fp16", "us": 1.0}]'])
def test_a_file_of_something_else_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str):
    file = tmp_path / "rows.json"
    file.write_text(text)
    assert main([str(file), "--out", str(tmp_path)]) == 2
    assert "rows.json" in capsys.readouterr().err


def test_a_bad_row_is_named(tmp_path: Path):
    rows, _ = import_rows([measured("tilebit_kv4_channel")], {})
    (tmp_path / "x.jsonl").write_text(json.dumps({**rows[0], "us": 0}))
    with pytest.raises(ValueError, match=r"x.jsonl, line 1: us is 0; accepted"):
        read_attention(tmp_path)
    (tmp_path / "x.jsonl").write_text('{"op": "decode"}')
    with pytest.raises(ValueError, match=r"x.jsonl, line 1: not a measured row"):
        read_attention(tmp_path)
