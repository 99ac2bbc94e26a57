"""Problems of what stands between products: operands, what a call must write, and the gate.

The residual sum must be exactly the reference's. y is rounded once from fp32 sums whose order is the
kernel's: numbers may be one apart in the last place, few of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...schedules.activations.glue import NORM, GlueWorkload
from . import Verdict
from .gemm import activated
from .verify import GuardedOutput, check_guards, guarded_output

MOST_APART = 0.01  # the share of a problem's numbers that may be one apart
EDGES = 6  # rows of the problem of edges
# bf16 holds less than what is left of an activation where its exponential passes fp32; such numbers may be 0.
LEAST_ACTIVATED = 2.0**-116

Outputs = dict[str, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class GlueProblem:
    """One call; ``operands`` are ``x``, and of a norm ``norm_weight`` and, where the workload has one,
    ``residual``, which a call writes to a copy of."""

    workload: GlueWorkload
    operands: dict[str, Tensor]

    def outputs(self) -> Outputs:
        w = self.workload
        made = {"y": self.operands["x"].new_empty(w.m, w.k)}
        return made | ({"residual": self.operands["residual"].clone()} if w.residual else {})

    def named(self, outputs: Outputs) -> dict[str, Tensor]:
        """The tensors of a call that writes to ``outputs``."""
        return {**self.operands, **outputs}

    def copied(self) -> GlueProblem:
        return replace(self, operands={name: tensor.clone() for name, tensor in self.operands.items()})

    def reference(self) -> Outputs:
        """What a call must write."""
        w = self.workload
        if w.op != NORM:
            return {"y": gated_reference(self.operands["x"], w.activation)}
        y, residual = norm_reference(self.operands["x"], self.operands.get("residual"), self.operands["norm_weight"], w.eps, w.offset)
        return {"y": y} if residual is None else {"y": y, "residual": residual}


def norm_reference(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor | None]:
    """(y, the new residual) as ``GlueWorkload`` defines them, the sum of squares in fp64."""
    residual = None if residual is None else x + residual
    f = (x if residual is None else residual).float()
    square = f.square().double().sum(-1, keepdim=True).float()
    root = torch.where(square.isfinite(), (square / f.shape[-1] + eps).rsqrt(), torch.nan)
    return (f * root * (weight.float() + offset)).to(x.dtype), residual


def gated_reference(x: Tensor, activation: str) -> Tensor:
    """y as ``GlueWorkload`` defines it, in fp64."""
    gate, up = x.double().chunk(2, -1)
    return (activated(gate, activation) * up).float().to(x.dtype)


def random_problem(workload: GlueWorkload, seed: int, arch: str = "cpu", device: str = "cpu") -> GlueProblem:
    """Rows of normal numbers, each of another size, a few columns much larger than the others."""
    w, generator = workload, torch.Generator(device).manual_seed(seed)
    columns = w.k if w.op == NORM else 2 * w.k
    dtype = getattr(torch, w.dtype)
    x = torch.randn(w.m, columns, generator=generator, device=device)
    x *= 2.0 ** (4.0 * torch.rand(w.m, 1, generator=generator, device=device) - 3.0)
    x[:, :: max(1, columns // 7)] *= 10.0
    made = {"x": x.to(dtype)}
    if w.op == NORM:
        made["norm_weight"] = (1.0 - w.offset + 0.25 * torch.randn(w.k, generator=generator, device=device)).to(dtype)
    if w.residual:
        made["residual"] = (3.0 * torch.randn(w.m, w.k, generator=generator, device=device)).to(dtype)
    return GlueProblem(w, made)


def edge_problem(workload: GlueWorkload, seed: int, arch: str = "cpu", device: str = "cpu") -> GlueProblem:
    """Rows at which kernels go wrong: zeros, large numbers of both signs, the least ones, a mean square of
    about eps, NaN at the end, an infinity."""
    problem = random_problem(replace(workload, m=EDGES), seed, arch, device)
    x = problem.operands["x"]
    numbers = torch.finfo(x.dtype)
    x[0] = 0.0
    spread = 0.5 + 0.5 * torch.rand(x.shape[1], generator=torch.Generator(device).manual_seed(seed), device=device)
    x[1] = 0.25 * min(numbers.max, 2.0**60) ** 0.5 * x[1].sign() * spread  # of one size they would be normed to the weight, often a tie
    x[2] = numbers.smallest_normal
    x[3] *= 1e-3
    x[4, -1] = torch.nan
    x[5, 0] = torch.inf
    return problem


class GlueGate:
    """The references of one workload, computed once, and the verdict on any number of kernels for it:
    on rows of edges, then on random ones twice, whose bits must be equal. Outputs are between guard
    bands; y is poisoned first."""

    def __init__(self, edges: GlueProblem, random: GlueProblem) -> None:
        self.random = random
        self._checks = [(name, problem, problem.reference()) for name, problem in (("edges", edges), (random.workload.title, random))]

    def verify(self, run: Callable[[GlueProblem, Outputs], None]) -> Verdict:
        worst = 0.0
        for name, problem, expected in self._checks:
            first, second = (_run(run, problem) for _ in range(2))
            reasons = [f"{output}: {reason}" for output, guarded in first.items() for reason in check_guards(guarded)]
            if not reasons:
                wrong, worst = compared({output: guarded.y for output, guarded in first.items()}, expected)
                reasons += wrong
            if not reasons and any(not torch.equal(_bits(first[output].y), _bits(second[output].y)) for output in first):
                reasons = ["two runs on the same input differ."]
            if reasons:
                return Verdict(tuple(f"{name}: {reason}" for reason in reasons))
        return Verdict((), worst)


def compared(found: Outputs, expected: Outputs) -> tuple[list[str], float]:
    """(what is wrong, the share of y's numbers that are one apart)."""
    reasons = []
    if "residual" in expected and not torch.equal(_bits(found["residual"]), _bits(expected["residual"])):
        same = found["residual"].isnan() & expected["residual"].isnan()
        wrong = int(((_bits(found["residual"]) != _bits(expected["residual"])) & ~same).sum())
        reasons += [f"{wrong} numbers of the residual are wrong."] if wrong else []
    y, right = found["y"], expected["y"]
    same = (y.isnan() & right.isnan()) | ((y == 0) & (right.abs() < LEAST_ACTIVATED))
    apart = (_ordered(y) - _ordered(right)).abs().masked_fill(same, 0)
    share = float((apart > 0).float().mean()) if apart.numel() else 0.0
    if bool((apart > 1).any()):
        at = tuple(int(i) for i in (apart > 1).nonzero()[0])
        wrong = f"{int((apart > 1).sum())} of {y.numel()} numbers are wrong"
        reasons.append(f"{wrong}; the first at {list(at)} is {float(y[at])} and should be {float(right[at])}.")
    elif int((apart > 0).sum()) > max(2, int(MOST_APART * y.numel())):
        reasons.append(f"{share:.1%} of the numbers are one apart; accepted: {MOST_APART:.0%}.")
    return reasons, share


def gate(workload: GlueWorkload, seed: int, arch: str, device: str) -> GlueGate:
    """The gate of what stands between products."""
    return GlueGate(*(make(workload, seed, arch, device) for make in (edge_problem, random_problem)))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16)


def _ordered(tensor: Tensor) -> Tensor:
    """int32 in which neighbouring numbers are one apart, -0 and +0 the same."""
    bits = _bits(tensor).to(torch.int32)
    return torch.where(bits < 0, -32768 - bits, bits)


def _run(run: Callable[[GlueProblem, Outputs], None], problem: GlueProblem) -> dict[str, GuardedOutput]:
    device = problem.operands["x"].device
    held = problem.outputs()
    outputs = {name: guarded_output(tuple(tensor.shape), tensor.dtype, device) for name, tensor in held.items()}
    if "residual" in outputs:
        outputs["residual"].y.copy_(held["residual"])
    run(problem, {name: guarded.y for name, guarded in outputs.items()})
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return outputs
