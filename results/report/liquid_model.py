"""LiquidGEMM's cost model beside what was measured (equations 3 to 6 of the paper, arXiv:2509.01229,
section 3.2): how much of a tuned W4A8 product's time loading, dequantizing and multiplying explain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import mean

from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.records import TuningRecord, shipped_records

from .liquid_rates import DeviceRates, device_rates
from .markdown import table
from .problems import geometric_mean
from .rows import Row

# Instructions for a weight, counted in the machine code of sm_90a: from shared memory to the registers of the
# tensor cores, loads, scales and unpacking with it. The arithmetic alone is the paper's seven for eight weights.
ALPHA = 1.0


@dataclass(frozen=True, slots=True)
class Parts:
    """Microseconds of one pass over the weight, all SMs at work, of ``passes``: of its loads from
    memory, its dequantization on CUDA cores, its products on tensor cores. ``apart``: those that
    dequantize and those that multiply are other warps, which work at the same time."""

    load: float
    dequant: float
    mma: float
    passes: int
    apart: bool = False

    @property
    def computation(self) -> float:
        """Equation 4, or the longer of its two where they are apart (section 5.1)."""
        return max(self.dequant, self.mma) if self.apart else self.dequant + self.mma

    @property
    def us(self) -> float:
        """Equation 6: loads beside what computes, whichever takes longer."""
        return self.passes * max(self.load, self.computation)

    @property
    def bound(self) -> str:
        return "loads" if self.load > self.computation else "computation"


def parts(workload: Workload, block_m: int, rates: DeviceRates, alpha: float = ALPHA, apart: bool = False) -> Parts:
    """The paper's model of a product by tiles of ``block_m`` rows of x (its M_t); codes alone are counted
    as bytes of the weight, as the paper does. ``alpha``: instructions for a weight."""
    numbers = workload.n * workload.k
    load = numbers * workload.format.bits / 8 / (rates.read_gbps * 1e3)
    dequant = alpha * numbers / (rates.instructions * 1e3)
    mma = 2.0 * min(block_m, workload.m) * numbers / (rates.int8_tops * 1e6)
    return Parts(load, dequant, mma, -(-workload.m // block_m), apart)


def liquid_model_section(devices: Mapping[str, Iterable[Row]], records: Iterable[TuningRecord] | None = None) -> str:
    """For each device and m the model's time over that of the fastest schedule of each tuned shape of
    ``w4a8_lqq_g128`` (``records``: default the shipped ones), with the device's own rates (``devices``:
    its rows of ``int8``); "" without any."""
    best: dict[str, dict[Workload, TuningRecord]] = {}
    for record in shipped_records() if records is None else records:
        w = record.workload
        if record.ok and isinstance(w, Workload) and w.format.name == "w4a8_lqq_g128" and record.arch == "sm_90a":
            of_device = best.setdefault(record.gpu, {})
            held = of_device.get(w)
            if held is None or (record.us or 0.0) < (held.us or 0.0):
                of_device[w] = record
    tables = []
    for gpu, found in sorted(best.items()):
        if rates := device_rates(gpu, devices.get(gpu, ())):
            tables += _of_device(gpu, found, rates)
    if not tables:
        return ""
    about = (
        "Tuned products of `w4a8_lqq_g128` beside ceil(M / M_t) max(T_LD, T_DQ + T_MMA), with the winner's tile as M_t and "
        f"{ALPHA:.2f} instructions for a weight (counted in the machine code: the paper's seven for eight weights, with loads and scales). "
        "The model knows nothing of launches, of a pipeline's fill, of waves that are not full and of sums that blocks share, which is "
        "half of a small product; and it adds up dequantization and products, which here overlap."
    )
    return "\n\n".join(["## LiquidGEMM's cost model (equations 3 to 6)", about, *tables])


def _of_device(gpu: str, best: Mapping[Workload, TuningRecord], rates: DeviceRates) -> list[str]:
    lines, errors = [], []
    for m in sorted({w.m for w in best}):
        found = [(parts(w, r.schedule.block_m, rates), r.us or 0.0) for w, r in best.items() if w.m == m]
        ratios = [model.us / us for model, us in found]
        wrong = [abs(ratio - 1.0) for ratio in ratios]
        bounds = [model.bound for model, _ in found]
        errors += wrong
        said = ", ".join(f"{bounds.count(bound)} by {bound}" for bound in sorted(set(bounds)))
        spread = (geometric_mean(ratios), min(ratios), max(ratios))
        lines.append([str(m), str(len(found)), *(f"{ratio:.2f}" for ratio in spread), f"{mean(wrong):.0%}", said])
    about = f"**{gpu}**: {rates.said}. Mean absolute error {mean(errors):.0%}."
    header = ["m", "shapes", "predicted / measured", "least", "most", "mean error", "bound"]
    return [about, table(header, lines, numbers=False)]
