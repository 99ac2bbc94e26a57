"""``tilebit attention``: which workloads its options mean, and that calls find what it compiled, tuned and packed."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).parents[2] / "tiles"))
from toolchain import needs_nvcc

from tilebit import KVCache, packs
from tilebit.autotune.worker import DeviceWorker, Outcome
from tilebit.command.attention import Kind
from tilebit.command.cli import app
from tilebit.kernels import KernelUnavailable, find_kernel
from tilebit.layouts.kv_formats import KVFormat
from tilebit.ops import plans
from tilebit.schedules.attention.workload import OPS, AttentionWorkload
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.select import refresh
from tilebit.schedules.target import cpu_target

COMMANDS = ("compile", "tune", "explain", "pack")
SMALL = ("--heads", "4/2", "--head-dim", "64", "--batch", "2", "--kv-len", "256", "--target", "cpu")
W = AttentionWorkload("decode", 2, 1, 256, 4, 2, 64, KVFormat.from_name("kv4_channel"))
needs_cpu_programs = pytest.mark.skipif(
    find_spec("tvm") is None or not cpu_target().features, reason="needs apache-tvm (pip install tilebit[compile]) and AVX2"
)


def call(*arguments: str):
    return CliRunner().invoke(app, ["attention", *arguments])


def parsed(*arguments: str):
    """The JSON of a call that must succeed."""
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def records(monkeypatch, tmp_path):
    """A record file of this test's own."""
    monkeypatch.setenv("TILEBIT_RECORDS", str(tmp_path / "records.jsonl"))
    refresh()
    yield tmp_path / "records.jsonl"
    refresh()


def serve() -> None:
    """A server's calls on the kind of cache that ``SMALL`` describes: prompts, more of them behind what is held, new tokens, attention."""
    plans.forget()
    cache = KVCache(8, 2, 2, 64, "kv4_channel", max_tokens=256)
    sequences = cache.allocate(2)
    for _ in range(2):
        q, k, v = (torch.randn(2 * 70, heads, 64).half() for heads in (4, 2, 2))
        cache.prefill(sequences, q, k, v)
    q, k, v = (torch.randn(2, 1, heads, 64).half() for heads in (4, 2, 2))
    cache.append(sequences, k, v)
    out, _ = cache.attend(sequences, q)
    held = [torch.cat([x, y], dim=2).isfinite().all() for x, y in cache.gather(sequences)]
    assert bool(out.isfinite().all()) and all(held)
    plans.forget()


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help(command):
    result = call(*command, "--help")
    assert result.exit_code == 0
    assert all(word in result.output for word in (("--heads", "--rotary", "--json") if command else COMMANDS))


def test_defaults_are_what_a_cache_needs():
    _, workloads = Kind(heads="32/8", target="sm_90a").asked(None, None, None, None)
    base = AttentionWorkload("decode", 1, 1, 4096, 32, 8, 128, KVFormat.from_name("kv4_channel"))
    lengths = {"decode": 1, "append": 1, "pack": 1, "gather": 1, "prefill": 4096}
    assert workloads == [replace(base, op=op, batch=batch, q_len=lengths[op]) for op in OPS for batch in (1, 32)]
    target, workloads = Kind(heads="8/8", target="cpu").asked(["prefill"], None, None, None)
    assert target.arch == "cpu" and [(w.batch, w.q_len, w.kv_len) for w in workloads] == [(1, 1024, 1024)]


def test_sizes_are_combined_and_options_reach_the_workload():
    kind = Kind(heads="8/2", head_dim=64, format="kvfp8", dtype="bfloat16", page_size=16, window=9, sink_tokens=4, sinks=True, lse=True)
    kind = replace(kind, soft_cap=20.0, scale=0.5, rotary="interleaved", target="sm_80")
    _, workloads = kind.asked(["decode", "gather"], [1, 3], [64, 128], [2, 5])
    assert len(workloads) == len(set(workloads)) == 2 * 2 * 2 + 2 * 2
    options = {"page_size": 16, "window": 9, "sink_tokens": 4, "sinks": True, "soft_cap": 20.0, "scale": 0.5, "lse": True}
    assert workloads[0] == AttentionWorkload("decode", 1, 2, 64, 8, 2, 64, KVFormat("fp8", "fp8"), "bfloat16", **options)
    ((append,), (prefill,)) = (kind.asked([op], [3], [64], None)[1] for op in ("append", "prefill"))
    assert (append.rotary, append.q_len, prefill.q_len) == ("interleaved", 1, 64)


USAGE = [
    (["tune"], "--heads"),
    (["fly"], "No such command"),
    (["compile", "--heads", "32"], "heads is '32'; accepted: query heads / heads of the cache, such as 32/8"),
    (["compile", "--heads", "32/x"], "such as 32/8"),
    (["explain", "--heads", "32/5"], "accepted: heads_q a multiple of heads_kv"),
    (["explain", "--heads", "32/8", "--op", "fly"], "op is 'fly'; accepted: 'decode', 'append', 'pack', 'gather', 'prefill'"),
    (["tune", "--heads", "32/8", "--head-dim", "96"], "head_dim is 96; accepted: 64, 128, 256"),
    (["tune", "--heads", "32/8", "--format", "w4a16"], "accepted are names such as kv16"),
    (["tune", "--heads", "32/8", "--dtype", "float32"], "dtype is 'float32'; accepted: 'float16', 'bfloat16'"),
    (["pack", "p", "--heads", "32/8", "--page-size", "100"], "page_size is 100; accepted: 16"),
    (["pack", "--heads", "32/8"], "Missing argument"),
    (["compile", "--heads", "32/8", "--rotary", "full"], "rotary is 'full'; accepted"),
    (["compile", "--heads", "32/8", "--scale", "0"], "scale is 0.0; accepted: a number above 0"),
    (["compile", "--heads", "32/8", "--batch", "0"], "'0' is no whole number from 1 on"),
    (["compile", "--heads", "32/8", "--window", "-1"], "greater than or equal to 0"),
    (["compile", "--heads", "32/8", "--soft-cap", "nan"], "greater than or equal to 0"),
    (["tune", "--heads", "32/8", "--target", "sm_70"], "accepted: sm_80"),
    (["tune", "--heads", "32/8", "--budget", "0"], "greater than or equal to 1"),
]


@pytest.mark.parametrize(("arguments", "words"), USAGE, ids=[" ".join(arguments) for arguments, _ in USAGE])
def test_bad_usage_is_one_sentence(arguments, words):
    result = call(*arguments)
    assert result.exit_code == 2 and not result.stdout
    assert words in " ".join(re.sub(r"\x1b\[[0-9;]*m|[^\x00-\x7f]", "", result.stderr).split())


@pytest.mark.parametrize("op", OPS)
def test_explain_lists_every_candidate_and_the_reason(op):
    rows = parsed("explain", "--heads", "32/8", "--op", op, "--target", "sm_90a", "--limit", "0")
    assert [row["chosen"] for row in rows] == [True] + [False] * (len(rows) - 1) and rows[0]["schedule"]["program"].startswith(
        f"attention_{op}"
    )
    assert all(row["why"] and row["estimate_us"] > 0 and row["illegal"] == [] for row in rows)
    assert len(parsed("explain", "--heads", "32/8", "--op", op, "--target", "sm_90a", "--limit", "1")) == 1
    sizes = {"prefill": "kv_len=4096 q_len=4096", "pack": "kv_len=128 q_len=128"}.get(op, "kv_len=4096 q_len=1")
    title = f"{op} batch=1 {sizes}"
    assert title in call("explain", "--heads", "32/8", "--op", op, "--target", "sm_80").output


@pytest.mark.slow
@needs_nvcc
def test_kernels_are_cross_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEBIT_CACHE", str(tmp_path))
    answer = parsed("compile", *SMALL[:-1], "sm_90a", "--op", "decode", "--batch", "1", "--jobs", "1")
    sizes = [(row["op"], row["batch"], row["q_len"], row["kv_len"]) for row in answer["kernels"]]
    assert answer["target"] == "sm_90a" and sizes == [("decode", 2, 1, 256), ("decode", 1, 1, 256)]
    for row in answer["kernels"]:
        assert (Path(row["path"]) / "manifest.json").is_file() and row["schedule"]["program"] == "attention_decode_bulk"
        assert row["resources"]["registers"] > 0


@needs_cpu_programs
def test_compiled_kernels_serve_calls(monkeypatch, tmp_path, records):
    monkeypatch.setenv("TILEBIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TILEBIT_NO_COMPILE", "1")
    with pytest.raises(KernelUnavailable):
        serve()
    result = call("compile", *SMALL)
    assert result.exit_code == 1 and "TILEBIT_NO_COMPILE" in result.stderr and not result.stdout
    monkeypatch.delenv("TILEBIT_NO_COMPILE")
    assert [row["op"] for row in parsed("compile", *SMALL, "--jobs", "1")["kernels"]] == list(OPS)
    assert "attention_gather_cpu" in call("compile", *SMALL, "--op", "gather").output
    monkeypatch.setenv("TILEBIT_NO_COMPILE", "1")
    serve()


@pytest.mark.slow
@needs_cpu_programs
def test_tuned_schedules_are_used(records):
    answer = parsed("tune", *SMALL, "--jobs", "1")
    assert answer["target"] == "cpu" and answer["records"] == str(records) and [row["op"] for row in answer["results"]] == list(OPS)
    for row in answer["results"]:
        assert row["us"] > 0 and row["measured"] >= 1 and (row["failed"], row["left"], row["stopped"]) == (0, 0, "done")
    again = parsed("tune", *SMALL, "--jobs", "1")["results"]
    assert [(row["measured"], row["reused"]) for row in again] == [(0, row["measured"]) for row in answer["results"]]
    for row in answer["results"]:
        chosen = parsed("explain", *SMALL, "--op", row["op"], "--limit", "1")[0]
        assert (chosen["schedule"], chosen["measured_us"]) == (row["schedule"], row["us"]) and "fastest measured here" in chosen["why"]

    every = map(json.loads, records.read_text().splitlines())
    other = next(r for r in every if r["workload"]["op"] == "decode" and r["schedule"] != answer["results"][0]["schedule"])
    with records.open("a") as file:
        file.write(json.dumps({**other, "us": 1e-3}) + "\n")
    refresh()
    assert parsed("compile", *SMALL, "--op", "decode")["kernels"][0]["schedule"] == other["schedule"]
    assert find_kernel(replace(W, batch=1, kv_len=200), cpu_target()).manifest["schedule"] == other["schedule"], "a call's kernel"


@needs_cpu_programs
def test_tuning_without_success_says_why(monkeypatch, records):
    monkeypatch.setattr(DeviceWorker, "measure", lambda *_: Outcome("wrong", "the keys of sequence 0's window are wrong."))
    result = call("tune", *SMALL, "--op", "append", "--jobs", "1", "--json")
    (row,) = json.loads(result.stdout)["results"]
    assert result.exit_code == 1 and (row["us"], row["schedule"], row["failed"]) == (None, None, 1)
    assert "no working schedule was found for append batch=2 kv_len=256 q_len=1" in result.stderr
    assert "wrong: the keys of sequence 0's window are wrong." in result.stderr


@needs_cpu_programs
def test_packs_serve_alone_and_become_one(monkeypatch, tmp_path, records):
    answer = parsed("pack", str(tmp_path / "attention"), *SMALL, "--jobs", "1")
    assert answer["path"] == str(tmp_path / "attention") and answer["target"] == "cpu" and len(answer["kernels"]) == len(OPS)
    again = call("pack", str(tmp_path / "attention"), *SMALL)
    assert again.exit_code == 1 and "exists" in again.stderr
    shape = ("--n", "64", "--k", "128", "--m", "1", "--m", "32", "--target", "cpu")
    assert CliRunner().invoke(app, ["pack", str(tmp_path / "gemm"), *shape]).exit_code == 0

    attention, gemm = packs.read(tmp_path / "attention"), packs.read(tmp_path / "gemm")
    both = packs.export(tmp_path / "both", attention.kernels + gemm.kernels + attention.kernels)
    assert {(e.key, e.workload) for e in both.kernels} == {(e.key, e.workload) for e in attention.kernels + gemm.kernels}
    assert len(both) == len(attention) + len(gemm), "what both hold is there once"
    monkeypatch.setenv("TILEBIT_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("TILEBIT_NO_COMPILE", "1")
    loaded = packs.load(both.path)
    try:
        serve()
        assert packs.find(Workload(16, 64, 128), cpu_target()) is not None
    finally:
        packs.unload(loaded)


OTHERS = [
    {},
    {"op": "append", "rotary": "half", "q_len": 7, "page_size": 16},
    {"op": "gather", "q_len": 0, "format": KVFormat("fp8", "float")},
    {"op": "prefill", "q_len": 100, "dtype": "bfloat16", "soft_cap": 30.5},
    {"window": 100, "sink_tokens": 4, "sinks": True, "lse": True, "scale": 1 / 3, "heads_q": 2},
]


@pytest.mark.parametrize("changes", OTHERS, ids=str)
def test_an_error_names_a_command_that_means_the_workload(changes, monkeypatch):
    wanted, seen = replace(W, **changes), []
    command = packs.command_line("pack PATH", wanted, "sm_80")
    monkeypatch.setattr(
        "tilebit.command.attention.pack_kernels", lambda path, workloads, target, *_: seen.append((path, workloads, target))
    )
    program, *words = shlex.split(command)
    assert program == "tilebit" and CliRunner().invoke(app, words).exit_code == 0, command
    ((path, (workload,), target),) = seen
    assert (str(path), target.arch) == ("PATH", "sm_80")
    assert workload.bucketed() == wanted.bucketed() and workload.static() == wanted.static()
