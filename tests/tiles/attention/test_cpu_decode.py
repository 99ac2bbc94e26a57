"""The CPU decode: every format, head_dim, group ratio and page size against fp64, and what must not change a bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from cpu_attention import GROUPS, ISA, PAGES, call, case, edge_lengths, kernel_of, name_of, verdict, workload
from kv_cases import FORMATS, poisoned_problem

from tilebit.autotune.problems.attention import attention_problem, exact_attention
from tilebit.layouts.kv import HEAD_DIMS
from tilebit.schedules.attention.workload import AttentionWorkload

# At every edit those of tests/tilebit/ops run.
pytestmark = pytest.mark.slow


def _cases():
    """Every format at every head_dim; the other choices go round beside them."""
    found = []
    for i, (head_dim, form) in enumerate(product(HEAD_DIMS, FORMATS)):
        heads_kv = (1, 2, 3)[i % 3]
        w = AttentionWorkload(
            "decode", 1, 1, 512, GROUPS[i % 5] * heads_kv, heads_kv, head_dim, form, ("float16", "bfloat16")[i // 2 % 2], PAGES[i * 3 % 5],
            window=(0, 0, 130, 50)[i % 4], sink_tokens=(0, 3, 0, 4, 200)[i % 5], sinks=i % 3 == 1, soft_cap=(0.0, 0.0, 20.0)[i % 3],
            lse=i % 2 == 0,
        )  # fmt: skip
        found.append(case(w, step=(128, 16, 64)[i % 3], threads=(2, 9)[i % 2]))
    narrow = [workload("decode", name, heads_q=4, lse=True) for name in ("kv4_channel", "kv2_token", "kvfp8", "kv16")]
    return found + [case(w, isa="avx2") for w in narrow if ISA != "avx2"]


CASES = _cases()
SCORES = [case(workload("decode", lse=True, soft_cap=cap, scale=0.25)) for cap in (0.0, 5.0)]
SPEED = [case(workload("decode", name, heads_q=8, heads_kv=2, head_dim=128)) for name in ("kv4_channel", "kv8_token", "kv2_channel")]


@pytest.mark.parametrize("one", CASES, ids=name_of)
def test_against_fp64(one):
    """Lengths at every border; what holds no token is NaN."""
    w, lengths = one[0], edge_lengths(one[0].page_size)
    edges = poisoned_problem(replace(w, q_len=1), lengths, [1] * len(lengths), seed=3)
    others = [lengths[b] for b in (8, 3, 0, 6)]
    several = poisoned_problem(replace(w, q_len=(5, 16)[w.heads_kv % 2]), others, [1] * 4, seed=4)
    assert verdict(kernel_of(one), edges, several) == ()


@pytest.mark.parametrize("one", SCORES, ids=name_of)
def test_exponentials_are_fp32(one):
    """The log-sum-exp of one token is its score, of two a soft maximum: exact to fp32, not only to the output's 16 bits."""
    for length in (1, 2, 260):
        problem = attention_problem(replace(one[0], q_len=1), [length] * 64, [1] * 64, seed=length)
        _, expected = problem.attended(exact_attention)
        error = (call(kernel_of(one), problem)["lse"].double() - expected).abs().max()
        assert error < 4e-6, f"length {length}: {error:.2e}"


def test_sequences_do_not_depend_on_each_other():
    """A sequence alone, or computed by one thread, has the bits it has in a batch; it may be cut into parts."""
    for one in (CASES[1], CASES[9]):
        problem = attention_problem(replace(one[0], q_len=2), [900, 0, 131, 600], [2] * 4, seed=1)
        whole = call(kernel_of(one), problem)["out"]
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            assert torch.equal(call(kernel_of(one), problem)["out"], whole)
        finally:
            torch.set_num_threads(threads)
        for b in range(4):
            own = {name: problem.operands[name][b : b + 1].contiguous() for name in ("q", "lengths", "block_tables", "slots")}
            written = {name: ((1, *shape[1:]), dtype) for name, (shape, dtype) in problem.written.items()}
            alone = replace(problem, operands={**problem.operands, **own}, written=written)
            assert torch.equal(call(kernel_of(one), alone)["out"][0], whole[b])


def test_an_empty_batch_is_no_work():
    one = CASES[0]
    problem = attention_problem(replace(one[0], q_len=1), [140], [1], seed=1)
    nothing = {name: problem.operands[name][:0] for name in ("q", "lengths", "block_tables", "slots")}
    written = {name: ((0, *shape[1:]), dtype) for name, (shape, dtype) in problem.written.items()}
    assert call(kernel_of(one), replace(problem, operands={**problem.operands, **nothing}, written=written))["out"].numel() == 0


def test_wrong_tensors_are_refused():
    one = next(c for c in CASES if not c[0].sinks and not c[0].format.has_head_scales)
    problem = attention_problem(replace(one[0], q_len=2), [300, 20], [2, 2], seed=1)
    good = problem.operands
    wrong = {
        "pages has size": {"pages": good["pages"][:, :, 1:].contiguous()},
        "lengths has size 1 in dimension 0; accepted: 2": {"lengths": good["lengths"][:1]},
        "lengths has device type 1, dtype": {"lengths": good["lengths"].long()},
        "windows is not contiguous": {"windows": good["windows"].repeat(1, 1, 2)[:, :, : good["windows"].shape[2]]},
        "out has size": {"q": good["q"][:, :1].contiguous()},
    }
    for message, changed in wrong.items():
        outputs = {name: torch.full_like(tensor, 7.0) for name, tensor in problem.outputs().items()}
        with pytest.raises(ValueError, match=message):
            call(kernel_of(one), replace(problem, operands={**good, **changed}), outputs)
        assert all((tensor == 7.0).all() for tensor in outputs.values())


@pytest.mark.parametrize("one", SPEED, ids=name_of)
def test_the_hot_loop_is_vector_code(one):
    resources = kernel_of(one).resources
    products = sum(count for name, count in resources["loop"].items() if name.startswith("vfmadd") and name.endswith("ps"))
    assert products >= 16
    vector = sum(count for name, count in resources["loop"].items() if name.startswith("v"))
    wide = any(name.startswith("avx512") for name in kernel_of(one).manifest["target"]["features"])
    most = 4 if wide else 4.5  # the 8-bit loop for AVX2 has 132 for 32 products
    assert vector <= most * products, resources["loop"]
    assert not any("scalar" in sentence for sentence in kernel_of(one).manifest["lint"]), kernel_of(one).manifest["lint"]
