"""The host side of a CUDA kernel, without a GPU: a recording libcuda.so.1 shows what the stub asks of the driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from toolchain import needs_nvcc

from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import candidates
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name
from tilebit.tiles.compiler.compile import CompileRequest, compile_kernel
from tilebit.tiles.compiler.host_plan import PITCH, HostPlan, KernelArg, Launch, Param
from tilebit.tiles.compiler.host_stub import StubError, c_compiler, compile_stub, generate_stub
from tilebit.tiles.compiler.kernel import Kernel

HERE = Path(__file__).parents[1]
SAMPLE = HERE / "sample"
sys.path.append(str(HERE))  # "sample.w4a16" names a program by its module; workers search what this process searches

N, K, BM = 256, 512, 64
SLOTS = 32  # TB_MAP_SLOTS of host_runtime.h
MS = (1, 63, 64, 65, 1000)
HALF, WORD, BFLOAT = [2, 16], [1, 32], [4, 16]
SAMPLE_REQUEST = CompileRequest(
    "sample.w4a16", Workload(64, N, K), Schedule("sample.w4a16", 128, BM, 128, num_stages=2, num_warps=8), target_from_name("sm_90a")
)
OF_THE_LIBRARY = (("sm_90a", True), ("sm_80", False))  # with and without a split


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the recording libcuda.so.1."""
    folder = tmp_path_factory.mktemp("driver")
    subprocess.run([c_compiler(), "-shared", "-fPIC", "-O1", str(SAMPLE / "fake_cuda.c"), "-o", str(folder / "libcuda.so.1")], check=True)
    return folder


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    """The sample W4A16 kernel for sm_90a: two tensor maps, dynamic shared memory, dynamic m."""
    return compile_kernel(SAMPLE_REQUEST)


def arguments(m: int, base: int = 1 << 30) -> list[dict[str, Any]]:
    """Tensors x, weight, scales, zeros, y of the sample at distinct addresses."""
    shapes = ([m, K], [N // 64, K // 32, 256], [K // 128, N], [K // 128, N], [m, N])
    dtypes = (HALF, WORD, HALF, HALF, HALF)
    return [{"address": base + (i << 24), "shape": s, "dtype": d} for i, (s, d) in enumerate(zip(shapes, dtypes, strict=True))]


@dataclass
class Recording:
    outcomes: list[Any]
    log: list[dict[str, Any]]

    def calls(self, name: str) -> list[dict[str, Any]]:
        return [entry for entry in self.log if entry["call"] == name]


def play(library: Path, calls: list[dict[str, Any]], driver: Path | None, folder: Path, params: str = "", fail: str = "") -> Recording:
    """Run ``calls`` in a new process against the recording driver (or none at all)."""
    log, script = folder / "log.jsonl", folder / "calls.json"
    log.write_text("")
    script.write_text(json.dumps(calls))
    env = {**os.environ, "FAKE_CUDA_LOG": str(log), "FAKE_CUDA_PARAMS": params, "FAKE_CUDA_FAIL": fail}
    env["LD_LIBRARY_PATH"] = str(driver or folder)
    done = subprocess.run(
        [sys.executable, str(SAMPLE / "fake_call.py"), str(library), str(script)], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return Recording(json.loads(done.stdout.splitlines()[-1]), [json.loads(line) for line in log.read_text().splitlines()])


def of_the_library(arch: str, split: bool) -> CompileRequest:
    workload, target = Workload(16, 256, 1024), target_from_name(arch)
    schedule = next(s for s in candidates(workload, target) or [] if (s.split_k > 1) == split)
    return CompileRequest(schedule.program, workload, schedule, target)


@pytest.fixture(scope="module")
def host_values(tmp_path_factory: pytest.TempPathFactory) -> dict[CompileRequest, dict[str, Any]]:
    """{m: tensor maps, grid, block, shared memory, arguments} by TVM's own arithmetic on lowered host functions, in another process: one
    for all of them, which imports TileLang for seconds."""
    requests, kernels = [SAMPLE_REQUEST, *(of_the_library(*case) for case in OF_THE_LIBRARY)], []
    for request in requests:
        w = request.workload
        assert isinstance(w, Workload), "a GEMM"
        schedule = request.schedule.to_json()
        kernels.append({"program": request.program, "n": w.n, "k": w.k, "schedule": schedule, "arch": request.target.arch})
    path = tmp_path_factory.mktemp("lowered") / "kernels.json"
    path.write_text(json.dumps(kernels))
    command = [sys.executable, str(SAMPLE / "host_values.py"), str(path), *map(str, MS)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(HERE)}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return dict(zip(requests, json.loads(done.stdout.splitlines()[-1]), strict=True))


def assert_plays(kernel: Kernel, expected: dict[str, Any], driver: Path, folder: Path) -> Recording:
    """Every launch of ``kernel`` asks of the driver exactly what the lowered host function says, for every m of ``MS``."""
    first = expected[str(MS[0])]["args"]
    kinds = "".join("m" if str(a).endswith("_desc") else "p" if isinstance(a, str) else "i" for a in first)
    calls = [tensors(kernel, m) for m in MS]
    recording = play(
        kernel.path / "kernel.so", [{"args": a, "stream": 77 + m} for m, a in zip(MS, calls, strict=True)], driver, folder, kinds
    )
    assert recording.outcomes == [None] * len(MS)
    launches = recording.calls("launch")
    addresses = {name: spec["address"] for name, spec in zip(expected["names"], calls[0], strict=True)}
    by_id = {e["id"]: e for e in recording.calls("encode")}
    for m, launch in zip(MS, launches, strict=True):
        want = expected[str(m)]
        assert {name: launch[name] for name in ("grid", "block", "smem")} == {name: want[name] for name in ("grid", "block", "smem")}
        assert launch["stream"] == 77 + m and launch["context"] == 0x1000
        for kind, name, got in zip(kinds, want["args"], launch["params"], strict=True):
            if kind == "p":
                assert got == addresses[name]
            elif kind == "i":
                assert got == name
            else:
                described = want["maps"][name]
                assert by_id[got]["address"] == addresses[described["of"]]
                for field in ("dtype", "dims", "strides", "box", "steps", "options"):
                    assert by_id[got][field] == described[field], (name, field)
    smem = launches[0]["smem"]
    wanted = [{"call": "attribute", "kernel": launches[0]["kernel"], "attribute": 8, "value": smem}] if smem else []
    assert recording.calls("attribute") == wanted
    return recording


def tensors(kernel: Kernel, m: int) -> list[dict[str, Any]]:
    """Arguments for any kernel, read from its manifest; dimensions other than m are as long as they like."""
    codes = {"float16": HALF, "bfloat16": BFLOAT, "uint32": WORD, "int32": [0, 32], "float32": [2, 32]}
    params = kernel.manifest["params"]
    shapes = [[d if isinstance(d, int) else m if d == "m" else 4096 for d in p["shape"]] for p in params]
    return [{"address": (i + 1) << 30, "shape": s, "dtype": codes[p["dtype"]]} for i, (p, s) in enumerate(zip(params, shapes, strict=True))]


@needs_nvcc
@pytest.mark.slow
def test_launches_are_what_the_lowered_host_function_says(kernel: Kernel, host_values: Any, driver: Path, tmp_path: Path) -> None:
    recording = assert_plays(kernel, host_values[SAMPLE_REQUEST], driver, tmp_path)
    launches, encodes = recording.calls("launch"), recording.calls("encode")
    assert [launch["grid"] for launch in launches] == [[N // 128, -(-m // BM), 1] for m in MS]
    assert [launch["params"][-1] for launch in launches] == list(MS)
    # the weight's map does not depend on m: encoded once; x's once for every m
    x, weight = (spec["address"] for spec in tensors(kernel, 1)[:2])
    assert len([e for e in encodes if e["address"] == weight]) == 1
    assert [e["dims"][1] for e in encodes if e["address"] == x] == list(MS)
    assert len(recording.calls("load")) == 1 and recording.calls("load")[0]["elf"] == 1 and recording.calls("load")[0]["context"] == 0x1000
    assert [c["mode"] for c in recording.calls("capture_mode")] == [2, 0]


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize(("arch", "split"), OF_THE_LIBRARY)
def test_the_library_s_programs_launch_what_they_were_lowered_to(
    host_values: Any, driver: Path, tmp_path: Path, arch: str, split: bool
) -> None:
    request = of_the_library(arch, split)
    recording = assert_plays(compile_kernel(request), host_values[request], driver, tmp_path)
    schedule = request.schedule
    n_tiles = -(-256 // schedule.block_n)
    blocks = [g[0] * g[1] * g[2] for g in (launch["grid"] for launch in recording.calls("launch"))]
    assert blocks == [n_tiles * -(-m // schedule.block_m) * schedule.split_k for m in MS]


@needs_nvcc
def test_no_rows_launch_nothing(kernel: Kernel, driver: Path, tmp_path: Path) -> None:
    empty = arguments(0)
    empty[0]["address"] = empty[4]["address"] = 0
    recording = play(kernel.path / "kernel.so", [{"args": empty}, {"args": arguments(3)}], driver, tmp_path)
    assert recording.outcomes == [None, None]
    assert len(recording.calls("launch")) == 1
    assert all(e["dims"][-1] > 0 for e in recording.calls("encode"))


@needs_nvcc
def test_tensor_maps_are_cached_by_pointer_and_dimensions(kernel: Kernel, driver: Path, tmp_path: Path) -> None:
    one, other = arguments(5), arguments(5, base=1 << 32)
    recording = play(kernel.path / "kernel.so", [{"args": a} for a in (one, one, other, one, other)], driver, tmp_path, "pmmppi")
    assert recording.outcomes == [None] * 5
    assert len(recording.calls("encode")) == 4  # weight and x, at two places
    ids = [tuple(launch["params"][1:3]) for launch in recording.calls("launch")]
    assert ids[0] == ids[1] == ids[3] and ids[2] == ids[4] and not set(ids[0]) & set(ids[2])


@needs_nvcc
def test_what_shares_a_slot_is_encoded_anew(kernel: Kernel, driver: Path, tmp_path: Path) -> None:
    """More row counts of one pointer, and more pointers of one row count, than there are slots, there and back: whatever the hash, some
    that follow one another share a slot."""
    calls = [arguments(m) for m in range(1, 2 * SLOTS)] + [arguments(5, base=(1 << 30) + 16 * i) for i in range(2 * SLOTS)]
    calls += calls[::-1]
    recording = play(kernel.path / "kernel.so", [{"args": call} for call in calls], driver, tmp_path, "pmmppi")
    assert recording.outcomes == [None] * len(calls)
    encoded = {entry["id"]: entry for entry in recording.calls("encode")}
    for (x, weight, *_), launch in zip(calls, recording.calls("launch"), strict=True):
        maps = {encoded[id]["address"]: encoded[id] for id in launch["params"][1:3]}
        assert maps.keys() == {x["address"], weight["address"]}
        assert maps[x["address"]]["dims"][1] == x["shape"][0]


@needs_nvcc
def test_second_device_gets_its_own_module_and_context(kernel: Kernel, driver: Path, tmp_path: Path) -> None:
    far = [{**a, "device": 1} for a in arguments(2)]
    recording = play(
        kernel.path / "kernel.so",
        [{"args": [1], "function": "prepare"}, {"args": arguments(2)}, {"args": far}, {"args": far}],
        driver,
        tmp_path,
    )
    assert recording.outcomes == [None] * 4
    assert [e["context"] for e in recording.calls("load")] == [0x1001, 0x1000]
    assert [e["context"] for e in recording.calls("launch")] == [0x1000, 0x1001, 0x1001]


def bad_calls() -> list[tuple[str, list[Any], str, str]]:
    """(name, arguments, error type, words that the message must contain)."""

    def change(index: int, **fields: Any) -> list[Any]:
        args = arguments(4)
        args[index] = {**args[index], **fields}
        return args

    rows = [
        ("too few", arguments(4)[:4], "TypeError", "got 4 arguments; accepted: 5 (x, weight, scales, zeros, y)"),
        ("a number", [3, *arguments(4)[1:]], "TypeError", "'x' is no tensor"),
        ("nothing", [None, *arguments(4)[1:]], "TypeError", "'x' is no tensor"),
        ("host memory", change(2, device_type=1), "ValueError", "'scales' is on device type 1"),
        ("another device", change(4, device=1), "ValueError", "'y' is on cuda:1"),
        ("x of bfloat16", change(0, dtype=BFLOAT), "TypeError", "'x' has dtype bfloat16; accepted: float16"),
        ("weight of float32", change(1, dtype=[2, 32]), "TypeError", "'weight' has dtype float32; accepted: uint32"),
        ("weight of int64", change(1, dtype=[0, 64]), "TypeError", "'weight' has dtype int64"),
        ("x of rank 1", change(0, shape=[4 * K]), "ValueError", "'x' has shape [2048]; accepted: [*, 512]"),
        ("x too narrow", change(0, shape=[4, K - 8]), "ValueError", "'x' has shape [4, 504]"),
        ("another n", change(2, shape=[K // 128, N + 64]), "ValueError", "'scales' has shape [4, 320]; accepted: [4, 256]"),
        ("transposed scales", change(2, shape=[N, K // 128]), "ValueError", "'scales' has shape"),
        ("rows of y", change(4, shape=[5, N]), "ValueError", "'y' has 5 in dimension 0; accepted: m = 4"),
        ("strided x", change(0, strides=[K + 8, 1]), "ValueError", "'x' has stride 520 in dimension 0"),
        ("transposed x", change(0, strides=[1, 4]), "ValueError", "'x' has stride 4 in dimension 1"),
        ("unaligned x", change(0, address=(1 << 30) + 2), "ValueError", "'x' starts at an address that is 2 bytes past"),
        ("unaligned by offset", change(1, byte_offset=4), "ValueError", "'weight' starts at an address that is 4 bytes past"),
        ("a freed weight", change(1, address=0), "ValueError", "'weight' has no memory: its storage was freed"),
        ("a freed y's second half", change(4, address=0, byte_offset=1 << 12), "ValueError", "'y' has no memory"),
        (
            "too many rows",
            [{**a, "shape": [1 << 31, *a["shape"][1:]]} if i in (0, 4) else a for i, a in enumerate(arguments(4))],
            "ValueError",
            "m is 2147483648",
        ),
        (
            "too many blocks",
            [{**a, "shape": [1 << 25, *a["shape"][1:]]} if i in (0, 4) else a for i, a in enumerate(arguments(4))],
            "ValueError",
            "at most 2147483647 x 65535",
        ),
    ]
    return rows


@needs_nvcc
def test_bad_calls_are_explained_and_launch_nothing(kernel: Kernel, driver: Path, tmp_path: Path) -> None:
    rows = bad_calls()
    recording = play(kernel.path / "kernel.so", [{"args": args} for _, args, _, _ in rows], driver, tmp_path)
    for (name, _, kind, words), outcome in zip(rows, recording.outcomes, strict=True):
        assert outcome is not None, f"{name} was accepted"
        assert outcome[0] == kind, (name, outcome)
        assert words in outcome[1], (name, outcome)
        assert outcome[1].startswith("sample.w4a16: ")
    assert not recording.calls("launch")


@needs_nvcc
def test_equal_views_are_accepted(kernel: Kernel, driver: Path, tmp_path: Path) -> None:
    """torch has no full uint32, and one packed operand has several natural shapes: same first dimension, same bytes."""
    args = arguments(2)
    args[1] = {**args[1], "dtype": [0, 32], "shape": [N // 64, K // 64, 512]}
    args[0] = {**args[0], "strides": [K, 1]}
    one_row = arguments(1)
    one_row[0] = {**one_row[0], "strides": [7, 1]}  # the stride of a dimension of length 1 says nothing
    recording = play(kernel.path / "kernel.so", [{"args": args}, {"args": one_row}], driver, tmp_path)
    assert recording.outcomes == [None, None]


@needs_nvcc
@pytest.mark.parametrize(
    ("fail", "words"),
    [
        ("cuModuleLoadData", "compiled for sm_90a, and cuda:0 has compute capability 7.5"),
        ("cuLaunchKernel", "returned 700 (FAKE_ERROR)"),
        ("cuTensorMapEncodeTiled", "cuTensorMapEncodeTiled"),
    ],
)
def test_driver_errors_are_reported(kernel: Kernel, driver: Path, tmp_path: Path, fail: str, words: str) -> None:
    recording = play(kernel.path / "kernel.so", [{"args": arguments(2)}], driver, tmp_path, fail=fail)
    assert recording.outcomes[0][0] == "RuntimeError"
    assert words in recording.outcomes[0][1]


def plain_plan(cluster: tuple[str, str, str] | None = None, dependent: tuple[bool, ...] = (False,)) -> HostPlan:
    """y[m, 8] from x[m, 8] without a tensor map, in one launch per flag of ``dependent``; the workspace's length is symbolic and free."""
    params = (Param("x", "float16", ("m", 8)), Param("workspace", "int32", ("words",)), Param("y", "float16", ("m", 8)))
    args = (*(KernelArg("pointer", i) for i in range(3)), KernelArg("int32", "dim_m"))
    grid = ("tb_floordiv((dim_m + 3), 4)", "2", "1")
    launches = tuple(Launch(f"k{i}", args, grid, ("64", "1", "1"), cluster, "0", flag) for i, flag in enumerate(dependent))
    return HostPlan(params, (("m", 0, 0), ("words", 1, 0)), (), launches)


def plain_args(workspace: Any = None, **fields: Any) -> list[Any]:
    """Arguments of ``plain_plan`` for nine rows; the workspace is a tensor unless given."""
    x, y = ({"address": address, "shape": [9, 8], "dtype": HALF, **fields} for address in (1 << 20, 1 << 22))
    return [x, {"address": 1 << 21, "shape": [100], "dtype": [0, 32], **fields} if workspace is None else workspace, y]


@pytest.mark.parametrize(
    ("cluster", "dependent", "plain", "early"),
    [
        (None, (False,), [None], None),
        (("2", "1", "1"), (False,), [[[4, 2, 1, 1]]], None),
        (None, (True,), [None], [[[6, 1, 0, 0]]]),
        (("1", "2", "1"), (True,), [[[4, 1, 2, 1]]], [[[4, 1, 2, 1], [6, 1, 0, 0]]]),
        (None, (False, True), [None, None], [None, [[6, 1, 0, 0]]]),
    ],
)
def test_only_run_dependent_launches_early(
    driver: Path, tmp_path: Path, cluster: Any, dependent: tuple[bool, ...], plain: list[Any], early: list[Any] | None
) -> None:
    """``run`` never asks for dependent launch; ``run_dependent`` does, for kernels that wait themselves, and is there only if one does."""
    library = compile_stub(generate_stub(plain_plan(cluster, dependent), "plain", "sm_90a"), b"\x7fELF", tmp_path)
    calls = [{"args": plain_args()}, {"args": plain_args(), "function": "run_dependent"}, {"args": plain_args()}]
    recording = play(library, calls, driver, tmp_path, "pppi")
    assert [recording.outcomes[0], recording.outcomes[2]] == [None, None]
    launches = recording.calls("launch")
    assert all(launch["grid"] == [3, 2, 1] and launch["params"] == [1 << 20, 1 << 21, 1 << 22, 9] for launch in launches)
    attributes = [launch.get("attributes") for launch in launches]
    if early is None:
        assert recording.outcomes[1][0] == "AttributeError" and "run_dependent" in recording.outcomes[1][1]
        assert attributes == [*plain, *plain]
    else:
        assert recording.outcomes[1] is None and attributes == [*plain, *early, *plain]


def test_rows_may_lie_apart(driver: Path, tmp_path: Path) -> None:
    """Of the operands that are declared so: the kernel is handed the stride of their rows, a multiple of 16 bytes."""
    params = (Param("x", "float16", ("m", 8), "x_pitch"), Param("y", "float16", ("m", 8)))
    args = (KernelArg("pointer", 0), KernelArg("pointer", 1), KernelArg("int32", "dim_x_pitch"))
    launch = Launch("k0", args, ("dim_m", "1", "1"), ("64", "1", "1"), None, "0")
    plan = HostPlan(params, (("m", 0, 0), ("x_pitch", 0, PITCH)), (), (launch,))
    library = compile_stub(generate_stub(plan, "apart", "sm_90a"), b"\x7fELF", tmp_path)

    def call(x: list[int], y: list[int], rows: int = 9) -> dict[str, Any]:
        both = (1 << 20, 1 << 22)
        return {"args": [{"address": at, "shape": [rows, 8], "dtype": HALF, "strides": s} for at, s in zip(both, (x, y), strict=True)]}

    dense = [8, 1]
    good = play(library, [call(dense, dense), call([24, 1], dense), call([0, 1], dense), call([3, 1], dense, 1)], driver, tmp_path, "ppi")
    assert good.outcomes == [None] * 4
    assert [launched["params"][2] for launched in good.calls("launch")] == [8, 24, 0, 8]
    bad = play(library, [call([12, 1], dense), call([24, 2], dense), call(dense, [24, 1])], driver, tmp_path, "ppi")
    words = ["'x' has rows 12 elements apart; accepted: a multiple of 8 (16 bytes)", "'x' has stride 2 in dimension 1", "'y' has stride 24"]
    assert [w in outcome[1] for w, outcome in zip(words, bad.outcomes, strict=True)] == [True] * 3 and not bad.calls("launch")


def test_a_workspace_may_be_an_address(driver: Path, tmp_path: Path) -> None:
    """As a number it costs no conversion; nothing else may be one, and as a tensor it is checked as ever."""
    library = compile_stub(generate_stub(plain_plan(), "plain", "sm_90a"), b"\x7fELF", tmp_path)
    x, tensor, y = plain_args()
    refused = [
        ([x, 0, y], "ValueError", "'workspace' is the address 0; accepted: a 16-byte aligned address above 0"),
        ([x, -4096, y], "ValueError", "'workspace' is the address -4096; accepted"),
        ([x, 4104, y], "ValueError", "'workspace' is the address 4104; accepted"),
        ([x, True, y], "TypeError", "'workspace' is no tensor (type index 2); accepted: a CUDA tensor or its address"),
        ([x, 4096.0, y], "TypeError", "'workspace' is no tensor"),
        ([x, None, y], "TypeError", "'workspace' is no tensor"),
        ([x, tensor, 4096], "TypeError", "'y' is no tensor (type index 1); accepted: a CUDA tensor"),
        ([4096, tensor, y], "TypeError", "'x' is no tensor"),
        ([x, {**tensor, "dtype": [2, 32]}, y], "TypeError", "'workspace' has dtype float32; accepted: int32"),
        ([x, {**tensor, "address": (1 << 21) + 8}, y], "ValueError", "'workspace' starts at an address that is 8 bytes past"),
        ([x, {**tensor, "device": 1}, y], "ValueError", "'workspace' is on cuda:1"),
    ]
    bad = play(library, [{"args": args} for args, _, _ in refused], driver, tmp_path, "pppi")
    for (args, kind, words), outcome in zip(refused, bad.outcomes, strict=True):
        assert outcome is not None and outcome[0] == kind and words in outcome[1], (args, outcome)
    assert not bad.calls("launch")
    highest = (1 << 57) - 16
    calls = [{"args": plain_args(1 << 20)}, {"args": plain_args(highest)}, {"args": plain_args(48, device=1)}, {"args": plain_args()}]
    good = play(library, calls, driver, tmp_path, "pppi")
    assert good.outcomes == [None] * 4
    assert [launch["params"][1] for launch in good.calls("launch")] == [1 << 20, highest, 48, 1 << 21]
    assert [launch["context"] for launch in good.calls("launch")] == [0x1000, 0x1000, 0x1001, 0x1000]


def test_library_loads_without_a_driver_and_says_so(tmp_path: Path) -> None:
    library = compile_stub(generate_stub(plain_plan(), "plain", "sm_80"), b"\x7fELF", tmp_path)
    outcome = play(library, [{"args": plain_args()}], None, tmp_path).outcomes[0]
    if outcome is not None:  # on a machine with a real driver the fake cubin is refused instead
        assert outcome[0] == "RuntimeError"
        assert "libcuda.so.1 cannot be opened" in outcome[1] or "plain: " in outcome[1]
    else:
        pytest.fail("a kernel without a driver reported success")


def test_what_the_stub_cannot_express_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = plain_plan()
    odd = HostPlan((Param("x", "float16", ("m", "m * 2")), *plan.params[1:]), plan.symbols, plan.maps, plan.launches)
    with pytest.raises(StubError, match=r"dimension 1 of 'x' is 'm \* 2'; accepted"):
        generate_stub(odd, "odd", "sm_80")
    strange = HostPlan((Param("x", "custom8", ("m", 8)), *plan.params[1:]), plan.symbols, plan.maps, plan.launches)
    with pytest.raises(StubError, match="dtype 'custom8'; accepted"):
        generate_stub(strange, "strange", "sm_80")
    with pytest.raises(StubError, match="the C compiler failed"):
        compile_stub("not C", b"", tmp_path)
    monkeypatch.setenv("CC", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StubError, match="no C compiler was found"):
        c_compiler()
