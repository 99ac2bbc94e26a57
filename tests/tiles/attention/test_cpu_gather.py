"""The CPU gather: every row of the cache, rounded once."""

from __future__ import annotations

import pytest
from cpu_attention import PAGES, case, edge_lengths, kernel_of, name_of, verdict
from kv_cases import FORMATS, poisoned_problem

from tilebit.layouts.kv import HEAD_DIMS
from tilebit.schedules.attention.workload import AttentionWorkload

# At every edit those of tests/tilebit/ops run.
pytestmark = pytest.mark.slow
CASES = [
    case(
        AttentionWorkload("gather", 1, 1, 512, 1 + i % 3, 1 + i % 3, head_dim, form, ("float16", "bfloat16")[i // 2 % 2], PAGES[i * 3 % 5])
    )
    for i, (form, head_dim) in enumerate(zip(FORMATS, HEAD_DIMS * 4, strict=False))
]


@pytest.mark.parametrize("one", CASES, ids=name_of)
def test_rows_are_exact(one):
    w, lengths = one[0], edge_lengths(one[0].page_size)
    edges = poisoned_problem(w, lengths, [0] * len(lengths), seed=3)
    assert verdict(kernel_of(one), edges, poisoned_problem(w, [517, 128, 384], [0] * 3, seed=4)) == ()
