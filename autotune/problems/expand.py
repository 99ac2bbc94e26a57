"""Problems of the expansion of a weight of any precision: its planes and codebooks, the matrix that a
call must write, bit by bit, and the gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...layouts.planes import plane_layout
from ...schedules.gemm.expand import ExpandWorkload
from . import Verdict
from .gemm import unpack_planes
from .verify import check_guards, guarded_output


@dataclass(frozen=True, slots=True, eq=False)
class ExpandProblem:
    """One call; ``operands`` are ``weight`` and ``scales``, the planes and codebooks."""

    workload: ExpandWorkload
    operands: dict[str, Tensor]
    arch: str

    def outputs(self) -> Tensor:
        return self.operands["scales"].new_empty(self.workload.n, self.workload.columns)

    def named(self, y: Tensor) -> dict[str, Tensor]:
        """The tensors of a call that writes to ``y``."""
        return {**self.operands, "y": y}

    def copied(self) -> ExpandProblem:
        return ExpandProblem(self.workload, {name: tensor.clone() for name, tensor in self.operands.items()}, self.arch)

    def reference(self) -> Tensor:
        """What a call must write."""
        w = self.workload
        codes = unpack_planes(self.operands["weight"], plane_layout(self.arch))[: w.n, : w.columns]
        return self.operands["scales"][: w.n].gather(1, codes.long())


def random_problem(workload: ExpandWorkload, seed: int, arch: str, device: str) -> ExpandProblem:
    """Any bits, those of padding too, and codebooks of normal numbers."""
    generator = torch.Generator(device).manual_seed(seed)
    planes, books = (tuple(map(int, o.shape)) for o in workload.operands(arch)[:2])
    bits = torch.randint(-(1 << 31), 1 << 31, planes, generator=generator, device=device).to(torch.int32)
    numbers = torch.randn(books, generator=generator, device=device).to(getattr(torch, workload.dtype))
    return ExpandProblem(workload, {"weight": bits, "scales": numbers}, arch)


class ExpandGate:
    """The reference of one workload and the verdict on any number of kernels for it: every number
    of an output that is poisoned before, between guard bands."""

    def __init__(self, random: ExpandProblem) -> None:
        self.random, self.expected = random, random.reference()

    def verify(self, run: Callable[[ExpandProblem, Tensor], None]) -> Verdict:
        output = guarded_output(tuple(self.expected.shape), self.expected.dtype, self.expected.device)
        run(self.random, output.y)
        if self.expected.is_cuda:
            torch.cuda.synchronize(self.expected.device)
        reasons = check_guards(output)
        wrong = output.y.view(torch.int16) != self.expected.view(torch.int16)
        if bool(wrong.any()):
            at = [int(i) for i in wrong.nonzero()[0]]
            reasons.append(f"{int(wrong.sum())} of {wrong.numel()} numbers are wrong; the first at {at}.")
        return Verdict(tuple(reasons))


def gate(workload: ExpandWorkload, seed: int, arch: str, device: str) -> ExpandGate:
    """The gate of expansions."""
    return ExpandGate(random_problem(workload, seed, arch, device))
