"""The linear layers of a decoder in a row: ``python -m results.measure.chain`` appends rows to
results/rows/chain.

A chain is what one product's time cannot show: what launches cost between kernels that feed one
another, and what dependent launch saves of it. One call runs several layers of an 8B model, with
weights of their own that together exceed twice the last cache, as one CUDA graph: tilebit without
and with dependent launch, and cuBLAS on the same weights dequantized, interleaved in one process.
Each linear takes the first m x k numbers of what the one before it stored, as they lie: the sum of
the peers' times holds no copy, so no chain does. Attention, the activation function and norms are
left out. Nothing is timed before it is checked: dependent launch must not change a bit, and each
chain must agree with fp32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tilebit
from tilebit.autotune.measure import copies_needed, time_calls
from tilebit.command.bench import process_fields, write_rows
from tilebit.kernels import build, find_kernel
from tilebit.layouts.formats import GemmFormat, QuantFormat
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.target import Target, detect_target, file_stem
from tilebit.weights.packed import PackedWeight
from tilebit.weights.quantize import QuantizedTensor

from ..report.rows import ROWS

# (name, n, k) of a decoder layer of an 8B model, in the order of a forward pass.
LAYER = (("qkv", 6144, 4096), ("o", 4096, 4096), ("gate_up", 28672, 4096), ("down", 4096, 14336))
MS = (1, 16)
FORMATS = (QuantFormat(4, 128, True), QuantFormat(4, 128, False))
MIN_LAYERS = 4
TOLERANCE = 0.01  # relative Frobenius error of a whole chain in fp16 against fp32: a few times 1e-3 where all is well

LayerShape = Sequence[tuple[str, int, int]]
Chain = Callable[[], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """The linears of all layers in the order of their calls: packed for tilebit, and fp16 [n, k]
    for cuBLAS."""

    packed: list[PackedWeight]
    dense: list[Tensor]


def make_weights(layer: LayerShape, layers: int, format: GemmFormat, device: str) -> Weights:
    """Random codes (and zero points), scaled so that a linear keeps the size of its input: fp16
    then holds the whole chain."""
    generator = torch.Generator(device).manual_seed(0)
    levels = format.max_code + 1
    # Symmetric codes leave 0 out, as quantizers do: a mean that is not 0 grows from linear to
    # linear. Uniform codes have a variance of (levels^2 - 1) / 12, and their difference to uniform
    # zero points twice that.
    variance = ((levels - 1) ** 2 - 1) / 12 if format.symmetric else (levels**2 - 1) / 6
    packed, dense = [], []

    def drawn(size: tuple[int, int], first: int = 0) -> Tensor:
        return torch.randint(first, levels, size, dtype=torch.uint8, device=device, generator=generator)

    for _, n, k in list(layer) * layers:
        shape = (n, format.groups(k))
        codes = drawn((n, k), int(format.symmetric))
        zeros = None if format.symmetric else drawn(shape)
        scales = torch.full(shape, (variance * k) ** -0.5, device=device).half()
        weight = QuantizedTensor(codes, scales, zeros, format)
        packed.append(tilebit.pack(weight, torch.float16))
        dense.append(weight.dequantize(torch.float16))
    return Weights(packed, dense)


def as_input(y: Tensor, k: int) -> Tensor:
    """The first numbers of ``y`` as a contiguous [m, k]; k is at most the width of ``y``."""
    m = y.shape[0]
    return y.view(-1)[: m * k].view(m, k)


def tilebit_chain(x: Tensor, weights: Weights, dependent: bool) -> Tensor:
    """y of the last linear, [m, n] fp16."""
    for packed in weights.packed:
        x = tilebit.gemm(as_input(x, packed.k), packed, dependent=dependent)
    return x


def dense_chain(x: Tensor, weights: Weights) -> Tensor:
    """The same in torch, on dequantized weights and in the dtype of ``x``: fp16 for cuBLAS, fp32 as
    the reference."""
    for weight in weights.dense:
        x = torch.nn.functional.linear(as_input(x, weight.shape[1]), weight.to(x.dtype))
    return x


def checked(x: Tensor, weights: Weights, chains: dict[str, Chain]) -> dict[str, float]:
    """Relative Frobenius error of each chain against fp32. Raises ``ValueError`` for one above
    ``TOLERANCE`` and when dependent launch changes a bit, called one by one or as the replay of a
    CUDA graph."""
    reference = dense_chain(x.float(), weights)
    results = {name: chain() for name, chain in chains.items()}
    errors = {name: float((y.float() - reference).norm() / reference.norm()) for name, y in results.items()}
    for name, error in errors.items():
        if not error <= TOLERANCE:  # NaN too
            raise ValueError(f"{name}: the chain's relative error is {error:.3g}; accepted: up to {TOLERANCE}; its rows are not written")
    again = _replayed(chains["tilebit_pdl"]) if x.is_cuda else [chains["tilebit_pdl"]()]
    if not all(torch.equal(y, results["tilebit"]) for y in [results["tilebit_pdl"], *again]):
        raise ValueError(
            "dependent launch changes the chain's result; accepted: equal bits; some kernel touches x, y or its workspace before "
            "griddepcontrol.wait"
        )
    return errors


def _replayed(chain: Chain, replays: int = 50) -> list[Tensor]:
    """Results of ``replays`` replays of the chain, captured."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    found = []
    for _ in range(replays):
        y.fill_(float("nan"))
        graph.replay()
        found.append(y.clone())
    return found


def measure_chain(target: Target, device: str, m: int, format: GemmFormat, layer: LayerShape = LAYER) -> list[dict[str, Any]]:
    """The rows of one chain: ``us`` is the median of one layer in microseconds, ``saving_us`` what
    dependent launch saves per launch."""
    needed = copies_needed(sum(Workload(m, n, k, format).weight_bytes for _, n, k in layer), target.l2)
    layers = max(MIN_LAYERS, needed)
    weights = make_weights(layer, layers, format, device)
    x = torch.randn(m, layer[0][2], generator=torch.Generator(device).manual_seed(1), device=device).half()
    base = "cublas" if target.is_cuda else "torch"
    chains: dict[str, Chain] = {
        "tilebit": lambda: tilebit_chain(x, weights, dependent=False),
        "tilebit_pdl": lambda: tilebit_chain(x, weights, dependent=True),
        base: lambda: dense_chain(x, weights),
    }
    errors = checked(x, weights, chains)
    times = time_calls({name: [chain] for name, chain in chains.items()}, device)
    quantized = {"format": format.family, "group_size": format.group_size, "symmetric": format.symmetric}
    schedules = {name: find_kernel(Workload(m, n, k, format), target).manifest["schedule"] for name, n, k in layer}
    saving = (times["tilebit"].us - times["tilebit_pdl"].us) / (layers * len(layer))
    own: dict[str, dict[str, Any]] = {
        "tilebit": {**quantized, "schedule": schedules},
        "tilebit_pdl": {**quantized, "schedule": schedules, "saving_us": round(saving, 4)},
        base: {"format": "fp16", "group_size": None, "symmetric": None, "schedule": None},
    }
    return [
        {
            "impl": name,
            **own[name],
            "chain": quantized | {"layers": layers, "linears": [[n, k] for _, n, k in layer]},
            "dtype": "float16",
            "m": m,
            **{f"us{suffix}": round(value / layers, 4) for suffix, value in (("", t.us), ("_p20", t.us_p20), ("_p80", t.us_p80))},
            "rel_err": errors[name],
        }
        for name, t in times.items()
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m results.measure.chain", description="Time the linear layers of a decoder in a row.")
    parser.add_argument("--device", help="cuda or cpu; default: the GPU where there is one")
    parser.add_argument("--ms", default=",".join(map(str, MS)), help=f"rows (default: {','.join(map(str, MS))})")
    parser.add_argument("--out", type=Path, default=ROWS / "chain", help="folder of the rows, one file per device")
    options = parser.parse_args(arguments)
    target = detect_target(options.device)
    device, ms = "cuda:0" if target.is_cuda else "cpu", [int(m) for m in options.ms.split(",")]
    build([Workload(m, n, k, format) for format in FORMATS for _, n, k in LAYER for m in ms], target, jobs=None)
    common = {**process_fields(target), "op": "chain"}
    path = options.out / f"{file_stem(target.name)}.jsonl"
    for format in FORMATS:
        for m in ms:
            rows = [{**common, **row} for row in measure_chain(target, device, m, format)]
            write_rows(path, rows)
            print(format.name, f"m {m}", "  ".join(f"{row['impl']} {row['us']:.2f}" for row in rows), "us a layer", flush=True)


if __name__ == "__main__":
    main()
