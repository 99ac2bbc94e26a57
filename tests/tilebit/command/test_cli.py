"""The command line: help, JSON, exit codes, and what each command leaves behind."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tilebit
from tilebit import packs
from tilebit.command import cli
from tilebit.command.cli import app
from tilebit.layouts.formats import QuantFormat
from tilebit.ops import dispatch
from tilebit.schedules.gemm.workload import Workload

COMMANDS = ("quantize", "generate", "evaluate", "compile", "tune", "bench", "explain", "show", "pack", "doctor")
SHAPE = ("--n", "64", "--k", "128", "--target", "cpu")


def call(*arguments: str):
    return CliRunner().invoke(app, arguments)


def parsed(*arguments: str):
    """The JSON of a call that must succeed."""
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help(command):
    result = call(*command, "--help")
    assert result.exit_code == 0
    assert all(name in result.output for name in (*COMMANDS, "attention")) if not command else "--json" in result.output


def test_version_and_module():
    """``python -m tilebit`` is the same command."""
    assert call("--version").output == f"tilebit {tilebit.__version__}\n"
    done = subprocess.run([sys.executable, "-m", "tilebit", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"tilebit {tilebit.__version__}\n"), done.stderr
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert tilebit.__version__ == project["version"]


def test_explain_lists_every_candidate_and_the_reason():
    rows = parsed("explain", "--n", "4096", "--k", "4096", "--m", "16", "--target", "sm_90a", "--limit", "0")
    assert [row["chosen"] for row in rows].count(True) == 1 and rows[0]["chosen"] and len(rows) > 3
    assert all(row["why"] and row["estimate_us"] > 0 and "predicted_us" in row for row in rows)
    assert len(parsed("explain", "--n", "4096", "--k", "4096", "--target", "sm_90a", "--limit", "2")) == 2
    assert "chosen" in call("explain", "--n", "4096", "--k", "4096", "--target", "sm_80").output


@pytest.mark.parametrize(
    "parts",
    [
        {"width": 200},
        {"width": 60, "nibbles": True, "format": QuantFormat.parse("w4a8_g128_asym")},
        {"residual": True, "dependent": True},
        {"gate": "gelu_tanh", "norm": True, "eps": 1.5e-6},
        {"n": 128, "gate": "silu", "gate_halves": True},
        {"norm": True, "eps": 0.0},
    ],
)
def test_the_words_of_a_workload_ask_for_it(monkeypatch: pytest.MonkeyPatch, parts: dict[str, Any]):
    asked: list[Workload] = []
    monkeypatch.setattr(cli, "explain_schedules", lambda workload, *_: asked.append(workload))
    workload = Workload(**{"m": 3, "n": 96, "k": 256, "bias": True, **parts})
    assert call("explain", *workload.options().split(), "--target", "sm_90a").exit_code == 0
    assert asked == [workload]


def test_compile_reports_kernels_in_the_cache():
    answer = parsed("compile", *SHAPE, "--m", "1", "--m", "32")
    assert answer["target"] == "cpu" and [row["m"] for row in answer["kernels"]] == [1, 32]
    for row in answer["kernels"]:
        assert (Path(row["path"]) / "manifest.json").is_file() and row["schedule"]["program"] == "gemm_cpu"
    assert "gemm_cpu" in call("compile", *SHAPE, "--m", "1").output


def test_compile_that_is_forbidden_fails_and_says_how(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEBIT_CACHE", str(tmp_path))
    monkeypatch.setenv("TILEBIT_NO_COMPILE", "1")
    result = call("compile", *SHAPE)
    assert result.exit_code == 1 and "tilebit compile --n 64 --k 128" in result.stderr and not result.stdout


def test_pack_writes_a_pack_that_loads(tmp_path):
    path = tmp_path / "pack"
    answer = parsed("pack", str(path), *SHAPE, "--m", "1")
    assert answer["path"] == str(path)
    pack = packs.load(path)
    packs.unload(pack)
    assert [entry.key for entry in pack.kernels] == answer["kernels"]
    again = call("pack", str(path), *SHAPE, "--m", "1")
    assert again.exit_code == 1 and "exists" in again.stderr


@pytest.mark.slow
def test_show_writes_pictures(tmp_path):
    names = parsed("show", "list")
    assert {"sm_90a:4", "cpu:8", "awq:4", "planes_mma:1", "wgmma_a:k16"} <= set(names)
    for name in names:
        path = tmp_path / f"{name.replace(':', '_')}.svg"
        assert parsed("show", name, "--out", str(path)) == {"name": name, "path": str(path)}
        assert ET.parse(path).getroot().tag.endswith("svg")
    element = tmp_path / "element.svg"
    assert call("show", "sm_90a:4", "--by", "element", "--out", str(element)).exit_code == 0
    assert element.read_text() != (tmp_path / "sm_90a_4.svg").read_text()
    pytest.importorskip("matplotlib")
    assert call("show", "mma_c", "--out", str(tmp_path / "c.png")).exit_code == 0
    assert (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    "format", ["w4a16_g128", *(pytest.param(name, marks=pytest.mark.slow) for name in ("w4a8_lqq_g64", "w4a8_channel_asym"))]
)
def test_bench_writes_rows(format, tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = parsed("bench", "--n", "256", "--k", "256", "--m", "1", "--format", format, "--device", "cpu", "--out", str(path))
    assert rows == [json.loads(line) for line in path.read_text().splitlines()]
    assert {"tilebit", "torch", *(["torch-int8"] if "a8" in format else [])} <= {row["impl"] for row in rows} and len(
        {row["run"] for row in rows}
    ) == 1
    fields = {"op", "impl", "format", "group_size", "dtype", "m", "n", "k", "us", "us_p20", "us_p80", "rel_err", "run"}
    fields |= {"gpu", "driver", "cuda", "torch", "tilelang", "commit", "schedule", "date"}
    for row in rows:
        assert not fields - set(row) and row["op"] == "gemm" and row["us"] > 0 and row["us_p20"] <= row["us"] <= row["us_p80"]
        most = 0.05 if row["impl"] == "torch-int8" else 0.01  # it quantizes x itself, to 7 bits
        assert row["rel_err"] < most, "every implementation computes the same product"
    assert next(row for row in rows if row["impl"] == "tilebit")["schedule"]["program"] == "gemm_cpu"


@pytest.mark.slow
def test_tune_records_and_continues(monkeypatch, tmp_path):
    path = tmp_path / "records.jsonl"
    monkeypatch.setenv("TILEBIT_RECORDS", str(path))

    def tuned() -> tuple[dict[str, Any], set[str]]:
        """The only workload's result, and the schedules that have a record."""
        (row,) = parsed("tune", *SHAPE, "--m", "1", "--budget", "30")["results"]
        return row, {json.dumps(json.loads(line)["schedule"]) for line in path.read_text().splitlines()}

    row, first = tuned()
    assert row["us"] > 0 and row["measured"] == len(first) >= 1
    again, both = tuned()
    assert again["reused"] == len(first) and again["measured"] == len(both - first), "nothing is tried twice; the fastest are timed again"
    dispatch.forget()


def test_doctor_reports(monkeypatch):
    result = call("doctor", "--json")
    answer = json.loads(result.stdout)
    assert result.exit_code == (0 if answer["healthy"] else 1)
    assert {"python", "torch", "GPU", "nvcc", "CPU", "artifact cache", "tuned records"} <= {f["name"] for f in answer["findings"]}
    monkeypatch.setenv("TILEBIT_NO_COMPILE", "1")
    result = call("doctor")
    assert result.exit_code == 1 and "TILEBIT_NO_COMPILE" in result.output
