"""The last wave of a persistent grid of ``gemm_wgmma``: which tiles blocks share or cut (``Order``
in ``device/order/tiles.cuh``)."""

from __future__ import annotations

TAILS = (2, 4)  # strips that a tile may be cut into
# Steps that sharing tiles costs a block, the device's functions included: handing a part in takes
# 6,900 cycles at 128 x 256, adding one up 5,000 more than storing a tile that is whole, a step
# 2,150 (H200); the rest is that blocks end unevenly (28672 x 4096, m = 1024, where sharing saves
# 6.8 steps: 507,000 cycles without, 519,000 with).
SHARING_STEPS = 8


def shared_places(places: int, teams: int, steps: int) -> int:
    """How many of the tiles (with ``cluster`` 2, of the pairs of tiles) of ``steps`` steps each a
    stream_k grid of so many blocks (pairs of blocks) shares; the others are dealt out whole. 0
    where the last wave is nearly full: what sharing it saves, adding up costs."""
    rest = places % teams
    if rest == 0 or (teams - rest) * steps <= SHARING_STEPS * teams:
        return 0
    return min(places, rest + teams)


def cut_places(places: int, teams: int, tail: int) -> int:
    """How many of the last tiles (with ``cluster`` 2, pairs of tiles) a grid of so many blocks
    (pairs of blocks) cuts into ``tail`` strips each: those of a last wave, where their strips take
    fewer than ``tail`` rounds."""
    rest = places % teams
    return rest if rest * tail <= (tail - 1) * teams else 0
