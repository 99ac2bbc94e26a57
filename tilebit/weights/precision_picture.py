"""The picture of a precision plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .precision import PrecisionPlan


def draw_plan(plan: PrecisionPlan, path: Path) -> Path:
    """Bars of the layers' shares and of their bits a weight, as ``PrecisionPlan.draw`` says."""
    try:
        from matplotlib import color_sequences
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"cannot write {path}: pictures of plans need matplotlib (pip install 'tilebit[draw]')") from error
    kinds: dict[str, list[int]] = {}
    for place, layer in enumerate(plan.layers):
        kinds.setdefault(layer.name.rpartition(".")[2], []).append(place)
    figure = Figure(figsize=(max(6.0, min(24.0, len(plan.layers) / 12)), 5.2), layout="constrained")
    shares, bits = figure.subplots(2, sharex=True)
    colours = color_sequences["tab10"]
    for index, (kind, places) in enumerate(kinds.items()):
        look = {"width": 1.0, "color": colours[index % 10], "label": kind}
        shares.bar(places, [100 * plan.layers[place].share for place in places], **look)
        bits.bar(places, [plan.layer_bits(plan.layers[place]) for place in places], **look)
    for axes, overall, name in (
        (shares, 100 * plan.share, f"channels in {plan.high.bits} bits, %"),
        (bits, plan.bits_per_weight, "bits a weight"),
    ):
        axes.axhline(overall, color="black", linewidth=1, linestyle="--")
        axes.set_ylabel(name)
    bits.set_xlabel("linear layers in the model's order")
    shares.set_title(
        f"{plan.share:.1%} of channels in {plan.high.name}, the others in {plan.low.name}: {plan.bits_per_weight:.2f} bits a weight",
        fontsize=9,
    )
    shares.legend(fontsize=7, ncols=4)
    figure.savefig(path, dpi=120)
    return path
