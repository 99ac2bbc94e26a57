"""Compiled models: fused steps give the logits of the model as it was, are taken where they may be, and notice what is changed."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import GREEDY, own_cache, prompts
from compiled_models import KINDS, LIMIT, PADDING, ROWS, alike, model_of
from stepping import COLUMNS, steps_of
from tiny_models import gemma3, llama, made
from torch import Tensor
from transformers import AutoModelForCausalLM

import tilebit
import tilebit.transformers
from tilebit.layouts.kv import RESIDUAL
from tilebit.transformers import TilebitCache, compile, fused, release
from tilebit.transformers.anatomy import Norm
from tilebit.transformers.parted import Part, Parted, gated


@pytest.mark.parametrize("kind", [kind if kind == "llama" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS])
def test_a_fused_step_gives_the_logits_of_the_model(kind: str, taken: list[int]):
    model = model_of(kind)
    expected = steps_of(model)
    assert compile(model, (ROWS,)) is model
    alike(steps_of(model), expected)
    assert taken == [ROWS] * 10
    release(model)
    assert all(torch.equal(a, b) for a, b in zip(steps_of(model), expected, strict=True))  # its weights, now views, are the same
    assert len(taken) == 10


PARTED: dict[str, tuple[str, tuple[Part, ...], set[str]]] = {
    "all": ("llama", ("residual", "gate", "norm"), {"residual", "gate", "norm"}),
    "a residual alone": ("llama", ("residual",), {"residual"}),
    "a norm without a residual": ("llama", ("norm",), {"norm"}),  # of the first layer alone
    "gate and up in one, of 16 bits": ("phi3", ("gate", "residual"), set()),
    "norms behind what is added": ("gemma2", ("residual", "gate", "norm"), {"gate"}),
    "biases, 8 bits": ("qwen2", ("residual", "gate", "norm"), {"residual", "gate", "norm"}),
}  # fmt: skip


@pytest.mark.parametrize("case", [case if case == "all" else pytest.param(case, marks=pytest.mark.slow) for case in PARTED])
def test_parts_give_the_logits_and_the_tokens_of_the_model(case: str, taken: list[int]):
    kind, parts, done = PARTED[case]
    model = model_of(kind)
    expected = steps_of(model)
    compile(model, (ROWS,), parts=parts)
    found = steps_of(model)
    alike(found, expected)
    assert taken == [ROWS] * 10
    products = model.tilebit_steps.step.products
    assert {part for product in products if isinstance(product, Parted) for part in product.does} == done
    blocks = model.tilebit_steps.step.blocks
    counts = [sum(len(getattr(product, "does", ())) for product in (b.qkv, b.o, b.gate_up, b.down)) for b in blocks]
    assert counts == {"all": [5, 5], "a residual alone": [2, 2], "a norm without a residual": [1, 0]}.get(case, counts)
    compile(model, (ROWS,))
    plain = steps_of(model)
    for a, b in zip(found, plain, strict=True):
        gap = b.topk(2).values.diff().abs().squeeze(-1)
        assert bool(((a.argmax(-1) == b.argmax(-1)) | (gap < LIMIT)).all())  # the same tokens, but for two that are as likely


def test_a_gate_is_applied_up_to_16_rows():
    torch.manual_seed(0)
    whole = tilebit.QuantLinear.from_float(torch.nn.Linear(128, 192, dtype=torch.float16), "w4a16_g64")
    product: Any = gated(whole, ("norm",), Norm(torch.ones(128), 1e-5, offset=1.0), "silu")
    assert product.does == {"gate"}  # such a norm's weight is added to 1
    assert product.layer is whole
    for rows in (1, 16, 17, 64):
        x = torch.randn(rows, 128, dtype=torch.float16)
        with torch.no_grad():
            found, plain = product(x), whole(x)
            expected = (plain if rows > 16 else tilebit.gated(plain)).float()
            assert found.shape == expected.shape and product.gates(rows) == (rows <= 16)
            assert float((found.float() - expected).norm() / expected.norm()) < 2e-3


def test_a_gate_needs_a_program_that_applies_it():
    norm, layer = Norm(torch.ones(128), 1e-5), torch.nn.Linear(128, 96, dtype=torch.float16)
    ragged = tilebit.QuantLinear.from_float(layer, "w4a16_g64")  # its halves are no whole tiles
    assert gated(ragged, (), norm, "silu") is ragged
    assert gated(layer, (), norm, "silu") is layer  # of 16 bits
    codes = tilebit.QuantLinear.from_float(torch.nn.Linear(128, 64 * 11, dtype=torch.float16), "w4a16_g64")
    assert isinstance(gated(codes, (), norm, "silu"), Parted)
    codes._repack_for("sm_90a")
    assert gated(codes, (), norm, "silu") is codes  # on GPUs 11 slabs of 64 rows are no even number of warps' rows


SIZES = {1: True, 16: True, 17: False, 64: False}  # rows of a step, and whether its products apply the gate


def test_the_default_applies_the_gate_up_to_16_sequences(monkeypatch: pytest.MonkeyPatch):
    model = model_of("llama")
    compile(model, SIZES)
    blocks = model.tilebit_steps.step.blocks
    assert [product.does for product in model.tilebit_steps.step.products if isinstance(product, Parted)] == [{"gate"}] * 2
    for block, layer in zip(blocks, model.model.layers, strict=True):  # the weight is held once
        held = block.gate_up.layer.packed.weight.untyped_storage().data_ptr()  # type: ignore[union-attr]
        assert {p.packed.weight.untyped_storage().data_ptr() for p in (layer.mlp.gate_proj, layer.mlp.up_proj)} == {held}
    of_rows: list[int] = []
    real = fused.gated

    def gated_rows(x: Tensor, *rest: Any, **named: Any) -> Any:
        of_rows.append(len(x))
        return real(x, *rest, **named)

    monkeypatch.setattr(fused, "gated", gated_rows)

    def logits(rows: int) -> Tensor:
        torch.manual_seed(rows)
        ids = torch.randint(model.config.vocab_size, (rows, 21))
        cache = TilebitCache(model.config, "kv16", max_tokens=32, sequences=rows)
        with torch.no_grad():
            model(input_ids=ids[:, :20], past_key_values=cache)
            of_rows.clear()
            return model(input_ids=ids[:, 20:], past_key_values=cache).logits

    found = {}
    for rows, gates in SIZES.items():
        found[rows] = logits(rows)
        assert set(of_rows) == (set() if gates else {rows})  # once more where it is rehearsed
    compile(model, SIZES, parts=())
    assert not any(isinstance(product, Parted) for product in model.tilebit_steps.step.products)
    for rows, gates in SIZES.items():
        plain = logits(rows)
        assert set(of_rows) == {rows}
        assert torch.equal(found[rows], plain) != gates  # rounded once less
        alike([found[rows]], [plain])


def test_low_bit_caches_are_filled_alike(taken: list[int], monkeypatch: pytest.MonkeyPatch):
    """Layer 0 sees the same input: what it packs is the same bits, but for what rotary embeddings in fp32 round otherwise. The token that
    fills a window sees it in 16 bits, so that its logits are nearer to those of a cache of 16 bits; those before it are the same."""
    caches: list[TilebitCache] = []
    own = TilebitCache.__init__
    monkeypatch.setattr(TilebitCache, "__init__", lambda self, *given, **named: (own(self, *given, **named), caches.append(self))[0])
    model = model_of("llama")
    exact, expected = steps_of(model), steps_of(model, format="kv4_channel")
    got = steps_of(compile(model, (ROWS,)), format="kv4_channel")
    fills = RESIDUAL - 1 - (COLUMNS - PADDING[0])  # the step in which the first row's window is full
    alike(got[:fills], expected[:fills])
    alike([a[1:] for a in got], [a[1:] for a in expected])
    wrong, worse = (float((logits[fills] - exact[fills])[0].abs().max()) for logits in (got, expected))
    assert wrong < LIMIT < worse
    pages = [cache.pool.cache.pages[0] for cache in caches[1:]]
    different = (pages[0] != pages[1]).sum()
    assert bool(pages[0].any()) and int(different) <= pages[0].numel() // 1000
    assert len(taken) == 10


@torch.no_grad()
def test_generate_takes_it(taken: list[int]):
    model: Any = compile(model_of("llama"), (1, 3))
    assert inspect.signature(model.forward) == inspect.signature(type(model)(model.config).forward)
    own = own_cache(model)
    model.generate(**prompts(1, 20), past_key_values=own, **GREEDY)
    assert taken == [1] * 15 and own.get_seq_length() == 35
    model.generate(**prompts(1, 20), past_key_values=own_cache(model), num_beams=3, **GREEDY)
    assert taken == [1] * 15 + [3] * 15
    model.generate(**prompts(2, 20), past_key_values=own_cache(model), **GREEDY)  # rows that are not prepared for
    model.generate(**prompts(1, 20), past_key_values=own_cache(model), prompt_lookup_num_tokens=4, **GREEDY)  # revocable steps
    assert len(taken) == 30


@pytest.mark.parametrize("case", ["hidden states", "positions", "gradients", "training", "tuple"])
def test_other_calls_run_as_before(case: str, taken: list[int]):
    model: Any = compile(model_of("llama", quantized=False), (1,))
    cache, ids = own_cache(model), torch.tensor([[5]])
    options: dict[str, Any] = {"past_key_values": cache}
    with torch.no_grad():
        model(**prompts(1, 20), **options)
        if case == "hidden states":
            assert len(model(input_ids=ids, output_hidden_states=True, **options).hidden_states) == 3
        elif case == "positions":
            model(input_ids=ids, position_ids=torch.tensor([[100]]), **options)
        elif case == "training":
            model.train()(input_ids=ids, **options)
        elif case == "tuple":
            assert isinstance(model(input_ids=ids, return_dict=False, **options), tuple)
    if case == "gradients":
        with torch.enable_grad(), pytest.raises(ValueError, match="derivative with respect to k"):  # as the model says it
            model(input_ids=ids, **options)
    assert taken == []


def test_changed_layers_are_noticed(taken: list[int]):
    model: Any = compile(model_of("llama"), (ROWS,))
    other = made(llama(), torch.float16, seed=5)
    tilebit.quantize_model(other, KINDS["llama"][1])
    model.load_state_dict(other.state_dict())
    alike(steps_of(model), steps_of(other))
    model.model.layers[1].mlp.gate_proj = copy.deepcopy(other.model.layers[0].mlp.gate_proj)
    other.model.layers[1].mlp.gate_proj = copy.deepcopy(other.model.layers[0].mlp.gate_proj)
    alike(steps_of(model), steps_of(other))
    assert len(taken) == 20
    model.to(torch.bfloat16)
    found = steps_of(model)
    assert found[0].dtype == torch.bfloat16
    assert float((found[0].float() - steps_of(other)[0].float()).abs().max()) < 1.0 and len(taken) == 30


def test_a_copy_is_a_model_of_its_own(taken: list[int]):
    model: Any = compile(model_of("llama"), (ROWS,))
    expected = steps_of(model)
    copied = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    alike(steps_of(copied), expected)
    assert len(taken) == 20


def test_a_compiled_model_is_saved(tmp_path: Path):
    model: Any = compile(model_of("llama"), (ROWS,))
    expected = steps_of(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float16)
    alike(steps_of(compile(loaded, (ROWS,))), expected)


def test_an_unknown_kind_runs_as_before(taken: list[int]):
    model = made(gemma3(), torch.float16)
    with pytest.warns(UserWarning, match="Gemma3ForCausalLM is not compiled.*gemma3_text.*accepted: .*llama"):
        assert compile(model, (ROWS,)) is model
    steps_of(model, 2)
    rotary = made(llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), torch.float16)
    with pytest.warns(UserWarning, match="'dynamic', which depends on a sequence's length"):
        compile(rotary)
    assert taken == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_sizes": ()}, r"batch_sizes is \[\]"),
        ({"batch_sizes": (0, 1)}, "1 and above"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"parts": "norm"}, "parts is .norm.; accepted: any of"),
        ({"parts": ["glue"]}, "accepted: any of"),
    ],
)
def test_what_is_refused(options: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        compile(made(llama(), torch.float16), **options)
    with pytest.raises(TypeError, match="accepted: a causal language model of transformers"):
        compile(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_a_failed_step_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    """And a sequence that is full says so."""
    model: Any = compile(model_of("llama"), (1,), max_tokens=40)
    cache = own_cache(model, max_tokens=21)
    with torch.no_grad():
        model(**prompts(1, 20), past_key_values=cache)
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no kernel"):
            patch.setattr(model.tilebit_steps, "launch", _failing)
            model(input_ids=torch.tensor([[5]]), past_key_values=cache)
        assert cache.get_seq_length() == 20 and cache.pool.lengths() == [20]
        model(input_ids=torch.tensor([[5]]), past_key_values=cache)


def _failing(*_: Any) -> Tensor:
    raise RuntimeError("no kernel")
