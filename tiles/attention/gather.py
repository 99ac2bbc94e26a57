"""``attention_gather``: the rows of a low-bit KV cache in 16 bits, for a prefill that attends to a
quantized history.

    out_k[cu_kv[b] + t] = q * scale + zero of token t's keys, out_v likewise, t < lengths[b]

in fp32, rounded once. The rows after a sequence's history are left alone: there the new tokens' own
keys and values go. A block has 128 tokens of one key head, which share the key's channel scales,
packed or in the 16-bit window; each of its ``num_warps`` warps takes sixteen of them at a time,
through shared memory of its own (``device/kv/rows.cuh``).
"""

from typing import Any

from ...layouts.kv import GRANULE, RESIDUAL, window_words
from ...schedules.attention.workload import AttentionWorkload
from ...schedules.schedule import Schedule
from ...schedules.target import Target
from ..compiler.headers import device_source
from ..program import TileProgram
from .cache import PASS_CONFIGS, cache_source
from .leaves import caller

HEADERS = ("ptx/instructions.cuh", *(f"kv/{name}.cuh" for name in ("pairs", "granule", "page", "sequences", "rows")))
GRANULES = RESIDUAL // GRANULE  # of the keys of a group, and of its values
# Of four warps, by head_dim: as many as registers allow without spills. Left alone, ptxas takes 137
# at 4 bits and 128 channels, which is 3 blocks; as a loop in CUDA it took 124.
BLOCKS_PER_SM = {64: 6, 128: 4, 256: 2}
SEQUENCE, FIRST = 0, 1  # of a place in the line of groups (``device/kv/sequences.cuh``)


def build(workload: AttentionWorkload, schedule: Schedule, target: Target) -> Any:
    """The TileLang PrimFunc of one (workload, schedule). Parameters, absent ones left out:

    pages int32 ``[num_pages, heads_kv, page_words]``, windows int32 ``[slots, heads_kv,
    window_words]`` (``layouts.kv``), block_tables int32 ``[batch, max_pages]``, slots and lengths
    int32 ``[batch]``, cu_kv int32 ``[batch + 1]``, head_scales fp32 ``[2, heads_kv]`` (fp8), out_k
    and out_v ``[total, heads_kv, head_dim]``. All but the heads are dynamic, from 1 up.
    """
    import tilelang.language as T

    w, warps, dtype = workload, schedule.num_warps, workload.dtype
    eights = w.format.key == "int8" and w.format.key_scales == "channel" and w.head_dim == 128  # need more
    blocks_per_sm = (BLOCKS_PER_SM[w.head_dim] - eights) * 4 // warps
    row_pitch = w.heads_kv * w.head_dim  # elements from a row of the output to the next one
    staged_words = GRANULE * w.head_dim // 2  # of a warp
    source = f"{device_source(HEADERS)}\n{cache_source(w, {'THREADS': warps * 32})}"
    batch, bounds, total, num_pages, slots, max_pages = (
        T.dynamic(name) for name in ("batch", "bounds", "total", "num_pages", "num_slots", "max_pages")
    )
    HeadScales = T.Tensor((2, w.heads_kv), "float32") if w.format.has_head_scales else None

    call = caller({}, "Cache")

    def mover(which):
        @T.macro
        def move(pages, tables, windows, head_scale, staging, out, sequence, slot, head, first, granule, left, row, warp):
            """Sixteen tokens, granule ``granule`` of the group from token ``first`` on, of which
            there are ``left``."""
            staged = warp * staged_words
            if left >= RESIDUAL:  # in pages
                call(
                    f"CacheRows::stage_{which}", pages, T.address_of(tables[sequence, 0]), w.heads_kv, head,
                    first + granule * GRANULE, head_scale, T.address_of(staging[staged]),
                )  # fmt: skip
            else:
                call(
                    f"CacheRows::stage_window_{which}", windows, slot, w.heads_kv, head, granule, T.address_of(staging[staged])
                )  # fmt: skip
            T.sync_warp()
            call(
                "CacheRows::store", T.address_of(staging[staged]), T.address_of(out[row + granule * GRANULE, head, 0]), row_pitch,
                T.min(left - granule * GRANULE, GRANULE),
            )  # fmt: skip
            T.sync_warp()

        return move

    move_keys, move_values = mover("keys"), mover("values")

    @T.prim_func
    def main(
        pages: T.Tensor((num_pages, w.heads_kv, w.layout.page_words), "int32"),
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
            T.import_source(source)
            T.annotate_min_blocks_per_sm(blocks_per_sm)
            staging = T.alloc_shared((warps * staged_words,), "uint32")
            line, place = T.alloc_local((2,), "int32"), T.alloc_local((3,), "int32")
            groups, sequence, first, left, unit = (T.alloc_var("int32") for _ in range(5))
            warp = T.get_thread_binding() // 32
            groups = call("CacheRows::count", lengths, batch, line, returns="int32")
            present = index < groups  # a condition without a name would be asked again for every statement
            if present:
                call("CacheRows::find", lengths, batch, line, index, place)
                sequence = place[SEQUENCE]
                first = (index - place[FIRST]) * RESIDUAL
                left = lengths[sequence] - first
                unit = warp  # sixteen tokens' keys, then their values
                while unit < 2 * GRANULES:
                    if unit % GRANULES * GRANULE < left:
                        if unit < GRANULES:
                            move_keys(
                                pages, block_tables, windows, head_scales[0, head] if w.format.has_head_scales else T.float32(1.0), staging,
                                out_k, sequence, slots_of[sequence], head, first, unit, left, cu_kv[sequence] + first, warp,
                            )  # fmt: skip
                        else:
                            move_values(
                                pages, block_tables, windows, head_scales[1, head] if w.format.has_head_scales else T.float32(1.0), staging,
                                out_v, sequence, slots_of[sequence], head, first, unit - GRANULES, left, cu_kv[sequence] + first, warp,
                            )  # fmt: skip
                    unit = unit + warps

    return main


PROGRAM = TileProgram(
    name="attention_gather",
    compiler="tilelang",
    build=build,
    headers=HEADERS,
    pass_configs=PASS_CONFIGS,
    newest_arch="sm_89",
)
