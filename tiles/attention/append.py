"""``attention_append``: new keys and values join the cache.

One kernel takes rows of k and v (rotated on the way, if asked, and q's rows with them), fills each
sequence's 16-bit window and, whenever 128 tokens are together, quantizes and packs them in registers, as the fragments that
decoding will read, into their pages (BitDecoding V-B): minima and maxima by warp shuffles, no
second pass, no repacking ever. The same blocks serve one token a sequence and a whole prompt, so
that appending token by token gives the bits that appending all at once gives. What one warp does
with its sixteen tokens is CUDA (``device/kv/new_rows.cuh``, ``pack.cuh``).

A block has one kv head of one group of 128 tokens that is completed by this call; a sequence whose
new tokens complete none has one block all the same, and the first block of each sequence writes
what stays in the window, after it has read it.
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

HEADERS = (
    "ptx/instructions.cuh",
    "pipeline/dependent.cuh",
    "codecs/e4m3.cuh",
    *(f"kv/{name}.cuh" for name in ("pairs", "granule", "page", "sequences", "quantize", "turn", "new_rows", "pack")),
)
ROTARY = {"": "NO_ROTARY", "half": "HALF_ROTARY", "interleaved": "INTERLEAVED_ROTARY"}
WARPS, THREADS = 4, 128
GRANULES = RESIDUAL // GRANULE // WARPS  # of a warp
ROWS_WORDS = 10  # of 64 bits, of what `tilebit::NewRows` keeps of a sequence
SEQUENCE, FIRST = 0, 1  # of a place in the line of work items (``device/kv/sequences.cuh``)


def build(workload: AttentionWorkload, schedule: Schedule, target: Target) -> Any:
    """The TileLang PrimFunc of one workload; batch, tokens, positions and the number of pages are
    dynamic."""
    import tilelang.language as T

    w, dtype = workload, workload.dtype
    # left alone, ptxas takes 175 registers at 2 bits and 128 channels, which is 2 blocks; as a loop
    # in CUDA it took 123
    blocks_per_sm = 4 if w.format.key == "int2" and w.head_dim == 128 else 1
    by_channel, fragment_words = w.format.key_scales == "channel", w.head_dim // 4
    constants = {"ROTARY": f"tilebit::{ROTARY[w.rotary]}", "WARPS": WARPS, "THREADS": THREADS, "LAUNCH_BYTES": ROWS_WORDS * 8}
    source = f"{device_source(HEADERS)}\n{cache_source(w, constants)}"
    batch, offsets, tokens, num_pages, slots, max_pages, positions, k_pitch, v_pitch, q_pitch = (
        T.dynamic(n)
        for n in ("batch", "offsets", "tokens", "num_pages", "num_slots", "max_pages", "positions", "k_pitch", "v_pitch", "q_pitch")
    )
    HeadScales = T.Tensor((2, w.heads_kv), "float32") if w.format.has_head_scales else None
    CosSin = T.Tensor((positions, w.head_dim), "float32") if w.rotary else None
    Queries = T.StridedTensor((tokens, w.heads_q, w.head_dim), (q_pitch, w.head_dim, 1), dtype) if w.queries else None
    Turned = T.Tensor((tokens, w.heads_q, w.head_dim), dtype) if w.queries else None

    call = caller({}, "Cache")

    @T.prim_func
    def main(
        k: T.StridedTensor((tokens, w.heads_kv, w.head_dim), (k_pitch, w.head_dim, 1), dtype),
        v: T.StridedTensor((tokens, w.heads_kv, w.head_dim), (v_pitch, w.head_dim, 1), dtype),
        cu_seqlens: T.Tensor((offsets,), "int32"),
        lengths: T.Tensor((batch,), "int32"),
        block_tables: T.Tensor((batch, max_pages), "int32"),
        slots_of: T.Tensor((batch,), "int32"),
        pages: T.Tensor((num_pages, w.heads_kv, w.layout.page_words), "int32"),
        windows: T.Tensor((slots, w.heads_kv, window_words(w.head_dim)), "int32"),
        head_scales: HeadScales,
        cos_sin: CosSin,
        q: Queries,
        out: Turned,
    ):
        # a sequence of n new rows completes at most n / 128 + 1 groups and has at least one block
        with T.Kernel(tokens // RESIDUAL + batch, w.heads_kv, threads=THREADS) as (item, head):
            T.import_source(source)
            T.annotate_min_blocks_per_sm(blocks_per_sm)
            rows, line, place = T.alloc_local((ROWS_WORDS,), "int64"), T.alloc_local((2,), "int32"), T.alloc_local((3,), "int32")
            fragments = T.alloc_local((GRANULES * fragment_words,), "uint32")
            extremes = T.alloc_shared((2 * WARPS * w.head_dim if by_channel else 1,), "float32")
            total, sequence, index, length, old_length, group, e, begin, row, end = (T.alloc_var("int32") for _ in range(10))
            thread = T.get_thread_binding()
            T.call_extern("handle", "tilebit::wait_for_predecessor")  # all operands may be its
            T.call_extern("handle", "tilebit::launch_dependents")  # a decode reads early what this call does not write
            total = call("NewRows::count", lengths, cu_seqlens, batch, line, returns="int32")
            present = item < total  # a condition without a name would be asked again for every statement
            if present:
                call(
                    "NewRows::find", lengths, cu_seqlens, batch, line, item,
                    place,
                )  # fmt: skip
                sequence = place[SEQUENCE]
                index = item - place[FIRST]
                length = lengths[sequence]
                row = cu_seqlens[sequence]
                old_length = length - (cu_seqlens[sequence + 1] - row)
                group = T.truncdiv(old_length, RESIDUAL) * RESIDUAL + index * RESIDUAL
                call(
                    "NewRows::open", rows, k, k_pitch, v, v_pitch, row, cos_sin if w.rotary else lengths,
                    windows, slots_of[sequence], pages, T.address_of(block_tables[sequence, 0]),
                    w.heads_kv, head, old_length,
                )  # fmt: skip
                if w.queries:  # of the tokens of this group, and the last group's of those after it, too
                    end = T.if_then_else(group + 2 * RESIDUAL > length, length, group + RESIDUAL)
                    call(
                        "Turn::queries", q, q_pitch, cos_sin, row - old_length, T.max(group, old_length), end,
                        head * w.group, w.group, w.heads_q, out,
                    )  # fmt: skip
                full = group + RESIDUAL <= length
                if full:  # all of the group is here: it goes to its pages
                    for g in T.unroll(GRANULES, explicit=True):
                        call(
                            "Pack::load<true>", rows, group, thread // 32 * GRANULES + g,
                            T.address_of(fragments[g * fragment_words]),
                        )  # fmt: skip
                    if by_channel:
                        call("Pack::find_extremes", fragments, extremes)
                        T.sync_threads()  # all warps' extremes are there
                        call("Pack::quantize_channels", rows, group, fragments, extremes)
                    for g in T.unroll(GRANULES, explicit=True):
                        call(
                            "Pack::store_keys", rows, group + (thread // 32 * GRANULES + g) * GRANULE,
                            T.address_of(fragments[g * fragment_words]),
                            head_scales[0, head] if w.format.has_head_scales else T.float32(1.0),
                        )  # fmt: skip
                    for g in T.unroll(GRANULES, explicit=True):
                        call(
                            "Pack::load<false>", rows, group, thread // 32 * GRANULES + g,
                            T.address_of(fragments[g * fragment_words]),
                        )  # fmt: skip
                        call(
                            "Pack::store_values", rows, group + (thread // 32 * GRANULES + g) * GRANULE,
                            T.address_of(fragments[g * fragment_words]),
                            head_scales[1, head] if w.format.has_head_scales else T.float32(1.0),
                        )  # fmt: skip
                first_of_sequence = index == 0
                if first_of_sequence:
                    T.sync_threads()  # the window has been read
                    group = T.truncdiv(length, RESIDUAL) * RESIDUAL
                    begin = T.max(group, old_length)
                    e = thread
                    while e < (length - begin) * (w.head_dim // 2):  # pairs of channels
                        call(
                            "NewRows::store_pair", rows, begin + T.truncdiv(e, w.head_dim // 2),
                            begin + T.truncdiv(e, w.head_dim // 2) - group, T.truncmod(e, w.head_dim // 2) * 2,
                        )  # fmt: skip
                        e = e + THREADS

    return main


PROGRAM = TileProgram(
    name="attention_append",
    compiler="tilelang",
    build=build,
    headers=HEADERS,
    pass_configs=PASS_CONFIGS,
    newest_arch="sm_89",
)
