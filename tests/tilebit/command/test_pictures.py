"""The pictures that ``tilebit show`` knows by name: there is one of every layout that a weight is packed in."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilebit.command.cli import app
from tilebit.command.pictures import names, picture
from tilebit.layouts.draw import Picture, draw_packed
from tilebit.layouts.formats import FORMATS, GemmFormat
from tilebit.schedules.gemm.codecs import codec_of, packed_layout
from tilebit.schedules.target import ARCHES


def cells(drawn: Picture) -> list[tuple[int, int]]:
    """(n, k) of what lies in each place of storage, from the lowest bits up."""
    return [(int(n), int(k)) for label in drawn.labels for n, k in re.findall(r"^(\d+),(\d+)$", label.text)]


@pytest.mark.parametrize("arch", ARCHES)
def test_every_format_s_layout_has_a_picture(arch: str):
    expected: dict[str, GemmFormat] = {}
    for format in FORMATS.values():
        if not format.codebook and arch in (codec_of(format).arches or ARCHES):
            expected.setdefault(f"{arch}:{format.bits}{':int8' * bool(format.x)}", format)
    assert set(expected) == {f"{arch}:{bits}{kind}" for bits in (4, 8) for kind in ("", ":int8")} <= set(names())
    for name, format in expected.items():
        assert picture(name) == draw_packed(packed_layout(arch, format)), name
        assert picture(name, "element") == draw_packed(packed_layout(arch, format), "element"), name


@pytest.mark.parametrize("arch", ARCHES[:-1])
def test_dual_mma_packing_can_be_seen(arch: str):
    """A word's low nibbles are four neighbouring k of row r, its high ones those of row r + 8 (LiquidGEMM 5.2); for 16-bit x not so."""
    drawn = cells(picture(f"{arch}:4:int8"))
    for word in range(0, len(drawn), 8):
        low, high = drawn[word : word + 8 : 2], drawn[word + 1 : word + 8 : 2]
        n, k = low[0]
        assert low == [(n, k + i) for i in range(4)] and high == [(n + 8, k + i) for i in range(4)]
    assert len(drawn) == 32 * 32 and cells(picture(f"{arch}:4")) != drawn


def test_the_command_draws_them(tmp_path: Path):
    path = tmp_path / "packed.svg"
    assert CliRunner().invoke(app, ["show", "sm_90a:4:int8", "--out", str(path)]).exit_code == 0
    assert path.read_text() == picture("sm_90a:4:int8").svg() and "gemm_cuda_b4_int8" in path.read_text()


@pytest.mark.parametrize("name", ["sm_90a:16:int8", "sm_90a:4:int4", "sm_91:4:int8", "awq:4:int8"])
def test_others_are_refused_with_the_names_that_are_there(name: str):
    with pytest.raises(ValueError, match=f"'{name}' has no picture; accepted: .*sm_90a:4:int8"):
        picture(name)
