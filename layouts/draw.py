"""Pictures of layouts, fragments and packed words, as SVG (no dependency) or PNG (matplotlib).
People debug layouts by looking.

``save(draw_fragment(mma_a(16)), "a.svg")``
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from colorsys import hls_to_rgb
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Literal

import numpy as np

from .fragments import Fragment
from .layout import Layout
from .packing import PackedLayout
from .swizzle import SwizzledLayout

CELL_W, CELL_H, FONT, MARGIN = 40, 30, 10, 12
LANES = 32


@dataclass(frozen=True, slots=True)
class Box:
    x: float
    y: float
    width: float
    height: float
    fill: str


@dataclass(frozen=True, slots=True)
class Label:
    """Text centred on (x, y), or starting there with ``anchor="start"``, or ending there with
    "end"."""

    x: float
    y: float
    text: str
    size: float = FONT
    anchor: Literal["start", "middle", "end"] = "middle"


@dataclass(frozen=True, slots=True)
class Picture:
    """Boxes and labels on a white ``width x height`` page, in pixels, y downwards. ``save`` writes
    it, ``svg`` is its SVG text."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    labels: tuple[Label, ...]

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{self.height:g}" '
            f'viewBox="0 0 {self.width:g} {self.height:g}" font-family="DejaVu Sans, Arial, sans-serif">'
            f'<rect width="100%" height="100%" fill="white"/>'
        )
        boxes = [
            f'<rect x="{b.x:g}" y="{b.y:g}" width="{b.width:g}" height="{b.height:g}" fill="{b.fill}" stroke="#555555" stroke-width="0.6"/>'
            for b in self.boxes
        ]
        labels = [  # a third of the size below the middle is the baseline: not every viewer knows dominant-baseline
            f'<text x="{t.x:g}" y="{t.y + t.size * 0.35:g}" font-size="{t.size:g}" text-anchor="{t.anchor}">' + escape(t.text) + "</text>"
            for t in self.labels
        ]
        return "\n".join([head, *boxes, *labels, "</svg>\n"])


def draw_layout(layout: Layout | SwizzledLayout) -> Picture:
    """Offsets of a layout: mode 0 down, the other modes (flattened) across; a layout of one mode
    goes across. Colour follows the offset."""
    rows = Layout.compact(layout.shape[0]).size if isinstance(layout.shape, tuple) and len(layout.shape) > 1 else 1
    offsets = layout.offsets().reshape(-1, rows).T
    top = max(1, layout.cosize - 1)
    axes = ("mode 0", "modes 1..") if rows > 1 else ("", "index")
    shades = [(f"offset {round(top * i / 4)}", _colour(0.8 * i / 4, 0.8)) for i in range(5)]
    return draw_grid(
        f"layout {layout}", offsets.shape, axes, shades,
        text=lambda i, j: (str(offsets[i, j]),), fill=lambda i, j: _colour(0.8 * offsets[i, j] / top, 0.8),
        row_name=str if rows > 1 else lambda i: "",
    )  # fmt: skip


def draw_fragment(fragment: Fragment) -> Picture:
    """The operand's matrix: in each cell the thread (T) and its element in register order (v) that
    hold it; one colour per lane."""
    thread, value = fragment.owners()
    per_register = fragment.register_bits // fragment.element_bits
    legend = [(f"T{t}", lane_colour(t)) for t in range(min(fragment.threads, LANES))]
    note = f"v: element in register order, {per_register} to a {fragment.register_bits}-bit register"
    if fragment.threads > LANES:
        note += f"; colours repeat every {LANES} threads"
    return draw_grid(
        f"{fragment.name}: {fragment.threads} threads x {fragment.values} elements of {fragment.element_bits} bits",
        (fragment.rows, fragment.cols), fragment.dims, legend, note,
        text=lambda i, j: (f"T{thread[i, j]}", f"v{value[i, j]}"), fill=lambda i, j: lane_colour(thread[i, j]),
    )  # fmt: skip


def draw_packed(layout: PackedLayout, by: Literal["word", "element"] = "word", rows: int = 32) -> Picture:
    """One tile of a packed layout, at most ``rows`` rows of it.

    ``by="word"``: storage order, a row for each 128 bits (what one thread loads), the element "n,k"
    at each bit position. ``by="element"``: the weight, n down and k across, the word (w) and lowest
    bit (b) that hold each element. One colour per 128 bits in both, repeating every 32.
    """
    if by not in ("word", "element"):
        raise ValueError(f"by is {by!r}; accepted: 'word', 'element'")
    if rows < 1:
        raise ValueError(f"rows is {rows}; accepted: at least 1")
    across = 4 if layout.words % 4 == 0 else 1
    lines = layout.words // across

    def line_name(line: int) -> str:
        return f"w{across * line}" + (f"-{across * line + across - 1}" if across > 1 else "")

    words = f"{layout.words} words" if layout.words > 1 else "1 word"
    title = f"{layout.name}: tile of {layout.tile_n} (n) x {layout.tile_k} (k), {words} of {layout.slots} x {layout.bits} bits"
    if by == "element":
        inverse = layout.inverse_order().reshape(layout.tile_n, layout.tile_k)
        word, bit = inverse // layout.slots, inverse % layout.slots * layout.bits
        shown = min(rows, layout.tile_n)
        seen = np.unique(word[:shown] // across)[:LANES].tolist()
        return draw_grid(
            title + (f"; first {shown} rows" if shown < layout.tile_n else ""), (shown, layout.tile_k), ("n", "k"),
            [(line_name(line), lane_colour(line)) for line in seen], "w: word of the tile, b: its lowest bit that holds the element",
            text=lambda i, j: (f"w{word[i, j]}", f"b{bit[i, j]}"), fill=lambda i, j: lane_colour(word[i, j] // across),
        )  # fmt: skip
    order = layout.order.reshape(lines, -1)
    shown = min(rows, lines)
    return draw_grid(
        title + (f"; first {shown} of {lines} lines" if shown < lines else ""), (shown, order.shape[1]), ("words", "bits"),
        [(line_name(line), lane_colour(line)) for line in range(min(shown, LANES))], "cell: n,k of the element in those bits of that word",
        text=lambda i, j: (f"{order[i, j] // layout.tile_k},{order[i, j] % layout.tile_k}",), fill=lambda i, j: lane_colour(i),
        row_name=line_name, col_name=lambda j: f"{j % layout.slots * layout.bits}-{(j % layout.slots + 1) * layout.bits - 1}",
        group=layout.slots, group_name=lambda g: f"word +{g}" if across > 1 else "",
    )  # fmt: skip


def save(picture: Picture, path: str | Path) -> Path:
    """Write the picture as the suffix says, ``.svg`` or ``.png``, and return the path.

    Raises ``ValueError`` for another suffix, and ``ImportError`` for PNG where matplotlib is
    missing.
    """
    path = Path(path)
    if path.suffix == ".svg":
        path.write_text(picture.svg(), encoding="utf-8")
    elif path.suffix == ".png":
        _write_png(picture, path)
    else:
        raise ValueError(f"cannot write a picture to {path}: suffix is {path.suffix!r}; accepted: .svg, .png")
    return path


def draw_grid(
    title: str, shape: tuple[int, int], axes: tuple[str, str], legend: Sequence[tuple[str, str]], note: str = "", *,
    text: Callable[[int, int], tuple[str, ...]], fill: Callable[[int, int], str],
    row_name: Callable[[int], str] = str, col_name: Callable[[int], str] = str, group: int = 0, group_name: Callable[[int], str] = str,
) -> Picture:  # fmt: skip
    """A matrix of cells with coordinates on both axes, columns in groups of ``group``, title and
    note above, legend at the right."""
    rows, cols = shape
    left, top = MARGIN + 64, MARGIN + 74
    gap, per_legend_column = 6, 8

    def x_of(column: int) -> float:
        return left + column * CELL_W + (column // group * gap if group else 0)

    boxes, labels = [], [Label(MARGIN, MARGIN + 8, title, 14, "start"), Label(MARGIN, MARGIN + 28, note, 11, "start")]
    labels += [Label(left - 8, top + (i + 0.5) * CELL_H, row_name(i), anchor="end") for i in range(rows)]
    labels += [Label(x_of(j) + CELL_W / 2, top - 9, col_name(j)) for j in range(cols)]
    labels += [Label(left, top - 27, f"{axes[1]} →", 12, "start"), Label(left - 8, top - 9, axes[0] and f"{axes[0]} ↓", 12, "end")]
    if group:
        middles = [(g, x_of(g * group) + group * CELL_W / 2) for g in range(cols // group)]
        labels += [Label(x, top - 27, group_name(g), 12) for g, x in middles]
    for i in range(rows):
        for j in range(cols):
            boxes.append(Box(x_of(j), top + i * CELL_H, CELL_W, CELL_H, fill(i, j)))
            lines = text(i, j)
            for line, words in enumerate(lines):
                labels.append(Label(x_of(j) + CELL_W / 2, top + CELL_H * (i + (line + 1) / (len(lines) + 1)), words))
    right = x_of(cols - 1) + CELL_W + 20
    for index, (name, colour) in enumerate(legend):
        x, y = right + index // per_legend_column * 84, top + index % per_legend_column * 22
        boxes.append(Box(x, y, 16, 16, colour))
        labels.append(Label(x + 22, y + 8, name, 11, "start"))
    legend_columns = -(-len(legend) // per_legend_column)
    width = max(right + legend_columns * 84, MARGIN * 2 + 8.5 * len(title), MARGIN * 2 + 7 * len(note))
    height = top + max(rows * CELL_H, min(len(legend), per_legend_column) * 22) + MARGIN
    return Picture(width, height, tuple(boxes), tuple(label for label in labels if label.text))


def stack(pictures: Sequence[Picture]) -> Picture:
    """One picture of several, one below the other."""
    boxes: list[Box] = []
    labels: list[Label] = []
    height = 0.0
    for picture in pictures:
        boxes += [replace(box, y=box.y + height) for box in picture.boxes]
        labels += [replace(label, y=label.y + height) for label in picture.labels]
        height += picture.height
    return Picture(max(picture.width for picture in pictures), height, tuple(boxes), tuple(labels))


def _colour(hue: float, lightness: float) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in hls_to_rgb(hue, lightness, 0.65))


def lane_colour(thread: int) -> str:
    """A hue for each group of 4 neighbouring lanes (a row of a core), a lightness for each lane in
    it; black text reads on all."""
    lane = int(thread) % LANES
    return _colour(lane // 4 / 8, 0.66 + 0.08 * (lane % 4))


def _write_png(picture: Picture, path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.collections import PatchCollection
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise ImportError(f"cannot write {path}: PNG needs matplotlib (pip install 'tilebit[draw]'); SVG needs nothing") from error
    figure = Figure(figsize=(picture.width / 72, picture.height / 72))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, picture.width), ylim=(picture.height, 0))
    axes.axis("off")
    rectangles = [Rectangle((b.x, b.y), b.width, b.height) for b in picture.boxes]
    axes.add_collection(PatchCollection(rectangles, facecolors=[b.fill for b in picture.boxes], edgecolors="#555555", linewidths=0.6))
    sides: dict[str, Literal["left", "center", "right"]] = {"start": "left", "middle": "center", "end": "right"}
    for t in picture.labels:
        axes.text(t.x, t.y, t.text, fontsize=t.size, ha=sides[t.anchor], va="center")
    figure.savefig(path, dpi=72 * float(np.clip(8000 / max(picture.width, picture.height), 0.5, 2)))
