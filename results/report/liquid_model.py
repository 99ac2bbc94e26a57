"""LiquidGEMM's cost model beside what was measured (equations 3 to 6 of the paper, arXiv:2509.01229,
section 3.3): how much of a tuned W4A8 product's time loading, dequantizing and multiplying explain."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean

from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.records import TuningRecord, shipped_records
from tilebit.schedules.target import Target, target_from_name

from .markdown import table
from .problems import geometric_mean

ALPHA = 7 / 8  # instructions for a weight: seven for eight, counted in the machine code
INT8_OVER_HALF = 2  # the tensor cores' rate for int8 over that for fp16


@dataclass(frozen=True, slots=True)
class Parts:
    """Microseconds of one pass over the weight, all SMs at work, of ``passes``: of its loads from
    memory, its dequantization on CUDA cores, its products on tensor cores."""

    load: float
    dequant: float
    mma: float
    passes: int

    @property
    def us(self) -> float:
        """Equation 6: loads beside what computes, whichever takes longer."""
        return self.passes * max(self.load, self.dequant + self.mma)

    @property
    def bound(self) -> str:
        return "loads" if self.load > self.dequant + self.mma else "computation"


def parts(workload: Workload, block_m: int, target: Target) -> Parts:
    """The paper's model of a product by tiles of ``block_m`` rows of x (its M_t), with the rates that
    were measured on ``target``; codes alone are counted as bytes of the weight, as the paper does."""
    numbers = workload.n * workload.k
    load = numbers * workload.format.bits / 8 / (target.read_gbps * 1e3)
    dequant = ALPHA * numbers / (target.dequant_gops * 1e3)
    mma = 2.0 * min(block_m, workload.m) * numbers / (target.mma_tflops * INT8_OVER_HALF * 1e6)
    return Parts(load, dequant, mma, -(-workload.m // block_m))


def liquid_model_section(records: Iterable[TuningRecord] | None = None) -> str:
    """For each m the model's time over that of the fastest schedule of each tuned shape of
    ``w4a8_lqq_g128`` (``records``: default the shipped ones); "" without any."""
    best: dict[Workload, TuningRecord] = {}
    for record in shipped_records() if records is None else records:
        w = record.workload
        if record.ok and isinstance(w, Workload) and w.format.name == "w4a8_lqq_g128" and record.arch == "sm_90a":
            held = best.get(w)
            if held is None or (record.us or 0.0) < (held.us or 0.0):
                best[w] = record
    if not best:
        return ""
    target, lines, errors = target_from_name("sm_90a"), [], []
    for m in sorted({w.m for w in best}):
        found = [(parts(w, r.schedule.block_m, target), r.us or 0.0) for w, r in best.items() if w.m == m]
        ratios = [model.us / us for model, us in found]
        wrong = [abs(ratio - 1.0) for ratio in ratios]
        bounds = [model.bound for model, _ in found]
        errors += wrong
        said = ", ".join(f"{bounds.count(bound)} by {bound}" for bound in sorted(set(bounds)))
        spread = (geometric_mean(ratios), min(ratios), max(ratios))
        lines.append([str(m), str(len(found)), *(f"{ratio:.2f}" for ratio in spread), f"{mean(wrong):.0%}", said])
    about = (
        f"Tuned products of `w4a8_lqq_g128` ({', '.join(sorted({r.gpu for r in best.values()}))}) beside ceil(M / M_t) max(T_LD, T_DQ + "
        f"T_MMA), with the winner's tile as M_t, {ALPHA:.3f} instructions for a weight and the device's measured rates. Its mean absolute "
        f"error is {mean(errors):.0%}. It knows nothing of launches, of a pipeline's fill, of waves that are not full and of sums that "
        "blocks share, which is half of a small product; the rate of tensor cores is twice what plain fp16 products were measured at, at "
        "the power limit, which large products of int8 exceed; and it adds up dequantization and products, which here overlap."
    )
    header = ["m", "shapes", "predicted / measured", "least", "most", "mean error", "bound"]
    return f"## LiquidGEMM's cost model (equations 3 to 6)\n\n{about}\n\n{table(header, lines, numbers=False)}"
