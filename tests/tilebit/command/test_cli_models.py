"""The commands of whole models: what they write, stream, measure and refuse, on tiny random ones."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tilebit.command.cli import app

pytest.importorskip("transformers", minversion="5.17")

import tilebit
import tilebit.transformers
from tilebit.quality import Score, log_probabilities, windows
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.schedule import Schedule
from tilebit.transformers.opening import open_model
from tilebit.transformers.synthetic import write_model
from tilebit.transformers.tuning import TunedProduct

TEXT = "a small model that was made on the spot says nothing of note " * 3


PACKED = "w4a16_g64"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers whose tokens are characters."""
    return write_model(tmp_path_factory.mktemp("models") / "dense")


@pytest.fixture(scope="module")
def packed(dense: Path) -> Path:
    out = dense.parent / "packed"
    said = parsed("quantize", str(dense), str(out), "--format", PACKED)
    assert said["after_bytes"] < 0.6 * said["before_bytes"] and 0 < said["memory_bytes"] < said["peak_bytes"]
    return out


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def call(*arguments: str):
    return CliRunner().invoke(app, arguments)


def parsed(*arguments: str) -> Any:
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*arguments: str) -> str:
    result = call(*arguments)
    assert result.exit_code in (1, 2) and not isinstance(result.exception, (ValueError, OSError, RuntimeError)), result.output
    return " ".join(result.output.replace("│", " ").split())


def test_a_quantized_directory_is_whole(dense: Path, packed: Path):
    """What lies beside the weights comes along, and the weights are those that loading quantizes."""
    from tilebit.transformers import TilebitConfig

    assert {path.name for path in packed.iterdir()} == {path.name for path in dense.iterdir()}
    assert (packed / "tokenizer.json").read_bytes() == (dense / "tokenizer.json").read_bytes()
    a, b = open_model(packed).state_dict(), open_model(dense, TilebitConfig("w4a16_g64")).state_dict()
    assert list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def test_nothing_is_left_of_a_save_that_failed(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "model.safetensors")

    monkeypatch.setattr("tilebit.command.folders.shutil.copyfile", full)
    assert "No space left" in refused("quantize", str(dense), str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


def test_nothing_but_the_new_directory_is_written_to(dense: Path, tmp_path: Path):
    """Neither what has the name that such a save once had, nor what a link of the new one's name leads to; what a killed run left
    is named."""
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part" / "mine").write_text("kept")
    left = tmp_path / ".out.0123456789ab.part"
    left.mkdir()
    result = call("quantize", str(dense), str(tmp_path / "out"), "--format", PACKED)
    assert result.exit_code == 0 and f"{left} is left of a run that was killed" in result.stderr
    assert (tmp_path / "out.part" / "mine").read_text() == "kept" and (tmp_path / "out" / "config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == [left.name, "out", "out.part"]
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "accepted: a directory that does not exist yet" in refused("quantize", str(dense), str(tmp_path / "link"))


def test_layers_are_skipped(dense: Path, tmp_path: Path):
    from tilebit.weights.modules import QuantLinear

    parsed("quantize", str(dense), str(tmp_path / "out"), "--format", "w8a16_channel", "--skip", "down_proj", "--skip", "lm_head")
    kinds = {name.rpartition(".")[2]: type(module) for name, module in open_model(tmp_path / "out").named_modules() if "_proj" in name}
    assert kinds.pop("down_proj") is torch.nn.Linear and set(kinds.values()) == {QuantLinear}


def test_an_output_layer_is_quantized_where_it_is_named(dense: Path, tmp_path: Path):
    """The model's is tied to its input embedding, which keeps its 16 bits."""
    from tilebit.weights.modules import QuantLinear

    asked = ("quantize", str(dense), str(tmp_path / "out"), "--format", "w4a16_g64", "--layer")
    said = parsed(*asked, "lm_head=w8a16_channel")
    model: Any = open_model(tmp_path / "out")
    assert isinstance(model.lm_head, QuantLinear) and model.lm_head.format.name == "w8a16_channel"
    assert said["memory_bytes"] == model.get_memory_footprint()
    parsed(*asked[:2], str(tmp_path / "both"), *asked[3:], "lm_head=w8a16_channel", "--embeddings", "w8a16_channel")
    both: Any = open_model(tmp_path / "both")
    assert both.lm_head is both.model.embed_tokens.rows and both.get_memory_footprint() < model.get_memory_footprint()
    assert "embeddings are to be in w8a8" in refused(*asked[:2], str(tmp_path / "other"), "--embeddings", "w8a8_channel")
    for wrong, message in (("lm_head", "accepted: NAME=FORMAT"), ("lm_head=w9", "w9"), ("lm_haed=w8a16_g64", "per_layer names 'lm_haed'")):
        assert message in refused(*asked[:2], str(tmp_path / "other"), *asked[3:], wrong) and not (tmp_path / "other").exists()


def test_layers_of_any_precision_are_made(dense: Path, tmp_path: Path):
    """As k-means makes them, set to the width that is named; by names of layers as any format."""
    out = tmp_path / "out"
    kept = ("lm_head", "q_proj", "k_proj", "o_proj", "mlp.gate_proj", "up_proj", "down_proj")
    parsed("quantize", str(dense), str(out), "--format", "w2-3a16_any@2", *(word for name in kept for word in ("--skip", name)))
    model = open_model(out)
    expected = open_model(dense)
    assert len(tilebit.quantize_model_any(expected, 2, 3, skip=kept)) == 2
    a, b = model.state_dict(), expected.state_dict()
    assert list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)
    assert {layer.bits for layer in model.modules() if isinstance(layer, tilebit.AnyPrecisionLinear)} == {2}
    said = refused("quantize", str(dense), str(tmp_path / "other"), "--format", "w8a16_any")
    assert "widths from 2, 3, 4 bits on" in said and "'w3-8a16_any' computes in 8 bits" in said
    assert "clip_search goes with" in refused("quantize", str(dense), str(tmp_path / "other"), "--format", "w3-8a16_any", "--clip-search")
    assert "set to 9" in refused("quantize", str(dense), str(tmp_path / "other"), "--format", "w3-8a16_any@9")
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_text_is_generated(dense: Path, packed: Path):
    """The same text from a packed directory and from one that is quantized while it loads, and with each cache of 16 bits; the clocks and
    the memory make sense."""
    asked = ("--prompt", "a small model", "--max-tokens", "12")
    plain = parsed("generate", str(packed), *asked)
    assert plain["prompt_tokens"] == 13 and plain["new_tokens"] == 12 and len(plain["text"]) == 12
    assert plain["prefill_tokens_per_s"] > 0 < plain["decode_tokens_per_s"] and plain["cache_bytes"] >= 13 * 2 * 2 * 2 * 2 * 64
    quantized = parsed("generate", str(dense), *asked, "--format", "w4a16_g64", "--greedy")
    assert quantized["text"] == plain["text"] and quantized["weight_bytes"] == plain["weight_bytes"]
    cached = parsed("generate", str(packed), *asked, "--kv-format", "kv16")
    assert cached["text"] == plain["text"]
    shown = call("generate", str(packed), *asked).output
    assert shown.startswith(plain["text"]) and "decode" in shown and "memory: weights" in shown


def test_sampling_follows_its_seed(dense: Path):
    asked = ("generate", str(dense), "--prompt", "a", "--max-tokens", "24", "--temperature", "1.5", "--seed")
    assert parsed(*asked, "1")["text"] == parsed(*asked, "1")["text"] != parsed(*asked, "2")["text"]


def test_one_token_has_no_decode_rate(dense: Path):
    said = parsed("generate", str(dense), "--prompt", "abc", "--max-tokens", "1")
    assert said["new_tokens"] == 1 and said["decode_tokens_per_s"] is None


def test_a_model_is_evaluated(dense: Path, packed: Path, text: Path):
    """Every row against the definitions, computed here in one pass without windows that overlap."""
    asked = ("--text", str(text), "--max-tokens", "96", "--window", "95", "--stride", "94", "--reference", str(dense))
    rows = parsed("evaluate", str(packed), *asked, "--kv-format", "none", "--kv-format", "kv16", "--kv-format", "kv2_token")
    assert [(row["model"], row["kv_format"]) for row in rows] == [
        (str(dense), None),
        *((str(packed), f) for f in (None, "kv16", "kv2_token")),
    ]
    ids = torch.tensor([[ord(c) for c in TEXT[:95]]])
    both = [log_probabilities(open_model(folder), ids)[:-1].double() for folder in (dense, packed)]
    losses = [-p[range(94), ids[0, 1:]] for p in both]
    again = parsed(
        "evaluate", str(packed), "--text", str(text), "--max-tokens", "95", "--window", "95", "--stride", "94", "--reference", str(dense)
    )
    for row, loss in zip(again, losses, strict=True):
        assert row["perplexity"] == pytest.approx(float(loss.mean().exp()), rel=1e-3)
    kl = float((both[0].exp() * (both[0] - both[1])).sum(-1).mean())
    assert again[1]["kl"] == pytest.approx(kl, rel=1e-3) and again[0]["kl"] is None
    assert again[1]["top1"] == pytest.approx(float((both[0].argmax(-1) == both[1].argmax(-1)).double().mean()))
    none, kv16, kv2 = rows[1:]
    assert kv16["perplexity"] == pytest.approx(none["perplexity"], rel=0.02) and kv2["kl"] > 0
    table = call("evaluate", str(packed), *asked).output
    assert "perplexity" in table and "same token" in table


def test_a_small_cache_costs_more_than_a_large_one(dense: Path, text: Path):
    """Against the model itself: nothing is lost without a cache, little with kv8, more with kv2, where tokens are packed."""
    asked = ("--text", str(text), "--max-tokens", "180", "--window", "180", "--stride", "20", "--reference", str(dense))
    _, none, eight, two = parsed(
        "evaluate", str(dense), *asked, *(word for f in ("none", "kv8_token", "kv2_token") for word in ("--kv-format", f))
    )
    assert none["kl"] == 0 and none["top1"] == 1.0 and 0 < eight["kl"] < two["kl"] / 3


def test_formats_of_weights_make_a_table(dense: Path, packed: Path, text: Path):
    """A row for each format and each cache, and of the format that a directory was packed in that directory's numbers."""
    asked = ("--text", str(text), "--max-tokens", "96", "--window", "95", "--stride", "94", "--reference", str(dense))
    formats, caches = ("none", "w8a16_channel", PACKED), ("none", "kv8_token")
    words = [word for f in formats for word in ("--format", f)] + [word for f in caches for word in ("--kv-format", f)]
    reference, *rows = parsed("evaluate", str(dense), *asked, *words)
    assert (reference["format"], reference["kv_format"], reference["kl"]) == (None, None, None)
    assert [(row["format"], row["kv_format"]) for row in rows] == [
        (None if f == "none" else f, None if c == "none" else c) for f in formats for c in caches
    ]
    plain, eight, four = (row["kl"] for row in rows[::2])
    assert plain == 0 < eight < four / 3
    _, known = parsed("evaluate", str(packed), *asked)
    assert known["format"] is None and all(rows[4][name] == pytest.approx(known[name], rel=1e-6) for name in ("perplexity", "kl", "top1"))
    table = call("evaluate", str(dense), *asked, *words[:4]).output
    assert "as they are" in table and "w8a16_channel" in table
    assert "w5a16" in refused("evaluate", str(dense), *asked, "--format", "w8a16_channel", "--format", "w5a16_g128")


@pytest.mark.parametrize(("length", "window", "stride"), [(2, 2, 1), (17, 5, 4), (17, 5, 1), (16, 16, 8), (40, 16, 8), (41, 16, 15)])
def test_every_token_but_the_first_is_scored_once(length: int, window: int, stride: int):
    found = windows(torch.arange(length), window, stride)
    scored = [int(i) for each in found for i in each.ids[0, -each.scored :]]
    assert scored == list(range(1, length)) and all(each.ids.shape[1] <= window and each.scored < each.ids.shape[1] for each in found)


@pytest.mark.parametrize(("length", "window", "stride"), [(1, 4, 2), (0, 4, 2), (9, 1, 1), (9, 4, 4), (9, 4, 0), (9, 4, -1)])
def test_windows_that_cannot_be(length: int, window: int, stride: int):
    with pytest.raises(ValueError, match="accepted"):
        windows(torch.arange(length), window, stride)


def test_a_score_without_a_reference_has_no_divergence():
    score = Score()
    score.add(torch.full((2, 4), 0.25).log(), torch.tensor([1, 2]))
    assert score.perplexity == pytest.approx(4.0) and score.kl is None and score.top1 is None


def test_every_command_says_what_a_directory_lacks(dense: Path, tmp_path: Path, text: Path):
    calls = (
        ("generate", ("--prompt", "a")),
        ("evaluate", ("--text", str(text), "--window", "64", "--stride", "32")),
        ("quantize", (str(tmp_path / "out"),)),
    )
    for command, others in calls:
        assert "is no directory" in refused(command, str(tmp_path / "nothing"), *others)
        (tmp_path / "empty").mkdir(exist_ok=True)
        assert "has no config.json" in refused(command, str(tmp_path / "empty"), *others)
    copy = shutil.copytree(dense, tmp_path / "copy", ignore=shutil.ignore_patterns("tokenizer*"))
    for command, others in calls[:2]:
        assert "has no tokenizer" in refused(command, str(copy), *others)


LIES: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"hidden_size": 256}, "config.json makes it"),
    "vocabulary": ({"vocab_size": 64}, "config.json makes it"),
    "heads": ({"num_attention_heads": 4, "head_dim": 64}, "config.json makes it"),
    "kind": ({"model_type": "unheard_of"}, "unheard_of"),
    "layers": ({"num_hidden_layers": 3}, "no weight"),
    "activation": ({"hidden_act": "nothing"}, "makes no causal language model"),
    "type": ({"hidden_size": "wide"}, "accepted"),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("kind", ["dense", "packed", "quantized"])
def test_a_config_that_lies_is_one_clear_error(dense: Path, packed: Path, tmp_path: Path, lie: str, kind: str):
    changed, said = LIES[lie]
    copy = shutil.copytree(packed if kind == "packed" else dense, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **changed}))
    others = ("--format", "w4a16_g64") if kind == "quantized" else ()
    message = refused("generate", str(copy), "--prompt", "a", *others)
    assert "accepted" in message and (said in message or kind == "packed"), message


@pytest.mark.parametrize(
    "lie", [{"format": "w8a16_g64"}, {"format": "w4a16_g128"}, {"format": "w3a16_g64"}, {"speed": 9}, {"skip": ["q_proj"]}]
)
def test_a_packed_directory_that_lies_is_one_clear_error(packed: Path, tmp_path: Path, lie: dict[str, Any]):
    copy = shutil.copytree(packed, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"] |= lie
    (copy / "config.json").write_text(json.dumps(config))
    assert "accepted" in refused("generate", str(copy), "--prompt", "a")


@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_missing_shards_and_cut_files(dense: Path, packed: Path, tmp_path: Path, kind: str):
    source = {"dense": dense, "packed": packed}[kind]
    cut = shutil.copytree(source, tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:-100])
    assert "not a whole safetensors file" in refused("generate", str(cut), "--prompt", "a")
    shards = shutil.copytree(source, tmp_path / "shards")
    names = load_file(shards / "model.safetensors")
    (shards / "model.safetensors").unlink()
    (shards / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")})
    )
    assert "copy the missing shard" in refused("generate", str(shards), "--prompt", "a")


@pytest.mark.parametrize("kind", ["dense", "packed", "quantized"])
def test_a_missing_tensor_is_found_before_memory_is_taken(
    dense: Path, packed: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
):
    """By the headers of the files, whatever is missing; a file with names that the model does not have is left to transformers."""
    names = load_file((packed if kind == "packed" else dense) / "model.safetensors")
    lacking = ["model.norm.weight", "model.embed_tokens.weight", "model.layers.1.input_layernorm.weight"]
    lacking += ["model.layers.0.mlp.up_proj." + ("scales" if kind == "packed" else "weight")]
    others = ("--format", "w4a16_g64") if kind == "quantized" else ()

    def copied(name: str, **more: torch.Tensor) -> Path:
        copy = shutil.copytree(packed if kind == "packed" else dense, tmp_path / f"{name}{len(more)}")
        held = {key: value for key, value in names.items() if key != name}
        save_file({**held, **more}, copy / "model.safetensors", {"format": "pt"})
        return copy

    renamed = copied("model.norm.weight", **{"an.older.name": torch.zeros(2)})
    message = refused("generate", str(renamed), "--prompt", "a", *others)
    assert "no weights for model.norm.weight" in message
    with monkeypatch.context() as loading:
        for module in ("sources.PackedSource._read", "quantizer.quantize"):
            loading.setattr(f"tilebit.transformers.{module}", _memory_taken)
        loading.setattr("transformers.core_model_loading.convert_and_load_state_dict_in_model", _memory_taken)
        loading.setattr("transformers.modeling_utils.convert_and_load_state_dict_in_model", _memory_taken)
        for name in lacking:
            message = refused("generate", str(copied(name)), "--prompt", "a", *others)
            assert name.removesuffix(".scales") in message and "accepted" in message, message


def _memory_taken(*_: Any, **__: Any) -> None:
    raise AssertionError("weights are read")


def test_what_cannot_be_asked(dense: Path, packed: Path, tmp_path: Path, text: Path):
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary"
    empty.write_text(" \n")
    binary.write_bytes(b"\xff\xfe\x00")
    generate, evaluate = ("generate", str(dense)), ("evaluate", str(dense))
    say = ("--prompt", "a")
    assert "w5" in refused(*generate, *say, "--format", "w5")
    assert "kv5" in refused(*generate, *say, "--kv-format", "kv5")
    assert "kv5" in refused(*evaluate, "--text", str(text), "--kv-format", "kv5")
    assert "float32" in refused(*generate, *say, "--dtype", "float32")
    assert "tpu" in refused(*generate, *say, "--device", "tpu") and "cuda:99" in refused(*generate, *say, "--device", "cuda:99")
    assert "exclude each other" in refused(*generate, *say, "--greedy", "--temperature", "0.5")
    assert "--prompt-file" in refused(*generate) and "--prompt-file" in refused(*generate, *say, "--prompt-file", str(text))
    assert "no tokens" in refused(*generate, "--prompt", "")
    assert "is empty" in refused(*generate, "--prompt-file", str(empty)) and "is empty" in refused(*evaluate, "--text", str(empty))
    assert "UTF-8" in refused(*evaluate, "--text", str(binary))
    assert "accepted" in refused(*evaluate, "--text", str(tmp_path / "nothing.txt"))
    assert "at most 192 together" in refused(*generate, "--prompt", "a" * 100, "--max-tokens", "93")
    assert "at most 192" in refused(*evaluate, "--text", str(text), "--window", "193", "--stride", "9")
    assert "--stride" in refused(*evaluate, "--text", str(text), "--window", "16", "--stride", "16")
    assert "quantized already" in refused("generate", str(packed), *say, "--format", "w4a16_g64")
    assert "quantized already" in refused("quantize", str(packed), str(tmp_path / "out"))
    assert "exists" in refused("quantize", str(dense), str(packed))
    assert not (tmp_path / "out").exists()


def test_a_skip_without_a_format_is_refused(dense: Path, text: Path):
    words = ("--skip without --format keeps no layer", "--skip", "lm_head")
    assert words[0] in refused("generate", str(dense), "--prompt", "a", *words[1:])
    assert words[0] in refused("evaluate", str(dense), "--text", str(text), *words[1:])
    assert words[0] in refused("evaluate", str(dense), "--text", str(text), "--format", "none", *words[1:])
    assert words[0] in refused("pack", str(text.parent / "pack"), "--model", str(dense), "--kv-format", "kv16", *words[1:])


def test_tokens_that_the_model_has_not_are_refused(dense: Path, tmp_path: Path, text: Path):
    folder = write_model(tmp_path / "small", vocab_size=40)
    shutil.copyfile(dense / "tokenizer.json", folder / "tokenizer.json")
    said = "and the model has 40, from 0 on; accepted: the tokenizer that belongs to the model"
    assert said in refused("generate", str(folder), "--prompt", "a small model")
    assert said in refused("evaluate", str(folder), "--text", str(text), "--window", "32", "--stride", "16")
    smooth = ("--format", "w4a8_lqq_g64", "--smooth", str(text))
    assert said in refused("quantize", str(folder), str(tmp_path / "out"), *smooth)


def test_a_reference_of_another_vocabulary(dense: Path, tmp_path: Path, text: Path):
    copy = shutil.copytree(dense, tmp_path / "other")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "vocab_size": 64}))
    assert "64" in refused("evaluate", str(dense), "--text", str(text), "--window", "99", "--stride", "9", "--reference", str(copy))


def test_without_transformers_every_command_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for words in (("quantize", "a", str(tmp_path / "b")), ("generate", "a", "--prompt", "b"), ("evaluate", "a", "--text", "b")):
        assert "pip install 'tilebit[transformers]'" in refused(*words)


def test_bench_of_a_model(dense: Path, packed: Path, tmp_path: Path):
    """Beside the 16-bit model, of a directory and of a config alone; a packed one by itself."""
    rows = tmp_path / "rows.jsonl"
    short = ("--prompt-tokens", "20", "--steps", "3", "--device", "cpu", "--format", "w4a16_g64")
    found = parsed("bench", "--model", str(dense), *short, "--kv-format", "kv16", "--kv-format", "kv4_channel", "--out", str(rows))
    assert [(row["impl"], row["kv_format"], row["batch"]) for row in found] == [
        ("16 bits", None, 1),
        ("tilebit", "kv16", 1),
        ("tilebit", "kv4_channel", 1),
    ]
    assert all(row["decode_ms"] > 0 and row["prefill_tokens_per_s"] > 0 for row in found)
    assert found[0]["weight_bytes"] > 1.5 * found[1]["weight_bytes"] and found[1]["cache_bytes"] > found[2]["cache_bytes"] > 0
    written = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["decode_ms"] for row in written] == [row["decode_ms"] for row in found] and {row["op"] for row in written} == {"model"}
    assert [row["impl"] for row in parsed("bench", "--model", str(dense / "config.json"), *short)] == ["16 bits", "tilebit"]
    assert [(row["impl"], row["format"]) for row in parsed("bench", "--model", str(packed), *short[:-2])] == [("tilebit", "packed")]
    shown = call("bench", "--model", str(dense), *short, "--batch", "1,2").output
    lines = [[cell.strip() for cell in line.strip("│").split("│")] for line in shown.splitlines() if line.startswith("│")]
    assert shown.count("against 16 bits") == 2 and [line[0] for line in lines] == ["1", "1", "2", "2"]
    assert all(line[4] == line[6] == "1.00x" for line in lines[::2]) and all(line[4][-1] == line[6][-1] == "x" for line in lines[1::2])


def test_what_bench_refuses(dense: Path, packed: Path):
    assert "by --n and --k, or a model, by --model" in refused("bench")
    assert "not both" in refused("bench", "--n", "64", "--k", "64", "--model", str(dense))
    assert "accepted: at most 192" in refused("bench", "--model", str(dense), "--prompt-tokens", "180", "--steps", "20")
    assert "no directory" in refused("bench", "--model", str(dense / "nothing"))
    assert "whose weights are not there" in refused("bench", "--model", str(packed / "config.json"), "--prompt-tokens", "20")
    assert "kv3" in refused("bench", "--model", str(dense), "--kv-format", "kv3")
    assert "is quantized already" in refused("bench", "--model", str(packed), "--format", "w8a16_g128", "--prompt-tokens", "20")
    assert "--m with a model" in refused("bench", "--model", str(dense), "-m", "16")
    for words in (("--kv-format", "kv16"), ("--batch", "4"), ("--steps", "32"), ("--prompt-tokens", "512")):
        assert f"{words[0]} with a product; accepted" in refused("bench", "--n", "64", "--k", "64", *words)
    for wrong in ("0", "1,0", "1,,2", "x", "-1", "1.5", ""):
        assert "accepted: 16, or 1,16,64" in refused("bench", "--model", str(dense), f"--batch={wrong}")


def test_products_of_a_model_are_tuned(dense: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []
    product = TunedProduct(Workload(1, 256, 128, gate="silu"), 2, Schedule("gemm_cpu", 32, 1, 32, 1, 1), 9.5, 10.0, 4)

    def tune(model: Any, *given: Any, **named: Any) -> list[TunedProduct]:
        asked.append((model.tilebit_steps.sizes, model.tilebit_steps.parts, given, named))
        return [product, replace(product, us=None, before_us=None, tried=0)]

    monkeypatch.setattr(tilebit.transformers, "tune", tune)
    options = ("tune", "--model", str(dense), "--batch", "2,4", "--batch", "1", "--format", "w4a16_g64", "--tokens", "90", "--part", "gate")
    said = parsed(*options, "--budget", "9", "--jobs", "1")
    assert asked == [([1, 2, 4], ("gate",), (None, "kv4_channel", 90), {"budget_s": 9.0, "jobs": 1, "progress": False})]
    assert [(row["n"], row["gate"], row["calls"], row["us"], row["before_us"]) for row in said["results"]] == [
        (256, "silu", 2, 9.5, 10.0), (256, "silu", 2, None, None),
    ]  # fmt: skip
    assert said["results"][0]["schedule"] == product.schedule.to_json() and said["records"]
    for words, parts in ((("--part", "none"), ()), ((), ("gate",))):
        parsed(*options[:-2], *words)
        assert asked[-1][1] == parts
    text = call(*options).output
    assert "10.00" in text and "9.50" in text and "│ -" in text


def test_what_tune_refuses(dense: Path):
    assert "accepted: a product, by --n and --k, or a model" in refused("tune")
    assert "accepted: a product, by --n and --k, or a model" in refused("tune", "--n", "64", "--k", "64", "--model", str(dense))
    assert "kv5" in refused("tune", "--model", str(dense), "--kv-format", "kv5")
    for words in (
        ("--m", "1"),
        ("--bias",),
        ("--width", "64"),
        ("--nibbles",),
        ("--residual",),
        ("--gate", "silu"),
        ("--gate-halves",),
        ("--norm-eps", "0"),
        ("--target", "cpu"),
    ):
        assert f"{words[0]} with a model; accepted: a model without a product's options" in refused("tune", "--model", str(dense), *words)
    for words in (("--batch", "1"), ("--kv-format", "kv16"), ("--tokens", "9"), ("--part", "gate")):
        said = refused("tune", "--n", "64", "--k", "64", *words)
        assert f"{words[0]} with a product; accepted: a product without a model's options" in said
    assert "parts is ['door']; accepted: any of" in refused("tune", "--model", str(dense), "--part", "door").replace(
        "('door',)", "['door']"
    )
    assert "--dtype is 'float8'" in refused("tune", "--model", str(dense), "--dtype", "float8")
