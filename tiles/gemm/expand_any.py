"""``expand_any``: one width of a weight of bit planes and codebooks as a matrix of 16-bit numbers.

    y[n, k] = codebook[n, q[n, k]]

What a library's product reads where there are many rows of x, so that the weight is looked up once
for all of them. A block has 32 output channels, of whose codebooks it lays out tables in shared memory
as ``gemm_any_wgmma`` does (of 3 bits: in registers); each of its warps takes 16 of them and steps of
256 k in turn, a lane 128 weights of each (``device/codecs/any_expand.cuh``). Columns from k to the next
multiple of 8 hold numbers, which zeros of x are multiplied by.
"""

from typing import Any

from ...layouts.planes import CUDA_TILE_K, CUDA_TILE_N
from ...schedules.gemm.expand import PROGRAM as NAME
from ...schedules.gemm.expand import ROWS, TILES, ExpandWorkload, tables_bytes
from ...schedules.schedule import Schedule
from ...schedules.target import Target
from ..compiler.headers import TYPES, device_source
from ..program import TileProgram

HEADERS = (
    "ptx/instructions.cuh", "codecs/dequant.cuh", "codecs/any_product.cuh", "codecs/any_operand.cuh", "codecs/any_expand.cuh",
)  # fmt: skip
PASS_CONFIGS = {
    "tl.disable_thread_storage_sync": True,  # the barrier that is needed stands in the program
    "tl.disable_safe_memory_legalize": True,  # stores are inside by construction
}


def build(workload: ExpandWorkload, schedule: Schedule, target: Target) -> Any:
    """The TileLang PrimFunc over planes, codebooks [n_pad, 2^bits] and y [n, columns]."""
    import tilelang.language as T

    w, warps = workload, schedule.num_warps
    planes, books, out = w.operands(target.arch)
    (bits, n_tiles, k_tiles, words), n_pad, threads = planes.shape, books.shape[0], warps * 32
    leaf = f"tilebit::AnyExpand<{TYPES[w.dtype]}, {bits}>"

    @T.prim_func
    def main(
        weight: T.Tensor((bits, n_tiles, k_tiles, words), "int32"),
        scales: T.Tensor((n_pad, 1 << bits), w.dtype),
        y: T.Tensor(out.shape, w.dtype),
    ):
        with T.Kernel(n_pad // (TILES * ROWS), threads=threads) as block:
            T.import_source(device_source(HEADERS))
            tables = T.alloc_shared((max(4, tables_bytes(w) // 4),), "int32")
            kept = T.alloc_local((8,), "uint32")  # two codebooks of 3 bits
            thread = T.get_thread_binding()
            warp, lane = thread // 32, thread % 32
            tile, turns = warp % TILES, warps // TILES
            T.call_extern(
                "handle", f"{leaf}::fill<{threads}>", T.address_of(tables[0]), kept.access_ptr("w"),
                T.address_of(scales[block * (TILES * ROWS), 0]), thread,
            )  # fmt: skip
            T.sync_threads()
            row = (block * TILES + tile) * ROWS
            for turn in T.serial(T.ceildiv(k_tiles, turns)):
                step = turn * turns + warp // TILES
                if step < k_tiles:
                    T.call_extern(
                        "handle", f"{leaf}::step",
                        T.address_of(weight[0, row // CUDA_TILE_N, step, row % CUDA_TILE_N // ROWS * (words // 4)]),
                        T.int64(n_tiles * k_tiles * words * 4), T.address_of(tables[0]), kept.access_ptr("r"),
                        T.address_of(y[row, step * CUDA_TILE_K]), w.columns, w.n - row, w.columns - step * CUDA_TILE_K, tile, lane,
                    )  # fmt: skip

    return main


PROGRAM = TileProgram(name=NAME, compiler="tilelang", build=build, headers=HEADERS, pass_configs=PASS_CONFIGS)
