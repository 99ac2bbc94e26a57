"""What ``from_pretrained`` is told of tilebit, and what a saved model's config.json says of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..accepted import expect, format_of
from ..layouts.formats import GemmFormat
from ..weights.any_kind import AnyKind
from ..weights.embedding import check_embedded, scale_of
from ..weights.layers import linears_of
from ..weights.mixed import JOINT, kind_of
from ..weights.quantize_any import SEED_BITS
from .tying import tied_weights

METHOD = "tilebit"
Stored = GemmFormat | AnyKind  # of a layer's weight


class TilebitConfig(QuantizationConfigMixin):
    """How the linear layers of a model are quantized while it loads: round to nearest, into
    ``format``, with a search for clipped ranges on demand (``clip_search``).

    ``skip`` names the layers that stay as they are, by full names or their last parts ("lm_head",
    "mlp.gate"); by default the output embeddings alone. ``per_layer`` gives the layers that are so
    named another format, or None to keep one; of several names that fit, in ``skip`` and here, the
    longest counts. Of layers in two formats (``MixedLinear``) a saved
    config has both, "w4a8_g128_asym+w8a8_g128": which channels are in which lies beside the weights.

    Layers of any precision (``AnyPrecisionLinear``) have the widths that they store, "w3-8a16_any", or one,
    "w4a16_any"; "w3-8a16_any@4" is set to 4 bits (``set_precision``), others to the widest. While a model
    loads they are made by k-means with all values alike, which takes longer than rounding: weighing values
    by a sensitivity takes gradients, and ``tilebit.quantize_model_any``. ``clip_search`` is not for them.

    An output layer whose weight is the input embedding's, too, is packed on its own where it is asked for
    (``per_layer={"lm_head": "w8a16_channel"}``, or ``skip=[]``). The embedding keeps the 16-bit weight:
    steps read less, and memory grows by what is packed, half of that weight in 8 bits, a quarter in
    4. Such a model's config then has ``tie_word_embeddings`` False.

    ``embeddings`` is the format of the input embedding, of w4a16 or w8a16 (default: it is kept): rows are
    dequantized where they are looked up (``QuantEmbedding``). Where the output layer has the same weight, it
    is to be asked for, too; in the same format one packed weight serves both, in others each has its own.

    ``source`` is the quantization config of another tool, whose directory is read instead (``load``
    sets it; nothing else counts then).

    Raises ``TypeError`` and ``ValueError`` for what is no format.
    """

    def __init__(
        self,
        format: GemmFormat | str = "w4a16_g128",
        skip: Iterable[str] | None = None,
        per_layer: Mapping[str, GemmFormat | str | None] | None = None,
        clip_search: bool = False,
        embeddings: GemmFormat | str | None = None,
        source: Mapping[str, Any] | None = None,
        quant_method: str = METHOD,
        **unknown: Any,
    ) -> None:
        if unknown or quant_method != METHOD:
            raise ValueError(
                f"the quantization config has {', '.join(unknown) or f'quant_method {quant_method!r}'}; accepted of {METHOD}: format, "
                "skip, per_layer, clip_search, embeddings, source: correct config.json, or install the version of tilebit that wrote it"
            )
        expect("per_layer", per_layer or {}, Mapping, "names of layers -> formats, or None to keep a layer")
        self.quant_method: Any = METHOD
        self.format = _kind(format)
        self.skip = _names(skip)
        self.per_layer = {name: None if kind is None else _kind(kind) for name, kind in (per_layer or {}).items()}
        self.clip_search = bool(clip_search)
        if embeddings is not None:
            check_embedded(format_of(embeddings))
        self.embeddings = None if embeddings is None else format_of(embeddings).name
        expect("source", source or {}, Mapping, "the quantization config of another tool's directory")
        self.source = None if source is None else dict(source)

    @classmethod
    def naming(cls, formats: Mapping[str, GemmFormat | str], model: PreTrainedModel, embeddings: str | None = None) -> TilebitConfig:
        """The config that says of ``model`` that the layers ``formats`` have these, or these two of a
        mixed layer, and its input embedding ``embeddings``, and that its other linear layers are kept."""
        names = {name: _kind(format) for name, format in formats.items()}
        (common, _), *_ = Counter(names.values()).most_common(1)
        skip = [name for name, layer in model.named_modules(remove_duplicate=False) if type(layer) is nn.Linear and name not in names]
        found = cls(common, skip if set(skip) != set(cls()._skipped(model)) else None, embeddings=embeddings)
        # A layer's full name may be another one's last parts, which then is named too.
        found.per_layer = {name: kind for name, kind in names.items() if _chosen(found._rules(model), name) != kind}
        found.per_layer |= {name: kind for name, kind in names.items() if _chosen(found._rules(model), name) != kind}
        return found

    def to_dict(self) -> dict[str, Any]:
        """As config.json holds it, defaults left out."""
        optional = {name: value for name in ("skip", "per_layer", "clip_search", "embeddings", "source") if (value := getattr(self, name))}
        if self.skip is not None:
            optional["skip"] = self.skip
        return {"quant_method": METHOD, "format": self.format, **optional}

    def formats_of(self, model: PreTrainedModel) -> dict[str, Stored]:
        """What every layer of ``model`` that is quantized while it loads becomes, by name. Raises
        ``ValueError`` as ``kinds_of`` does, for ``skip`` that names no layer, or one that
        ``per_layer`` gives a format, for a layer that is to be in two formats, which takes a
        search, for one of any precision whose least width k-means does not start at, and for
        ``clip_search`` where all are of any precision."""
        kinds = self.kinds_of(model)
        leaves = [name for name, layer in model.named_modules(remove_duplicate=False) if layer._parameters]  # routers among them
        default = TilebitConfig()._skipped(model)
        self._expect_named("skip", [name for name in self.skip or () if name not in default], leaves)
        both = [name for name in self.skip or () if self.per_layer.get(name) is not None]
        if both:
            raise ValueError(f"{both[0]} is to be kept, in skip, and {self.per_layer[both[0]]}, in per_layer; accepted: one of both")
        found: dict[str, Stored] = {}
        for layer, kind in kinds.items():
            if JOINT in kind:
                raise ValueError(
                    f"{layer} is to be in two formats, {kind}, of channels that a search finds; accepted while a model loads: one. Load it "
                    "in 16 bits, then tilebit.quantize_model(model, precision=tilebit.select_channels(...))"
                )
            store = AnyKind.parse(kind)
            if store is not None and store.seed_bits not in SEED_BITS:
                raise ValueError(
                    f"{layer} is to be {kind}; accepted while a model loads: widths from {', '.join(map(str, SEED_BITS))} bits on, whose "
                    f"clusters wider ones cut in two: 'w3-{store.max_bits}a16_any' computes in {store.max_bits} bits"
                )
            found[layer] = store or format_of(kind)
        scaled = self.embeddings is not None or any(isinstance(stored, GemmFormat) for stored in found.values())
        if self.clip_search and not scaled:
            raise ValueError(
                "clip_search goes with layers of any precision alone, whose numbers have no range; accepted: it with a format that has "
                "scales, such as 'w4a16_g128', or leave it out"
            )
        return found

    def kinds_of(self, model: PreTrainedModel) -> dict[str, str]:
        """The format of every layer of ``model`` that is quantized, or the two of a mixed one, or the widths
        of one of any precision, by name. Raises ``ValueError`` for ``per_layer`` that names no layer, and
        where nothing is left to quantize."""
        self._expect_named("per_layer", self.per_layer, [name for name, layer in model.named_modules() if type(layer) is nn.Linear])
        rules = self._rules(model)
        return {layer: str(_chosen(rules, layer)) for layer in linears_of(model, lambda name, _: _chosen(rules, name) is None)}

    def embedding_of(self, model: PreTrainedModel) -> tuple[str, GemmFormat] | None:
        """The name and the format of the input embedding of ``model``, where it is quantized. Raises
        ``ValueError`` for one that does more than look rows up, and where the output layer has the same
        weight and is kept: it would hold the 16 bits all the same."""
        if self.embeddings is None:
            return None
        found = model.get_input_embeddings()
        name = next((name for name, module in model.named_modules() if module is found), None)
        if name is None or found is None:
            raise ValueError(f"{type(model).__name__} has no input embedding; accepted: a model with one: leave embeddings out")
        scale_of(found)
        tied, kinds = tied_weights(model), self.kinds_of(model)
        kept = [layer for layer in tied if layer not in (name, *kinds) and tied[layer] == tied.get(name)]
        if kept:
            raise ValueError(
                f"embeddings are to be in {self.embeddings} and {kept[0]}, which has the same weight, in 16 bits, which saves no memory; "
                f"accepted: both, by per_layer={{{kept[0]!r}: {self.embeddings!r}}}, and one packed weight serves both; or neither"
            )
        return name, format_of(self.embeddings)

    def _expect_named(self, argument: str, names: Iterable[str], every: list[str]) -> None:
        for name in names:
            if not any(_ends(layer, name) for layer in every):
                raise ValueError(f"{argument} names {name!r}; accepted: a layer's name or its last parts: {', '.join(every[:7])}, ...")

    def _rules(self, model: PreTrainedModel) -> dict[str, str | None]:
        """Names, the longest first, and what layers have that end so; "" is any name's end."""
        found = {"": self.format, **dict.fromkeys(self._skipped(model)), **self.per_layer}
        return {end: found[end] for end in sorted(found, key=len, reverse=True)}

    def _skipped(self, model: PreTrainedModel) -> list[str]:
        if self.skip is not None:
            return self.skip
        output = model.get_output_embeddings()
        return ["lm_head", *(name for name, module in model.named_modules() if output is not None and module is output)]


def _names(skip: Iterable[str] | None) -> list[str] | None:
    if skip is None or isinstance(skip, str):
        return None if skip is None else [skip]
    expect("skip", skip, Iterable, "names of layers, as ['lm_head']")
    names = list(skip)
    for name in names:
        expect("a name in skip", name, str, "a layer's name or its last parts, as 'lm_head'")
    return names


def _kind(format: GemmFormat | str) -> str:
    name = format if isinstance(format, str) else format.name if isinstance(format, GemmFormat) else ""
    store = AnyKind.parse(name)
    if store is not None:
        return store.name
    return kind_of(format) if isinstance(format, str) and JOINT in format else format_of(format).name


def _chosen(rules: Mapping[str, str | None], name: str) -> str | None:
    return next(kind for end, kind in rules.items() if _ends(name, end))


def _ends(name: str, end: str) -> bool:
    return end in ("", name) or name.endswith("." + end)
