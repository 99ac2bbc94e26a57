"""Pictures of a KV cache's page: where its sections lie, which lane owns which token and channel,
where the scales are."""

from __future__ import annotations

import numpy as np

from .draw import Picture, draw_grid, lane_colour, stack
from .kv import GRANULE, RESIDUAL, KVLayout
from .packing import WORD_BITS, PackedLayout

GREY = "#dddddd"
HALVES = 8  # fp16 numbers in a row of parameters: what one lane loads at once
QUARTET = [(f"T%4={c}", lane_colour(c)) for c in range(4)]


def draw_kv(layout: KVLayout, channels: int = 32) -> Picture:
    """A page of one kv head, top to bottom: its sections, a granule of keys and one of values with
    the lane (T), the lane's word (w) and lowest bit (b) of every code, and the parameters in the
    order of their bytes. Of the channels the first ``channels``, a multiple of 16, are drawn.
    Colours are lanes."""
    if channels < 16 or channels % 16:
        raise ValueError(f"channels is {channels}; accepted: multiples of 16 from 16")
    shown = min(channels, layout.head_dim)
    parts = [_sections(layout), _granule(layout.key, "keys", shown), _granule(layout.value, "values", shown)]
    if layout.format.key_scales == "channel":
        parts.append(_channel_parameters(layout, shown))
    if layout.format.key_scales == "token":
        parts.append(_token_parameters("key", layout.key_parameter_offset))
    if layout.format.value_scales == "token":
        parts.append(_token_parameters("value", layout.value_parameter_offset))
    return stack(parts)


def _sections(layout: KVLayout) -> Picture:
    sections = [
        ("keys", 0, layout.key_bytes),
        ("values", layout.value_offset, layout.value_bytes),
        ("key par.", layout.key_parameter_offset, layout.key_parameter_bytes),
        ("value par.", layout.value_parameter_offset, layout.value_parameter_bytes),
    ]
    sections = [section for section in sections if section[2]]
    note = f"cell: first byte; {layout.page_bytes} bytes, {layout.token_bytes} a token"
    if layout.format.key_scales == "channel":
        note += f"; key parameters: one record a {RESIDUAL} tokens"
        if layout.group_pages > 1:
            note += f", page j of a group holds its j-th share of {layout.group_pages}"

    def first_byte(what: str, offset: int, size: int, granule: int) -> str:
        by_group = what == "key par." and layout.format.key_scales == "channel"  # no token of the group has them for itself
        return "" if by_group and granule % (RESIDUAL // GRANULE) else str(offset + granule * size // layout.granules)

    return draw_grid(
        f"{layout.format.name}: page of {layout.page_size} tokens x {layout.head_dim} channels of one kv head",
        (len(sections), layout.granules), ("", "tokens"), [], note,
        text=lambda i, j: (first_byte(*sections[i], j),), fill=lambda i, j: GREY,
        row_name=lambda i: sections[i][0], col_name=lambda j: f"{GRANULE * j}..",
    )  # fmt: skip


def _granule(packed: PackedLayout, what: str, channels: int) -> Picture:
    rows, cols = (GRANULE, channels) if what == "keys" else (channels, GRANULE)
    axes = ("token", "channel") if what == "keys" else ("channel", "token")
    i, j = np.indices((rows, cols))
    word, bit = packed.position(i, j, packed.tile_n, packed.tile_k)
    words = packed.words // 32
    load = min(4, words)  # words of a lane in one load
    lane, own = word // load % 32, word // (32 * load) * load + word % load
    return draw_grid(
        f"granule of {what}: mma.m16n8k16's A, {packed.bits} bits, {words} words a lane in loads of {load * WORD_BITS // 8} bytes",
        (rows, cols), axes, [(f"T{t}", lane_colour(t)) for t in range(32)],
        f"T: lane; w: its word; b: lowest bit. First {channels} channels of {max(packed.tile_n, packed.tile_k)}",
        text=lambda i, j: (f"T{lane[i, j]}", f"w{own[i, j]} b{bit[i, j]}"), fill=lambda i, j: lane_colour(lane[i, j]),
        group=16, group_name=lambda g: f"fragment {g}" if what == "keys" else "",
    )  # fmt: skip


def _channel_parameters(layout: KVLayout, channels: int) -> Picture:
    page, *places = layout.key_parameter_position(0, np.arange(channels))
    cell: dict[tuple[int, int], str] = {}
    for channel in range(channels):
        for kind, place in zip("sz", places, strict=True):
            cell[int(page[channel]), int(place[channel])] = f"{kind}{channel}"
    order = sorted(cell)
    rows = len(order) // HALVES
    return draw_grid(
        f"key parameters of {RESIDUAL} tokens, fp16: s scale, z zero point of a channel",
        (rows, HALVES), ("", "bytes"), QUARTET, f"row: page of the group @byte; colour: lanes that load it; first {channels} channels",
        text=lambda i, j: (cell[order[HALVES * i + j]],), fill=lambda i, j: lane_colour(i % 4),
        row_name=lambda i: "p{} @{}".format(*order[HALVES * i]), col_name=lambda j: f"+{2 * j}",
    )  # fmt: skip


def _token_parameters(what: str, offset: int) -> Picture:
    return draw_grid(
        f"{what} parameters of a granule's tokens, fp16: s scale, z zero point of a token",
        (GRANULE * 2 // HALVES, HALVES), ("", "bytes"), [], "row: first byte",
        text=lambda i, j: (f"{'sz'[j % 2]}{(HALVES * i + j) // 2}",), fill=lambda i, j: GREY,
        row_name=lambda i: f"@{offset + 2 * HALVES * i}", col_name=lambda j: f"+{2 * j}",
    )  # fmt: skip
