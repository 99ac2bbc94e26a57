"""What is said about attention rows: ratios to peers of the same process, figures that others stated, paging, movers, ideas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from results.report.ablation import attention_ablation_section, read_ablation
from results.report.attention import against, attention_section, bars_table, decode_rows, paged_ratios
from results.report.attention_rows import AttentionRow
from results.report.headline import NO_ROWS, results_table
from results.report.plots import decode_speedups, draw

GPU = "NVIDIA H200"


def row(impl: str = "tilebit", format: str = "kv4_channel", us: float = 10.0, **changes: Any) -> AttentionRow:
    place = {"op": "decode", "batch": 32, "kv_len": 4096, "q_len": 1, "heads_q": 32, "heads_kv": 8, "head_dim": 128}
    fields = {"impl": impl, "format": format, "dtype": "float16", "us": us, "run": "r1", "gpu": GPU, "date": "2026-01-01", **place}
    return AttentionRow.from_json({"commit": "0123456789abcdef", "cuda": "13.0", "rel_err": 3e-4, "floor_us": 5.0, **fields, **changes})


def quoted(impl: str, format: str, us: float, **changes: Any) -> AttentionRow:
    return row(impl, format, us, **{"run": "stated", "date": "2025-01-01", "stated": True, "rel_err": None, **changes})


def lines_of(text: str) -> list[list[str]]:
    """The cells of the markdown tables' lines."""
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith("| ")]


def test_ratios_are_geometric_means_over_the_cases_of_the_main_heads():
    heads_64 = {"heads_q": 64, "us": 20.0}
    rows = [row(), row("fa3", "kv16", 40.0), row(**heads_64), row("fa3", "kv16", **{**heads_64, "us": 20.0})]
    rows += [row(heads_kv=32, floor_us=9.0), row("fa3", "kv16", 25.0, heads_kv=32)]  # its share of the read rate is not one of the main
    _, _, *lines = lines_of(bars_table(rows))
    assert lines == [["kv4_channel", "**2.00** (1.00 at 32 x 4,096)", "**2.50** (2.50 at 32 x 4,096)", *lines[0][3:]]]
    assert lines[0][3] == lines[0][1] and lines[0][4:6] == ["-", "-"] and lines[0][6] == "25% to 50%"
    assert bars_table([row(), quoted("bitdecoding", "kv4_channel", 30.0)]) == ""  # nothing was timed beside it


def test_only_rows_of_the_same_process_count_but_stated_ones_may_be_quoted():
    ours, fa3 = row(), row("fa3", "kv16", 40.0)
    rows = [
        ours,
        fa3,
        row("sdpa_cudnn", "kv16", 30.0),
        row("fa3", "kvfp8", 25.0),
        row("fa3", "kv16", 1.0, run="r2"),
        row("fa3", "kvfp8", 1.0, run="r2"),
        row("tilebit_pdl", us=1.0),
        row("tilebit", "kvfp8", 1.0),
        quoted("flashinfer_xqa", "kvfp8", 20.0, variant="page 64"),
        quoted("flashinfer_xqa", "kv16", 2.0, variant="page 64"),
        quoted("bitdecoding", "kv4_channel", 15.0),
    ]
    _, _, *lines = lines_of(bars_table(rows))
    ratios = [cell.split(" (")[0].strip("*") for cell in next(line for line in lines if line[0] == "kv4_channel")[1:6]]
    assert ratios == ["4.00", "-", "3.00", "2.00", "1.50"]
    found = against(rows, "tilebit kv4_channel", lambda _: [fa3])
    assert [(ratio.ours, ratio.value) for ratio in found] == [(ours, 4.0)]


def test_the_section_shows_every_series_and_marks_what_was_stated():
    rows = [row(bytes=1e8), row("fa3", "kv16", 40.0, bytes=4e8), row("tilebit_pdl", us=8.0, bytes=1e8)]
    rows += [quoted("bitdecoding", "kv4_channel", 64.8), row(us=5.0, kv_len=1024, batch=128), row("lonely", "kv16", 1.0, run="r9")]
    section = attention_section({GPU: rows})
    table = {line[0]: line[1:] for line in lines_of(section.split("<summary>heads 32/8 x 128: every case</summary>")[1])}
    assert table["tilebit kv4_channel"] == ["10.0 (4.00x, 50%)", "5.00 (100%)", "3.0e-04"]  # no FA3 beside the second: no ratio
    assert table["fa3 kv16"] == ["40.0 (12%)", "-", "3.0e-04"] and table["tilebit_pdl kv4_channel"][0] == "8.00 (5.00x, 62%)"
    assert table["bitdecoding kv4_channel †"] == ["64.8", "-", "-"] and "lonely" not in section
    assert "0123456789ab" in section and "stated, another run" in section and section.count("<details>") == section.count("</details>")
    order = [section.index(f"\n| {name} |") for name in ("tilebit kv4_channel", "tilebit_pdl kv4_channel", "fa3 kv16", "bitdecoding")[:3]]
    assert order == sorted(order) and "_attention_decode.svg" in section
    assert attention_section({GPU: [quoted("bitdecoding", "kv4_channel", 64.8)]}) == ""


def test_a_prefill_is_compared_with_the_fastest_16_bit_peer():
    prompt: dict[str, Any] = {"op": "prefill", "batch": 1, "kv_len": 8192, "q_len": 8192, "floor_us": None}
    rows = [row("tilebit", "kv4_channel", 1000.0, variant="history, two halves", tflops=500.0, **prompt)]
    rows += [row("fa3", "kv16", 900.0, tflops=555.5, **prompt), row("sdpa_cudnn", "kv16", 950.0, **prompt)]
    rows += [row("fa3", "kvfp8", 700.0, **prompt), quoted("flashinfer", "kv16", 800.0, tflops=600.0, **prompt)]
    table = {line[0]: line[1] for line in lines_of(attention_section({GPU: rows}))}
    assert table["tilebit kv4_channel history, two halves"] == "1,000 (500, 0.90x)"
    assert table["fa3 kv16"] == "900 (556)" and table["flashinfer kv16 †"] == "800 (600)"


def test_paging_is_compared_with_the_contiguous_cache_of_the_same_process():
    rows = [row(us=10.0), row(us=10.5, variant="page 64", page_size=64), row(us=9.0, run="r2")]
    rows += [row(us=12.0, variant="page 16", page_size=16)]
    rows += [row(us=1.0, run="r3", date="2026-05-01", variant="page 128")]  # alone in its process
    found = {ratio.ours.variant: ratio.value for ratio in paged_ratios(rows)}
    assert found == {"page 16": pytest.approx(10 / 12), "page 64": pytest.approx(10 / 10.5)}
    assert "| kv4_channel, page 64 | 1 | **0.95** | 0.95 (32 x 4,096, heads 32/8) |" in attention_section({GPU: rows})


def test_movers_and_several_queries():
    append: dict[str, Any] = {"op": "append", "heads_q": 8, "batch": 128, "kv_len": 1088}
    rows = [row(us=4.0, variant="none fills up", **append), row(us=40.0, variant="all fill up", **append)]
    rows += [row(us=us, q_len=q_len) for q_len, us in ((1, 10.0), (4, 12.0))] + [row(format="kv8_channel")]
    section = attention_section({GPU: rows})
    assert "| append | kv4_channel | 128 x 1 | none fills up | 8 | 4.00 (125%) |" in section
    assert "| kv4_channel, heads 32/8, 32 x 4,096 | 10.0 | 12.0 |" in section and "kv8_channel, heads" not in section
    assert [r.q_len for r in decode_rows(rows)] == [1, 1]


def test_a_line_of_q_lens_is_of_one_process():
    """The newest with several: a single row of a newer process, or one beside a peer, is no part of it."""
    rows = [row(us=us, q_len=q_len) for q_len, us in ((1, 10.0), (2, 11.0))]
    rows += [row(us=us, q_len=q_len, run="r2", date="2026-02-01") for q_len, us in ((1, 8.0), (4, 9.5))]
    rows += [row(us=5.0, run="r3", date="2026-03-01"), row("fa3", "kv16", 40.0, run="r3", date="2026-03-01")]
    section = attention_section({GPU: rows})
    (line,) = (line for line in lines_of(section) if line[0] == "kv4_channel, heads 32/8, 32 x 4,096")
    assert line[1:] == ["8.00", "9.50"] and "q_len 2" not in section
    assert "5.00 (8.00x" in section  # the row beside a peer stands in the table of decode


def test_caches_stand_from_wide_to_narrow_and_then_by_page_size():
    names = [("kv8_channel", None), ("kv4_channel", None), *(("kv4_channel", size) for size in (16, 64, 128, 256)), ("kv2_channel", None)]
    rows = [row(format=f, us=10.0 + (size or 0) / 100, variant=f"page {size}" if size else "", page_size=size or 128) for f, size in names]
    rows += [row(format=f, op="append", variant=v, bytes=9.0) for f in ("kv4_channel", "kv16") for v in ("none fills up", "all fill up")]
    lines = lines_of(attention_section({GPU: rows[::-1]}))
    shown = [line[0] for line in lines if line[0].startswith("tilebit")]
    assert shown == [f"tilebit {f}" + (f" page {size}" if size else "") for f, size in names]
    appends = [(line[3], line[1]) for line in lines if line[0] == "append"]
    assert appends == [(v, f) for v in ("all fill up", "none fills up") for f in ("kv16", "kv4_channel")]


def test_processes_are_named_whose_rows_are_shown():
    rows = [row(), row(run="r2", date="2026-02-01"), row(run="r2", variant="page 16", page_size=16)]
    rows += [row(run="r3", q_len=q_len) for q_len in (1, 2)]
    stamps = lines_of(attention_section({GPU: rows}).split("Processes that these rows come from")[1])
    assert [line[0] for line in stamps[2:]] == ["r2", "r3"]


def test_the_short_table_has_decode_beside_fa3():
    assert results_table({}, {}) == results_table({}, {GPU: [row()]}) == NO_ROWS
    text = results_table({}, {GPU: [row(), row("fa3", "kv16", 40.0)]})
    assert "**4.00**" in text and "| 0123456789ab |" in text


def test_the_plot_shows_speedups_over_fa3(tmp_path: Path):
    rows = [row(), row("fa3", "kv16", 40.0), row("fa3", "kvfp8", 20.0), row(us=1.0, variant="page 16"), row("tilebit_pdl", us=1.0)]
    rows += [quoted("bitdecoding", "kv4_channel", 50.0)]
    (points,) = decode_speedups(rows).values()
    assert points == {
        "tilebit kv4_channel": {(32, 4096): 4.0}, "fa3 kvfp8": {(32, 4096): 2.0}, "bitdecoding kv4_channel †": {(32, 4096): 0.8}
    }  # fmt: skip
    files = {path.name: path.read_bytes() for path in draw({}, {}, tmp_path, {GPU: rows})}
    assert set(files) == {"nvidia_h200_attention_decode.png", "nvidia_h200_attention_decode.svg"}
    assert b"tilebit kv4_channel" in files["nvidia_h200_attention_decode.svg"]
    assert files == {path.name: path.read_bytes() for path in draw({}, {}, tmp_path, {GPU: rows})}
    assert draw({}, {}, tmp_path, {GPU: [row()]}) == []


def test_the_ablation_of_attention_stands_in_a_folder_of_its_own(tmp_path: Path):
    assert attention_ablation_section(tmp_path / "attention") == ""
    base = {"gpu": GPU, "format": "kv4_channel", "batch": 32, "kv_len": 4096, "heads_q": 32, "heads_kv": 8}
    rows = [{**base, "run": "a0", "step": 0, "idea": "tried once", "us": 900.0}]
    rows += [{**base, "run": "a1", "step": s, "idea": i, "us": us} for s, i, us in ((0, "shuffles", 100.0), (1, "induced packing", 40.0))]
    (tmp_path / "attention").mkdir()
    file = tmp_path / "attention" / "h200.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    section = attention_ablation_section(tmp_path / "attention")
    assert lines_of(section)[-1] == ["1", "induced packing", "40.0 (2.50x)"] and "tried once" not in section
    assert "kv4_channel, 32 x 4,096, heads 32/8" in section and read_ablation(tmp_path) == []
    later = {**base, "kv_len": 1024, "run": "a2"}
    with file.open("a") as lines:
        lines.writelines(
            json.dumps({**later, "step": s, "idea": i, "us": us}) + "\n" for s, i, us in ((1, "packing", 30.0), (2, "warps", 10.0))
        )
    section = attention_ablation_section(tmp_path / "attention")
    assert [line[3] for line in lines_of(section)[-3:]] == ["-", "30.0", "10.0 (3.00x)"]  # since the first that has a time, as it says
    assert "first step of that case that has a time" in section
    file.write_text('{"gpu": "x"}\n')
    with pytest.raises(ValueError, match="line 1: run, step, idea"):
        attention_ablation_section(tmp_path / "attention")
