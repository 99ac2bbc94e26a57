"""Kernels of the CPU attention programs, and calls of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cpu_cases import built, runs_here, target
from torch import Tensor

from tilebit.autotune.problems.attention import AttentionProblem
from tilebit.autotune.problems.attention_verify import AttentionGate
from tilebit.layouts.kv_formats import KVFormat
from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.schedule import Schedule
from tilebit.tiles.compiler.compile import CompileRequest
from tilebit.tiles.compiler.kernel import Kernel

GROUPS = (1, 4, 7, 8, 16)
PAGES = (16, 32, 64, 128, 256)
ISA = next((isa for isa in ("avx512_bf16", "avx512", "avx2") if runs_here(isa)), "avx2")
Case = tuple[AttentionWorkload, Schedule, str]  # and the instruction set


def workload(op: str, format_name: str = "kv16", **changes: Any) -> AttentionWorkload:
    base = AttentionWorkload(op, 1, 1, 512, 2, 1, 64, KVFormat.from_name(format_name))
    return replace(base, **changes)


def case(w: AttentionWorkload, step: int = 128, threads: int = 2, isa: str = ISA) -> Case:
    return w, Schedule(f"attention_{w.op}_cpu", step, 1, w.head_dim, num_warps=threads), isa


def name_of(one: Case) -> str:
    w, s, isa = one
    flags = f"w{w.window}s{w.sink_tokens}" * bool(w.window) + "-sinks" * w.sinks + "-cap" * bool(w.soft_cap) + "-lse" * w.lse
    flags += w.rotary + "-q" * w.queries
    return f"{w.format.name}-{w.dtype}-{w.heads_q}/{w.heads_kv}x{w.head_dim}-page{w.page_size}-{flags}-step{s.block_n}-{s.num_warps}-{isa}"


def kernel_of(one: Case) -> Kernel:
    w, s, isa = one
    return built(CompileRequest(s.program, w, s, target(isa)))


def call(kernel: Kernel, problem: AttentionProblem, outputs: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The outputs of one call, into new memory unless given."""
    outputs = problem.outputs() if outputs is None else outputs
    named = problem.named(outputs)
    kernel(*(named[name] for name in kernel.params))
    return outputs


def verdict(kernel: Kernel, edges: AttentionProblem, other: AttentionProblem) -> tuple[str, ...]:
    """What the tuner's gate has against the kernel on two problems."""

    def run(problem: AttentionProblem, outputs: dict[str, Tensor]) -> None:
        call(kernel, problem, outputs)

    return AttentionGate(edges, other).verify(run).reasons


def edge_lengths(page_size: int) -> list[int]:
    return [0, 1, 127, 128, 129, page_size - 1, page_size + 1, 300, 517]
