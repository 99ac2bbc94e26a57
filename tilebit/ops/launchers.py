"""Calls of a loaded kernel with an operation's operands, generated from what the workload states:
nothing is decided at a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..kernels import KernelUnavailable
from ..runtime import LoadedKernel
from ..schedules.operands import WORKSPACE, Operand, kernel_params
from .check import CHECKED
from .operands import check_memory
from .workspace import workspace

Launcher = Callable[..., None]  # the operation's operands, in call order; None for one that calls of the workload do not have


def bind(kernel: LoadedKernel, operands: Sequence[Operand], device: torch.device, words: int, *, early: bool = False) -> Launcher:
    """A function of all ``operands`` in call order that launches ``kernel`` on those it takes, with
    ``words`` 32-bit words of workspace where it takes one; ``early``: by programmatic dependent
    launch, where the kernel has it.

    Raises ``KernelUnavailable`` when the kernel's parameters are not those that the operands make.
    """
    takes = tuple(kernel.params)
    expected = kernel_params(operands, WORKSPACE in takes)
    if takes != expected:
        raise KernelUnavailable(
            f"the kernel in {kernel.path} takes {takes}; this call needs {expected}: delete that directory and compile it again"
        )
    names = [o.name for o in operands]
    run = kernel.run_dependent if early and kernel.run_dependent is not None else kernel.run
    # Written out for these operands, because every line of a call is host time.
    given: dict[str, Any] = {"run": run, "space": workspace, "device": device, "words": words}
    if WORKSPACE not in takes:
        text = f"lambda {', '.join(names)}: run({', '.join(takes)})"
        launch: Launcher = run if tuple(names) == takes else eval(text, given)
        return _compared(operands, launch) if CHECKED else launch
    # The memory is kept until the kernel is launched.
    passed = ["memory[0]" if name == WORKSPACE else name for name in takes]
    text = f"def launch({', '.join(names)}):\n    memory = space(device, words)\n    run({', '.join(passed)})\n"
    exec(text, given)
    return _compared(operands, given["launch"]) if CHECKED else given["launch"]


def _compared(operands: Sequence[Operand], launch: Launcher) -> Launcher:
    """``launch``, where every tensor's storage is first compared with what the tensor needs: half a
    microsecond a call, which is why it is asked for (``TILEBIT_CHECK``)."""

    def checked(*given: Any) -> None:
        for operand, tensor in zip(operands, given, strict=True):
            if tensor is not None:
                check_memory(operand.name, tensor)
        launch(*given)

    return checked
