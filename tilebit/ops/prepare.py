"""Having kernels ready before they are needed: for one weight or a whole model, compiled in
parallel, at once or in the background."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ..kernels import find_kernel, one_compiler
from ..progress import waiting
from ..weights.packed import PackedWeight
from . import dispatch
from .dispatch import Plan


class Preparation:
    """Kernels on their way. A call that needs one of them meanwhile waits for that one alone; none
    is compiled twice."""

    def __init__(self, plans: list[Plan], ms: list[int] | None) -> None:
        self._plans, self._ms = plans, ms
        missing = dict.fromkeys((workload, plan.target) for plan in plans for workload in plan.missing(ms))
        self._builds: list[Future[object]] = [Future() for _ in missing]
        self._waiting = deque(zip(missing, self._builds, strict=True))
        self._pool = None
        if missing:
            from ..tiles.compiler.pool import CompilePool

            threads = min(len(missing), CompilePool().jobs)
            self._pool = ThreadPoolExecutor(threads, "tilebit-prepare")
            for _ in range(threads):
                self._pool.submit(self._find)

    def _find(self) -> None:
        """One kernel after another, as long as there are any, with a compiler of this thread's."""
        with one_compiler():
            while True:
                try:
                    (workload, target), build = self._waiting.popleft()
                except IndexError:
                    return
                try:
                    build.set_result(find_kernel(workload, target))
                except BaseException as error:
                    build.set_exception(error)

    @property
    def left(self) -> int:
        """Kernels that are not ready yet."""
        return sum(not build.done() for build in self._builds)

    def wait(self, timeout: float | None = None) -> None:
        """Until all kernels are built, then load them; a bar on a terminal's standard error counts them.
        Raises ``KernelUnavailable`` when one cannot be built, and ``TimeoutError`` after ``timeout``
        seconds in all."""
        until = None if timeout is None else time.monotonic() + timeout
        with waiting("compiling kernels", len(self._builds)) as settled:
            for build in self._builds:
                build.add_done_callback(lambda _: settled(len(self._builds) - self.left))
            for build in self._builds:
                build.result(None if until is None else max(0.0, until - time.monotonic()))
        if self._pool is not None:
            self._pool.shutdown()
        for plan in self._plans:
            for m in plan.bounds if self._ms is None else self._ms:
                plan.launcher(m)


def prepare(
    weights: PackedWeight | Iterable[PackedWeight] | torch.nn.Module,
    m: Iterable[int] | None = None,
    bias: bool = False,
    dependent: bool = False,
    background: bool = False,
) -> Preparation:
    """Load, and where needed compile, the kernels that calls with ``m`` rows will use (None: any
    number of rows): before a CUDA-graph capture or a first request. While they compile a terminal's
    standard error shows a bar.

    ``weights`` are one or several packed weights, for which ``bias`` and ``dependent`` say whether
    calls pass them, or a model, whose layers say so themselves (``AnyPrecisionLinear``: for the width
    that each is set to). All kernels compile in parallel, in as many processes as there are cores.
    With ``background`` this returns at once: ``Preparation.wait`` waits for them and loads them; a
    call that comes before waits for its own kernel. Raises ``TypeError`` and ``ValueError`` for
    anything else, and ``KernelUnavailable`` when a kernel is missing and cannot be built.
    """
    rows = None if m is None else list(m)
    if rows is not None and (not rows or any(not isinstance(count, int) or isinstance(count, bool) or count < 1 for count in rows)):
        raise ValueError(f"m is {rows}; accepted: one or more numbers of rows, 1 and above, or None for any number")
    prepared = Preparation(list(dict.fromkeys(_plans(weights, bias, dependent))), rows)
    if not background:
        prepared.wait()
    return prepared


def _plans(weights: PackedWeight | Iterable[PackedWeight] | torch.nn.Module, bias: bool, dependent: bool) -> list[Plan]:
    from ..weights.any_modules import AnyPrecisionLinear  # they import the operators
    from ..weights.embedding import QuantEmbedding
    from ..weights.mixed import MixedLinear
    from ..weights.modules import QuantLinear

    if isinstance(weights, torch.nn.Module):
        mixed = [module for module in weights.modules() if isinstance(module, MixedLinear)]
        callers = [module for module in weights.modules() if not isinstance(module, MixedLinear | QuantEmbedding)]
        called = dict.fromkeys((weights, *(child for caller in callers for child in caller.children())))  # not rows alone
        layers = [module for module in called if isinstance(module, QuantLinear)]
        of_widths = [module for module in weights.modules() if isinstance(module, AnyPrecisionLinear)]
        if not (layers or mixed or of_widths):
            raise ValueError(
                f"{type(weights).__name__} has no QuantLinear or AnyPrecisionLinear layer; quantize it first (tilebit.quantize_model)"
            )
        return [
            *(_plan(layer.packed, layer.bias is not None, layer.dependent) for layer in layers),
            *(_plan(layer.packed.view(layer.bits), layer.bias is not None, False) for layer in of_widths),
            *(_plan(layer.rows.packed, layer.rows.bias is not None, False, layer.out_features, nibbles=layer.nibbles) for layer in mixed),
        ]
    found = [weights] if isinstance(weights, PackedWeight) else list(weights) if isinstance(weights, Iterable) else []
    if not found or not all(isinstance(packed, PackedWeight) for packed in found):
        raise TypeError(
            f"got prepare({type(weights).__name__}, ...); accepted: a PackedWeight (make one with tilebit.pack), several, or a model with "
            "QuantLinear layers"
        )
    return [_plan(packed, bias, dependent) for packed in found]


def _plan(packed: PackedWeight, bias: bool, dependent: bool, width: int = 0, **parts: bool) -> Plan:
    return dispatch.plan_for(packed.device, packed.n, packed.k, packed.format_name, packed.dtype, bias, dependent, width, **parts)
