"""``calibrate_smoothing``: SmoothQuant's factors for all layers of a model, by what passes through it
(LiquidGEMM's recipe, section 6: smoothing whose strength a grid search finds, then two-level rounding)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..accepted import expect, format_of
from ..layouts.formats import GemmFormat
from .batches import batches_of
from .input_rows import InputRows, Inputs
from .layers import linears_of, once
from .smooth import STRENGTHS, Smoothing, expect_smoothed, quantize_smoothed, search_smoothing
from .stream import visit_layers


def calibrate_smoothing(
    model: nn.Module,
    calibration: Iterable[Any],
    format: GemmFormat | str,
    skip: Iterable[str] | Callable[[str, nn.Linear], bool] = ("lm_head",),
    strengths: Iterable[float] = STRENGTHS,
    clip_search: bool = False,
    progress: bool = False,
) -> dict[str, Smoothing]:
    """The factors by which the input of every ``nn.Linear`` inside ``model`` is divided and its weight
    multiplied before both are quantized, the weight to ``format``, one with 8-bit x; by the layer's name (a
    layer shared under several names has the first). The model is left as it was:

        smoothing = tilebit.calibrate_smoothing(model, batches, "w4a8_lqq_g64")
        tilebit.quantize_model(model, "w4a8_lqq_g64", smoothing=smoothing)

    or, by GPTQ, ``weights = tilebit.calibrate(model, batches, "w4a8_lqq_g64", smoothing=smoothing)`` and
    ``quantize_model(model, weights=weights)``.

    ``search_smoothing`` says which factors are tried and what decides: of ``strengths``, and of no factors,
    those with which the layers' outputs err least. Layers that take the same input, such as q, k
    and v, or gate and up, have the same factors, found for all of their outputs: one quantized x serves
    them. A layer that no batch reaches has none (all 1).

    ``calibration``, ``skip`` and ``progress`` are ``calibrate``'s. Layers are visited in the order in which
    they are computed, each with the inputs that the rounded layers before it give
    (``stream.visit_layers``); factors are made of the largest magnitudes of all rows, and tried on up to
    1024 rows of a layer's inputs, at equal distances. The same batches give the same factors. Memory:
    these rows of the layers of one input, and their weights in fp32.

    Raises ``TypeError`` and ``ValueError`` as ``calibrate`` and ``search_smoothing`` do, the latter with the
    layer's name, and ``ValueError`` for a format with 16-bit x.
    """
    expect("model", model, nn.Module, "a torch.nn.Module with torch.nn.Linear inside")
    format, strengths = format_of(format), tuple(strengths)
    expect_smoothed(format)
    layers = once(linears_of(model, skip))
    found: dict[str, Smoothing] = {}

    def visit(name: str, layer: nn.Linear, inputs: Inputs) -> Tensor:
        try:
            if name not in found:  # the first of its input: all weights are what they were
                weights = [layers[other].weight.detach() for other in inputs.together]
                smoothing = _searched(torch.cat(weights), inputs, format, strengths, clip_search)
                found.update(dict.fromkeys(inputs.together, smoothing))
            return quantize_smoothed(layer.weight, format, found[name], clip_search).dequantize()
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    visit_layers(model, layers, batches_of(calibration), visit, progress, InputRows)
    return {name: found[name] for name in layers}


def _searched(w: Tensor, inputs: Inputs, format: GemmFormat, strengths: tuple[float, ...], clip_search: bool) -> Smoothing:
    rows = inputs.rows
    if not len(rows):
        rows = rows.new_zeros(1, w.shape[1])  # nothing errs, so nothing is smoothed
    return search_smoothing(w, rows, format, strengths, clip_search, inputs.largest)
