"""Directories that a tool wrote beside what it computes: here the tool is a writer of its layout, or a process that says little."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from results.measure import foreign, foreign_child
from tilebit.weights.synthetic import write_checkpoint

PYTHON = ["--python", sys.executable, "--tool", "autoawq"]
GROUPS = "4 bits groups of 128"


def tool(folder: Path, scheme: str, off: float = 0.0, damaged: bool = False) -> None:
    """AutoAWQ's layout of random weights, and what they compute in float16; ``off`` is added to a weight."""
    foreign_child.write_dense(folder / "dense", "float16")
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "dense")
    shapes = {name: tuple(layer.weight.shape) for name, layer in model.named_modules() if name.endswith("_proj")}
    place = folder / scheme / "quantized"
    weights = write_checkpoint(place, "awq", shapes, symmetric=False)
    for name, weight in weights.items():
        model.get_submodule(name).weight.data.copy_(weight)
    model.model.layers[1].mlp.up_proj.weight.data += off
    save_file(foreign_child.computed(model), place.parent / "computed.safetensors")
    others = {name: value for name, value in model.state_dict().items() if name.removesuffix(".weight") not in shapes}
    packed = foreign.load_file(place / "model.safetensors")
    save_file({**packed, **others}, place / "model.safetensors", {"format": "pt"})
    said = json.loads((place / "config.json").read_text())["quantization_config"]
    if damaged:
        said["bits"] = 3
    config = {**model.config.to_dict(), "dtype": "float16", "architectures": ["LlamaForCausalLM"], "quantization_config": said}
    (place / "config.json").write_text(json.dumps(config, default=str))


def ran(monkeypatch: pytest.MonkeyPatch, out: Path, **how: Any) -> int:
    def quantized(python: Path, name: str, schemes: list[str], folder: Path) -> Iterator[dict[str, Any]]:
        assert name == "autoawq" and schemes == [GROUPS]
        tool(folder, GROUPS, **how)
        yield {"scheme": GROUPS, "dtype": "float16", "versions": {"autoawq": "0"}}

    monkeypatch.setattr(foreign, "quantized", quantized)
    return foreign.main([*PYTHON, "--schemes", GROUPS, "--out", str(out)])


def test_a_row_says_what_was_loaded_and_how_near_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    assert ran(monkeypatch, out) == 0
    row = json.loads(out.read_text())
    assert row["loaded"] == {"w4a16_g128_asym": 14} and row["tool"] == "autoawq" and row["versions"] == {"autoawq": "0"}
    assert 0 < row["weight_error"] < 1e-3 and 0 < row["logit_error"] < 0.01
    assert "1 of 1 schemes are what autoawq computes" in capsys.readouterr().out
    assert ran(monkeypatch, out, off=1e-3) == 1
    assert json.loads(out.read_text().splitlines()[1])["weight_error"] > 1e-3
    assert "more than rounding makes" in capsys.readouterr().out


def test_a_directory_that_is_refused_has_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(monkeypatch, tmp_path / "rows.jsonl", damaged=True) == 1
    assert "not loaded: AWQ bits is 3" in capsys.readouterr().out and not (tmp_path / "rows.jsonl").exists()


def test_a_tool_is_run_in_its_environment_and_what_it_cannot_do_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    child = tmp_path / "child.py"
    monkeypatch.setattr(foreign, "CHILD", child)
    child.write_text(
        "import json, os, sys\n"
        "job = json.loads(sys.argv[1])\n"
        "assert os.environ['HF_HUB_OFFLINE'] == '1' and 'PYTHONPATH' not in os.environ and os.getcwd() == job['folder']\n"
        "print(json.dumps({'scheme': job['schemes'][0], 'failed': 'KeyError: gone'}))\n"
        "sys.exit('no memory')\n"
    )
    assert foreign.main([*PYTHON, "--out", str(tmp_path / "rows.jsonl")]) == 1
    said = capsys.readouterr().out
    assert f"{GROUPS}: autoawq did not write it: KeyError: gone" in said
    assert "autoawq's process ended with 1: no memory" in said and "0 of 2 schemes" in said
    for words, error in (
        (["--python", str(tmp_path / "none"), "--tool", "autoawq"], "is no file"),
        ([*PYTHON, "--schemes", "W4A16"], "accepted of autoawq: 4 bits groups of 128, 4 bits groups of 32"),
    ):
        with pytest.raises(SystemExit):
            foreign.main(words)
        assert error in capsys.readouterr().err


def test_the_child_without_its_tool(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheme that fails says why; the model and its tokenizer are there, and all weights that a tool may hold."""
    assert foreign.main([*PYTHON, "--schemes", GROUPS, "--out", str(tmp_path / "rows.jsonl")]) == 1
    assert f"{GROUPS}: autoawq did not write it: ModuleNotFoundError: No module named 'awq'" in capfd.readouterr().out
    foreign_child.write_dense(tmp_path, "bfloat16")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16 and AutoTokenizer.from_pretrained(tmp_path)("w5 w9").input_ids == [5, 9]

    class Packed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ weight.t())[None]

    weight = torch.randn(24, 16).half()
    assert torch.equal(foreign_child.weight_of(Packed(), 16), weight.float())
    found = foreign_child.computed(nn.ModuleList([model]))
    assert len(found) == 2 + 14 and found["logits"].shape == (1, foreign_child.PROMPT, 256)
    name = "model.layers.0.mlp.down_proj"
    assert torch.equal(found[name], model.get_submodule(name).weight.float())
