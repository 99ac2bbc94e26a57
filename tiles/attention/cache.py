"""What programs over a low-bit KV cache have in common: constants that a kernel's source states for
the functions under ``device/kv``, from ``layouts.kv``, and how TileLang is to treat their loops."""

from collections.abc import Mapping

from ...layouts.kv import PAIR_BYTES, RESIDUAL, KVLayout
from ...layouts.kv_formats import KVFormat
from ...schedules.attention.workload import AttentionWorkload
from ..compiler.headers import TYPES

KINDS = {"float": "FLOAT", "int8": "INT8", "int4": "INT4", "int2": "INT2", "fp8": "FP8"}
SCALES = {"none": "NO_SCALES", "channel": "PER_CHANNEL", "token": "PER_TOKEN", "head": "PER_HEAD"}

# Every thread of a block loops as far as its warp does; nothing may be moved, shared or guarded
# behind the program's back.
PASS_CONFIGS = {
    "tl.disable_thread_storage_sync": True,  # a barrier of the block would stand in loops whose lengths differ by warp
    "tl.disable_safe_memory_legalize": True,  # copies are inside by construction
    "tl.disable_shared_memory_reuse": True,
}


def cache_constants(workload: AttentionWorkload) -> dict[str, str | int]:
    """Kinds of keys and values (``device/kv/granule.cuh``), tokens of a page and where things lie
    in the record of one page of one head and in a residual window (bytes), by the names that the
    device functions know them by."""
    w, f, page, window = workload, workload.format, workload.layout, KVLayout(KVFormat(), workload.head_dim, RESIDUAL)
    return {
        "KEY": f"tilebit::{KINDS[f.key]}",
        "VALUE": f"tilebit::{KINDS[f.value]}",
        "KEY_SCALES": f"tilebit::{SCALES[f.key_scales]}",
        "HEAD_DIM": w.head_dim,
        "PAGE": w.page_size,
        "RESIDUAL": RESIDUAL,  # tokens of a window, and of a group that shares the scales of its channels
        "KEY_TOKEN": page.key_bytes // w.page_size,  # bytes of a token's codes
        "VALUE_TOKEN": page.value_bytes // w.page_size,
        "VALUES_AT": page.value_offset,
        "KEY_PARAMETERS_AT": page.key_parameter_offset,
        "VALUE_PARAMETERS_AT": page.value_parameter_offset,
        "PAGE_BYTES": page.page_bytes,
        "GROUP_RECORD": PAIR_BYTES * w.head_dim,  # bytes of the scales and zeros of a group's channels
        "PAIR_BYTES": PAIR_BYTES,  # of a token's scale and zero
        "WINDOW_VALUES_AT": window.value_offset,
        "WINDOW_BYTES": window.page_bytes,
    }


def cache_source(workload: AttentionWorkload, more: Mapping[str, str | int | float] | None = None) -> str:
    """``struct Cache``: the constants of ``workload`` and ``more``, and its number type ``T``."""
    numbers = {**cache_constants(workload), **(more or {})}
    lines = (
        f"  static constexpr float {name} = {value!r}f;" if isinstance(value, float) else f"  static constexpr int {name} = {value};"
        for name, value in numbers.items()
    )
    return "\n".join(["struct Cache {", f"  using T = {TYPES[workload.dtype]};", *lines, "};", ""])
