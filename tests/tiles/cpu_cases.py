"""Kernels of the CPU tests, and operands of those of GEMMs: packed weights and the fp64 weight they stand for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch

from tilebit.layouts.packing import gemm_layout
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.target import Target, target_from_name
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileRequest
from tilebit.tiles.compiler.kernel import Kernel
from tilebit.tiles.compiler.pool import CompilePool

# Those in which only products of integers differ are INTEGER_FEATURES.
INTEGER_FEATURES = {"avx512_vnni": ("avx512_vnni", "avx512", "avx2"), "avx_vnni": ("avx_vnni", "avx2")}
FEATURES = {"avx512_bf16": ("avx512_bf16", "avx512", "avx2"), "avx512": ("avx512", "avx2"), "avx2": ("avx2",)}
_FLAGS = {"avx512_bf16": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"}, "avx2": {"avx2", "fma", "f16c"}}
_FLAGS["avx512"] = _FLAGS["avx512_bf16"] - {"avx512_bf16"}
_FLAGS |= {"avx512_vnni": _FLAGS["avx512"] | {"avx512_vnni"}, "avx_vnni": _FLAGS["avx2"] | {"avx_vnni"}}


def target(isa: str) -> Target:
    """This machine as if ``isa`` were the best it has."""
    return replace(target_from_name("cpu"), features=(FEATURES | INTEGER_FEATURES)[isa])


def runs_here(isa: str) -> bool:
    try:
        with open("/proc/cpuinfo") as file:
            flags = next((set(line.split()) for line in file if line.startswith("flags")), set())
    except OSError:
        return False
    return _FLAGS[isa] <= flags


@cache
def built(request: CompileRequest) -> Kernel:
    """The kernel, compiled when a test first asks for it, in a process that is kept: test workers that share out the cases of a file
    share out its kernels, too."""
    with CompilePool(jobs=1, cache=ArtifactCache(), keep=True) as pool:
        (kernel,) = pool.compile([request])
    assert isinstance(kernel, Kernel), kernel
    return kernel


@dataclass(frozen=True)
class Operands:
    """``tensors`` are what a kernel takes between x and y; ``weight`` is the fp64 [n, k] they mean, ``tokens`` [m] and ``bias`` [n] or
    None."""

    workload: Workload
    tensors: tuple[torch.Tensor, ...]
    weight: torch.Tensor
    bias: torch.Tensor | None
    tokens: torch.Tensor | None = None

    def of_rows(self, m: int) -> tuple[torch.Tensor, ...]:
        """``tensors`` for the first m rows of x."""
        return tuple(tensor[:m] if tensor is self.tokens else tensor for tensor in self.tensors)

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        """fp64 [m, n]."""
        y = x.double() @ self.weight.T
        if self.tokens is not None:
            y *= self.tokens[: x.shape[0], None].double()
        return y if self.bias is None else y + self.bias.double()


def operands(workload: Workload, seed: int, exact: bool) -> Operands:
    """``exact``: scales in {1, 2, 4} and a small integer bias, for integer x; else random floats."""
    generator = torch.Generator().manual_seed(seed)
    n, k, weight_format, dtype = workload.n, workload.k, workload.format, getattr(torch, workload.dtype)
    groups = weight_format.groups(k)
    codes = torch.randint(0, weight_format.max_code + 1, (n, k), generator=generator, dtype=torch.uint8)
    zeros = torch.full((n, groups), weight_format.symmetric_zero_point, dtype=torch.uint8)
    if not weight_format.symmetric:
        zeros = torch.randint(0, weight_format.max_code + 1, (n, groups), generator=generator, dtype=torch.uint8)
    if exact:
        scales = (2 ** torch.randint(0, 3, (n, groups), generator=generator)).to(dtype)
        bias = torch.randint(-8, 9, (n,), generator=generator).to(dtype)
    else:
        scales = (torch.rand(n, groups, generator=generator) * 0.02 + 0.001).to(dtype)
        bias = torch.randn(n, generator=generator).to(dtype)
    row_scales = torch.rand(n, generator=generator) + 0.5 if weight_format.row_scaled else torch.ones(n)
    if exact and weight_format.row_scaled:
        row_scales = 0.5 ** torch.randint(0, 3, (n,), generator=generator)
    tokens = torch.rand(workload.m, generator=generator) + 0.5
    if exact:
        tokens = 2.0 ** torch.randint(-1, 2, (workload.m,), generator=generator)
    group = torch.arange(k) // (k if weight_format.group_size < 0 else weight_format.group_size)
    numbers = torch.tensor(weight_format.weight.values, dtype=torch.float64)[codes.int()]
    weight = (numbers - zeros[:, group].double()) * scales[:, group].double() * row_scales[:, None].double()

    layout = gemm_layout("cpu", weight_format.bits)
    packed = torch.from_numpy(layout.pack(codes.numpy()).view(np.int32))

    def by_group(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(values.to(dtype).T, (0, layout.padded(n, k)[0] - n)).contiguous()

    tensors = [packed, by_group(scales)]
    tensors += [] if weight_format.symmetric else [by_group(zeros)]
    tensors += [torch.nn.functional.pad(row_scales, (0, layout.padded(n, k)[0] - n))] if weight_format.row_scaled else []
    tensors += [tokens] if workload.token_scales else []
    tensors += [bias] if workload.bias else []
    return Operands(workload, tuple(tensors), weight, bias if workload.bias else None, tokens if workload.token_scales else None)


def activations(workload: Workload, m: int, seed: int, exact: bool) -> torch.Tensor:
    """x [m, k]: integers of at most 4 in magnitude, or normal floats."""
    generator = torch.Generator().manual_seed(seed)
    shape, dtype = (m, workload.k), getattr(torch, workload.dtype)
    if exact:
        return torch.randint(-4, 5, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


GUARD = 64


def poisoned(m: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [m, n], the memory it lies in): all NaN, with ``GUARD`` elements before and after y."""
    memory = torch.full((m * n + 2 * GUARD,), float("nan"), dtype=dtype)
    return memory[GUARD : GUARD + m * n].view(m, n), memory


def guards_intact(memory: torch.Tensor) -> bool:
    return bool(memory[:GUARD].isnan().all() and memory[-GUARD:].isnan().all())
