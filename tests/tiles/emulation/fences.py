"""Operands of an emulated kernel in memory that has fences around it: what a kernel reads behind an operand is the same in every run, and
what it writes there is seen, and changes nothing of the process that runs it."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from .device_code import KernelFault

FENCE = 1 << 18  # bytes
ALIGNED = 128  # bytes; what is aligned to less stays so
# 32 bytes of zeros, then of ones: of an index column 0, then ``ADDED``; of floats 0, then none. The longest fence, as it lies behind an
# operand, and before one.
BEHIND = np.resize(np.repeat(np.array([0, 0xFF], np.uint8), 32), FENCE + ALIGNED)
BEFORE = BEHIND[::-1].copy()


class Fences:
    """The operands of one launch. Each storage is copied once, so that tensors which share one still do."""

    def __init__(self) -> None:
        self._storages: dict[tuple[int, int], tuple[np.ndarray, np.ndarray, int]] = {}  # by address and size: (itself, copy, where in it)

    def tensor(self, tensor: Tensor) -> Tensor:
        """``tensor`` in the copy of its storage."""
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            return tensor
        copy, at = self._copied(storage.data_ptr(), storage.nbytes())
        offset = at // tensor.element_size() + tensor.storage_offset()
        of_copy = torch.from_numpy(copy).untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(of_copy, offset, tensor.shape, tensor.stride())

    def array(self, array: np.ndarray) -> np.ndarray:
        """Contiguous ``array``, flat, in a copy."""
        if array.nbytes == 0:
            return array
        copy, at = self._copied(array.ctypes.data, array.nbytes)
        return copy[at : at + array.nbytes].view(array.dtype)

    def take_back(self) -> None:
        """What a kernel has written, to the operands themselves. Raises ``KernelFault`` where it wrote to a fence."""
        for own, copy, at in self._storages.values():
            before, behind = copy[:at], copy[at + own.size :]
            if not (np.array_equal(before, BEFORE[-at:]) and np.array_equal(behind, BEHIND[: behind.size])):
                raise KernelFault(f"a kernel stores outside of an operand of {own.size} bytes")
            own[:] = copy[at : at + own.size]

    def _copied(self, address: int, size: int) -> tuple[np.ndarray, int]:
        if (address, size) not in self._storages:
            own = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8)), (size,))
            copy = np.empty(size + 2 * FENCE + ALIGNED, np.uint8)
            at = FENCE + (address - copy.ctypes.data - FENCE) % ALIGNED
            copy[:at], copy[at : at + size], copy[at + size :] = BEFORE[-at:], own, BEHIND[: copy.size - at - size]
            self._storages[address, size] = own, copy, at
        _, copy, at = self._storages[address, size]
        return copy, at
