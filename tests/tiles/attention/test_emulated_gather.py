"""The gather program without a GPU: the generated kernel on every thread of every block, every row equal to the cache's value rounded
once; and what all programs read a cache with, code by code."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, product

import numpy as np
import pytest
from emulation.device_code import DeviceCode, needs_host_compiler
from emulation.generated_attention import GeneratedAttention
from kv_cases import FORMATS, poisoned_problem
from lanes import one_of_each

from tilebit.autotune.problems.attention_verify import AttentionGate
from tilebit.layouts.kv import KVLayout
from tilebit.layouts.kv_formats import KVFormat
from tilebit.layouts.kv_quantize import decode_e4m3
from tilebit.schedules.attention.workload import DTYPES, AttentionWorkload
from tilebit.schedules.operations import legal
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name
from tilebit.tiles.attention.cache import KINDS
from tilebit.tiles.compiler.headers import device_source

pytestmark = needs_host_compiler
TARGET = target_from_name("sm_90a")
LENGTHS = ((0, 1, 127, 128, 129, 0), (300, 16, 384, 0, 17, 513))


def cases() -> tuple[tuple[AttentionWorkload, Schedule], ...]:
    """Every format in both dtypes; head dims, page sizes and numbers of warps take turns, which do not keep step."""
    head_dims, page_sizes, warps = cycle((64, 128, 128)), cycle((16, 256, 64, 128, 32)), cycle((4, 8))
    found = [
        AttentionWorkload("gather", 4, 1, 300, 2, 2, next(head_dims), format, dtype, next(page_sizes))
        for dtype, format in product(DTYPES, FORMATS)
    ]
    found += [replace(found[i], head_dim=256) for i in (3, 12)]
    return tuple((w, Schedule("attention_gather", 128, 1, w.head_dim, num_warps=next(warps))) for w in found)


CASES = cases()


def label(case: tuple[AttentionWorkload, Schedule]) -> str:
    w, s = case
    return f"{w.format.name}-{w.dtype}-d{w.head_dim}-page{w.page_size}-{s.num_warps}w"


def test_the_cases_cover_everything():
    assert {(w.format, w.dtype) for w, _ in CASES} == set(product(FORMATS, DTYPES))
    assert {(w.head_dim, w.page_size) for w, _ in CASES} >= set(product((64, 128), (16, 32, 64, 128, 256)))
    assert {(w.head_dim, s.num_warps) for w, s in CASES} >= set(product((64, 128), (4, 8)))
    assert all(legal(w, s, TARGET) == [] for w, s in CASES)


@pytest.mark.parametrize("case", one_of_each(CASES, lambda case: (case[0].format.key_scales, case[0].head_dim)), ids=label)
def test_gather(case: tuple[AttentionWorkload, Schedule]):
    kernel = GeneratedAttention(*case, TARGET, seed=1)
    problems = (poisoned_problem(case[0], lengths, [0] * len(lengths), seed) for seed, lengths in enumerate(LENGTHS))
    verdict = AttentionGate(*problems).verify(lambda problem, outputs: kernel(problem.named(outputs)))
    assert verdict.ok, verdict.reasons


# One granule as the tensor cores get it: [lane][fragment][register]{low, high}, brought back to codes.
FRAGMENTS = """
template <int KIND, int HEAD_DIM>
void fragments(const uint32_t* words, float* out) {
  using G = tilebit::Granule<KIND, HEAD_DIM>;
  const int lane = threadIdx.x;
  for (int j = 0; j < G::LOADS; ++j) {
    uint32_t w[G::LOAD];
    for (int i = 0; i < G::LOAD; ++i) w[i] = words[(j * 32 + lane) * G::LOAD + i];
    for (int k = 0; k < G::PER_LOAD; ++k) {
      uint32_t a[4];
      G::fragment(w, k, a);
      for (int i = 0; i < 4; ++i) {
        const float unit = G::UNIT / (i & 1 ? G::ROW_FACTOR : 1.0f) / (i >> 1 ? G::COLUMN_FACTOR : 1.0f);
        float* to = out + ((lane * G::FRAGMENTS + j * G::PER_LOAD + k) * 4 + i) * 2;
        to[0] = tilebit::low_of(a[i], half()) * unit, to[1] = tilebit::high_of(a[i], half()) * unit;
      }
    }
  }
}
"""
NAMED = {(kind, d): f"fragments<tilebit::{KINDS[kind]}, {d}>" for kind in KINDS for d in (64, 128, 256)}


@pytest.fixture(scope="module")
def fragments() -> DeviceCode:
    return DeviceCode(device_source(("ptx/instructions.cuh", "kv/pairs.cuh", "kv/granule.cuh")) + FRAGMENTS, 900, NAMED.values())


@pytest.mark.parametrize(("kind", "head_dim"), NAMED)
def test_every_code_reaches_the_tensor_cores(fragments: DeviceCode, kind: str, head_dim: int):
    """Rows are tokens, columns channels: as a key granule is multiplied. All codes of up to 8 bits are there (1024 elements or more)."""
    granule = KVLayout(KVFormat(kind, kind), head_dim).key
    codes = np.arange(16 * head_dim, dtype=np.int64).reshape(16, head_dim) * 7
    codes = codes % 0x7C00 if kind == "float" else codes % (1 << granule.bits)  # finite halves
    out = np.full((32, head_dim // 16, 4, 2), np.nan, np.float32)
    words = granule.pack(codes.astype(np.uint16 if kind == "float" else np.uint8))
    fragments.call(NAMED[kind, head_dim], [(np.ascontiguousarray(words).ctypes.data, 0), (out.ctypes.data, 0)], 32)
    lane, fragment, register, half = np.indices(out.shape)
    row, column = lane // 4 + 8 * (register & 1), fragment * 16 + lane % 4 * 2 + 8 * (register >> 1) + half
    if kind == "float":
        right = codes.astype(np.uint16).view(np.float16).astype(np.float32)
    else:
        right = decode_e4m3(codes.astype(np.uint8)) if kind == "fp8" else codes.astype(np.float32)
    meant = right[row, column]
    np.testing.assert_array_equal(out[~np.isnan(meant)], meant[~np.isnan(meant)])
    if kind not in ("float", "fp8"):
        assert len(np.unique(codes)) == 1 << granule.bits
