"""Operands of emulated kernels lie between fences."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from .device_code import KernelFault
from .fences import ALIGNED, FENCE, Fences


def test_what_a_kernel_writes_comes_back():
    fences, whole, array = Fences(), torch.arange(100, dtype=torch.float16), np.arange(6, dtype=np.int32)
    left, every_second, empty = whole[3:20], whole[40::2], torch.empty(0, 4)
    a, b, c, d = fences.tensor(left), fences.tensor(every_second), fences.array(array), fences.tensor(empty)
    assert torch.equal(a, left) and torch.equal(b, every_second) and b.stride() == (2,) and d.shape == (0, 4)
    assert (a.data_ptr() - left.data_ptr()) % ALIGNED == (c.ctypes.data - array.ctypes.data) % ALIGNED == 0
    assert b.data_ptr() - a.data_ptr() == every_second.data_ptr() - left.data_ptr()  # of one storage
    a[:], b[1], c[5] = -1, -2, -3
    assert whole.tolist() == list(range(100)) and array[5] == 5
    fences.take_back()
    assert (
        whole[2:21].tolist() == [2] + [-1] * 17 + [20] and whole[41:44].tolist() == [41, -2, 43] and array.tolist() == [0, 1, 2, 3, 4, -3]
    )


@pytest.mark.parametrize("place", [-FENCE, -1, 12, FENCE])
def test_what_it_writes_behind_or_before_is_an_error(place: int):
    fences, array = Fences(), np.arange(3, dtype=np.int32)
    byte = ctypes.c_uint8.from_address(fences.array(array).ctypes.data + place)
    byte.value ^= 1
    with pytest.raises(KernelFault, match="outside of an operand of 12 bytes"):
        fences.take_back()


def test_what_it_reads_behind_is_an_index_of_the_first_and_of_none():
    behind = np.lib.stride_tricks.as_strided(Fences().array(np.ones(5, np.int32)), (21,))
    assert behind.tolist() == [1] * 5 + [0] * 8 + [-1] * 8
