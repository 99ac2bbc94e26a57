"""``calibrate``: the weights of a whole model quantized by what passes through it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

from torch import Tensor, nn

from ..accepted import expect, format_of
from ..layouts.formats import GemmFormat, QuantFormat
from .batches import batches_of
from .gptq import DAMPING, gptq, gptq_mixed
from .layers import Quantized, linears_of, once
from .mixed import mixed_layers
from .precision import PrecisionPlan
from .quantize import QuantizedTensor, scale_dtype_of
from .smooth import Smoothing, expect_smoothing, smoothing_of
from .stream import visit_layers


@overload
def calibrate(
    model: nn.Module,
    calibration: Iterable[Any],
    format: GemmFormat | str = ...,
    skip: Iterable[str] | Callable[[str, nn.Linear], bool] = ...,
    act_order: bool = ...,
    clip_search: bool = ...,
    damping: float = ...,
    progress: bool = ...,
    *,
    precision: None = None,
    smoothing: Mapping[str, Smoothing] | None = ...,
) -> dict[str, QuantizedTensor]: ...
@overload
def calibrate(
    model: nn.Module,
    calibration: Iterable[Any],
    format: GemmFormat | str = ...,
    skip: Iterable[str] | Callable[[str, nn.Linear], bool] = ...,
    act_order: bool = ...,
    clip_search: bool = ...,
    damping: float = ...,
    progress: bool = ...,
    *,
    precision: PrecisionPlan,
    smoothing: Mapping[str, Smoothing] | None = ...,
) -> dict[str, Quantized]: ...
def calibrate(
    model: nn.Module,
    calibration: Iterable[Any],
    format: GemmFormat | str = QuantFormat(),
    skip: Iterable[str] | Callable[[str, nn.Linear], bool] = ("lm_head",),
    act_order: bool = True,
    clip_search: bool = False,
    damping: float = DAMPING,
    progress: bool = False,
    *,
    precision: PrecisionPlan | None = None,
    smoothing: Mapping[str, Smoothing] | None = None,
) -> dict[str, QuantizedTensor] | dict[str, Quantized]:
    """The weight of every ``nn.Linear`` inside ``model`` by GPTQ (``gptq`` says what the options
    do), by the layer's name; a layer shared under several names has the first. The model is left
    as it was: ``quantize_model(model, format, weights=calibrate(model, calibration, format))``
    puts them in.

    ``calibration`` is an iterable of batches that the model takes: tensors are its argument, tuples
    its arguments, dicts its keywords. They are moved to the model's device; a few hundred thousand
    tokens of the kind of text that the model will see are usual, and padding counts like any
    input. Layers are quantized in the order in which they are computed, each for the inputs that
    the quantized layers before it give (``stream.visit_layers``): decoder blocks one at a time,
    with one block's activations for all batches held, on the model's device. ``skip`` is
    ``quantize_model``'s. Layers of ``precision`` (``select_channels``) become a ``MixedTensor`` each,
    of its two formats (``gptq_mixed``); ``format`` is for the others, and ``quantize_model`` takes both
    ``weights`` and ``precision``. Layers of ``smoothing`` (``calibrate_smoothing``, of the same format) are rounded with
    its factors folded in, for inputs that are divided by them; their weights carry the factors, and
    ``quantize_model`` takes no ``smoothing`` beside them. ``progress`` shows a bar on a terminal. Scales are of the weight's dtype,
    fp16 for fp32 weights.

    Raises ``TypeError`` and ``ValueError`` as ``quantize_model`` and ``gptq`` do, the latter with
    the layer's name, and for a ``calibration`` that is empty or a single batch; for ``smoothing`` of no layer,
    of another width, or of a layer whose format has 16-bit x.
    """
    expect("model", model, nn.Module, "a torch.nn.Module with torch.nn.Linear inside")
    format = format_of(format)
    named = linears_of(model, skip)
    layers = once(named)
    mixed = {} if precision is None else mixed_layers(named, precision, {})
    smooth = smoothing_of(named, smoothing or {}, {})
    found: dict[str, Quantized] = {}

    def visit(name: str, layer: nn.Linear, products: Tensor) -> Tensor:
        w, own = layer.weight, smooth.get(layer)
        try:
            formats = (precision.low, precision.high) if precision is not None and layer in mixed else (format,)
            dtype = scale_dtype_of(w, None, formats[0])
            if own is not None:
                expect_smoothing("smoothing", own, w.shape[1], formats[0])
                w, products = own.fold(w), own.fold_products(products)
            if len(formats) == 2:
                found[name] = gptq_mixed(w, products, mixed[layer], *formats, act_order, clip_search, damping, dtype)
            else:
                found[name] = gptq(w, products, format, act_order, clip_search, damping, dtype)
            if own is not None:
                found[name] = own.applied(found[name])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return found[name].dequantize(layer.weight.dtype)

    visit_layers(model, layers, batches_of(calibration), visit, progress)
    return {name: found[name] for name in layers}
