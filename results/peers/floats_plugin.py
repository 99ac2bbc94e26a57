"""Products of 4-bit floats as plug-ins of the peer harness: tilebit's kernels of ``w4a16_mxfp4`` and
``w4a16_nvfp4`` beside Marlin's, which its vLLM brings, on the same codes and scales, in bfloat16
(Marlin takes mxfp4 in no other type), and tilebit's ``w4a16_g32`` for what the format costs.

    PYTHONPATH=$PWD gemm_peers.py --plugin results/peers/floats_plugin.py --methods torch_bf16

Names are those of ``import_peers.py``. Needs this checkout on the path, and the harness's first part.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from results.peers import peers_plugin
from results.peers.peers_plugin import TilebitPeer
from tilebit.layouts.formats import GemmFormat
from tilebit.weights.quantize import QuantizedTensor, quantize
from tilebit.weights.quantize_float import E4M3_UNIT

FORMATS = ("w4a16_mxfp4", "w4a16_nvfp4", "w4a16_g32")
BF16_BIAS = 126  # what the exponent of an e2m1 number in the places of a bf16 is too small by, as a power of two
E5M3_SHIFT = 7  # Marlin keeps e4m3 scales times 2^7, with an exponent bit more in place of the sign


def quantized(sh: Any, name: str) -> QuantizedTensor:
    """The harness's weight in the format ``name``, once for each shape."""
    if name not in sh.c:
        sh.c[name] = quantize(sh.W.bfloat16(), GemmFormat.parse(name))
    return sh.c[name]


class FloatPeer(TilebitPeer):
    """tilebit's kernel of one format, in bfloat16."""

    def __init__(self, name: str) -> None:
        super().__init__(f"tilebit_{name}", GemmFormat.parse(name), name, "bfloat16")

    @property
    def dtype(self) -> str:
        return f"{self.codes}-bf16"

    def supports(self, sh: Any, m: int) -> bool | str:
        return True

    def weight(self, sh: Any) -> QuantizedTensor:
        return quantized(sh, self.codes)


class MarlinFloats:
    """Marlin's product of 4-bit floats, called as vLLM's layers call it."""

    kind = "gemm"
    tol = 0.01

    def __init__(self, name: str) -> None:
        self.name, self.format = f"marlin_{name.removeprefix('w4a16_')}", name

    @property
    def dtype(self) -> str:
        return f"{self.format}-bf16"

    def supports(self, sh: Any, m: int) -> bool:
        return True

    def prepare(self, sh: Any) -> None:
        """Codes and scales in the order and types that Marlin reads."""
        harness = _harness()
        harness.load_so("_C.abi3.so")
        weight = quantized(sh, self.format)
        group = weight.format.group_size
        scales = weight.scales.float().t().contiguous()
        self.factor = None
        if weight.row_scales is not None:
            scales *= E4M3_UNIT
        scales = harness.marlin_permute_scales(scales, sh.K, sh.N, group).view(-1, 4)[:, [0, 2, 1, 3]].reshape(-1, sh.N)
        if weight.row_scales is None:
            self.scales = scales.to(torch.float8_e8m0fnu)
        else:
            lift = float((2.0 ** (1 - E5M3_SHIFT) / scales[scales > 0].min()).log2().ceil().exp2().clamp(min=1))
            places = (scales.half() * (lift * 2**E5M3_SHIFT)).view(torch.int16) << 1
            self.scales = places.view(torch.float8_e4m3fn)[:, 1::2].contiguous()
            self.factor = (weight.row_scales[:1] / (E4M3_UNIT * lift) * 2.0 ** (BF16_BIAS - E5M3_SHIFT)).float()
        none = torch.empty(0, dtype=torch.int32, device="cuda")
        rows = harness.pack_rows(weight.codes.t().contiguous(), 4)
        packed = torch.ops._C.gptq_marlin_repack(rows, none, sh.K, sh.N, 4, False)
        self.none, self.ws, self.ref = none, harness.copies(packed), weight.dequantize()
        self.locks = torch.zeros(torch.cuda.get_device_properties(0).multi_processor_count, dtype=torch.int32, device="cuda")
        self.e2m1 = harness.scalar_id(2, 1, True, 0, True, 0)

    def run(self, sh: Any, m: int) -> tuple[list[Callable[[], None]], Callable[[], Tensor], int, str]:
        """As the harness asks: calls, the last one's y, bytes of a call, a note."""
        x, y = sh.A[:m].bfloat16(), torch.empty(m, sh.N, dtype=torch.bfloat16, device="cuda")
        op, none = torch.ops._C.marlin_gemm, self.none

        def call(weight: Tensor) -> None:
            op(
                x, y, weight, None, self.scales, None, self.factor, none, none, none, self.locks, self.e2m1, m, sh.N, sh.K,
                True, False, True, False,
            )  # fmt: skip

        size = _harness().nb(self.ws[0], self.scales, x, y)
        return [lambda w=w: call(w) for w in self.ws], lambda: y, size, ""

    def arows(self, sh: Any, m: int, rows: Tensor) -> Tensor:
        """fp32 activation rows as the kernel sees them."""
        return sh.A[:m][rows].bfloat16().float()


def _harness() -> ModuleType:
    return importlib.import_module("gemm_peers")


def peers() -> list[TilebitPeer | MarlinFloats]:
    """The harness's entry point."""
    peers_plugin.draw_orders()
    return [*(FloatPeer(name) for name in FORMATS), *(MarlinFloats(name) for name in FORMATS[:2])]
