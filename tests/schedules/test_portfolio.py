"""Portfolios: which kernel serves which m, decided from times as functions of m."""

import pytest

from tilebit.schedules.portfolio import MOST_KERNELS, Portfolio, borders, calibrated, table, with_points
from tilebit.schedules.schedule import Schedule

TILES = [Schedule("gemm_wgmma", 128, block_m, 128, 4, 8) for block_m in range(16, 257, 16)]


def time(schedule: Schedule, m: int) -> float:
    """Microseconds of row tiles that take 4 and as much more as they are high."""
    return -(-m // schedule.block_m) * (4 + schedule.block_m / 16)


def test_a_table_serves_every_m_by_the_least_time_and_holds_few_kernels() -> None:
    found = table(TILES, time)
    assert 1 < len(found.kernels) <= MOST_KERNELS
    assert list(found.bounds) == sorted(set(found.bounds))
    assert all(a != b for a, b in zip(found.serving, found.serving[1:], strict=False))
    for m in range(1, found.bounds[-1] + 1):
        border = min(b for b in borders(TILES) if b >= m)
        assert time(found.at(m), border) == min(time(s, border) for s in found.kernels)
    assert found.at(10 * found.bounds[-1]) == found.serving[-1]
    assert found == table(TILES, time)


def test_the_kernels_that_matter_are_kept() -> None:
    slow = [Schedule("gemm_wgmma", 64, s.block_m, 128, 4, 4) for s in TILES]
    found = table(slow + TILES, lambda s, m: time(s, m) * (2 if s.block_n == 64 else 1))
    assert {s.block_n for s in found.kernels} == {128}


def test_measurements_correct_expectations_between_and_beyond_them() -> None:
    tile, other = TILES[7], TILES[3]
    corrected = calibrated(time, {tile: {128: 2 * time(tile, 128), 512: 4 * time(tile, 512)}})
    assert corrected(tile, 64) == pytest.approx(2 * time(tile, 64))
    assert corrected(tile, 256) == pytest.approx(8**0.5 * time(tile, 256))
    assert corrected(tile, 4096) == pytest.approx(4 * time(tile, 4096))
    assert corrected(other, 256) == pytest.approx(4 * time(other, 256))


def test_no_m_is_expected_to_take_longer_than_a_larger_one_did() -> None:
    tile = TILES[7]
    corrected = calibrated(lambda s, m: 100.0 / m, {tile: {128: 3.0}})
    assert corrected(tile, 4) == 3.0 and corrected(tile, 256) == pytest.approx(100 / 256 * 3.0 / (100 / 128))


def test_a_tuned_m_is_served_by_what_was_tuned_and_so_may_others_be() -> None:
    quick = Schedule("gemm_stream_bulk", 64, 4, 128, 4, 8)
    found = table(TILES, lambda s, m: time(s, m) if s != quick else (1.0 if m <= 4 else 1e9), {4: quick, 48: TILES[9]})
    assert {found.at(m) for m in (1, 2, 3, 4)} == {quick} and found.at(48) == TILES[9]
    assert found.at(49) != TILES[9] and found.at(5) in TILES


def test_a_portfolio_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no schedules"):
        table([], time)


def test_points_change_just_their_m() -> None:
    a, b, c = TILES[:3]
    shape = Portfolio((4, 32, 64), (a, b, a), (1.0, 2.0, 3.0))
    points = {1: (c, 0.5), 4: (a, 0.9), 16: (c, 1.5), 64: (c, 2.5), 80: (b, 4.0)}
    found = with_points(shape, points)
    assert [found.at(m) for m in range(1, 200)] == [points[m][0] if m in points else shape.at(m) for m in range(1, 200)]
    assert found.bounds == (1, 4, 15, 16, 32, 63, 64, 79, 80, 81) and found.us == (0.5, 0.9, 2.0, 1.5, 2.0, 3.0, 2.5, 3.0, 4.0, 3.0)
    assert all(one != other for one, other in zip(found.serving, found.serving[1:], strict=False))
    assert with_points(shape, {}) == shape == with_points(shape, {16: (b, 2.0)})
