"""Bank conflicts of int8 x: those of generated index expressions, and of the headers' own.

The kernels themselves are looked at where they are compiled: tests/tiles/gemm/test_cross_compile.py."""

from __future__ import annotations

import pytest

from results.measure.static.conflicts import STREAM_BYTES, conflicts
from tilebit.schedules.gemm.stream import BLOCK_M
from tilebit.schedules.schedule import Schedule

MMA = Schedule("gemm_mma", 64, 8, 128, 5, 4)
# As TileLang writes it: 8 rows of 128 bytes, whose pieces of 16 trade places.
ROWS = "((((int)threadIdx.x) & 7) * 128)"
TURNED = (
    f"((({ROWS} + (((((((int)threadIdx.x) & 7) >> 2) + (ki >> 1)) & 1) * 64)) + (((((((int)threadIdx.x) & 3) >> 1) + (ki & 1)) & 1) * 32))"
    " + (((((((int)threadIdx.x) & 15) >> 3) + (((int)threadIdx.x) & 1)) & 1) * 16))"
)
STRAIGHT = f"({ROWS} + ((ki * 32) + (((((int)threadIdx.x) & 15) >> 3) * 16)))"


def load(index: str) -> str:
    return f"tl::ptx_ldmatrix_x2((&(((signed char*)Xs)[{index}])), (&(B_local[0])));"


def test_rows_of_bytes_whose_pieces_trade_places_meet_no_bank_twice() -> None:
    assert conflicts(MMA, load(TURNED)) == {"packed line": 0, "scale": 0, "x": 0}


def test_rows_of_bytes_one_below_the_other_meet() -> None:
    """All eight rows of a matrix in the same four banks: seven wavefronts more of each of two matrices, at eight values of ki."""
    assert conflicts(MMA, load(STRAIGHT))["x"] == 7 * 2 * 8


def test_halves_are_no_bytes() -> None:
    """The same indices of 16-bit numbers: rows of 256 bytes, which these pieces do not turn far enough."""
    assert conflicts(MMA, load(TURNED).replace("signed char", "half_t"))["x"] > 0


@pytest.mark.parametrize("block_m", BLOCK_M)
@pytest.mark.parametrize("block_k", [64, 128])
def test_rows_of_a_stream_are_padded(block_m: int, block_k: int) -> None:
    schedule, source = Schedule("gemm_stream", 32, block_m, block_k, 4, 4), "tilebit::ByteProduct<" + "; ".join(STREAM_BYTES)
    assert conflicts(schedule, source) == {"packed line": 0, "scale": 0, "x": 0}
    with pytest.raises(ValueError, match=r"does not compute 'PITCH = STEP_K \+ 16'"):
        conflicts(schedule, source.replace("STEP_K + 16", "STEP_K"))


def test_a_source_without_x_is_refused() -> None:
    with pytest.raises(ValueError, match="no ldmatrix of 16-bit or 8-bit x"):
        conflicts(MMA, load(TURNED).replace("signed char", "float"))
