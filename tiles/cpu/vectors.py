"""The vocabulary of the CPU programs: TensorIR expressions over vectors, and the x86 instructions
TensorIR has no word for.

Importing this imports tvm: only a compiling process does. Buffers given to ``load`` and ``store``
are flat.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tvm.tirx
import tvm.tirx.script.builder.ir

# Untyped on purpose: tvm's annotations know neither Python numbers as expressions nor arithmetic on
# them.
tirx: Any = tvm.tirx
T: Any = tvm.tirx.script.builder.ir

# TVM hands LLVM bf16 as 16-bit integers, which the instruction's intrinsic refuses: so it is
# imported as a function of 32-bit lanes.
_BF16_DOT = "tilebit_dpbf16ps"
_BF16_DOT_LLVM = f"""
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
define linkonce_odr <16 x float> @{_BF16_DOT}(<16 x float> %sum, <16 x i32> %a, <16 x i32> %b) alwaysinline {{
  %x = bitcast <16 x i32> %a to <32 x bfloat>
  %y = bitcast <16 x i32> %b to <32 x bfloat>
  %r = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float> %sum, <32 x bfloat> %x, <32 x bfloat> %y)
  ret <16 x float> %r
}}
"""
_ANY_SIZE = 1 << 30  # extent of a flat view: a declaration that nothing checks


def flat(buffer: Any, dtype: str | None = None) -> Any:
    """A flat view of a buffer's memory as ``dtype`` (default: its own)."""
    return T.decl_buffer((_ANY_SIZE,), dtype or str(buffer.dtype), data=buffer.data)


def instructions(bf16_dot: bool) -> AbstractContextManager[Any]:
    """A scope in which ``dot_bf16`` may be used, where the target has it."""
    return T.attr(tirx.const(0), "pragma_import_llvm", _BF16_DOT_LLVM) if bf16_dot else nullcontext()


def local(count: int, dtype: str) -> Any:
    """Registers (or a few bytes of stack): a buffer of ``count`` elements, vectors allowed."""
    return T.alloc_buffer((count,), dtype, scope="local")


def sums(count: int, lanes: int, dtype: str = "float32") -> Any:
    """``count`` vectors in registers, all zero."""
    buffer = local(count, f"{dtype}x{lanes}")
    for i in range(count):
        T.buffer_store(buffer, splat(0, dtype, lanes), [i])
    return buffer


def held(value: Any) -> Any:
    """``value`` computed once: a register, like ``T.bind``, but one that TVM's simplifier does not
    look through. Chains of pure bindings that use each other twice (a sum over lanes, a polynomial)
    take it time exponential in their length."""
    register = local(1, str(value.dtype))
    T.buffer_store(register, value, [0])
    return T.bind(register[0])


def splat(value: Any, dtype: str, lanes: int) -> Any:
    """One scalar, a number or an expression of ``dtype``, in all lanes."""
    return tirx.Broadcast(tirx.const(value, dtype) if isinstance(value, (int, float)) else value, lanes)


def constant(values: Sequence[float], dtype: str) -> Any:
    """A vector of numbers."""
    return tirx.Shuffle([tirx.const(value, dtype) for value in values], list(range(len(values))))


def load(buffer: Any, offset: Any, lanes: int) -> Any:
    return buffer[tirx.Ramp(offset, 1, lanes)]


def store(buffer: Any, offset: Any, value: Any, lanes: int) -> None:
    T.buffer_store(buffer, value, [tirx.Ramp(offset, 1, lanes)])


def to_float(value: Any, lanes: int) -> Any:
    """fp16 (as float16), bf16 (as uint16 bits), bytes or fp32 -> fp32, exactly."""
    if str(value.dtype).startswith("float32"):
        return value
    if str(value.dtype).startswith(("float16", "int8", "uint8")):
        return value.astype(f"float32x{lanes}")
    return T.reinterpret(f"float32x{lanes}", value.astype(f"uint32x{lanes}") << splat(16, "uint32", lanes))


def from_e4m3(byte: Any, lanes: int) -> Any:
    """fp32 of the e4m3 numbers in the low bytes of an int32 vector. As fp16, whose exponent is
    biased by 8 more, their bits are a number 2^8 too small, subnormals too."""
    byte = T.bind(byte)
    size = T.bind((byte & splat(0x7F, "int32", lanes)) << splat(7, "int32", lanes))
    sign = (byte & splat(0x80, "int32", lanes)) << splat(8, "int32", lanes)
    half = T.reinterpret(f"float16x{lanes}", (size | sign).astype(f"uint16x{lanes}")).astype(f"float32x{lanes}")
    nan = size == splat(0x7F << 7, "int32", lanes)
    return tirx.Select(nan, splat(math.nan, "float32", lanes), half * splat(256.0, "float32", lanes))


def from_float(value: Any, dtype: str, lanes: int) -> Any:
    """fp32 -> fp16 (as float16) or bf16 (as uint16 bits), rounded to nearest even; NaN stays NaN."""
    if dtype == "float16":
        return value.astype(f"float16x{lanes}")
    value = T.bind(value)
    bits = T.bind(T.reinterpret(f"uint32x{lanes}", value))
    odd = (bits >> splat(16, "uint32", lanes)) & splat(1, "uint32", lanes)
    rounded = (bits + splat(0x7FFF, "uint32", lanes) + odd) >> splat(16, "uint32", lanes)
    # TVM takes value != value for false, so NaN is told by its bits.
    nan = (bits & splat(0x7FFFFFFF, "uint32", lanes)) > splat(0x7F800000, "uint32", lanes)
    return tirx.Select(nan, splat(0x7FC0, "uint32", lanes), rounded).astype(f"uint16x{lanes}")


def fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c on fp32 vectors, rounded once."""
    return tirx.call_llvm_pure_intrin(str(c.dtype), "llvm.fma", a, b, c)


def dot_bf16(a: Any, b: Any, c: Any) -> Any:
    """a[2l] * b[2l] + a[2l + 1] * b[2l + 1] + c[l] on 16 lanes; a and b are int32x16 of bf16 pairs
    (vdpbf16ps)."""
    return tirx.call_extern("float32x16", _BF16_DOT, c, a, b)


def multiply_bytes(a: Any, b: Any, lanes: int) -> Any:
    """Unsigned bytes ``a`` times signed bytes ``b``, both as ``lanes`` int32; neighbours added, as
    twice as many int16, which saturate (vpmaddubsw)."""
    name = {8: "llvm.x86.avx2.pmadd.ub.sw", 16: "llvm.x86.avx512.pmaddubs.w.512"}[lanes]
    a, b = (T.reinterpret(f"int8x{4 * lanes}", operand) for operand in (a, b))
    return tirx.call_llvm_pure_intrin(f"int16x{2 * lanes}", name, a, b)


def multiply_shorts(a: Any, b: Any, lanes: int) -> Any:
    """int16 times int16, neighbours added, as ``lanes`` int32 (vpmaddwd)."""
    name = {8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}[lanes]
    return tirx.call_llvm_pure_intrin(f"int32x{lanes}", name, a, b)


def dot_bytes(a: Any, b: Any, c: Any, lanes: int) -> Any:
    """c plus four unsigned bytes of ``a`` times signed ones of ``b``, in each of ``lanes`` int32
    (vpdpbusd)."""
    a, b = (T.reinterpret(f"int8x{4 * lanes}", operand) for operand in (a, b))
    return tirx.call_llvm_pure_intrin(f"int32x{lanes}", f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", c, a, b)


def permute16(table: Any, index: Any) -> Any:
    """int16x32: ``table[index & 31]`` (vpermw)."""
    return tirx.call_llvm_pure_intrin("int16x32", "llvm.x86.avx512.permvar.hi.512", table, index)


def permute_pair16(low: Any, index: Any, high: Any) -> Any:
    """int16x32: of the 64 words of ``low`` and ``high`` that of number ``index & 63`` (vpermi2w)."""
    return tirx.call_llvm_pure_intrin("int16x32", "llvm.x86.avx512.vpermi2var.hi.512", low, index, high)


def permute32(table: Any, index: Any) -> Any:
    """``table[index & 15]`` of 16 fp32 lanes, ``table[index & 7]`` of 8 (vpermps)."""
    name = {"float32x16": "llvm.x86.avx512.permvar.sf.512", "float32x8": "llvm.x86.avx2.permps"}[str(table.dtype)]
    return tirx.call_llvm_pure_intrin(str(table.dtype), name, table, index)


def lane_sum(value: Any, lanes: int, dtype: str = "float32") -> Any:
    """Sum of the lanes, as a balanced tree (a fixed order)."""
    stage = local(lanes, dtype)
    store(stage, 0, value, lanes)
    terms = [stage[lane] for lane in range(lanes)]
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [terms[i] + terms[i + half] for i in range(half)]
    return terms[0]


def shuffle_bytes(table: Any, index: Any) -> Any:
    """int8x32: of each half, ``table[index & 15]`` of its 16 bytes; 0 where the index is negative
    (vpshufb)."""
    return tirx.call_llvm_pure_intrin("int8x32", "llvm.x86.avx2.pshuf.b", table, index)


def blend_bytes(a: Any, b: Any, mask: Any) -> Any:
    """int8x32: ``b`` where ``mask`` is negative, else ``a`` (vpblendvb)."""
    return tirx.call_llvm_pure_intrin("int8x32", "llvm.x86.avx2.pblendvb", a, b, mask)
