"""Which output channels of a model get more bits: the global precision search of MixLLM (Zheng et
al. 2024, arXiv:2412.14590), algorithm 1, and what it found as a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..layouts.formats import GemmFormat, QuantFormat
from ..schedules.gemm.workload import Workload
from .salience import Salience, Terms

Choice = Literal["global", "layer", "random"]
Unit = Literal["channels", "weights"]
CHOICES: dict[str, str] = {
    "global": "the most salient channels of all layers together",
    "layer": "the same share of each layer, its most salient channels",
    "random": "the same share of all layers together, at random",
}


@dataclass(frozen=True, slots=True, eq=False)
class LayerPrecision:
    """One layer [n, k]; ``channels`` int64 [count] are its output channels in the higher format,
    ascending."""

    name: str
    n: int
    k: int
    channels: Tensor

    @property
    def share(self) -> float:
        """Of its channels that are in the higher format."""
        return len(self.channels) / self.n


@dataclass(frozen=True, slots=True, eq=False)
class PrecisionPlan:
    """For each layer its channels in ``high``; the others are in ``low``. ``to_json`` is the whole
    report, ``draw`` its picture."""

    layers: tuple[LayerPrecision, ...]
    low: GemmFormat
    high: GemmFormat

    @property
    def channels(self) -> dict[str, Tensor]:
        """By layer, int64 [count]: its output channels in the higher format, ascending."""
        return {layer.name: layer.channels for layer in self.layers}

    @property
    def share(self) -> float:
        """Of all channels that are in the higher format."""
        return sum(len(layer.channels) for layer in self.layers) / sum(layer.n for layer in self.layers)

    @property
    def bits_per_weight(self) -> float:
        """Of all layers, scales and zero points of both formats included. A ``MixedLinear`` stores one scale
        and two zero points more for each group of an 8-bit channel."""
        return 8 * sum(map(self._bytes, self.layers)) / sum(layer.n * layer.k for layer in self.layers)

    def layer_bits(self, layer: LayerPrecision) -> float:
        """Bits per weight of one layer, scales and zero points included."""
        return 8 * self._bytes(layer) / (layer.n * layer.k)

    def _bytes(self, layer: LayerPrecision) -> int:
        counts = ((self.low, layer.n - len(layer.channels)), (self.high, len(layer.channels)))
        return sum(Workload(1, count, layer.k, format).weight_bytes for format, count in counts if count)

    def to_json(self) -> dict[str, Any]:
        """The share of channels in the higher format and the bits per weight, overall and by layer,
        and the channels."""
        return {
            "low": self.low.name,
            "high": self.high.name,
            "share": self.share,
            "bits_per_weight": self.bits_per_weight,
            "layers": [
                {
                    "name": layer.name,
                    "n": layer.n,
                    "k": layer.k,
                    "share": layer.share,
                    "bits_per_weight": self.layer_bits(layer),
                    "channels": layer.channels.tolist(),
                }
                for layer in self.layers
            ],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PrecisionPlan:
        """The inverse of ``to_json``. Raises ``KeyError`` for a missing field and ``ValueError`` for
        a format that is not known and channels that are not whole numbers."""
        for layer in data["layers"]:
            if any(type(channel) is not int for channel in layer["channels"]):
                raise ValueError(f"channels of {layer['name']} are {str(layer['channels'])[:60]}; accepted: whole numbers, 0 to n - 1")
        layers = (
            LayerPrecision(layer["name"], layer["n"], layer["k"], torch.tensor(layer["channels"], dtype=torch.int64))
            for layer in data["layers"]
        )
        return cls(tuple(layers), GemmFormat.parse(data["low"]), GemmFormat.parse(data["high"]))

    def draw(self, path: str | Path) -> Path:
        """Write a picture of each layer's share, as in figure 2 of the paper, and of its bits a weight to
        ``path`` (.png, .svg, .pdf): layers in the model's order, one colour for each kind of layer.
        Raises ``ImportError`` where matplotlib is missing."""
        from .precision_picture import draw_plan

        return draw_plan(self, Path(path))


def select_channels(
    salience: Mapping[str, Salience],
    share: float,
    of: Unit = "channels",
    choice: Choice = "global",
    terms: Terms = "both",
    low: GemmFormat | str = QuantFormat(4, 128, False),
    high: GemmFormat | str = QuantFormat(8, 128, True),
    seed: int = 0,
    multiple: int = 1,
) -> PrecisionPlan:
    """The ``share`` of channels that get ``high`` instead of ``low``: with ``choice`` "global" the
    most salient ones of all layers (algorithm 1), with "layer" the most salient ones of each layer,
    with "random" any, drawn with ``seed``; the latter two are there to be compared with. ``terms``
    names the salience (``Salience``).

    ``of`` "channels" counts channels, to the nearest whole number. ``of`` "weights" counts their
    weights, which bytes follow: from the most salient channel down, as many as fit into that share.
    Equal ones are taken in the model's order. With ``multiple`` each layer then gets the nearest whole
    multiple of so many channels (or all of them), its most salient ones: 64 are a kernel's tile, which
    is read whole, and layers whose numbers agree share kernels. Raises ``ValueError`` for a share outside 0 to 1, no
    layers, a salience that is not finite, and words that are not among those above.
    """
    formats = [format if isinstance(format, GemmFormat) else QuantFormat.parse(format) for format in (low, high)]
    if not 0 <= share <= 1:
        raise ValueError(f"share is {share!r}; accepted: a number from 0 to 1")
    if choice not in CHOICES or of not in ("channels", "weights"):
        raise ValueError(f"choice is {choice!r}, of {of!r}; accepted: {', '.join(map(repr, CHOICES))}; of 'channels', 'weights'")
    if not isinstance(multiple, int) or multiple < 1:
        raise ValueError(f"multiple is {multiple!r}; accepted: a whole number of channels, 1 and above")
    if not salience:
        raise ValueError("salience is of no layer; accepted: what tilebit.channel_salience returns")
    values = {name: found.of(terms) for name, found in salience.items()}
    for name, value in values.items():
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"the salience of {name} is NaN or infinite; accepted: finite numbers, as tilebit.channel_salience returns")
    if choice == "layer":
        taken = {name: _largest(value, _sizes(value, salience[name], of), share) for name, value in values.items()}
    else:
        everything = torch.cat(list(values.values()))
        if choice == "random":
            everything = torch.randperm(len(everything), generator=torch.Generator().manual_seed(seed)).double()
            values = dict(zip(values, everything.split([len(value) for value in values.values()]), strict=True))
        sizes = torch.cat([_sizes(value, salience[name], of) for name, value in values.items()])
        parts = _largest(everything, sizes, share).split([len(value) for value in values.values()])
        taken = dict(zip(values, parts, strict=True))
    if multiple > 1:
        taken = {name: _whole(values[name], int(chosen.sum()), multiple) for name, chosen in taken.items()}
    layers = (LayerPrecision(name, len(values[name]), found.k, taken[name].nonzero().flatten()) for name, found in salience.items())
    return PrecisionPlan(tuple(layers), *formats)


def _sizes(value: Tensor, found: Salience, of: Unit) -> Tensor:
    return torch.full((len(value),), 1 if of == "channels" else found.k, dtype=torch.int64)


def _whole(values: Tensor, count: int, multiple: int) -> Tensor:
    """bool [channels]: the largest values, as many as is nearest to ``count`` of whole multiples and
    all."""
    below = count // multiple * multiple
    above = min(len(values), below + multiple)
    wanted = above if above - count <= count - below else below
    taken = torch.zeros(len(values), dtype=torch.bool)
    taken[torch.argsort(values, descending=True, stable=True)[:wanted]] = True
    return taken


def _largest(values: Tensor, sizes: Tensor, share: float) -> Tensor:
    """bool [channels]: the largest values, as many as have ``share`` of all sizes."""
    order = torch.argsort(values, descending=True, stable=True)
    allowed = round(share * int(sizes.sum()))
    taken = torch.zeros(len(values), dtype=torch.bool)
    taken[order[sizes[order].cumsum(0) <= allowed]] = True
    return taken
