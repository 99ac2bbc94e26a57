"""Measure tilebit against torch on this machine: one process, implementations interleaved, one row per measurement."""

from __future__ import annotations

import json
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..autotune.measure import copies_needed, time_calls
from ..autotune.problems.gemm import Problem, unpack_tiles
from ..autotune.problems.gemm_drawn import random_problem
from ..autotune.problems.verify import worst_tile_error
from ..autotune.provenance import now, package_versions, source_commit
from ..kernels import find_kernel
from ..ops import gemm as _gemm  # noqa: F401  registers torch.ops.tilebit.gemm
from ..ops import gemm_int8 as _gemm_int8  # noqa: F401  and gemm_int8
from ..ops.dispatch import plan_for
from ..runtime import LoadedKernel
from ..schedules.gemm.workload import Workload
from ..schedules.target import Target, detect_target, driver_version

TORCH_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
INT4_GROUPS = (32, 64, 128)
MAX_COPIES = 16

Call = Callable[[], Tensor]


def measure_workloads(workloads: Iterable[Workload], device: str) -> Iterator[list[dict[str, Any]]]:
    """For each workload, its rows: tilebit's op, torch's linear in 16 bits (cuBLAS on a GPU), and on the CPU torch's own kernel of that
    kind where it has one: int4 weights, or of int8 x its dynamically quantized linear, which takes fp32 and quantizes x at each call.
    Every row has the fields of results/report/rows.py; ``us`` is the median of one call in microseconds,
    operands rotate so that none stays in a cache; ``others`` is the share of the cores that other processes had meanwhile (None on a GPU).

    ``device`` is "cpu" or "cuda[:i]". Raises ``KernelUnavailable`` when a kernel cannot be had.
    """
    target = detect_target(device)
    common = process_fields(target)
    for workload in workloads:
        yield [{**common, **row} for row in _measure(workload, device, target)]


def process_fields(target: Target) -> dict[str, Any]:
    """The fields that all rows of this process share."""
    versions = package_versions()
    return {
        "op": "gemm",
        "run": uuid.uuid4().hex[:12],
        "gpu": target.name,
        "arch": target.arch,
        "units": target.units,
        "driver": driver_version() if target.is_cuda else None,
        "cuda": torch.version.cuda if target.is_cuda else None,
        "torch": torch.__version__,
        "tilelang": versions.get("tilelang"),
        "tvm": versions.get("apache-tvm"),
        "threads": None if target.is_cuda else torch.get_num_threads(),
        "commit": source_commit() or None,
        "date": now(),
    }


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Append ``rows`` to ``path`` as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def _measure(workload: Workload, device: str, target: Target) -> list[dict[str, Any]]:
    first = random_problem(workload, 0, target.arch, device)
    copies = min(MAX_COPIES, copies_needed(sum(t.numel() * t.element_size() for t in first.operands.values()), target.l2))
    problems = [first, *(first.copied() for _ in range(copies - 1))]
    weight = first.dequantized()
    dense = min(MAX_COPIES, copies_needed(weight.numel() * weight.element_size(), target.l2))
    weights = [weight, *(weight.clone() for _ in range(dense - 1))]
    implementations: dict[str, tuple[list[Call], dict[str, Any]]] = {
        "tilebit": ([_ours(p) for p in problems], _our_fields(workload, first.x.device, target)),
        "cublas" if target.is_cuda else "torch": ([_dense(first, w) for w in weights], _dense_fields(workload)),
    }
    if not target.is_cuda:
        name, make = ("torch-int8", int8_peer) if workload.format.integer_sums else ("torch-int4", _int4_peer)
        if (peer := make(first, copies)) is not None:
            implementations[name] = (peer, {**_format_fields(workload), "schedule": None})
    reference = first.reference()
    timings = time_calls({name: calls for name, (calls, _) in implementations.items()}, device)
    return [
        {
            "impl": name,
            **fields,
            "dtype": workload.dtype,
            "m": workload.m,
            "n": workload.n,
            "k": workload.k,
            "us": round(timings[name].us, 3),
            "us_p20": round(timings[name].us_p20, 3),
            "us_p80": round(timings[name].us_p80, 3),
            "others": timings[name].others,
            "rel_err": worst_tile_error(calls[0](), reference),
        }
        for name, (calls, fields) in implementations.items()
    ]


def _ours(problem: Problem) -> Call:
    w, o = problem.workload, problem.operands
    weight = (o["weight"], o["scales"], o.get("zeros"), o.get("row_scales"))
    if w.format.x:
        codes = (problem.x, *weight, o["token_scales"], o.get("bias"), w.n, w.k, w.format.name, TORCH_DTYPES[w.dtype])
        return lambda: torch.ops.tilebit.gemm_int8.default(*codes)
    arguments = (problem.x, *weight, o.get("bias"), w.n, w.format.name)
    return lambda: torch.ops.tilebit.gemm.default(*arguments)


def _our_fields(workload: Workload, device: torch.device, target: Target) -> dict[str, Any]:
    w = workload
    plan = plan_for(device, w.n, w.k, w.format.name, TORCH_DTYPES[w.dtype], w.bias)
    kernel: LoadedKernel = find_kernel(plan.serving(w.m), target)
    return {**_format_fields(workload), "schedule": kernel.manifest["schedule"]}


def _format_fields(workload: Workload) -> dict[str, Any]:
    f = workload.format
    return {"format": f.family, "group_size": f.group_size, "symmetric": f.symmetric}


def _dense(problem: Problem, weight: Tensor) -> Call:
    x, bias = _floats(problem).to(weight.dtype), problem.operands.get("bias")
    return lambda: torch.nn.functional.linear(x, weight, bias)


def _floats(problem: Problem) -> Tensor:
    """x, of codes what they stand for in fp32."""
    return problem.floats(torch.float32) if problem.workload.format.x else problem.x


def _dense_fields(workload: Workload) -> dict[str, Any]:
    return {"format": {"float16": "fp16", "bfloat16": "bf16"}[workload.dtype], "group_size": None, "schedule": None}


def int8_peer(problem: Problem, copies: int) -> list[Call] | None:
    """Calls of torch's dynamically quantized linear: int8 weights with a scale for each output channel, x quantized as a whole; None
    where this torch has none."""
    prepack, multiply = (getattr(torch.ops.quantized, name, None) for name in ("linear_prepack", "linear_dynamic"))
    if prepack is None or multiply is None:
        return None
    weight, bias = problem.dequantized().float(), problem.operands.get("bias")
    scales = (weight.abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny).double()
    with warnings.catch_warnings():  # deprecated, and still torch's fastest
        warnings.simplefilter("ignore", UserWarning)
        codes = torch.quantize_per_channel(weight, scales, torch.zeros(len(scales), dtype=torch.int64), 0, torch.qint8)
    x, bias = _floats(problem), None if bias is None else bias.float()
    return [partial(multiply, x, prepack(codes, bias), True) for _ in range(copies)]  # 7 bits of x: 8 saturate without VNNI


def _codes(problem: Problem) -> Tensor:
    return unpack_tiles(problem.operands["weight"], problem.layout)[: problem.workload.n, : problem.workload.k]


def _int4_peer(problem: Problem, copies: int) -> list[Call] | None:
    """Calls of torch's weight-only int4 kernel for CPUs; None where this torch has none or it cannot serve the format."""
    w = problem.workload
    f = w.format
    convert = getattr(torch, "_convert_weight_to_int4pack_for_cpu", None)
    multiply = getattr(torch, "_weight_int4pack_mm_for_cpu", None)
    if convert is None or multiply is None or f.bits != 4 or f.group_size not in INT4_GROUPS or w.k % f.group_size or w.n % 16 or w.bias:
        return None
    if not f.integer or f.row_scaled or f.x:
        return None
    scales = problem.operands["scales"][:, : w.n]
    zeros = problem.operands["zeros"][:, : w.n].float() if not f.symmetric else torch.full_like(scales, 8.0, dtype=torch.float32)
    offset = (8.0 - zeros) * scales.float()  # its weights are (q - 8) * scale + offset
    parameters = torch.stack((scales, offset.to(scales.dtype)), dim=-1).contiguous()
    packed = convert(_codes(problem).to(torch.int32), 1)
    return [partial(multiply, problem.x, packed.clone(), f.group_size, parameters.clone()) for _ in range(copies)]
