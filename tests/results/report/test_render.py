"""The results pages say what the rows say, whichever rows there are."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from results.report import render
from results.report.gemm import gemm_section
from results.report.headline import NO_ROWS, results_table, times_table
from results.report.markdown import number, short_commit, slug
from results.report.overheads import overheads_section
from results.report.problems import baseline, problems
from results.report.render import between_markers, main
from results.report.rows import Row, rates, read_rows

MARKERS = ("support", "results")


def row(impl: str = "tilebit", format: str = "w4a16", us: float = 10.0, **changes: Any) -> dict[str, Any]:
    shape = {"m": 1, "n": 4096, "k": 4096, "group_size": 128 if format.startswith("w") else None, "dtype": "float16"}
    times = {"us": us, "us_p20": us * 0.99, "us_p80": us * 1.01, "rel_err": 3e-4}
    versions = {"driver": "580.1", "cuda": "13.0", "torch": "2.11.0", "tilelang": "0.1.15", "commit": "0123456789abcdef"}
    where = {"run": "r1", "gpu": "NVIDIA H200", "date": "2026-01-01T00:00:00", "schedule": {"block_n": 64}}
    row = {"op": "gemm", "impl": impl, "format": format, **shape, **times, **versions, **where}
    return {**row, **changes}


def write(root: Path, rows: list[dict[str, Any]], name: str = "nvidia_h200") -> Path:
    folder = root / "results" / "rows" / "gemm"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    marked = "".join(f"<!-- {name}:begin -->\nold\n<!-- {name}:end -->\n" for name in MARKERS)
    (root / "README.md").write_text(f"before\n{marked}after\n")
    return folder


def devices(tmp_path: Path, rows: list[dict[str, Any]]) -> dict[str, list[Row]]:
    return read_rows(write(tmp_path, rows))


def test_a_ratio_is_the_baselines_time_over_ours(tmp_path: Path):
    page = gemm_section(devices(tmp_path, [row(us=8.0), row("cublas", "fp16", us=12.0), row("marlin", us=6.0)]))
    assert "| m | cublas fp16 | tilebit w4a16_g128 | marlin w4a16_g128 |" in page
    assert "8.00 (1.50x, " in page and "6.00 (2.00x, " in page
    assert "12.0 (0.67x" not in page and "12.0 (1.00x" not in page  # the baseline has no ratio to itself
    assert "NVIDIA H200" in page and "0123456789ab" in page and "2026-01-01" in page and "580.1" in page


def test_the_floor_is_the_longer_of_reading_and_computing():
    reading, computing = Row.from_json(row(m=1)), Row.from_json(row(m=4096))
    ceiling = rates([reading])
    assert ceiling is not None and (ceiling.read_gbps, ceiling.mma_tflops) == (4706.0, 656.0)
    read_us = (4096 * 4096 // 2 + 4096 * 32 * 2 + 2 * 8192) / 4706e3
    compute_us = 2 * 4096**3 / 656e6
    assert ceiling.floor_us(reading) == pytest.approx(read_us)
    assert ceiling.floor_us(computing) == pytest.approx(compute_us)


def test_the_share_of_the_floor_is_in_the_cell(tmp_path: Path):
    ceiling = rates([Row.from_json(row())])
    assert ceiling is not None
    us = ceiling.floor_us(Row.from_json(row())) * 2
    assert "(50%)" in gemm_section(devices(tmp_path, [row(us=us)]))


def test_rates_in_the_rows_win_and_an_unknown_device_has_none(tmp_path: Path):
    assert rates([Row.from_json(row(gpu="Some CPU"))]) is None
    own = rates([Row.from_json(row(gpu="Some CPU", read_gbps=20.0, mma_tflops=0.5))])
    assert own is not None and own.read_gbps == 20.0
    page = gemm_section(devices(tmp_path, [row(gpu="Some CPU", us=8.0), row("torch", "bf16", us=16.0, gpu="Some CPU")]))
    assert "8.00 (2.00x)" in page and "roofline" not in page.split("## Some CPU")[1].replace("no roofline", "")


def test_times_of_different_processes_are_not_compared(tmp_path: Path):
    old = [row(us=20.0), row("cublas", "fp16", us=40.0)]
    new = [row(us=10.0, run="r2", date="2026-02-01"), row("torch", "fp16", us=15.0, run="r2", date="2026-02-01")]
    page = gemm_section(devices(tmp_path, old + new))
    assert "10.0 (1.50x, " in page and "20.0" not in page and "cublas fp16" not in page
    assert "| r2 |" in page and "| r1 |" not in page


def test_a_run_of_peers_alone_does_not_hide_ours(tmp_path: Path):
    shown = problems(devices(tmp_path, [row(), row("marlin", run="r2", date="2026-02-01")])["NVIDIA H200"])
    assert shown[0].runs == ["r1"]


def test_widths_are_shown_apart(tmp_path: Path):
    rows = [row(us=8.0), row(us=9.0, format="w8a16"), row("cublas", "fp16", us=12.0)]
    shown = problems(devices(tmp_path, rows)["NVIDIA H200"])
    assert [p.series for p in shown] == [["cublas fp16", f"tilebit w{bits}a16_g128"] for bits in (4, 8)]


def test_a_run_of_another_width_or_without_peers_hides_nothing(tmp_path: Path):
    first = [row(), row("cublas", "fp16", us=12.0), row("marlin", us=11.0)]
    later = [row(us=5.0, format="w8a16"), row("cublas", "fp16", us=13.0), row(us=9.0)]
    shown = problems(devices(tmp_path, first + [{**r, "run": "r2", "date": "2026-02-01"} for r in later])["NVIDIA H200"])
    assert [(p.bits, p.runs) for p in shown] == [(4, ["r1"]), (8, ["r2"])]
    assert [p.lines[1]["cublas fp16"].us for p in shown] == [12.0, 13.0]  # each beside the baseline of its own process


def test_missing_measurements_are_dashes(tmp_path: Path):
    rows = [row(), row(m=16), row("cublas", "fp16"), row("marlin", m=16, rel_err=None)]
    page = gemm_section(devices(tmp_path, rows))
    lines = {line.split(" | ")[0].strip("| "): line for line in page.splitlines() if line.startswith("| ")}
    assert lines["1"].endswith("| - |")
    assert lines["16"].split(" | ")[1] == "-" and "x" not in lines["16"]  # no baseline in the line: no ratio
    assert lines["rel. error"].endswith("| - |")


def test_cublas_is_the_baseline_before_torch():
    line = {name: Row.from_json(row(name, "fp16")) for name in ("torch", "cublas")}
    found = baseline(line)
    assert found is not None and found.impl == "cublas"
    assert baseline({"x": Row.from_json(row("torch_int4", "w4a16"))}) is None


@pytest.mark.parametrize(
    ("changes", "series"),
    [
        ({}, "tilebit w4a16_g128"),
        ({"format": "w8a16", "group_size": -1}, "tilebit w8a16_channel"),
        ({"format": "w4a16_g64_asym", "group_size": 64}, "tilebit w4a16_g64_asym"),
        ({"format": "w4a16", "symmetric": False}, "tilebit w4a16_g128_asym"),
        ({"format": "fp16"}, "tilebit fp16"),
        ({"format": "w4a8", "impl": "humming"}, "humming w4a8"),
    ],
)
def test_series_names(changes: dict[str, Any], series: str):
    assert Row.from_json(row(**changes)).series == series


def test_asymmetric_weights_move_more_bytes():
    assert Row.from_json(row(format="w4a16_g128_asym")).bytes - Row.from_json(row()).bytes == 4096 * 32 * 2


def test_readme_table(tmp_path: Path):
    rows = [row(us=8.0), row("cublas", "fp16", us=12.0), row(us=700.0, m=4096), row(us=9.0, format="w8a16"), row(us=1.0, dtype="bfloat16")]
    (gpu, found), *_ = devices(tmp_path, rows).items()
    text = times_table(gpu, found)
    assert "| 4096 x 4096 | 8.00 (1.50x) | 700 |" in text
    assert "w8a16" not in text and "1.00" not in text


@pytest.fixture
def claimed(monkeypatch: pytest.MonkeyPatch) -> str:
    """In the place of the support table, which is no matter of rows and takes the rules half a minute: ``tests/test_readme.py`` compares
    the real one with what the same function writes."""
    monkeypatch.setattr(render, "support_table", lambda: "what runs where")
    return "<!-- support:begin -->\nwhat runs where\n<!-- support:end -->"


def test_without_rows(tmp_path: Path, claimed: str):
    assert gemm_section({}) == "" and results_table({}, {}) == NO_ROWS
    write(tmp_path, [])
    assert main(["--root", str(tmp_path)]) == 0
    readme = (tmp_path / "README.md").read_text()
    assert NO_ROWS in readme and claimed in readme


@pytest.mark.slow
def test_the_command_writes_pages_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str], claimed: str):
    write(tmp_path, [row(m=m, us=us) for m, us in ((1, 8.0), (4096, 700.0))] + [row("cublas", "fp16", us=12.0)])
    write(tmp_path, [row(gpu="Some CPU"), row("torch", "bf16", gpu="Some CPU")], name="some_cpu")
    assert main(["--root", str(tmp_path), "--check"]) == 1
    assert "make results" in capsys.readouterr().err
    assert main(["--root", str(tmp_path)]) == 0
    readme = (tmp_path / "README.md").read_text()
    assert readme.startswith("before\n") and readme.endswith("after\n") and "old" not in readme and "1.50 (4096 x 4096, m = 1)" in readme
    assert claimed in readme
    assert "8.00 (1.50x)" in (tmp_path / "results" / "README.md").read_text()
    page = (tmp_path / "results" / "pages" / "gemm.md").read_text()
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / "results" / "plots").iterdir()}
    plots = ("nvidia_h200_w4a16_speed", "nvidia_h200_roofline", "some_cpu_w4a16_speed")
    assert set(files) == {f"{name}.{kind}" for name in plots for kind in ("png", "svg")}
    for name in plots:
        assert f"(../plots/{name}.svg)" in page
    drawn = [(tmp_path / "results" / "plots" / f"{name}.svg").read_text() for name in plots]
    assert ">floor<" in drawn[0] and ">floor<" not in drawn[2]
    assert main(["--root", str(tmp_path), "--check"]) == 0
    (tmp_path / "results" / "plots" / "no_device_speed.svg").write_text("rows were dropped")
    assert main(["--root", str(tmp_path)]) == 0
    assert files == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / "results" / "plots").iterdir()}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2"),
        ('{"op": "gemm"}', "not a measured row"),
        (json.dumps(row(us=0)), "positive"),
        (json.dumps({**row(), "us": "fast"}), "positive"),
        ("[1]", "line 2"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, said: str):
    folder = write(tmp_path, [row()])
    with (folder / "nvidia_h200.jsonl").open("a") as file:
        file.write(line + "\n")
    assert main(["--root", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert said in error and "nvidia_h200.jsonl" in error
    assert not (tmp_path / "results" / "README.md").exists()


@pytest.mark.parametrize(
    "text", ["none", "<!-- a:begin -->", "<!-- a:end --><!-- a:begin -->", "<!-- a:begin --><!-- a:begin --><!-- a:end -->"]
)
def test_lost_markers_are_an_error(text: str):
    with pytest.raises(ValueError, match="markers back"):
        between_markers(text, "a", "new")


def test_small_things():
    assert short_commit("0123456789abcdef-dirty") == "0123456789ab-dirty" and short_commit(None) == ""
    assert slug("NVIDIA RTX A6000") == "nvidia_rtx_a6000"
    assert slug("Intel(R) Xeon(R) CPU @ 2.60GHz") == "intel_r_xeon_r_cpu_2_60ghz"
    assert [number(us) for us in (6.926, 18.04, 1238.6)] == ["6.93", "18.0", "1,239"]


def test_overheads_show_the_newest_run_and_name_a_bad_row(tmp_path):
    assert overheads_section(tmp_path) == ""
    first = {
        "gpu": "Some GPU",
        "run": "a",
        "commit": "f" * 40,
        "impl": "tilebit",
        "what": "host time",
        "unit": "us",
        "value": 12.5,
        "n": 8,
        "k": 16,
    }
    second = {**first, "run": "b", "value": 9.25, "split_k": 4}
    path = tmp_path / "some-gpu.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (first, second)))
    section = overheads_section(tmp_path)
    assert "| tilebit | host time | 8 x 16, split-k 4 | 9.25 us |" in section and "12.5" not in section
    path.write_text(json.dumps({key: value for key, value in first.items() if key != "unit"}))
    with pytest.raises(ValueError, match=r"some-gpu.jsonl, line 1: unit missing"):
        overheads_section(tmp_path)
