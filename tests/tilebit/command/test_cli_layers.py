"""``tilebit quantize``: layers with formats of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilebit.command.cli import app

pytest.importorskip("transformers", minversion="5.17")

from tilebit.transformers.opening import open_model
from tilebit.transformers.synthetic import write_model
from tilebit.weights.modules import QuantLinear


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers."""
    return write_model(tmp_path_factory.mktemp("models") / "dense")


def test_layers_have_formats_of_their_own(dense: Path, tmp_path: Path):
    kept = ("--skip", "up_proj", "--skip", "lm_head")
    own = (*kept, "--layer", "down_proj=w8a16_channel", "--layer", "layers.1.mlp.down_proj=w8a16_g32")  # the longest counts
    said = CliRunner().invoke(app, ["quantize", str(dense), str(tmp_path / "out"), "--format", "w4a16_g64", *own, "--json"])
    assert json.loads(said.stdout)["per_layer"] == {"down_proj": "w8a16_channel", "layers.1.mlp.down_proj": "w8a16_g32"}
    modules = dict(open_model(tmp_path / "out").named_modules())
    found = {
        name: modules[f"model.layers.{name}"] for name in ("0.mlp.up_proj", "0.mlp.down_proj", "1.mlp.down_proj", "1.self_attn.q_proj")
    }
    formats = {name: layer.format.name if isinstance(layer, QuantLinear) else None for name, layer in found.items()}
    assert list(formats.values()) == [None, "w8a16_channel", "w8a16_g32", "w4a16_g64"]
    shown = CliRunner().invoke(app, ["quantize", str(dense), str(tmp_path / "other"), "--layer", "up_proj=w8a16_channel"]).output
    assert "w4a16_g128, up_proj w8a16_channel" in shown


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--layer", "down_proj"], "--layer is 'down_proj'; accepted: NAME=FORMAT"),
        (["--layer", "=w4a16_g128"], "accepted: NAME=FORMAT"),
        (["--layer", "a=w4a16_g128", "--layer", "a=w4a16_g64"], "--layer names a twice"),
        (["--layer", "down_proj=w3"], "w3"),
        (["--layer", "gate=w4a16_g64"], "per_layer names 'gate'; accepted: a layer's name or its last parts"),
    ],
)
def test_layers_that_cannot_be(dense: Path, tmp_path: Path, words: list[str], error: str):
    result = CliRunner().invoke(app, ["quantize", str(dense), str(tmp_path / "out"), "--format", "w4a16_g64", *words])
    assert result.exit_code in (1, 2) and error in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "out").exists()
