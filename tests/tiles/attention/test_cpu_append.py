"""The CPU append: bit for bit the numpy twin, however many rows a call brings."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from cpu_attention import GROUPS, PAGES, call, case, edge_lengths, kernel_of, name_of, verdict, workload
from kv_cases import FORMATS, poisoned_problem

from tilebit.autotune.problems.attention import attention_problem
from tilebit.layouts.kv import HEAD_DIMS, RESIDUAL
from tilebit.layouts.kv_quantize import pack_pages, quantize_group
from tilebit.schedules.attention.workload import AttentionWorkload

# At every edit those of tests/tilebit/ops run.
pytestmark = pytest.mark.slow


def _cases():
    found = []
    for i, (form, head_dim) in enumerate(zip(FORMATS, HEAD_DIMS * 4, strict=False)):
        dtype, heads = ("float16", "bfloat16")[i // 2 % 2], 1 + i % 2
        w = AttentionWorkload("append", 1, 1, 512, heads, heads, head_dim, form, dtype, PAGES[i * 3 % 5])
        found.append(case(replace(w, rotary=("", "half", "interleaved")[i % 3])))
    for i, (rotary, head_dim) in enumerate(product(("half", "interleaved"), HEAD_DIMS)):  # and queries, rows as far apart as a product's
        w = workload("append", FORMATS[2 * i].name, heads_q=2 * GROUPS[i % 5], heads_kv=2, head_dim=head_dim, rotary=rotary)
        w = replace(w, queries=True, dtype=("float16", "bfloat16")[i % 2], rotary_dim=(0, 32, 96)[i % 3] if i > 2 else 0)
        found.append(case(replace(w, qk_norm=True, norm_eps=1e-5, norm_offset=float(i % 2)) if i % 3 else w))
    return found


CASES = _cases()
STEPWISE = [
    case(workload("append", name, heads_q=1, rotary=rotary)) for name, rotary in (("kv4_channel", ""), ("kv2_token", "half"), ("kvfp8", ""))
]
EVERY_NUMBER = [case(workload("append", "kvfp8", heads_q=1, dtype=dtype)) for dtype in ("float16", "bfloat16")]


@pytest.mark.parametrize("one", CASES, ids=name_of)
def test_as_the_twin(one):
    w, lengths = one[0], edge_lengths(one[0].page_size)
    rows = [min(pair) for pair in zip(lengths, (0, 1, 130, 128, 127, 7, 5, 260, 1), strict=True)]
    edges = poisoned_problem(w, lengths, rows, seed=3)
    assert verdict(kernel_of(one), edges, poisoned_problem(w, [517, 128, 384], [16, 1, 384], seed=4)) == ()


@pytest.mark.parametrize("one", STEPWISE, ids=name_of)
def test_token_by_token_is_all_at_once(one):
    w, length = one[0], 2 * RESIDUAL + 9
    problem = attention_problem(w, [length, 3], [length, 3], seed=5)
    bulk = call(kernel_of(one), problem)
    state = {name: problem.operands[name].clone() for name in bulk}
    for steps in (*([1] * 140), 3, 100, *([1] * 22)):
        done = int(state.setdefault("done", torch.zeros(1, dtype=torch.int64)))
        new = [slice(min(done, n), min(done + steps, n)) for n in (length, 3)]
        counts = [s.stop - s.start for s in new]
        picked = {
            name: torch.cat((problem.operands[name][new[0]], problem.operands[name][length:][new[1]])).contiguous() for name in ("k", "v")
        }
        ints = {
            "cu_seqlens": torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32),
            "lengths": torch.tensor([s.stop for s in new], dtype=torch.int32),
        }
        call(kernel_of(one), replace(problem, operands={**problem.operands, **picked, **ints}), {n: state[n] for n in bulk})
        state["done"] += steps
    assert int(state["done"]) == length
    assert torch.equal(state["pages"], bulk["pages"])
    after = [replace(problem, operands={**problem.operands, **cache}).cache() for cache in ({n: state[n] for n in bulk}, bulk)]
    for got, expected in zip(*after, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("one", "scale"), list(product(EVERY_NUMBER, (1.0, 0.37))), ids=lambda x: name_of(x) if isinstance(x, tuple) else str(x)
)
def test_every_number_in_fp8(one, scale):
    """All 65,536 numbers of the model's type, infinities and NaN too."""
    w, dtype = one[0], getattr(torch, one[0].dtype)
    rows = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(dtype).view(-1, 1, w.head_dim)
    problem = attention_problem(w, [len(rows)], [len(rows)], seed=0)
    scales = torch.tensor([[scale], [1.0]])
    problem = replace(problem, operands={**problem.operands, "k": rows, "v": rows.clone(), "head_scales": scales})
    pages = call(kernel_of(one), problem)["pages"][problem.operands["block_tables"][0].long(), 0]
    numbers = rows[:, 0].float().numpy()
    with np.errstate(invalid="ignore", over="ignore"):  # infinity and NaN are among them
        groups = [quantize_group(part, part, w.format, w.dtype, (scale, 1.0)) for part in numbers.reshape(-1, RESIDUAL, w.head_dim)]
    expected = pack_pages(groups, w.layout)
    assert np.array_equal(pages.numpy(), expected)
