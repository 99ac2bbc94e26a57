"""Packed layouts: which bit of which word holds element (n, k) of a weight.

A packed operand is a grid of tiles. Inside a tile, ``order[word, slot]`` names the element that
word holds in bits ``slot * bits .. slot * bits + bits - 1``; outside, tiles follow each other along
k first ("n_major": all of a row of tiles, then the next row) or along n first ("k_major").
Checkpoints' packings and the ones induced from an MMA fragment are both instances.

Inducing a layout from the instruction that will read it is TurboMind's and BitDecoding's rule: run
the wide pipeline, look where each element lands, compress in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from .fragments import Fragment, lane_pairs, lanes, wgmma_a

WORD_BITS = 32
CUDA_ARCHES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a")


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayout:
    """Where each ``bits``-bit code of an [n, k] weight is stored.

    ``order`` is int32 [words_per_tile, 32 // bits]: ``n_local * tile_k + k_local`` of the element
    in each slot; a permutation of the tile's elements. ``outer`` is the order of the tiles:
    "n_major" storage is (tiles_n, tiles_k, words), "k_major" is (tiles_k, tiles_n, words). Storage
    is padded up to whole tiles. Raises ``ValueError`` if ``order`` is not such a permutation.
    """

    name: str
    bits: int
    tile_n: int
    tile_k: int
    order: np.ndarray
    outer: str = "n_major"

    def __post_init__(self) -> None:
        if self.bits not in (1, 2, 4, 8, 16):
            raise ValueError(f"{self.name}: bits is {self.bits!r}; accepted: 1, 2, 4, 8, 16")
        if self.outer not in ("n_major", "k_major"):
            raise ValueError(f"{self.name}: outer is {self.outer!r}; accepted: 'n_major', 'k_major'")
        order = np.array(self.order, dtype=np.int32)
        elements = self.tile_n * self.tile_k
        if self.tile_n < 1 or self.tile_k < 1:
            raise ValueError(f"{self.name}: a tile of {self.tile_n} x {self.tile_k}; accepted: at least 1 x 1")
        if order.ndim != 2 or order.shape[1] != self.slots or not np.array_equal(np.sort(order, axis=None), np.arange(elements)):
            raise ValueError(
                f"{self.name}: order of shape {order.shape} must be [words, {self.slots}] and hold each of the tile's "
                f"{self.tile_n} x {self.tile_k} elements once"
            )
        order.flags.writeable = False
        object.__setattr__(self, "order", order)

    @property
    def slots(self) -> int:
        """Codes in a word."""
        return WORD_BITS // self.bits

    @property
    def code_dtype(self) -> np.dtype:
        """What ``unpack`` returns: uint8, of 16 bits uint16."""
        return np.dtype(np.uint16 if self.bits > 8 else np.uint8)

    @property
    def words(self) -> int:
        """Words in a tile."""
        return self.order.shape[0]

    def tiles(self, n: int, k: int) -> tuple[int, int]:
        """(tiles along n, tiles along k) that cover [n, k]."""
        if n < 1 or k < 1:
            raise ValueError(f"{self.name}: a weight of shape [{n}, {k}] has nothing to pack; n and k must be at least 1")
        return -(-n // self.tile_n), -(-k // self.tile_k)

    def padded(self, n: int, k: int) -> tuple[int, int]:
        """[n, k] rounded up to whole tiles."""
        tiles_n, tiles_k = self.tiles(n, k)
        return tiles_n * self.tile_n, tiles_k * self.tile_k

    def storage_shape(self, n: int, k: int) -> tuple[int, int, int]:
        """Shape of the uint32 storage of an [n, k] weight."""
        tiles_n, tiles_k = self.tiles(n, k)
        return (tiles_n, tiles_k, self.words) if self.outer == "n_major" else (tiles_k, tiles_n, self.words)

    def pack(self, codes: np.ndarray, fill: int = 0) -> np.ndarray:
        """Integer [n, k] codes -> uint32 ``storage_shape(n, k)``; padding holds ``fill``. Raises
        ``ValueError`` for codes of more than ``bits`` bits."""
        if codes.ndim != 2 or codes.dtype.kind not in "ui":
            raise ValueError(f"{self.name}: codes are {codes.dtype}{list(codes.shape)}; accepted: an integer [n, k] array")
        n, k = codes.shape
        tiles_n, tiles_k = self.tiles(n, k)
        for what, low, high in (("codes", codes.min(), codes.max()), ("fill", fill, fill)):
            if low < 0 or high >= 1 << self.bits:
                raise ValueError(f"{self.name}: {what} reach from {low} to {high}; {self.bits} bits hold 0 to {(1 << self.bits) - 1}")
        pad_n, pad_k = self.padded(n, k)
        full = np.pad(codes, ((0, pad_n - n), (0, pad_k - k)), constant_values=fill)
        by_tile = full.reshape(tiles_n, self.tile_n, tiles_k, self.tile_k)
        by_tile = by_tile.transpose(*((0, 2, 1, 3) if self.outer == "n_major" else (2, 0, 1, 3)))
        by_tile = by_tile.reshape(*by_tile.shape[:2], -1)
        words = np.zeros((*by_tile.shape[:2], self.words), dtype=np.uint32)
        for slot in range(self.slots):
            words |= by_tile[..., self.order[:, slot]].astype(np.uint32) << np.uint32(slot * self.bits)
        return words

    def unpack(self, words: np.ndarray, n: int, k: int) -> np.ndarray:
        """The inverse of ``pack``: uint32 (or int32) storage -> ``code_dtype`` [n, k]."""
        shape = self.storage_shape(n, k)
        if words.size != np.prod(shape, dtype=np.int64) or words.dtype.itemsize != 4 or words.dtype.kind not in "ui":
            raise ValueError(
                f"{self.name}: got {words.dtype}{list(words.shape)} for a [{n}, {k}] weight; "
                f"accepted: 32-bit integers of shape {list(shape)}"
            )
        words = np.ascontiguousarray(words).view(np.uint32).reshape(shape)
        mask = np.uint32((1 << self.bits) - 1)
        by_tile = np.empty((*shape[:2], self.tile_n * self.tile_k), dtype=self.code_dtype)
        for slot in range(self.slots):
            by_tile[..., self.order[:, slot]] = words >> np.uint32(slot * self.bits) & mask
        full = by_tile.reshape(*shape[:2], self.tile_n, self.tile_k)
        full = full.transpose(*((0, 2, 1, 3) if self.outer == "n_major" else (1, 2, 0, 3)))
        return np.ascontiguousarray(full.reshape(self.padded(n, k))[:n, :k])

    def inverse_order(self) -> np.ndarray:
        """int32 [tile_n * tile_k]: ``word * slots + slot`` of each element of a tile."""
        inverse = np.empty(self.order.size, dtype=np.int32)
        inverse[self.order.ravel()] = np.arange(self.order.size, dtype=np.int32)
        return inverse

    def position(self, i: np.ndarray | int, j: np.ndarray | int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
        """(flat word index, bit shift), int64, of elements (i, j) of a padded [n, k] weight: the
        layout as a function, vectorized."""
        i, j = np.asarray(i, dtype=np.int64), np.asarray(j, dtype=np.int64)
        pad_n, pad_k = self.padded(n, k)
        if ((i < 0) | (i >= pad_n) | (j < 0) | (j >= pad_k)).any():
            raise ValueError(f"{self.name}: coordinates outside of the padded weight [{pad_n}, {pad_k}] (of [{n}, {k}])")
        tiles_n, tiles_k = self.tiles(n, k)
        tile_i, tile_j = i // self.tile_n, j // self.tile_k
        tile = tile_i * tiles_k + tile_j if self.outer == "n_major" else tile_j * tiles_n + tile_i
        slot = self.inverse_order()[i % self.tile_n * self.tile_k + j % self.tile_k].astype(np.int64)
        return tile * self.words + slot // self.slots, slot % self.slots * self.bits


def register_order(bits: int, element_bits: int, register_bits: int = 32) -> np.ndarray:
    """Which of a register word's elements, counted in register order, each slot of that word holds:
    int64 [register_bits // bits].

    Codes narrower than a byte are unpacked by ``(word >> bits * i) & mask`` with one code per
    ``element_bits``; step i must yield the i-th unpacked register, so slot ``i + p * element_bits /
    bits`` holds its p-th element: 0,2,4,6,1,3,5,7 for 4 bits under fp16 (lop3), 0,4,1,5,2,6,3,7
    under int8 (nibble split), 0,2,..14,1,3,..15 for 2 bits under fp16. Bytes stay in order: PRMT
    picks any of them; so do 16-bit codes: they are the register.
    """
    slots = register_bits // bits
    if bits >= 8:
        return np.arange(slots)
    per_register = register_bits // element_bits
    return np.arange(slots).reshape(-1, per_register).T.ravel()


def induce(
    fragment: Fragment, bits: int, name: str | None = None, load_bits: int = 128, k_steps: int | None = None, n_tiles: int = 1
) -> PackedLayout:
    """The layout in which ``fragment``'s threads find their own elements: one tile of ``n_tiles *
    fragment.rows`` x ``k_steps * fragment.cols``.

    1. extend: the operand is ``n_tiles`` rows of ``k_steps`` fragments side by side along k (default: as many as fill one
       ``load_bits``-wide load of each thread, at least 1);
    2. fragment: every thread's elements, in register order, step after step, then tile after tile;
    3. compress: each thread's codes, ordered inside every register word by ``register_order``;
    4. store: thread-major: load after load, in each load thread after thread, ``load_bits`` for each.

    Raises ``ValueError`` for an accumulator's fragment, for codes wider than its elements and if a
    thread's codes do not fill whole loads.
    """
    if bits not in (2, 4, 8, 16):
        raise ValueError(f"bits is {bits!r}; accepted: 2, 4, 8, 16")
    if fragment.element_bits > 16:
        raise ValueError(f"{fragment.name} holds accumulators of {fragment.element_bits} bits; accepted: fragments of an operand")
    if bits > fragment.element_bits:
        raise ValueError(f"{fragment.name} holds elements of {fragment.element_bits} bits; accepted: codes of at most as many, got {bits}")
    steps = k_steps if k_steps is not None else max(1, load_bits // (bits * fragment.values * max(1, n_tiles)))
    codes = n_tiles * steps * fragment.values
    per_load = load_bits // bits
    if load_bits % fragment.register_bits or steps < 1 or n_tiles < 1 or codes % per_load:
        raise ValueError(
            f"{fragment.name}: {codes} codes of {bits} bits a thread ({n_tiles} tiles of {steps} k steps of {fragment.values}) do not fill "
            f"whole loads of {load_bits} bits; choose k_steps or n_tiles so that they do"
        )
    tile_n, tile_k = n_tiles * fragment.rows, steps * fragment.cols
    row, col = (part[:, None, None, :] for part in fragment.coords())  # [threads, 1, 1, values]
    tile, step = np.arange(n_tiles)[:, None, None], np.arange(steps)[:, None]
    element = (row + tile * fragment.rows) * tile_k + col + step * fragment.cols  # [threads, tiles, steps, values]
    in_word = register_order(bits, fragment.element_bits, fragment.register_bits)
    element = element.reshape(fragment.threads, -1, in_word.size)[..., in_word]  # [threads, register words, slots]
    element = element.reshape(fragment.threads, -1, per_load).transpose(1, 0, 2)  # [loads, threads, codes in a load]
    return PackedLayout(name or f"{fragment.name}.b{bits}", bits, tile_n, tile_k, element.reshape(-1, WORD_BITS // bits).astype(np.int32))


@cache
def gemm_layout(arch: str, bits: int, int8: bool = False) -> PackedLayout:
    """The packed weight of the GEMM programs on ``arch`` at 4 or 8 bits.

    On NVIDIA (all of ``CUDA_ARCHES``) it is induced from wgmma's A fragment, which is four mma.sync
    warps' too: tiles of 64 (n) x 64 (k) at 4 bits, 64 x 32 at 8 bits, 2048 bytes, thread t owning
    words 4 t .. 4 t + 3; ``int8``: from that of the instructions that multiply bytes, so that the
    low nibbles of a word are four of one row's weights and the high ones four of row r + 8
    (LiquidGEMM 5.2, where two instructions' operands share a load). On "cpu": tiles of 32 x 32; at 4 bits it is induced from AVX512-BF16's
    operand, four k are 16 words and word l holds rows l and 16 + l (nibble 4 e + 2 p + h: row 16 h
    + l, k = 2 p + e); at 8 bits one k is 32 bytes, byte l row l.
    """
    if bits not in (4, 8):
        raise ValueError(f"bits is {bits!r}; accepted: 4, 8")
    if arch == "cpu":
        if bits == 4:
            return induce(lane_pairs(), bits, "gemm_cpu_b4", load_bits=32, k_steps=8)
        return induce(lanes(32, 1), bits, "gemm_cpu_b8", load_bits=8, k_steps=32)
    if arch in CUDA_ARCHES:
        return induce(wgmma_a(32 if int8 else 16), bits, f"gemm_cuda_b{bits}{'_int8' * int8}")
    raise ValueError(f"unknown arch {arch!r}; accepted: {', '.join(CUDA_ARCHES)}, cpu")


def compose(src: PackedLayout, dst: PackedLayout, n: int, k: int) -> np.ndarray:
    """For every slot of ``dst``'s storage of an [n, k] weight, the flat slot (``word * slots +
    slot``) of ``src``'s that holds the same element, or -1 for padding.

    int64 [*dst.storage_shape(n, k), dst.slots]. Importing a checkpoint is this composition. Raises
    ``ValueError`` if the two hold codes of different widths.
    """
    if src.bits != dst.bits:
        raise ValueError(f"{src.name} holds {src.bits}-bit codes and {dst.name} {dst.bits}-bit ones; compose layouts of the same width")
    tiles_n, tiles_k = dst.tiles(n, k)
    tile_i, tile_j = np.indices((tiles_n, tiles_k), dtype=np.int64)
    if dst.outer == "k_major":
        tile_i, tile_j = tile_i.T, tile_j.T
    i = tile_i[..., None, None] * dst.tile_n + dst.order // dst.tile_k
    j = tile_j[..., None, None] * dst.tile_k + dst.order % dst.tile_k
    inside = (i < n) & (j < k)
    word, shift = src.position(np.where(inside, i, 0), np.where(inside, j, 0), n, k)
    return np.where(inside, word * src.slots + shift // src.bits, -1)
