"""What is said about many rows at once: ratios to the fastest peer, the memory's rate, chains, ideas and choices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from results.report.ablation import ablation_section, liquid_ablation_section, read_ablation, sums_ablation_section
from results.report.chains import chain_section, chain_table, read_chains
from results.report.gemm import gemm_section
from results.report.headline import results_table
from results.report.plots import draw
from results.report.problems import comparisons, geometric_mean, is_peer
from results.report.ranker import ranker_section
from results.report.rows import Rates, Row
from results.report.summary import bandwidth_table, bars_table, ratio_tables

CEILING = Rates(4706.0, 656.0)


def row(impl: str = "tilebit", us: float = 10.0, m: int = 1, format: str = "w4a16", symmetric: bool | None = True, **changes: Any) -> Row:
    fields = {
        "op": "gemm",
        "impl": impl,
        "format": format,
        "dtype": "float16",
        "m": m,
        "n": 28672,
        "k": 4096,
        "us": us,
        "symmetric": symmetric,
    }
    return Row.from_json({**fields, "run": "r1", "gpu": "NVIDIA H200", "date": "2026-01-01", "group_size": 128, "cuda": "13.0", **changes})


def lines_of(table: str) -> list[list[str]]:
    """The cells of a markdown table's lines, header first."""
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines() if line.startswith("| ")]


def test_the_fastest_peer_is_of_the_same_class_and_process():
    rows = [
        row(us=10.0),
        row("marlin", 9.0),
        row("machete", 8.0, symmetric=False),  # pooled with the symmetric ones
        row("humming", 1.0, format="w8a16"),
        row("humming", 1.0, format="w4a8_int8"),
        row("gemlite", 1.0, group_size=64),
        row("gemlite", 1.0, dtype="bfloat16"),
        row("gemlite", 1.0, run="r2"),
        row("cublas", 1.0, format="fp16", symmetric=None, group_size=None),
        row("torch-int4", 1.0),
        row("tilebit_pdl", 1.0),
        row("marlin", 1.0, m=2),
    ]
    found = comparisons(rows)
    assert list(found) == ["w4a16_g128, float16"]
    (comparison,) = found["w4a16_g128, float16"]
    assert (comparison.peer.impl, comparison.ratio) == ("machete", 0.8)
    assert not any(is_peer(r) for r in rows if r.impl.startswith(("tilebit", "cublas", "torch")) or r.format == "w4a8_int8")


def test_symmetric_and_asymmetric_are_told_apart_and_the_newest_process_counts():
    new: dict[str, Any] = {"run": "r2", "date": "2026-02-01"}
    rows = [row(us=5.0), row("marlin", 10.0), row(us=8.0, **new), row(us=20.0, symmetric=False, **new), row("marlin", 12.0, **new)]
    rows += [row(us=1.0, run="r3", date="2026-03-01")]  # without a peer it is compared with nothing
    found = comparisons(rows)
    assert {name: [c.ratio for c in points] for name, points in found.items()} == {
        "w4a16_g128, float16": [1.5],
        "w4a16_g128_asym, float16": [0.6],
    }


def test_the_bars_are_geometric_means_per_band():
    times = {1: (10.0, 20.0), 16: (10.0, 5.0), 32: (10.0, 9.4), 128: (10.0, 9.6), 256: (10.0, 11.0)}
    rows = [r for m, (ours, peer) in times.items() for r in (row(us=ours, m=m), row("marlin", peer, m=m))]
    header, _, *lines = lines_of(bars_table(rows))
    assert header[3:] == ["geometric mean", "worst point", "below 0.95"]
    assert [line[1:] for line in lines] == [
        ["m <= 16", "2", "**1.00**", "0.50 (28672 x 4096, m = 16, marlin)", "1"],
        ["16 < m <= 128", "2", "**0.95**", "0.94 (28672 x 4096, m = 32, marlin)", "1"],
        ["m > 128", "1", "**1.10**", "1.10 (28672 x 4096, m = 256, marlin)", "0"],
    ]
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    (ratios,) = ratio_tables(rows)
    assert ratios.startswith("<details>") and "| 28672 x 4096 | 2.00 marlin | **0.50** marlin | **0.94** marlin | 0.96 marlin |" in ratios
    assert bars_table([row()]) == "" and ratio_tables([row()]) == []


def test_the_read_rate_is_of_large_weights_at_one_row():
    bytes_moved = 28672 * 4096 // 2 + 28672 * 32 * 2 + 2 * (28672 + 4096)
    half = bytes_moved / 4706e3 * 2
    rows = [row(us=half), row("marlin", half * 2), row("marlin", 1.0, run="r2"), row(us=1.0, m=16), row(us=1.0, n=4096)]
    _, _, *lines = lines_of(bandwidth_table(rows, CEILING))
    assert lines == [["28672 x 4096", "w4a16_g128, float16", "61", f"{half:.1f}", "2,353", "50%", "25% marlin"]]
    assert bandwidth_table([row(n=4096)], CEILING) == ""


def chain(impl: str, us: float, **changes: Any) -> dict[str, Any]:
    linears = {"format": "w4a16", "group_size": 128, "symmetric": True, "layers": 4, "linears": [[28672, 4096], [4096, 14336]]}
    return {"gpu": "NVIDIA H200", "run": "c1", "date": "2026-01-01", "impl": impl, "m": 1, "us": us, "chain": linears, **changes}


def test_a_chain_stands_beside_the_sum_of_the_fastest_peers(tmp_path: Path):
    written = [chain("tilebit", 60.0), chain("cublas", 120.0), chain("tilebit_pdl", 54.0, saving_us=3.0)]
    written += [chain("tilebit", 99.0, run="c0", date="2025-01-01")]
    (tmp_path / "nvidia-h200.jsonl").write_text("".join(json.dumps(r) + "\n" for r in written))
    chains = read_chains(tmp_path)["NVIDIA H200"]
    rows = [row("marlin", 26.0), row("humming", 25.0, symmetric=False), row("marlin", 9.0, date="2025-01-01", run="old")]
    assert lines_of(chain_table(chains, rows))[-1] == ["w4a16_g128", "1", "120 cublas", "60.0", "54.0", "3.00", "-"]
    rows.append(row("humming", 18.5, n=4096, k=14336))
    assert lines_of(chain_table(chains, rows))[-1][-1] == "43.5"
    assert "## NVIDIA H200" in chain_section({"NVIDIA H200": chains}, {"NVIDIA H200": rows}) and chain_section({}, {}) == ""
    (tmp_path / "nvidia-h200.jsonl").write_text('{"gpu": "x"}\n')
    with pytest.raises(ValueError, match="line 1: run, date"):
        read_chains(tmp_path)


def test_the_page_says_the_bars_first_and_folds_the_rest():
    rows = [row(us=10.0), row("marlin", 12.0), row("cublas", 20.0, format="fp16", symmetric=None, group_size=None), row("tilebit_pdl", 9.0)]
    page = gemm_section({"NVIDIA H200": rows})
    order = [
        "### Against the fastest peer",
        "### Large weights",
        "### Time against m",
        "_speed.svg",
        "_roofline.svg",
        "tilebit_pdl w4a16_g128",
    ]
    places = [page.index(text) for text in order]
    assert places == sorted(places) and page.count("<details>") == page.count("</details>") == 3
    assert page.index("<details><summary>28672 x 4096 (n x k), 4-bit") < page.index("| m | cublas fp16 | tilebit w4a16_g128 |")
    assert "**1.20**" in results_table({"NVIDIA H200": rows}, {})


def test_the_ablation_shows_every_idea_of_the_newest_run(tmp_path: Path):
    assert read_ablation(tmp_path / "none") == [] and ablation_section([]) == ""
    base = {"op": "ablation", "gpu": "NVIDIA H200", "n": 14336, "k": 4096, "m": 1}
    rows = [{**base, "run": "a0", "step": 9, "idea": "tried once", "us": 999.0}]
    rows += [
        {**base, "run": "a1", "step": s, "idea": i, "us": us}
        for s, i, us in ((0, "naive", 100.0), (1, "packing", 50.0), (4, "stream", 20.0))
    ]
    rows += [{**base, "run": "a1", "m": 4096, "step": 0, "idea": "naive", "us": 5000.0}]
    (tmp_path / "h200.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    studies = read_ablation(tmp_path)
    section = ablation_section(studies)
    assert lines_of(section)[-1] == ["4", "stream", "20.0 (5.00x)", "-"] and "tried once" not in section
    assert "| 0 | naive | 100 | 5,000 |" in section and "(../plots/nvidia_h200_ablation.svg)" in section
    files = {path.name: path.read_bytes() for path in draw({}, {"ablation": studies}, tmp_path / "plots")}
    assert set(files) == {"nvidia_h200_ablation.png", "nvidia_h200_ablation.svg"} and b"packing" in files["nvidia_h200_ablation.svg"]
    assert files == {path.name: path.read_bytes() for path in draw({}, {"ablation": studies}, tmp_path / "plots")}
    without = liquid_ablation_section(studies)
    assert "| naive | 100 (5.00x) | 5,000 |" in without and "| stream | 20.0 | - |" in without and liquid_ablation_section([]) == ""
    assert "(../plots/nvidia_h200_ablation_int8.svg)" in without
    sums = sums_ablation_section(studies)
    assert (
        "| naive | 100 (5.00x) | 5,000 |" in sums and "(../plots/nvidia_h200_ablation_sums.svg)" in sums and sums_ablation_section([]) == ""
    )
    (tmp_path / "h200.jsonl").write_text('{"op": "ablation", "step": 0}\n')
    with pytest.raises(ValueError, match=r"h200.jsonl, line 1: idea, n, k, m, us missing"):
        read_ablation(tmp_path)


def test_choices_are_ranked_by_what_they_lose(tmp_path: Path):
    assert ranker_section(tmp_path) == ""
    points = [("analytic", 1, 15.0), ("analytic", 16, 11.0), ("ranker", 1, 10.0), ("ranker", 16, 10.5)]
    rows = [{"shape": [4096, 4096], "m": m, "source": source, "us": us, "best_us": 10.0} for source, m, us in points]
    (tmp_path / "h200.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    section = ranker_section(tmp_path)
    assert section.index("| ranker | 2 | 2.5% | 5.0% |") < section.index("| analytic | 2 | 30.0% | 50.0% |")
    assert "| 4096 x 4096 | 16 | ranker | 10.5 | 10.0 | 5.0% |" in section
