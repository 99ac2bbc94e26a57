"""``gated_rows``: the activation of a gate times what it gates, of rows that hold both side by side.

A thread has 8 values, wherever they are: nothing is shared by a row, so that one row has as many
blocks as it needs.
"""

from typing import Any

from ...schedules.activations.glue import CHUNK, GlueWorkload
from ...schedules.schedule import Schedule
from ...schedules.target import Target
from ..attention.leaves import caller
from ..program import TileProgram
from .glue_source import HEADERS, PASSES, glue_source


def build(workload: GlueWorkload, schedule: Schedule, target: Target) -> Any:
    """The TileLang PrimFunc over x [m, 2 k] and y [m, k]; m is dynamic, from 1 up."""
    import tilelang.language as T

    w, threads = workload, 32 * schedule.num_warps
    source, call = glue_source(w), caller({}, "Rows")
    m = T.dynamic("m")

    @T.prim_func
    def main(x: T.Tensor((m, 2 * w.k), w.dtype), y: T.Tensor((m, w.k), w.dtype)):
        with T.Kernel(T.ceildiv(m * (w.k // CHUNK), threads), threads=threads) as block:
            T.import_source(source)
            thread = T.get_thread_binding()
            T.call_extern("handle", "tilebit::launch_dependents")
            T.call_extern("handle", "tilebit::wait_for_predecessor")  # which may write x
            call("Eight::gate", x, T.cast(block, "int64") * threads + thread, m, y)

    return main


PROGRAM = TileProgram(name="gated_rows", compiler="tilelang", build=build, headers=HEADERS, pass_configs=PASSES, newest_arch="sm_89")
