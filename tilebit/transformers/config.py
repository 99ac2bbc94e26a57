"""What ``from_pretrained`` is told of tilebit, and what a saved model's config.json says of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..accepted import expect, format_of
from ..layouts.formats import GemmFormat
from ..weights.layers import linears_of

METHOD = "tilebit"


class TilebitConfig(QuantizationConfigMixin):
    """How the linear layers of a model are quantized while it loads: round to nearest, into
    ``format``, with a search for clipped ranges on demand (``clip_search``).

    ``skip`` names the layers that stay as they are, by full names or their last parts ("lm_head",
    "mlp.gate"); by default the output embeddings alone. ``per_layer`` gives the layers that are so
    named another format, or None to keep one; of several names that fit, the longest counts.
    Embeddings stay in 16 bits.

    Raises ``TypeError`` and ``ValueError`` for what is no format.
    """

    def __init__(
        self,
        format: GemmFormat | str = "w4a16_g128",
        skip: Iterable[str] | None = None,
        per_layer: Mapping[str, GemmFormat | str | None] | None = None,
        clip_search: bool = False,
        quant_method: str = METHOD,
        **unknown: Any,
    ) -> None:
        if unknown or quant_method != METHOD:
            raise ValueError(
                f"the quantization config has {', '.join(unknown) or f'quant_method {quant_method!r}'}; accepted of {METHOD}: format, "
                "skip, per_layer, clip_search: correct config.json, or install the version of tilebit that wrote it"
            )
        expect("per_layer", per_layer or {}, Mapping, "names of layers -> formats, or None to keep a layer")
        self.quant_method: Any = METHOD
        self.format = format_of(format).name
        self.skip = None if skip is None else [skip] if isinstance(skip, str) else list(skip)
        self.per_layer = {name: None if kind is None else format_of(kind).name for name, kind in (per_layer or {}).items()}
        self.clip_search = bool(clip_search)

    def to_dict(self) -> dict[str, Any]:
        """As config.json holds it, defaults left out."""
        optional = {name: value for name in ("skip", "per_layer", "clip_search") if (value := getattr(self, name))}
        if self.skip is not None:
            optional["skip"] = self.skip
        return {"quant_method": METHOD, "format": self.format, **optional}

    def formats_of(self, model: PreTrainedModel) -> dict[str, GemmFormat]:
        """The format of every layer of ``model`` that is quantized, by name. Raises ``ValueError`` for
        ``per_layer`` that names no layer, and where nothing is left to quantize."""
        kept = [*self._skipped(model), *(name for name, kind in self.per_layer.items() if kind is None)]
        every = [name for name, layer in model.named_modules() if type(layer) is nn.Linear]
        for name in self.per_layer:
            if not any(_ends(layer, name) for layer in every):
                raise ValueError(f"per_layer names {name!r}; accepted: a layer's name or its last parts: {', '.join(every[:7])}, ...")
        named = sorted((name for name, kind in self.per_layer.items() if kind is not None), key=len)
        found = {}
        for layer in linears_of(model, lambda name, _: any(_ends(name, end) for end in kept)):
            wanted = self.format
            for end in named:
                if _ends(layer, end):
                    wanted = self.per_layer[end] or wanted
            found[layer] = format_of(wanted)
        return found

    def _skipped(self, model: PreTrainedModel) -> list[str]:
        if self.skip is not None:
            return self.skip
        output = model.get_output_embeddings()
        return ["lm_head", *(name for name, module in model.named_modules() if output is not None and module is output)]


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith("." + end)
