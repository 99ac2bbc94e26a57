"""Pictures: every cell names what it should, both file types are written, and what cannot be drawn is refused."""

import re
import sys
from xml.etree import ElementTree

import numpy as np
import pytest

from tilebit.layouts.draw import Picture, draw_fragment, draw_layout, draw_packed, save
from tilebit.layouts.fragments import mma_a, wgmma_c
from tilebit.layouts.layout import Layout
from tilebit.layouts.packing import PackedLayout, gemm_layout
from tilebit.layouts.swizzle import Swizzle, SwizzledLayout


def cells(picture: Picture) -> dict[tuple[float, float], list[str]]:
    """Texts inside each box, by the box's corner, as the SVG has them."""
    root = ElementTree.fromstring(picture.svg())
    boxes = [tuple(float(e.attrib[a]) for a in ("x", "y", "width", "height")) for e in root if e.tag.endswith("rect") and "x" in e.attrib]
    texts = [(float(e.attrib["x"]), float(e.attrib["y"]), e.text or "") for e in root if e.tag.endswith("text")]
    return {(x, y): [t for a, b, t in texts if x < a < x + w and y < b < y + h] for x, y, w, h in boxes}


def grid(picture: Picture, rows: int, cols: int) -> list[list[list[str]]]:
    inside = [texts for _, texts in sorted(cells(picture).items(), key=lambda item: item[0][::-1]) if texts]
    assert len(inside) == rows * cols
    return [inside[i * cols : (i + 1) * cols] for i in range(rows)]


def test_fragment_cells_name_thread_and_element():
    fragment = mma_a()
    thread, value = fragment.owners()
    assert grid(draw_fragment(fragment), 16, 16) == [[[f"T{thread[i, j]}", f"v{value[i, j]}"] for j in range(16)] for i in range(16)]


@pytest.mark.parametrize("layout", [Layout((4, (2, 3)), (2, (1, 8))), SwizzledLayout(Swizzle(2, 0, 2), Layout((4, 4), (4, 1)))], ids=str)
def test_layout_cells_are_offsets(layout):
    columns = layout.size // 4
    assert grid(draw_layout(layout), 4, columns) == [[[str(layout(i, j))] for j in range(columns)] for i in range(4)]
    assert grid(draw_layout(Layout(5, 3)), 1, 5) == [[["0"], ["3"], ["6"], ["9"], ["12"]]]


def test_packed_cells_name_elements_and_words():
    layout = gemm_layout("sm_80", 4)
    by_word = grid(draw_packed(layout, rows=3), 3, 32)
    elements = [[f"{e // 64},{e % 64}" for e in layout.order[4 * line : 4 * line + 4].ravel()] for line in range(3)]
    assert [[texts[0] for texts in row] for row in by_word] == elements
    i, j = np.indices((2, 64))
    word, bit = layout.position(i, j, 64, 64)
    by_element = grid(draw_packed(layout, by="element", rows=2), 2, 64)
    assert by_element == [[[f"w{word[i, j]}", f"b{bit[i, j]}"] for j in range(64)] for i in range(2)]
    labels = [label.text for label in draw_packed(layout, rows=3).labels]
    assert labels.count("28-31") == 4 and "word +3" in labels and any("first 3 of 128 lines" in text for text in labels)
    assert grid(draw_packed(PackedLayout("one", 4, 8, 1, np.arange(8)[None])), 1, 8)[0][7] == ["7,0"]


def test_threads_have_their_own_colours_within_a_warp():
    for fragment in (mma_a(), wgmma_c(8)):
        picture = draw_fragment(fragment)
        colours = [box.fill for box in picture.boxes]
        thread, _ = fragment.owners()
        owner = dict(zip(colours[: thread.size], (thread % 32).ravel().tolist(), strict=True))
        assert len(set(colours)) == 32 and all(owner[c] == t % 32 for c, t in zip(colours, thread.ravel().tolist(), strict=False))


def test_save_by_suffix(tmp_path):
    picture = draw_layout(Layout((2, 3), (3, 1)))
    assert save(picture, tmp_path / "a.svg").read_text().startswith("<svg ")
    pytest.importorskip("matplotlib")
    assert save(picture, str(tmp_path / "a.png")).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=re.escape("accepted: .svg, .png")):
        save(picture, tmp_path / "a.pdf")


def test_png_without_matplotlib_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"tilebit\[draw\]"):
        save(draw_layout(Layout(2, 1)), tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_bad_requests_are_refused():
    with pytest.raises(ValueError, match="accepted: 'word', 'element'"):
        draw_packed(gemm_layout("cpu", 8), by="thread")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1"):
        draw_packed(gemm_layout("cpu", 8), rows=0)
