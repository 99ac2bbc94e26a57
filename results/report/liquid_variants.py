"""LiquidGEMM's cost model beside its ablation: what equations 3 to 6 predict for a product without each of the
ideas, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from tilebit.layouts.formats import GemmFormat
from tilebit.schedules.gemm.workload import Workload

from .ablation import ABLATION_FIELDS
from .cells import commits_of
from .liquid_model import ALPHA, Parts, parts
from .liquid_rates import DeviceRates, device_rates
from .markdown import number, table
from .rows import Row, json_rows

FIELDS = (*ABLATION_FIELDS, "gpu", "run", "format", "schedule")


@dataclass(frozen=True, slots=True)
class Variant:
    """A step of ``results.measure.ablation.liquid``: ``alpha`` instructions for a weight, counted as ``ALPHA``
    (``tests/results/measure/test_liquid_ablation.py`` counts them again), and whether other warps
    dequantize than multiply."""

    name: str
    alpha: float
    apart: bool = False


VARIANTS = {
    0: Variant("coarse pipeline", 1.25, apart=True),  # the whole's, and a store to shared memory for four weights
    1: Variant("QServe's arithmetic", 1.77),
    2: Variant("codes row by row", 2.09),  # eight loads of 16 bits where packing needs one of 128
    3: Variant("all of LiquidGEMM's ideas", ALPHA),
}
WHOLE = 3
ABOUT = (
    "Each variant has an alpha of its own: the instructions for a weight from shared memory to the tensor cores, counted in the machine "
    "code ({alphas}). Predicted is ceil(M / M_t) max(T_LD, T_DQ + T_MMA) with the tile M_t that was measured, and for the coarse "
    "pipeline, whose warps dequantize while others multiply, ceil(M / M_t) max(T_LD, T_DQ, T_MMA); the three are those of all passes. "
    "*Times the whole* is what the idea is worth. The model knows no bubbles of a pipeline, no barriers and no registers: it expects warps "
    "that only dequantize to be about as fast or faster, and measured they are the slowest by far. Where bytes decide it expects "
    "arithmetic to cost nothing, and where operations do to cost its time, which here overlaps with products."
)


def liquid_variants_section(folder: Path, devices: Mapping[str, Sequence[Row]]) -> str:
    """Predicted beside measured for every row of ``folder`` (those of ``ablation_int8``) of each device's
    newest run of a product, with the device's own rates (``devices``: its rows of ``int8``); "" without
    rows. Raises ``ValueError`` with file and line for a row that lacks a field or is of no variant."""
    newest: dict[str, dict[tuple[int, int, int], dict[int, dict[str, Any]]]] = {}
    for place, row in json_rows(folder, FIELDS):
        if row["step"] not in VARIANTS:
            raise ValueError(f"{place}: step is {row['step']!r}; accepted: {', '.join(map(str, VARIANTS))}, as liquid.py writes them")
        steps = newest.setdefault(row["gpu"], {}).setdefault((row["n"], row["k"], row["m"]), {})
        if any(held["run"] != row["run"] for held in steps.values()):
            steps.clear()
        steps[row["step"]] = row
    found = []
    for gpu, products in sorted(newest.items()):
        if rates := device_rates(gpu, devices.get(gpu, ())):
            found += _of_device(gpu, products, rates)
    if not found:
        return ""
    about = ABOUT.format(alphas=", ".join(f"{v.alpha:.2f} {v.name}" for v in VARIANTS.values()))
    return "\n\n".join(["## Predicted by LiquidGEMM's cost model (equations 3 to 6)", about, *found])


def _of_device(gpu: str, products: Mapping[tuple[int, int, int], Mapping[int, dict[str, Any]]], rates: DeviceRates) -> list[str]:
    lines, errors = [], {step: [] for step in VARIANTS}
    for _, steps in sorted(products.items(), key=lambda item: (item[0][0] * item[0][1], item[0])):
        models = {step: predicted(row, rates) for step, row in sorted(steps.items())}
        for step, model in models.items():
            row = steps[step]
            error = model.us / row["us"] - 1
            errors[step].append(abs(error))
            worth = ["-", "-"]
            if WHOLE in steps and step != WHOLE:
                worth = [f"{model.us / models[WHOLE].us:.2f}", f"{row['us'] / steps[WHOLE]['us']:.2f}"]
            parts_us = [number(model.passes * part) for part in (model.load, model.dequant, model.mma)]
            place = [f"{row['n']} x {row['k']}", str(row["m"]), VARIANTS[step].name, str(row["schedule"]["block_m"])]
            lines.append([*place, *parts_us, number(model.us), number(row["us"]), f"{error:+.0%}", *worth])
    said = "; ".join(f"{VARIANTS[step].name} {mean(of):.0%}" for step, of in errors.items() if of)
    rows = [row for steps in products.values() for row in steps.values()]
    about = f"**{gpu}**, commit {commits_of(rows)}: {rates.said}. Mean absolute errors: {said}."
    header = [
        "n x k", "m", "variant", "M_t", "T_LD", "T_DQ", "T_MMA", "predicted, µs", "measured, µs", "error",
        "times the whole, predicted", "measured",
    ]  # fmt: skip
    return [about, table(header, lines)]


def predicted(row: Mapping[str, Any], rates: DeviceRates) -> Parts:
    """The model of a row of the ablation."""
    variant = VARIANTS[row["step"]]
    workload = Workload(row["m"], row["n"], row["k"], GemmFormat.parse(row["format"]))
    return parts(workload, row["schedule"]["block_m"], rates, variant.alpha, variant.apart)
