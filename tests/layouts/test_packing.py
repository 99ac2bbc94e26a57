"""The five laws of an induced layout, exhaustively, and packed layouts in general."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilebit.layouts.banks import global_access, shared_access
from tilebit.layouts.fragments import Fragment, lanes, mma_a, mma_b, mma_c, wgmma_a
from tilebit.layouts.packing import CUDA_ARCHES, PackedLayout, compose, gemm_layout, induce, register_order

# How kernels unpack a word: one (shift, mask) per register, or per element that PRMT picks; by (bits, element_bits).
UNPACK = {
    (4, 16): [(shift, 0x000F000F) for shift in (0, 4, 8, 12)],
    (4, 8): [(shift, 0x0F0F0F0F) for shift in (0, 4)],
    (8, 16): [(shift, 0xFF) for shift in (0, 8, 16, 24)],
    (8, 8): [(0, 0xFFFFFFFF)],
}


@dataclass(frozen=True)
class Induced:
    fragment: Fragment
    bits: int
    k_steps: int | None = None

    @property
    def layout(self) -> PackedLayout:
        return induced(self)

    def __str__(self) -> str:
        return f"{self.fragment.name}-b{self.bits}" + (f"-k{self.k_steps}" if self.k_steps else "")


@cache
def induced(case: Induced) -> PackedLayout:
    return induce(case.fragment, case.bits, k_steps=case.k_steps)


FRAGMENTS = [mma_a(16), mma_a(32), wgmma_a(16), wgmma_a(32), mma_b(16), mma_b(32), mma_b(16, 16), mma_b(32, 16)]
CASES = [Induced(fragment, bits) for fragment in FRAGMENTS for bits in (4, 8)] + [Induced(wgmma_a(16), 4, 8), Induced(mma_a(32), 8, 3)]
CPU = [gemm_layout("cpu", bits) for bits in (4, 8)]
cases = pytest.mark.parametrize("case", CASES, ids=str)
layouts = pytest.mark.parametrize("layout", [case.layout for case in CASES] + CPU, ids=lambda layout: f"{layout.name}-{layout.tile_k}")


@layouts
def test_law_1_every_element_is_stored_once(layout):
    n, k = 2 * layout.tile_n, 3 * layout.tile_k
    for outer in ("n_major", "k_major"):
        grid = PackedLayout(layout.name, layout.bits, layout.tile_n, layout.tile_k, layout.order, outer)
        i, j = np.indices((n, k))
        word, shift = grid.position(i, j, n, k)
        slot = word * 32 + shift
        assert np.array_equal(np.sort(slot, axis=None), np.arange(n * k) * layout.bits)


@cases
def test_law_2_each_thread_finds_its_elements_in_its_own_words_in_register_order(case):
    layout, fragment = case.layout, case.fragment
    steps = layout.tile_k // fragment.cols
    loads = layout.words // (4 * fragment.threads)
    row, col = fragment.coords()
    for thread in range(fragment.threads):
        found = []
        for load in range(loads):
            address = 4 * (load * fragment.threads + thread)
            for word in layout.order[address : address + 4]:
                for shift, mask in UNPACK[case.bits, fragment.element_bits]:
                    bits = mask << shift
                    found += [word[slot] for slot in range(layout.slots) if bits >> slot * layout.bits & 1]
        wanted = (row[thread] * layout.tile_k + np.arange(steps)[:, None] * fragment.cols + col[thread]).ravel().tolist()
        assert found == wanted, (thread, found, wanted)


def warp_addresses(case):
    """Byte addresses of every 128-bit load of every warp, found from where the elements are: one array of 32 per (warp, load)."""
    layout, fragment = case.layout, case.fragment
    row, col = fragment.coords()
    steps = np.arange(layout.tile_k // fragment.cols) * fragment.cols
    word, _ = layout.position(row[:, None, :], col[:, None, :] + steps[:, None], layout.tile_n, layout.tile_k)
    words = np.array([np.unique(own) for own in word.reshape(fragment.threads, -1)])  # [threads, 4 * loads], ascending
    quads = words.reshape(fragment.threads, -1, 4)
    assert (quads - quads[..., :1] == np.arange(4)).all()
    return quads[..., 0].reshape(-1, 32, quads.shape[1]).transpose(0, 2, 1).reshape(-1, 32) * 4


@cases
def test_law_3_every_warp_load_is_contiguous_and_aligned(case):
    for addresses in warp_addresses(case):
        access = global_access(addresses, 16)
        assert access.contiguous and access.coalesced and access.sectors == 16 and access.alignment >= 512


@cases
def test_law_4_no_bank_conflicts(case):
    for addresses in warp_addresses(case):
        assert shared_access(addresses, 16).conflicts == 0


@layouts
def test_law_5_unpack_inverts_pack_for_ragged_shapes(layout):
    rng = np.random.default_rng(5)
    for n, k in ((1, 1), (layout.tile_n, layout.tile_k), (layout.tile_n + 1, 2 * layout.tile_k - 1), (7, 3 * layout.tile_k + 5)):
        codes = rng.integers(0, 1 << layout.bits, (n, k), dtype=np.uint8)
        for outer, fill in (("n_major", 0), ("k_major", 3)):
            grid = PackedLayout(layout.name, layout.bits, layout.tile_n, layout.tile_k, layout.order, outer)
            words = grid.pack(codes, fill)
            assert words.dtype == np.uint32 and words.shape == grid.storage_shape(n, k)
            assert np.array_equal(grid.unpack(words, n, k), codes)
            padded = grid.unpack(words, *grid.padded(n, k))
            assert (padded[n:] == fill).all() and (padded[:, k:] == fill).all()
            i, j = np.indices((n, k))
            word, shift = grid.position(i, j, n, k)
            assert np.array_equal(words.ravel()[word] >> shift.astype(np.uint32) & (1 << layout.bits) - 1, codes)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_order_round_trips_and_composes(data):
    bits = data.draw(st.sampled_from((1, 2, 4, 8)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))

    def layout(name):
        tile_n, tile_k, words = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3)), 32 // bits
        order = rng.permutation(tile_n * tile_k * words).reshape(-1, words)
        return PackedLayout(name, bits, tile_n * words, tile_k, order, data.draw(st.sampled_from(("n_major", "k_major"))))

    src, dst = layout("src"), layout("dst")
    n, k = data.draw(st.integers(1, 80)), data.draw(st.integers(1, 12))
    codes = rng.integers(0, 1 << bits, (n, k), dtype=np.uint8)
    stored = src.pack(codes)
    assert np.array_equal(src.unpack(stored.view(np.int32), n, k), codes)

    shifts = np.arange(32 // bits, dtype=np.uint32) * bits
    slots = (stored.ravel()[:, None] >> shifts & (1 << bits) - 1).ravel()
    index = compose(src, dst, n, k)
    moved = np.where(index < 0, 0, slots[index])
    assert np.array_equal((moved.astype(np.uint32) << shifts).sum(axis=-1, dtype=np.uint32), dst.pack(codes))
    assert (index >= 0).sum() == n * k


def test_word_orders_are_those_of_the_bit_tricks():
    assert register_order(4, 16).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]  # lop3
    assert register_order(4, 8).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]  # nibble split
    assert register_order(8, 16).tolist() == register_order(8, 8).tolist() == [0, 1, 2, 3]
    assert register_order(4, 8, register_bits=8).tolist() == [0, 1]


@pytest.mark.parametrize("bits, tile_k", [(4, 64), (8, 32)])
def test_gemm_layout_on_cuda(bits, tile_k):
    layout = gemm_layout("sm_90a", bits)
    assert (layout.tile_n, layout.tile_k, layout.words, layout.outer) == (64, tile_k, 512, "n_major")
    assert all(np.array_equal(gemm_layout(arch, bits).order, layout.order) for arch in CUDA_ARCHES)
    for thread in range(128):
        for word in range(4):
            for slot in range(32 // bits):
                atom, index = (word, (0, 2, 4, 6, 1, 3, 5, 7)[slot]) if bits == 4 else (word // 2, word % 2 * 4 + slot)
                c8, h, e = index // 4, index // 2 % 2, index % 2
                row = 16 * (thread // 32) + thread % 32 // 4 + 8 * h
                column = 16 * atom + 8 * c8 + 2 * (thread % 4) + e
                assert layout.order[4 * thread + word, slot] == row * tile_k + column


def test_one_record_serves_wgmma_and_four_mma_warps():
    for k, bits in ((16, 4), (16, 8), (32, 4), (32, 8)):
        group, warp = induce(wgmma_a(k), bits), induce(mma_a(k), bits)
        for w in range(4):
            assert np.array_equal(group.order[w * warp.words : (w + 1) * warp.words], warp.order + 16 * w * warp.tile_k)


@pytest.mark.parametrize("bits", (4, 8))
def test_gemm_layout_on_cpu(bits):
    layout = gemm_layout("cpu", bits)
    assert (layout.tile_n, layout.tile_k, layout.words) == (32, 32, 32 * bits)
    codes = np.random.default_rng(1).integers(0, 1 << bits, (32, 32), dtype=np.uint8)
    stored = layout.pack(codes)
    if bits == 8:
        assert np.array_equal(stored.view(np.uint8).reshape(32, 32), codes.T)  # little-endian: bytes of one k after the other
        return
    for quad, lane, e, p, h in np.ndindex(8, 16, 2, 2, 2):
        assert stored[0, 0, 16 * quad + lane] >> (4 * (4 * e + 2 * p + h)) & 15 == codes[16 * h + lane, 4 * quad + 2 * p + e]


def test_bad_requests_name_what_is_accepted():
    with pytest.raises(ValueError, match="accepted: sm_80"):
        gemm_layout("sm_70", 4)
    with pytest.raises(ValueError, match="accepted: 4, 8"):
        gemm_layout("cpu", 3)
    with pytest.raises(ValueError, match="do not fill whole loads"):
        induce(wgmma_a(16), 4, k_steps=3)
    with pytest.raises(ValueError, match="do not fill whole loads"):
        induce(lanes(16, 2), 4, load_bits=12)
    with pytest.raises(ValueError, match="accumulators"):
        induce(mma_c(), 4)
    with pytest.raises(ValueError, match="each of the tile's 8 x 1 elements once"):
        PackedLayout("twice", 4, 8, 1, np.zeros((1, 8)))
    with pytest.raises(ValueError, match="at least 1 x 1"):
        PackedLayout("empty", 4, 0, 8, np.zeros((0, 8)))
    with pytest.raises(ValueError, match="bits is 3"):
        PackedLayout("three", 3, 8, 1, np.arange(8)[None])
    with pytest.raises(ValueError, match="outer"):
        PackedLayout("outer", 4, 8, 1, np.arange(8)[None], "row_major")
    with pytest.raises(ValueError, match="same width"):
        compose(CPU[0], CPU[1], 32, 32)
    layout = CPU[0]
    with pytest.raises(ValueError, match="4 bits hold 0 to 15"):
        layout.pack(np.full((2, 2), 16, dtype=np.uint8))
    with pytest.raises(ValueError, match="4 bits hold 0 to 15"):
        layout.pack(np.zeros((2, 2), dtype=np.uint8), fill=16)
    with pytest.raises(ValueError, match="integer"):
        layout.pack(np.zeros((2, 2)))
    with pytest.raises(ValueError, match="at least 1"):
        layout.pack(np.zeros((0, 2), dtype=np.uint8))
    with pytest.raises(ValueError, match=r"accepted: 32-bit integers of shape \[2, 1, 128\]"):
        layout.unpack(np.zeros(128, dtype=np.uint32), 33, 32)
    with pytest.raises(ValueError, match="outside of the padded weight"):
        layout.position(32, 0, 32, 32)
    with pytest.raises(ValueError, match="read-only"):
        layout.order[0, 0] = 1
