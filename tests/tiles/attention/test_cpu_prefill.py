"""The CPU prefill: ragged batches of queries over more, as many or fewer keys, against fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cpu_attention import GROUPS, call, case, kernel_of, name_of, verdict, workload

from tilebit.autotune.problems.attention import attention_problem
from tilebit.layouts.kv import HEAD_DIMS

# At every edit those of tests/tilebit/ops run.
pytestmark = pytest.mark.slow


def _cases():
    found = []
    for i in range(10):
        heads_kv, dtype = 1 + i % 2, ("float16", "bfloat16")[i // 3 % 2]
        w = workload("prefill", heads_q=GROUPS[i % 5] * heads_kv, heads_kv=heads_kv, head_dim=HEAD_DIMS[i % 3], dtype=dtype, lse=i % 2 == 0)
        window, sink_tokens, soft_cap = (0, 130, 0, 50)[i % 4], (0, 3, 200)[i % 3], (0.0, 20.0, 0.0)[i % 3]
        w = replace(w, window=window, sink_tokens=sink_tokens, sinks=i % 3 == 1, soft_cap=soft_cap)
        found.append(case(w, step=(128, 32)[i % 2]))
    return found


CASES = _cases()


@pytest.mark.parametrize("one", CASES, ids=name_of)
def test_against_fp64(one):
    chunks = attention_problem(one[0], [0, 1, 127, 300, 5, 517], [0, 1, 127, 1, 9, 200], seed=3)  # 9 queries of 5 tokens: 4 see nothing
    assert verdict(kernel_of(one), chunks, attention_problem(one[0], [260, 33], [260, 33], seed=4)) == ()


def test_rows_do_not_depend_on_each_other():
    """A sequence alone has the bits it has in a batch."""
    one = CASES[0]
    problem = attention_problem(one[0], [200, 31], [40, 31], seed=1)
    alone = attention_problem(one[0], [31], [31], seed=1)
    for name, first in (("q", 40), ("k", 200), ("v", 200)):
        alone.operands[name].copy_(problem.operands[name][first:])
    assert torch.equal(call(kernel_of(one), alone)["out"], call(kernel_of(one), problem)["out"][40:])
