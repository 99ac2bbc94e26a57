"""Rows of the peer harness become rows of the results, each with the provenance of the process that measured it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from results.peers import peers_plugin
from results.peers.import_peers import ALONE, CLASSES, PEER_KINDS, PeerKind, import_rows, main, peer_kind
from results.report.rows import Row, read_rows

NOTE = {"run": "r1", "gpu": "NVIDIA H200", "driver": "580.1", "cuda": "13.0", "torch": "2.11.0", "tilelang": "0.1.15", "commit": "c" * 40}
NOTE |= {"date": "2026-01-01T00:00:00", "schedule": {"block_n": 64}}


def measured(peer: str, us: float | None = 8.0, m: int = 1, note: Any = "", **changes: Any) -> dict[str, Any]:
    """A row as the harness writes it."""
    if peer.startswith("tilebit") and not note:
        note = json.dumps(NOTE)
    row = {"op": "gemm", "peer": peer, "dtype": "w4a16", "N": 4096, "K": 8192, "M": m, "us": us, "gbps": 1.0, "tflops": 1.0}
    return {**row, "rel_err": 3e-4, "error": "", "us_min": us, "copies": 8, "calls": 64, "note": note, **changes}


def by_peer(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["peer"]: row for row in rows}


def test_a_row_has_every_field_of_its_process():
    rows, left_out = import_rows([measured("marlin_u4zp", 9.0, us_min=8.5, note="prose"), measured("tilebit_w4a16_asym", 7.0)], {})
    peer, ours = rows
    assert not left_out
    assert (peer["impl"], peer["format"], peer["group_size"], peer["symmetric"]) == ("marlin", "w4a16", 128, False)
    assert (peer["m"], peer["n"], peer["k"], peer["us"], peer["us_min"], peer["rel_err"]) == (1, 4096, 8192, 9.0, 8.5, 3e-4)
    assert {name: peer[name] for name in ("run", "gpu", "driver", "cuda", "torch", "date")} == {
        name: NOTE[name] for name in ("run", "gpu", "driver", "cuda", "torch", "date")
    }
    assert peer["timer"] == ours["timer"] == "peer harness"
    assert peer["commit"] is peer["schedule"] is None  # ours says nothing about theirs
    assert ours["commit"] == NOTE["commit"] and ours["schedule"] == NOTE["schedule"] and ours["run"] == peer["run"]
    assert [Row.from_json(row).series for row in rows] == ["marlin w4a16_g128_asym", "tilebit w4a16_g128_asym"]


def test_rows_say_how_their_process_took_turns():
    note = json.dumps({**NOTE, "timer": peers_plugin.TIMER})
    rows, _ = import_rows([measured("marlin_u4zp"), measured("tilebit_w4a16_asym", note=note)], {})
    assert [row["timer"] for row in rows] == [peers_plugin.TIMER] * 2


def test_rows_that_were_timed_alone_say_so(tmp_path: Path):
    file = tmp_path / "measured.json"
    file.write_text(
        json.dumps([measured("marlin_u4zp"), measured("tilebit_w4a16_asym", note=json.dumps({**NOTE, "timer": peers_plugin.TIMER}))])
    )
    assert main([str(file), "--alone", "--out", str(tmp_path / "rows")]) == 0
    assert [row.timer for row in read_rows(tmp_path / "rows")["NVIDIA H200"]] == [ALONE] * 2


def test_every_name_of_the_plug_in_and_the_baselines_has_a_kind():
    for peer in peers_plugin.peers():
        kind = peer_kind(peer.name)
        assert kind is not None and (kind.symmetric, kind.dtype) == (peer.format.symmetric, peer.x_dtype)
        assert kind.format == f"w{peer.format.bits}a16" and kind.group_size == peer.format.group_size
        assert kind.impl == ("tilebit_pdl" if peer.dependent else "tilebit")
    assert peer_kind("torch_bf16") == PeerKind("cublas", "bf16", None, "bfloat16", None)
    assert peer_kind("somebody_else") is None and peer_kind("tilebit_w2a16_sym") is None
    names = {(kind.impl, kind.format, kind.symmetric, kind.dtype, kind.group_size) for kind in PEER_KINDS.values()}
    assert len(names) == len(PEER_KINDS)  # no two peers share a column


@pytest.mark.parametrize("name", [*PEER_KINDS, *(peer.name for peer in peers_plugin.peers())])
def test_every_peer_is_imported(name: str):
    kind = peer_kind(name)
    assert kind is not None
    rows, left_out = import_rows([measured(name), measured("tilebit_w4a16_sym", m=2)], {}, (*CLASSES, kind.kernel_class))
    assert not left_out and [row["peer"] for row in rows] == [name, "tilebit_w4a16_sym"]
    assert (rows[0]["impl"], rows[0]["format"], rows[0]["symmetric"], rows[0]["dtype"]) == (
        kind.impl,
        kind.format,
        kind.symmetric,
        kind.dtype,
    )


def test_rows_that_say_nothing_are_left_out_and_counted():
    rows, left_out = import_rows(
        [
            measured("tilebit_w4a16_sym"),
            measured("marlin_u4b8", error="rel_err 0.3 > 0.01"),
            measured("humming_w4a16", us=None, error="prepare: no compiler"),
            measured("humming_w4a8_int8"),
            measured("vllm_fp8"),
            measured("somebody_else"),
            {"op": "copy", "peer": "torch copy_"},
        ],
        {},
    )
    assert list(by_peer(rows)) == ["tilebit_w4a16_sym"]
    assert left_out == {"not timed, or wrong": 2, "class w4a8": 1, "class w8a8": 1, "unknown peer": 1}
    rows, _ = import_rows([measured("tilebit_w4a16_sym"), measured("humming_w4a8_int8"), measured("vllm_fp8")], {}, ("w4a8", "w8a8"))
    assert [Row.from_json(row).series for row in rows] == ["humming w4a8_int8", "vllm w8a8_fp8"]


def test_a_restarted_process_is_another_run():
    """After a crash the harness goes on in a new process: its rows are compared among themselves."""
    again = json.dumps({**NOTE, "run": "r2"})
    rows, _ = import_rows(
        [
            measured("tilebit_w4a16_sym"),
            measured("marlin_u4b8"),
            measured("marlin_u4b8", m=16),
            measured("tilebit_w4a16_sym", m=16, note=again),
        ],
        {},
    )
    assert [(row["m"], row["run"]) for row in rows] == [(1, "r1"), (1, "r1"), (16, "r2"), (16, "r2")]


def test_without_a_note_the_process_must_be_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([measured("marlin_u4b8")]))
    assert main([str(file), "--out", str(tmp_path / "gemm")]) == 2
    assert "--gpu" in capsys.readouterr().err and not (tmp_path / "gemm").exists()
    assert main([str(file), "--out", str(tmp_path / "gemm"), "--run", "old", "--gpu", "Some GPU 2", "--date", "2026-01-01"]) == 0
    assert [row.run for row in read_rows(tmp_path / "gemm")["Some GPU 2"]] == ["old"]
    assert [path.name for path in (tmp_path / "gemm").iterdir()] == ["some-gpu-2.jsonl"]


def test_importing_twice_appends_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([measured("marlin_u4b8"), measured("tilebit_w4a16_sym"), measured("tilebit_w4a16_sym_pdl", 6.0)]))
    for expected in ("3 of 3", "0 of 3"):
        assert main([str(file), "--out", str(tmp_path)]) == 0
        assert f"{expected} rows appended" in capsys.readouterr().out
    assert len(read_rows(tmp_path)["NVIDIA H200"]) == 3
    assert main([str(file), "--out", str(tmp_path), "--run", "another"]) == 0
    assert len(read_rows(tmp_path)["NVIDIA H200"]) == 6


@pytest.mark.parametrize("text", ["{", '[{"op": "gemm"}]'])
def test_a_file_of_something_else_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str):
    file = tmp_path / "rows.json"
    file.write_text(text)
    assert main([str(file), "--out", str(tmp_path)]) == 2
    assert "rows.json" in capsys.readouterr().err
