"""The CPU programs' view of granules: every code once, where the layout has it, and sums over lanes that are sums by token and channel."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from tilebit.layouts.kv import HEAD_DIMS, key_granule, value_granule
from tilebit.tiles.cpu.attention.granules import LANES, key_rows, key_vectors, lane_sums, stride, value_rows, value_vectors

BITS = (2, 4, 8, 16)


@pytest.mark.parametrize(("bits", "head_dim"), list(product(BITS, HEAD_DIMS)))
def test_vectors_hold_what_the_layout_says(bits, head_dim):
    rng = np.random.default_rng(bits + head_dim)
    codes = rng.integers(0, 1 << bits, (16, head_dim)).astype(np.uint16)
    for what, vectors, packed, rows in (
        ("key", key_vectors(key_granule(bits, head_dim)), key_granule(bits, head_dim), codes),
        ("value", value_vectors(value_granule(bits, head_dim)), value_granule(bits, head_dim), codes.T),
    ):
        words = packed.pack(np.ascontiguousarray(rows)).ravel()
        assert vectors.loads * vectors.groups * LANES == words.size
        places, load_step, group_step = vectors.places(what, head_dim)
        seen = np.zeros(codes.size, dtype=int)
        for load, group, slot in product(range(vectors.loads), range(vectors.groups), range(len(vectors.slots))):
            start = (load * vectors.groups + group) * LANES
            vector = words[start : start + LANES] >> np.uint32(bits * slot) & np.uint32((1 << bits) - 1)
            h, u = vectors.slots[slot]
            if what == "key":
                tokens, channels = vectors.tokens[h, group], vectors.channels[u, load]
            else:
                tokens, channels = vectors.tokens[u], vectors.channels[h, load, group]
            assert np.array_equal(vector, codes[tokens, channels])
            assert np.array_equal(places[slot] + load * load_step + group * group_step, tokens * head_dim + channels)
            seen[tokens * head_dim + channels] += 1
        assert (seen == 1).all()


def summed(vectors: np.ndarray, labels: np.ndarray) -> dict[int, float]:
    """The sum of each label, through the steps of ``lane_sums``."""
    reduction, lane = lane_sums(labels), np.arange(LANES)
    for b in reduction.steps:
        a, c = vectors[::2], vectors[1::2]
        vectors = np.where(lane & b, c + c[:, lane ^ b], a + a[:, lane ^ b])
    return dict(zip(reduction.labels, vectors[0].tolist(), strict=True))


@pytest.mark.parametrize(("bits", "head_dim"), [*product(BITS, HEAD_DIMS), ("rows", 128)])
def test_sums_over_lanes_are_sums_by_token(bits, head_dim):
    keys = key_rows(head_dim) if bits == "rows" else key_vectors(key_granule(bits, head_dim))
    labels = keys.tokens.transpose(1, 0, 2).reshape(-1, LANES)
    vectors = np.random.default_rng(0).integers(-9, 10, labels.shape).astype(float)
    assert summed(vectors, labels) == {token: vectors[labels == token].sum() for token in range(16)}


def test_rows_hold_each_number_once():
    for head_dim in HEAD_DIMS:
        keys, values = key_rows(head_dim), value_rows(head_dim)
        found = [
            (keys.tokens[h, group, x], keys.channels[u, load, x])
            for load, group, (h, u), x in product(range(keys.loads), range(keys.groups), keys.slots, range(LANES))
        ]
        assert len(set(found)) == len(found) == 16 * head_dim
        found = [
            (values.tokens[u, x], values.channels[h, load, 0, x])
            for load, (h, u), x in product(range(values.loads), values.slots, range(LANES))
        ]
        assert len(set(found)) == len(found) == 16 * head_dim


def test_uneven_tables_are_refused():
    assert stride(np.array([3, 5, 7]), 0) == 2 and stride(np.array([3]), 0) == 0
    with pytest.raises(ValueError, match=r"grow by \[1, 2\]"):
        stride(np.array([0, 1, 3]), 0)
    with pytest.raises(ValueError, match="accepted: 2"):
        lane_sums(np.zeros((3, LANES), dtype=int))
