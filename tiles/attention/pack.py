"""``attention_pack``: windows that are full go to their pages, in all layers of a cache.

Behind a step whose appends left windows as they were (``full_windows``): one launch instead of a wait
in every layer. A block has one kv head of one layer and looks at ``SEQUENCES`` sequences, of which it
quantizes and packs the last 128 tokens of those whose length is a multiple of 128, as an append
does (BitDecoding V-B): the same bits. What one warp does with its sixteen tokens is CUDA
(``device/kv/pack.cuh``).
"""

from typing import Any

from ...layouts.kv import GRANULE, RESIDUAL, window_words
from ...schedules.attention.workload import AttentionWorkload
from ...schedules.schedule import Schedule
from ...schedules.target import Target
from ..compiler.headers import device_source
from ..program import TileProgram
from .append import HEADERS, ROWS_WORDS, THREADS, WARPS
from .cache import PASS_CONFIGS, cache_source
from .leaves import caller
from .packing import packing_macros

SEQUENCES = 16  # that a block looks at: most have nothing to pack
BLOCKS = {64: 3, 128: 2, 256: 1}  # of an SM by head_dim: as many as fit without spills


def build(workload: AttentionWorkload, schedule: Schedule, target: Target) -> Any:
    """The TileLang PrimFunc of one workload; batch, layers and the numbers of pages and slots are
    dynamic."""
    import tilelang.language as T

    w, dtype = workload, workload.dtype
    by_channel, scaled = w.format.key_scales == "channel", w.format.has_head_scales
    blocks = BLOCKS[w.head_dim] if target.arch == "sm_90a" else 1  # what ptxas makes for older devices takes more registers
    constants = {"ROTARY": "tilebit::NO_ROTARY", "ROTARY_DIM": w.turned_channels, "NORM": 0, "NORM_EPS": 0.0, "NORM_OFFSET": 0.0}
    constants |= {"FULL_WINDOWS": 0, "WARPS": WARPS, "THREADS": THREADS, "LAUNCH_BYTES": ROWS_WORDS * 8}
    source = f"{device_source(HEADERS)}\n{cache_source(w, constants)}"
    batch, layers, num_pages, slots, max_pages = (T.dynamic(n) for n in ("batch", "layers", "num_pages", "num_slots", "max_pages"))
    HeadScales = T.Tensor((layers, 2, w.heads_kv), "float32") if scaled else None

    call = caller({}, "Cache")

    @T.macro
    def keys_meet():
        T.sync_threads()

    pack_keys, pack_values = packing_macros(w, call, keys_meet)

    @T.prim_func
    def main(
        pages: T.Tensor((layers, num_pages, w.heads_kv, w.layout.page_words), "int32"),
        windows: T.Tensor((layers, slots, w.heads_kv, window_words(w.head_dim)), "int32"),
        block_tables: T.Tensor((batch, max_pages), "int32"),
        slots_of: T.Tensor((batch,), "int32"),
        lengths: T.Tensor((batch,), "int32"),
        head_scales: HeadScales,
    ):
        with T.Kernel(T.ceildiv(batch, SEQUENCES), w.heads_kv, layers, threads=THREADS) as (part, head, layer):
            T.import_source(source)
            T.annotate_min_blocks_per_sm(blocks)
            rows = T.alloc_shared((ROWS_WORDS,), "int64")  # registers are few
            fragments = T.alloc_local((w.head_dim // 4,), "uint32")
            staged = T.alloc_shared((WARPS * GRANULE * (w.head_dim + 8),), dtype)
            parameters = T.alloc_shared((2 * w.head_dim if by_channel else 4,), "float32")
            sequence, length = (T.alloc_var("int32") for _ in range(2))
            T.call_extern("handle", "tilebit::launch_dependents")
            T.call_extern("handle", "tilebit::wait_for_predecessor")  # it may write windows
            for i in T.serial(SEQUENCES):
                sequence = part * SEQUENCES + i
                length = lengths[sequence] if sequence < batch else 0
                if length > 0 and length % RESIDUAL == 0:  # all of the block does, or none
                    call(
                        "Pack::open_full", rows, pages, windows, slots_of[sequence], T.address_of(block_tables[sequence, 0]),
                        w.heads_kv, head, length, layer, num_pages, slots,
                    )  # fmt: skip
                    T.sync_threads()  # rows are opened
                    pack_keys(rows, fragments, staged, parameters, head_scales[layer, 0, head] if scaled else T.float32(1.0))
                    pack_values(rows, fragments, staged, head_scales[layer, 1, head] if scaled else T.float32(1.0))
                    T.sync_threads()  # rows have been read

    return main


PROGRAM = TileProgram(
    name="attention_pack",
    compiler="tilelang",
    build=build,
    headers=HEADERS,
    pass_configs=PASS_CONFIGS,
    newest_arch="sm_89",
)
