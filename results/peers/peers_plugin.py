"""tilebit as a plug-in of the peer harness: ``gemm_peers.py --plugin
results/peers/peers_plugin.py`` times its kernels in one process with Marlin, Machete, humming,
gemlite and cuBLAS, replays interleaved, on the harness's own codes, scales and activations.

    python -m results.peers.peers_plugin --compile 4096x4096,28672x4096 1,16,256 [--target sm_90a]

compiles the kernels for those weights [n]x[k] and rows m ahead, in parallel; without it the first
call of a shape compiles. ``TILEBIT_PEERS``, a comma-separated list of patterns ("tilebit_w4a16_*"),
selects among ``peers()``. The harness loads this file by its path, so it imports the installed
``tilebit`` and nothing that lies beside it.

The harness replays the peers of a shape in the same order round after round. On a board that is at
its power limit a kernel then owes its time to the one before it: behind Marlin, which draws little,
Machete took 1,280 us, and two places on, with the best of its schedules, 1,534 (28672 x 4096, m =
4096, H200). With this plug-in every round draws an order of its own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

import tilebit
from tilebit.command.bench import TORCH_DTYPES, process_fields
from tilebit.kernels import KernelUnavailable, build, find_kernel
from tilebit.layouts.formats import GemmFormat, QuantFormat
from tilebit.ops.dispatch import device_target
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.target import Target, detect_target, target_from_name
from tilebit.weights.quantize import QuantizedTensor

SELECT = "TILEBIT_PEERS"
GROUP = 128  # values of k per scale of the harness's codes
BF16_SHAPES = ((4096, 4096), (28672, 4096), (4096, 14336), (10240, 8192))  # (n, k) measured in bfloat16 too
# name: (format, name of the harness's codes, dtype of x and y)
KERNELS = {
    "tilebit_w4a16_sym": (QuantFormat(4, GROUP, True), "q4", "float16"),
    "tilebit_w4a16_asym": (QuantFormat(4, GROUP, False), "q4z", "float16"),
    "tilebit_w8a16_sym": (QuantFormat(8, GROUP, True), "q8", "float16"),
    "tilebit_w4a16_sym_bf16": (QuantFormat(4, GROUP, True), "q4", "bfloat16"),
}
TIMER = "peer harness, orders drawn"  # of the rows measured with this plug-in
Peer = TypeVar("Peer", bound=Any)  # tilebit's or another's, with a name
DEPENDENT = "_pdl"  # suffix of the peers that use programmatic dependent launch


class TilebitPeer:
    """One format of tilebit behind the harness's ``Peer`` interface, with the schedule that
    ``find_kernel`` gives for each m.

    In its methods ``sh`` is the harness's shape: ``N``, ``K``, fp16 activations ``A`` [largest m,
    K], ``ms`` (every m asked for) and ``get("q4")`` and its like. ``dependent`` calls the op with
    ``dependent=True``: in a graph of calls of one op each call depends on the one before it, so
    such a peer shows what a launch saves and is no comparison with the other peers. The harness
    empties and restores the instance's ``__dict__`` after each shape and loads this module
    unregistered: hence neither slots nor a dataclass.
    """

    kind = "gemm"
    tol = 0.01  # of the relative Frobenius error

    def __init__(self, name: str, format: GemmFormat, codes: str, x_dtype: str, dependent: bool = False) -> None:
        self.name, self.format, self.codes, self.x_dtype, self.dependent = name, format, codes, x_dtype, dependent

    @property
    def dtype(self) -> str:
        """The class of kernels that the harness lists this peer in."""
        return f"w{self.format.bits}a16" + ("" if self.x_dtype == "float16" else "-bf16")

    def supports(self, sh: Any, m: int) -> bool | str:
        """True, or the reason to leave ``m`` rows of this shape out."""
        if self.x_dtype == "bfloat16" and (sh.N, sh.K) not in BF16_SHAPES:
            return "bfloat16 is measured for chosen shapes only"
        return True

    def prepare(self, sh: Any) -> None:
        """Pack the weight, copy it as often as the harness wants, and have the kernels of every m
        compiled."""
        weight = self.weight(sh)
        self.packed = tilebit.pack(weight, TORCH_DTYPES[self.x_dtype])
        # Scales and zeros are shared by all copies, as those of the other peers are.
        self.ws = importlib.import_module("gemm_peers").copies(self.packed.weight)
        self.ref = weight.dequantize()
        try:
            tilebit.prepare(self.packed, sorted(set(sh.ms)))
        except KernelUnavailable as error:  # `run` fails for the m that it concerns, and the harness records that
            print(f"[{self.name}] {error}", file=sys.stderr, flush=True)

    def weight(self, sh: Any) -> QuantizedTensor:
        """The harness's codes and scales."""
        codes, scales, *zeros = sh.get(self.codes)
        return QuantizedTensor(codes, scales.to(TORCH_DTYPES[self.x_dtype]), zeros[0] if zeros else None, self.format)

    def run(self, sh: Any, m: int) -> tuple[list[Callable[[], None]], Callable[[], Tensor], int, str]:
        """(a call per weight copy, the last call's y [m, n], bytes of one call, provenance as
        JSON)."""
        x, packed = sh.A[:m].to(TORCH_DTYPES[self.x_dtype]), self.packed
        op, extra = torch.ops.tilebit.gemm.default, {"dependent": True} if self.dependent else {}
        latest: dict[str, Tensor] = {}

        def call(weight: Tensor) -> None:
            latest["y"] = op(x, weight, packed.scales, packed.zeros, packed.row_scales, None, packed.n, packed.format_name, **extra)

        target = device_target(x.device)
        workload = Workload(m, packed.n, packed.k, self.format, self.x_dtype)
        note = {**_process(target), "timer": TIMER, "schedule": find_kernel(workload, target).manifest["schedule"]}
        return (
            [lambda w=w: call(w) for w in self.ws],
            lambda: latest["y"],
            packed.nbytes + 2 * m * (packed.n + packed.k),
            json.dumps(note),
        )

    def arows(self, sh: Any, m: int, rows: Tensor) -> Tensor:
        """fp32 activation rows as the kernel sees them."""
        return sh.A[:m][rows].to(TORCH_DTYPES[self.x_dtype]).float()


@cache
def _process(target: Target) -> dict[str, Any]:
    """Provenance of this process, which the harness does not record: the rows of its other peers
    take it from ours."""
    fields = process_fields(target)
    return {name: fields[name] for name in ("run", "gpu", "driver", "cuda", "torch", "tilelang", "commit", "date")}


def replay_in_drawn_orders(captured: Sequence[Any], rounds: int) -> list[tuple[float, float, int]]:
    """The harness's ``replay_times``, but every round replays the graphs in an order of its own:
    (median us of a call, least us, calls) of each. What is ``captured`` has the graph ``g`` of
    ``calls`` calls."""
    pick, order = random.Random(0), list(range(len(captured)))
    events = [[[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in captured] for _ in range(rounds)]
    torch.cuda._sleep(2_000_000)  # about 1 ms, in which the host runs ahead
    for row in events:
        pick.shuffle(order)
        for i in order:
            row[i][0].record()
            captured[i].g.replay()
            row[i][1].record()
    torch.cuda.synchronize()
    times = [[row[i][0].elapsed_time(row[i][1]) * 1e3 / c.calls for row in events] for i, c in enumerate(captured)]
    return [(statistics.median(us), min(us), c.calls) for us, c in zip(times, captured, strict=True)]


def draw_orders() -> None:
    """Have the harness, where it is what runs, replay in orders that are drawn."""
    if harness := sys.modules.get("gemm_peers"):
        vars(harness)["replay_times"] = replay_in_drawn_orders


def peers() -> list[TilebitPeer]:
    """The harness's entry point: every kernel, then the same with dependent launch;
    ``$TILEBIT_PEERS`` selects by name."""
    draw_orders()
    made = [TilebitPeer(name, *fields) for name, fields in KERNELS.items()]
    made += [TilebitPeer(name + DEPENDENT, *fields, dependent=True) for name, fields in KERNELS.items() if not name.endswith("_bf16")]
    return selected(made)


def selected(made: Iterable[Peer]) -> list[Peer]:
    """Those that ``$TILEBIT_PEERS`` selects."""
    patterns = os.environ.get(SELECT, "*").split(",")
    return [peer for peer in made if any(fnmatchcase(peer.name, pattern.strip()) for pattern in patterns)]


def workloads(shapes: Iterable[tuple[int, int]], ms: Iterable[int]) -> list[Workload]:
    """What the selected peers will ask for on weights (n, k) and row counts ``ms``, once each."""
    wanted = {
        Workload(m, n, k, peer.format, peer.x_dtype): None
        for n, k in shapes
        for peer in peers()
        if peer.x_dtype == "float16" or (n, k) in BF16_SHAPES
        for m in sorted(set(ms))
    }
    return list(wanted)


def main(arguments: list[str] | None = None) -> int:
    """0: every kernel is in the cache; 1: some could not be had, and the reasons are printed."""
    parser = argparse.ArgumentParser(prog="python -m results.peers.peers_plugin", description="Compile what the plug-in's peers will call.")
    parser.add_argument("--compile", nargs=2, metavar=("SHAPES", "MS"), required=True, help="4096x4096,28672x4096 1,16,256")
    parser.add_argument("--target", help="an arch name; default: this machine's device")
    parser.add_argument("--jobs", type=int, default=None, help="processes; default: one per core")
    options = parser.parse_args(arguments)
    shapes = [tuple(int(size) for size in shape.split("x")) for shape in options.compile[0].split(",")]
    wanted = workloads([(n, k) for n, k in shapes], [int(m) for m in options.compile[1].split(",")])
    target = target_from_name(options.target) if options.target else detect_target()
    try:
        build(wanted, target, jobs=options.jobs)
    except KernelUnavailable as error:
        print(f"peers_plugin: {error}", file=sys.stderr)
        return 1
    print(f"peers_plugin: {len(wanted)} kernels for {target.name} are in the cache")
    return 0


if __name__ == "__main__":
    sys.exit(main())
