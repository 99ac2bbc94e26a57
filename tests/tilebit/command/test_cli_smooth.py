"""``tilebit quantize --smooth``: factors by a text, of a tiny random model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tilebit.command.cli import app

pytest.importorskip("transformers", minversion="5.17")

from tilebit.transformers import TilebitConfig, smoothing
from tilebit.transformers.opening import open_model
from tilebit.transformers.smoothing import smoothed_model
from tilebit.transformers.synthetic import write_model
from tilebit.weights.modules import QuantLinear

TEXT = "a small model that was made on the spot says nothing of note " * 3
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers whose tokens are characters."""
    return write_model(tmp_path_factory.mktemp("models") / "dense")


@pytest.fixture(autouse=True)
def _few_strengths(monkeypatch: pytest.MonkeyPatch) -> None:
    real = smoothing.calibrate_smoothing
    monkeypatch.setattr(smoothing, "calibrate_smoothing", lambda *given, **named: real(*given, strengths=(0.0, 0.5), **named))


def said(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["quantize", *map(str, arguments)])
    assert not isinstance(result.exception, (ValueError, OSError, RuntimeError)), result.output
    return f"{result.exit_code} " + " ".join(result.output.replace("│", " ").split())


def test_inputs_are_smoothed_by_a_text(dense: Path, tmp_path: Path):
    """The factors are those of the text, of all layers but those that are skipped; what cannot be smoothed writes nothing."""
    text, out, other = (tmp_path / name for name in ("text.txt", "out", "other"))
    text.write_text(TEXT)
    skipped = ("--skip", "o_proj", "--skip", "lm_head")
    assert said(dense, out, "--format", "w8a8_channel", *skipped, "--smooth", text).startswith("0 ")
    read, own = open_model(out), smoothed_model(dense, TEXT, TilebitConfig("w8a8_channel", skip=["o_proj", "lm_head"]), None, CPU)
    a, b = read.state_dict(), own.state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    layers = {name: module for name, module in read.named_modules() if isinstance(module, QuantLinear)}
    assert len(layers) == 12 and any(layer.smooth is not None for layer in layers.values())
    assert not any(name.endswith(("o_proj", "lm_head")) for name in layers)
    (empty := tmp_path / "empty.txt").touch()
    for source, format, file, words in (
        (dense, "w4a16_g64", text, "accepted: formats with int8 or e4m3 x"),
        (dense, "w8a8_channel", tmp_path / "none.txt", "none.txt"),
        (dense, "w8a8_channel", empty, "empty.txt is empty"),
        (out, "w8a8_channel", text, "is quantized already"),
        (dense, "w3-8a16_any", text, "accepted: formats with scales"),
    ):
        got = said(source, other, "--format", format, "--smooth", file)
        assert got[0] in "12" and words in got
    assert {path.name for path in tmp_path.iterdir()} == {"out", "text.txt", "empty.txt"}


def test_layers_with_formats_of_their_own(dense: Path, tmp_path: Path):
    """Those of 8-bit x are smoothed, each as its format rounds; others, of 16 bits and a tied output layer among them, are not."""
    (text := tmp_path / "text.txt").write_text(TEXT)
    named = {"down_proj": "w4a16_g64", "gate_proj": "w4a8_channel_asym", "lm_head": "w8a16_channel"}
    words = [word for name, format in named.items() for word in ("--layer", f"{name}={format}")]
    assert said(dense, tmp_path / "out", "--format", "w8a8_channel", *words, "--smooth", text).startswith("0 ")
    read = open_model(tmp_path / "out")
    layers = {name: module for name, module in read.named_modules() if isinstance(module, QuantLinear)}
    assert len(layers) == 15
    for name, layer in layers.items():
        assert layer.format.name == named.get(name.rpartition(".")[2], "w8a8_channel"), name
        assert layer.format.x or layer.smooth is None
    smoothed = {layer.format.name for layer in layers.values() if layer.smooth is not None}
    assert "w8a8_channel" in smoothed
    for more, message in (
        (("--layer", "q_proj=w3-8a16_any"), "accepted: formats with scales"),
        (("--layer", "lm_head=w8a16_channel", "--embeddings", "w8a16_channel"), "accepted: one of both"),
    ):
        got = said(dense, tmp_path / "other", "--format", "w8a8_channel", *more, "--smooth", text)
        assert got[0] == "1" and message in got and not (tmp_path / "other").exists()


def test_samples_lie_at_equal_distances(dense: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[torch.Tensor] = []

    def found(_: object, batches: list[torch.Tensor], *__: object, **___: object) -> dict[str, object]:
        seen[:] = batches
        return {}

    monkeypatch.setattr(smoothing, "calibrate_smoothing", found)
    monkeypatch.setattr(smoothing, "expect_tokens", lambda *_: None)  # they are places
    for tokens, count in ((1, 1), (512, 1), (513, 2), (20 * 512, 16)):
        monkeypatch.setattr(smoothing, "open_tokenizer", lambda _, tokens=tokens: lambda *_, **__: {"input_ids": list(range(tokens))})
        smoothed_model(dense, TEXT, TilebitConfig("w8a8_channel"), None, CPU)
        assert len(seen) == count and int(seen[0][0, 0]) == 0 and abs(int(seen[-1][0, -1]) - (tokens - 1)) < 16
        assert {batch.shape for batch in seen} == {(1, min(512, tokens))}
