"""``tilebit pack --model``: the pack holds what ``generate`` launches, and generates where there is no compiler."""

from __future__ import annotations

import inspect
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from any_layers import uniform_steps
from serving_environment import serving_python, serving_variables
from typer.testing import CliRunner

from tilebit.command.cli import app

pytest.importorskip("transformers", minversion="5.17")

from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PreTrainedConfig, Qwen3Config

import tilebit
from tilebit import AnyPrecisionLinear
from tilebit.layouts.kv_formats import KVFormat
from tilebit.ops import dispatch, linear, plans
from tilebit.schedules.activations.glue import GATED, NORM, GlueWorkload
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.target import Target, target_from_name
from tilebit.transformers import TilebitCache, TilebitConfig, compile, fused, needed, release
from tilebit.transformers.needed import kernels_of
from tilebit.transformers.outline import outline
from tilebit.transformers.synthetic import write_model
from tilebit.weights.any_packed import pack_any
from tilebit.weights.modules import QuantLinear

ROWS, TOKENS = 2, 256
SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": TOKENS, "pad_token_id": 0,
}  # fmt: skip
KINDS: dict[str, tuple[Callable[..., PreTrainedConfig], dict[str, Any], str, str]] = {
    "llama": (LlamaConfig, {"head_dim": 64}, "w4a16_g64", "kv4_channel"),
    "int8": (LlamaConfig, {"head_dim": 64}, "w4a8_lqq_g64", "kv8_token"),
    "groups": (Qwen3Config, {"head_dim": 64}, "w8a8_g128", "k8_channel_v4"),
    "gemma2": (Gemma2Config, {"head_dim": 64, "sliding_window": 24, "query_pre_attn_scalar": 50}, "w8a16_channel", "kv2_channel"),
    "tied": (LlamaConfig, {"head_dim": 64, "tie_word_embeddings": True}, "w8a8_channel", "kv4_channel"),
}
OUTPUT_LAYER = "tied"  # is quantized, too
HEAD_SERVED = "llama"


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pack_for_gpus_would_hold_what_a_compiled_model_launches(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Prompts, short and long, chunks of them and fused steps of the model run here as on an sm_90a, nothing launched: whatever asks for a
    kernel there finds one among those that are listed."""
    for module in (linear, needed):
        monkeypatch.setattr(module, "served", lambda workload, target: kind == HEAD_SERVED)  # as if its output layer had a record
    made, options, format, cache_format = KINDS[kind]
    config, target = made(**{**SIZES, **options}), target_from_name("sm_90a")
    folder = tmp_path / "model"
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float16).eval()
    model.save_pretrained(folder)
    skip = [] if kind == OUTPUT_LAYER else ["lm_head"]
    tilebit.quantize_model(model, format, skip=skip)
    listed = kernels_of(
        outline(folder, TilebitConfig(format, skip), None, target.arch), [KVFormat.from_name(cache_format)], [ROWS], TOKENS, target
    )
    for layer in model.modules():
        if isinstance(layer, QuantLinear):
            layer._repack_for(target.arch)
    held, asked = {workload.static() for workload in listed}, _asked_on(target, monkeypatch)
    _run(model, cache_format)
    kinds = {workload.op for workload in asked}
    assert {"decode", "append", "prefill", "gather", "gemm"} <= kinds and ("quantize" in kinds) == ("a8" in format)
    assert (NORM in kinds) == (kind != OUTPUT_LAYER), "norms before products of int8 x write codes"
    assert ("dense" in kinds) == (kind == HEAD_SERVED)
    assert not [workload for workload in asked if workload.static() not in held]
    in_steps = {workload for workload in asked if getattr(workload, "dependent", False) and workload.m == ROWS}
    assert in_steps and in_steps <= set(listed), "chosen as they are in steps"
    unasked = held - {workload.static() for workload in asked}
    assert not unasked, unasked


@pytest.mark.parametrize("widths", [None, [3], [2, 4]])
def test_a_pack_would_hold_every_width_that_is_stored_or_asked_for(
    widths: list[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whatever the model is set to: what it launches in each width is among what is listed, and nothing else is."""
    target = target_from_name("sm_90a")
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "num_hidden_layers": 1, "head_dim": 64})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float16).eval()
    with uniform_steps():
        tilebit.quantize_model_any(model, 2, 4)
    model.save_pretrained(tmp_path)
    described = outline(tmp_path, None, None, target.arch)
    listed = {w.static() for w in kernels_of(described, [KVFormat.from_name("kv16")], [ROWS], TOKENS, target, widths)}
    for layer in model.modules():
        if isinstance(layer, AnyPrecisionLinear):
            layer._hold(pack_any(layer.packed.unpack(), layer.dtype, arch=target.arch))
    asked = _asked_on(target, monkeypatch)
    for bits in widths or (2, 3, 4):
        tilebit.set_precision(model, bits)
        _run(model, "kv16")
        release(model)
    assert {workload.static() for workload in asked} == listed
    assert {w.format.name for w in listed if isinstance(w, Workload)} == {f"w{bits}a16_any" for bits in widths or (2, 3, 4)}


def _run(model: Any, cache_format: str) -> None:
    """Prompts, short and long, chunks of them, and fused steps and prompts."""
    cache = TilebitCache(model.config, format=cache_format, max_tokens=TOKENS, sequences=ROWS)
    model.set_attn_implementation("tilebit")
    with torch.no_grad():
        for columns in (20, 12, 1):  # a prompt, a short piece behind it, a step
            plans.rehearsed(lambda: model(input_ids=torch.full((ROWS, columns), 5), past_key_values=cache))  # noqa: B023
        model(input_ids=torch.full((ROWS, 20), 5), past_key_values=cache)  # a long piece: what is in the cache is gathered
        compile(model, (ROWS,), TOKENS)
        step = cache.begin_step(ROWS, 1, None, model.dtype, torch.device("cpu"))
        plans.rehearsed(lambda: model.tilebit_steps.step(torch.full((ROWS,), 5), cache.pool.cache, step.batch))
        cache.settle()
        prompt = cache.begin_step(ROWS, 20, None, model.dtype, torch.device("cpu"))
        plans.rehearsed(lambda: model.tilebit_steps.step.prompt(torch.full((ROWS * 20,), 5), cache.pool.cache, prompt.batch))


def test_a_pack_holds_the_gate_in_products_up_to_16_rows_and_apart_beyond(tmp_path: Path):
    target = target_from_name("sm_90a")
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, "head_dim": 64}), dtype=torch.float16)
    model.save_pretrained(tmp_path / "model")
    of = outline(tmp_path / "model", TilebitConfig("w4a16_g64"), None, target.arch)
    found = kernels_of(of, [KVFormat.from_name("kv16")], [1, 16, 17, 64], TOKENS, target)
    in_steps = [w for w in found if isinstance(w, Workload) and w.dependent and w.n == 2 * SIZES["intermediate_size"]]
    assert {w.m for w in in_steps if w.gate} == {1, 16} and all(w.gate_halves for w in in_steps if w.gate)
    plain = {w.m for w in in_steps if not w.gate}
    assert {17, 64} <= plain and min(plain) > 16
    apart = {w.m for w in found if isinstance(w, GlueWorkload) and w.op == GATED}
    assert {32, 64} <= apart and min(apart) > 16  # of 17 rows by the kernel of up to 32


def _asked_on(target: Target, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is asked for from now on, by calls that see ``target`` and launch nothing."""
    asked: list[Any] = []

    def launch(self: dispatch.Plan, m: int) -> Callable[..., None]:
        asked.append(self.workload.with_m(m))
        return lambda *_: None

    def made(self: Any, workload: Any, device: torch.device) -> None:
        asked.append(workload)
        self.guarded, self.launch, self.dependent = False, lambda *_: None, lambda *_: None

    for module in (dispatch, plans, linear):
        monkeypatch.setattr(module, "device_target", lambda _: target)
    monkeypatch.setattr(dispatch.Plan, "launcher", launch)
    monkeypatch.setattr(dispatch.Plan, "missing", lambda *_: [])
    monkeypatch.setattr(plans.OperationPlan, "__init__", made)
    monkeypatch.setattr(plans, "rehearsed", lambda call: call())
    monkeypatch.setattr(plans, "check", lambda *_: None)
    monkeypatch.setattr(plans, "held", {})
    monkeypatch.setattr(dispatch, "plans", {})
    real_norm, real_gate = fused.add_norm, fused.gated

    def normed(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float, out: str = "", **rest: Any) -> Any:
        if not out:  # on CPUs torch computes it
            asked.append(GlueWorkload(NORM, len(x), x.shape[1], "float16", residual is not None, eps, offset))
        return real_norm(x, residual, weight, eps, offset, **({"out": out} if out else {}), **rest)

    def gated(x: Tensor, activation: str, out: str = "", **rest: Any) -> Any:
        if not out:
            asked.append(GlueWorkload(GATED, len(x), x.shape[1] // 2, "float16", activation=activation))
        return real_gate(x, activation, **({"out": out} if out else {}), **rest)

    monkeypatch.setattr(fused, "add_norm", normed)
    monkeypatch.setattr(fused, "gated", gated)
    return asked


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "dense")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment that serves models: tilebit, torch, transformers, apache-tvm-ffi and what these need."""
    return serving_python(tmp_path_factory.mktemp("environments") / "serving", "transformers")


# `python -m tilebit` without the pack, which must fail, and what it said to a file; then with it.
TWICE = """
import runpy, sys
from contextlib import redirect_stderr
lacking, pack, *words = sys.argv[1:]
def tilebit(*more):
    sys.argv[1:] = [*words, *more]
    try:
        runpy.run_module("tilebit", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        return ended.code or 0
    return 0
with open(lacking, "w") as file, redirect_stderr(file):
    assert tilebit() == 1
sys.exit(tilebit("--pack", pack))
"""


@pytest.mark.slow
def test_generate_runs_from_a_pack_without_a_compiler(dense: Path, python: Path, tmp_path: Path, device: torch.device):
    """The same text, from an empty cache; without the pack the error says what is missing."""
    pack = tmp_path / "pack"
    model = (str(dense), "--format", "w4a16_g64", "--kv-format", "kv4_channel", "--dtype", "float16")
    packed = call("pack", str(pack), "--model", *model, "--max-tokens", "192", "--target", str(device), "--json")
    assert packed.exit_code == 0, packed.output
    assert len(json.loads(packed.stdout)["kernels"]) >= 8
    words = ("generate", *model, "--prompt", "a small model", "--max-tokens", "130", "--device", str(device), "--json")
    expected = json.loads(call(*words).stdout)["text"]

    found = serve(python, tmp_path, "-c", TWICE, str(tmp_path / "lacking"), str(pack), *words)
    assert found.returncode == 0, found.stderr
    text = json.loads(found.stdout)["text"]
    assert len(text) == len(expected) == 130  # a window fills on the way
    assert text == expected if device.type == "cpu" else text[:4] == expected[:4]  # kernels may be others, and round otherwise
    lacking = (tmp_path / "lacking").read_text()
    assert "TILEBIT_NO_COMPILE" in lacking and "tilebit" in lacking


def spoken(directory: str, cache_format: str) -> list[Any]:
    """What a packed model writes, with steps launched one by one and compiled."""
    import torch
    from transformers import AutoModelForCausalLM

    import tilebit.transformers

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float16)
    model.set_attn_implementation("tilebit")
    ids, found = torch.arange(2, 42)[None], []
    for steps in ("launched", "compiled"):
        if steps == "compiled":
            tilebit.transformers.compile(model, (1,), 192)
        cache = tilebit.transformers.TilebitCache(model.config, format=cache_format, max_tokens=192, sequences=1)
        found.append(model.generate(ids, past_key_values=cache, do_sample=False, max_new_tokens=24).tolist())
    return found


SPEAK = f"""
from __future__ import annotations
import json, sys
from importlib.util import find_spec
directory, pack, cache_format = sys.argv[1:]
for name in ("tvm", "tilelang", "xgboost", "z3", "cloudpickle", "scipy", "matplotlib", "compressed_tensors", "pytest"):
    assert find_spec(name) is None, name + " is visible"
{inspect.getsource(spoken)}
from tilebit import packs
packs.load(pack)
print(json.dumps(spoken(directory, cache_format)))
assert not [name for name in sys.modules if name.split(".")[0] in ("tvm", "tilelang")]
"""


@pytest.mark.slow
def test_a_packed_directory_runs_from_a_pack_without_a_compiler(dense: Path, python: Path, tmp_path: Path, one_thread: None):
    """Layers of integers with x in 8 bits, of any precision, and of 16-bit x, on the CPU, with steps launched one by one and compiled."""
    directory, pack, cache_format = tmp_path / "packed", tmp_path / "pack", "kv8_token"
    layers = ("--layer", "mlp.down_proj=w3-4a16_any@3", "--layer", "self_attn.o_proj=w8a16_channel")
    for words in (
        ("quantize", str(dense), str(directory), "--format", "w4a8_lqq_g64", *layers, "--dtype", "float16", "--device", "cpu"),
        ("pack", str(pack), "--model", str(directory), "--kv-format", cache_format, "--dtype", "float16", "--target", "cpu"),
    ):
        made = call(*words)
        assert made.exit_code == 0, made.output
    found = serve(python, tmp_path, "-c", SPEAK, str(directory), str(pack), cache_format)
    assert found.returncode == 0, found.stderr
    written = json.loads(found.stdout)
    assert written == spoken(str(directory), cache_format) and len(written) == 2 and len(written[1][0]) == 64


def serve(python: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A process of the serving environment, with an empty cache and nothing compiled."""
    return subprocess.run([str(python), *words], env=serving_variables(folder / "cache"), cwd=folder, capture_output=True, text=True)


def test_what_a_pack_of_a_model_refuses(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Before anything is compiled."""
    monkeypatch.setattr("tilebit.kernels.build", _compiled)
    out, model = str(tmp_path / "pack"), ("--model", str(dense))
    given = (
        (("--n", "64", "--k", "64", *model), "not both"),
        ((), "by --n and --k, or a model, by --model"),
        (("--model", str(dense / "nothing")), "is no directory"),
        ((*model, "--kv-format", "kv3"), "kv3"),
        ((*model, "--format", "w5"), "w5"),
        ((*model, "--format", "w4a16_g64", "--max-tokens", "193"), "at most 192"),
        (model, "which needs no kernel"),
        ((*model, "--kv-format", "kv16", "--batch", "0"), "--batch"),
        ((*model, "--kv-format", "kv16", "--target", "sm_1"), "sm_1"),
        ((*model, "--kv-format", "kv16", "--dtype", "float32"), "float32"),
        ((*model, "--format", "w4a16_g64", "--bits", "4"), "of a model with layers of any precision"),
        ((*model, "--format", "w3-4a16_any", "--bits", "3", "--bits", "5"), "stores 3 to 4 bits; accepted: some of these"),
        ((*model, "--format", "w8a16_any"), "'w3-8a16_any' computes in 8 bits"),
        (("--n", "64", "--k", "64", "--bits", "4"), "--bits with a product"),
        (("--n", "64", "--k", "64", "--kv-format", "kv16", "--max-tokens", "9"), "--kv-format, --max-tokens with a product"),
        (("--n", "64", "--k", "64", "--batch", "2", "--skip", "x"), "--batch, --skip with a product"),
        ((*model, "--format", "w4a16_g64", "--bias", "--residual", "--m", "3"), "--m, --bias, --residual with a model"),
    )
    for words, said in given:
        result = call("pack", out, *words)
        assert result.exit_code in (1, 2) and said in " ".join(result.output.replace("│", " ").split()), result.output
    other = tmp_path / "other"
    write_model(other, tie_word_embeddings=False)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "model_type": "stablelm", "architectures": ["StableLmForCausalLM"]}))
    assert "accepted" in call("pack", out, "--model", str(other), "--format", "w4a16_g64").output
    assert not Path(out).exists()


def test_widths_are_chosen_by_the_command(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    packed: list[Any] = []
    monkeypatch.setattr("tilebit.command.models.pack_kernels", lambda path, workloads, *_: packed.append(workloads))
    words = ("pack", str(tmp_path / "pack"), "--model", str(dense), "--format", "w3-5a16_any", "--target", "sm_90a")
    for more in ((), ("--bits", "3", "--bits", "5")):
        assert call(*words, *more).exit_code == 0
    assert [{workload.format.bits for workload in workloads} for workloads in packed] == [{3, 4, 5}, {3, 5}]


def _compiled(*_: Any, **__: Any) -> None:
    raise AssertionError("a kernel is compiled")
