"""``generate`` over a tilebit cache beside transformers' own attention and cache."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import SIZES
from transformers import DynamicCache

from tilebit.transformers import TilebitCache

GREEDY: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
SAMPLED: dict[str, Any] = {"max_new_tokens": 16, "do_sample": True, "top_k": 20}
MODES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampling": SAMPLED,
    "several returned": {**SAMPLED, "num_return_sequences": 3},
    "beams": {**GREEDY, "num_beams": 3, "num_return_sequences": 2, "output_scores": True},
    "prompt look-up": {**GREEDY, "max_new_tokens": 24, "prompt_lookup_num_tokens": 6},
    "chunked prefill": {**GREEDY, "prefill_chunk_size": 50},
}
NEAR = 0.03  # of float16 logits, relative: usually less than 0.005; attention that is sharp makes more of a rounding
LIMIT = 0.1  # of float16 logits with a deviation of 2, and of a beam's mean logarithm of probability


def prompts(rows: int, columns: int, padding: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    """Random ones that repeat themselves, so that look-up finds drafts; rows are padded on the left."""
    torch.manual_seed(rows + columns)
    ids = torch.randint(2, SIZES["vocab_size"], (rows, 20)).repeat(1, columns // 20 + 1)[:, :columns]
    mask = torch.ones_like(ids)
    for row, count in enumerate(padding):
        ids[row, :count], mask[row, :count] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def run(model: Any, attention: str, cache: Any, inputs: dict[str, torch.Tensor], options: dict[str, Any]) -> Any:
    """On the model's device."""
    model.set_attn_implementation(attention)
    torch.manual_seed(7)
    inputs = {name: value.to(model.device) for name, value in inputs.items()}
    return model.generate(**inputs, past_key_values=cache, return_dict_in_generate=True, output_logits=True, **options)


def own_cache(model: Any, **options: Any) -> TilebitCache:
    model.set_attn_implementation("tilebit")
    return TilebitCache(model.config, format="kv16", **options)


def apart(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """How far rows of logits are from others: the norm of the difference, relative."""
    return (got - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)


def agree(got: Any, expected: Any, sampled: bool = False) -> None:
    """Rows of the same prompt have the same logits at every step, hence the same tokens, but where two tokens' logits lie so near in
    float16 that either may follow: behind it a row's text is another one, and is not compared. That may happen to few, on a GPU, for
    which nobody has chosen prompts, to more."""
    assert len(got.logits) == len(expected.logits)
    first = expected.sequences.shape[1] - len(expected.logits)
    same = (got.sequences[:, :first] == expected.sequences[:, :first]).all(1)
    rows, compared = torch.arange(len(same), device=same.device), 0
    for step, (a, b) in enumerate(zip(got.logits, expected.logits, strict=True)):
        assert float(apart(a, b)[same].max()) < NEAR
        compared += int(same.sum())
        own, other = got.sequences[:, first + step], expected.sequences[:, first + step]
        assert sampled or float((b[rows, other] - b[rows, own])[same].max()) < 2 * LIMIT
        same &= own == other
        if not same.any():
            break
    assert compared >= (0.75 if same.device.type == "cpu" else 0.2) * same.numel() * len(expected.logits)


def agree_on_beams(model: Any, got: Any, expected: Any, inputs: dict[str, torch.Tensor]) -> None:
    """The beams' scores are the reference's, and what the reference gives such texts; beams of nearly the same score may change
    places."""
    assert float((got.sequences_scores - expected.sequences_scores).abs().max()) < LIMIT
    model.set_attn_implementation(model.reference)
    text, prompt = got.sequences, inputs["input_ids"].shape[1]
    mask = inputs["attention_mask"].to(text.device).repeat_interleave(len(text) // len(inputs["input_ids"]), 0)
    mask = torch.nn.functional.pad(mask, (0, text.shape[1] - prompt), value=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=text, attention_mask=mask, position_ids=positions).logits[:, prompt - 1 : -1].float()
    scores = logits.log_softmax(-1).gather(2, text[:, prompt:, None]).mean((1, 2))
    assert float((got.sequences_scores - scores).abs().max()) < LIMIT


@torch.no_grad()
def compared(model: Any, inputs: dict[str, torch.Tensor], options: dict[str, Any], **cache_options: Any) -> TilebitCache:
    cache = own_cache(model, **cache_options)
    expected = run(model, model.reference, DynamicCache(config=model.config), inputs, options)
    got = run(model, "tilebit", cache, inputs, options)
    if "num_beams" in options:
        agree_on_beams(model, got, expected, inputs)
        return cache
    agree(got, expected, sampled=options["do_sample"])
    return cache


def continued(contenders: list[tuple[Any, str, Any]], inputs: dict[str, torch.Tensor]) -> None:
    """Of two models, each with an attention and a cache: greedy texts agree, and again when all tokens so far and a few more are given."""
    given = [inputs, inputs]
    for _ in range(2):
        expected, got = found = [run(*contender, own, GREEDY) for contender, own in zip(contenders, given, strict=True)]
        agree(got, expected)
        more = prompts(len(got.sequences), 5)["input_ids"].to(got.sequences.device)
        given = [_behind(each, torch.cat((text.sequences, more), 1)) for each, text in zip(given, found, strict=True)]


def _behind(inputs: dict[str, torch.Tensor], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    mask = inputs["attention_mask"]
    return {"input_ids": ids, "attention_mask": torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)}
