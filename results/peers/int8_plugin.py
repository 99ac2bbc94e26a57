"""Products of int8 x as plug-ins of the peer harness: tilebit's kernels of LiquidGEMM's two-level
weights, of W8A8 and of QServe's per-channel W4A8, on the harness's weight and on its int8
activations, which every peer gets quantized beforehand.

    PYTHONPATH=$PWD gemm_peers.py --plugin results/peers/int8_plugin.py --methods torch_fp16,humming_w4a8_int8,vllm_int8
    python -m results.peers.int8_plugin --compile 4096x4096,28672x4096 1,16,256

The second command compiles the kernels ahead, in parallel. Names are those of ``import_peers.py``.
Needs this checkout on the path.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from results.peers import peers_plugin
from results.peers.peers_plugin import TIMER, TilebitPeer, _process
from tilebit.kernels import KernelUnavailable, build, find_kernel
from tilebit.layouts.formats import GemmFormat
from tilebit.ops.dispatch import device_target
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.target import detect_target
from tilebit.weights.quantize import QuantizedTensor, quantize

FORMATS = ("w4a8_lqq_g64", "w4a8_lqq_g128", "w8a8_channel", "w4a8_channel_asym")
BASELINE = "tilebit_w4a16_sym"  # tilebit's own W4A16 in the same process


class Int8Peer(TilebitPeer):
    """tilebit's kernel of one format, in float16."""

    def __init__(self, name: str) -> None:
        super().__init__(f"tilebit_{name}", GemmFormat.parse(name), name, "float16")

    @property
    def dtype(self) -> str:
        return f"{self.format.family.partition('_')[0]}-int8"

    def supports(self, sh: Any, m: int) -> bool | str:
        return True

    def weight(self, sh: Any) -> QuantizedTensor:
        return quantize(sh.W, self.format)

    def run(self, sh: Any, m: int) -> tuple[list[Callable[[], None]], Callable[[], Tensor], int, str]:
        """As the harness asks: calls, the last one's y, bytes of a call, a note."""
        (codes, scales), packed = sh.get("A8i"), self.packed
        x, tokens = codes[:m].contiguous(), scales[:m].reshape(m).float().contiguous()
        op, latest = torch.ops.tilebit.gemm_int8.default, {}
        rest = (packed.scales, packed.zeros, packed.row_scales, tokens, None, packed.n, packed.k, packed.format_name, packed.dtype)

        def call(weight: Tensor) -> None:
            latest["y"] = op(x, weight, *rest)

        target = device_target(x.device)
        schedule = find_kernel(Workload(m, packed.n, packed.k, self.format, "float16"), target).manifest["schedule"]
        note = {**_process(target), "timer": TIMER, "schedule": schedule}
        size = packed.nbytes + m * (packed.k + 2 * packed.n)
        return [lambda w=w: call(w) for w in self.ws], lambda: latest["y"], size, json.dumps(note)

    def arows(self, sh: Any, m: int, rows: Tensor) -> Tensor:
        """fp32 activation rows as the kernel sees them."""
        codes, scales = sh.get("A8i")
        return codes[:m][rows].float() * scales[:m][rows].float()


def peers() -> list[TilebitPeer]:
    """The harness's entry point; ``$TILEBIT_PEERS`` selects by name."""
    peers_plugin.draw_orders()
    return peers_plugin.selected([*map(Int8Peer, FORMATS), TilebitPeer(BASELINE, *peers_plugin.KERNELS[BASELINE])])


def main(arguments: list[str] | None = None) -> int:
    """0: every kernel is in the cache; 1: some could not be had, and the reasons are printed."""
    parser = argparse.ArgumentParser(prog="python -m results.peers.int8_plugin", description="Compile what the plug-in's peers will call.")
    parser.add_argument("--compile", nargs=2, metavar=("SHAPES", "MS"), required=True, help="4096x4096,28672x4096 1,16,256")
    shapes, ms = parser.parse_args(arguments).compile
    weights = [tuple(int(size) for size in shape.split("x")) for shape in shapes.split(",")]
    wanted = [Workload(int(m), n, k, peer.format, peer.x_dtype) for n, k in weights for m in ms.split(",") for peer in peers()]
    try:
        build(wanted, detect_target())
    except KernelUnavailable as error:
        print(f"int8_plugin: {error}", file=sys.stderr)
        return 1
    print(f"int8_plugin: {len(wanted)} kernels are in the cache")
    return 0


if __name__ == "__main__":
    sys.exit(main())
