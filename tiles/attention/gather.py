"""``attention_gather``: the rows of a low-bit KV cache in 16 bits, for a prefill that attends to a quantized history.

    out_k[cu_kv[b] + t] = q * scale + zero of token t's keys, out_v likewise, t < lengths[b]

in fp32, rounded once. The rows after a sequence's history are left alone: there the new tokens' own keys and values go. A block dequantizes
128 tokens of one key head, which share the key's channel scales, with ``num_warps`` warps (``device/gather.cuh``).
"""

from typing import Any

from ...layouts.kv import KVLayout, window_words
from ...schedules.attention.workload import AttentionWorkload
from ...schedules.schedule import Schedule
from ...schedules.target import Target
from ..compiler.headers import TYPES, device_source
from ..program import TileProgram
from .decode import cache_arguments

HEADERS = ("ptx.cuh", "kv.cuh", "gather.cuh")
GRANULE_ROWS = 16


def build(workload: AttentionWorkload, schedule: Schedule, target: Target) -> Any:
    """The TileLang PrimFunc of one (workload, schedule). Parameters, absent ones left out:

    pages int32 ``[num_pages, heads_kv, page_words]``, windows int32 ``[slots, heads_kv, window_words]`` (``layouts.kv``), block_tables
    int32 ``[batch, max_pages]``, slots and lengths int32 ``[batch]``, cu_kv int32 ``[batch + 1]``, head_scales fp32 ``[2, heads_kv]``
    (fp8), out_k and out_v ``[total, heads_kv, head_dim]``. All but the heads are dynamic, from 1 up.
    """
    import tilelang.language as T

    w, warps, dtype = workload, schedule.num_warps, workload.dtype
    layout = KVLayout(w.format, w.head_dim, w.page_size)
    gather = f"tilebit::Gather<{TYPES[dtype]}, {cache_arguments(w)}, {w.page_size}, {warps}>"
    entry = f"tilebit::gather_group<{gather}, {TYPES[dtype]}, {warps}>"
    batch, bounds, total, num_pages, slots, max_pages = (
        T.dynamic(name) for name in ("batch", "bounds", "total", "num_pages", "num_slots", "max_pages")
    )
    HeadScales = T.Tensor((2, w.heads_kv), "float32") if w.format.has_head_scales else None

    @T.prim_func
    def main(
        pages: T.Tensor((num_pages, w.heads_kv, layout.page_words), "int32"),
        windows: T.Tensor((slots, w.heads_kv, window_words(w.head_dim)), "int32"),
        block_tables: T.Tensor((batch, max_pages), "int32"),
        slots_of: T.Tensor((batch,), "int32"),
        lengths: T.Tensor((batch,), "int32"),
        cu_kv: T.Tensor((bounds,), "int32"),
        head_scales: HeadScales,
        out_k: T.Tensor((total, w.heads_kv, w.head_dim), dtype),
        out_v: T.Tensor((total, w.heads_kv, w.head_dim), dtype),
    ):
        # groups of all sequences are at most those of the rows, and one that is not full of each
        with T.Kernel(w.heads_kv, total // schedule.block_n + batch, threads=warps * 32) as (head, index):
            staging = T.alloc_shared((warps * GRANULE_ROWS * w.head_dim // 2,), "int32")
            T.import_source(device_source(HEADERS))
            T.call_extern(
                "handle", entry, T.address_of(staging[0]), T.address_of(pages[0, 0, 0]), T.address_of(windows[0, 0, 0]),
                T.address_of(block_tables[0, 0]), T.address_of(slots_of[0]), T.address_of(lengths[0]), T.address_of(cu_kv[0]),
                T.address_of(head_scales[0, 0]) if w.format.has_head_scales else T.address_of(lengths[0]), T.address_of(out_k[0, 0, 0]),
                T.address_of(out_v[0, 0, 0]), batch, w.heads_kv, max_pages, head, index,
            )  # fmt: skip

    return main


PROGRAM = TileProgram(
    name="attention_gather",
    compiler="tilelang",
    build=build,
    headers=HEADERS,
    newest_arch="sm_89",
)
