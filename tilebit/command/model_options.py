"""Options that the commands of whole models share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .several import numbers

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A model's directory: tilebit's, or of 16-bit weights.")]
WeightFormat = Annotated[
    str | None, typer.Option("--format", help="Quantize a 16-bit model to this format while it loads, such as w4a16_g128.")
]
WeightFormats = Annotated[
    list[str] | None,
    typer.Option("--format", help="Quantize a 16-bit model to this format while it loads; repeat it for a row each. 'none': as it is."),
]
Skip = Annotated[
    list[str] | None,
    typer.Option("--skip", help="A layer that stays as it is, by name or its last parts; repeat it for several. Default: lm_head."),
]
Embeddings = Annotated[
    str | None,
    typer.Option("--embeddings", help="Quantize the input embedding to this format, such as w8a16_channel. Default: it is kept."),
]
ClipSearch = Annotated[bool, typer.Option("--clip-search", help="Search for clipped ranges: a smaller error, a longer wait.")]
Smooth = Annotated[Path | None, typer.Option("--smooth", help="A text by which inputs of layers are smoothed, of formats with 8-bit x.")]
Device = Annotated[str, typer.Option("--device", help="auto (a GPU, else the CPU), cpu or cuda[:i].")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto (what config.json says), float16 or bfloat16: what is computed in.")]
BenchedModel = Annotated[
    Path | None, typer.Option("--model", help="A model's directory, or a config.json, of which one with random weights is made.")
]
BenchedCaches = Annotated[
    list[str] | None, typer.Option("--kv-format", help="With --model: format of the KV cache; repeat it for several. Default: kv4_channel.")
]
Batches = Annotated[list[int] | None, numbers("--batch", help="With --model: rows; repeat it, or 1,16 for several. Default: 1.")]
TunedModel = Annotated[
    Path | None,
    typer.Option("--model", help="Tune the products of this model's decode steps, alone and in a step: its directory, or a config.json."),
]
TunedCache = Annotated[str | None, typer.Option("--kv-format", help="With --model: format of the KV cache. Default: kv4_channel.")]
TunedTokens = Annotated[
    int | None, typer.Option("--tokens", help="With --model: tokens of a sequence. Default: 4096, or the model's own bound.", min=1)
]
Parts = Annotated[
    list[str] | None,
    typer.Option("--part", help="With --model: what products do themselves, gate, residual or norm, repeat it; or none. Default: gate."),
]
PackedModel = Annotated[Path | None, typer.Option("--model", help="A model's directory, as generate takes it; its weights are not read.")]
PackedCaches = Annotated[
    list[str] | None,
    typer.Option("--kv-format", help="With --model: format of the KV cache; repeat it for several. Default: none, products alone."),
]
PackedTokens = Annotated[
    int | None, typer.Option("--max-tokens", help="With --model: tokens of a sequence. Default: the model's own bound.", min=1)
]
PackedWidths = Annotated[
    list[int] | None, numbers("--bits", help="With --model of any precision: widths to pack, such as 3,8. Default: all that are stored.")
]
PromptTokens = Annotated[
    int | None, typer.Option("--prompt-tokens", help="With --model: tokens of each row's prompt. Default: 512.", min=1)
]
Steps = Annotated[int | None, typer.Option("--steps", help="With --model: decode steps of a round. Default: 32.", min=1)]
