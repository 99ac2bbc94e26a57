"""Sums, maxima and permutations across the lanes of fp32 vectors, in fixed orders. Importing this
imports tvm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import vectors as v
from ..attention.granules import LANE_BITS, LANES, LaneSums
from ..vectors import tirx


def permute(value: Any, order: Sequence[int]) -> Any:
    """Lane x of the result is lane ``order[x]`` of ``value``."""
    return tirx.Shuffle([value], [int(lane) for lane in order])


def sum_lanes(vectors: Sequence[Any], sums: LaneSums) -> Any:
    """One vector of the sums that ``sums`` describes, lane x labelled ``sums.labels[x]``."""
    vectors = list(vectors)
    for b in sums.steps:
        straight = [x if not x & b else LANES + x for x in range(LANES)]
        crossed = [x ^ b if not x & b else LANES + (x ^ b) for x in range(LANES)]
        pairs = [[v.held(one) for one in pair] for pair in zip(vectors[::2], vectors[1::2], strict=True)]
        vectors = [v.held(tirx.Shuffle(pair, straight) + tirx.Shuffle(pair, crossed)) for pair in pairs]
    return vectors[0]


def sum_everywhere(value: Any) -> Any:
    """The sum of all lanes, in all lanes."""
    for b in LANE_BITS:
        value = v.held(value)
        value = value + permute(value, [x ^ b for x in range(LANES)])
    return v.held(value)


def max_everywhere(value: Any) -> Any:
    """The largest lane, in all lanes."""
    for b in LANE_BITS:
        value = v.held(value)
        value = v.T.max(value, permute(value, [x ^ b for x in range(LANES)]))
    return v.held(value)


def min_everywhere(value: Any) -> Any:
    """The smallest lane, in all lanes."""
    for b in LANE_BITS:
        value = v.held(value)
        value = v.T.min(value, permute(value, [x ^ b for x in range(LANES)]))
    return v.held(value)
