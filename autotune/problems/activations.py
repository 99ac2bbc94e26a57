"""Problems of the quantization of activations: operands as the kernels read them, the codes and scales
they must give, and the gate.

Without a norm, every code and scale must be exactly the reference's, which does the same fp32
operations (an exact product is rounded once in fp64: 24 + 24 bits fit). With a norm the order of the
sum of squares shows: codes may be one apart, few of them, and scales differ by 1e-5. Of a gate's
exponential, a number may be its neighbour in 16 bits: then a scale and its codes follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...schedules.activations.workload import PER_TOKEN, QuantizeWorkload
from . import Verdict
from .glue import gated_reference
from .verify import GuardedOutput, check_guards, guarded_output

SCALE_ERROR = 1e-5  # relative, after a norm
MOST_APART = 1e-3  # the share of a problem's codes that may be one apart, after a norm
GATED_APART = 0.02  # after a gate
GATED_ERROR = {"float16": 2.0**-10, "bfloat16": 2.0**-7}  # of a scale, relative: one step of 16 bits
CHUNK_VALUES = 1 << 24  # of a reference at once
EDGES = 11  # rows of the problem of edges
EXACT = 6  # of them, the first, mean what they do as they are: their residual is zero
CODES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}

Outputs = dict[str, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class QuantizeProblem:
    """One call; ``operands`` are ``x`` [m, columns] (of a gate [m, 2 columns]) and, where the workload
    has them, ``residual`` [m, columns], which a call writes to a copy of, ``norm_weight`` and
    ``smooth`` [columns], as the kernels of ``arch`` take them."""

    workload: QuantizeWorkload
    operands: dict[str, Tensor]
    arch: str = "cpu"

    def outputs(self) -> Outputs:
        device = self.operands["x"].device
        made = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in self.written().items()}
        return made | {name: self.operands[name].clone() for name in made if name in self.operands}

    def written(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """(shape, dtype) of each output, codes of e4m3 as such numbers; the residual is read first."""
        w = self.workload
        scales = (w.m,) if w.group == PER_TOKEN else (w.groups, w.m)
        found = {"codes": ((w.m, w.code_columns(self.arch)), CODES[w.out]), "scales": (scales, torch.float32)}
        return found | ({"residual": ((w.m, w.columns(self.arch)), getattr(torch, w.dtype))} if w.residual else {})

    def named(self, outputs: Outputs) -> dict[str, Tensor]:
        """The tensors of a call that writes to ``outputs``; kernels take codes as bytes."""
        return {**self.operands, **outputs, "codes": outputs["codes"].view(torch.int8)}

    def copied(self) -> QuantizeProblem:
        return replace(self, operands={name: tensor.clone() for name, tensor in self.operands.items()})

    def reference(self) -> Outputs:
        """What a call must write."""
        w, found = self.workload, self.outputs()
        step = max(1, CHUNK_VALUES // w.k)
        for first in range(0, w.m, step):
            rows = slice(first, min(first + step, w.m))
            codes, scales = quantized(self._incoming(rows, found)[:, : w.k], w, self.operands)
            found["codes"].view(torch.int8)[rows] = torch.nn.functional.pad(codes, (0, w.code_columns(self.arch) - w.k))
            found["scales"][..., rows] = scales
        return found

    def _incoming(self, rows: slice, found: Outputs) -> Tensor:
        """What takes the place of x in these rows; a residual's sum is written to ``found``."""
        x = self.operands["x"][rows]
        if self.workload.gate:
            return gated_reference(x, self.workload.gate)
        if self.workload.residual:
            x = found["residual"][rows] = x + self.operands["residual"][rows]
        return x


def quantized(x: Tensor, w: QuantizeWorkload, columns: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(int8 bytes [rows, k], fp32 [rows] or [groups, rows]) of ``x`` [rows, k]: the definition
    (``QuantizeWorkload``) in torch, the sum of a norm's squares in fp64. ``columns`` holds
    ``norm_weight`` and ``smooth``. ``x`` is what a residual or a gate makes of it."""
    y = x.float()
    if w.norm:
        total = y.square().double().sum(1, keepdim=True).float()
        inverse_root = torch.where(total.isfinite(), 1.0 / (_over(total, w.k) + w.eps).sqrt(), torch.nan)
        y = y * inverse_root * (columns["norm_weight"][: w.k].float() + w.offset)
    if w.smooth:
        y = y * columns["smooth"][: w.k]
    size = w.k if w.group == PER_TOKEN else w.group
    y = torch.nn.functional.pad(y, (0, w.groups * size - w.k)).unflatten(1, (w.groups, size))
    amax = y.abs().amax(2, keepdim=True).clamp(min=w.floor)
    finite = amax < torch.inf  # false for NaN
    scales = torch.where(finite, _over(amax, w.largest), torch.nan)[..., 0].t()
    inverse = torch.full_like(amax, w.largest) / amax
    if w.out == "int8":
        codes = (y.double() * inverse.double()).round().masked_fill(~finite, 0.0).to(torch.int8)
    else:
        codes = (y * inverse).clamp(-w.largest, w.largest).masked_fill(~finite, 0.0).to(torch.float8_e4m3fn).view(torch.int8)
    return codes.flatten(1)[:, : w.k], scales[0] if w.group == PER_TOKEN else scales


def _over(tensor: Tensor, number: float) -> Tensor:
    """Rounded once: on a GPU torch multiplies by the reciprocal of a number that is no tensor."""
    return tensor / torch.full_like(tensor, number)


def quantize_problem(workload: QuantizeWorkload, x: Tensor, seed: int, arch: str = "cpu") -> QuantizeProblem:
    """The problem of ``x`` [m, k], of a gate [m, 2 k], with a random norm weight (about 1 with the
    offset), factors (0.25 to 4) and a normal residual."""
    w, device = workload, x.device
    generator = torch.Generator(device).manual_seed(seed)
    made = {"x": x.to(getattr(torch, w.dtype))}
    if w.gate:
        x = torch.nn.functional.pad(x.unflatten(1, (2, w.k)), (0, w.columns(arch) - w.k)).flatten(1)
        made["x"] = x.to(made["x"].dtype)
    if w.residual:
        made["residual"] = (3.0 * torch.randn(w.m, w.k, generator=generator, device=device)).to(made["x"].dtype)
    if w.norm:
        made["norm_weight"] = (1.0 - w.offset + 0.25 * torch.randn(w.k, generator=generator, device=device)).to(made["x"].dtype)
    if w.smooth:
        made["smooth"] = 2.0 ** (4.0 * torch.rand(w.k, generator=generator, device=device) - 2.0)
    columns = w.columns(arch)
    padded = {name: torch.nn.functional.pad(t, (0, max(0, columns - t.shape[-1]))) for name, t in made.items()}
    return QuantizeProblem(w, padded, arch)


def random_problem(workload: QuantizeWorkload, seed: int, arch: str = "cpu", device: str = "cpu") -> QuantizeProblem:
    """Rows of normal numbers, each of another size, a few columns much larger than the others."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(workload.m, incoming_columns(workload), generator=generator, device=device)
    x *= 2.0 ** (6.0 * torch.rand(workload.m, 1, generator=generator, device=device) - 4.0)
    x[:, :: max(1, workload.k // 7)] *= 20.0
    return quantize_problem(workload, x, seed, arch)


def edge_problem(workload: QuantizeWorkload, seed: int, arch: str = "cpu", device: str = "cpu") -> QuantizeProblem:
    """Eleven rows at which kernels go wrong: zeros, the largest and the least numbers, halves between
    codes, one value alone at either end, NaN and infinities, a norm's eps."""
    w = replace(workload, m=EDGES)
    numbers = torch.finfo(getattr(torch, w.dtype))
    generator = torch.Generator(device).manual_seed(seed)
    columns = incoming_columns(w)
    x = torch.randn(EDGES, columns, generator=generator, device=device, dtype=torch.float64)
    x[0] = 0.0
    x[1] = numbers.max * x[1].sign()
    x[2] = numbers.smallest_normal * (x[2] * 4).round() / 16  # most are subnormal
    x[3] = torch.randint(-254, 255, (columns,), generator=generator, device=device) / 2
    x[3, :: w.group if w.group > 0 else w.k] = 127.0  # the scale is 1, and codes are halves
    x[4] = 0.0
    x[4, 0] = -3.0
    x[5] = 0.0
    x[5, -1] = 5.0
    x[6, w.k // 2] = torch.nan
    x[7, -1] = torch.inf
    x[8, 0] = -torch.inf
    x[9] *= 1e-3  # its mean square is about eps
    problem = quantize_problem(w, x, seed, arch)
    if w.residual:
        problem.operands["residual"][:EXACT] = 0.0
    return problem


def incoming_columns(w: QuantizeWorkload) -> int:
    """Of x without padding."""
    return 2 * w.k if w.gate else w.k


class QuantizeGate:
    """The references of one workload, computed once, and the verdict on any number of kernels for it:
    on rows of edges, then on random ones twice, whose bits must be equal. Outputs are poisoned between
    guard bands with bytes that no kernel stores."""

    def __init__(self, edges: QuantizeProblem, random: QuantizeProblem) -> None:
        self.random = random
        self._checks = [(name, problem, problem.reference()) for name, problem in (("edges", edges), (random.workload.title, random))]

    def verify(self, run: Callable[[QuantizeProblem, Outputs], None]) -> Verdict:
        error = 0.0
        for name, problem, expected in self._checks:
            first, second = (_run(run, problem) for _ in range(2))
            reasons = [f"{output}: {reason}" for output, guarded in first.items() for reason in check_guards(guarded)]
            if not reasons:
                wrong, error = compared({output: guarded.y for output, guarded in first.items()}, expected, problem.workload)
                reasons += wrong
            if not reasons and any(not torch.equal(_bits(first[output].y), _bits(second[output].y)) for output in first):
                reasons = ["two runs on the same input differ."]
            if reasons:
                return Verdict(tuple(f"{name}: {reason}" for reason in reasons))
        return Verdict((), error)


def compared(found: Outputs, expected: Outputs, w: QuantizeWorkload) -> tuple[list[str], float]:
    """(what is wrong with codes and scales, the largest relative difference of a scale)."""
    scale, right = found["scales"], expected["scales"]
    differs = (scale - right).abs() / right
    differs[scale.isnan() & right.isnan()] = 0.0
    reasons, error = [], float(differs.nan_to_num(nan=torch.inf).max()) if differs.numel() else 0.0
    if error > _scale_error(w):
        at = tuple(int(i) for i in (differs.nan_to_num(nan=torch.inf) == error).nonzero()[0])
        reasons.append(f"the scale at {list(at)} is {float(scale[at])} and should be {float(right[at])}.")
    apart = (_ordered(found["codes"]) - _ordered(expected["codes"])).abs()
    accepted = int(w.norm or bool(w.gate))
    few = max(2, int((GATED_APART if w.gate else MOST_APART) * apart.numel())) if accepted else 0
    wrong = int((apart > accepted).sum())
    if wrong:
        at = tuple(int(i) for i in (apart > accepted).nonzero()[0])
        got, right = (int(outputs["codes"].view(torch.int8)[at]) for outputs in (found, expected))
        reasons.append(f"{wrong} of {apart.numel()} codes are wrong; the first at {list(at)} is the byte {got} and should be {right}.")
    elif int((apart > 0).sum()) > few:
        reasons.append(f"{int((apart > 0).sum())} of {apart.numel()} codes are one apart; accepted: {few}.")
    if w.residual:
        sums, right = found["residual"], expected["residual"]
        wrong = int(((_bits(sums) != _bits(right)) & ~(sums.isnan() & right.isnan())).sum())
        reasons += [f"{wrong} numbers of the residual are wrong."] if wrong else []
    return reasons, error


def _scale_error(w: QuantizeWorkload) -> float:
    """What a scale may be off, relative."""
    return GATED_ERROR[w.dtype] if w.gate else SCALE_ERROR if w.norm else 0.0


def gate(workload: QuantizeWorkload, seed: int, arch: str, device: str) -> QuantizeGate:
    """The gate of the quantization of activations."""
    return QuantizeGate(*(make(workload, seed, arch, device) for make in (edge_problem, random_problem)))


def _ordered(codes: Tensor) -> Tensor:
    """int16 in which neighbouring codes are one apart; e4m3 numbers by their bits, -0 below +0."""
    bytes_ = codes.view(torch.int8).to(torch.int16)
    return bytes_ if codes.dtype == torch.int8 else torch.where(bytes_ < 0, -129 - bytes_, bytes_)


def _bits(output: Tensor) -> Tensor:
    return output.view({4: torch.int32, 2: torch.int16, 1: torch.int8}[output.element_size()])


def _run(run: Callable[[QuantizeProblem, Outputs], None], problem: QuantizeProblem) -> dict[str, GuardedOutput]:
    device = problem.operands["x"].device
    outputs = {name: guarded_output(shape, dtype, device) for name, (shape, dtype) in problem.written().items()}
    if "residual" in outputs:
        outputs["residual"].y.copy_(problem.operands["residual"])
    run(problem, {name: guarded.y for name, guarded in outputs.items()})
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return outputs
