"""Simulated caches: attention reads what a cache holds at each token, and the page of every format."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

from results.measure.quality_caches import AT_ONCE, attended, cached, packed_tokens, simulated_cache
from results.measure.quality_model import Texts, spaced, squared_gradients
from results.measure.quality_variants import Simulation, Variant, format_variants
from results.report.quality_formats import formats_quality_section, read_formats
from tilebit.layouts.formats import FORMATS
from tilebit.layouts.kv import RESIDUAL
from tilebit.layouts.kv_formats import KVFormat
from tilebit.layouts.kv_quantize import dequantize_group, quantize_group
from tilebit.weights.quantize_any import quantize_any

TOKENS = 300


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, max_position_embeddings=512, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits[0].float()


@pytest.mark.parametrize("name", ["kv16", "kv8_channel", "kv4_token", "kv2_token", "kvfp8", "k4_channel_v2"])
def test_codes_stand_for_what_kernels_make_of_them(name: str) -> None:
    """Bit for bit the twin's; a head of zeros, numbers beyond fp8's, and a last group that is not full."""
    format, generator = KVFormat.from_name(name), torch.Generator().manual_seed(2)
    k, v = (torch.randn(3, 2 * RESIDUAL + 40, 64, generator=generator) * torch.tensor([0.0, 1.0, 300.0])[:, None, None] for _ in "kv")
    found = cached(k, v, format)
    filled = [torch.nn.functional.pad(x.half().float(), (0, 0, 0, RESIDUAL - 40)).unflatten(1, (-1, RESIDUAL)).numpy() for x in (k, v)]
    for head in range(3):
        for group in range(3):
            expected = dequantize_group(quantize_group(filled[0][head, group], filled[1][head, group], format), format)
            for got, known in zip(found, expected, strict=True):
                own = got[head, group * RESIDUAL :][:RESIDUAL]
                assert torch.equal(own, torch.from_numpy(known)[: len(own)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kv2_channel", "kv4_token"])
def test_a_window_at_once_is_what_a_cache_gives_token_by_token(model: Any, name: str) -> None:
    """Kernels over a ``TilebitCache``, a token each call. In fp16 either may round to another code, which is little beside what the codes
    themselves lose."""
    from tilebit.transformers import TilebitCache

    half = LlamaForCausalLM(model.config).half().eval()
    half.load_state_dict(model.state_dict())
    ids = torch.randint(0, 61, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    plain = logits(half, ids)
    with simulated_cache(half, name):
        simulated = logits(half, ids)
    half.set_attn_implementation("tilebit")
    cache = TilebitCache(half.config, format=name, max_tokens=512, sequences=1)
    with torch.no_grad():
        real = torch.cat([half(ids[:, i : i + 1], past_key_values=cache).logits[0] for i in range(TOKENS)]).float()
    assert float((simulated - real).norm()) < 0.1 * float((plain - real).norm())
    assert float((simulated - real).norm() / real.norm()) < 0.06 < float((plain - real).norm() / real.norm())


@pytest.mark.parametrize(("kept", "expected"), [(0, [0, 128, 128, 256]), (128, [0, 0, 0, 128]), (1, [0, 0, 128, 128])])
def test_a_group_is_packed_when_it_is_complete(kept: int, expected: list[int]) -> None:
    assert [packed_tokens(TOKENS, kept)[place] for place in (126, 127, 128, 255)] == expected


@pytest.mark.parametrize("kept", [AT_ONCE, 0, 128])
def test_each_query_reads_codes_of_what_is_packed(kept: int) -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, heads, TOKENS, 64, generator=generator, dtype=torch.float32).half().float() for heads in (4, 2, 2))
    format = KVFormat.from_name("kv4_token")
    coded = cached(k[0], v[0], format)
    got = attended(q, k, v, format, kept, None)
    for place in (0, 126, 127, 200, 255, 299):
        count = place + 1 if kept == AT_ONCE else packed_tokens(TOKENS, kept)[place]
        keys, values = (
            torch.cat([c[:, :count], x[0, :, count : place + 1]], 1).repeat_interleave(2, 0) for c, x in ((coded[0], k), (coded[1], v))
        )
        weights = (torch.einsum("hd,htd->ht", q[0, :, place], keys) / 8).softmax(-1)
        assert torch.allclose(got[0, :, place], torch.einsum("ht,htd->hd", weights, values), atol=1e-5)


def test_a_cache_is_put_in_and_taken_out(model: Any) -> None:
    ids, before = torch.arange(40)[None], model.config._attn_implementation
    plain = logits(model, ids)
    with simulated_cache(model, "kv16"):
        assert 0 < float((logits(model, ids) - plain).abs().max()) < 0.02  # keys and values of fp16
    with simulated_cache(model, "kv2_token", AT_ONCE):
        assert float((logits(model, ids) - plain).abs().max()) > 0.2
    assert model.config._attn_implementation == before and torch.equal(logits(model, ids), plain)
    for name, kept in (("kv4_channel", AT_ONCE), ("kv4_token", -2)):
        with pytest.raises(ValueError, match=f"kept is {kept} of {name}; accepted"), simulated_cache(model, name, kept):
            pass


def test_every_format_is_a_variant_and_can_be_simulated(model: Any) -> None:
    found = format_variants()
    assert len(found) == len(set(found))
    assert set(FORMATS) == {variant.format for variant in found} - {""}
    assert [(variant.format, variant.high, variant.share) for variant in found if variant.high] == [("w4a8_g128_asym", "w8a8_g128", 0.1)]
    by_gradients = [variant.format for variant in found if variant.samples and not variant.high]
    assert by_gradients == [name for name, format in FORMATS.items() if format.codebook]
    activations = {variant.format: variant.activations for variant in found}
    assert [activations[name] for name in ("w8a8_fp8", "w8a8_fp8_g128", "w4a8_fp8")] == ["fp8_token", "fp8_g128", "fp8_token"]
    assert {"kv16", "kv8_channel", "kv4_token", "kv2_channel", "kvfp8"} <= {variant.kv_format for variant in found}
    simulation = Simulation(model, None, (1, 16), 16)  # type: ignore[arg-type]
    before = simulation.originals["model.layers.0.mlp.up_proj"]
    for variant in (Variant("w4a16_mxfp4", "round"), Variant("w4a16_g32", "round", kv_format="kv16")):
        with simulation.of(variant) as said:
            error = float((simulation.layers["model.layers.0.mlp.up_proj"].weight - before).norm() / before.norm())
            assert 0.03 < error < 0.3 and 3 < said["bits_per_weight"] < 7, variant
    with simulation.of(Variant("w8a8_fp8", "round", activations="fp8_token")) as said:
        assert said["bits_per_weight"] < 8.5
    assert Variant.of_row({**Variant("w4a16_g64", "round").to_json(), "perplexity": 3.0}) == Variant("w4a16_g64", "round")


def test_widths_are_of_one_store_and_take_squared_gradients() -> None:
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 61, (200,), generator=torch.Generator().manual_seed(3))
    simulation, name = Simulation(model, Texts([], ids), (1, 16), 16), "model.layers.0.self_attn.k_proj"
    simulation.layers = {name: simulation.layers[name]}  # clustering takes its time
    weight = simulation.originals[name]
    gradients = squared_gradients(model, simulation.layers, spaced(ids, 2, 16))
    assert gradients[name].shape == weight.shape and float(gradients[name].min()) >= 0 and gradients[name].any()
    for samples, sensitivity in ((0, None), (2, gradients[name])):
        store = quantize_any(weight, sensitivity=sensitivity)
        for bits in (3, 8):
            with simulation.of(Variant(f"w{bits}a16_any", "round", samples=samples)):
                assert torch.equal(simulation.layers[name].weight, store.dequantize(bits))
    with simulation.of(Variant("w2a16_any", "round")):
        assert torch.equal(simulation.layers[name].weight, quantize_any(weight, 2).dequantize(2))
    assert torch.equal(simulation.layers[name].weight, weight)


def test_the_page(tmp_path: Path) -> None:
    base = {
        "model": "tiny", "gpu": "a CPU", "commit": "a" * 40, "date": "2026-01-01", "tokens": 2048, "window": 1024, "bits_per_weight": 16.0,
        "perplexity": 10.0, "kl": 0.0, "top1": 1.0,
    }  # fmt: skip
    weights = Variant("w4a16_g64", "round")
    cases = [
        (Variant(), {}),
        (Variant(kv_format="kv4_token"), {"kl": 0.5}),
        (Variant(kv_format="kv4_token", kept=-1), {"kl": 0.75}),
        (weights, {"bits_per_weight": 4.25, "kl": 0.25}),
        (replace(weights, kv_format="kv4_token"), {"bits_per_weight": 4.25, "kl": 0.875}),
        (Variant("w4a8_g128_asym", "round", "w8a8_g128", 0.1, activations="a8_g128"), {"bits_per_weight": 4.6, "kl": 0.125}),
        (Variant("w3a16_any", "round"), {"bits_per_weight": 3.5, "kl": 0.625}),
        (Variant("w3a16_any", "round", samples=16), {"bits_per_weight": 3.5, "kl": 0.375}),
    ]
    lines = [{**base, **variant.to_json(), **more} for variant, more in cases]
    lines.insert(1, {**lines[0], "tokens": 1024, "perplexity": 99.0})  # of less text
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = formats_quality_section(tmp_path)
    assert "| kv4_token | 4.50 | 10.00 | 0.5000 | 100.0% |" in page and "| kv4_token | none | 10.00 | 0.7500 | 100.0% |" in page
    assert "| w4a16_g64 | 16 bits | 4.25 | 10.00 | 0.2500 | 100.0% |" in page
    assert "| w4a16_g64 | kv4_token | 10.00 | 0.8750 | 100.0% | 0.2500 |" in page and "99.00" not in page
    assert "| w4a8_g128_asym, 10% w8a8_g128 | 8 bits, groups of 128 | 4.60 | 10.00 | 0.1250 | 100.0% |" in page
    assert "| w3a16_any | 16 bits | 3.50 | 10.00 | 0.6250 |" in page
    assert "| w3a16_any, squared gradients | 16 bits | 3.50 | 10.00 | 0.3750 |" in page
    assert formats_quality_section(tmp_path / "nothing") == ""
    from results.report.quality_plot import formats

    ((_, rows),) = read_formats(tmp_path).items()
    assert [len(axes.lines) for axes in formats("tiny", rows).axes] == [1, 4]  # of weights two marks and two lines
