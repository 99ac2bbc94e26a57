"""What the device functions between products know of a workload."""

from __future__ import annotations

from ...schedules.activations.glue import GlueWorkload
from ..compiler.headers import GATES, TYPES, device_source, literal

HEADERS = (
    "ptx/instructions.cuh", "ptx/lanes.cuh", "pipeline/dependent.cuh", "kv/pairs.cuh", "codecs/e4m3.cuh", "store/gate.cuh",
    "activations/inverse_root.cuh", "activations/quantize.cuh", "activations/rows.cuh",
)  # fmt: skip
PASSES = {
    "tl.disable_thread_storage_sync": True,  # the barriers that are needed stand in the programs
    "tl.disable_safe_memory_legalize": True,  # accesses are inside by construction
}


def glue_source(w: GlueWorkload) -> str:
    """The device functions, and ``struct Rows`` for ``w``."""
    numbers = {
        "int K": w.k,
        "bool RESIDUAL": str(w.residual).lower(),
        "float EPS": f"{literal(w.eps):.9e}f",
        "float OFFSET": f"{literal(w.offset):.9e}f",
    }
    types = (f"  using T = {TYPES[w.dtype]};", f"  using Activation = {GATES[w.activation]};")
    lines = (f"  static constexpr {name} = {value};" for name, value in numbers.items())
    return "\n".join([device_source(HEADERS), "struct Rows {", *types, *lines, "};", ""])
