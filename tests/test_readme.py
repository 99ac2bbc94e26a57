"""README.md says what is true: its example runs, its commands exist, its tables are current, and the support matrix holds."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from results.report.render import texts
from results.report.support import attention_claims, claims
from results.report.targets_page import NAME as TARGETS_PAGE
from results.studies import STUDIES
from tilebit.layouts.formats import QuantFormat
from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.gemm.workload import DTYPES, Workload
from tilebit.schedules.operations import find_rule, legal
from tilebit.schedules.select import select
from tilebit.schedules.target import ARCHES, target_from_name
from tilebit.tiles.programs import program

ROOT = Path(__file__).resolve().parent.parent
GENERATED = (*(f"results/pages/{study.name}.md" for study in STUDIES), f"results/pages/{TARGETS_PAGE}")
NOTES = tuple(f"results/notes/{path.name}" for path in sorted((ROOT / "results" / "notes").glob("*.md")))
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "results/README.md", *GENERATED, *NOTES)


def readme() -> str:
    return (ROOT / "README.md").read_text()


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", readme(), re.S)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_model_example_runs(tmp_path: Path, device: str):
    """On a random model, made on the spot: its weights take less than their 16 bits did, its steps are fused, and the clock counts a call
    that compiles nothing."""
    pytest.importorskip("transformers", minversion="5.17")
    from tilebit.transformers.synthetic import write_model

    example, folder = examples()[0], write_model(tmp_path / "model")
    code = [line for line in example.splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(code) <= 13 and "path/to/model" in example
    script = tmp_path / "example.py"
    script.write_text("\n".join((
        example.replace("path/to/model", str(folder)),
        "print(model.device.type, len(model.tilebit_steps._graphs), time.time() - time.perf_counter() + start)",
    )))  # fmt: skip
    environment = {**os.environ, "TILEBIT_CACHE": str(tmp_path / "cache"), **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})}
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    *_, memory, speed, run = done.stdout.splitlines()
    where, graphs, started = run.split()
    compiled = [path.stat().st_mtime for path in (tmp_path / "cache").rglob("*.so")]
    assert where == device and int(graphs) == 1 and len(compiled) >= 8 and max(compiled) < float(started)
    found = re.fullmatch(r"(\d+\.\d) MB of weights, (\d+\.\d) MB of cache", memory)
    assert "The capital of France is" in done.stdout and found is not None and re.fullmatch(r"\d+\.\d tokens/s", speed), done.stdout
    assert 0 < float(found[1]) < (folder / "model.safetensors").stat().st_size / 1e6 and float(found[2]) > 0


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path):
    example = examples()[1]
    code = [line for line in example.splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(code) <= 10
    script = tmp_path / "example.py"
    script.write_text(example)
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    error = re.search(r"torch.Size\(\[8, 4096\]\) relative error (\d\.\d+)", done.stdout)
    assert error is not None and 0.01 < float(error[1]) < 0.2, done.stdout


@pytest.mark.slow
def test_the_attention_example_runs(tmp_path: Path):
    example = examples()[2]
    code = [line for line in example.splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert "KVCache" in example and len(code) <= 10
    script = tmp_path / "example.py"
    script.write_text(example)
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "torch.Size([2, 1, 32, 128]) 301 1088 bytes a token, 4096 in 16 bits"


def test_the_tile_program_is_that_of_the_sample():
    """Its lines stand in the sample, which other tests compile, in this order."""
    (shown,) = re.findall(r"```py\n(.*?)```", readme(), re.S)
    lines = [line for line in map(str.strip, shown.splitlines()) if not line.startswith("...")]
    source = iter(map(str.strip, (ROOT / "tests/tiles/sample/w4a16.py").read_text().splitlines()))
    assert len(lines) >= 10
    assert [line for line in lines if line not in source] == []


@pytest.mark.slow
def test_the_any_precision_example_runs(tmp_path: Path):
    (example,) = (each for each in examples() if "quantize_model_any" in each)
    script = tmp_path / "any_precision.py"
    script.write_text(example)
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "torch.Size([1, 512])"


@pytest.mark.parametrize("family", ["awq", "gptq", "gptq_v2", "compressed-tensors"])
def test_the_checkpoint_example_runs(tmp_path: Path, family: str):
    from tilebit.weights.synthetic import write_checkpoint

    write_checkpoint(tmp_path / "model", family, {"model.layers.0.mlp.up_proj": (64, 128)})
    assert len(examples()) == 5 and "path/to/model" in examples()[3]
    names: dict[str, Any] = {}
    exec(examples()[3].replace("path/to/model", str(tmp_path / "model")), names)
    assert (names["layer"].packed.n, names["layer"].packed.k) == (64, 128)


@pytest.mark.slow
def test_generated_parts_are_current():
    """README.md's tables, the page of results and the page of every study, and no page besides."""
    wanted = texts(ROOT)
    for path, text in wanted.items():
        assert path.read_text() == text, f"{path.relative_to(ROOT)} is stale: run `make results`"
    assert set((ROOT / "results" / "pages").iterdir()) < wanted.keys(), "results/pages has a page of no study: run `make results`"


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
            if "://" not in target:
                assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"(?:^ {4}|`)make ([a-z-]+)", (ROOT / page).read_text(), re.M):
            assert re.search(rf"^{target}:", makefile, re.M), f"{page} names make {target}"


def commands() -> list[str]:
    return sorted({line.strip() for line in re.findall(r"^ {4}(tilebit .*)$", readme(), re.M)})


@pytest.mark.parametrize("line", commands())
def test_command_lines_parse(line: str):
    """Every command line of README.md is one that the program accepts: command, options, values, nothing missing."""
    import typer.main

    from tilebit.command.cli import app

    command, (name, *words) = typer.main.get_command(app), shlex.split(line)
    while hasattr(command, "commands"):  # a group: its next word names a command
        name, *words = words
        command = command.commands[name]  # pyright: ignore[reportAttributeAccessIssue]
    command.make_context(name, words)  # raises what the user would see


@pytest.mark.slow
def test_claims_for_gpus_have_a_program():
    """For every claimed (format, arch, dtype), the selected schedule names a program that runs there and accepts it; a ninth of them, of
    every arch, are chosen among the kernels of all m, as a call chooses, the others for their own."""
    every = [(format, arch, dtypes) for format, arch, dtypes in claims() if dtypes and arch != "cpu"]
    claimed = [(format, arch, dtypes[i % len(dtypes)]) for i, (format, arch, dtypes) in enumerate(every)]  # types take turns
    assert {dtype for _, _, dtype in claimed} == set(DTYPES)
    assert {arch for _, arch, _ in claimed[::9]} == {*ARCHES} - {"cpu"}
    for i, (format, arch, dtype) in enumerate(claimed):
        workload, target = Workload(16, 4096, 4096, format, dtype), target_from_name(arch)
        schedule = select(workload, target, None if i % 9 == 0 else ())
        assert arch in find_rule(schedule.program).arches and program(schedule.program).name == schedule.program
        assert not legal(workload, schedule, target)


@pytest.mark.slow
def test_attention_claims_have_a_program():
    """For every claimed (op, format, arch, dtype), on a sample of them, the selected schedule names a program that runs there and accepts
    it; 16-bit, 4-bit and mixed caches are claimed on every GPU."""
    claimed = [(op, format, arch, dtype) for op, format, arch, dtypes in attention_claims() for dtype in dtypes]
    for name in ("kv16", "kv4_channel", "kv2_token", "kvfp8", "k8_channel_v4"):
        decoded = {(arch, dtype) for op, format, arch, dtype in claimed if (op, format.name) == ("decode", name)}
        assert decoded >= {(arch, dtype) for arch in ARCHES if arch != "cpu" for dtype in DTYPES}
    for op, format, arch, dtype in claimed[:: len(claimed) // 60]:
        workload, target = AttentionWorkload(op, 4, 1, 4096, 32, 8, 128, format, dtype), target_from_name(arch)
        schedule = select(workload, target)
        assert arch in find_rule(schedule.program).arches and program(schedule.program).name == schedule.program
        assert not legal(workload, schedule, target)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_claims_for_this_machine_hold(device: str):
    """Every claimed format computes the product of its own dequantized weights, for sizes that fit no tile; on a GPU in every type."""
    import tilebit
    from tilebit.kernels import build
    from tilebit.ops import dispatch
    from tilebit.weights.quantize import quantize

    m, n, k = 3, 72, 200
    target = dispatch.device_target(torch.device("cpu") if device == "cpu" else torch.device("cuda", 0))
    # Those with codebooks are quantized another way: tests/tilebit/weights/test_any_modules.py.
    every = [(format, dtypes) for format, arch, dtypes in claims() if arch == target.arch and dtypes and not format.codebook]
    if device == "cpu":  # types take turns
        every = [(format, dtypes[i % len(dtypes) :][:1]) for i, (format, dtypes) in enumerate(every)]
    claimed = [(format, dtype) for format, dtypes in every for dtype in dtypes]
    assert {dtype for _, dtype in claimed} == set(DTYPES) and QuantFormat() in {format for format, _ in claimed}
    build([Workload(m, n, k, format, dtype) for format, dtype in claimed], target, jobs=None)
    w, x = torch.randn(n, k), torch.randn(m, k)
    for format, name in claimed:
        dtype = getattr(torch, name)
        q = quantize(w, format)
        y = tilebit.gemm(x.to(device, dtype), tilebit.pack(q, dtype, device)).cpu().double()
        expected = x.to(dtype).double() @ q.dequantize().double().T
        error = float((y - expected).norm() / expected.norm())
        most = 4e-3 if dtype == torch.float16 and not format.x else 2e-2  # 8-bit x is rounded once more
        most = 4e-2 if format.x == "float8_e4m3fn" else most  # of 4 bits: 2^-5.3 of a number on average, each
        assert error < most, f"{format.name} {name}: relative error {error}"


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_attention_claims_for_this_machine_hold(device: str):
    """Of the claimed caches, some of each kind and every type: prompts, new tokens and attention to them through the door, at lengths that
    fill no page, against fp64 on what the cache says that it holds."""
    from tilebit import KVCache
    from tilebit.ops import dispatch
    from tilebit.tiles.attention import reference

    target = dispatch.device_target(torch.device("cpu") if device == "cpu" else torch.device("cuda", 0))
    claimed = {(op, format.name, dtype) for op, format, arch, dtypes in attention_claims() for dtype in dtypes if arch == target.arch}
    lost = {"kv4_channel": 0.15, "kvfp8": 0.05, "k8_token_v2": 0.6}  # of keys and values, by quantization
    for name, dtype_name in (("kv4_channel", "float16"), ("kvfp8", "bfloat16"), ("k8_token_v2", "float16")):
        assert {(op, name, dtype_name) for op in ("decode", "append", "gather")} | {("prefill", "kv16", dtype_name)} <= claimed
        dtype = getattr(torch, dtype_name)
        cache = KVCache(32, 2, 2, 64, name, dtype=dtype, page_size=64, device=device)
        sequences = cache.allocate(2)
        q, k, v = (torch.randn(203 + 70, heads, 64).to(device, dtype) for heads in (4, 2, 2))
        first, _ = cache.prefill(sequences, q, k, v, [0, 203, 273])
        held = cache.gather(sequences)
        for rows, own in ((slice(0, 203), held[0]), (slice(203, 273), held[1])):
            expected, _ = reference.attend(q[rows].cpu(), k[rows].cpu(), v[rows].cpu())
            assert float((first[rows].cpu().double() - expected).norm() / expected.norm()) < (2e-3 if dtype == torch.float16 else 1e-2)
            for got, given in zip(own, (k[rows], v[rows]), strict=True):
                assert float((got - given).float().norm() / given.float().norm()) < lost[name]
        q, k, v = (torch.randn(2, 3, heads, 64).to(device, dtype) for heads in (4, 2, 2))
        cache.append(sequences, k, v)
        out, _ = cache.attend(sequences, q)
        keys, values = zip(*((k.cpu(), v.cpu()) for k, v in cache.gather(sequences)), strict=True)
        expected, _ = reference.decode(q.cpu(), keys, values)
        assert float((out.cpu().double() - expected).norm() / expected.norm()) < (4e-3 if dtype == torch.float16 else 2e-2), name
