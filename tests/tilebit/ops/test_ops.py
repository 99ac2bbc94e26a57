"""The op: exact on the CPU through compiled kernels, any strides, any rows; traced, captured, and resolved once."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import time
import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import pytest
import torch
from door_cases import FORMATS, ROWS, K, N, exact, workload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tilebit
from tilebit import packs
from tilebit.kernels import build
from tilebit.ops import dispatch, launchers
from tilebit.ops import gemm as ops
from tilebit.ops import workspace as workspaces
from tilebit.ops.known import known
from tilebit.schedules.target import cpu_target

cases = pytest.mark.parametrize("case", FORMATS, ids=lambda case: f"{case[0]}-{case[1]}{'-bias' if case[2] else ''}")


@cases
@pytest.mark.parametrize("m", ROWS)
def test_results_are_exact(cpu_kernels, case, m):
    x, packed, bias, expected = exact(workload(case, m))
    assert torch.equal(tilebit.gemm(x, packed, bias), expected)


def test_any_leading_dimensions_and_strides(cpu_kernels):
    x, packed, bias, expected = exact(workload(FORMATS[0], 33))
    assert torch.equal(tilebit.gemm(x[0], packed, bias), expected[0])
    assert torch.equal(tilebit.gemm(x.view(3, 11, K), packed, bias), expected.view(3, 11, N))
    assert torch.equal(tilebit.gemm(x.t().contiguous().t(), packed, bias), expected), "columns apart"
    wide = torch.zeros(33, 2 * K, dtype=x.dtype)
    wide[:, ::2] = x
    assert torch.equal(tilebit.gemm(wide[:, ::2], packed, bias), expected), "every other column"
    assert torch.equal(tilebit.gemm(x[:1].expand(5, K), packed, bias), expected[:1].expand(5, N)), "rows of stride 0"
    shifted = torch.zeros(33 * K + 8, dtype=x.dtype)[1 : 1 + 33 * K].view(33, K)
    shifted.copy_(x)
    assert shifted.data_ptr() % 16 and torch.equal(tilebit.gemm(shifted, packed, bias), expected), "not aligned"


def test_no_rows_launch_nothing(launches):
    x, packed, _, _ = exact(workload(FORMATS[0], 1))
    for shape in ((0, K), (3, 0, K)):
        y = tilebit.gemm(x.new_empty(shape), packed)
        assert y.shape == (*shape[:-1], N) and y.dtype == x.dtype
    assert not launches.seen


def test_row_scales_reach_the_kernel(cpu_kernels):
    """Those of a format of two levels; another format's are refused, a missing one too, at a first call and later."""
    x, packed, bias, expected = exact(workload(("sample.two_levels", "bfloat16", True), 5))
    scales = packed.row_scales
    assert scales is not None and scales.dtype is torch.float32 and len(scales[:N].unique()) > 1
    layer = tilebit.QuantLinear(packed, bias)
    assert torch.equal(tilebit.gemm(x, packed, bias), expected) and torch.equal(layer(x), expected)
    call = partial(torch.ops.tilebit.gemm.default, x, packed.weight, packed.scales, packed.zeros)
    assert torch.equal(call(scales, bias, N, packed.format_name), expected)
    for wrong, says in ((None, "missing"), (scales.half(), "float16 .* needs float32"), (scales[1:], "float32 .* needs float32")):
        with pytest.raises(ValueError, match=f"^row_scales is {says}"):
            call(wrong, bias, N, packed.format_name)
    x, plain, bias, expected = exact(workload(FORMATS[1], 5))
    assert torch.equal(tilebit.gemm(x, plain, bias), expected)
    with pytest.raises(ValueError, match=r"^row_scales is float32 .* has none; pass None"):
        torch.ops.tilebit.gemm.default(x, plain.weight, plain.scales, plain.zeros, scales, bias, N, plain.format_name)


def test_a_permuted_weight_gathers_x(cpu_kernels):
    x, packed, _, expected = exact(workload(FORMATS[0], 5))
    perm = torch.randperm(K)
    shuffled = tilebit.PackedWeight(packed.weight, packed.scales, packed.zeros, N, K, packed.format, packed.dtype, "cpu", perm)
    original = torch.empty_like(x).index_copy_(1, perm, x)
    assert torch.equal(tilebit.gemm(original, shuffled), expected)


@cases
@pytest.mark.parametrize("option", [(), (True,)], ids=["plain", "dependent"])
def test_opcheck(cpu_kernels, case, option):
    x, packed, bias, _ = exact(workload(case, 5))
    arguments = (x, packed.weight, packed.scales, packed.zeros, packed.row_scales, bias, N, packed.format_name, *option)
    results = torch.library.opcheck(torch.ops.tilebit.gemm.default, arguments)
    assert set(results.values()) == {"SUCCESS"} and "test_aot_dispatch_dynamic" in results


def test_dependent_is_a_trailing_option_that_changes_no_result(cpu_kernels):
    assert str(torch.ops.tilebit.gemm.default._schema).endswith("str format, bool dependent=False) -> Tensor")
    x, packed, bias, expected = exact(workload(FORMATS[1], 5))
    assert torch.equal(tilebit.gemm(x, packed, bias, dependent=True), expected)
    tilebit.prepare(packed, m=[5], bias=True, dependent=True)


@pytest.mark.parametrize("dependent", [False, True])
def test_compiles_without_graph_breaks_for_every_m(cpu_kernels, dependent):
    x, packed, bias, expected = exact(workload(FORMATS[1], 33))
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    traced = torch.compile(lambda x: tilebit.gemm(x * 1, packed, bias, dependent), fullgraph=True, dynamic=True, backend=backend)
    for m in (33, 5, 17):
        assert torch.equal(traced(x[:m].clone()), expected[:m])
    assert len(graphs) == 1, "m is dynamic: one graph serves every m"


def test_a_kernel_is_resolved_once_per_bucket(cpu_kernels, monkeypatch):
    x, packed, bias, expected = exact(workload(FORMATS[0], 33))
    dispatch.forget()
    tilebit.prepare(packed, m=[33, 64])
    monkeypatch.setattr(dispatch, "find_kernel", lambda *_: pytest.fail("looked up again"))
    assert torch.equal(tilebit.gemm(x, packed, bias), expected)
    dispatch.forget()


def test_a_weight_that_was_checked_is_checked_by_the_kernel(cpu_kernels):
    """A second call with the same weight and wrong company: the kernel refuses before it launches, in the operator's words."""
    x, packed, bias, expected = exact(workload(FORMATS[1], 5))
    assert packed.zeros is not None and bias is not None
    good = {"scales": packed.scales, "zeros": packed.zeros, "row_scales": packed.row_scales, "bias": bias}
    for wrong in (
        {"scales": packed.scales[:-1]},
        {"zeros": packed.zeros[:, :-1]},
        {"bias": torch.cat((bias, bias))},
        {"bias": bias.half()},
    ):
        assert torch.equal(tilebit.gemm(x, packed, bias), expected)
        (name,) = wrong
        with pytest.raises(ValueError, match=f"^{name} is .* need"):
            torch.ops.tilebit.gemm.default(x, packed.weight, *{**good, **wrong}.values(), N, packed.format_name)
    assert torch.equal(tilebit.gemm(x, packed, bias), expected)


def test_a_checked_weight_whose_company_changed_is_checked_again(cpu_kernels, monkeypatch):
    """Later calls look at the weight's identity, not at x's dtype or at other operands: casting a layer leaves its weight where it is."""
    x, packed, bias, expected = exact(workload(FORMATS[1], 5))
    assert packed.zeros is not None and bias is not None

    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        others = (packed.scales.to(dtype), packed.zeros.to(dtype), None, bias.to(dtype))
        y = torch.ops.tilebit.gemm.default(x.to(dtype), packed.weight, *others, N, packed.format_name)
        assert y.dtype is dtype
        torch.testing.assert_close(y.bfloat16(), expected, rtol=2**-7, atol=0)  # one rounding of one more or one less
    for rows in (x, x[:0]):
        with pytest.raises(ValueError, match=r"^scales is bfloat16 .* x of float16 .* needs float16"):
            torch.ops.tilebit.gemm.default(
                rows.half(), packed.weight, packed.scales, packed.zeros, packed.row_scales, bias, N, packed.format_name
            )
        with pytest.raises(ValueError, match=r"^x is float32 .*accepted: float16 or bfloat16"):
            torch.ops.tilebit.gemm.default(
                rows.float(), packed.weight, packed.scales, packed.zeros, packed.row_scales, bias, N, packed.format_name
            )
    for plan in dispatch.plans.values():  # kernels are forgotten, which weight was checked for which plan is not
        plan.launchers.clear()
        plan._launchers.clear()
    asked = []
    monkeypatch.setattr(dispatch, "find_kernel", lambda w, target: asked.append(w.dtype) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        torch.ops.tilebit.gemm.default(
            x.half()[:2], packed.weight, packed.scales.half(), packed.zeros.half(), None, bias.half(), N, packed.format_name
        )
    assert asked == ["float16"], "no kernel of the other dtype is looked for, which might be compiled"


def test_without_a_compiler_the_error_says_how_to_build(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEBIT_CACHE", str(tmp_path))
    monkeypatch.setenv("TILEBIT_NO_COMPILE", "1")
    dispatch.forget()
    x, packed, bias, _ = exact(workload(FORMATS[1], 5))
    with pytest.raises(tilebit.KernelUnavailable) as caught:
        tilebit.gemm(x, packed, bias)
    # For the most rows that the kernel serves, which this processor's portfolio says.
    arguments = rf"--n {N} --k {K} --m [5-9] --format w4a16_g32_asym --dtype bfloat16 --bias --target cpu"
    for command in ("tilebit compile", "tilebit pack PATH"):
        assert re.search(f"{command} {arguments}", str(caught.value)), caught.value
    dispatch.forget()


def test_packs_come_first_and_serve_every_m(cpu_kernels, monkeypatch, tmp_path):
    w = workload(FORMATS[0], 8)
    (kernel,) = build([w], cpu_target())
    packs.export(tmp_path / "pack", [kernel])
    monkeypatch.setenv("TILEBIT_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("TILEBIT_NO_COMPILE", "1")
    pack = packs.load(tmp_path / "pack")
    try:
        for m in (1, 5, 33):
            x, packed, _, expected = exact(w.with_m(m))
            assert torch.equal(tilebit.gemm(x, packed), expected)
    finally:
        packs.unload(pack)
    with pytest.raises(tilebit.KernelUnavailable, match="tilebit pack"):
        tilebit.gemm(x, packed)


def test_importing_tilebit_imports_neither_torch_nor_a_compiler():
    code = "import sys, tilebit; tilebit.QuantFormat; print(*{'torch', 'tvm', 'tilelang', 'tvm_ffi'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stdout.split(), done.stdout + done.stderr


@pytest.mark.parametrize("name", [*tilebit.__all__, "packs", "attention"])
def test_every_public_name_is_there(name):
    assert getattr(tilebit, name) is not None and name in dir(tilebit)


# ---- the operator, and the direct way past it ----


@pytest.fixture
def reached(monkeypatch) -> list[str]:
    """The calls that went through the operator."""
    seen: list[str] = []
    operator = ops._operator
    monkeypatch.setattr(ops, "_operator", lambda *arguments: (seen.append("gemm"), operator(*arguments))[1])
    return seen


@cases
def test_an_eager_call_goes_past_the_operator_to_the_same_bits(cpu_kernels, reached, case):
    x, packed, bias, _ = exact(workload(case, 5))
    x = torch.randn(5, K).to(x.dtype)
    through = torch.ops.tilebit.gemm.default(x, packed.weight, packed.scales, packed.zeros, packed.row_scales, bias, N, packed.format_name)
    layer = tilebit.QuantLinear(packed, bias)
    frozen = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
    for mode in (nullcontext, torch.no_grad, torch.inference_mode):
        with mode():
            assert all(torch.equal(y, through) for y in (tilebit.gemm(x, packed, bias), tilebit.gemm(x, packed, frozen), layer(x)))
            assert tilebit.gemm(x[:0], packed, bias).shape == (0, N)
    assert not reached
    with pytest.raises(ValueError, match=r"^x is float32"):
        tilebit.gemm(x.float(), packed, bias)
    assert not reached, "a call that is refused is not tried twice"


class DispatchLog(TorchDispatchMode):
    seen: tuple[str, ...] = ()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += (str(func),)
        return func(*args, **(kwargs or {}))


class FunctionLog(TorchFunctionMode):
    seen: tuple[str, ...] = ()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen += (str(func),)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [DispatchLog, FunctionLog])
def test_a_mode_sees_the_operator(cpu_kernels, mode):
    x, packed, bias, expected = exact(workload(FORMATS[1], 5))
    layer = tilebit.QuantLinear(packed, bias)
    with mode() as log:
        assert torch.equal(tilebit.gemm(x, packed, bias), expected) and torch.equal(layer(x), expected)
    assert log.seen.count("tilebit.gemm.default") == 2


def test_fake_and_meta_tensors_meet_the_fake(launches):
    x, packed, bias, _ = exact(workload(FORMATS[1], 5))
    assert packed.zeros is not None
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inside = tilebit.gemm(mode.from_tensor(x), packed, bias)
    weight, scales, zeros = (mode.from_tensor(t) for t in (packed.weight, packed.scales, packed.zeros))
    outside = tilebit.gemm(mode.from_tensor(x), tilebit.PackedWeight(weight, scales, zeros, N, K, packed.format, packed.dtype, "cpu"))
    for y in (inside, outside):
        assert isinstance(y, FakeTensor) and y.shape == (5, N) and y.dtype == x.dtype
    y = tilebit.QuantLinear(packed, bias).to("meta")(x.to("meta"))
    assert y.is_meta and y.shape == (5, N) and not launches.seen


@pytest.mark.parametrize("options", [*({"tracing_mode": mode} for mode in ("real", "fake", "symbolic")), {"pre_dispatch": True}])
def test_make_fx_records_the_operator(cpu_kernels, options):
    x, packed, bias, expected = exact(workload(FORMATS[1], 5))
    graph = make_fx(lambda x: tilebit.gemm(x, packed, bias), **options, _allow_non_fake_inputs=True)(x)
    assert [node.target for node in graph.graph.nodes].count(torch.ops.tilebit.gemm.default) == 1
    assert torch.equal(graph(x), expected)


@pytest.mark.filterwarnings("ignore")
def test_jit_and_export_record_the_operator(cpu_kernels):
    x, packed, bias, expected = exact(workload(FORMATS[1], 5))
    layer = tilebit.QuantLinear(packed, bias)
    traced = cast(Any, torch.jit.trace(lambda x: tilebit.gemm(x, packed, bias), x, check_trace=False))
    assert "tilebit::gemm" in str(traced.graph) and torch.equal(traced(x), expected)
    for strict in (True, False):
        exported = torch.export.export(layer, (x,), strict=strict)
        assert "torch.ops.tilebit.gemm.default" in exported.graph_module.code and torch.equal(exported.module()(x), expected)


def test_transforms_meet_the_operator(cpu_kernels, reached):
    x, packed, bias, expected = exact(workload(FORMATS[1], 5))
    y = torch.vmap(lambda row: tilebit.gemm(row, packed, bias))(x)
    assert torch.equal(y, expected) and reached
    reached.clear()
    torch.vmap(lambda _: tilebit.gemm(x, packed, bias))(torch.zeros(2))
    assert reached, "under a transform that x has no part in"
    reached.clear()
    torch.func.jvp(lambda x: tilebit.gemm(x, packed, bias), (x,), (x,))
    assert reached


def test_the_profiler_sees_the_operator(cpu_kernels, reached):
    x, packed, bias, _ = exact(workload(FORMATS[1], 5))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        tilebit.gemm(x, packed, bias)
    assert "tilebit::gemm" in {event.key for event in profile.key_averages()}
    reached.clear()
    tilebit.gemm(x, packed, bias)
    assert not reached, "once it has ended, calls are direct again"


def test_what_requires_grad_meets_the_operator(cpu_kernels, reached):
    x, packed, bias, expected = exact(workload(FORMATS[1], 5))
    assert bias is not None
    for arguments in ((x.clone().requires_grad_(), packed, bias), (x, packed, torch.nn.Parameter(bias))):
        reached.clear()
        y = tilebit.gemm(*arguments)
        assert reached and y.requires_grad and torch.equal(y.detach(), expected)
        reached.clear()
        with torch.no_grad():
            y = tilebit.gemm(*arguments)
        assert not reached and not y.requires_grad


class Observing(torch.Tensor):
    """A subclass that observes through ``__torch_function__`` only."""


@pytest.mark.parametrize("which", ["x", "weight", "scales", "zeros", "bias"])
def test_a_subclass_meets_the_operator(cpu_kernels, reached, which):
    x, packed, bias, expected = exact(workload(FORMATS[1], 5))
    operands: dict[str, Any] = {
        "x": x,
        "weight": packed.weight,
        "scales": packed.scales,
        "zeros": packed.zeros,
        "row_scales": packed.row_scales,
        "bias": bias,
    }
    operands[which] = operands[which].as_subclass(Observing)
    y = ops.call(**operands, n=N, format="w4a16_g32_asym", dependent=False)
    assert reached and type(y) is Observing and torch.equal(y.as_subclass(torch.Tensor), expected)


def lazily(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """The same values, with a sign that is not in memory."""
    if how == "negated":
        return torch._neg_view(-tensor)  # pyright: ignore[reportPrivateImportUsage]
    return torch.complex(torch.zeros_like(tensor, dtype=torch.float32), -tensor.float()).conj().imag  # of 32 bits


@pytest.mark.parametrize("which", ["x", "weight", "scales", "zeros", "row_scales", "bias"])
def test_lazy_signs_are_written_out(cpu_kernels, which):
    """Those of every operand, at a first call and later, through the operator and past it."""
    x, packed, bias, expected = exact(workload(("sample.two_levels", "bfloat16", True), 5))
    if which == "zeros":
        x, packed, bias, expected = exact(workload(FORMATS[1], 5))
    good: dict[str, Any] = {
        "x": x, "weight": packed.weight, "scales": packed.scales, "zeros": packed.zeros, "row_scales": packed.row_scales, "bias": bias,
    }  # fmt: skip
    lazy = lazily(good[which], "negated")
    assert lazy.is_neg() and not torch.equal(torch.from_dlpack(-lazy), good[which])
    options = (N, packed.format_name, False)
    for _ in range(2):
        for call in (cast(Any, ops.call), torch.ops.tilebit.gemm.default):
            assert torch.equal(call(*{**good, which: lazy}.values(), *options), expected)
            assert torch.equal(call(*good.values(), *options), expected)
        dispatch.forget()
    if which == "row_scales":  # of 32 bits, as the parts of complex numbers are
        imaginary = lazily(good[which], "conjugated")
        assert imaginary.is_neg()
        assert torch.equal(cast(Any, ops.call)(*{**good, which: imaginary.contiguous()}.values(), *options), expected)


def test_a_layer_with_lazy_signs(cpu_kernels):
    x, packed, bias, expected = exact(workload(FORMATS[1], 5))
    layer = tilebit.QuantLinear(packed, bias)
    for name in ("bias", "scales", "weight", "zeros"):
        good = getattr(layer, name)
        setattr(layer, name, lazily(good, "negated"))
        assert torch.equal(layer(x), expected), name
        setattr(layer, name, good)


def test_what_is_known_of_a_weight_lives_as_long_as_it_does(cpu_kernels):
    """Also what it came along with; and another weight at the same address is another one."""
    x, packed, bias, expected = exact(workload(FORMATS[1], 5))
    dispatch.forget()
    assert torch.equal(tilebit.gemm(x, packed, bias), expected)
    held = [weakref.ref(t) for t in (packed.weight, packed.scales, bias)]
    assert len(known) == 1
    del packed, bias
    gc.collect()
    assert not known and all(reference() is None for reference in held)


@pytest.mark.parametrize("which", ["x", "weight", "scales", "zeros", "bias"])
@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
def test_freed_storage_is_an_error(cpu_kernels, which, later):
    """At a first call, and by the kernel itself at every later one; a crash would take the run along."""
    x, packed, bias, expected = exact(workload(FORMATS[1], 5))
    operands: dict[str, Any] = {
        "x": x, "weight": packed.weight, "scales": packed.scales, "zeros": packed.zeros, "row_scales": None, "bias": bias,
    }  # fmt: skip
    calls = (cast(Any, ops.call), torch.ops.tilebit.gemm.default)
    options = (N, packed.format_name, False)
    if later:
        assert all(torch.equal(call(*operands.values(), *options), expected) for call in calls)
    storage = operands[which].untyped_storage()
    kept, size = torch.tensor(list(storage), dtype=torch.uint8), storage.nbytes()
    storage.resize_(0)
    for call in calls:
        with pytest.raises(ValueError, match=rf"{which} .*storage was (shrunk or )?freed"):
            call(*operands.values(), *options)
    storage.resize_(size)
    storage.copy_(kept.untyped_storage())
    assert all(torch.equal(call(*operands.values(), *options), expected) for call in calls), "filled again, it is used again"


@pytest.mark.parametrize("which", ["weight", "scales", "zeros", "bias"])
def test_shrunk_storage_is_an_error_at_a_first_call(cpu_kernels, which):
    x, packed, bias, _ = exact(workload(FORMATS[1], 5))
    operands: dict[str, Any] = {"weight": packed.weight, "scales": packed.scales, "zeros": packed.zeros, "row_scales": None, "bias": bias}
    shared = torch.zeros(1 << 20, dtype=operands[which].dtype)
    view = shared[1 << 19 :][: operands[which].numel()].view(operands[which].shape)
    shared.untyped_storage().resize_(1 << 10)
    with pytest.raises(ValueError, match=rf"^{which} is .* whose storage was shrunk or freed: it has 1024 of the .* bytes"):
        ops.call(x, **{**operands, which: view}, n=N, format=packed.format_name, dependent=False)


@pytest.mark.parametrize("which", ["x", "weight", "scales", "zeros", "bias"])
def test_with_checks_a_shrunk_storage_is_an_error_at_any_call(cpu_kernels, monkeypatch, which):
    monkeypatch.setattr(launchers, "CHECKED", True)
    dispatch.forget()
    x, packed, bias, _ = exact(workload(FORMATS[1], 5))
    operands: dict[str, Any] = {
        "x": x,
        "weight": packed.weight,
        "scales": packed.scales,
        "zeros": packed.zeros,
        "row_scales": None,
        "bias": bias,
    }
    call = partial(ops.call, **operands, n=N, format=packed.format_name, dependent=False)
    expected, storage = call(), operands[which].untyped_storage()
    kept, size = torch.tensor(list(storage), dtype=torch.uint8), storage.nbytes()
    storage.resize_(16)
    with pytest.raises(ValueError, match=rf"^{which} is .* whose storage was shrunk or freed: it has 16 of the"):
        call()
    storage.resize_(size)
    storage.copy_(kept.untyped_storage())
    assert torch.equal(call(), expected)
    dispatch.forget()


def test_dependent_must_be_a_bool(cpu_kernels):
    x, packed, bias, _ = exact(workload(FORMATS[1], 5))
    with pytest.raises(RuntimeError, match="dependent"):
        tilebit.gemm(x, packed, bias, "yes")  # type: ignore[arg-type]


# ---- on a GPU ----


GPU_ROWS = (1, 33, 300)
GPU_SHAPES = ((N, K), (513, 1003))


def gpu_arch() -> str:
    return dispatch.device_target(torch.device("cuda", 0)).arch


@pytest.fixture(scope="module")
def gpu_kernels() -> None:
    """The kernels of the tests below, compiled in parallel."""
    target = dispatch.device_target(torch.device("cuda", 0))
    wanted = [workload(case, m, n, k) for case in FORMATS for m in GPU_ROWS for n, k in GPU_SHAPES]
    wanted += [workload(case, m, 512, 4096) for case in FORMATS[:2] for m in (1, 8, 16, 64)]
    build(wanted, target, jobs=None)


@pytest.mark.gpu
@cases
@pytest.mark.parametrize("m", GPU_ROWS)
def test_results_are_exact_on_a_gpu(gpu_kernels, case, m):
    for n, k in GPU_SHAPES:
        x, packed, bias, expected = exact(workload(case, m, n, k), arch=gpu_arch(), device="cuda")
        assert torch.equal(tilebit.gemm(x, packed, bias), expected), (n, k)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16, 64])
def test_capture_and_replay(gpu_kernels, m):
    """A graph replays on its own workspace: eager calls between replays, on any stream, change nothing."""
    x, packed, _, expected = exact(workload(FORMATS[0], m, 512, 4096), arch=gpu_arch(), device="cuda")
    tilebit.prepare(packed, m=[m])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = tilebit.gemm(tilebit.gemm(x, packed).new_zeros(x.shape) + x, packed)
        z = tilebit.gemm(x, packed)
    other = torch.cuda.Stream()
    for _ in range(10):
        y.fill_(float("nan"))
        z.fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay()
        with torch.cuda.stream(other):
            eager = tilebit.gemm(x, packed)
        torch.cuda.synchronize()
        assert torch.equal(y, expected) and torch.equal(z, expected) and torch.equal(eager, expected)


@pytest.mark.gpu
def test_the_first_call_may_not_be_captured():
    x, packed, _, _ = exact(workload(FORMATS[0], 4, 320, 384), arch=gpu_arch(), device="cuda")
    dispatch.forget()
    with pytest.raises(tilebit.KernelUnavailable, match=r"tilebit.prepare\(packed, m=\[4\]\)"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        tilebit.gemm(x, packed)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_torch_compile_on_a_gpu(gpu_kernels, mode):
    x, packed, bias, expected = exact(workload(FORMATS[1], 8, 512, 4096), arch=gpu_arch(), device="cuda")
    tilebit.prepare(packed, m=[8], bias=True)
    traced = torch.compile(lambda x: tilebit.gemm(x * 1, packed, bias) * 1, fullgraph=True, mode=mode)
    for _ in range(5):
        assert torch.equal(traced(x.clone()), expected)


@pytest.mark.gpu
def test_peak_memory_is_the_output_and_the_workspace():
    x, packed, _, _ = exact(workload(FORMATS[0], 256, 4096, 4096), arch=gpu_arch(), device="cuda")
    tilebit.prepare(packed, m=[256])
    workspaces.release()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = tilebit.gemm(x, packed)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before - y.numel() * y.element_size()
    assert extra <= workspaces.LIMIT_BYTES + (1 << 20) * 2


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(256, 256), (512, 4096)])
def test_host_time_of_a_call(n, k):
    """With and without a workspace (the longer k is split), in turn with torch's product of these sizes, which a busy machine slows down,
    too."""
    x, packed, _, _ = exact(workload(FORMATS[0], 1, n, k), arch=gpu_arch(), device="cuda")
    dense = torch.randn(n, k, dtype=x.dtype, device="cuda")
    tilebit.prepare(packed, m=[1])
    calls = {"tilebit": lambda: tilebit.gemm(x, packed), "torch": lambda: torch.nn.functional.linear(x, dense)}
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(20):
        for name, call in calls.items():
            call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(200):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / 200)
    assert best["tilebit"] <= best["torch"], best
