"""The laws of a KV cache's layout, exhaustively over a granule: BitDecoding's induced packing and where a page's parameters lie."""

import numpy as np
import pytest

from tilebit.layouts.banks import global_access, shared_access
from tilebit.layouts.fragments import lanes, mma_a
from tilebit.layouts.kv import (
    GRANULE,
    HEAD_DIMS,
    PAGE_SIZES,
    RESIDUAL,
    RESIDUAL_WARPS,
    KVLayout,
    channel_parameter_bytes,
    key_granule,
    lane_words,
    residual_tokens,
    value_granule,
    window_words,
)
from tilebit.layouts.kv_formats import KVFormat
from tilebit.layouts.packing import induce, register_order

FORMAT_OF_BITS = {2: KVFormat("int2", "int2"), 4: KVFormat("int4", "int4"), 8: KVFormat("fp8", "fp8"), 16: KVFormat()}
every_granule = pytest.mark.parametrize(
    ("operand", "bits", "head_dim"), [(o, b, d) for o in ("key", "value") for b in FORMAT_OF_BITS for d in HEAD_DIMS]
)


def held(bits: int, head_dim: int) -> np.ndarray:
    """int64 [fragment, register, half, lane, (row of A's 16, column of A, lane's word, lowest bit)]: the packing, written out by hand."""
    f, i, e, t = np.indices((head_dim // 16, 4, 2, 32))
    g, c = t // 4, t % 4
    row, col = g + 8 * (i & 1), 2 * c + 8 * (i >> 1) + e
    if bits == 16:
        word, bit = 4 * f + i, 16 * e
    elif bits == 8:
        word, bit = 2 * f + i // 2, 8 * (2 * (i % 2) + e)
    elif bits == 4:
        word, bit = f, 4 * (i + 4 * e)
    else:
        word, bit = f // 2, 2 * (4 * (f & 1) + i + 8 * e)
    return np.stack([f, row, col, t, word, bit], axis=-1).reshape(-1, 6).T


def positions(operand: str, layout: KVLayout, f: np.ndarray, row: np.ndarray, col: np.ndarray, granule: int):
    """(word of the page, bit) of A's element (row, col) of fragment f: keys are [token, channel], values [channel, token]."""
    if operand == "key":
        return layout.key_position(GRANULE * granule + row, 16 * f + col)
    return layout.value_position(GRANULE * granule + col, 16 * f + row)


@every_granule
def test_every_code_is_stored_once_in_its_own_section(operand, bits, head_dim):
    layout = KVLayout(FORMAT_OF_BITS[bits], head_dim, 32)
    token, channel = np.indices((32, head_dim))
    word, bit = getattr(layout, f"{operand}_position")(token, channel)
    first = {"key": 0, "value": layout.value_offset}[operand] * 8
    assert np.array_equal(np.sort(word * 32 + bit, axis=None), first + np.arange(32 * head_dim) * bits)


@every_granule
def test_each_lane_finds_its_fragments_in_its_own_words_in_register_order(operand, bits, head_dim):
    layout = KVLayout(FORMAT_OF_BITS[bits], head_dim, 64)
    f, row, col, lane, word, bit = held(bits, head_dim)
    load = min(4, head_dim * bits // 64)
    in_granule = word // load * 32 * load + lane * load + word % load
    for granule in (0, 3):
        stored, shift = positions(operand, layout, f, row, col, granule)
        first = {"key": 0, "value": 64 * head_dim * bits // 32}[operand] + granule * 16 * head_dim * bits // 32
        assert np.array_equal(stored, first + in_granule) and np.array_equal(shift, bit)
    assert lane_words(bits, head_dim) == word.max() + 1


@every_granule
def test_warp_loads_are_contiguous_aligned_and_free_of_bank_conflicts(operand, bits, head_dim):
    """Counted from where the codes really are: a lane's load begins at the lowest word that the layout gives it."""
    layout = KVLayout(FORMAT_OF_BITS[bits], head_dim, 16)
    f, row, col, lane, _, _ = held(bits, head_dim)
    word, _ = positions(operand, layout, f, row, col, 0)
    width = 8 if (bits, head_dim) == (2, 64) else 16
    owned = [np.unique(word[lane == t]) for t in range(32)]
    loads = lane_words(bits, head_dim) * 4 // width
    for index in range(loads):
        words = np.stack([own[index * width // 4 : (index + 1) * width // 4] for own in owned])
        assert np.array_equal(words - words[:, :1], np.broadcast_to(np.arange(width // 4), words.shape))
        cost = global_access(words[:, 0] * 4, width)
        assert cost.contiguous and cost.coalesced and cost.alignment >= min(512, 32 * width)
        assert shared_access(words[:, 0] * 4, width).conflicts == 0


@every_granule
def test_granules_are_induced_from_the_fragment(operand, bits, head_dim):
    """By another road: the registers that mma.m16n8k16 holds, compressed by the unpacking mask of the kernels."""
    packed = (key_granule if operand == "key" else value_granule)(bits, head_dim)
    numbers = np.arange(16 * head_dim) & (1 << bits) - 1 if bits < 16 else np.arange(16 * head_dim)
    numbers = np.random.default_rng(0).permutation(numbers).astype(np.uint16)
    a = numbers.reshape(16, head_dim) if operand == "key" else numbers.reshape(head_dim, 16)
    row, col = mma_a(16).coords()
    words = packed.pack(a).reshape(-1, 32, min(4, lane_words(bits, head_dim))).transpose(1, 0, 2).reshape(32, -1)
    registers = 16 // bits  # per word
    for fragment in range(head_dim // 16):
        tile = a[:, 16 * fragment : 16 * fragment + 16] if operand == "key" else a[16 * fragment : 16 * fragment + 16]
        pair = tile[row, col].reshape(32, 4, 2).astype(np.uint32)
        for register in range(4):
            index = 4 * fragment + register
            word = words[:, index // registers]
            if bits == 8:  # bytes in order: a register takes two neighbouring ones
                low = word >> 16 * (index % 2) & 0xFF
                high = word >> (16 * (index % 2) + 8) & 0xFF
            else:
                shifted = word >> bits * (index % registers)
                low, high = shifted & (1 << bits) - 1, shifted >> 16 & (1 << bits) - 1
            assert np.array_equal(low, pair[:, register, 0]) and np.array_equal(high, pair[:, register, 1])


@every_granule
def test_granules_round_trip(operand, bits, head_dim):
    packed = (key_granule if operand == "key" else value_granule)(bits, head_dim)
    shape = (48, head_dim) if operand == "key" else (head_dim, 48)
    codes = np.random.default_rng(bits).integers(0, 1 << bits, shape, dtype=np.uint16)
    unpacked = packed.unpack(packed.pack(codes), *shape)
    assert unpacked.dtype == (np.uint16 if bits == 16 else np.uint8) and np.array_equal(unpacked, codes)


def test_two_bit_words_unpack_by_one_mask():
    assert register_order(2, 16).tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15]
    assert register_order(16, 16).tolist() == [0, 1]


def test_equation_1_gives_one_window_for_every_width():
    assert {bits: residual_tokens(bits, warps) for bits, warps in RESIDUAL_WARPS.items()} == dict.fromkeys((2, 4, 8, 16), RESIDUAL)
    assert RESIDUAL == 128 and RESIDUAL_WARPS[4] == 4 and RESIDUAL_WARPS[2] == 2
    assert residual_tokens(4, 2) == 64 and residual_tokens(2, 4, warp_tile=16) == 512


@pytest.mark.parametrize(("index", "form"), list(enumerate(KVFormat.all())), ids=lambda part: getattr(part, "name", ""))
@pytest.mark.parametrize("page_size", [PAGE_SIZES[0], *(pytest.param(size, marks=pytest.mark.slow) for size in PAGE_SIZES[1:])])
def test_every_bit_of_a_group_of_pages_has_one_owner(index, form, page_size):
    """Codes and parameters of the pages of a group fill their records exactly, nothing twice."""
    head_dim = HEAD_DIMS[index % 3]
    layout = KVLayout(form, head_dim, page_size)
    tokens = max(RESIDUAL, page_size)
    assert layout.page_bytes % 16 == 0 and layout.token_bytes * page_size == layout.page_bytes == 4 * layout.page_words
    assert layout.group_pages * page_size == tokens
    halves = np.zeros((tokens // page_size, layout.page_bytes // 2), dtype=np.int64)
    halves[:, : layout.key_parameter_offset // 2] = 1  # codes: see the other laws
    places = []
    if form.key_scales in ("channel", "token"):
        page, scale, zero = layout.key_parameter_position(np.arange(tokens)[:, None], np.arange(head_dim))
        distinct = np.unique(np.stack([np.stack([page, page]), np.stack([scale, zero])]).reshape(2, -1), axis=1)
        assert distinct.shape[1] == 2 * (tokens if form.key_scales == "token" else head_dim * tokens // RESIDUAL)
        places.append(distinct)
    if form.value_scales == "token":
        pages = np.repeat(np.arange(len(halves)), 2 * page_size)
        places.append(np.stack([pages, np.tile(np.stack(layout.value_parameter_position(np.arange(page_size))).ravel(), len(halves))]))
    for page, byte in places:
        assert not (byte % 2).any()
        np.add.at(halves, (page, byte // 2), 1)
    assert (halves == 1).all()


def test_channel_parameters_lie_as_the_b_operand_wants_them():
    """[k step][c]{zeros of 2c, 2c + 1, their scales, the same of 2c + 8, 2c + 9}: 16 bytes that lane c of every quartet loads at once."""
    channels = np.arange(256)
    scale, zero = channel_parameter_bytes(channels)
    record = {}
    for channel in channels:
        record[scale[channel] // 2], record[zero[channel] // 2] = ("s", channel), ("z", channel)
    for f, c in np.ndindex(16, 4):
        first = 16 * f + 2 * c
        expected = [(kind, first + offset) for pair in ((0, 1), (8, 9)) for kind in "zs" for offset in pair]
        assert [record[(4 * f + c) * 8 + i] for i in range(8)] == expected
    lane = np.arange(32)
    assert shared_access((lane % 4) * 16, 16).conflicts == 0


def test_parameter_shares_of_small_pages_follow_each_other():
    whole = KVLayout(KVFormat("int4", "int4"), 128, 128)
    channels = np.arange(128)
    _, scale, zero = whole.key_parameter_position(0, channels)
    for page_size in PAGE_SIZES:
        layout = KVLayout(whole.format, 128, page_size)
        for token in (0, 127, 128, 300):
            page, own_scale, own_zero = layout.key_parameter_position(token, channels)
            share = 512 * page_size // 128
            begin = token // 128 * 512
            for own, of_whole in ((own_scale, scale), (own_zero, zero)):
                in_share = own - layout.key_parameter_offset
                assert ((in_share >= 0) & (in_share < share)).all()
                assert np.array_equal(page * share + in_share, begin + of_whole - whole.key_parameter_offset)


def test_stated_memory():
    """Bytes a token and kv head of 128 channels: codes, 4 bytes of key parameters a token (512 a group) and 4 of value parameters."""
    stated = {
        "kv16": 512, "kv8_channel": 264, "kv8_token": 264, "kv4_channel": 136, "kv4_token": 136, "kv2_channel": 72,
        "kv2_token": 72, "kvfp8": 256, "k8_channel_v4": 200, "kfp8_v4": 196,
    }  # fmt: skip
    for page_size in PAGE_SIZES:
        assert {name: KVLayout(KVFormat.from_name(name), 128, page_size).token_bytes for name in stated} == stated
    assert [window_words(head_dim) * 4 for head_dim in HEAD_DIMS] == [128 * head_dim * 2 * 2 for head_dim in HEAD_DIMS]


def test_formats_have_names_and_json():
    assert len({form.name for form in KVFormat.all()}) == len(KVFormat.all()) == 40
    for form in KVFormat.all():
        assert KVFormat.from_name(form.name) == KVFormat.from_json(form.to_json()) == form
    assert KVFormat("int4", "int4").name == "kv4_channel" and KVFormat("int8", "int4", "token").name == "k8_token_v4"
    assert KVFormat("fp8", "fp8").name == "kvfp8" and KVFormat().name == "kv16" and KVFormat("float", "int2").name == "k16_v2"
    assert eval(repr(KVFormat("int2", "int8"))) == KVFormat.from_name("k2_channel_v8")
    for form, expected in ((KVFormat("int8", "fp8"), (8, 8, "head", True)), (KVFormat("float", "int2"), (16, 2, "token", False))):
        assert (form.key_bits, form.value_bits, form.value_scales, form.has_head_scales) == expected


def test_bad_requests_name_what_is_accepted():
    for make, message in (
        (lambda: KVFormat("int3"), "key is 'int3'; accepted: float, int8"),
        (lambda: KVFormat("int4", "fp4"), "value is 'fp4'"),
        (lambda: KVFormat("fp8", "fp8", "channel"), "fp8 keys accept: head"),
        (lambda: KVFormat("int4", "int4", "head"), "int4 keys accept: channel, token"),
        (lambda: KVFormat.from_name("kv4"), "such as kv16"),
        (lambda: KVLayout(KVFormat(), 96), "head_dim is 96"),
        (lambda: KVLayout(KVFormat(), 64, 8), "page_size is 8"),
        (lambda: KVLayout(KVFormat(), 64).key_parameter_position(0, 0), "no parameters of keys"),
        (lambda: KVLayout(KVFormat("int4", "fp8"), 64).value_parameter_position(0), "no parameters of values"),
        (lambda: KVLayout(KVFormat(), 64, 16).key_position(16, 0), "outside of the padded weight"),
        (lambda: induce(mma_a(32), 16), "at most as many, got 16"),
        (lambda: induce(lanes(16, 1), 16), "at most as many"),
        (lambda: induce(mma_a(16), 4, n_tiles=0), "do not fill whole loads"),
        (lambda: induce(mma_a(16), 2, k_steps=1, n_tiles=3), "do not fill whole loads"),
        (lambda: induce(mma_a(16), 3), "accepted: 2, 4, 8, 16"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
