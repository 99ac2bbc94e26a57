"""An 8-bit channel as two 4-bit rows: every code of every pair of formats, exactly; the order of rows, and what makes no such weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tilebit.layouts.formats import FORMATS, GemmFormat
from tilebit.schedules.gemm.parts import ADDED, NOWHERE
from tilebit.weights.mixed_tensor import MixedTensor
from tilebit.weights.packed import pack
from tilebit.weights.paired import HIGH_OF, check_pair, dequantize_rows, holds_nibbles, row_count, split_nibbles
from tilebit.weights.quantize import QuantizedTensor

K = 256
PAIRS = [pytest.param(low, high, id=low.name) for low, high in HIGH_OF.items()]
DTYPES = (torch.float16, torch.bfloat16)
G128 = (FORMATS["w4a8_g128_asym"], FORMATS["w8a8_g128"])


def tensor(format: GemmFormat, n: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> QuantizedTensor:
    """Each row holds all codes of ``format``, in an order of its own; scales of every magnitude that a layer has."""
    generator = torch.Generator().manual_seed(seed + format.bits)
    codes = torch.stack([torch.randperm(K, generator=generator) % (format.max_code + 1) for _ in range(n)]).to(torch.uint8)
    shape = (n, format.groups(K))
    scales = torch.exp2(torch.randint(-12, 3, shape, generator=generator) + torch.rand(shape, generator=generator)).to(dtype)
    zeros = None if format.symmetric else torch.randint(0, 16, shape, generator=generator).to(torch.uint8)
    if not format.offset:
        return QuantizedTensor(codes, scales, zeros, format)
    levels = torch.randint(1, 16, shape, generator=generator).to(torch.uint8)
    return QuantizedTensor(codes, levels, zeros, format, row_scales=scales[:, 0].float())


def mixed(low: GemmFormat, high: GemmFormat, counts: tuple[int, int], dtype: torch.dtype = torch.float16) -> MixedTensor:
    """So many channels of either format, drawn."""
    parts = [tensor(format, count, dtype) if count else None for format, count in zip((low, high), counts, strict=True)]
    return MixedTensor(parts[0], parts[1], torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize(("low", "high"), PAIRS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_is_the_sum_of_its_nibbles(low: GemmFormat, high: GemmFormat, dtype: torch.dtype) -> None:
    """Both rows, each as its own format says, add up to the 8-bit weight: in fp64, where no sum rounds, and so in fp32."""
    q = tensor(high, 8, dtype)
    rows, channels = split_nibbles(MixedTensor(None, q, torch.arange(8)), low)
    assert rows.format == low and rows.n == 16 and q.codes.unique().numel() == 256
    w = rows.dequantize().double()
    assert torch.equal(w[:8] + w[8:], (q.codes.double() - 128) * q.scales.double().repeat_interleave(K // q.scales.shape[1], 1))
    assert torch.equal(dequantize_rows(rows, channels), q.dequantize())
    packed = pack(rows, dtype).unpack()  # as kernels read it
    assert torch.equal(dequantize_rows(packed, channels), q.dequantize())


@pytest.mark.parametrize(("low", "high"), PAIRS)
@pytest.mark.parametrize("counts", [(16, 8), (1, 1), (19, 0), (0, 11), (40, 23)])
def test_all_channels_come_back_in_order(low: GemmFormat, high: GemmFormat, counts: tuple[int, int]) -> None:
    weight = mixed(low, high, counts)
    rows, channels = split_nibbles(weight, low)
    assert rows.n == len(channels) == row_count(*counts) and channels.dtype == torch.int32
    assert torch.equal(dequantize_rows(rows, channels), weight.dequantize())


@pytest.mark.parametrize(("low", "high"), PAIRS)
@pytest.mark.parametrize("counts", [(16, 8), (1, 1), (19, 0), (0, 11), (40, 23)])
def test_rows_of_nibbles_are_told_from_others(low: GemmFormat, high: GemmFormat, counts: tuple[int, int]) -> None:
    """From what kernels read: everything that joining them takes for granted."""
    rows, channels = split_nibbles(mixed(low, high, counts), low)
    packed, n = pack(rows, torch.float16), sum(counts)

    def held(channels: torch.Tensor = channels, **changed: torch.Tensor | None) -> bool:
        return holds_nibbles(low, channels, n, {"scales": packed.scales, "zeros": packed.zeros, "row_scales": packed.row_scales, **changed})

    assert held()
    added = (channels == ADDED).nonzero().flatten()
    assert not held(torch.cat([channels, channels.new_full((16,), NOWHERE)]))  # more padding than a part's
    for row in added[[0, -1]].tolist() if len(added) else ():
        for where in (row, row - 8):
            for name in ("scales", "zeros", "row_scales"):
                tensor = getattr(packed, name)
                if tensor is not None and not (name == "row_scales" and where == row):
                    other = tensor.clone()
                    other[..., where] += 1
                    assert not held(**{name: other}), name
        assert not held(channels.index_fill(0, torch.tensor([row]), NOWHERE))
    if counts[0] and len(added):
        assert not held(torch.cat([channels[-16:], channels[:-16]]))  # pairs before single rows
    if counts == (1, 1):  # a single row where padding of low nibbles was: no number of rows is another
        moved = channels.clone()
        moved[-1], moved[0] = channels[0], NOWHERE
        assert not held(moved)


def test_rows_lie_as_kernels_take_them() -> None:
    """Low rows and padding to 16, then in turn 8 high nibbles and the same channels' low ones."""
    weight = mixed(*G128, (17, 10))
    rows, channels = split_nibbles(weight)
    first, high = channels[:32], channels[32:].view(2, 2, 8)
    order = weight.channels.tolist()
    assert first.tolist() == order[:17] + [NOWHERE] * 15
    assert high[0].tolist() == [order[17:25], [ADDED] * 8]
    assert high[1].tolist() == [order[25:] + [NOWHERE] * 6, [ADDED] * 2 + [NOWHERE] * 6]
    assert weight.low is not None and weight.high is not None
    assert torch.equal(rows.codes[:17], weight.low.codes)
    of_rows = rows.codes[32:].view(2, 2, 8, K)
    assert torch.equal((of_rows[:, 0] * 16 + of_rows[:, 1]).view(16, K)[:10], weight.high.codes)
    assert not rows.dequantize()[channels == NOWHERE].any()


@pytest.mark.parametrize(("low", "high"), PAIRS)
def test_padding_is_0(low: GemmFormat, high: GemmFormat) -> None:
    rows, channels = split_nibbles(mixed(low, high, (1, 1)))
    assert int((channels == NOWHERE).sum()) == 15 + 14
    assert not rows.codes[channels == NOWHERE].any() and not rows.dequantize()[channels == NOWHERE].any()


BUGS: dict[str, Callable[[QuantizedTensor, torch.Tensor], object]] = {
    "a high row with the scales of its low one": lambda rows, channels: rows.scales.copy_(rows.scales.roll(8, 0)),
    "a low row with the zeros of its high one": lambda rows, channels: rows.zeros[8:].copy_(rows.zeros[:8]),  # type: ignore
    "a low row that is lost": lambda rows, channels: channels.masked_fill_(channels == ADDED, NOWHERE),
    "the index of the next channel": lambda rows, channels: channels.copy_(torch.where(channels >= 0, (channels + 1) % 8, channels)),
}


@pytest.mark.parametrize(("low", "high"), PAIRS)
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(low: GemmFormat, high: GemmFormat, bug: str) -> None:
    q = tensor(high, 8)
    rows, channels = split_nibbles(MixedTensor(None, q, torch.arange(8)), low)
    assert torch.equal(dequantize_rows(rows, channels), q.dequantize())
    BUGS[bug](rows, channels)
    assert not torch.equal(dequantize_rows(rows, channels), q.dequantize())


def test_scales_of_two_types_are_of_the_wider_one() -> None:
    low, high = tensor(G128[0], 16, torch.float16), tensor(G128[1], 8, torch.bfloat16)
    weight = MixedTensor(low, high, torch.arange(24))
    rows, channels = split_nibbles(weight)
    assert rows.scales.dtype == torch.float32 and torch.equal(dequantize_rows(rows, channels), weight.dequantize())


def test_scales_that_are_16_times_too_large_are_refused() -> None:
    """The largest that fits does fit."""
    q = tensor(G128[1], 8)
    top = torch.full_like(q.scales, 65504 / 16)
    split_nibbles(MixedTensor(None, replace(q, scales=top), torch.arange(8)))
    top[3, 1] = 4096
    with pytest.raises(ValueError, match=r"1 of the 8-bit part's scales .*float16 .* at \[3, 1\]: 4096; accepted: up to 4094"):
        split_nibbles(MixedTensor(None, replace(q, scales=top), torch.arange(8)))


def test_a_format_that_is_not_said_is_one_that_fits() -> None:
    for low, high in HIGH_OF.items():
        rows = split_nibbles(MixedTensor(None, tensor(high, 8), torch.arange(8)))[0]
        assert HIGH_OF[rows.format] == high and rows.format.name == f"w4a8_{high.name.removeprefix('w8a8_')}_asym"
        assert split_nibbles(MixedTensor(tensor(low, 8), None, torch.arange(8)))[0].format == low


def ordered(q: QuantizedTensor) -> QuantizedTensor:
    return replace(q, perm=torch.arange(K).flip(0))


LOW8, HIGH8, LQQ = tensor(G128[0], 8), tensor(G128[1], 8), FORMATS["w4a8_lqq_g64"]
NO_WEIGHTS: dict[str, tuple[Callable[[], object], str]] = {
    "two formats of another x": (
        lambda: split_nibbles(MixedTensor(LOW8, tensor(FORMATS["w8a8_channel"], 8), torch.arange(16))),
        "the formats are w4a8_g128_asym and w8a8_channel; accepted: 'w4a8_g128_asym' with 'w8a8_g128'",
    ),
    "8 bits for low": (lambda: split_nibbles(MixedTensor(HIGH8, HIGH8, torch.arange(16))), "the formats are w8a8_g128 and w8a8_g128"),
    "x of 16 bits": (lambda: split_nibbles(MixedTensor(tensor(FORMATS["w4a16_g64"], 8), None, torch.arange(8))), "accepted: 'w4a8"),
    "another low format": (lambda: split_nibbles(MixedTensor(LOW8, None, torch.arange(8)), LQQ), "accepted: the same"),
    "no pair with high": (
        lambda: split_nibbles(MixedTensor(None, HIGH8, torch.arange(8)), LQQ),
        "the formats are w4a8_lqq_g64 and w8a8_g128",
    ),
    "low in another order": (lambda: split_nibbles(MixedTensor(ordered(LOW8), HIGH8, torch.arange(16))), "act_order=False"),
    "high in another order": (lambda: split_nibbles(MixedTensor(LOW8, ordered(HIGH8), torch.arange(16))), "act_order=False"),
    "channels of fewer rows": (lambda: dequantize_rows(LOW8, torch.arange(7, dtype=torch.int32)), r"accepted: int32 \[8\]"),
    "a channel twice": (lambda: dequantize_rows(LOW8, torch.tensor([0, 1, 2, 3, 4, 5, 6, 6])), "do not hold each of 0 to 7 once"),
    "added to none": (lambda: dequantize_rows(LOW8, torch.tensor([0, 1, 2, 3, 4, 5, 6, ADDED])), "channels are -1 at row 7"),
}


@pytest.mark.parametrize("case", NO_WEIGHTS)
def test_what_makes_no_weight_is_refused(case: str) -> None:
    make, message = NO_WEIGHTS[case]
    with pytest.raises(ValueError, match=message):
        make()


def test_what_is_no_tensor_is_refused() -> None:
    for make in (lambda: split_nibbles(LOW8), lambda: split_nibbles(MixedTensor(LOW8, None, torch.arange(8)), "w4")):  # type: ignore
        with pytest.raises(TypeError, match="accepted: a "):
            make()


def test_pairs_are_of_4_and_8_bits_with_the_same_x() -> None:
    for low, high in HIGH_OF.items():
        check_pair(low, high)
        assert (low.bits, high.bits) == (4, 8) and low.integer_sums and high.integer_sums and low.x_group == high.x_group
        with pytest.raises(ValueError, match="the formats are"):
            check_pair(high, low)
