"""``generate`` of compiled models with 4-bit weights, in every mode: tokens and logits of the same models as they were. On a GPU steps are
CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_kernels import build_attention
from comparison import GREEDY, MODES, NEAR, agree, agree_on_beams, apart, continued, own_cache, prompts, run
from compiled_models import KINDS, model_of
from replays import Watched
from stepping import steps_of
from tiny_models import llama, made

import tilebit
from tilebit.transformers import compile

FORMAT, CACHES = "w4a16_g64", ("kv16", "kv4_channel")
SIZES = (1, 3)
COLUMNS = 120  # a window fills on the way
PACKED = 140  # one is full before
PADDING = (0, 7, 2)


ON_CPU = [pytest.param((kind, "cpu"), id=f"{kind}-cpu") for kind in KINDS]
ON_GPU = [pytest.param((kind, "cuda"), id=f"{kind}-cuda", marks=pytest.mark.gpu) for kind in KINDS]
every_kind = pytest.mark.parametrize("models", [*ON_CPU, *ON_GPU], indirect=True)
every_kind_on_gpu = pytest.mark.parametrize("models", [ON_CPU[0], *ON_GPU], indirect=True)


@pytest.fixture(scope="module")
def models(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """One of a kind on a device as it was, and one compiled."""
    kind, device = request.param
    build_attention(model_of(kind, quantized=False).to(device), CACHES, SIZES, COLUMNS)
    own, fused = (model_of(kind, format=FORMAT).to(device) for _ in range(2))
    own.reference = "eager" if kind == "gemma2" else "sdpa"
    tilebit.prepare(own, m=[*SIZES, 7, COLUMNS, *(max(SIZES) * columns for columns in (50, COLUMNS))])
    return own, compile(fused, SIZES)


@torch.no_grad()
def compared(models: tuple[Any, Any], inputs: dict[str, torch.Tensor], options: dict[str, Any]) -> None:
    expected, got = (run(model, "tilebit", own_cache(model), inputs, options) for model in models)
    if "num_beams" in options:
        agree_on_beams(models[0], got, expected, inputs)
    else:
        agree(got, expected, options["do_sample"])


@pytest.mark.slow
@every_kind
def test_every_kind_writes_the_text_that_it_wrote(models: tuple[Any, Any], replays: list[Watched]):
    """Padded rows; of 15 steps the first loads kernels and the others are replayed."""
    compared(models, prompts(3, COLUMNS, PADDING), GREEDY)
    assert [len(replay.ids) for replay in replays] == [3] * 14


@pytest.mark.slow
@every_kind
def test_steps_of_every_kind_have_the_logits_that_they_had(models: tuple[Any, Any], replays: list[Watched]):
    """Over a cache of 4 bits a rounding elsewhere makes some codes others: logits move by less than half as much as that cache moves them
    from one of 16 bits. No window fills: the token that fills one sees it in 16 bits in a fused step alone."""
    own, fused = ({format: torch.cat(steps_of(model, format=format, rows=3, columns=PACKED)) for format in CACHES} for model in models)
    assert float(apart(fused["kv16"], own["kv16"]).max()) < NEAR
    moved, lost = apart(fused["kv4_channel"].flatten(), own["kv4_channel"].flatten()), apart(*(own[f].flatten() for f in reversed(CACHES)))
    assert float(moved) < float(lost) / 2
    assert [len(replay.ids) for replay in replays] == [3] * 18


@pytest.mark.slow
@every_kind_on_gpu
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "greedy"])
def test_every_mode_writes_the_text_that_it_wrote(models: tuple[Any, Any], mode: str, replays: list[Watched]):
    rows = 3 if mode in ("sampling", "chunked prefill") else 1
    compared(models, prompts(rows, COLUMNS), MODES[mode])
    assert {len(replay.ids) for replay in replays} == (set() if mode == "prompt look-up" else {3})


@pytest.mark.slow
@every_kind_on_gpu
def test_a_draft_model_proposes(models: tuple[Any, Any], replays: list[Watched]):
    assistant: Any = made(llama(), torch.float16, seed=3).to(models[0].device)
    compared(models, prompts(1, COLUMNS), {**GREEDY, "assistant_model": assistant, "num_assistant_tokens": 5})
    assert not replays  # steps that may be taken back are no fused ones


@pytest.mark.slow
@every_kind_on_gpu
def test_prompts_are_continued(models: tuple[Any, Any], replays: list[Watched]):
    continued([(model, "tilebit", own_cache(model)) for model in models], prompts(3, 40, PADDING))
    assert [len(replay.ids) for replay in replays] == [3] * (14 + 15)
