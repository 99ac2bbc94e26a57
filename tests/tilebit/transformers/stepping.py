"""Steps of a model with tokens that are always the same ones, behind a prompt with padding: logits that rounding cannot send elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from comparison import prompts
from compiled_models import PADDING, ROWS
from torch import Tensor

from tilebit.transformers import TilebitCache

COLUMNS = 124  # a window fills on the way


@torch.no_grad()
def steps_of(
    model: Any,
    count: int = 10,
    format: str = "kv16",
    rows: int = ROWS,
    columns: int = COLUMNS,
    padding: tuple[int, ...] = PADDING,
    cache: TilebitCache | None = None,
    **options: Any,
) -> list[Tensor]:
    """Logits [rows, 1, vocabulary] of ``count`` tokens, one after another."""
    model.set_attn_implementation("tilebit")
    cache = TilebitCache(model.config, format=format) if cache is None else cache
    inputs = {name: value.to(model.device) for name, value in prompts(rows, columns, padding).items()}
    mask = inputs["attention_mask"]
    model(**inputs, position_ids=(mask.cumsum(1) - 1).clamp(min=0), past_key_values=cache)
    found = []
    for step in torch.randint(2, 256, (count, rows, 1), generator=torch.Generator().manual_seed(3)).to(model.device):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        given = {"attention_mask": mask, "position_ids": mask.sum(1, keepdim=True) - 1, **options}
        found.append(model(input_ids=step, past_key_values=cache, **given).logits)
    return found


@torch.no_grad()
def prompt_and_steps(model: Any, cache: TilebitCache, ids: Tensor) -> list[Tensor]:
    """Logits [rows, vocabulary] behind the prompt ``ids`` [rows, n], then behind its first and its second token again."""
    model.set_attn_implementation("tilebit")
    cache.reset()
    return [model(input_ids=given, past_key_values=cache).logits[:, -1] for given in (ids, ids[:, :1], ids[:, 1:2])]
