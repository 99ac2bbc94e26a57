"""The attention ops as operators: opcheck, tracing, out variants, strides, plans, and errors in the ops' own words."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from defined_kernels import DefinedKernels
from torch import Tensor

from tilebit import attention
from tilebit.cache.kvcache import KVCache
from tilebit.kernels import KernelUnavailable
from tilebit.ops import launchers, plans
from tilebit.schedules.attention.workload import OPS, AttentionWorkload
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target, target_from_name
from tilebit.tiles.attention import reference

Launched = list[tuple[str, str]]  # ops, and by which of a kernel's functions each was launched
LENGTHS = (130, 0, 300)
HEADS_Q, HEADS, DIM = 4, 2, 64


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> DefinedKernels:
    found = DefinedKernels()
    monkeypatch.setattr(plans, "find_kernel", found.find)
    monkeypatch.setattr(plans, "held", {})
    return found


def record_launches(kernels: DefinedKernels, monkeypatch: pytest.MonkeyPatch, early: bool = True) -> Launched:
    """The launches from now on, of kernels that have a dependent launch where ``early``."""
    launched: Launched = []

    def find(w: AttentionWorkload, target: Target) -> Any:
        kernel = kernels.find(w, target)
        run = kernel.run

        def recorded(name: str) -> Callable[..., None]:
            return lambda *tensors: (run(*tensors), launched.append((w.op, name)))[1]

        kernel.run, kernel.run_dependent = recorded("run"), recorded("run_dependent") if early else None
        return kernel

    monkeypatch.setattr(plans, "find_kernel", find)
    plans.forget()
    return launched


def problem(format: str = "kv4_channel", page_size: int = 128) -> dict[str, Any]:
    """Operands and options by name, of a cache of three sequences."""
    cache = KVCache(2 * 384 // page_size, 4, HEADS, DIM, format, page_size=page_size, num_layers=1)
    sequences = cache.allocate(3)
    k, v = (torch.randn(sum(LENGTHS), HEADS, DIM).half() for _ in range(2))
    cache.append(sequences, k, v, cu_seqlens=[0, 130, 130, 430])
    batch = cache.batch(sequences)
    batch.refresh()
    return {
        "q": torch.randn(3, 2, HEADS_Q, DIM).half(),
        "pages": cache.pages[0],
        "windows": cache.windows[0],
        "block_tables": batch.block_tables,
        "slots": batch.slots,
        "lengths": batch.lengths,
        "head_scales": None if cache.head_scales is None else cache.head_scales[0],
        "sinks": None,
        "format": format,
        "page_size": page_size,
        "k": k,
        "v": v,
        "cu": batch.cu_kv,
    }


CACHE = ("pages", "windows", "block_tables", "slots", "lengths")


def named(p: dict[str, Any], *names: str) -> list[Any]:
    return [p[name] for name in names]


def decode_arguments(p: dict[str, Any]) -> list[Any]:
    return named(p, "q", *CACHE, "head_scales", "sinks", "format", "page_size")


def append_arguments(p: dict[str, Any], cos_sin: Tensor | None = None, rotary: str = "") -> list[Any]:
    first = named(p, "k", "v", "cu", "lengths", "block_tables", "slots", "pages", "windows", "head_scales")
    return [*first, cos_sin, p["format"], p["page_size"], rotary]


def gather_arguments(p: dict[str, Any]) -> list[Any]:
    return [*named(p, *CACHE, "cu", "head_scales", "format", "page_size")]


def pack_arguments(p: dict[str, Any]) -> list[Any]:
    """Of one layer; the windows of two sequences are full."""
    scales = None if p["head_scales"] is None else p["head_scales"][None]
    lengths = torch.tensor([128, 0, 256], dtype=torch.int32)
    held = [p["pages"][None].clone(), p["windows"][None], p["block_tables"], p["slots"], lengths, scales]
    return [*held, p["format"], p["page_size"], DIM, torch.float16]


def succeeds(op: Any, arguments: list[Any], **options: Any) -> None:
    results = torch.library.opcheck(op, tuple(arguments), options)
    assert set(results.values()) == {"SUCCESS"} and "test_aot_dispatch_dynamic" in results


@pytest.mark.parametrize("format", ["kv4_channel", "kvfp8"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_opcheck_of_decode(kernels, format, return_lse):
    p = problem(format)
    p["sinks"] = torch.randn(HEADS_Q) if return_lse else None
    succeeds(torch.ops.tilebit.attention_decode.default, [*decode_arguments(p), 0.3, 100, 4, 5.0, return_lse])
    out, lse = torch.empty_like(p["q"]), torch.empty(3, 2, HEADS_Q)
    succeeds(torch.ops.tilebit.attention_decode.out, decode_arguments(p), out=out, lse=lse if return_lse else None)


@pytest.mark.parametrize("rotary", ["", "half"])
def test_opcheck_of_append(kernels, rotary):
    succeeds(torch.ops.tilebit.attention_append.default, append_arguments(problem(), torch.randn(400, DIM) if rotary else None, rotary))


def test_opcheck_of_append_and_rotate(kernels):
    p = problem()
    arguments = append_arguments(p, torch.randn(400, DIM), "half")
    q, norms = torch.randn(p["k"].shape[0], HEADS_Q, DIM).half(), [torch.randn(DIM).half() for _ in range(2)]
    succeeds(torch.ops.tilebit.attention_append_and_rotate.default, [*arguments[:10], q, *norms, *arguments[10:], 0.25, 1.0])
    arguments[10:10] = [q, None, None]
    succeeds(torch.ops.tilebit.attention_append_and_rotate.default, arguments)
    succeeds(torch.ops.tilebit.attention_append_and_rotate.out, arguments, out=torch.empty_like(arguments[10]))


@pytest.mark.parametrize("format", ["kv4_channel", "kvfp8"])
def test_opcheck_of_full_windows(kernels, format):
    p = problem(format)
    succeeds(torch.ops.tilebit.attention_pack.default, pack_arguments(p))
    succeeds(torch.ops.tilebit.attention_decode.default, decode_arguments(p), full_windows=True)
    p["cu"] = torch.tensor([0, 1, 1, 2], dtype=torch.int32)
    p |= {name: p[name][:2] for name in "kv"}
    succeeds(torch.ops.tilebit.attention_append.default, append_arguments(p), full_windows=True)


def test_wrong_packs_are_named(kernels):
    first, *rest = pack_arguments(problem())
    with pytest.raises(ValueError, match=r"pack got pages int32 .*; accepted: pages int32 \[layers, num_pages, heads_kv, page words\]"):
        attention.pack(first[0], *rest)
    with pytest.raises(ValueError, match=r"windows is int32 .* with layers = 2"):
        attention.pack(torch.cat((first, first)), *rest)


def test_opcheck_of_gather(kernels):
    p = problem()
    succeeds(torch.ops.tilebit.attention_gather.default, [*gather_arguments(p), 430, DIM, torch.float16])
    outs = {name: torch.zeros(430, HEADS, DIM).half() for name in ("out_k", "out_v")}
    succeeds(torch.ops.tilebit.attention_gather.out, gather_arguments(p), **outs)


@pytest.mark.parametrize("return_lse", [False, True])
def test_opcheck_of_prefill(kernels, return_lse):
    p = problem()
    q, cu_q = torch.randn(6, HEADS_Q, DIM).half(), torch.tensor([0, 2, 4, 6], dtype=torch.int32)
    arguments = [q, p["k"], p["v"], cu_q, p["cu"], None]
    succeeds(torch.ops.tilebit.attention_prefill.default, [*arguments, None, 0, 0, 0.0, return_lse])
    lse = torch.empty(6, HEADS_Q) if return_lse else None
    succeeds(torch.ops.tilebit.attention_prefill.out, arguments, out=torch.empty_like(q), lse=lse)


def test_the_functions_are_the_ops(kernels):
    p = problem()
    out, lse = attention.decode(*decode_arguments(p), return_lse=True)
    same, same_lse = torch.empty_like(out), torch.empty_like(lse)
    torch.ops.tilebit.attention_decode.out(*decode_arguments(p), out=same, lse=same_lse)
    assert torch.equal(out, same) and torch.equal(lse, same_lse)
    k, v = attention.gather(*gather_arguments(p), total=430, head_dim=DIM, dtype=torch.float16)
    cu_q = torch.tensor([0, 2, 4, 6], dtype=torch.int32)
    whole, whole_lse = attention.prefill(p["q"].flatten(0, 1), k, v, cu_q, p["cu"], return_lse=True)
    torch.testing.assert_close(whole.view_as(out), out, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(whole_lse.view_as(lse), lse, rtol=1e-3, atol=1e-3)
    pages, windows = p["pages"].clone(), p["windows"].clone()
    p["pages"].zero_()
    p["windows"].zero_()
    attention.append(*append_arguments(p))
    assert torch.equal(p["pages"], pages) and torch.equal(p["windows"], windows)


def test_prompts_of_no_sequence_and_over_no_rows_are_checked(kernels):
    q, k = torch.randn(10, HEADS_Q, DIM).half(), torch.randn(10, HEADS, DIM).half()
    bounds = torch.tensor([0, 10], dtype=torch.int32)
    for rows, cu_q in ((q, bounds[:0]), (q, bounds[:1]), (q[:0], bounds[:0])):
        with pytest.raises(ValueError, match=r"prefill got q float16 .*, cu_q int32 \[[01]\]"):
            attention.prefill(rows, k, k, cu_q, bounds)
    assert attention.prefill(q[:0], k, k, bounds[:1], bounds[:1])[0].shape == (0, HEADS_Q, DIM)
    none, empty = k[:0], torch.zeros(2, dtype=torch.int32)
    out, lse = attention.prefill(q, none, none, bounds, empty, return_lse=True)
    assert not out.any() and bool((lse == -torch.inf).all()) and not kernels.calls
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("k is float32", {"k": none.float()}),
        ("v is float16", {"v": none[..., :32]}),
        ("cu_kv is int64", {"cu_kv": empty.long()}),
        ("cu_q is int64", {"cu_q": bounds.long()}),
        ("sinks is float32", {"sinks": torch.zeros(3)}),
        ("window is -1", {"window": -1}),
        ("heads_q is 4 and heads_kv 3", {"k": torch.zeros(0, 3, DIM).half(), "v": torch.zeros(0, 3, DIM).half()}),
    ]
    for words, given in wrong:
        with pytest.raises(ValueError, match=words):
            attention.prefill(**{"q": q, "k": none, "v": none, "cu_q": bounds, "cu_kv": empty, **given})


def test_a_step_compiles_without_graph_breaks(kernels):
    """Append, then attend, with changed lengths: the writes are seen, and one graph serves all lengths."""
    p = problem()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    def step(q, k, v, cu, lengths, pages, windows):
        attention.append(k * 1, v, cu, lengths, p["block_tables"], p["slots"], pages, windows, None, None, "kv4_channel", 128)
        return attention.decode(q * 1, pages, windows, p["block_tables"], p["slots"], lengths, None, None, "kv4_channel", 128)[0]

    for backend_name in (backend, "aot_eager"):
        pages, windows = p["pages"].clone(), p["windows"].clone()
        traced = torch.compile(step, fullgraph=True, backend=backend_name)
        cu = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
        for i in range(1, 3):
            lengths = p["lengths"] + i
            k, v = (torch.randn(3, HEADS, DIM).half() for _ in range(2))
            copies = pages.clone(), windows.clone()
            expected = step(p["q"], k, v, cu, lengths, *copies)
            assert torch.equal(traced(p["q"], k, v, cu, lengths, pages, windows), expected)
            assert torch.equal(windows, copies[1])
    assert len(graphs) == 1


def test_any_strides_of_what_is_read(kernels):
    p = problem()
    expected, _ = attention.decode(*decode_arguments(p))
    wide = torch.zeros(3, 2, HEADS_Q, 2 * DIM).half()
    wide[..., ::2] = p["q"]
    tables = torch.cat((p["block_tables"], p["block_tables"]), dim=1)
    changed = {
        "q": wide[..., ::2],
        "block_tables": tables[:, : p["block_tables"].shape[1]],
        "lengths": torch.stack((p["lengths"], p["lengths"]), dim=1)[:, 0],
        "slots": torch.cat((p["slots"][:1], p["slots"]))[1:],
    }
    assert changed["slots"].data_ptr() % 16
    for name, operand in changed.items():
        out, _ = attention.decode(*decode_arguments({**p, name: operand}))
        assert torch.equal(out, expected), name
    pages = p["pages"].clone()
    fused = torch.cat((p["k"], p["v"]), dim=1)
    p["pages"].zero_()
    attention.append(*append_arguments({**p, "k": fused[:, :HEADS], "v": fused[:, HEADS:]}))
    assert torch.equal(p["pages"], pages)


def test_nothing_to_do_launches_nothing(kernels):
    p = problem()
    kernels.calls.clear()
    empty = {**p, "q": p["q"][:0], "block_tables": p["block_tables"][:0], "slots": p["slots"][:0], "lengths": p["lengths"][:0]}
    out, lse = attention.decode(*decode_arguments(empty), return_lse=True)
    assert out.shape == (0, 2, HEADS_Q, DIM) and lse.shape == (0, 2, HEADS_Q)
    attention.append(*append_arguments({**p, "k": p["k"][:0], "v": p["v"][:0], "cu": torch.zeros(4, dtype=torch.int32)}))
    k, _ = attention.gather(*gather_arguments(empty), total=0, head_dim=DIM, dtype=torch.float16)
    assert k.shape == (0, HEADS, DIM) and not kernels.calls
    cu = torch.tensor([0, 2], dtype=torch.int32)
    out, lse = attention.prefill(p["q"][0], p["k"][:0], p["v"][:0], cu, cu * 0, return_lse=True)
    assert not out.any() and (lse == -torch.inf).all() and not kernels.calls
    sinks = torch.randn(HEADS_Q)
    _, lse = attention.prefill(p["q"][0], p["k"][:0], p["v"][:0], cu, cu * 0, sinks, return_lse=True)
    assert torch.equal(lse, sinks.expand(2, HEADS_Q))


def test_one_plan_serves_a_bucket(kernels):
    p = problem()
    kernels.asked.clear()
    for _ in range(2):
        attention.decode(*decode_arguments(p))
    attention.decode(*decode_arguments({**p, "q": torch.cat((p["q"], p["q"][:1])), **{n: torch.cat((p[n], p[n][:1])) for n in CACHE[2:]}}))
    assert len(kernels.asked) == 1, "3 and 4 sequences are one bucket"
    attention.decode(*decode_arguments(p), return_lse=True)
    attention.decode(*decode_arguments({**p, "q": p["q"][:, :1]}))
    assert len(kernels.asked) == 3
    plans.forget()
    attention.decode(*decode_arguments(p))
    assert len(kernels.asked) == 4


def test_a_kernel_of_other_operands_is_refused(kernels, monkeypatch):
    p = problem()

    def other(w, target):
        kernel = kernels.find(w, target)
        kernel.params = (*kernel.params, "something")
        return kernel

    monkeypatch.setattr(plans, "find_kernel", other)
    with pytest.raises(KernelUnavailable, match="something"):
        attention.decode(*decode_arguments(p))


@pytest.mark.parametrize("dependent", [False, True])
def test_a_kernel_that_takes_a_workspace_is_given_its_address(kernels, monkeypatch, dependent):
    """Whatever the batch: tickets belong to blocks, of which a persistent grid has as many for any number of sequences."""
    cache = KVCache(8, 40, HEADS, DIM)
    sequences = cache.allocate(40)
    k, v = (torch.randn(40 * 3, HEADS, DIM).half() for _ in range(2))
    cache.append(sequences, k, v)
    q = torch.randn(40, 2, HEADS_Q, DIM).half()
    expected, expected_lse = cache.attend(sequences, q, return_lse=True)
    launched = []

    def with_workspace(w, target):
        kernel = kernels.find(w, target)
        run, names = kernel.run, kernel.params
        at = names.index("out")
        kernel.params = (*names[:at], "workspace", *names[at:])
        kernel.manifest = {"schedule": Schedule("attention_decode", 64, 8, DIM).to_json(), "target": target_from_name("sm_90a").to_json()}

        def run_with_workspace(early, *tensors):
            assert tensors[at] == 4096, "the workspace's address"
            launched.append((early, tensors[0].shape[0]))
            run(*tensors[:at], *tensors[at + 1 :])

        kernel.run, kernel.run_dependent = (partial(run_with_workspace, early) for early in (False, True))
        return kernel

    monkeypatch.setattr(plans, "find_kernel", with_workspace)
    monkeypatch.setattr(launchers, "workspace", lambda device, words: (4096, words, None))
    plans.forget()
    batch = cache.batch(sequences)
    batch.refresh()
    out, lse = cache.attend(batch, q, return_lse=True, dependent=dependent)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse) and launched == [(dependent, 40)]


WRONG = [
    ({"q": lambda t: t.float()}, "q, k and v is torch.float32"),
    ({"q": lambda t: t.bfloat16()[..., :32]}, "head_dim is 32"),
    ({"q": lambda t: t[:2]}, r"block_tables is int32 \[3, 6\] on cpu; .* needs int32 \[batch, max_pages\] on cpu with batch = 2"),
    ({"q": lambda t: t[0]}, r"decode got q float16 \[2, 4, 64\]"),
    ({"q": lambda t: t[:, :, :3]}, "heads_q is 3 and heads_kv 2"),
    ({"pages": lambda t: t[..., :-1].contiguous()}, r"pages is int32 \[6, 2, 2239\].* needs int32 \[num_pages, 2, 2240\]"),
    ({"pages": lambda t: t.view(torch.uint8)}, r"bytes become int32 by .view\(torch.int32\)"),
    ({"pages": lambda t: t.to("meta")}, "pages is on meta and q on cpu; accepted: all on one device"),
    ({"windows": lambda t: t[:, :1]}, r"windows is int32 \[4, 1, 8192\]"),
    ({"block_tables": lambda t: t.long()}, r"block_tables is int64"),
    ({"block_tables": lambda t: t[:, :0]}, r"block_tables is int32 \[3, 0\]"),
    ({"lengths": lambda t: t.long()}, r"lengths is int64 \[3\] on cpu; .* needs int32 \[batch\]"),
    ({"slots": lambda t: t[:2]}, r"slots is int32 \[2\]"),
    ({"format": lambda _: "int4"}, "unknown KV format 'int4'"),
    ({"page_size": lambda _: 100}, "page_size is 100; accepted: 16, 32, 64, 128, 256"),
    ({"sinks": lambda _: torch.ones(4).double()}, r"sinks is float64 \[4\]"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "says"), WRONG, ids=lambda x: "-".join(x) if isinstance(x, dict) else "")
def test_wrong_operands_are_named_before_a_launch(kernels, changes, says):
    p = problem()
    attention.decode(*decode_arguments(p))
    kernels.calls.clear()
    with pytest.raises(ValueError, match=says):
        attention.decode(*decode_arguments({**p, **{name: change(p[name]) for name, change in changes.items()}}))
    assert not kernels.calls


def test_fp8_needs_head_scales_and_others_ignore_them(kernels):
    p = problem("kvfp8")
    for _ in range(2):  # the second call has a plan
        with pytest.raises(ValueError, match=r"head_scales is missing; decode with kvfp8.* needs float32 \[2, 2\]"):
            attention.decode(*decode_arguments({**p, "head_scales": None}))
        attention.decode(*decode_arguments(p))
    with pytest.raises(ValueError, match=r"head_scales is float32 \[2, 3\]"):
        attention.decode(*decode_arguments({**p, "head_scales": torch.ones(2, 3)}))
    p = problem()
    assert torch.equal(
        attention.decode(*decode_arguments(p))[0], attention.decode(*decode_arguments({**p, "head_scales": torch.ones(2, 2)}))[0]
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"cu": lambda t: t[:3]}, r"lengths is int32 \[3\].* with batch = 2"),
        ({"v": lambda t: t[:-1]}, r"v is float16 \[429, 2, 64\].* with tokens = 430"),
        ({"v": lambda t: t.bfloat16()}, "v is bfloat16"),
        ({"k": lambda t: t[0]}, r"append got k float16 \[2, 64\]"),
        ({"windows": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)}, "contiguous and 16-byte aligned"),
    ],
)
def test_wrong_appends_are_named(kernels, change, says):
    p = problem()
    with pytest.raises(ValueError, match=says):
        attention.append(*append_arguments({**p, **{name: f(p[name]) for name, f in change.items()}}))


def test_cos_sin_and_rotary_go_together(kernels):
    p = problem()
    with pytest.raises(ValueError, match="rotary is ''"):
        attention.append(*append_arguments(p, torch.randn(400, DIM)))
    with pytest.raises(ValueError, match="cos_sin is missing"):
        attention.append(*append_arguments(p, None, "half"))
    with pytest.raises(ValueError, match="rotary is 'neox'"):
        attention.append(*append_arguments(p, torch.randn(400, DIM), "neox"))


# ---- dependent launch ----


def dependent_calls(p: dict[str, Any], dependent: bool) -> dict[str, tuple[Tensor, ...]]:
    """What each op gives, or, of append, leaves behind, by its name."""
    pages, windows, cu_q = p["pages"].clone(), p["windows"].clone(), torch.tensor([0, 2, 4, 6], dtype=torch.int32)
    attention.append(*append_arguments({**p, "pages": pages.zero_(), "windows": windows.zero_()}), dependent=dependent)
    packed, *cached = pack_arguments(p)
    attention.pack(packed, *cached, dependent=dependent)
    return {
        "append": (pages, windows),
        "pack": (packed,),
        "decode": attention.decode(*decode_arguments(p), return_lse=True, dependent=dependent),
        "gather": attention.gather(*gather_arguments(p), total=430, head_dim=DIM, dtype=torch.float16, dependent=dependent),
        "prefill": attention.prefill(p["q"].flatten(0, 1), p["k"], p["v"], cu_q, p["cu"], return_lse=True, dependent=dependent),
    }


@pytest.mark.parametrize(("option", "has", "taken"), [(False, True, "run"), (True, True, "run_dependent"), (True, False, "run")])
def test_dependent_launch_is_taken_when_asked_for_and_there(kernels, monkeypatch, option, has, taken):
    p = problem()
    expected = dependent_calls(p, False)
    launched = record_launches(kernels, monkeypatch, has)
    got = dependent_calls(p, option)
    assert launched == [(op, taken) for op in expected]
    for op, tensors in expected.items():
        assert all(torch.equal(a, b) for a, b in zip(got[op], tensors, strict=True)), op


def test_both_launches_are_one_plan_s(kernels, monkeypatch):
    """So that a capture finds the one that its warm-up did not take."""
    p = problem()
    launched = record_launches(kernels, monkeypatch)
    kernels.asked.clear()
    for option in (False, True, False):
        attention.decode(*decode_arguments(p), dependent=option)
    assert [name for _, name in launched] == ["run", "run_dependent", "run"] and len(kernels.asked) == 1


def test_opcheck_with_dependent_launch(kernels, monkeypatch):
    p = problem()
    launched = record_launches(kernels, monkeypatch)
    q, cu_q = torch.randn(6, HEADS_Q, DIM).half(), torch.tensor([0, 2, 4, 6], dtype=torch.int32)
    rows = {name: torch.zeros(430, HEADS, DIM).half() for name in ("out_k", "out_v")}
    prefill = [q, p["k"], p["v"], cu_q, p["cu"], None]
    succeeds(torch.ops.tilebit.attention_decode.default, decode_arguments(p), dependent=True)
    succeeds(torch.ops.tilebit.attention_decode.out, decode_arguments(p), dependent=True, out=torch.empty_like(p["q"]))
    succeeds(torch.ops.tilebit.attention_append.default, append_arguments(p), dependent=True)
    succeeds(torch.ops.tilebit.attention_pack.default, pack_arguments(p), dependent=True)
    succeeds(torch.ops.tilebit.attention_gather.default, [*gather_arguments(p), 430, DIM, torch.float16], dependent=True)
    succeeds(torch.ops.tilebit.attention_gather.out, gather_arguments(p), dependent=True, **rows)
    succeeds(torch.ops.tilebit.attention_prefill.default, prefill, dependent=True)
    succeeds(torch.ops.tilebit.attention_prefill.out, prefill, dependent=True, out=torch.empty_like(q))
    assert set(launched) == {(op, "run_dependent") for op in OPS}


def test_no_copy_comes_between_a_dependent_decode_and_what_it_reads_early(kernels, monkeypatch):
    """Of q a copy may be the preceding kernel; where anything else had to be copied, the launch is a plain one."""
    p = problem()
    expected, _ = attention.decode(*decode_arguments(p))
    wide = torch.cat((p["q"], p["q"]), dim=-1)[..., :DIM]
    odd = torch.cat((p["q"].flatten()[:1], p["q"].flatten()))[1:].view(p["q"].shape)
    tables = torch.cat((p["block_tables"], p["block_tables"]), dim=1)[:, : p["block_tables"].shape[1]]
    lengths, slots = (torch.stack((p[name], p[name]), dim=1)[:, 0] for name in ("lengths", "slots"))
    assert not wide.is_contiguous() and odd.data_ptr() % 16
    launched = record_launches(kernels, monkeypatch)
    plain = {"block_tables": tables, "lengths": lengths, "slots": slots}
    for name, operand, taken in (("q", wide, "run_dependent"), ("q", odd, "run"), *((name, t, "run") for name, t in plain.items())):
        out, _ = attention.decode(*decode_arguments({**p, name: operand}), dependent=True)
        assert torch.equal(out, expected) and launched == [("decode", taken)], name
        launched.clear()
    for name, operand, taken in (
        ("block_tables", p["block_tables"], "run_dependent"),
        ("block_tables", tables, "run"),
        ("slots", slots, "run"),
    ):
        attention.append(*append_arguments({**p, name: operand}), dependent=True)
        assert launched == [("append", taken)], name
        launched.clear()


def test_dependent_calls_are_refused_in_the_same_words(kernels, monkeypatch):
    p = problem()
    launched = record_launches(kernels, monkeypatch)
    for _ in range(2):  # the second call has a plan
        with pytest.raises(ValueError, match=r"lengths is int64 \[3\] on cpu; .* needs int32 \[batch\]"):
            attention.decode(*decode_arguments({**p, "lengths": p["lengths"].long()}), dependent=True)
        assert not launched
        attention.decode(*decode_arguments(p), dependent=True)
        launched.clear()


# ---- the drop-in, and partial results ----


@pytest.mark.parametrize("q_len", [1, 4])
def test_scaled_dot_product_decode_is_torch_s_attention(kernels, q_len):
    cache = KVCache(8, 2, HEADS, DIM, "kv16")
    sequences = cache.allocate(2)
    keys, values = (torch.randn(2, HEADS, 40, DIM).half() for _ in range(2))
    new_keys, new_values = (torch.randn(2, HEADS, q_len, DIM).half() for _ in range(2))
    cache.append(sequences, keys.transpose(1, 2), values.transpose(1, 2))
    query = torch.randn(2, HEADS_Q, q_len, DIM).half()
    out = attention.scaled_dot_product_decode(query, cache, sequences, new_keys, new_values, scale=0.2)
    k, v = torch.cat((keys, new_keys), dim=2), torch.cat((values, new_values), dim=2)
    mask = torch.ones(q_len, 40 + q_len, dtype=torch.bool).tril(40)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.float(), k.float(), v.float(), attn_mask=mask, enable_gqa=True, scale=0.2
    )
    torch.testing.assert_close(out.float(), expected, rtol=2e-3, atol=2e-3)
    assert torch.equal(attention.scaled_dot_product_decode(query, cache, sequences, scale=0.2), out), "appended once"
    assert [cache.length(h) for h in sequences] == [40 + q_len] * 2


def test_scaled_dot_product_decode_may_start_before_its_append_has_ended(kernels, monkeypatch):
    cache = KVCache(8, 2, HEADS, DIM)
    sequences = cache.allocate(2)
    launched = record_launches(kernels, monkeypatch)
    query, key = torch.randn(2, HEADS_Q, 3, DIM).half(), torch.randn(2, HEADS, 3, DIM).half()
    early = attention.scaled_dot_product_decode(query, cache, sequences, key, key, dependent=True)
    assert torch.equal(attention.scaled_dot_product_decode(query, cache, sequences), early)
    assert launched == [("append", "run"), ("decode", "run_dependent"), ("decode", "run")], "lengths were copied just before the append"


def test_scaled_dot_product_decode_says_what_is_missing(kernels):
    cache = KVCache(8, 2, HEADS, DIM)
    sequences = cache.allocate(2)
    query, key = torch.randn(2, HEADS_Q, 1, DIM).half(), torch.randn(2, HEADS, 2, DIM).half()
    for q, k, v, says in (
        (query[0], None, None, r"query is float16 \[4, 1, 64\]"),
        (query, key, None, "one of key and value is missing"),
        (query, key, key, "key has 2 new tokens and query 1"),
    ):
        with pytest.raises(ValueError, match=says):
            attention.scaled_dot_product_decode(q, cache, sequences, k, v)
    assert cache.length(sequences[0]) == 0


@pytest.mark.parametrize("cut", [0, 1, 60, 100])
def test_merged_parts_are_the_whole(cut):
    q, k, v = torch.randn(1, 6, DIM), torch.randn(100, 2, DIM), torch.randn(100, 2, DIM)
    out, lse = reference.attend(q, k, v)
    # Parts of one query's tokens: all of them come before it.
    parts = [reference.attend(q, k[where], v[where]) for where in (slice(0, cut), slice(cut, 100))]
    merged, merged_lse = attention.merge_states(*parts[0], *parts[1])
    torch.testing.assert_close(merged, out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(merged_lse.double(), lse, rtol=1e-5, atol=1e-5)
    swapped, _ = attention.merge_states(*parts[1], *parts[0])
    torch.testing.assert_close(swapped, merged)


def test_a_side_that_saw_nothing_counts_for_nothing_whatever_its_out_is():
    out, lse = torch.randn(2, 3, DIM), torch.randn(2, 3)
    nothing = torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)
    for merged in (attention.merge_states(out, lse, *nothing), attention.merge_states(*nothing, out, lse)):
        assert torch.equal(merged[0], out) and torch.equal(merged[1], lse)
    assert not attention.merge_states(*nothing, *nothing)[0].any()


def test_merging_nothing_with_nothing_is_nothing():
    out, lse = torch.zeros(2, 3, DIM).bfloat16(), torch.full((2, 3), -torch.inf)
    merged, merged_lse = attention.merge_states(out, lse, out, lse)
    assert merged.dtype == torch.bfloat16 and not merged.any() and (merged_lse == -torch.inf).all()
    with pytest.raises(ValueError, match="of one shape and dtype"):
        attention.merge_states(out, lse, out.half(), lse)
    with pytest.raises(ValueError, match="of one shape and dtype"):
        attention.merge_states(out, lse[0], out, lse)
