"""The packings of AutoAWQ, GPTQ and compressed-tensors against plain loops, the compressed-tensors library, and composition."""

from __future__ import annotations

import numpy as np
import pytest

from tilebit.layouts.checkpoints import STORAGES, checkpoint_layout, qserve_layout
from tilebit.layouts.packing import compose, gemm_layout

CASES = [(storage, bits) for storage in STORAGES for bits in (4, 8) if (storage, bits) != ("awq", 8)]


def _codes(n: int, k: int, bits: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << bits, (n, k), dtype=np.uint8)


def test_awq_is_interleaved_along_n() -> None:
    layout = checkpoint_layout("awq", 4)
    n, k, groups = 24, 5, 3
    for packing, width in ((layout.weight, k), (layout.zeros, groups)):
        codes = _codes(n, width, 4)
        words = packing.pack(codes)
        assert words.shape == (width, n // 8, 1)
        for row in range(width):
            for column in range(n // 8):
                expected = sum(int(codes[8 * column + source, row]) << 4 * i for i, source in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
                assert int(words[row, column, 0]) == expected


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("storage", ["gptq", "gptq_v2"])
def test_gptq_packs_weights_along_k_and_zeros_along_n(storage: str, bits: int) -> None:
    layout, per_word = checkpoint_layout(storage, bits), 32 // bits
    n, k, groups = 16, 24, 3
    codes, zeros = _codes(n, k, bits), _codes(n, groups, bits, 1)
    words, zero_words = layout.weight.pack(codes), layout.zeros.pack(zeros)
    assert words.shape == (k // per_word, n, 1) and zero_words.shape == (groups, n // per_word, 1)
    for i in range(n):
        for j in range(k):
            assert int(words[j // per_word, i, 0]) >> j % per_word * bits & (1 << bits) - 1 == codes[i, j]
        for g in range(groups):
            assert int(zero_words[g, i // per_word, 0]) >> i % per_word * bits & (1 << bits) - 1 == zeros[i, g]
    assert layout.zero_offset == (1 if storage == "gptq" else 0)


@pytest.mark.parametrize("n,k,groups", [(8, 64, 2), (16, 128, 1), (13, 70, 3), (1, 1, 1)])
@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_tensors_agrees_with_its_library(bits: int, n: int, k: int, groups: int) -> None:
    torch = pytest.importorskip("torch")
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    layout, middle = checkpoint_layout("compressed-tensors", bits), 1 << (bits - 1)
    for packing, codes, dim in ((layout.weight, _codes(n, k, bits), 1), (layout.zeros, _codes(n, groups, bits, 1), 0)):
        signed = torch.from_numpy((codes.astype(np.int16) - middle).astype(np.int8))
        stored = helpers.pack_to_int32(signed, bits, packed_dim=dim)
        words = packing.pack(codes)
        assert words.shape == (*stored.shape, 1)
        assert np.array_equal(words[..., 0].view(np.int32), stored.numpy())
        if dim == 0 and words.shape[0] == 1:
            continue  # the library's own unpacking fails on a single row of words (seen in 0.20)
        back = helpers.unpack_from_int32(
            torch.from_numpy(words[..., 0].view(np.int32).copy()), bits, torch.Size(codes.shape), packed_dim=dim
        )
        assert torch.equal(back, signed)
        assert np.array_equal(packing.unpack(stored.numpy(), *codes.shape), codes)


def test_qserve_packs_tiles_of_32_by_32() -> None:
    """As in the comments of its converter: [n / 32, k / 32, row of 8, quad of 4, half of 16 k, half of 16 rows, k of 4], 16 rows a byte."""
    codes = _codes(64, 96, 4)
    stored = qserve_layout().pack(codes).view(np.uint8).reshape(2, 3, 8, 4, 2, 2, 4)
    for place in np.ndindex(stored.shape):
        tile_n, tile_k, row, quad, half_k, half_n, column = place
        i, j = tile_n * 32 + half_n * 8 + row, tile_k * 32 + half_k * 16 + quad * 4 + column
        assert stored[place] == codes[i, j] | codes[i + 16, j] << 4


@pytest.mark.parametrize("arch", ["cpu", "sm_90a", "sm_90a int8"])
@pytest.mark.parametrize("storage,bits", [*CASES, ("qserve", 4)])
def test_importing_is_composing(storage: str, bits: int, arch: str) -> None:
    n, k = 72, 80
    source = qserve_layout() if storage == "qserve" else checkpoint_layout(storage, bits).weight
    target = gemm_layout(arch.partition(" ")[0], bits, arch.endswith("int8"))
    codes = _codes(n, k, bits)
    words = source.pack(codes).ravel()
    slots = (words[:, None] >> (np.arange(source.slots, dtype=np.uint32) * np.uint32(bits))) & np.uint32((1 << bits) - 1)
    index = compose(source, target, n, k)
    moved = np.where(index >= 0, slots.ravel()[index], np.uint32(0))
    imported = (moved << (np.arange(target.slots, dtype=np.uint32) * np.uint32(bits))).sum(-1).astype(np.uint32)
    assert np.array_equal(imported.reshape(target.storage_shape(n, k)), target.pack(codes))


@pytest.mark.parametrize("storage,bits", CASES)
def test_position_reads_every_code_back(storage: str, bits: int) -> None:
    layout = checkpoint_layout(storage, bits).weight
    n, k = 16, 16
    codes = _codes(n, k, bits)
    i, j = np.meshgrid(np.arange(n), np.arange(k), indexing="ij")
    word, shift = layout.position(i, j, n, k)
    read = layout.pack(codes).ravel()[word] >> shift.astype(np.uint32) & np.uint32((1 << bits) - 1)
    assert np.array_equal(read, codes)


@pytest.mark.parametrize(
    "storage,bits,words", [("marlin", 4, "awq"), ("awq", 8, "accepted: 4"), ("gptq", 3, "accepted: 4, 8"), ("gptq", 2, "4, 8")]
)
def test_unknown_packings_are_refused(storage: str, bits: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        checkpoint_layout(storage, bits)
