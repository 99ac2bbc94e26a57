"""What a warp's memory access costs: shared-memory wavefronts and global-memory sectors, counted
from the addresses alone.

Shared memory has 32 banks of 4 bytes. An access of 4 bytes a thread is served to the warp at once,
of 8 bytes to half a warp, of 16 bytes to a quarter (8 threads); within such a phase each bank
delivers one word per wavefront, to any number of threads. Global memory moves sectors of 32 bytes
in lines of 128 (CUDA C++ Programming Guide, "Shared Memory" and "Device Memory Accesses").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BANKS = 32
BANK_BYTES = 4
SECTOR_BYTES = 32
WARP = 32
ACCESS_BYTES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class SharedAccess:
    """Cost of one warp-wide access to shared memory: ``wavefronts`` served, ``phases`` of them
    unavoidable."""

    wavefronts: int
    phases: int

    @property
    def conflicts(self) -> int:
        """Extra wavefronts that bank conflicts cost."""
        return self.wavefronts - self.phases


@dataclass(frozen=True, slots=True)
class GlobalAccess:
    """Cost of one warp-wide access to global memory, in 32-byte sectors; ``ideal`` is what its
    bytes would need, dense and aligned.

    ``contiguous``: thread t's bytes directly follow thread t - 1's. ``alignment``: the largest
    power of two, at most 4096, that divides the lowest address.
    """

    sectors: int
    ideal: int
    contiguous: bool
    alignment: int

    @property
    def coalesced(self) -> bool:
        return self.sectors == self.ideal


def shared_access(addresses: np.ndarray, access_bytes: int) -> SharedAccess:
    """Simulate one instruction in which thread t of a warp accesses ``access_bytes`` at byte
    ``addresses[t]`` (at most 32 threads).

    ldmatrix is an access of 16 bytes too: thread t supplies the address of a row, 8 threads those
    of one 8 x 8 matrix, a phase each. Raises ``ValueError`` for accesses that hardware refuses:
    more than 32 threads, other widths, addresses not aligned to the width.
    """
    addresses = _checked(addresses, access_bytes)
    per_phase = min(WARP, WARP * BANK_BYTES // access_bytes)
    wavefronts = phases = 0
    for start in range(0, addresses.size, per_phase):
        first = addresses[start : start + per_phase, None] // BANK_BYTES
        words = np.unique(first + np.arange(max(1, access_bytes // BANK_BYTES)))
        wavefronts += int(np.bincount(words % BANKS).max())
        phases += 1
    return SharedAccess(wavefronts, phases)


def global_access(addresses: np.ndarray, access_bytes: int) -> GlobalAccess:
    """Count the sectors that a warp touches when thread t accesses ``access_bytes`` at byte
    ``addresses[t]``; raises as ``shared_access``."""
    addresses = _checked(addresses, access_bytes)
    sectors = np.unique(addresses // SECTOR_BYTES).size  # aligned accesses of at most 16 bytes never straddle a sector
    distinct = np.unique(addresses).size
    lowest = int(addresses.min())
    return GlobalAccess(
        sectors=int(sectors),
        ideal=-(-distinct * access_bytes // SECTOR_BYTES),
        contiguous=bool((np.diff(addresses) == access_bytes).all()),
        alignment=min(lowest & -lowest, 4096) if lowest else 4096,
    )


def _checked(addresses: np.ndarray, access_bytes: int) -> np.ndarray:
    addresses = np.asarray(addresses, dtype=np.int64).ravel()
    if access_bytes not in ACCESS_BYTES:
        raise ValueError(f"an access of {access_bytes} bytes a thread; accepted: {ACCESS_BYTES}")
    if not 1 <= addresses.size <= WARP:
        raise ValueError(f"{addresses.size} addresses; accepted: 1 to {WARP}, one per thread of a warp")
    if (addresses < 0).any() or (addresses % access_bytes).any():
        raise ValueError(f"addresses must be >= 0 and multiples of the {access_bytes} bytes accessed; got {addresses.tolist()}")
    return addresses
