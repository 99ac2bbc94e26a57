"""The vocabulary of the CPU programs: TensorIR expressions over vectors, and the x86 instructions TensorIR has no word for.

Importing this imports tvm: only a compiling process does. Vectors are named by their lanes; ``buffer`` arguments are flat.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from tvm import tirx
from tvm.tirx.script.builder import ir as T

# TVM hands LLVM bf16 as 16-bit integers, which the instruction's intrinsic refuses: it is imported as a function of 32-bit lanes and inlined.
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


def flat(buffer, dtype: str | None = None):
    """A flat view of a buffer's memory as ``dtype`` (default: its own)."""
    return T.decl_buffer((_ANY_SIZE,), dtype or str(buffer.dtype), data=buffer.data)


def instructions(isa_bf16_dot: bool):
    """A scope in which ``dot_bf16`` may be used, where there is one."""
    return T.attr(tirx.const(0), "pragma_import_llvm", _BF16_DOT_LLVM) if isa_bf16_dot else nullcontext()


def local(count: int, dtype: str):
    """Registers (or a few bytes of stack): a buffer of ``count`` elements, vectors allowed."""
    return T.alloc_buffer((count,), dtype, scope="local")


def const(value: float, dtype: str):
    return tirx.const(value, dtype)


def splat(value, lanes: int):
    return tirx.Broadcast(value, lanes)


def constant_vector(values: Sequence[float], dtype: str):
    return tirx.Shuffle([tirx.const(value, dtype) for value in values], list(range(len(values))))


def load(buffer, offset, lanes: int):
    return buffer[tirx.Ramp(offset, 1, lanes)]


def store(buffer, offset, value, lanes: int) -> None:
    T.buffer_store(buffer, value, [tirx.Ramp(offset, 1, lanes)])


def clear(buffer, lanes: int) -> None:
    """Zero a local buffer of fp32 vectors."""
    for i in range(int(buffer.shape[0])):
        T.buffer_store(buffer, splat(const(0.0, "float32"), lanes), [i])


def to_float(value, lanes: int):
    """fp16 (as float16) or bf16 (as uint16 bits) -> fp32, exactly."""
    if str(value.dtype).startswith("float16"):
        return value.astype(f"float32x{lanes}")
    return T.reinterpret(f"float32x{lanes}", value.astype(f"uint32x{lanes}") << splat(const(16, "uint32"), lanes))


def from_float(value, dtype: str, lanes: int):
    """fp32 -> fp16 (as float16) or bf16 (as uint16 bits), rounded to nearest even; NaN stays NaN."""
    if dtype == "float16":
        return value.astype(f"float16x{lanes}")
    value = T.bind(value)
    bits = T.bind(T.reinterpret(f"uint32x{lanes}", value))
    sixteen, one = splat(const(16, "uint32"), lanes), splat(const(1, "uint32"), lanes)
    rounded = (bits + splat(const(0x7FFF, "uint32"), lanes) + ((bits >> sixteen) & one)) >> sixteen
    quiet_nan = splat(const(0x7FC0, "uint32"), lanes)
    return tirx.Select(value != value, quiet_nan, rounded).astype(f"uint16x{lanes}")


def fma(a, b, c):
    """a * b + c on fp32 vectors, rounded once."""
    return tirx.call_llvm_pure_intrin(str(c.dtype), "llvm.fma", a, b, c)


def dot_bf16(sums, a, b):
    """sums[l] + a[2l] * b[2l] + a[2l + 1] * b[2l + 1] on 16 lanes; a and b are int32x16 of bf16 pairs (vdpbf16ps)."""
    return tirx.call_extern("float32x16", _BF16_DOT, sums, a, b)


def permute16(table, index):
    """int16x32: ``table[index & 31]`` (vpermw)."""
    return tirx.call_llvm_pure_intrin("int16x32", "llvm.x86.avx512.permvar.hi.512", table, index)


def permute32(table, index):
    """float32x16: ``table[index & 15]`` (vpermps)."""
    return tirx.call_llvm_pure_intrin("float32x16", "llvm.x86.avx512.permvar.sf.512", table, index)


def lane_sum(value, lanes: int):
    """Sum of the lanes, as a balanced tree (a fixed order)."""
    stage = local(lanes, "float32")
    store(stage, 0, value, lanes)
    terms = [stage[lane] for lane in range(lanes)]
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [terms[i] + terms[i + half] for i in range(half)]
    return terms[0]
