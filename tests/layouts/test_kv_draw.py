"""Pictures of a KV page: every cell names what the layout says, and one command writes them."""

import pytest

from tilebit.layouts.draw import Picture
from tilebit.layouts.draw_kv import draw_kv
from tilebit.layouts.kv import KVLayout
from tilebit.layouts.kv_formats import KVFormat


def rows_of_cells(picture: Picture, text: str) -> list[list[list[str]]]:
    """The cells, by row and column, of the part of the picture whose title begins with ``text``."""
    titles = sorted(label.y for label in picture.labels if label.size == 14)
    (top,) = (label.y for label in picture.labels if label.size == 14 and label.text.startswith(text))
    below = next((y for y in titles if y > top), picture.height)
    boxes = [box for box in picture.boxes if top < box.y < below and box.width > 20]
    inside = [label for label in picture.labels if top < label.y < below]
    rows = sorted({box.y for box in boxes})
    return [
        [
            [t.text for t in inside if b.x < t.x < b.x + b.width and b.y < t.y < b.y + b.height]
            for b in sorted((box for box in boxes if box.y == y), key=lambda box: box.x)
        ]
        for y in rows
    ]


@pytest.mark.parametrize("form", [KVFormat("int4", "int2"), KVFormat("int8", "int8", "token"), KVFormat()], ids=lambda form: form.name)
def test_granule_cells_name_lane_word_and_bit(form):
    layout = KVLayout(form, 64, 16)
    drawn = draw_kv(layout)
    for what, bits in (("keys", form.key_bits), ("values", form.value_bits)):
        cells = rows_of_cells(drawn, f"granule of {what}")
        assert (len(cells), len(cells[0])) == ((16, 32) if what == "keys" else (32, 16))
        load = min(4, bits)  # a lane of 64 channels has as many words as a code has bits
        first = 0 if what == "keys" else layout.value_offset // 4
        for row, col in ((0, 0), (3, 7), (9, 2), (15, 15), (8, 11)):
            word, bit = layout.key_position(row, col) if what == "keys" else layout.value_position(col, row)
            index = int(word) - first
            own = index // (32 * load) * load + index % load
            lane, place = cells[row][col]
            assert place == f"w{own} b{bit}" and lane == f"T{row % 8 * 4 + col % 8 // 2}"


def test_sections_and_scales_are_where_they_lie():
    layout = KVLayout(KVFormat("int4", "int4"), 128, 64)
    drawn = draw_kv(layout)
    sections = rows_of_cells(drawn, "kv4_channel: page of 64 tokens")
    offsets = (0, layout.value_offset, layout.key_parameter_offset, layout.value_parameter_offset)
    assert [row[0] for row in sections] == [[str(offset)] for offset in offsets]
    assert sections[0][3] == [str(3 * 1024)] and sections[2][1:] == [[], [], []]
    parameters = rows_of_cells(drawn, "key parameters of 128 tokens")
    assert parameters[5] == [["z18"], ["z19"], ["s18"], ["s19"], ["z26"], ["z27"], ["s26"], ["s27"]]
    page, scale, zero = layout.key_parameter_position(0, 18)
    assert any(label.text == f"p{page} @{zero}" for label in drawn.labels) and scale == zero + 4
    assert rows_of_cells(drawn, "value parameters")[1] == [[f"{kind}{token}"] for token in (4, 5, 6, 7) for kind in "sz"]


def test_shares_of_a_group_are_named():
    drawn = draw_kv(KVLayout(KVFormat("int4", "int4"), 64, 16))
    assert any("page j of a group holds its j-th share of 8" in label.text for label in drawn.labels)
    assert {label.text for label in drawn.labels} >= {"p0 @1024", "p1 @1024", "p3 @1040"}
    assert not any("parameters" in label.text for label in draw_kv(KVLayout(KVFormat("fp8", "fp8"), 64)).labels)
    assert len(rows_of_cells(draw_kv(KVLayout(KVFormat("int4", "fp8", "token"), 64)), "key parameters of a granule")) == 4


def test_bad_requests_are_refused():
    with pytest.raises(ValueError, match="channels is 24; accepted: multiples of 16"):
        draw_kv(KVLayout(KVFormat(), 64), channels=24)
    assert draw_kv(KVLayout(KVFormat(), 64), channels=512) == draw_kv(KVLayout(KVFormat(), 64), channels=64)


def test_one_command_draws_any_cache(tmp_path):
    from typer.testing import CliRunner

    from tilebit.command.cli import app

    for name in ("kv4_channel:128", "k8_token_v2:64:32"):
        path = tmp_path / "page.svg"
        assert CliRunner().invoke(app, ["show", name, "--out", str(path)]).exit_code == 0
        form, *sizes = name.split(":")
        assert path.read_text() == draw_kv(KVLayout(KVFormat.from_name(form), *map(int, sizes))).svg()
    for name, message in (("kv4_channel:96", "head_dim is 96"), ("kv4_channel:128:x", "has no picture"), ("kv4_channel", "has no picture")):
        refused = CliRunner().invoke(app, ["show", name])
        assert refused.exit_code == 2 and message in refused.stderr
