"""Decode attention on codes that lie as anyone would store them, [token][channel]: what the induced
packing is measured against.

It is ``attention_decode`` (``tiles/attention/decode.py``) but for two things. A page's keys and
values are rows of codes, low bits first; a unit's rows take the bytes that its granules take, so
copies, rings and parameters stay as they are. And a lane finds the operands of mma.m16n8k16 itself
(``GATHER``): it reads the rows that it has elements of, 16 bytes at a time, most of which is other
lanes', and shifts every code of its own out. The 16-bit window stays packed. It is no program of
the library (its name is this module's path), but it goes through the library's compile pool, gate
and clock. Formats of 2, 4 and 8 bits; no sinks, soft cap or log-sum-exp.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilebit.autotune.problems.attention import AttentionProblem
from tilebit.autotune.problems.gemm import unpack_tiles
from tilebit.layouts.packing import PackedLayout
from tilebit.schedules.attention import decode as rules
from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.operations import Rule
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target
from tilebit.tiles.attention.cache import PASS_CONFIGS
from tilebit.tiles.attention.decode import HEADERS, build_with
from tilebit.tiles.compiler.headers import device_source
from tilebit.tiles.program import TileProgram

NAME = "results.measure.ablation.row_major"
BITS = (2, 4, 8)
# Comes before `tilebit::Decode`.
GATHER = """\
// Codes of 16 tokens [token][channel]. A lane's operands are halves in the low bits: no factors. `run` numbers eight consecutive channels.
template <int KIND, int HEAD_DIM, int ROWS>
struct RowMajor : Granule<KIND, HEAD_DIM> {
  using Granule<KIND, HEAD_DIM>::BITS;
  using Granule<KIND, HEAD_DIM>::MIDDLE;
  static constexpr int ROW_BYTES = HEAD_DIM * BITS / 8, PER_LOAD = 8 / BITS, LOADS = HEAD_DIM / 16 / PER_LOAD, LOAD = 4 * ROWS;
  static constexpr float ROW_FACTOR = 1.0f, COLUMN_FACTOR = 1.0f;
  static constexpr uint32_t MASK = (1u << BITS) - 1;
  __device__ __forceinline__ static constexpr uint32_t minus_middle(int) { return 0x80008000u | uint32_t(MIDDLE) * 0x00010001u; }

  // Sixteen bytes of a token's row, in which the code of channel `offset` of each run is moved to the low bits of where `run_of` looks.
  __device__ __forceinline__ static void load_row(uint32_t granule, int j, int token, int offset, uint32_t* words) {
    load_shared_128(granule + token * ROW_BYTES + j * 16, words);
    if constexpr (BITS == 8) {
      words[0] = (offset < 4 ? words[0] : words[1]) >> offset % 4 * 8;
      words[1] = (offset < 4 ? words[2] : words[3]) >> offset % 4 * 8;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] >>= offset * BITS;
    }
  }
  __device__ __forceinline__ static uint32_t run_of(const uint32_t* words, int run) {
    if constexpr (BITS == 2) return words[run / 2] >> run % 2 * 16;
    return words[run];
  }
};

// A of keys: rows are tokens, so that a pair is two neighbours of one row.
template <int KIND, int HEAD_DIM>
struct RowMajorKeys : RowMajor<KIND, HEAD_DIM, 2> {
  using Rows = RowMajor<KIND, HEAD_DIM, 2>;
  __device__ __forceinline__ static void gather(uint32_t granule, int j, int lane, uint32_t (&words)[Rows::LOAD]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) Rows::load_row(granule, j, (lane >> 2) + 8 * i, (lane & 3) * 2, words + 4 * i);
  }
  __device__ __forceinline__ static void fragment(const uint32_t (&words)[Rows::LOAD], int f, uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t codes = Rows::run_of(words + (i & 1) * 4, 2 * f + (i >> 1));
      a[i] = (codes & Rows::MASK) | (codes >> Rows::BITS & Rows::MASK) << 16;
    }
  }
};

// A of values: columns are tokens, so that a pair comes from two rows.
template <int KIND, int HEAD_DIM>
struct RowMajorValues : RowMajor<KIND, HEAD_DIM, 4> {
  using Rows = RowMajor<KIND, HEAD_DIM, 4>;
  __device__ __forceinline__ static void gather(uint32_t granule, int j, int lane, uint32_t (&words)[Rows::LOAD]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) Rows::load_row(granule, j, (lane & 3) * 2 + (i >> 1) * 8 + (i & 1), lane >> 2, words + 4 * i);
  }
  __device__ __forceinline__ static void fragment(const uint32_t (&words)[Rows::LOAD], int f, uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t *low = words + (i >> 1) * 8, *high = low + 4;
      const int run = 2 * f + (i & 1);
      a[i] = (Rows::run_of(low, run) & Rows::MASK) | (Rows::run_of(high, run) & Rows::MASK) << 16;
    }
  }
};

"""
DECODE = "template <typename S>\nstruct Decode : S {"
# What the functions of decode attention say, and what they say here.
EDITS = (
    (DECODE, GATHER + DECODE),
    ("using Keys = Granule<S::KEY, S::HEAD_DIM>;", "using Keys = RowMajorKeys<S::KEY, S::HEAD_DIM>;"),
    ("using Values = Granule<S::VALUE, S::HEAD_DIM>;", "using Values = RowMajorValues<S::VALUE, S::HEAD_DIM>;"),
    (
        "if constexpr (G::LOAD == 4)",
        "if constexpr (G::LOAD > 4)\n    G::gather(granule, j, lane, words);\n  else if constexpr (G::LOAD == 4)",
    ),
)


def source(functions: str) -> str:
    """The CUDA functions of this program, from ``functions``, those of
    ``tiles/attention/decode.py``. Raises ``LookupError`` where they no longer say what is replaced
    here."""
    for old, new in EDITS:
        if functions.count(old) != 1:
            raise LookupError(
                f"the device functions have {old!r} {functions.count(old)} times; accepted: once. Bring {__name__}.EDITS up to date"
            )
        functions = functions.replace(old, new)
    return functions


def legal(workload: AttentionWorkload, schedule: Schedule, target: Target) -> list[str]:
    """Why this program cannot serve ``workload`` with ``schedule``; empty: it can."""
    w = workload
    if w.op != "decode" or not {w.format.key_bits, w.format.value_bits} <= set(BITS) or w.format.has_head_scales:
        return [f"the workload is {w.op} on {w.format.name}; accepted: decode on integers of {', '.join(map(str, BITS))} bits."]
    if w.sinks or w.soft_cap or w.lse:
        return [f"sinks is {w.sinks}, soft_cap {w.soft_cap} and lse {w.lse}; accepted: False, 0 and False."]
    return rules.decode_legal(w, schedule, target)


def build(workload: AttentionWorkload, schedule: Schedule, target: Target) -> Any:
    """The PrimFunc of ``tiles/attention/decode.py`` with other functions; ``pages`` are row-major
    (``repacked``)."""
    return build_with(source(device_source(HEADERS)), workload, schedule, target)


def repacked(problem: AttentionProblem) -> AttentionProblem:
    """``problem`` with the codes of its pages as this program reads them (same device, same offsets
    and parameters)."""
    layout, pages = problem.workload.layout, problem.operands["pages"]
    ends = (layout.value_offset // 4, layout.key_parameter_offset // 4)
    keys, values, parameters = pages.tensor_split(ends, dim=2)
    k = _codes(keys, layout.key, layout.granules)
    v = _codes(values, layout.value, layout.granules).transpose(3, 4)
    rows = [_row_words(codes, bits) for codes, bits in ((k, layout.format.key_bits), (v, layout.format.value_bits))]
    return replace(problem, operands={**problem.operands, "pages": torch.cat((*rows, parameters), dim=2)})


def _codes(words: Tensor, packed: PackedLayout, granules: int) -> Tensor:
    """uint8 [pages, heads, granules, tile_n, tile_k] of int32 [pages, heads, words of all
    granules]."""
    return unpack_tiles(words.reshape(-1, 1, packed.words), packed).view(*words.shape[:2], granules, packed.tile_n, packed.tile_k)


def _row_words(codes: Tensor, bits: int) -> Tensor:
    """int32 [pages, heads, words] of uint8 codes [pages, heads, granules, 16, head_dim]."""
    per_byte = 8 // bits
    packed = torch.zeros_like(codes[..., ::per_byte])
    for i in range(per_byte):
        packed |= codes[..., i::per_byte] << i * bits
    return packed.contiguous().view(torch.int32).flatten(2)


RULE = Rule(NAME, NAME, arches=rules.ARCHES[rules.ASYNC], legal=legal, workspace_words=rules.workspace_words)
PROGRAM = TileProgram(
    name=NAME,
    compiler="tilelang",
    build=build,
    headers=HEADERS,
    pass_configs=PASS_CONFIGS,
    newest_arch="sm_89",
)
