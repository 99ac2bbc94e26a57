"""``attention_append``: new keys and values join the cache.

One kernel takes rows of k and v (normalized and rotated on the way, if asked, and q's with them), fills each
sequence's 16-bit window and, whenever 128 tokens are together, quantizes and packs them in registers, as the fragments that
decoding will read, into their pages (BitDecoding V-B): minima and maxima by warp shuffles, no
second pass, no repacking ever. The same blocks serve one token a sequence and a whole prompt, so
that appending token by token gives the bits that appending all at once gives. What one warp does
with its sixteen tokens is CUDA (``device/kv/new_rows.cuh``, ``pack.cuh``). Of ``full_windows`` one new
token a sequence goes to the window, and nothing is packed: ``pack.py`` does that behind all layers.

A block has one kv head of one group of 128 tokens that is completed by this call; a sequence whose
new tokens complete none has one block all the same, and the first block of each sequence writes
what stays in the window, after it has read it. It has eight warps, which pack keys and then values, or
sixteen, of which eight have the keys and eight the values, and the queries: few sequences leave most
SMs without a block, and what a window's fill takes is then how long a block takes.
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
from .packing import packing_macros

HEADERS = (
    "ptx/instructions.cuh",
    "pipeline/dependent.cuh",
    "codecs/e4m3.cuh",
    *(f"kv/{name}.cuh" for name in ("pairs", "granule", "page", "sequences", "quantize", "turn", "new_rows", "pack")),
)
ROTARY = {"": "NO_ROTARY", "half": "HALF_ROTARY", "interleaved": "INTERLEAVED_ROTARY"}
WARPS, THREADS = 8, 256
# Blocks of an SM by head_dim: as many as fit without spills, so that those that fill no window take
# few turns. What ptxas makes for older devices takes more registers.
BLOCKS, BLOCKS_BEFORE_SM90 = {64: 4, 128: 4, 256: 2}, 2
BLOCKS_OF_TOKENS = 3  # keys with a scale a token: with four, 12 bytes of registers spill
ROWS_WORDS = 13  # of 64 bits, of what `tilebit::NewRows` keeps of a sequence
SEQUENCE, FIRST = 0, 1  # of a place in the line of work items (``device/kv/sequences.cuh``)


def build(workload: AttentionWorkload, schedule: Schedule, target: Target) -> Any:
    """The TileLang PrimFunc of one workload; batch, tokens, positions and the number of pages are
    dynamic."""
    import tilelang.language as T

    w, dtype = workload, workload.dtype
    apart = schedule.num_warps > WARPS  # keys and values have warps of their own
    threads = schedule.num_warps * 32
    blocks = BLOCKS[w.head_dim] if target.arch == "sm_90a" else BLOCKS_BEFORE_SM90
    if w.format.key_scales == "token":
        blocks = min(blocks, BLOCKS_OF_TOKENS)
    blocks = 1 if apart else blocks  # of sixteen warps few are launched
    staged_elements = WARPS * GRANULE * (w.head_dim + 8)
    by_channel = w.format.key_scales == "channel"
    packs = not w.full_windows
    constants = {"ROTARY": f"tilebit::{ROTARY[w.rotary]}", "FULL_WINDOWS": int(w.full_windows)}
    constants |= {"WARPS": WARPS, "THREADS": threads, "LAUNCH_BYTES": ROWS_WORDS * 8}
    constants |= {
        "ROTARY_DIM": w.turned_channels,
        "NORM": int(w.qk_norm),
        "NORM_EPS": float(w.norm_eps),
        "NORM_OFFSET": float(w.norm_offset),
    }
    source = f"{device_source(HEADERS)}\n{cache_source(w, constants)}"
    batch, offsets, tokens, num_pages, slots, max_pages, positions, k_pitch, v_pitch, q_pitch = (
        T.dynamic(n)
        for n in ("batch", "offsets", "tokens", "num_pages", "num_slots", "max_pages", "positions", "k_pitch", "v_pitch", "q_pitch")
    )
    scaled = w.format.has_head_scales
    HeadScales = T.Tensor((2, w.heads_kv), "float32") if scaled else None
    CosSin = T.Tensor((positions, w.turned_channels), "float32") if w.rotary else None
    QNorm, KNorm = (T.Tensor((w.head_dim,), dtype) if w.qk_norm else None for _ in range(2))  # one object would be one tensor
    Queries = T.StridedTensor((tokens, w.heads_q, w.head_dim), (q_pitch, w.head_dim, 1), dtype) if w.queries else None
    Turned = T.Tensor((tokens, w.heads_q, w.head_dim), dtype) if w.queries else None

    call = caller({}, "Cache")

    def has_keys():
        return T.get_thread_binding() < THREADS if apart else True

    def has_values():
        return T.get_thread_binding() >= THREADS if apart else True

    @T.macro
    def keys_meet():
        """The warps that have keys."""
        if apart:
            T.call_extern("handle", f"tilebit::sync_group<1, {THREADS}>", 0)
        else:
            T.sync_threads()

    pack_keys, pack_values = packing_macros(w, call, keys_meet)

    @T.macro
    def turn_queries(rows, q, q_pitch, q_norm, head, out):
        if w.queries:
            call(
                f"NewRows::turn_queries<{w.group}>", rows, q, q_pitch, q_norm if w.qk_norm else rows, head * w.group, w.heads_q, out,
            )  # fmt: skip

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
        q_norm: QNorm,
        k_norm: KNorm,
        out: Turned,
    ):
        # A sequence of n new rows completes at most n / 128 + 1 groups and has at least one block; just
        # one where nothing is packed: then no line of blocks must be counted.
        with T.Kernel(tokens // RESIDUAL + batch if packs else batch, w.heads_kv, threads=threads) as (item, head):
            T.import_source(source)
            T.annotate_min_blocks_per_sm(blocks)
            line, place = (T.alloc_local((n,), "int32") if packs else None for n in (2, 3))
            rows = T.alloc_shared((ROWS_WORDS,), "int64")  # registers are few
            fragments = T.alloc_local((w.head_dim // 4,), "uint32") if packs else None
            staged = T.alloc_shared((staged_elements * (1 + apart),), dtype) if packs else None
            parameters = T.alloc_shared((2 * w.head_dim if by_channel else 4,), "float32") if packs else None
            total, sequence, index, length, old_length, row = (T.alloc_var("int32") for _ in range(6))
            T.call_extern("handle", "tilebit::launch_dependents")  # a decode reads early what this call does not write
            if packs:
                total = call("NewRows::count", lengths, cu_seqlens, batch, line, returns="int32")
            present = item < (total if packs else batch)  # a condition without a name would be asked again for every statement
            if present:
                if packs:
                    call(
                        "NewRows::find", lengths, cu_seqlens, batch, line, item,
                        place,
                    )  # fmt: skip
                sequence = place[SEQUENCE] if packs else item
                length = lengths[sequence]
                row = cu_seqlens[sequence]
                old_length = length - (cu_seqlens[sequence + 1] - row)
                index = item - place[FIRST] if packs else 0
                call(
                    "NewRows::open", rows, k, k_pitch, v, v_pitch, row, cos_sin if w.rotary else lengths,
                    k_norm if w.qk_norm else lengths, windows, slots_of[sequence], pages, T.address_of(block_tables[sequence, 0]),
                    w.heads_kv, head, old_length, length, index,
                )  # fmt: skip
            # Lengths and tables are settled; rows, the window and pages may be the preceding kernel's.
            T.call_extern("handle", "tilebit::wait_for_predecessor")
            if present:
                T.sync_threads()  # rows are opened
                if packs:
                    full = T.truncdiv(old_length, RESIDUAL) * RESIDUAL + (index + 1) * RESIDUAL <= length
                    if full:
                        if not apart:  # else keys are asked for at once
                            call("Pack::prefetch<true>", rows)
                        if has_values():
                            call("Pack::prefetch<false>", rows)
                if has_values():
                    turn_queries(rows, q, q_pitch, q_norm, head, out)
                if packs:
                    if full:  # all of the group is here: it goes to its pages
                        if has_keys():
                            pack_keys(rows, fragments, staged, parameters, head_scales[0, head] if scaled else T.float32(1.0))
                        if has_values():
                            pack_values(
                                rows, fragments, T.address_of(staged[staged_elements * apart]),
                                head_scales[1, head] if scaled else T.float32(1.0),
                            )  # fmt: skip
                    T.sync_threads()  # the window has been read
                if has_keys():
                    call("NewRows::store_rows<true>", rows)
                if has_values():
                    call("NewRows::store_rows<false>", rows)

    return main


PROGRAM = TileProgram(
    name="attention_append",
    compiler="tilelang",
    build=build,
    headers=HEADERS,
    pass_configs=PASS_CONFIGS,
    newest_arch="sm_89",
)
