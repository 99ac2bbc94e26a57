"""What ``results.measure.quality`` does to a model: formats and methods, mixed precision, and
activations in 8 bits. Weights are simulated: a layer computes with the values that its quantized
weight stands for."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tilebit.layouts.formats import FORMATS, FP8, INT8, PER_CHANNEL, GemmFormat
from tilebit.weights.calibrate_smooth import calibrate_smoothing
from tilebit.weights.gptq import DAMPING, gptq
from tilebit.weights.layers import linears_of, once
from tilebit.weights.precision import LayerPrecision, PrecisionPlan, select_channels
from tilebit.weights.quantize import quantize
from tilebit.weights.quantize_any import AnyPrecisionTensor, quantize_any
from tilebit.weights.salience import Salience, channel_salience
from tilebit.weights.smooth import Smoothing
from tilebit.weights.stream import visit_layers

from .quality_caches import AT_ONCE, simulated_cache
from .quality_model import Texts, squared_gradients

METHODS = ("round", "clip", "gptq", "gptq_clip")  # to nearest; with clip search; GPTQ with act order; that with clip search
ACTIVATIONS = {  # values of x that share a scale, and the type of codes
    "": None,
    "a8_token": (PER_CHANNEL, INT8),
    "a8_g128": (128, INT8),
    "fp8_token": (PER_CHANNEL, FP8),
    "fp8_g128": (128, FP8),
}
E4M3 = torch.float8_e4m3fn
MIXED = ("w4a16_g128_asym", "w8a16_g128")
SEED_BITS = 3  # of any precision, whose widths from 3 bits on are one store; 2 bits are of a store that starts there


@dataclass(frozen=True, slots=True)
class Variant:
    """One row's model. ``format`` "" is the 16-bit model. ``high`` is the format of ``share`` of the
    channels, picked by ``choice`` and ``terms`` from the salience over ``samples`` samples
    (``select_channels``). ``samples`` of a format of any precision: values count by the squared gradients of
    so many samples, with 0 alike. ``activations`` "": 16 bits. ``kv_format`` is the cache's, of which ``kept`` more
    tokens than an incomplete group stay in 16 bits (``quality_caches``); "": none. ``smooth``: inputs are divided, and
    weights multiplied, by factors whose strength is searched on GPTQ's samples (``calibrate_smoothing``)."""

    format: str = ""
    method: str = ""
    high: str = ""
    share: float = 0.0
    choice: str = ""
    terms: str = ""
    samples: int = 0
    activations: str = ""
    kv_format: str = ""
    kept: int = 0
    smooth: bool = False

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Variant:
        """The variant that ``row`` is of; rows of before there were caches do not speak of any."""
        return cls(**{name: row[name] for name in cls.__slots__ if name in row})

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def variants() -> list[Variant]:
    """Those of methods, the most telling ones first."""
    mixed = Variant(MIXED[0], "round", MIXED[1], choice="global", terms="both", samples=128)
    four, eight = [f"w4a16_{group}_asym" for group in ("g64", "g32", "channel")], [f"w8a16_{group}" for group in ("channel", "g64", "g32")]
    tenth = replace(mixed, share=0.1)
    integers = {group: Variant(f"w4a8_lqq_{group}", "round", activations="a8_token") for group in ("g64", "g128")}
    bytes_ = Variant("w8a8_channel", "clip", activations="a8_token")  # to nearest it is w8a16_channel with such activations
    return [
        Variant(),
        *(Variant(four[0], method) for method in ("round", "gptq")),
        replace(mixed, share=0.0),
        integers["g64"],
        Variant(four[0], "gptq_clip"),
        replace(integers["g64"], method="gptq_clip"),
        integers["g128"],
        replace(integers["g128"], method="gptq_clip"),
        *(replace(variant, method=method, smooth=True) for method in ("round", "gptq_clip") for variant in integers.values()),
        replace(mixed, share=0.0, method="gptq_clip"),
        replace(bytes_, method="gptq"),
        bytes_,
        *(replace(variant, method=method) for method in ("clip", "gptq") for variant in integers.values()),
        replace(bytes_, method="gptq_clip"),
        tenth,
        replace(tenth, choice="random"),
        replace(tenth, choice="layer"),
        replace(tenth, terms="first"),
        replace(tenth, terms="second"),
        replace(tenth, samples=16),
        Variant(eight[0], "round", activations="a8_token"),
        replace(tenth, method="gptq_clip"),
        replace(mixed, share=0.5),
        *(Variant(format, "gptq") for format in four[1:]),
        replace(mixed, share=0.2),
        replace(mixed, share=1.0),
        Variant(eight[0], "round"),
        *(Variant(format, "round") for format in four[1:]),
        replace(tenth, activations="a8_g128"),
        *(Variant(format, "clip") for format in four),
        *(Variant(format, "gptq_clip") for format in four[1:]),
        *(Variant(format, "round") for format in eight[1:]),
        *(Variant(format, method) for method in ("clip", "gptq") for format in eight),
    ]


def format_variants() -> list[Variant]:
    """Those of formats: every cache, every weight rounded to nearest, both together, two precisions, then any
    precision, without and with squared gradients."""
    weights = {name: Variant(name, "round", activations=activations_of(format)) for name, format in FORMATS.items()}
    widths = [variant for name, variant in weights.items() if FORMATS[name].codebook]
    caches = [name for bits in (8, 4, 2) for name in (f"kv{bits}_channel", f"kv{bits}_token")]
    mixed = replace(weights["w4a8_g128_asym"], high="w8a8_g128", share=0.1, choice="global", terms="both", samples=16)
    together = [
        replace(weights[weight], kv_format=cache)
        for weight in ("w4a16_g64", "w4a16_g128_asym", "w4a8_lqq_g64", "w8a8_channel", "w8a16_g128")
        for cache in ("kv8_channel", "kv4_channel", "kv2_channel")
    ]
    first = ("w4a16_g128", "w4a16_g64", "w8a16_g128", "w4a8_lqq_g64", "w8a8_channel")
    return [
        Variant(),
        *(Variant(kv_format=name) for name in ("kv16", *caches, "kvfp8", "k8_channel_v4", "k4_channel_v2")),
        *(weights[name] for name in first),
        *together[:3],
        *(Variant(kv_format=name, kept=kept) for name in ("kv4_token", "kv2_token") for kept in (AT_ONCE, 128)),
        *(Variant(kv_format=name, kept=kept) for name in ("kv4_channel", "kv2_channel") for kept in (128, 384)),
        *(variant for name, variant in weights.items() if name not in first and variant not in widths),
        *together[3:],
        mixed,
        *widths,
        *(replace(variant, samples=16) for variant in widths),
    ]


def activations_of(format: GemmFormat) -> str:
    """The word of ``ACTIVATIONS`` for a format's x."""
    return next(name for name, has in ACTIVATIONS.items() if has == ((format.x_group, format.x) if format.x else None))


@dataclass(slots=True)
class Simulation:
    """A model whose layers take the weights of one variant after the other. ``calibration`` says
    how many samples of how many tokens GPTQ sees, ``search_window`` how long a sample of the
    search is, ``damping`` is GPTQ's."""

    model: nn.Module
    texts: Texts
    calibration: tuple[int, int]
    search_window: int
    damping: float = DAMPING
    layers: dict[str, nn.Linear] = field(init=False)
    originals: dict[str, Tensor] = field(init=False)
    found: dict[int, tuple[dict[str, Salience], float]] = field(init=False, default_factory=dict)
    gradients: dict[int, dict[str, Tensor]] = field(init=False, default_factory=dict)  # squared, by the number of samples
    clustered: dict[tuple[str, int, int], AnyPrecisionTensor] = field(init=False, default_factory=dict)  # by layer, seed and samples

    def __post_init__(self) -> None:
        self.layers = once(linears_of(self.model, ("lm_head",)))
        self.originals = {name: layer.weight.detach().clone() for name, layer in self.layers.items()}

    @contextmanager
    def of(self, variant: Variant) -> Iterator[dict[str, Any]]:
        """The model with ``variant``'s weights and activations, and what else its row says; the
        16-bit model afterwards. Raises ``ValueError`` for words that no variant has."""
        if variant.format and variant.method not in METHODS:
            raise ValueError(f"method is {variant.method!r}; accepted: {', '.join(METHODS)}")
        if variant.activations not in ACTIVATIONS:
            raise ValueError(f"activations are {variant.activations!r}; accepted: {', '.join(map(repr, ACTIVATIONS))}")
        if variant.smooth and not (variant.activations and GemmFormat.parse(variant.format).x):
            raise ValueError(f"inputs of {variant.format or '16 bits'} are smoothed; accepted: a format with 8-bit x, and its activations")
        said: dict[str, Any] = {"bits_per_weight": 16.0, "seconds_search": None, "seconds_quantize": None}
        smoothing: dict[str, Smoothing] = {}
        try:
            if variant.format:
                plan, said["seconds_search"] = self._plan(variant)
                start = time.perf_counter()
                smoothing = self._smoothing(variant)
                for name, weight in self._weights(variant, plan, smoothing).items():
                    self.layers[name].weight.data.copy_(weight)
                said["seconds_quantize"] = time.perf_counter() - start
                said["bits_per_weight"] = plan.bits_per_weight
            inputs, factors = ACTIVATIONS[variant.activations], {name: own.reciprocals for name, own in smoothing.items()}
            with (
                quantized_inputs(self.model, self.layers, *inputs, smooth=factors) if inputs else _unchanged(),
                simulated_cache(self.model, variant.kv_format, variant.kept) if variant.kv_format else _unchanged(),
            ):
                yield said
        finally:
            for name, layer in self.layers.items():
                layer.weight.data.copy_(self.originals[name])

    def _plan(self, variant: Variant) -> tuple[PrecisionPlan, float | None]:
        """Which channels are in which format, and how long finding the salience took."""
        low = GemmFormat.parse(variant.format)
        if not variant.high:
            nothing = torch.zeros(0, dtype=torch.int64)
            parts = (LayerPrecision(name, layer.out_features, layer.in_features, nothing) for name, layer in self.layers.items())
            return PrecisionPlan(tuple(parts), low, low), None
        salience, seconds = self._salience(variant, low)
        words: Any = {"choice": variant.choice, "terms": variant.terms}
        return select_channels(salience, variant.share, low=low, high=variant.high, **words), seconds

    def _salience(self, variant: Variant, low: GemmFormat) -> tuple[dict[str, Salience], float | None]:
        if variant.share in (0, 1) or variant.choice == "random":  # no search decides these
            empty = {name: torch.zeros(layer.out_features, dtype=torch.float64) for name, layer in self.layers.items()}
            return {name: Salience(self.layers[name].in_features, 0, none, none, none) for name, none in empty.items()}, None
        if variant.samples not in self.found:
            start = time.perf_counter()
            samples = self.texts.samples(variant.samples, self.search_window)
            salience = channel_salience(self.model, samples, low)
            self.found[variant.samples] = salience, time.perf_counter() - start
        return self.found[variant.samples]

    def _sensitivity(self, name: str, samples: int) -> Tensor | None:
        if not samples:
            return None
        if samples not in self.gradients:
            self.gradients[samples] = squared_gradients(self.model, self.layers, self.texts.samples(samples, self.search_window))
        return self.gradients[samples][name]

    def _clustered(self, name: str, weight: Tensor, bits: int, samples: int) -> Tensor:
        """A layer's values in ``bits`` bits of any precision."""
        seed = min(bits, SEED_BITS)
        if (name, seed, samples) not in self.clustered:
            self.clustered[name, seed, samples] = quantize_any(weight, seed, sensitivity=self._sensitivity(name, samples))
        return self.clustered[name, seed, samples].dequantize(bits)

    def _smoothing(self, variant: Variant) -> dict[str, Smoothing]:
        if not variant.smooth:
            return {}
        clip = variant.method.endswith("clip")
        return calibrate_smoothing(self.model, self.texts.samples(*self.calibration), variant.format, clip_search=clip)

    def _weights(self, variant: Variant, plan: PrecisionPlan, smoothing: Mapping[str, Smoothing]) -> Mapping[str, Tensor]:
        """The values of every layer's weight, [n, k] each, for its smoothed inputs where they are."""
        clip, found = variant.method.endswith("clip"), {}

        def visit(name: str, layer: nn.Linear, products: Tensor | None) -> Tensor:
            weight, own = layer.weight.detach(), smoothing.get(name)
            if own is not None:
                weight, products = own.fold(weight), None if products is None else own.fold_products(products)

            def values(rows: Tensor, format: GemmFormat) -> Tensor:
                if format.codebook:
                    return self._clustered(name, rows, format.bits, variant.samples)
                q = (
                    quantize(rows, format, clip)
                    if products is None
                    else gptq(rows, products, format, clip_search=clip, damping=self.damping)
                )
                return q.dequantize()

            found[name] = by_precision(weight, channels[name], plan, values)
            return found[name] if own is None else found[name] * own.reciprocals

        channels = plan.channels
        if not variant.method.startswith("gptq"):
            for name, layer in self.layers.items():
                visit(name, layer, None)
        else:
            visit_layers(self.model, self.layers, self.texts.samples(*self.calibration), visit)
        return found


def by_precision(weight: Tensor, channels: Tensor, plan: PrecisionPlan, values: Any) -> Tensor:
    """``weight`` [n, k] as its rows' formats have it: ``channels`` in ``plan.high``, the others in
    ``plan.low``; ``values(rows, format)`` gives rows' values."""
    out, high = torch.empty_like(weight), torch.zeros(weight.shape[0], dtype=torch.bool, device=weight.device)
    high[channels.to(weight.device)] = True
    for rows, format in ((high, plan.high), (~high, plan.low)):
        if bool(rows.any()):
            out[rows] = values(weight[rows], format)
    return out


def fake_quantize(x: Tensor, group: int, kind: str = INT8) -> Tensor:
    """``x`` [..., k] as symmetric 8-bit codes with an fp32 scale for every ``group`` values of k
    (the last group may be shorter), or for all of them (-1), would have it: the group's largest
    magnitude is 127, or of ``kind`` e4m3 448."""
    k = x.shape[-1]
    width = k if group == PER_CHANNEL else group
    padded = functional.pad(x.float(), (0, -k % width)).unflatten(-1, (-1, width))
    largest = 127 if kind == INT8 else torch.finfo(E4M3).max
    scale = padded.abs().amax(-1, keepdim=True) / largest
    scaled = (padded / torch.where(scale > 0, scale, 1.0)).clamp(-largest, largest)
    codes = scaled.round() if kind == INT8 else scaled.to(E4M3).float()
    return (codes * scale).flatten(-2)[..., :k].to(x.dtype)


class QuantizedInputs(nn.Module):
    """``linear`` of ``fake_quantize(x, group, kind)``, of x times ``smooth`` [k] where it is given."""

    def __init__(self, linear: nn.Linear, group: int, kind: str = INT8, smooth: Tensor | None = None) -> None:
        super().__init__()
        self.linear, self.group, self.kind, self.smooth = linear, group, kind, smooth

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(fake_quantize(x if self.smooth is None else x * self.smooth, self.group, self.kind))


@contextmanager
def quantized_inputs(
    model: nn.Module, layers: Mapping[str, nn.Linear], group: int, kind: str = INT8, smooth: Mapping[str, Tensor] = MappingProxyType({})
) -> Iterator[None]:
    """``model`` with ``QuantizedInputs`` in place of ``layers``, ``smooth`` of those that it names, while this is open."""

    def put(name: str, module: nn.Module) -> None:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, module)

    try:
        for name, layer in layers.items():
            put(name, QuantizedInputs(layer, group, kind, smooth.get(name)))
        yield
    finally:
        for name, layer in layers.items():
            put(name, layer)


@contextmanager
def _unchanged() -> Iterator[None]:
    yield
