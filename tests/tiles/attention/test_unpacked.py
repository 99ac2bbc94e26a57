"""Whole caches as torch tensors: the same numbers as the host's packer put in, and random caches that mean what they should."""

import numpy as np
import pytest
import torch

from tilebit.layouts.kv import HEAD_DIMS, PAGE_SIZES, RESIDUAL, KVLayout, window_words
from tilebit.layouts.kv_formats import KVFormat
from tilebit.layouts.kv_quantize import dequantize_group, pack_pages, pack_window, quantize_group
from tilebit.tiles.attention.unpacked import DTYPES, random_pages, unpack_cache, unpack_pages

LENGTHS = (0, 5, 128, 300, 400)
HEADS, POISON = 2, 0x7FFFFFFF
every_format = pytest.mark.parametrize("form", KVFormat.all(), ids=lambda form: form.name)


CASES = [(form, size) for i, form in enumerate(KVFormat.all()) for size in (PAGE_SIZES if form.key == form.value else (PAGE_SIZES[i % 5],))]


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{form.name}-{page_size}" for form, page_size in CASES])
def test_a_cache_means_what_was_packed(index):
    """Ragged sequences in shuffled pages; what lies between and behind them is poison."""
    (form, page_size), head_dim, dtype = CASES[index], HEAD_DIMS[index % 3], ("float16", "bfloat16")[index % 2]
    torch_dtype = getattr(torch, dtype)
    rng = np.random.default_rng(index)
    head_scales = torch.tensor([[0.5, 0.3], [0.25, 1.5]])
    x = [torch.from_numpy(rng.standard_normal((2, HEADS, length, head_dim))).to(torch_dtype).float().numpy() for length in LENGTHS]
    expected = [np.moveaxis(part, 1, 2).astype(np.float64) for part in x]  # k and v, [tokens, heads, head_dim]
    groups = {}
    for b, length in enumerate(LENGTHS):
        for g in range(length // RESIDUAL):
            tokens = slice(g * RESIDUAL, (g + 1) * RESIDUAL)
            for h in range(HEADS):
                scales = (float(head_scales[0, h]), float(head_scales[1, h]))
                groups[b, h, g] = quantize_group(x[b][0, h, tokens], x[b][1, h, tokens], form, dtype, scales)
                means = dequantize_group(groups[b, h, g], form, dtype, scales)
                expected[b][:, tokens, h] = np.stack(means)
    layout = KVLayout(form, head_dim, page_size)
    pages = np.full((1024 // page_size + 8, HEADS, layout.page_words), POISON, dtype=np.int32)
    windows = np.full((len(LENGTHS) + 2, HEADS, window_words(head_dim)), POISON, dtype=np.int32)
    tables = np.full((len(LENGTHS), 32), 10**6, dtype=np.int32)
    slots = rng.permutation(len(windows))[: len(LENGTHS)].astype(np.int32)
    free = iter(rng.permutation(len(pages)))
    for b, length in enumerate(LENGTHS):
        packed = length // RESIDUAL
        own = [next(free) for _ in range(-(-packed * RESIDUAL // page_size))]
        tables[b, : len(own)] = own
        for h in range(HEADS):
            if packed:
                pages[own, h] = pack_pages([groups[b, h, g] for g in range(packed)], layout)
            windows[slots[b], h] = pack_window(x[b][0, h, packed * RESIDUAL :], x[b][1, h, packed * RESIDUAL :], dtype)
    strided = torch.from_numpy(np.repeat(pages, 2, axis=1))[:, ::2]  # a view that is not contiguous
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    unpacked = unpack_cache(
        strided, torch.from_numpy(windows), torch.from_numpy(tables), torch.from_numpy(slots), lengths, layout, torch_dtype, head_scales
    )
    for numbers, length, wanted in zip(unpacked, LENGTHS, expected, strict=True):
        for part, what in zip(numbers, wanted, strict=True):
            assert part.shape == (length, HEADS, head_dim) and part.dtype == torch.float64
            # The host multiplies and adds in fp32, this in fp64.
            assert np.abs(part.numpy() - what).max(initial=0) <= 2.0**-20


@every_format
def test_random_caches_are_about_normal(form):
    for page_size, dtype in ((16, torch.float16), (256, torch.bfloat16)):
        layout = KVLayout(form, 64, page_size)
        generator = torch.Generator().manual_seed(page_size)
        pages = random_pages(16 * 256 // page_size, HEADS, layout, dtype, generator)
        assert pages.shape == (16 * 256 // page_size, HEADS, layout.page_words) and pages.dtype == torch.int32
        for numbers in unpack_pages(pages, layout, dtype, torch.ones(2, HEADS)):
            assert numbers.shape == (4096, HEADS, 64)
            assert abs(numbers.mean()) < 0.05 and 0.9 < numbers.std() < 1.1 and numbers.abs().max() < 10
    again = random_pages(4, 1, layout, dtype, torch.Generator().manual_seed(0))
    assert torch.equal(again, random_pages(4, 1, layout, dtype, torch.Generator().manual_seed(0)))


def test_bad_requests_name_what_is_accepted():
    layout = KVLayout(KVFormat("fp8", "fp8"), 64, 16)
    empty = torch.zeros((1, 1), dtype=torch.int32)
    pages, windows = torch.zeros((1, 1, layout.page_words), dtype=torch.int32), torch.zeros((1, 1, window_words(64)), dtype=torch.int32)
    arguments = (windows, empty, empty[0], empty[0], layout)
    with pytest.raises(ValueError, match=rf"have {layout.page_words}"):
        unpack_cache(pages[..., 1:], *arguments, torch.float16)
    with pytest.raises(ValueError, match=r"accepted: torch\.float16, torch\.bfloat16"):
        unpack_cache(pages, *arguments, torch.float32)
    with pytest.raises(ValueError, match="kvfp8 needs head_scales"):
        unpack_cache(pages, *arguments, DTYPES[0])
