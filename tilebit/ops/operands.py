"""Checks of a call's tensors against what the workload states, and the schemas that follow from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..schedules.operands import Operand, binds, known_sizes

ALIGNMENT = 16  # bytes; kernels load 128 bits at a time


def check(operands: Sequence[Operand], given: Sequence[Tensor | None], device: torch.device, call: str, *, dense: bool = False) -> None:
    """Raise ``ValueError`` for the first tensor that does not fit its operand on ``device``; reads
    no device memory.

    ``given`` are in call order. ``call`` says in words what needs them. Written operands, and with
    ``dense`` all, must be contiguous and aligned: others may be copied first; and with ``dense``
    what the workload does not have must be None.
    """
    sizes: dict[str, int] = {}
    for o, tensor in zip(operands, given, strict=True):
        if o.absent:
            if dense and tensor is not None:
                raise ValueError(f"{o.name} is {describe(tensor)}; {call} has none; pass None")
            continue
        if tensor is None:
            raise ValueError(f"{o.name} is missing; {call} needs {o.text()}; {o.advice or 'pass it'}")
        whole = dense or o.written
        fits = tensor.dtype is getattr(torch, o.dtype) and tensor.device == device and binds(tensor.shape, o.shape, sizes)
        if fits and (not whole or (tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0)):
            check_memory(o.name, tensor)
            continue
        known = known_sizes(o.shape, sizes)
        raise ValueError(
            f"{o.name} is {describe(tensor)}; {call} needs {o.text()} on {device}"
            f"{f', contiguous and {ALIGNMENT}-byte aligned' if whole else ''}{' with ' + ', '.join(known) if known else ''}; "
            f"{o.advice or 'convert it with .to(...) or pass what fits'}"
        )


def rows_apart(tensor: Tensor) -> bool:
    """Whether the rows of ``tensor`` are dense and a multiple of ALIGNMENT bytes apart."""
    row = tensor[:1]
    return row.is_contiguous() and (tensor.shape[0] < 2 or tensor.stride(0) * tensor.element_size() % ALIGNMENT == 0)


def check_memory(name: str, tensor: Tensor) -> None:
    """Raise ``ValueError`` where the tensor's storage was shrunk or freed
    (``untyped_storage().resize_``) and no longer holds it: what reads it would read another's
    memory, or none."""
    held = tensor.untyped_storage().nbytes()
    needed = tensor.storage_offset() * tensor.element_size() + _span(tensor) if tensor.numel() else 0
    if held < needed:
        raise ValueError(
            f"{name} is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} whose storage was shrunk or freed: it has {held} "
            f"of the {needed} bytes that are needed; fill the storage again, or pass another tensor"
        )


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors lie in the same memory in part: the bytes from the first to the last
    element of each."""
    first, second = a.data_ptr(), b.data_ptr()
    return first < second + _span(b) and second < first + _span(a)


def _span(tensor: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if tensor.is_contiguous():  # first: asking for sizes costs host time
        return tensor.nbytes
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def describe(tensor: Tensor) -> str:
    """A tensor in words: dtype, shape, device, and what keeps a kernel from reading it as it is."""
    text = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
    if not tensor.is_contiguous():
        text += f" with strides {list(tensor.stride())}"
    if tensor.device.type != "meta" and tensor.data_ptr() % ALIGNMENT:
        text += f", {tensor.data_ptr() % ALIGNMENT} bytes past a {ALIGNMENT}-byte boundary"
    return text


def schema(operands: Sequence[Operand]) -> list[str]:
    """The operands as arguments of an operator's schema, in call order: ``Tensor x``, ``Tensor?
    bias``; those that a call changes are ``Tensor(a!) pages``. What is only written is the
    operator's result and left to it, what no call of such a workload has another operator's."""
    taken = [o for o in operands if o.read and (o.optional or not o.absent)]
    marks = iter("abcdefgh")
    return [f"Tensor{f'({next(marks)}!)' if o.written else ''}{'?' if o.optional else ''} {o.name}" for o in taken]
