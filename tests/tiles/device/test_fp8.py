"""The e4m3 operands of ``codecs/fp8.cuh``: every code."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from tilebit.layouts.formats import E4M3
from tilebit.layouts.fragments import wgmma_a
from tilebit.layouts.packing import gemm_layout
from tilebit.tiles.compiler.headers import device_source

sys.path.append(str(Path(__file__).parents[1]))
from emulation.device_code import CUDA_ARCH, DeviceCode, needs_host_compiler

ROWS = 64
SOURCE = device_source(("codecs/dequant.cuh", "codecs/int8.cuh", "codecs/fp8.cuh"))


def operand(code: str, codes: np.ndarray) -> np.ndarray:
    """uint8 [64, k]: the bytes that a warpgroup multiplies for ``codes`` of a record."""
    k = codes.shape[1]
    words, out, none = gemm_layout("sm_90a", 256 // k, int8=True).pack(codes), np.empty((128, k // 8), np.uint32), np.zeros(1, np.uint8)
    arguments = [(out.ctypes.data, out.strides[0]), *((a.ctypes.data, 0) for a in (words, none, none)), (0, 1)]
    device = DeviceCode(SOURCE, CUDA_ARCH["gemm_wgmma"])
    device.call(f"tilebit::dequantize_bytes<tilebit::{code}, 1, 0, 1, {k // 32}, 64>", arguments, 128)
    row, col = wgmma_a(32).coords()
    matrix = np.empty((ROWS, k), np.uint8)
    for step, values in enumerate(np.moveaxis(out.view(np.uint8).reshape(128, k // 32, 16), 1, 0)):
        matrix[row, col + 32 * step] = values
    return matrix


@needs_host_compiler
def test_e4m3_is_multiplied_as_it_is():
    codes = ((np.arange(32) * 8 + np.arange(ROWS)[:, None]) % 256).astype(np.uint8)
    assert len(np.unique(codes)) == 256 and np.array_equal(operand("E4m3", codes), codes)


@needs_host_compiler
def test_nibbles_become_numbers_2_9_too_small():
    codes = ((np.arange(64) + 5 * np.arange(ROWS)[:, None]) % 16).astype(np.uint8)
    found = torch.from_numpy(operand("SignedNibbles", codes)).view(torch.float8_e4m3fn).float().numpy()
    assert all(set(row) == set(range(16)) for row in codes)
    assert np.array_equal(found * 512, codes.astype(np.float32) - 8)


def test_the_numbers_of_the_codes_are_torch_s():
    found = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    assert torch.equal(found.nan_to_num(-1), torch.tensor(E4M3, dtype=torch.float64).nan_to_num(-1))
