"""``attention_decode`` and ``attention_decode_bulk``: attention of the newest tokens over a low-bit KV cache.

    o[b, i, h] = sum_t p_t v_t,   p = softmax over the tokens t that query i sees,   s_t = scale * q[b, i, h] . k_t

A cache streams past once, so its bytes decide. Work is counted in units: ``block_n`` packed tokens of one key head, or sixteen of its
16-bit window. All units of all sequences stand in one line, and each of the persistent blocks takes an equal share of it (stream-k),
whatever the lengths are: nothing is planned on the host, and a captured graph follows lengths that change on the device. In a block each
of ``num_warps`` warps streams its units through a ring of ``num_stages`` slots that no other warp touches. Where a share cuts a
(sequence, head), the blocks that hold parts of it leave partial results in a workspace and the last to arrive adds them up in order: the
same input gives the same bits.

Codes are the tensor cores' A operand as they lie in the cache; the heads that share a key head, and the queries of a call, are its n
(BitDecoding V-A), ``block_m`` columns at a time. TileLang has no per-warp pipelines, so the loop is CUDA (``device/attention.cuh``); the
grid, the operands and the shared memory are declared here. Papers: BitDecoding IV-V, TurboMind 4.2 and 4.4.
"""

from math import e, log2
from typing import Any

from ...layouts.kv import window_words
from ...schedules.attention import decode as rules
from ...schedules.attention.workload import AttentionWorkload
from ...schedules.schedule import Schedule
from ...schedules.target import Target
from ..compiler.headers import TYPES, device_source, literal
from ..program import TileProgram

HEADERS = ("ptx.cuh", "split_k.cuh", "dependent.cuh", "kv.cuh", "attention.cuh")
KINDS = {"float": "FLOAT", "int8": "INT8", "int4": "INT4", "int2": "INT2", "fp8": "FP8"}
SCALES = {"none": "NO_SCALES", "channel": "PER_CHANNEL", "token": "PER_TOKEN", "head": "PER_HEAD"}


def cache_arguments(workload: AttentionWorkload) -> str:
    """Template arguments that say what a cache holds: kinds of keys and values, key scales, head_dim (``device/kv.cuh``)."""
    f = workload.format
    return f"tilebit::{KINDS[f.key]}, tilebit::{KINDS[f.value]}, tilebit::{SCALES[f.key_scales]}, {workload.head_dim}"


def decode_type(workload: AttentionWorkload, schedule: Schedule) -> str:
    """``tilebit::Decode`` with its template arguments (``device/attention.cuh``)."""
    w, s = workload, schedule
    flags = (w.sinks, w.soft_cap > 0, w.lse, s.program == rules.BULK)
    arguments = (
        TYPES[w.dtype], cache_arguments(w), w.group, w.page_size, s.block_n, s.block_m // 8, s.num_warps, s.num_stages, w.window,
        w.sink_tokens,
        *(str(flag).lower() for flag in flags),
    )  # fmt: skip
    return f"tilebit::Decode<{', '.join(map(str, arguments))}>"


def build(workload: AttentionWorkload, schedule: Schedule, target: Target) -> Any:
    """The TileLang PrimFunc of one (workload, schedule); batch, q_len and the number of pages are dynamic."""
    import tilelang.language as T

    w, dtype = workload, workload.dtype
    entry = f"tilebit::decode_attention<{decode_type(w, schedule)}, {TYPES[dtype]}>"
    capped = w.soft_cap > 0
    scale = w.softmax_scale / w.soft_cap if capped else w.softmax_scale * log2(e)
    cap = w.soft_cap * log2(e)
    batch, q_len, words = (T.dynamic(name) for name in ("batch", "q_len", "words"))
    num_pages, slots, max_pages = (T.dynamic(name) for name in ("num_pages", "num_slots", "max_pages"))
    HeadScales = T.Tensor((2, w.heads_kv), "float32") if w.format.has_head_scales else None
    Sinks = T.Tensor((w.heads_q,), "float32") if w.sinks else None
    Lse = T.Tensor((batch, q_len, w.heads_q), "float32") if w.lse else None

    @T.prim_func
    def main(
        q: T.Tensor((batch, q_len, w.heads_q, w.head_dim), dtype),
        pages: T.Tensor((num_pages, w.heads_kv, w.layout.page_words), "int32"),
        windows: T.Tensor((slots, w.heads_kv, window_words(w.head_dim)), "int32"),
        block_tables: T.Tensor((batch, max_pages), "int32"),
        slots_of: T.Tensor((batch,), "int32"),
        lengths: T.Tensor((batch,), "int32"),
        head_scales: HeadScales,
        sinks: Sinks,
        workspace: T.Tensor((words,), "int32"),
        out: T.Tensor((batch, q_len, w.heads_q, w.head_dim), dtype),
        lse: Lse,
    ):
        with T.Kernel(target.units * schedule.min_blocks, threads=schedule.num_warps * 32):
            shared = T.alloc_shared((rules.shared_bytes(workload, schedule) // 4,), "int32")
            T.import_source(device_source(HEADERS))
            T.annotate_min_blocks_per_sm(schedule.min_blocks)
            T.call_extern(
                "handle", entry, T.address_of(shared[0]), T.address_of(q[0, 0, 0, 0]), T.address_of(pages[0, 0, 0]),
                T.address_of(windows[0, 0, 0]), T.address_of(block_tables[0, 0]), T.address_of(slots_of[0]), T.address_of(lengths[0]),
                T.address_of(head_scales[0, 0]) if w.format.has_head_scales else T.address_of(lengths[0]),
                T.address_of(sinks[0]) if w.sinks else T.address_of(lengths[0]),
                T.address_of(workspace[0]), T.address_of(out[0, 0, 0, 0]),
                T.address_of(lse[0, 0, 0]) if w.lse else T.address_of(lengths[0]),
                batch, q_len, w.heads_kv, max_pages, T.float32(literal(scale)), T.float32(literal(cap)),
            )  # fmt: skip

    return main


def decode_program(name: str) -> TileProgram:
    """The tile program called ``name``, one of the two."""
    return TileProgram(
        name=name,
        compiler="tilelang",
        build=build,
        headers=HEADERS,
        newest_arch=None if name == rules.BULK else "sm_89",
    )


PROGRAM = decode_program(rules.ASYNC)
