"""Operators without derivatives: what asks for one is refused, and a call that nothing observes goes
past the dispatcher to the kernel, as ``gemm.call`` does (which asks the same of fewer operands, and
is written out there)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad, profiler
from torch.compiler import is_dynamo_compiling

from .derivatives import refuse

try:
    from torch._C import _is_tracing, _len_torch_dispatch_stack, _len_torch_function_stack
    from torch._C._functorch import peek_interpreter_stack
    from torch.autograd.forward_ad import _current_level  # noqa: F401  read from its module at each call: it changes
    from torch.autograd.profiler import _is_profiler_enabled  # noqa: F401  likewise
except ImportError:  # a torch that does not say who observes operators: then someone may

    def _len_torch_dispatch_stack() -> int:
        return 1


def unobserved(values: Iterable[Any]) -> bool:
    """Whether nothing could tell an operator's call from its kernel's, and the kernel may read these
    tensors as they lie: no tracer, mode, transform or profiler, no subclass, lazy sign or derivative."""
    if (
        _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or peek_interpreter_stack() is not None
        or _is_tracing()
        or profiler._is_profiler_enabled
        or forward_ad._current_level >= 0
    ):
        return False
    derived = is_grad_enabled()
    for value in values:
        if type(value) is Tensor:
            if value.is_neg() or (derived and value.requires_grad) or not (value.is_cpu or value.is_cuda):
                return False
        elif isinstance(value, Tensor):
            return False
    return True


def _title(name: str) -> str:
    """What a message calls an operator: ``tilebit.attention.decode``, ``tilebit.quantize``."""
    return name.replace("::attention_", ".attention.").replace("::", ".").removesuffix(".out")


def inference_only(operator: Any, kernel: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(what to call in place of ``operator``, its kernel for the autograd key). Both raise
    ``ValueError`` where a derivative of an operand is asked for."""
    names = tuple(inspect.signature(kernel).parameters)
    redispatch, title = operator.redispatch, _title(str(operator._schema.name))

    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_dynamo_compiling() and unobserved((*args, *kwargs.values()) if kwargs else args):
            return kernel(*args, **kwargs)
        return operator(*args, **kwargs)

    def derived(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if unobserved((*args, *kwargs.values()) if kwargs else args):
            return kernel(*args, **kwargs)
        refuse(title, "no derivatives", ((n, t) for n, t in (*zip(names, args, strict=False), *kwargs.items()) if isinstance(t, Tensor)))
        return redispatch(keys & torch._C._after_autograd_keyset, *args, **kwargs)

    return call, derived
