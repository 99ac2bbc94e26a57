"""The host's quantizer and packer: exact arithmetic, bounds of the error, and records that hold what they should where they should."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch

from tilebit.layouts.kv import HEAD_DIMS, PAGE_SIZES, RESIDUAL, KVLayout, window_words
from tilebit.layouts.kv_formats import KVFormat
from tilebit.layouts.kv_quantize import (
    DTYPES,
    KVGroup,
    decode_e4m3,
    dequantize_codes,
    dequantize_group,
    encode_e4m3,
    from_bits,
    pack_pages,
    pack_window,
    quantize_codes,
    quantize_group,
    to_bits,
    unpack_pages,
    unpack_window,
)

every_dtype = pytest.mark.parametrize("dtype", DTYPES)
ONE_PRECISION = [form for form in KVFormat.all() if form.key == form.value]


def numbers(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """float32: random numbers of ``dtype``, with outlier channels and an offset as keys have them."""
    x = np.random.default_rng(seed).standard_normal(shape) * np.where(np.arange(shape[-1]) % 16 == 3, 8, 1) + 0.25
    return rounded(x, dtype)


def groups_of(form: KVFormat, head_dim: int, count: int, dtype: str = "float16") -> list[KVGroup]:
    x = numbers((count, 2, RESIDUAL, head_dim), dtype, seed=head_dim)
    return [quantize_group(k, v, form, dtype, (0.5, 0.25)) for k, v in x]


def nearest(x: Fraction, digits: int, lowest: int) -> Fraction:
    """The binary number of ``digits`` digits, none worth less than 2^lowest, that is nearest to ``x``, ties to even."""
    if x == 0:
        return x
    exponent = 0
    while abs(x) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(x) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** max(exponent - digits + 1, lowest)
    return round(x / unit) * unit  # Fraction's round takes ties to even


def fp32(x: Fraction) -> Fraction:
    return nearest(x, 24, -149)


def fp16(x: Fraction) -> Fraction:
    return nearest(x, 11, -24)


@every_dtype
@pytest.mark.parametrize("bits", (2, 4, 8))
def test_integer_codes_follow_the_formula_exactly(bits, dtype):
    """Against rational arithmetic, every operation rounded by hand."""
    x = rounded(numbers((RESIDUAL, 16), dtype, seed=bits) * np.where(np.arange(16) == 5, 2.0**-10, 1), dtype)
    x[:, 6] = rounded(x[:, 6] * 2**-18, dtype)  # a subnormal scale
    assert_exact(x, bits)


def test_ties_and_the_rounding_of_the_reciprocal_follow_the_formula_exactly():
    """Numbers half-way between codes: (x - zero) * (1 / scale) is then just below or above, which a division would not give."""
    steps = np.arange(1, 136, 2) / 64
    x = (np.arange(RESIDUAL) % 31)[:, None] * steps / 2
    codes = assert_exact(x.astype(np.float32), 4)
    assert (codes != np.rint(x / steps)).any()


def assert_exact(x: np.ndarray, bits: int) -> np.ndarray:
    """The codes of float32 ``x`` [tokens, channels], after a comparison of them and of their parameters with the formula."""
    codes, parameters = quantize_codes(x, bits, axis=0)
    steps = (1 << bits) - 1
    for channel in range(x.shape[1]):
        column = [Fraction(float(value)) for value in x[:, channel]]
        scale = fp16(fp32(fp32(max(column) - min(column)) / steps)) or Fraction(1)
        zero = fp16(min(column))
        inverse = fp32(1 / scale)
        assert (Fraction(float(parameters[0, channel])), Fraction(float(parameters[1, channel]))) == (scale, zero)
        q = [min(max(round(fp32(fp32(value - zero) * inverse)), 0), steps) for value in column]
        assert codes[:, channel].tolist() == q
    return codes


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32: ``x`` rounded to ``dtype``."""
    return torch.from_numpy(x).to(getattr(torch, dtype)).float().numpy()


@every_dtype
@pytest.mark.parametrize("axis", (0, 1), ids=("channel", "token"))
@pytest.mark.parametrize("bits", (2, 4, 8))
def test_the_error_is_half_a_step(bits, axis, dtype):
    x = numbers((RESIDUAL, 64), dtype)
    codes, parameters = quantize_codes(x, bits, axis)
    assert parameters.shape == (2, x.shape[1 - axis]) and parameters.dtype == np.float16
    assert codes.dtype == np.uint8 and codes.shape == x.shape
    assert (codes.min(axis=axis) == 0).all() and (codes.max(axis=axis) == (1 << bits) - 1).all()
    step = np.expand_dims(parameters[0].astype(np.float64), axis)
    error = np.abs(dequantize_codes(codes, parameters, axis) - x) / step
    assert 0.45 < error.max() <= 0.5 + 1e-3  # 1e-3: fp32 rounding of large quotients


def test_constant_and_tiny_ranges_have_scale_one_and_code_zero():
    ulp = 2.0**-24  # fp16's smallest number: a range of one is a scale that rounds to 0
    x = np.stack([np.full(RESIDUAL, 3.5), np.zeros(RESIDUAL), ulp * (np.arange(RESIDUAL) % 2), 1000 + np.arange(RESIDUAL) % 2], axis=1)
    codes, parameters = quantize_codes(x.astype(np.float32), 4, axis=0)
    assert parameters[0, :3].tolist() == [1, 1, 1] and not codes[:, :3].any()
    assert parameters[1].tolist() == [3.5, 0, 0, 1000] and codes[:2, 3].tolist() == [0, 15]
    assert np.array_equal(dequantize_codes(codes, parameters, 0)[:, :2], x[:, :2])


def test_the_zero_point_of_zeros_has_no_sign():
    """Which of +0 and -0 is the minimum depends on the order of a reduction; a stored bit must not."""
    signed = np.where(np.arange(RESIDUAL) % 3 == 0, -0.0, 0.0).astype(np.float32)
    x = np.stack([signed, -np.abs(signed), np.where(np.arange(RESIDUAL) > 7, 1, signed)], axis=1)
    _, parameters = quantize_codes(x, 4, axis=0)
    assert not np.signbit(parameters[1]).any() and not parameters[1].any()


def test_numbers_beyond_fp16_give_code_zero_and_no_warning():
    x = np.zeros((RESIDUAL, 1), dtype=np.float32)
    x[0], x[1] = -(2.0**20), 2.0**30
    with np.errstate(all="raise"):
        codes, parameters = quantize_codes(x, 4, axis=0)
    assert np.isinf(parameters.astype(np.float32)).all() and not codes.any()


def test_e4m3_is_torchs():
    every = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(every).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(decode_e4m3(every), expected, equal_nan=True)
    assert np.array_equal(np.signbit(decode_e4m3(every[:255:128])), [False, True])
    half = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    sixteen_bits = torch.cat([half.view(torch.float16).float(), half.view(torch.bfloat16).float()])
    finite = sixteen_bits[sixteen_bits.isfinite()]
    middles = torch.from_numpy((np.sort(expected[:127])[1:] + np.sort(expected[:127])[:-1]) / 2)
    x = torch.cat([finite, middles, -middles, torch.nextafter(middles, torch.tensor(0.0)), torch.nextafter(middles, torch.tensor(1e9))])
    codes = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert np.array_equal(encode_e4m3(x.numpy()), codes.numpy())
    assert encode_e4m3(np.array([np.inf, -np.inf, np.nan, 1e30, 464, 465], dtype=np.float32)).tolist() == [126, 254, 127, 126, 126, 126]


def test_fp8_divides_by_the_head_scale_and_saturates():
    k, v = numbers((2, RESIDUAL, 64), "bfloat16")
    form = KVFormat("fp8", "fp8")
    group = quantize_group(k, v, form, "bfloat16", (0.3, 0.01))
    key_scale, value_scale = torch.tensor(0.3), torch.tensor(0.01)
    assert np.array_equal(group.keys, (torch.from_numpy(k) / key_scale).to(torch.float8_e4m3fn).view(torch.uint8).numpy())
    back_k, back_v = dequantize_group(group, form, "bfloat16", (0.3, 0.01))
    assert (np.abs(back_k - k) <= np.maximum(np.abs(k) * 2**-4, 0.3 * 2.0**-10) * (1 + 1e-6)).all()
    assert np.abs(v).max() > 448 * 0.01 and np.abs(back_v).max() == np.float32(448) * value_scale.numpy()


@every_dtype
def test_bits_of_a_dtype(dtype):
    bits = np.arange(65536, dtype=np.uint16)
    x = from_bits(bits, dtype)
    assert np.array_equal(x, torch.from_numpy(bits.view(np.int16)).view(getattr(torch, dtype)).float().numpy(), equal_nan=True)
    assert np.array_equal(to_bits(x[np.isfinite(x)], dtype), bits[np.isfinite(x)])
    with pytest.raises(ValueError, match=f"not all of {dtype}; round them first"):
        to_bits(np.array([1 + 2.0**-12], dtype=np.float32), dtype)
    with pytest.raises(ValueError, match="accepted: float16, bfloat16"):
        to_bits(x, "float32")


@pytest.mark.parametrize("form", KVFormat.all(), ids=lambda form: form.name)
def test_pages_of_every_size_round_trip(form):
    for head_dim in (64, 256) if form.key == form.value else (128,):
        groups = groups_of(form, head_dim, 3)
        for page_size in PAGE_SIZES:
            layout = KVLayout(form, head_dim, page_size)
            pages = pack_pages(groups, layout)
            assert pages.shape == (-(-3 * RESIDUAL // page_size), layout.page_words) and pages.dtype == np.int32
            for before, after in zip(groups, unpack_pages(pages, layout, 3), strict=True):
                for name in KVGroup.__slots__:
                    assert np.array_equal(getattr(before, name), getattr(after, name)), name


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("form", [*ONE_PRECISION, KVFormat("int8", "int4", "token")], ids=lambda form: form.name)
def test_records_hold_codes_and_parameters_where_the_layout_says(form, page_size):
    head_dim, count = 64, 4
    layout = KVLayout(form, head_dim, page_size)
    groups = groups_of(form, head_dim, count)
    pages = pack_pages(groups, layout)
    token, channel = np.indices((count * RESIDUAL, head_dim))
    for name, bits in (("key", form.key_bits), ("value", form.value_bits)):
        word, bit = getattr(layout, f"{name}_position")(token % page_size, channel)
        codes = pages.view(np.uint32)[token // page_size, word] >> bit.astype(np.uint32) & (1 << bits) - 1
        assert np.array_equal(codes, np.concatenate([getattr(group, f"{name}s") for group in groups]))
    halves = pages.view(np.float16)
    if form.key_scales in ("channel", "token"):
        page, *bytes_ = layout.key_parameter_position(token, channel)
        for row, byte in enumerate(bytes_):
            stored = [group.key_parameters[row] for group in groups]
            shape = (1, head_dim) if form.key_scales == "channel" else (RESIDUAL, 1)
            expected = np.concatenate([np.broadcast_to(part.reshape(shape), (RESIDUAL, head_dim)) for part in stored])
            assert np.array_equal(halves[page, byte // 2], expected)
    if form.value_scales == "token":
        for row, byte in enumerate(layout.value_parameter_position(token[:, 0] % page_size)):
            expected = np.concatenate([group.value_parameters[row] for group in groups])
            assert np.array_equal(halves[token[:, 0] // page_size, byte // 2], expected)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("form", [KVFormat("int4", "int2"), KVFormat("int8", "int4", "token")], ids=lambda form: form.name)
def test_shares_of_small_pages_make_up_the_record(form, head_dim):
    """Parameters of pages of 16, 32 and 64 tokens, one after the other, are those of a page of 128, and two such are a page of 256."""
    groups = groups_of(form, head_dim, 2)

    def sections(page_size: int) -> list[bytes]:
        layout = KVLayout(form, head_dim, page_size)
        data = pack_pages(groups, layout).view(np.uint8)
        ends = (0, layout.value_offset, layout.key_parameter_offset, layout.value_parameter_offset, layout.page_bytes)
        return [data[:, a:b].tobytes() for a, b in pairwise(ends)]

    assert all(sections(page_size) == sections(128) for page_size in PAGE_SIZES)


def test_a_half_filled_page_of_256_is_zero_behind():
    form = KVFormat("int4", "int4")
    layout = KVLayout(form, 64, 256)
    one, two = pack_pages(groups_of(form, 64, 1), layout), pack_pages(groups_of(form, 64, 2), layout)
    token, channel = np.indices((256, 64))
    word, _ = layout.key_position(token, channel)
    assert not one[0, word[128:]].any() and np.array_equal(one[0, word[:128]], two[0, word[:128]]) and two[0, word[128:]].any()


@every_dtype
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_windows_hold_any_number_of_tokens(head_dim, dtype):
    k, v = numbers((2, RESIDUAL, head_dim), dtype)
    full = pack_window(k, v, dtype)
    assert full.shape == (window_words(head_dim),) and full.dtype == np.int32
    for tokens in (0, 1, 15, 16, 17, 127, 128):
        window = pack_window(k[:tokens], v[:tokens], dtype)
        back_k, back_v = unpack_window(window, tokens, head_dim, dtype)
        assert np.array_equal(back_k, k[:tokens]) and np.array_equal(back_v, v[:tokens])
        rest_k, rest_v = unpack_window(window, RESIDUAL, head_dim, dtype)
        assert not rest_k[tokens:].any() and not rest_v[tokens:].any()
    layout = KVLayout(KVFormat(), head_dim, RESIDUAL)
    assert np.array_equal(full, pack_pages([quantize_group(k, v, layout.format, dtype)], layout)[0])


def test_bad_requests_name_what_is_accepted():
    k = numbers((RESIDUAL, 64), "float16")
    form = KVFormat("int4", "int4")
    layout = KVLayout(form, 64, 64)
    with pytest.raises(ValueError, match=r"accepted: two arrays \[128, head_dim\]"):
        quantize_group(k[:127], k[:127], form)
    with pytest.raises(ValueError, match="round them first"):
        quantize_group(k + np.float32(2**-20), k, form, "bfloat16")
    with pytest.raises(ValueError, match=r"accepted: two arrays \[up to 128, head_dim\]"):
        pack_window(np.zeros((129, 64), np.float32), np.zeros((129, 64), np.float32))
    with pytest.raises(ValueError, match=r"at least 256 tokens' pages, \d+\]"):
        unpack_pages(pack_pages(groups_of(form, 64, 1), layout), layout, 2)
