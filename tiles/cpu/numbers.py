"""Numbers of the CPU programs: codes to fp32 and back, the functions of softmax, activations.
Importing this imports tvm.

All work on vectors of 16 lanes, which LLVM splits in two where registers are half as wide.
"""

from __future__ import annotations

import math
from typing import Any

from . import vectors as v
from .attention.granules import LANES
from .vectors import T, tirx

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
TWICE_TANH = 2 * (2 / math.pi) ** 0.5  # of GELU's tanh form, as gate * sigmoid(2 ...): 1 + tanh(...) would cancel
ERFC = (-1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806, 0.27886807, -1.13520398, 1.48851587, -0.82215223, 0.17087277)


def number(word: Any, slot: int, bits: int, kind: str, dtype: str, table: bool) -> Any:
    """fp32: number ``slot`` of each int32 ``word``, codes of ``bits`` bits of a ``KVFormat``'s
    ``kind`` ("float": ``dtype``), unscaled.

    ``table``: permutes look up to four bits up (they ignore the other bits of their index, so
    nothing is masked).
    """
    if kind == "float":
        return _half(word, slot, dtype)
    if kind == "fp8":
        return v.from_e4m3(shifted(word, slot * bits), LANES)
    if bits <= 4 and table:
        codes = v.constant([float(code % (1 << bits)) for code in range(LANES)], "float32")
        return v.permute32(codes, shifted(word, slot * bits))
    return (shifted(word, slot * bits) & splat((1 << bits) - 1, "int32")).astype("float32x16")


def _half(word: Any, slot: int, dtype: str) -> Any:
    if dtype == "float16":
        return T.reinterpret("float16x16", shifted(word, 16 * slot).astype("uint16x16")).astype("float32x16")
    placed = word & splat(-65536, "int32") if slot else word << splat(16, "int32")
    return T.reinterpret("float32x16", placed)


def to_e4m3(x: Any) -> Any:
    """int32: e4m3 codes of fp32, to nearest, ties to even, saturating at 448; not-a-number is 0x7f."""
    bits = v.held(T.reinterpret("int32x16", x))
    magnitude = v.held(bits & splat(0x7FFFFFFF, "int32"))
    capped = v.held(T.min(magnitude, splat(0x43E00000, "int32")))  # of fp32: 448
    # The exponent's bias falls from 127 to 7, the mantissa from 23 bits to 3: half is added, less
    # one where that makes it even.
    rounded = capped + splat(0x7FFFF - (120 << 23), "int32") + ((capped >> splat(20, "int32")) & splat(1, "int32"))
    # Below 2^-6 (0x3c800000) steps are 2^-9, those of fp32 numbers from 2^14 (0x46800000) on: the
    # addition rounds.
    subnormal = T.reinterpret("int32x16", T.reinterpret("float32x16", capped) + splat(2.0**14)) - splat(0x46800000, "int32")
    code = tirx.Select(capped < splat(0x3C800000, "int32"), subnormal, rounded >> splat(20, "int32"))
    code = v.held(code | ((bits >> splat(24, "int32")) & splat(0x80, "int32")))
    return tirx.Select(magnitude > splat(0x7F800000, "int32"), splat(0x7F, "int32"), code)


def exp2(x: Any) -> Any:
    """2^x of fp32 x <= 0 to 2 units in the last place; 0 below 2^-126.5. Not-a-number stays one."""
    bounded = v.held(_llvm("llvm.maximum", x, splat(-127.0)))
    whole = v.held(_llvm("llvm.rint", bounded))
    rest = v.held(bounded - whole)  # exact
    series = splat(LN_2**7 / math.factorial(7))
    for order in range(6, -1, -1):
        series = v.fma(series, rest, splat(LN_2**order / math.factorial(order)))
    scale = T.reinterpret("float32x16", (whole.astype("int32x16") + splat(127, "int32")) << splat(23, "int32"))
    return v.held(series * scale)


def tanh(x: Any) -> Any:
    """tanh of fp32 to 2e-7 absolute: (1 - e^-2|x|) / (1 + e^-2|x|) with the sign of x."""
    x = v.held(x)
    fall = exp2(_llvm("llvm.fabs", x) * splat(-2 * LOG2_E))
    return _llvm("llvm.copysign", (splat(1.0) - fall) / (splat(1.0) + fall), x)


def activated(gate: Any, activation: str) -> Any:
    """``activation`` ("silu", "gelu_tanh" or "gelu") of fp32 ``gate``: sigmoids by the exponential of what
    is not positive."""
    gate = v.held(gate)
    if activation == "gelu":
        return gate * _normal(gate)
    inner = gate
    if activation == "gelu_tanh":
        inner = v.held((gate + splat(0.044715) * gate * gate * gate) * splat(TWICE_TANH))
    fall = exp2(_llvm("llvm.fabs", inner) * splat(-LOG2_E))
    return gate * (tirx.Select(inner < splat(0.0), fall, splat(1.0)) / (splat(1.0) + fall))


def _normal(x: Any) -> Any:
    """The normal distribution function of fp32, erfc(-x / sqrt(2)) / 2, to 2e-7 relative and what
    rounding x^2 costs (Press et al., Numerical Recipes, 6.2: Chebyshev's fit of erfc)."""
    z = v.held(_llvm("llvm.fabs", x) * splat(math.sqrt(0.5)))
    t = v.held(splat(1.0) / v.fma(z, splat(0.5), splat(1.0)))
    series = splat(ERFC[-1])
    for coefficient in ERFC[-2::-1]:
        series = v.fma(series, t, splat(coefficient))
    tail = v.held(splat(0.5) * t * exp2(v.held((v.held(series) - z * z) * splat(LOG2_E))))
    return tirx.Select(x < splat(0.0), tail, splat(1.0) - tail)


def splat(value: Any, dtype: str = "float32") -> Any:
    """One scalar in all 16 lanes."""
    return v.splat(value, dtype, LANES)


def shifted(word: Any, bits: int) -> Any:
    """int32 ``word`` >> ``bits``; what comes in at the top is no code."""
    return word >> splat(bits, "int32") if bits else word


def _llvm(name: str, *values: Any) -> Any:
    """An LLVM intrinsic of fp32 vectors."""
    return tirx.call_llvm_pure_intrin("float32x16", name, *values)
