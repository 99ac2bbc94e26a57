"""The access simulations against cases worked out by hand."""

import numpy as np
import pytest

from tilebit.layouts.banks import GlobalAccess, SharedAccess, global_access, shared_access

LANE = np.arange(32)


@pytest.mark.parametrize(
    "addresses, access_bytes, wavefronts, phases",
    [
        (4 * LANE, 4, 1, 1),
        (0 * LANE, 4, 1, 1),  # broadcast
        (8 * LANE, 4, 2, 1),
        (128 * LANE, 4, 32, 1),
        (132 * LANE, 4, 1, 1),  # rows padded by one word
        (2 * LANE, 2, 1, 1),
        (8 * LANE, 8, 2, 2),
        (16 * LANE, 16, 4, 4),
        (32 * LANE, 16, 8, 4),
        (128 * LANE, 16, 32, 4),
        (16 * LANE[:8], 16, 1, 1),
    ],
)
def test_shared_memory_wavefronts(addresses, access_bytes, wavefronts, phases):
    access = shared_access(addresses, access_bytes)
    assert access == SharedAccess(wavefronts, phases)
    assert access.conflicts == wavefronts - phases


def test_global_sectors():
    assert global_access(16 * LANE + 512, 16) == GlobalAccess(sectors=16, ideal=16, contiguous=True, alignment=512)
    assert global_access(4 * LANE, 4) == GlobalAccess(sectors=4, ideal=4, contiguous=True, alignment=4096)
    scattered = global_access(64 * LANE, 4)
    assert (scattered.sectors, scattered.ideal, scattered.contiguous, scattered.coalesced) == (32, 4, False, False)
    shifted = global_access(4 * LANE + 4, 4)
    assert (shifted.sectors, shifted.alignment, shifted.contiguous) == (5, 4, True)
    backwards = global_access(16 * LANE[::-1], 16)
    assert backwards.coalesced and not backwards.contiguous


@pytest.mark.parametrize("addresses, access_bytes", [(LANE, 3), (2 * LANE, 4), (4 * np.arange(33), 4), ([], 4), (4 * LANE - 4, 4)])
def test_impossible_accesses_are_refused(addresses, access_bytes):
    for simulate in (shared_access, global_access):
        with pytest.raises(ValueError, match=r"accepted|accessed"):
            simulate(np.asarray(addresses), access_bytes)
