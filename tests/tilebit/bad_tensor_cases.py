"""Invalid calls with tensors and numbers: the op, modules, quantizers, formats, workloads, targets, layouts, schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from door_cases import K, N, exact, workload
from torch import nn

import tilebit
from tilebit.command.pictures import picture, write
from tilebit.layouts.checkpoints import checkpoint_layout
from tilebit.layouts.formats import QuantFormat
from tilebit.layouts.packing import gemm_layout
from tilebit.ops import gemm as _ops  # registers torch.ops.tilebit
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import candidates
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target, cpu_target, detect_target, target_from_capability, target_from_name
from tilebit.tiles.program import TileProgram
from tilebit.tiles.programs import program
from tilebit.weights.packed import PackedWeight, arch_of, pack, unpack_words
from tilebit.weights.quantize import QuantizedTensor, quantize


@dataclass(frozen=True)
class Bad:
    """``call`` (given an empty folder) must raise ``error`` with every text of ``says`` in its message: what was got, what is accepted."""

    name: str
    call: Callable[[Path], Any]
    says: tuple[str, ...]
    error: type[Exception] = ValueError


CASE = ("w4a16_g32_asym", "bfloat16", True)
half, bf16 = torch.float16, torch.bfloat16
assert _ops


def op(**changes: Any) -> Callable[[Path], Any]:
    """A valid call of the op with some arguments replaced; a function gets the valid argument."""

    def call(_: Path) -> Any:
        x, packed, bias, _y = exact(workload(CASE, 3))
        arguments: dict[str, Any] = {
            "x": x,
            "weight": packed.weight,
            "scales": packed.scales,
            "zeros": packed.zeros,
            "row_scales": packed.row_scales,
            "bias": bias,
        }
        arguments |= {"n": N, "format": "w4a16_g32_asym"}
        for name, change in changes.items():
            arguments[name] = change(arguments[name]) if callable(change) else change
        return torch.ops.tilebit.gemm.default(*arguments.values())

    return call


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same values one element past an aligned address."""
    return torch.cat((tensor.flatten()[:1], tensor.flatten()))[1:].view(tensor.shape)


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with every other element in between."""
    return torch.stack((tensor, tensor), -1)[..., 0]


def ops() -> Iterator[Bad]:
    for dtype in (torch.float32, torch.float64, torch.int8, torch.int32, torch.uint8, torch.bool, torch.complex64):
        name = str(dtype).removeprefix("torch.")
        yield Bad(f"x is {name}", op(x=lambda x, d=dtype: x.to(d)), ("x is", name, "float16 or bfloat16"))
    yield Bad("x is a scalar", op(x=torch.zeros((), dtype=bf16)), ("x is bfloat16 []", "[..., k]"))
    yield Bad("x has no columns", op(x=torch.zeros(3, 0, dtype=bf16)), ("x is bfloat16 [3, 0]", "k >= 1"))
    yield Bad("x is fp16 for a bf16 weight", op(x=lambda x: x.to(half)), ("scales is bfloat16", "needs float16"))
    for k in (1, K - 32, K + 32, 2 * K):
        yield Bad(f"x has {k} columns", op(x=torch.zeros(3, k, dtype=bf16)), (f"[..., {k}]", "need"))
    for operand, good in (
        ("weight", "int32 [3, 7, 128]"),
        ("scales", "bfloat16 [7, 96]"),
        ("zeros", "bfloat16 [7, 96]"),
        ("bias", "bfloat16 [70]"),
    ):
        says = (f"{operand} is", f"needs {good} on cpu")
        for dtype in (torch.int64, torch.uint8, torch.float32, torch.float16, torch.int8):
            yield Bad(f"{operand} is {dtype}", op(**{operand: lambda t, d=dtype: t.to(d)}), (*says, str(dtype).removeprefix("torch.")))
        yield Bad(f"{operand} is flat", op(**{operand: lambda t: t.flatten()[1:]}), says)
        yield Bad(f"{operand} has one dimension more", op(**{operand: lambda t: t[None]}), (*says, "[1, "))
        yield Bad(f"{operand} lacks a row", op(**{operand: lambda t: t[1:]}), says)
        yield Bad(f"{operand} has a row more", op(**{operand: lambda t: torch.cat((t, t[:1]))}), says)
        yield Bad(f"{operand} is strided", op(**{operand: apart}), (*says, "with strides", "contiguous"))
        yield Bad(f"{operand} is misaligned", op(**{operand: shifted}), (*says, "bytes past", "16-byte aligned"))
        yield Bad(f"{operand} is on another device", op(**{operand: lambda t: t.to("meta")}), (*says, "on meta"))
        if operand in ("weight", "scales", "zeros"):
            yield Bad(f"{operand} is transposed", op(**{operand: lambda t: t.transpose(0, 1)}), says)
    yield Bad(
        "a GPU's weight on the CPU", op(weight=torch.zeros(2, 4, 512, dtype=torch.int32)), ("[2, 4, 512]", "needs int32 [3, 7, 128]", "cpu")
    )
    for n in (0, -1):
        yield Bad(f"n is {n}", op(n=n), (str(n), "n >= 1"))
    for n in (N + 32, 1, 10**6):
        yield Bad(f"n is {n}", op(n=n), (f"n = {n}", "need"))
    for bits in (-4, 0, 1, 2, 3, 5, 16):
        yield Bad(f"bits is {bits}", lambda _, b=bits: QuantFormat(bits=b), (f"bits is {bits}", "(4, 8)"))
    for group in (-2, 0, 1, 16, 48, 256):
        says = (f"group_size is {group}", "(32, 64, 128, -1)")
        yield Bad(f"group_size is {group}", lambda _, g=group: QuantFormat(group_size=g), says)
    for name in ("", "w4a16", "w3a16_g128", "w4a16_g16", "W4A16_G128"):
        yield Bad(f"format is {name!r}", op(format=name), (f"unknown format {name!r}", "w4a16_g128"))
    yield Bad("zeros of a format that has none", op(format="w4a16_g32"), ("zeros is bfloat16 [7, 96]", "has none; pass None"))
    yield Bad("8 bits of a 4-bit weight", op(format="w8a16_g32_asym"), ("weight is int32 [3, 7, 128]", "needs int32 [3, 7, 256]"))
    for group in (64, 128, -1):
        yield Bad(
            f"groups of 32 called groups of {group}", op(format=QuantFormat(4, group, False).name), ("scales is bfloat16 [7, 96]", "need")
        )
    yield Bad("a bias of n_pad", op(bias=lambda b: torch.cat((b, b[:26]))), ("bias is bfloat16 [96]", "needs bfloat16 [70]"))


def functional() -> Iterator[Bad]:
    def packed() -> PackedWeight:
        return exact(workload(CASE, 1))[1]

    x = torch.zeros(2, K, dtype=bf16)
    for name, value in (("a list", [[1.0]]), ("None", None), ("an array", x.float().numpy())):
        yield Bad(
            f"gemm of {name}",
            lambda _, v=value: tilebit.gemm(cast(Any, v), packed()),
            (f"gemm({type(value).__name__}", "torch.Tensor"),
            TypeError,
        )
    for value in (x, None, "w"):
        yield Bad(
            f"gemm by {type(value).__name__}",
            lambda _, v=value: tilebit.gemm(x, cast(Any, v)),
            (type(value).__name__, "PackedWeight"),
            TypeError,
        )
    yield Bad("gemm with a list as bias", lambda _: tilebit.gemm(x, packed(), [0.0]), ("list", "Tensor or None"), TypeError)  # type: ignore[arg-type]
    for k in (1, K - 1, K + 1):
        yield Bad(f"gemm with {k} columns", lambda _, k=k: tilebit.gemm(x.new_zeros(2, k), packed()), (f"[2, {k}]", f"[..., {K}]"))
    for m in ([], [0], [-3], [1, 0], [1.5], ["1"]):
        yield Bad(f"prepare for m = {m}", lambda _, m=m: tilebit.prepare(packed(), cast(Any, m)), (str(m), "1 and above"))
    yield Bad("prepare without a packed weight", lambda _: tilebit.prepare(x, [1]), ("Tensor", "PackedWeight"), TypeError)  # type: ignore[arg-type]
    perm = torch.arange(K).flip(0)

    def permuted() -> PackedWeight:
        p = packed()
        return PackedWeight(p.weight, p.scales, p.zeros, p.n, p.k, p.format, p.dtype, p.arch, perm)

    yield Bad("a permuted weight and a narrow x", lambda _: tilebit.gemm(x[:, :100], permuted()), ("[2, 100]", f"[..., {K}]"))


def modules() -> Iterator[Bad]:
    def layer() -> tilebit.QuantLinear:
        return tilebit.QuantLinear.from_float(nn.Linear(K, N))

    for value in (None, nn.Linear(2, 2), torch.zeros(2, 2)):
        kind = type(value).__name__
        yield Bad(f"QuantLinear of {kind}", lambda _, v=value: tilebit.QuantLinear(v), (kind, "PackedWeight"), TypeError)  # type: ignore[arg-type]
    for bias in (torch.zeros(N + 1), torch.zeros(1, N), torch.zeros(N, dtype=torch.int32), torch.zeros(())):
        yield Bad(
            f"a bias {list(bias.shape)} {bias.dtype}", lambda _, b=bias: tilebit.QuantLinear(layer().packed, b), ("bias is", f"[{N}]")
        )
    for value in (nn.Conv1d(2, 2, 1), torch.zeros(2, 2), None):
        kind = type(value).__name__
        yield Bad(f"from_float of {kind}", lambda _, v=value: tilebit.QuantLinear.from_float(v), (kind, "torch.nn.Linear"), TypeError)  # type: ignore[arg-type]
    for name in ("int4", "w4a16", "w3a16_g128", "w4a16_g100", "W4A16_G128", ""):
        yield Bad(
            f"from_float as {name!r}", lambda _, f=name: tilebit.QuantLinear.from_float(nn.Linear(K, N), f), (repr(name), "w4a16_g128")
        )
    for dtype in (torch.float64, torch.int8):
        yield Bad(
            f"from_float in {dtype}", lambda _, d=dtype: tilebit.QuantLinear.from_float(nn.Linear(K, N), dtype=d), (str(dtype), "float16")
        )
    for k in (0, 1, K + 1):
        yield Bad(f"a layer on {k} columns", lambda _, k=k: layer()(torch.zeros(2, k, dtype=half)), (f"[2, {k}]", f"[..., {K}]"))
    yield Bad("a layer on fp32", lambda _: layer()(torch.zeros(2, K)), ("float32", "float16 or bfloat16"))
    yield Bad("a layer on bf16", lambda _: layer()(torch.zeros(2, K, dtype=bf16)), ("scales is float16", "needs bfloat16"))
    yield Bad("a layer cast to fp32", lambda _: layer().float(), ("cast to torch.float32", "accepted: torch.float16"))
    yield Bad("quantize_model without layers", lambda _: tilebit.quantize_model(nn.Sequential(nn.ReLU())), ("Sequential", "accepted"))
    yield Bad("quantize_model of a layer", lambda _: tilebit.quantize_model(nn.Linear(4, 4)), ("Linear", "from_float"))
    yield Bad(
        "quantize_model that skips all",
        lambda _: tilebit.quantize_model(nn.Sequential(nn.Linear(4, 4)), skip=["0"]),
        ("Sequential", "accepted"),
    )


def kinds() -> Iterator[Bad]:
    """None, lists and names where tensors, formats and modules belong."""
    w, f = torch.randn(8, 64), QuantFormat(4, 32, False)
    q = quantize(w, f)
    p = pack(q, half)
    linear = nn.Linear(K, N)
    layer = tilebit.QuantLinear.from_float(linear)
    for value in (None, [[1.0]], 3):
        kind = type(value).__name__
        calls: dict[str, Callable[[Any], Any]] = {
            "w of quantize": lambda v: quantize(v, f),
            "format of quantize": lambda v: quantize(w, v),
            "q of pack": lambda v: pack(v, half),
            "codes of QuantizedTensor": lambda v: QuantizedTensor(v, q.scales, q.zeros, f),
            "scales of QuantizedTensor": lambda v: QuantizedTensor(q.codes, v, q.zeros, f),
            "format of QuantizedTensor": lambda v: QuantizedTensor(q.codes, q.scales, q.zeros, v),
            "weight of PackedWeight": lambda v: PackedWeight(v, p.scales, p.zeros, 8, 64, f, half, "cpu"),
            "scales of PackedWeight": lambda v: PackedWeight(p.weight, v, p.zeros, 8, 64, f, half, "cpu"),
            "format of PackedWeight": lambda v: PackedWeight(p.weight, p.scales, p.zeros, 8, 64, v, half, "cpu"),
            "format of from_float": lambda v: tilebit.QuantLinear.from_float(linear, v),
            "model of quantize_model": lambda v: tilebit.quantize_model(v),
            "format of quantize_model": lambda v: tilebit.quantize_model(nn.Sequential(linear), v),
            "x of a layer": layer,
        }
        for name, made in calls.items():
            first = name.split()[0]
            yield Bad(f"{kind} as {name}", lambda _, m=made, v=value: m(v), (f"{first} is {kind}", "accepted"), TypeError)
        yield from _kinds_of_attention(value)
    for value in ([0.0], "none"):
        kind = type(value).__name__
        yield Bad(
            f"{kind} as zeros",
            lambda _, v=value: QuantizedTensor(q.codes, q.scales, cast(Any, v), f),
            (f"zeros is {kind}", "None"),
            TypeError,
        )
        yield Bad(
            f"{kind} as bias", lambda _, v=value: tilebit.QuantLinear(layer.packed, cast(Any, v)), (f"bias is {kind}", "None"), TypeError
        )
    yield Bad(
        "a name as format of quantize", lambda _: quantize(w, cast(Any, "w4a16_g32")), ("format is str", "QuantFormat.parse"), TypeError
    )


def _kinds_of_attention(value: Any) -> Iterator[Bad]:
    """The same of a cache and what it is called with."""
    cache = tilebit.KVCache(4, 2, 1, 64)
    handles, rows, out, lse = cache.allocate(1), torch.zeros(1, 1, 64).half(), torch.zeros(2, 4), torch.zeros(2)
    calls: dict[str, Callable[[Any], Any]] = {
        "format of KVCache": lambda v: tilebit.KVCache(4, 2, 1, 64, v),
        "dtype of KVCache": lambda v: tilebit.KVCache(4, 2, 1, 64, dtype=v),
        "device of KVCache": lambda v: tilebit.KVCache(4, 2, 1, 64, device=v),
        "k of append": lambda v: cache.append(handles, v, rows),
        "v of append": lambda v: cache.append(handles, rows, v),
        "q of attend": lambda v: cache.attend(handles, v),
        "q of prefill": lambda v: cache.prefill(handles, v, rows, rows),
        "k of prefill": lambda v: cache.prefill(handles, rows, v, rows),
        "query of scaled_dot_product_decode": lambda v: tilebit.attention.scaled_dot_product_decode(v, cache, handles),
        "cache of scaled_dot_product_decode": lambda v: tilebit.attention.scaled_dot_product_decode(rows[None], v, handles),
        "out_a of merge_states": lambda v: tilebit.attention.merge_states(v, lse, out, lse),
        "lse_b of merge_states": lambda v: tilebit.attention.merge_states(out, lse, out, v),
    }
    if not isinstance(value, list):
        calls["sequences of batch"] = lambda v: cache.batch(v)
        calls["sequences of attend"] = lambda v: cache.attend(v, rows[None])
        calls["sequences of advance"] = lambda v: cache.advance(v)
    kind = type(value).__name__
    for name, made in calls.items():
        first = name.split()[0]
        yield Bad(f"{kind} as {name}", lambda _, m=made, v=value: m(v), (f"{first} is {kind}", "accepted"), TypeError)


def quantizers() -> Iterator[Bad]:
    w, f = torch.randn(8, 64), QuantFormat(4, 32, False)

    def tensors(**changes: Any) -> Callable[[Path], Any]:
        good: dict[str, Any] = {
            "codes": torch.zeros(8, 64, dtype=torch.uint8),
            "scales": torch.ones(8, 2),
            "zeros": torch.zeros(8, 2, dtype=torch.uint8),
        }
        return lambda _: QuantizedTensor(**{**good, "format": f, **changes})

    for value in (w[0], w.int(), w[:0], w[:, :0], w[None]):
        yield Bad(
            f"quantize {value.dtype} {list(value.shape)}",
            lambda _, v=value: quantize(v, f),
            (f"{list(value.shape)}", "floating point [n, k]"),
        )
    for poison in (float("nan"), float("inf"), float("-inf")):
        yield Bad(
            f"quantize {poison}", lambda _, p=poison: quantize(torch.full((8, 64), p), f), ("NaN or infinite", "[0, 0]", "only finite")
        )
    yield Bad("scales in int8", lambda _: quantize(w, f, scale_dtype=torch.int8), ("torch.int8", "float16"))
    yield Bad("scales too large", lambda _: quantize(w.double() * 1e30, f, scale_dtype=half), ("scale above", "65504"))
    yield Bad("codes too large", tensors(codes=torch.full((8, 64), 16, dtype=torch.uint8)), ("codes reach 16", "0 to 15"))
    yield Bad("zero points too large", tensors(zeros=torch.full((8, 2), 99, dtype=torch.uint8)), ("zeros reach 99", "0 to 15"))
    yield Bad("codes of int32", tensors(codes=torch.zeros(8, 64, dtype=torch.int32)), ("int32 [8, 64]", "uint8 [n, k]"))
    yield Bad("no codes", tensors(codes=torch.zeros(0, 64, dtype=torch.uint8)), ("[0, 64]", "n >= 1"))
    yield Bad("one scale a row", tensors(scales=torch.ones(8, 1)), ("float32 [8, 1]", "[8, 2]"))
    yield Bad("integer scales", tensors(scales=torch.ones(8, 2, dtype=torch.int32)), ("int32", "float16, bfloat16 or float32"))
    yield Bad("no zero points", tensors(zeros=None), ("absent", "w4a16_g32_asym"))
    yield Bad("zero points of a symmetric format", tensors(format=QuantFormat(4, 32)), ("given", "w4a16_g32"))
    yield Bad("float zero points", tensors(zeros=torch.zeros(8, 2)), ("float32 [8, 2]", "uint8 [8, 2]"))
    yield Bad("a short permutation", tensors(perm=torch.arange(63)), ("int64 [63]", "int64 [64]"))
    yield Bad("a permutation with a repeat", tensors(perm=torch.zeros(64, dtype=torch.int64)), ("perm", "0..63"))
    yield Bad("two devices", tensors(scales=torch.ones(8, 2, device="meta")), ("cpu", "meta", "one device"))
    q = quantize(w, f)
    for dtype in (torch.float32, torch.int8):
        yield Bad(f"pack for {dtype}", lambda _, d=dtype: pack(q, d), (str(dtype), "torch.float16"))
    yield Bad("pack for an unknown arch", lambda _: pack(q, half, arch="sm_70"), ("sm_70", "sm_80"))
    large = QuantizedTensor(q.codes, torch.full((8, 2), 1e6), q.zeros, f)
    yield Bad("pack scales that overflow", lambda _: pack(large, half), ("[0, 0]", "1e+06", "bfloat16"))
    good = pack(q, half)
    for name in ("weight", "scales", "zeros"):
        fields = {n: getattr(good, n) for n in ("weight", "scales", "zeros", "n", "k", "format", "dtype", "arch")}
        short = {**fields, name: fields[name][..., 1:]}
        yield Bad(f"PackedWeight with a short {name}", lambda _, s=short: PackedWeight(**s), (f"{name} is", "needs contiguous"))
    yield Bad("unpack words of another size", lambda _: unpack_words(good.weight[1:], good.layout, 9, 64), ("int32", "accepted: int32"))
    yield Bad("the arch of a meta tensor", lambda _: arch_of(torch.device("meta")), ("'meta'", "'cpu', 'cuda'"))


def nouns() -> Iterator[Bad]:
    for bits in (0, 2, 3, 16, 4.0, "4", None):
        yield Bad(f"a format of {bits!r} bits", lambda _, b=bits: QuantFormat(b), (f"bits is {bits!r}", "(4, 8)"))  # type: ignore[arg-type]
    for group in (0, 16, 31, 256, 128.0, None):
        yield Bad(f"a format of groups {group!r}", lambda _, g=group: QuantFormat(4, g), (f"group_size is {group!r}", "32, 64, 128"))  # type: ignore[arg-type]
    for name in ("w4a16_g16", "w2a16_g128", "w4a8_g128", "w4a16-g128"):
        yield Bad(f"the format {name}", lambda _, n=name: QuantFormat.parse(n), (repr(name), "such as 'w4a16_g128'"))
    for sizes in ((-1, 1, 1), (1, 0, 1), (1, 1, 0), (1, -5, 1)):
        yield Bad(f"a workload {sizes}", lambda _, s=sizes: Workload(*s), (str(sizes), "n >= 1"))
    for dtype in ("float32", "fp16", "half", ""):
        yield Bad(f"a workload in {dtype!r}", lambda _, d=dtype: Workload(1, 8, 8, dtype=d), (repr(dtype), "float16"))
    other = {**Workload(1, 8, 8).to_json(), "op": "attention"}
    yield Bad("a workload of another op", lambda _: Workload.from_json(other), ("'attention'", "'gemm'"))
    for name in ("sm_70", "sm_90", "sm_100a", "SM_80", "gpu", ""):
        yield Bad(f"the target {name!r}", lambda _, n=name: target_from_name(n), (repr(name), "sm_80, sm_86, sm_89, sm_90a, cpu"))
    for major, minor in ((6, 1), (7, 5), (10, 0), (12, 0)):
        says = (f"{major}.{minor}", "8.0, 8.6, 8.9, 9.0")
        yield Bad(f"capability {major}.{minor}", lambda _, a=major, b=minor: target_from_capability(a, b), says)
    yield Bad("the capability of a CPU", lambda _: cpu_target().capability, ("cpu", "no CUDA compute capability"))
    if not torch.cuda.is_available():
        yield Bad("a GPU that is not there", lambda _: detect_target("cuda:0"), ("'cuda:0'", "accepted here: 'cpu'"))
    for data in ({}, {"program": "gemm_cpu"}, {"program": "x", "block_n": 1, "block_m": 1}):
        yield Bad(f"the schedule {data}", lambda _, d=data: Schedule.from_json(d), ("not a schedule", "block_k"))
    yield Bad("an unknown program", lambda _: program("gemm_tpu"), ("'gemm_tpu'", "gemm_wgmma"))
    fields: dict[str, Any] = {"name": "p", "compiler": "tvm", "build": len}
    yield Bad("a program of another compiler", lambda _: TileProgram(**{**fields, "compiler": "gcc"}), ("'gcc'", "tilelang"))
    yield Bad("a program with a missing header", lambda _: TileProgram(**fields, headers=("none.cuh",)), ("none.cuh", "accepted"))
    for arch, bits in (("sm_70", 4), ("sm_90a", 3), ("cpu", 2), ("", 4)):
        yield Bad(
            f"the layout of {arch!r} at {bits}",
            lambda _, a=arch, b=bits: gemm_layout(a, b),
            (repr(arch) if bits == 4 else str(bits), "accepted"),
        )
    for storage, bits in (("ggml", 4), ("awq", 8), ("gptq", 2)):
        yield Bad(f"{storage} at {bits} bits", lambda _, s=storage, b=bits: checkpoint_layout(s, b), (storage, "accepted"))
    yield Bad("a picture of nothing", lambda _: picture("nothing"), ("'nothing'", "sm_90a:4"))
    yield Bad("a picture from the side", lambda _: picture("cpu:4", "side"), ("'side'", "word, element"))
    yield Bad("a picture as PDF", lambda folder: write(picture("mma_c"), folder / "a.pdf"), ("'.pdf'", ".svg, .png"))
    alien = Target("sm_75", "T4", 40, 1, 1, 1, 1.0, 1.0, 1.0)
    yield Bad("candidates of an arch without programs", lambda _: _none(candidates(Workload(1, 64, 64), alien)), ("None",), LookupError)


def _none(value: object) -> None:
    """Not applicable is None, not an exception: turned into one here."""
    if value is None:
        raise LookupError("None")


CASES = [*ops(), *functional(), *modules(), *kinds(), *quantizers(), *nouns()]
