"""Problems of a product with a weight of 16 bits: operands, the answer that a call must give, and the
gate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...schedules.gemm.dense import DenseWorkload
from .verify import Gate

LARGEST_X, LARGEST_WEIGHT = 4, 2  # whole numbers of the exact problem, whose sums every order gives


@dataclass(frozen=True, slots=True, eq=False)
class DenseProblem:
    """One call on ``x`` [m, k] with the ``weight`` [n, k] of ``operands``."""

    workload: DenseWorkload
    x: Tensor
    operands: dict[str, Tensor]

    def outputs(self) -> Tensor:
        """A new y [m, n] to write to."""
        return self.x.new_empty(self.workload.m, self.workload.n)

    def named(self, y: Tensor) -> dict[str, Tensor]:
        """The tensors of a call on the first ``len(y)`` rows of x, which writes to ``y``."""
        return {"x": self.x[: len(y)], **self.operands, "y": y}

    def copied(self) -> DenseProblem:
        """The same in other memory."""
        return DenseProblem(self.workload, self.x.clone(), {name: tensor.clone() for name, tensor in self.operands.items()})

    def reference(self) -> Tensor:
        """y in fp64."""
        return self.x.double() @ self.operands["weight"].double().t()

    def torch_result(self) -> Tensor:
        """y as torch computes it in the workload's dtype."""
        return self.x @ self.operands["weight"].t()


def exact_problem(workload: DenseWorkload, seed: int, device: str) -> DenseProblem:
    """Small whole numbers: a right kernel gives the reference, rounded once."""
    x, weight = (
        torch.randint(-largest, largest + 1, shape, generator=_generator(seed + i, device), device=device)
        for i, (largest, shape) in enumerate(((LARGEST_X, (workload.m, workload.k)), (LARGEST_WEIGHT, (workload.n, workload.k))))
    )
    return _problem(workload, x, weight)


def random_problem(workload: DenseWorkload, seed: int, device: str) -> DenseProblem:
    """Normal numbers, of the weight of deviation 1 / sqrt(k)."""
    x = torch.randn(workload.m, workload.k, generator=_generator(seed, device), device=device)
    weight = torch.randn(workload.n, workload.k, generator=_generator(seed + 1, device), device=device) / workload.k**0.5
    return _problem(workload, x, weight)


def _problem(workload: DenseWorkload, x: Tensor, weight: Tensor) -> DenseProblem:
    dtype = getattr(torch, workload.dtype)
    return DenseProblem(workload, x.to(dtype), {"weight": weight.to(dtype)})


def _generator(seed: int, device: str) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def gate(workload: DenseWorkload, seed: int, arch: str, device: str) -> Gate:
    """The gate of these products."""
    return Gate(exact_problem(workload, seed, device), random_problem(workload, seed, device))
