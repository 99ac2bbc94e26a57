"""Problems of ``toy.scaled_add``: operands, the answers they must give in fp64, and the gate, which is that of products."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilebit.autotune.problems.verify import Gate

from .scaled_add import ScaledAdd


@dataclass(frozen=True, slots=True, eq=False)
class ScaledAddProblem:
    """One call; ``operands`` are ``x`` and ``residual`` [m, n] in the workload's dtype and ``scale`` fp32 [m]."""

    workload: ScaledAdd
    operands: dict[str, Tensor]

    @property
    def x(self) -> Tensor:
        return self.operands["x"]

    def outputs(self) -> Tensor:
        return torch.empty_like(self.x)

    def named(self, y: Tensor) -> dict[str, Tensor]:
        return {**{name: tensor[: len(y)] for name, tensor in self.operands.items()}, "y": y}

    def copied(self) -> ScaledAddProblem:
        return replace(self, operands={name: tensor.clone() for name, tensor in self.operands.items()})

    def reference(self) -> Tensor:
        return self._sum(torch.float64)

    def torch_result(self) -> Tensor:
        return self._sum(torch.float32).to(self.x.dtype)

    def _sum(self, dtype: torch.dtype) -> Tensor:
        x, scale, residual = (self.operands[name].to(dtype) for name in ("x", "scale", "residual"))
        return x * scale[:, None] + residual


def exact_problem(workload: ScaledAdd, seed: int, device: str) -> ScaledAddProblem:
    """Small integers and powers of two: every step is exact in fp32."""
    generator = torch.Generator(device).manual_seed(seed)
    x, residual = (torch.randint(-64, 65, (workload.m, workload.n), generator=generator, device=device) for _ in range(2))
    scale = 2.0 ** torch.randint(-4, 3, (workload.m,), generator=generator, device=device)
    return _problem(workload, x, scale, residual)


def random_problem(workload: ScaledAdd, seed: int, device: str) -> ScaledAddProblem:
    generator = torch.Generator(device).manual_seed(seed)
    x, residual = (torch.randn(workload.m, workload.n, generator=generator, device=device) for _ in range(2))
    return _problem(workload, x, 0.5 + torch.rand(workload.m, generator=generator, device=device), residual)


def _problem(workload: ScaledAdd, x: Tensor, scale: Tensor, residual: Tensor) -> ScaledAddProblem:
    dtype = getattr(torch, workload.dtype)
    return ScaledAddProblem(workload, {"x": x.to(dtype), "scale": scale.float(), "residual": residual.to(dtype)})


def gate(workload: ScaledAdd, seed: int, arch: str, device: str) -> Gate:
    return Gate(*(make(workload, seed, device) for make in (exact_problem, random_problem)))
