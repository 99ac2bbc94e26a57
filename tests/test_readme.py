"""README.md says what is true: its example runs, its commands exist, its tables are current, and the support matrix holds."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from results.render import texts
from results.support import claims
from tilebit.layouts.formats import QuantFormat
from tilebit.schedules.select import select
from tilebit.schedules.target import target_from_name
from tilebit.schedules.workload import DTYPES, Workload
from tilebit.tiles.program import program

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "results/README.md")


def readme() -> str:
    return (ROOT / "README.md").read_text()


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", readme(), re.S)


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path):
    example = examples()[0]
    code = [line for line in example.splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(code) <= 10
    script = tmp_path / "example.py"
    script.write_text(example)
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    error = re.search(r"torch.Size\(\[8, 4096\]\) relative error (\d\.\d+)", done.stdout)
    assert error is not None and 0.01 < float(error[1]) < 0.2, done.stdout


@pytest.mark.parametrize("family", ["awq", "gptq", "gptq_v2", "compressed-tensors"])
def test_the_checkpoint_example_runs(tmp_path: Path, family: str):
    from tilebit.synthetic import write_checkpoint

    write_checkpoint(tmp_path / "model", family, {"model.layers.0.mlp.up_proj": (64, 128)})
    assert len(examples()) == 2 and "path/to/model" in examples()[1]
    names: dict[str, Any] = {}
    exec(examples()[1].replace("path/to/model", str(tmp_path / "model")), names)
    assert (names["layer"].packed.n, names["layer"].packed.k) == (64, 128)


@pytest.mark.parametrize("page", ["README.md", "results/README.md"])
def test_generated_parts_are_current(page: str):
    assert (ROOT / page).read_text() == texts(ROOT)[ROOT / page], f"{page} is stale: run `make results`"


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

    from tilebit.cli import app

    words = shlex.split(line)
    command = typer.main.get_command(app).commands[words[1]]  # pyright: ignore[reportAttributeAccessIssue]
    command.make_context(words[1], words[2:])  # raises what the user would see


def test_claims_for_gpus_have_a_program():
    """For every claimed (format, arch, dtype), the selected schedule names a program that runs there and accepts it."""
    claimed = [(format, arch, dtype) for format, arch, dtypes in claims() for dtype in dtypes if arch != "cpu"]
    assert claimed
    for format, arch, dtype in claimed:
        workload, target = Workload(16, 4096, 4096, format, dtype), target_from_name(arch)
        schedule = select(workload, target)
        assert arch in program(schedule.program).arches
        assert not program(schedule.program).legal(workload, schedule, target)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_claims_for_this_machine_hold(device: str):
    """Every claimed format and type computes the product of its own dequantized weights, for sizes that fit no tile."""
    import tilebit
    from tilebit import dispatch
    from tilebit.quantize import quantize

    m, n, k = 3, 72, 200
    target = dispatch.device_target(torch.device("cpu") if device == "cpu" else torch.device("cuda", 0))
    claimed = [(format, dtype) for format, arch, dtypes in claims() for dtype in dtypes if arch == target.arch]
    assert {dtype for _, dtype in claimed} == set(DTYPES) and QuantFormat() in {format for format, _ in claimed}
    dispatch.build([Workload(4, n, k, format, dtype) for format, dtype in claimed], target, jobs=2)
    w, x = torch.randn(n, k), torch.randn(m, k)
    for format, name in claimed:
        dtype = getattr(torch, name)
        q = quantize(w, format)
        y = tilebit.gemm(x.to(device, dtype), tilebit.pack(q, dtype, device)).cpu().double()
        expected = x.to(dtype).double() @ q.dequantize().double().T
        error = float((y - expected).norm() / expected.norm())
        assert error < (4e-3 if dtype == torch.float16 else 2e-2), f"{format.name} {name}: relative error {error}"
