"""Products of 8-bit x as plug-ins of the peer harness: tilebit's kernels of int8 and e4m3 x, and of the
mixed linear layer, on the harness's weight and activations; and vLLM's of fp8 blocks, which the harness does
not have. Activations are quantized beforehand, for every peer alike.

    PYTHONPATH=$PWD gemm_peers.py --plugin results/peers/int8_plugin.py --methods torch_fp16,humming_w4a8_int8,vllm_int8
    python -m results.peers.int8_plugin --compile 4096x4096,28672x4096 1,16,256

The second command compiles the kernels ahead, in parallel. Names are those of ``import_peers.py``;
``TILEBIT_PEERS`` selects among them. Needs this checkout on the path.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import tilebit
from results.peers import peers_plugin
from results.peers.peers_plugin import TIMER, TilebitPeer, _process
from results.peers.vllm_blocks import VllmBlocks
from tilebit.kernels import KernelUnavailable, build, find_kernel
from tilebit.layouts.formats import GemmFormat
from tilebit.ops.dispatch import device_target
from tilebit.ops.gemm_int8 import OUTS
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.target import detect_target
from tilebit.weights.paired import row_count
from tilebit.weights.quantize import QuantizedTensor, quantize

INT8 = ("w4a8_lqq_g64", "w4a8_lqq_g128", "w8a8_channel", "w4a8_channel_asym", "w8a8_g128", "w4a8_g128_asym")
FP8 = ("w8a8_fp8", "w8a8_fp8_g128", "w4a8_fp8")
FORMATS = (*INT8, *FP8)
MIXED = {"w4.4a8_g128": ("w4a8_g128_asym", "w8a8_g128", 0.1)}  # low, high, the share of channels in high
BASELINE = "tilebit_w4a16_sym"  # tilebit's own W4A16 in the same process


class Int8Peer(TilebitPeer):
    """tilebit's kernel of one format of 8-bit x, in float16."""

    def __init__(self, name: str) -> None:
        super().__init__(f"tilebit_{name}", GemmFormat.parse(name), name, "float16")

    @property
    def dtype(self) -> str:
        return f"{self.format.family.partition('_')[0]}-{OUTS[self.format.x].replace('e4m3', 'fp8')}"

    def supports(self, sh: Any, m: int) -> bool | str:
        return True

    def weight(self, sh: Any) -> QuantizedTensor:
        return quantize(sh.W, self.format)

    def activations(self, sh: Any, m: int) -> tuple[Tensor, Tensor]:
        """Codes and scales of ``m`` rows, as the format's products take them."""
        group = self.format.x_group if self.format.x_grouped else None
        return tilebit.quantize_activations(sh.A[:m], OUTS[self.format.x], group)

    def run(self, sh: Any, m: int) -> tuple[list[Callable[[], None]], Callable[[], Tensor], int, str]:
        """As the harness asks: calls, the last one's y, bytes of a call, a note."""
        (x, tokens), packed = self.activations(sh, m), self.packed
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
        codes, scales = self.activations(sh, m)
        of_columns = scales.repeat_interleave(self.format.x_group, 0)[: sh.K].T if self.format.x_grouped else scales[:, None]
        return (codes[:, : sh.K].float() * of_columns)[rows]


class MixedPeer(Int8Peer):
    """A mixed linear layer: of the output channels a share, drawn at random, in a format of more bits,
    as pairs of rows of one weight."""

    def __init__(self, name: str) -> None:
        low, high, self.share = MIXED[name]
        super().__init__(low)
        self.name, self.high = f"tilebit_{name}", GemmFormat.parse(high)

    def high_channels(self, n: int) -> int:
        """How many of ``n`` channels are in the higher format: a multiple of 64."""
        return round(self.share * n / 64) * 64

    def workload(self, m: int, n: int, k: int) -> Workload:
        """What a call asks for."""
        high = self.high_channels(n)
        return Workload(m, row_count(n - high, high), k, self.format, self.x_dtype, width=n, nibbles=True)

    def prepare(self, sh: Any) -> None:
        """Quantize and pack the rows, copy them as often as the harness wants, compile every m's kernels."""
        chosen = torch.randperm(sh.N, generator=torch.Generator().manual_seed(0))[: self.high_channels(sh.N)]
        linear = torch.nn.Linear(sh.K, sh.N, bias=False, dtype=sh.W.dtype, device="meta")
        linear.weight = torch.nn.Parameter(sh.W, requires_grad=False)
        self.layer = tilebit.MixedLinear.from_float(linear, chosen.to(sh.W.device), self.format, self.high)
        self.ws = importlib.import_module("gemm_peers").copies(self.layer.rows.weight)
        self.ref = self.layer.dequantize().float()
        try:
            tilebit.prepare(self.layer, sorted(set(sh.ms)))
        except KernelUnavailable as error:  # `run` fails for the m that it concerns, and the harness records that
            print(f"[{self.name}] {error}", file=sys.stderr, flush=True)

    def run(self, sh: Any, m: int) -> tuple[list[Callable[[], None]], Callable[[], Tensor], int, str]:
        """As the harness asks."""
        (x, tokens), channels, packed = self.activations(sh, m), self.layer.channels, self.layer.rows.packed
        op, latest = torch.ops.tilebit.gemm_mixed.default, {}
        rest = (
            packed.scales, packed.zeros, packed.row_scales, None, channels, sh.N, sh.K, packed.format_name, packed.dtype,
            self.layer.nibbles,
        )  # fmt: skip

        def call(weight: Tensor) -> None:
            latest["y"] = op(x, tokens, weight, *rest)

        target = device_target(x.device)
        schedule = find_kernel(self.workload(m, sh.N, sh.K), target).manifest["schedule"]
        note = {**_process(target), "timer": TIMER, "schedule": schedule}
        size = packed.nbytes + m * (sh.K + 2 * sh.N)
        return [lambda w=w: call(w) for w in self.ws], lambda: latest["y"], size, json.dumps(note)


def own() -> list[TilebitPeer]:
    """tilebit's, of which ``$TILEBIT_PEERS`` selects by name."""
    return peers_plugin.selected([*map(Int8Peer, FORMATS), *map(MixedPeer, MIXED), TilebitPeer(BASELINE, *peers_plugin.KERNELS[BASELINE])])


def peers() -> list[TilebitPeer | VllmBlocks]:
    """The harness's entry point; ``$TILEBIT_PEERS`` selects by name."""
    peers_plugin.draw_orders()
    return [*own(), *peers_plugin.selected([VllmBlocks()])]


def workload(peer: TilebitPeer, m: int, n: int, k: int) -> Workload:
    """What ``peer`` will ask for."""
    return peer.workload(m, n, k) if isinstance(peer, MixedPeer) else Workload(m, n, k, peer.format, peer.x_dtype)


def main(arguments: list[str] | None = None) -> int:
    """0: every kernel is in the cache; 1: some could not be had, and the reasons are printed."""
    parser = argparse.ArgumentParser(prog="python -m results.peers.int8_plugin", description="Compile what the plug-in's peers will call.")
    parser.add_argument("--compile", nargs=2, metavar=("SHAPES", "MS"), required=True, help="4096x4096,28672x4096 1,16,256")
    shapes, ms = parser.parse_args(arguments).compile
    weights = [tuple(int(size) for size in shape.split("x")) for shape in shapes.split(",")]
    wanted = [workload(peer, int(m), n, k) for n, k in weights for m in ms.split(",") for peer in own()]
    try:
        build(wanted, detect_target())
    except KernelUnavailable as error:
        print(f"int8_plugin: {error}", file=sys.stderr)
        return 1
    print(f"int8_plugin: {len(wanted)} kernels are in the cache")
    return 0


if __name__ == "__main__":
    sys.exit(main())
