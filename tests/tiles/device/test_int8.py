"""The byte operands of integer products: every code under every scale and offset that a quantizer may store, and what they cost in
machine code."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from toolchain import machine_code, needs_nvcc

from tilebit.layouts.fragments import wgmma_a
from tilebit.layouts.packing import gemm_layout
from tilebit.tiles.compiler.cuda import find_nvcc
from tilebit.tiles.compiler.headers import device_source

sys.path.append(str(Path(__file__).parents[1]))
from emulation.device_code import CUDA_ARCH, DeviceCode, needs_host_compiler
from gemm_cases import LQQ_PAIRS

ROWS, K = 64, 64  # of a record at 4 bits
SOURCE = device_source(("codecs/dequant.cuh", "codecs/int8.cuh"))


def operand(out: np.ndarray, k: int) -> np.ndarray:
    """int8 [64, k] from the registers [128 threads, k / 2] of one slab."""
    row, col = wgmma_a(32).coords()
    matrix = np.empty((ROWS, k), np.int8)
    values = out.view(np.int8).reshape(128, k // 32, 16)
    for step in range(k // 32):
        matrix[row, col + 32 * step] = values[:, step]
    return matrix


@needs_host_compiler
def test_every_code_under_every_scale_and_offset():
    device = DeviceCode(SOURCE, CUDA_ARCH["gemm_wgmma"])
    layout = gemm_layout("sm_90a", 4, int8=True)
    codes = ((np.arange(K) + 5 * np.arange(ROWS)[:, None]) % 16).astype(np.uint8)
    words = layout.pack(codes)
    seen = set()
    for start in range(0, len(LQQ_PAIRS), ROWS):
        scales, offsets = LQQ_PAIRS[(start + np.arange(ROWS)) % len(LQQ_PAIRS)].astype(np.uint8).T.copy()
        out = np.full((128, K // 2 // 4), 0x5A5A5A5A, np.uint32)
        arguments = [(out.ctypes.data, out.strides[0]), *((a.ctypes.data, 0) for a in (words, scales, offsets)), (0, 1)]
        device.call("tilebit::dequantize_bytes<tilebit::Lqq, 1, 0, 1, 2, 64>", arguments, 128)
        expected = codes.astype(int) * scales[:, None] + offsets[:, None] - 128
        assert expected.min() >= -128 and expected.max() <= 127
        assert np.array_equal(operand(out, K), expected)
        seen |= {(int(s), int(o)) for s, o in zip(scales, offsets, strict=True)}
    assert len(seen) == len(LQQ_PAIRS) and all(set(row) == set(range(16)) for row in codes)


@needs_host_compiler
def test_two_groups_of_a_record_have_their_own():
    device, layout = DeviceCode(SOURCE, CUDA_ARCH["gemm_wgmma"]), gemm_layout("sm_90a", 4, int8=True)
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (ROWS, K)).astype(np.uint8)
    scales, offsets = rng.integers(0, 8, (2, ROWS)).astype(np.uint8), rng.integers(0, 130, (2, ROWS)).astype(np.uint8)
    words, out = layout.pack(codes), np.empty((128, K // 8), np.uint32)
    arguments = [(out.ctypes.data, out.strides[0]), *((a.ctypes.data, 0) for a in (words, scales, offsets)), (0, 1)]
    device.call("tilebit::dequantize_bytes<tilebit::Lqq, 1, 0, 1, 1, 64>", arguments, 128)
    group = np.arange(K) // 32
    assert np.array_equal(operand(out, K), codes.astype(int) * scales.T[:, group] + offsets.T[:, group] - 128)


@needs_host_compiler
def test_every_code_less_every_zero_point():
    device, layout = DeviceCode(SOURCE, CUDA_ARCH["gemm_wgmma"]), gemm_layout("sm_90a", 4, int8=True)
    codes = ((np.arange(K) + 5 * np.arange(ROWS)[:, None]) % 16).astype(np.uint8)
    zeros = (np.arange(ROWS) * 7 % 16).astype(np.uint8)  # no row's is that of the row eight further
    words, out = layout.pack(codes), np.empty((128, K // 8), np.uint32)
    not_read = np.full(2, 255, np.uint8)  # scales are of 16 bits and belong to the sums
    arguments = [(out.ctypes.data, out.strides[0]), *((a.ctypes.data, 0) for a in (words, not_read, zeros)), (0, 1)]
    device.call("tilebit::dequantize_bytes<tilebit::Shifted, 1, 0, 1, 2, 64>", arguments, 128)
    assert np.array_equal(operand(out, K), codes.astype(int) - zeros[:, None])
    met = set(zip(codes.ravel().tolist(), np.repeat(zeros, K).tolist(), strict=True))
    assert len(met) == 16 * 16


@needs_host_compiler
def test_bytes_less_their_middle():
    device, layout = DeviceCode(SOURCE, CUDA_ARCH["gemm_wgmma"]), gemm_layout("sm_90a", 8, int8=True)
    codes = ((np.arange(32) * 8 + np.arange(ROWS)[:, None]) % 256).astype(np.uint8)
    words, out, none = layout.pack(codes), np.empty((128, 4), np.uint32), np.zeros(1, np.uint8)
    arguments = [(out.ctypes.data, out.strides[0]), *((a.ctypes.data, 0) for a in (words, none, none)), (0, 1)]
    device.call("tilebit::dequantize_bytes<tilebit::Centered, 1, 0, 1, 1, 64>", arguments, 128)
    assert len(np.unique(codes)) == 256 and np.array_equal(operand(out, 32), codes.astype(int) - 128)


KERNEL = """
extern "C" __global__ void kernel(const uint32_t* words, const uint32_t* parameters, uint4* out) {
  tilebit::CODE low(0, 0), high(0, 0);
  SCALES
  low.offsets = parameters[1], high.offsets = parameters[3];
  uint32_t taken[2] = {words[0], words[1]}, a[4];
  tilebit::CODE::unpack(taken, low, high, a);
  out[0] = make_uint4(a[0], a[1], a[2], a[3]);
}
"""
LQQ = KERNEL.replace("SCALES", "low.scale = parameters[0], high.scale = parameters[2];").replace("CODE", "Lqq")
SHIFTED = KERNEL.replace("SCALES", "").replace("CODE", "Shifted")


@needs_nvcc
@pytest.mark.parametrize(
    ("kernel", "arch"), [(LQQ, "sm_80"), (LQQ, "sm_90a"), (SHIFTED, "sm_90a")], ids=["lqq-sm_80", "lqq-sm_90a", "shifted"]
)
def test_eight_weights_take_seven_instructions(tmp_path: Path, kernel: str, arch: str):
    """LiquidGEMM 4.3: three to unpack a word, one multiplication (or addition) and one exclusive or for each four weights. In PTX, and
    in machine code."""
    source, cubin = tmp_path / "kernel.cu", tmp_path / "kernel.cubin"
    source.write_text(SOURCE + kernel)
    for kind, made in (("-ptx", tmp_path / "kernel.ptx"), ("-cubin", cubin)):
        subprocess.run([find_nvcc(), f"-arch={arch}", kind, "-o", str(made), str(source)], check=True, capture_output=True)
    text = (tmp_path / "kernel.ptx").read_text()
    found = Counter(
        re.findall(r"\b(and|or|shr|shl|xor|lop3|mul|mad|add|sub|prmt|bfe)\b[.\w]*\s+%r\d", text)
    )  # of 32 bits, not of addresses
    assert sum(found.values()) == 14 and found["mad"] + found["mul"] + found["add"] == 4 and found["xor"] == 4, (found, text)
    listing = machine_code(cubin)
    found = Counter(re.findall(r"\b(LOP3|SHF|PRMT|IMAD(?:\.MOV)?|IADD3|LEA)\b", listing.partition("EXIT")[0]))
    found.pop("IMAD.MOV", 0)
    combined = found["IMAD"] + found["IADD3"] + found["LEA"]
    assert combined == 4 and found["LOP3"] + found["SHF"] == 10 and sum(found.values()) == 14, (found, listing)
