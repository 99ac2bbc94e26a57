"""``attention_append``: new keys and values join the cache.

One kernel takes rows of k and v (rotated on the way, if asked), fills each sequence's 16-bit window and, whenever 128 tokens are
together, quantizes and packs them in registers, as the fragments that decoding will read, into their pages (BitDecoding V-B): minima and
maxima by warp shuffles, no second pass, no repacking ever. The same blocks serve one token a sequence and a whole prompt, so that
appending token by token gives the bits that appending all at once gives. ``device/append.cuh`` is the text.

A block has one kv head of one group of 128 tokens that is completed by this call; a sequence whose new tokens complete none has one block
all the same, and the first block of each sequence writes what stays in the window, after it has read it.
"""

from typing import Any

from ...layouts.kv import RESIDUAL, window_words
from ...schedules.attention.workload import AttentionWorkload
from ...schedules.schedule import Schedule
from ...schedules.target import Target
from ..compiler.headers import TYPES, device_source
from ..program import TileProgram
from .decode import cache_arguments

HEADERS = ("ptx.cuh", "dependent.cuh", "kv.cuh", "append.cuh")
ROTARY = {"": "NO_ROTARY", "half": "HALF_ROTARY", "interleaved": "INTERLEAVED_ROTARY"}
THREADS = 128


def append_type(workload: AttentionWorkload) -> str:
    """``tilebit::Append`` with its template arguments (``device/append.cuh``)."""
    w = workload
    return f"tilebit::Append<{TYPES[w.dtype]}, {cache_arguments(w)}, {w.page_size}, tilebit::{ROTARY[w.rotary]}>"


def build(workload: AttentionWorkload, schedule: Schedule, target: Target) -> Any:
    """The TileLang PrimFunc of one workload; batch, tokens, positions and the number of pages are dynamic."""
    import tilelang.language as T

    w, dtype = workload, workload.dtype
    entry = f"tilebit::append_tokens<{append_type(w)}, {TYPES[dtype]}>"
    batch, offsets, tokens, num_pages, slots, max_pages, positions = (
        T.dynamic(n) for n in ("batch", "offsets", "tokens", "num_pages", "num_slots", "max_pages", "positions")
    )
    HeadScales = T.Tensor((2, w.heads_kv), "float32") if w.format.has_head_scales else None
    CosSin = T.Tensor((positions, w.head_dim), "float32") if w.rotary else None

    @T.prim_func
    def main(
        k: T.Tensor((tokens, w.heads_kv, w.head_dim), dtype),
        v: T.Tensor((tokens, w.heads_kv, w.head_dim), dtype),
        cu_seqlens: T.Tensor((offsets,), "int32"),
        lengths: T.Tensor((batch,), "int32"),
        block_tables: T.Tensor((batch, max_pages), "int32"),
        slots_of: T.Tensor((batch,), "int32"),
        pages: T.Tensor((num_pages, w.heads_kv, w.layout.page_words), "int32"),
        windows: T.Tensor((slots, w.heads_kv, window_words(w.head_dim)), "int32"),
        head_scales: HeadScales,
        cos_sin: CosSin,
    ):
        # a sequence of n new rows completes at most n / 128 + 1 groups and has at least one block
        with T.Kernel(tokens // RESIDUAL + batch, w.heads_kv, threads=THREADS):
            T.import_source(device_source(HEADERS))
            T.call_extern(
                "handle", entry, T.address_of(k[0, 0, 0]), T.address_of(v[0, 0, 0]), T.address_of(cu_seqlens[0]), T.address_of(lengths[0]),
                T.address_of(block_tables[0, 0]), T.address_of(slots_of[0]), T.address_of(pages[0, 0, 0]), T.address_of(windows[0, 0, 0]),
                T.address_of(head_scales[0, 0]) if w.format.has_head_scales else T.address_of(lengths[0]),
                T.address_of(cos_sin[0, 0]) if w.rotary else T.address_of(lengths[0]),
                batch, w.heads_kv, max_pages,
            )  # fmt: skip

    return main


PROGRAM = TileProgram(
    name="attention_append",
    compiler="tilelang",
    build=build,
    headers=HEADERS,
    newest_arch="sm_89",
)
