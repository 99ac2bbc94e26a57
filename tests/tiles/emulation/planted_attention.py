"""Bugs to plant in the CUDA programs of attention: edits of their loops and of their device functions, each of a text that is there exactly
once; a bug whose place has changed is an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tilebit.layouts.kv_formats import KVFormat
from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.schedule import Schedule

from .emulated_program import Edit


def once(*pairs: tuple[str, str]) -> Edit:
    """Replaces each ``old``, which must occur once, by its ``new``; raises ``LookupError`` where it does not."""

    def edit(text: str) -> str:
        for old, new in pairs:
            if text.count(old) != 1:
                raise LookupError(f"the bug cannot be planted: {old!r} is {text.count(old)} times in the source; plant it elsewhere")
            text = text.replace(old, new)
        return text

    return edit


@dataclass(frozen=True, slots=True)
class Bug:
    """Edits of one kernel's program, by file, and of its device functions ("device"); ``sign`` is a word of the verdict, or of the fault
    that the emulation reports."""

    name: str
    workload: AttentionWorkload
    schedule: Schedule
    edits: Mapping[str, Edit] = field(default_factory=dict)
    sign: str = ""


def decode(format: str, **changes) -> AttentionWorkload:
    return replace(AttentionWorkload("decode", 4, 1, 300, 8, 2, 64, KVFormat.from_name(format), page_size=64, lse=True), **changes)


def append(format: str, **changes) -> AttentionWorkload:
    return AttentionWorkload(**{"op": "append", "batch": 4, "q_len": 1, "kv_len": 300, "heads_q": 2, "heads_kv": 2, "head_dim": 64,
                                "format": KVFormat.from_name(format), "page_size": 64, **changes})  # fmt: skip


BULK = Schedule("attention_decode_bulk", 32, 8, 64, 2, 2)
ASYNC = Schedule("attention_decode", 32, 16, 64, 3, 3)
WIDE = Schedule("attention_decode_bulk", 64, 16, 64, 2, 2)  # strips of a unit become P in two steps
APPEND = Schedule("attention_append", 128, 1, 64, num_warps=8)
APART = Schedule("attention_append", 128, 1, 64, num_warps=16)  # keys and values have warps of their own
PACK = Schedule("attention_pack", 128, 1, 64, num_warps=8)
GATHER = Schedule("attention_gather", 128, 1, 64, num_warps=4)
PEAKED = decode("kv4_token", scale=0.4)  # so that scores outgrow the running maximum, which moves by steps of some powers of two
NORMED = append("kv4_token", heads_q=2, rotary="interleaved", rotary_dim=32, queries=True, qk_norm=True, norm_eps=1e-5)
TURNING = append("kv4_channel", heads_q=6, rotary="half", queries=True)
LATE = append("kv4_channel", full_windows=True)
KV4, WINDOWED, CAPPED = decode("kv4_channel"), decode("kv4_channel", window=100, sink_tokens=20), decode("kv4_channel", soft_cap=2.0)


def bug(name: str, workload: AttentionWorkload, schedule: Schedule, *pairs: tuple[str, str], sign: str = "") -> Bug:
    return Bug(name, workload, schedule, {"device": once(*pairs)}, sign)


def loop(name: str, workload: AttentionWorkload, schedule: Schedule, *pairs: tuple[str, str], sign: str = "") -> Bug:
    """A bug in the loops of the program's own file."""
    file = schedule.program.removeprefix("attention_").removesuffix("_bulk")
    return Bug(name, workload, schedule, {f"{file}.py": once(*pairs)}, sign)


def ring(name: str, workload: AttentionWorkload, schedule: Schedule, *pairs: tuple[str, str], sign: str = "") -> Bug:
    """A bug in the ring of decode attention."""
    return Bug(name, workload, schedule, {"ring.py": once(*pairs)}, sign)


def packing(name: str, workload: AttentionWorkload, schedule: Schedule, *pairs: tuple[str, str], sign: str = "") -> Bug:
    """A bug in the packing of a group."""
    return Bug(name, workload, schedule, {"packing.py": once(*pairs)}, sign)


VALUE_PARAMETERS = "load_shared_32(token_parameters(d.lane, at + VALUE_BYTES) + (strip * 16 + i * 8) * 4)"
P_OPERAND = "(multiply_pairs(p[nt][i], *reinterpret_cast<const uint32_t*>(&scales)))"

BUGS = (
    # what is read
    bug("row factor of keys forgotten", KV4, BULK, ("key_scale / Keys::ROW_FACTOR", "key_scale")),
    bug("column factor on the wrong half", decode("kv2_token"), BULK,
        ("!= 1.0f) b[k][nt][1] = multiply_pairs(b[k][nt][1],", "!= 1.0f) b[k][nt][0] = multiply_pairs(b[k][nt][0],"),
    ),
    bug("row factor of values forgotten", KV4, BULK, ("i < 2 ? unit : unit / Values::ROW_FACTOR", "unit")),
    bug("zeros of keys forgotten", KV4, BULK, ("(sums[nt][i] + Keys::MIDDLE", "(Keys::MIDDLE")),
    bug("middle of keys forgotten", KV4, BULK, ("* d.scale + middle[nt][i] * key_scale;", "* d.scale;")),
    bug("middle of values forgotten", KV4, BULK, ("state.zeros[nt][i] -= taken[nt][i] * (Values::UNIT / 16);", "{}")),
    bug("codes of the second half not taken from the highest", KV4, BULK, ("a[2] ^= highest<G>(2), a[3] ^= highest<G>(3);", "{}")),
    bug("zeros of values forgotten", KV4, BULK, ("to[f * 16] = state.o[f][nt][i] + zeros", "to[f * 16] = state.o[f][nt][i]")),
    bug("scales of the second half of rows", KV4, BULK, (VALUE_PARAMETERS, VALUE_PARAMETERS.replace(" + i * 8", ""))),
    bug("values' head scale", decode("kvfp8"), BULK, ("d.head_scales[d.heads + view", "d.head_scales[view")),
    bug("bytes of a pair swapped", decode("kv8_token"), ASYNC, ("i & 1 ? 0x4342 : 0x4140", "i & 1 ? 0x4342 : 0x4041")),
    bug("channel scales of one page for all", KV4, ASYNC, ("token = token / RESIDUAL * RESIDUAL;", "{}")),
    bug("keys of the wrong head", KV4, BULK,
        ("const char* page = record_of(d, source, c.head);", "const char* page = record_of(d, source, 0);"),
    ),
    bug("parameters of the page of the codes", KV4, BULK, ("source, PIECES + min(byte,", "source, 0 * min(byte,")),
    bug("rows after the last token", KV4, BULK, ("if (left < 16) {", "if (left < 0) {"), sign="inf"),
    # the pipeline
    ring("copies not waited for", KV4, ASYNC, ("T.ptx_wait_group(stages - 1)", "T.ptx_wait_group(stages)")),
    ring("parity never turns", KV4, BULK, ("ring[PHASE] ^ 1, ring[PHASE])", "ring[PHASE], ring[PHASE])")),
    bug("too many bytes expected", KV4, BULK,
        ("mbarrier_expect(d.barrier(stage), PIECES * BYTES);", "mbarrier_expect(d.barrier(stage), PIECES * BYTES + 16);"),
        sign="wait",
    ),
    bug("too many bytes expected of one page", replace(KV4, page_size=128), BULK,
        ("mbarrier_expect(d.barrier(stage), total);", "mbarrier_expect(d.barrier(stage), total + 16);"),
        sign="wait",
    ),
    bug("parameters not waited for", KV4, BULK,
        ("KEY_COPIES + VALUE_COPIES > 2 * PIECES ? 33 : 1;", "KEY_COPIES + VALUE_COPIES > 2 * PIECES ? 1 : 1;"),
    ),
    ring("values of the next unit", replace(KV4, page_size=128), BULK, ("(values + stages) % 2", "(values + stages + 1) % 2")),
    Bug(
        "slot asked for again while it is read", KV4, BULK,
        {
            "ring.py": once(("T.sync_warp()  # all lanes have read it\n", "pass\n")),
            "device": once(
                ("return ring + (warp * STAGES + stage) * SLOT_BYTES;", "return ring + (warp * STAGES + stage / 2) * SLOT_BYTES;")
            ),
        },
    ),
    # fences
    bug("ring's barriers not fenced", KV4, BULK, ("ARRIVALS);\n    fence_barriers();", "ARRIVALS);"), sign="without a fence"),
    bug("zeros of the window not fenced", KV4, BULK, ("if constexpr (BULK) fence_before_bulk_copies();", "{}"), sign="proxy fence"),
    bug("ticket without a fence before it", KV4, BULK, ("    __threadfence();\n    arrived", "    arrived"), sign="fence"),
    bug("ticket without a fence after it", KV4, BULK, ("others);\n    __threadfence();", "others);"), sign="fence"),
    # masks and softmax
    bug("a query sees the next token", KV4, BULK, ("bool seen = token <= own", "bool seen = token <= own + 1")),
    bug("window one token too long", WINDOWED, BULK, ("seen &= token > own - WINDOW", "seen &= token >= own - WINDOW")),
    bug("first tokens forgotten", WINDOWED, BULK, (" || token < SINK_TOKENS", "")),
    bug("units before the window read", WINDOWED, BULK, ("(unit < u.sink ? unit : unit + u.skipped)", "unit")),
    bug("soft cap forgotten", CAPPED, BULK, ("d.cap * tanhf(s[strip][nt][i])", "d.cap * s[strip][nt][i]")),
    bug("sums not rescaled", PEAKED, BULK, ("state.sum[nt][i] *= factor,", "")),
    bug("half of the channels not rescaled", PEAKED, BULK,
        ("state.o[f][nt][i] *= factor, state.o[f][nt][i + 2] *= factor;", "state.o[f][nt][i] *= factor;"),
    ),
    bug("maximum of half the lanes", KV4, BULK,
        ("for (int step = 4; step < 32; step *= 2) above", "for (int step = 4; step < 16; step *= 2) above"),
    ),
    bug("P too high for halves", replace(PEAKED, scale=2.0), BULK, ("|| !(sum[nt][i] <= LAZY)", "")),
    bug("scores not lowered by the rise", PEAKED, BULK, (": s[strip][nt][j] - by;", ": s[strip][nt][j];")),
    bug("P of earlier strips not rescaled", PEAKED, WIDE, ("strip < from ? s[strip][nt][j] * factor", "strip < from ? s[strip][nt][j]")),
    bug("weights not turned", KV4, BULK, ("transpose" + P_OPERAND, P_OPERAND)),
    bug("sink not under the maximum", decode("kv4_channel", sinks=True), BULK,
        ("sum = sum * factor + exp2_fast(sink - higher)", "sum = sum * factor + exp2_fast(sink)"),
    ),
    # the sums of warps and blocks
    bug("warps added under different maxima", KV4, BULK, ("theirs.y, exp2_fast(theirs.x - top));", "theirs.y, 1.0f);")),
    loop("results where an odd number of barriers ends", KV4, replace(BULK, num_stages=3, num_warps=3),
         ("sums_at = rules.results_at(w, s) // 4", "sums_at = rules.results_at(w, s) // 4 - 2"), sign="not aligned"),
    loop("sums read before they are there", KV4, BULK, ("T.sync_threads()\n                whole =", "whole =")),
    loop("the other partial result", KV4, BULK,
        ('2 * block + T.Cast("int32", begin <= here[BASE])', '2 * block + T.Cast("int32", begin > here[BASE])'),
    ),
    bug("ticket left behind", KV4, BULK,
        ("first, shares - 1, threadIdx.x) == shares - 1", "first, shares, threadIdx.x) == shares - 1"), sign="tickets",
    ),
    loop("a unit that no block has", KV4, BULK,
        ("T.min(block + 1, blocks), blocks), here)", 'T.min(block + 1, blocks), blocks) - T.Cast("int32", block == 1), here)'),
    ),
    loop("nothing to see, no answer", KV4, BULK, ('returns="int32") == 0:', 'returns="int32") < 0:'), sign="length 0"),
    # append
    bug("an old token taken for a new one", append("kv4_channel"), APPEND,
        ("(first < old ? 0x0000ffffu", "(first + 1 < old ? 0x0000ffffu"),
    ),
    bug("of two tokens of a word both old or both new", append("kv4_channel"), APPEND,
        ("first + (KEYS ? 0 : 1) < old", "first < old"),
    ),
    bug("a warp's extremes forgotten", append("kv4_channel"), APPEND,
        ("WARPS; ++w)\n#pragma unroll\n        for (int row = 0;", "WARPS - 1; ++w)\n        for (int row = 0;"),
    ),
    packing("extremes read before they are there", append("kv2_channel"), APPEND,
        ("keys_meet()  # all warps' extremes are there\n", "pass\n"),
    ),
    packing("parameters read before they are there", append("kv2_channel"), APPEND,
        ("keys_meet()  # all channels' parameters are there\n", "pass\n"),
    ),
    loop("keys' warps that meet values', too", append("kv4_channel"), APART,
        ('f"tilebit::sync_group<1, {THREADS}>"', 'f"tilebit::sync_group<1, {threads}>"'),
    ),
    loop("values staged where keys are", append("kv2_channel"), APART, ("staged[staged_elements * apart]", "staged[0]")),
    loop("queries that nobody turns", TURNING, APART,
        ("if has_values():\n                    turn_queries", "if full:\n                    turn_queries"),
    ),
    bug("values' warps beyond the group", append("kv4_token"), APART, ("int(threadIdx.x) / 32 % WARPS; }", "int(threadIdx.x) / 32; }")),
    loop("window written before it is read", append("kv4_channel"), APPEND, ("T.sync_threads()  # the window has been read", "pass")),
    bug("new values in the order of keys", append("kv4_token"), APPEND,
        ("ldmatrix_x4_transposed(from + f * 32, fresh)", "ldmatrix_x4(from + f * 32, fresh)"),
    ),
    bug("channel scales all in the first page", append("kv4_channel"), APPEND, ("? at / SLICE * PAGE : 0)", "? 0 : 0)")),
    bug("second group's scales in the first's place", append("kv8_channel", page_size=256), APPEND,
        ("record += n.group % PAGE / RESIDUAL * SLICE;", ";"),
    ),
    bug("codes rounded down", append("kv8_token"), APPEND, ("__fadd_rn(q, 8388608.0f)", "__fadd_rn(floorf(q), 8388608.0f)")),
    bug("rows one after another", TURNING, APPEND, ("row * pitch + its * HEAD_DIM", "row * all * HEAD_DIM + its * HEAD_DIM")),
    bug("queries at the position of a neighbour", TURNING, APPEND, ("(q_norm), position, [&]", "(q_norm), position ^ 1, [&]")),
    bug("queries of the next head", TURNING, APPEND,
        ("row * pitch + its * HEAD_DIM", "row * pitch + (its + 1) % all * HEAD_DIM"),
    ),
    bug("queries normalized by the keys' weights", NORMED, APPEND, ("static_cast<const T*>(q_norm), position", "n.k_norm, position")),
    bug("channels beyond the turned ones turned too", NORMED, APPEND, ("if (!turns(w)) continue;", ";")),
    bug("queries after the last group forgotten", TURNING, APPEND,
        ("> n.length ? n.length : n.group + RESIDUAL;", "> n.length ? min(n.length, n.group + RESIDUAL) : n.group + RESIDUAL;"),
    ),
    bug("keys' rows one after another", TURNING, APPEND,
        ("return k + (token - old_length) * k_pitch;", "return k + (token - old_length) * heads * HEAD_DIM;"),
    ),
    # full windows
    bug("a full window looked for in its page", decode("kv4_channel", full_windows=True), BULK,
        ("(S::FULL_WINDOWS ? max(length - 1, 0) : length)", "length"),
    ),
    bug("the last row of a full window at its begin", LATE, APPEND, ("(C::FULL_WINDOWS ? n.old_length : n.length)", "n.length")),
    loop("windows packed that are not full", append("kv4_channel", op="pack"), PACK, ("length % RESIDUAL == 0", "length >= RESIDUAL")),
    loop("the last sequence forgotten", append("kv4_channel", op="pack"), PACK, ("sequence < batch", "sequence < batch - 1")),
    bug("windows of the first layer", append("kv4_channel", op="pack"), PACK, ("int64_t(layer) * num_slots", "int64_t(0) * num_slots")),
    bug("pages of the first layer", append("kv4_channel", op="pack"), PACK, ("int64_t(layer) * num_pages", "int64_t(0) * num_pages")),
    loop("head scales of the first layer", append("kvfp8", op="pack"), PACK, ("head_scales[layer, 0, head]", "head_scales[0, 0, head]")),
    # gather
    bug("spread of the rows forgotten", append("kv4_token", op="gather"), GATHER,
        ("chunks[row * CHUNKS + (chunk ^ (row & 7))]", "chunks[row * CHUNKS + chunk]"),
    ),
    bug("values not turned", append("kv4_channel", op="gather"), GATHER, ("transpose(a[i]));", "a[i]);")),
    bug("rows past the last token", append("kv8_channel", op="gather"), GATHER, ("if (row < rows) *", "*")),
    bug("scales of the first rows", append("kv4_token", op="gather"), GATHER,
        ("(token % PAGE + lane / 4 + 8 * h) * C::PAIR_BYTES", "(token % PAGE + lane / 4) * C::PAIR_BYTES"),
    ),
)  # fmt: skip
