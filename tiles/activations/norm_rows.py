"""``norm_rows``: RMSNorm of rows, or of the residual stream after x was added to it, in one pass.

A block has a row; its threads hold it in registers, 8 values in a chunk, from its load to y. The sum
of squares is found by shuffles and, where there are several warps, through a word of shared memory
for each. The norm's weight is read before the preceding kernel has ended, which writes x.
"""

from typing import Any

from ...schedules.activations.glue import CHUNK, GlueWorkload, chunks
from ...schedules.schedule import Schedule
from ...schedules.target import Target
from ..attention.leaves import caller
from ..program import TileProgram
from .glue_source import HEADERS, PASSES, glue_source

WARP, WORDS = 32, 4


def build(workload: GlueWorkload, schedule: Schedule, target: Target) -> Any:
    """The TileLang PrimFunc over x [m, k], residual [m, k] where there is one, norm_weight [k] and
    y [m, k]; m is dynamic, from 1 up."""
    import tilelang.language as T

    w, warps, held = workload, schedule.num_warps, chunks(workload, schedule)
    step = CHUNK * WARP * warps  # columns of all threads' first chunks
    source, call = glue_source(w), caller({}, "Rows")
    m = T.dynamic("m")
    Residual = T.Tensor((m, w.k), w.dtype) if w.residual else None

    @T.prim_func
    def main(x: T.Tensor((m, w.k), w.dtype), residual: Residual, norm_weight: T.Tensor((w.k,), w.dtype), y: T.Tensor((m, w.k), w.dtype)):
        with T.Kernel(m, threads=WARP * warps) as row:
            T.import_source(source)
            words = T.alloc_local((held * WORDS,), "uint32")
            weights = T.alloc_local((held * WORDS,), "uint32")
            sums = T.alloc_shared((warps,), "float32")
            total = T.alloc_var("float32")
            thread = T.get_thread_binding()
            for c in T.unroll(held, explicit=True):
                call("Eight::weights", norm_weight, thread * CHUNK + c * step, T.address_of(weights[c * WORDS]))
            T.call_extern("handle", "tilebit::launch_dependents")
            T.call_extern("handle", "tilebit::wait_for_predecessor")  # which may write x
            for c in T.unroll(held, explicit=True):
                call("Eight::load", x, residual if w.residual else x, row, thread * CHUNK + c * step, T.address_of(words[c * WORDS]))
            total = T.float32(0.0)
            for c in T.unroll(held, explicit=True):
                total = total + call("Eight::sum_of_squares", T.address_of(words[c * WORDS]), returns="float32")
            total = T.call_extern("float32", "tilebit::sum_of_lanes", total)
            if warps > 1:
                if thread % WARP == 0:
                    sums[thread // WARP] = total
                T.sync_threads()
                total = T.float32(0.0)
                for i in T.unroll(warps, explicit=True):
                    total = total + sums[i]
            total = call("Eight::inverse_root", total, returns="float32")
            for c in T.unroll(held, explicit=True):
                call(
                    "Eight::store_normed", T.address_of(words[c * WORDS]), T.address_of(weights[c * WORDS]), total, row,
                    thread * CHUNK + c * step, y,
                )  # fmt: skip

    return main


PROGRAM = TileProgram(name="norm_rows", compiler="tilelang", build=build, headers=HEADERS, pass_configs=PASSES, newest_arch="sm_89")
