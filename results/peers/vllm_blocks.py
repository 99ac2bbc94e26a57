"""vLLM's product of fp8 in 128 x 128 blocks (DeepSeek's format) as a peer of the harness, which has none: the
operator of the library that the harness stages, on blocks that are quantized here."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BLOCK, LARGEST, ROWS = 128, 448.0, 4  # values a block is wide and high; of e4m3; rows of x are a multiple of


def blocks_of(w: Tensor, height: int) -> tuple[Tensor, Tensor]:
    """(codes e4m3 [n, k], scales fp32 [n / height, k / 128]) of ``w`` [n, k], in blocks of ``height`` x 128."""
    n, k = w.shape
    parts = w.float().view(n // height, height, k // BLOCK, BLOCK)
    scales = parts.abs().amax((1, 3)).clamp(min=1e-12) / LARGEST
    return (parts / scales[:, None, :, None]).view(n, k).to(torch.float8_e4m3fn), scales


def restored(codes: Tensor, scales: Tensor) -> Tensor:
    """fp32 [n, k] of ``blocks_of``."""
    return codes.float() * scales.repeat_interleave(codes.shape[0] // scales.shape[0], 0).repeat_interleave(BLOCK, 1)


class VllmBlocks:
    """``cutlass_scaled_mm`` with a scale for each 128 values of a row of x and for each block of w."""

    kind, name, dtype, tol = "gemm", "vllm_fp8_block", "w8a8-fp8", 0.01

    def supports(self, sh: Any, m: int) -> bool | str:
        """True, or the reason to leave ``m`` rows of this shape out."""
        return True if m % ROWS == 0 else f"takes multiples of {ROWS} rows"

    def prepare(self, sh: Any) -> None:
        """Quantize the weight, and copy it as often as the harness wants."""
        harness = importlib.import_module("gemm_peers")
        harness.load_so("_C_stable_libtorch.abi3.so")
        codes, scales = blocks_of(sh.W, BLOCK)
        self.ws, self.scales, self.ref = harness.copies(codes), scales, restored(codes, scales)
        self.bytes = codes.numel() + 4 * scales.numel()

    def run(self, sh: Any, m: int) -> tuple[list[Callable[[], None]], Callable[[], Tensor], int, str]:
        """As the harness asks: calls, the last one's y, bytes of a call, a note."""
        x, scales = blocks_of(sh.A[:m], 1)
        by_columns = scales.t().contiguous().t()  # as the operator reads them
        y = torch.empty(m, sh.N, dtype=torch.bfloat16, device=x.device)
        op = torch.ops._C.cutlass_scaled_mm
        calls = [lambda w=w: op(y, x, w.t(), by_columns, self.scales.t(), None) for w in self.ws]
        return calls, lambda: y, self.bytes + x.numel() + 4 * scales.numel() + 2 * y.numel(), ""

    def arows(self, sh: Any, m: int, rows: Tensor) -> Tensor:
        """fp32 rows of x as the kernel sees them."""
        return restored(*blocks_of(sh.A[:m], 1))[rows]
