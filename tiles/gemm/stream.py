"""``gemm_stream`` and ``gemm_stream_bulk``: the packed-weight GEMM for few rows of x, built for bandwidth.

    y[m, n] = sum_k x[m, k] * w[n, k] (+ bias[n]),   w = (q - z) * s

At m <= 16 the weight's bytes decide. A block computes ``block_n`` output channels for ``block_m`` rows of x; its ``num_warps`` warps take
the steps of k (``block_k`` deep) in turn, and each streams the packed lines of its own rows through a ring of ``num_stages`` slots that no
other warp touches: nobody waits for anybody before the last product. A warp holds 64, 80, 112, 48, 32 or 16 rows, the first of these that
divides block_n; where that is not all of them, neighbouring warps share the slots of x. ``split_k`` blocks share an output tile. Codes go
to the tensor cores as they are (``codecs/raw.cuh``): a mask makes a 4-bit code an fp16 subnormal, and scale and zero point are applied to
the fp32 sums once a group. Every sum has a fixed order. There is no path for CUDA cores: in fp32 a word of eight codes would take them
eight conversions and eight FMAs where the tensor core takes one instruction, seven of whose eight columns are idle at m = 1 at no cost
(fp16 sums would do with four FMAs, and lose what subnormal codes stand for).

``gemm_stream_bulk`` (sm_90a): weights by 1-D bulk copies, the blocks of a cluster send each other their shares of k, and weights are
requested before the wait of a dependent launch. ``gemm_stream`` (sm_80 and later): cp.async, and a workspace.

TileLang has no per-warp pipelines (its barriers and its specialization are a block's), so the loop is CUDA, in ``device/stream.cuh``; the
grid, the operands and the shared memory are declared here.
"""

from typing import Any

from ...layouts.formats import PER_CHANNEL
from ...schedules.gemm import stream as rules
from ...schedules.gemm.workload import Workload
from ...schedules.schedule import Schedule
from ...schedules.target import Target
from ..compiler.headers import TYPES, device_source
from ..program import TileProgram
from .operands import Operands

HEADERS = ("codecs/dequant.cuh", "store/split_k.cuh", "codecs/raw.cuh", "ptx/instructions.cuh", "pipeline/dependent.cuh", "stream.cuh")


def stream_type(workload: Workload, schedule: Schedule) -> str:
    """``tilebit::Stream`` with its template arguments (``device/stream.cuh``)."""
    f, s = workload.format, schedule
    group_steps = 0 if f.group_size == PER_CHANNEL else f.group_size // 16
    arguments = (
        TYPES[workload.dtype], f.bits, str(f.symmetric).lower(), group_steps, rules.warp_rows(s) // 16, rules.warps_n(s), rules.rings(s),
        s.block_m, s.block_k * f.bits // 256, s.num_stages, str(s.program == rules.BULK).lower(),
    )  # fmt: skip
    return f"tilebit::Stream<{', '.join(map(str, arguments))}>"


def build(workload: Workload, schedule: Schedule, target: Target) -> Any:
    """The TileLang PrimFunc of one (workload, schedule); parameters as in ``wgmma.build``, m dynamic."""
    import tilelang.language as T

    p = Operands(workload, schedule)
    splits, dtype, bulk = schedule.split_k, workload.dtype, schedule.program == rules.BULK
    threads = schedule.num_warps * 32
    cluster = [1, 1, splits] if bulk and splits > 1 else None
    collected = splits > 1 and not bulk
    entry = f"tilebit::stream_gemm<{stream_type(workload, schedule)}, {TYPES[dtype]}, {str(workload.bias).lower()}>"

    m, words = T.dynamic("m"), T.dynamic("words")
    Zeros = T.Tensor((p.groups, p.n_pad), dtype) if p.asymmetric else None
    Bias = T.Tensor((p.n,), dtype) if workload.bias else None
    Workspace = T.Tensor((words,), "int32") if collected else None

    @T.prim_func
    def main(
        x: T.Tensor((m, p.kx), dtype),
        weight: T.Tensor((p.n_tiles, p.k_tiles, 512), "int32"),
        scales: T.Tensor((p.groups, p.n_pad), dtype),
        zeros: Zeros,
        bias: Bias,
        workspace: Workspace,
        y: T.Tensor((m, p.n), dtype),
    ):
        with T.Kernel(p.n_pad // schedule.block_n, T.ceildiv(m, schedule.block_m), splits, threads=threads, cluster_dims=cluster):
            ring = T.alloc_shared((rules.shared_words(workload, schedule, target),), "int32")
            T.import_source(device_source(HEADERS))
            T.annotate_min_blocks_per_sm(schedule.min_blocks)
            T.call_extern(
                "handle", entry, T.address_of(ring[0]), T.address_of(x[0, 0]), T.address_of(weight[0, 0, 0]), T.address_of(scales[0, 0]),
                T.address_of(zeros[0, 0]) if p.asymmetric else T.address_of(scales[0, 0]),
                T.address_of(bias[0]) if workload.bias else T.address_of(scales[0, 0]),
                T.address_of(workspace[0]) if collected else T.address_of(weight[0, 0, 0]),
                T.address_of(y[0, 0]), m, p.n, p.kx, p.k_tiles, p.n_pad, p.groups, p.steps, splits,
            )  # fmt: skip

    return main


def stream_program(name: str) -> TileProgram:
    """The tile program called ``name``, one of the two."""
    return TileProgram(
        name=name,
        compiler="tilelang",
        build=build,
        headers=HEADERS,
        newest_arch="sm_89" if name == rules.ASYNC else None,
    )


PROGRAM = stream_program(rules.ASYNC)
