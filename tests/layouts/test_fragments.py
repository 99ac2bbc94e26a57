"""Fragments against PTX's own formulas and against TileLang's maps."""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tilebit.layouts.fragments import Fragment, lane_pairs, lanes, ldmatrix, mma_a, mma_b, mma_c, wgmma_a, wgmma_c
from tilebit.layouts.layout import Layout

ALL = [
    *(mma_a(k) for k in (16, 32)),
    *(mma_b(k, n) for k in (16, 32) for n in (8, 16)),
    *(mma_c(n) for n in (8, 16)),
    *(wgmma_a(k) for k in (16, 32)),
    *(wgmma_c(n) for n in (8, 16, 64, 256)),
    *(ldmatrix(x, trans) for x in (1, 2, 4) for trans in (False, True)),
    lanes(16, 2),
    lanes(32, 1),
    lane_pairs(),
]


@pytest.mark.parametrize("fragment", ALL, ids=lambda f: f.name)
def test_owners_invert_coords(fragment):
    thread, value = fragment.owners()
    assert thread.shape == (fragment.rows, fragment.cols)
    row, col = fragment.coords()
    assert (thread[row, col] == np.arange(fragment.threads)[:, None]).all()
    assert (value[row, col] == np.arange(fragment.values)[None, :]).all()


# PTX ISA 9.7.14 and 9.7.15: (thread in the warp or warpgroup, element index) -> (row, col)
def ptx_a16(t, i):
    return 16 * (t // 32) + t % 32 // 4 + (8 if i % 4 >= 2 else 0), t % 4 * 2 + (i & 1) + (8 if i >= 4 else 0)


def ptx_a8(t, i):
    return 16 * (t // 32) + t % 32 // 4 + (8 if i // 4 % 2 else 0), t % 4 * 4 + (i & 3) + (16 if i >= 8 else 0)


def ptx_b16(t, i):
    return t // 4, t % 4 * 2 + (i & 1) + (8 if i >= 2 else 0)


def ptx_b8(t, i):
    return t // 4, t % 4 * 4 + (i & 3) + (16 if i >= 4 else 0)


def ptx_c(t, i):
    return 16 * (t // 32) + t % 32 // 4 + (8 if i // 2 % 2 else 0), i // 4 * 8 + t % 4 * 2 + (i & 1)


@pytest.mark.parametrize(
    "fragment, formula, threads, values",
    [
        (mma_a(16), ptx_a16, 32, 8),
        (mma_a(32), ptx_a8, 32, 16),
        (mma_b(16), ptx_b16, 32, 4),
        (mma_b(32), ptx_b8, 32, 8),
        (mma_c(), ptx_c, 32, 4),
        (wgmma_a(16), ptx_a16, 128, 8),
        (wgmma_a(32), ptx_a8, 128, 16),
        (wgmma_c(8), ptx_c, 128, 4),
        (wgmma_c(256), ptx_c, 128, 128),
    ],
    ids=lambda x: x.name if isinstance(x, Fragment) else None,
)
def test_ptx_formulas(fragment, formula, threads, values):
    assert (fragment.threads, fragment.values) == (threads, values)
    row, col = fragment.coords()
    for t in range(threads):
        for i in range(values):
            assert (row[t, i], col[t, i]) == formula(t, i)


def test_ldmatrix_feeds_mma():
    """ldmatrix.x4 on the quarters of a 16 x 16 tile (down, then right) leaves mma's A fragment; .trans if each is stored transposed."""
    tile = np.arange(256).reshape(16, 16)
    quarters = [tile[r : r + 8, c : c + 8] for c in (0, 8) for r in (0, 8)]
    row, col = mma_a(16).coords()
    for trans in (False, True):
        stacked = np.concatenate([q.T if trans else q for q in quarters])
        held = stacked[ldmatrix(4, trans).coords()]
        assert (held == tile[row, col]).all()


def test_impossible_fragments_are_refused():
    with pytest.raises(ValueError, match="exactly once"):
        Fragment("overlap", 4, 2, Layout(4, 1), Layout(2, 2), 16)
    with pytest.raises(ValueError, match="exactly once"):
        Fragment("hole", 4, 2, Layout(4, 1), Layout(1, 0), 16)
    wrong: list[tuple[Callable[..., Fragment], tuple[int, ...]]] = [
        *((mma_a, (8,)), (mma_b, (16, 24)), (mma_c, (12,)), (wgmma_a, (64,)), (wgmma_c, (264,)), (ldmatrix, (3,))),
    ]
    for make, arguments in wrong:
        with pytest.raises(ValueError, match=r"accepted|loads"):
            make(*arguments)


@pytest.mark.slow
def test_tilelang_agrees():
    if find_spec("tilelang") is None:
        pytest.skip("tilelang is not installed (pip install tilebit[compile])")
    script = Path(__file__).with_name("tilelang_maps.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    maps = json.loads(done.stdout.splitlines()[-1])
    fragments = {f.name: f for f in ALL}
    assert len(maps) == 14
    for name, table in maps.items():
        fragment = fragments[name.removeprefix("load ")]
        thread, value = fragment.owners()
        assert np.array_equal(np.array(table), np.stack([thread.ravel(), value.ravel()], axis=1)), name
