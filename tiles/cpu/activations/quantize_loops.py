"""The loop body of the CPU's quantization of activations: one row. See ``quantize.py``. Importing this
imports tvm.

Vectors have 16 lanes; the last k % 16 values of a row are copied to one that ends in zeros.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ....schedules.activations.workload import PER_TOKEN, QuantizeWorkload
from .. import vectors as v
from ..attention.granules import LANES
from ..gemm.lane_sums import max_everywhere, sum_everywhere
from ..numbers import activated, splat, to_e4m3
from ..vectors import T, tirx

INFINITY = 0x7F800000  # its bits in fp32: those of every finite magnitude are fewer, those of NaNs more
# 1.5 * 2^23: where a number is added to it, what is rounded away is what lies behind the point.
ROUNDER = 12582912.0
ROUNDER_BITS = 0x4B400000


def quantize_row(w: QuantizeWorkload, arg: dict[str, Any], row: Any, m: Any) -> None:
    """Codes and scales of one row; ``arg`` holds flat views of the operands by name."""
    values = _Values(w, arg, T.bind(row.astype("int64") * w.k))
    size = w.k if w.group == PER_TOKEN else w.group
    whole, rest = divmod(w.k, size)
    with T.serial(whole) as group:
        _quantize_group(values, T.bind(group * size), size, _place(w, group, row, m))
    if rest:
        _quantize_group(values, whole * size, rest, _place(w, whole, row, m))


def _place(w: QuantizeWorkload, group: Any, row: Any, m: Any) -> Any:
    """Of a scale."""
    return T.bind(row if w.group == PER_TOKEN else tirx.Cast("int64", m) * group + row)


class _Values:
    """The values of one row, which begins at ``start`` of the codes: of x itself, of the residual sum
    or of what a gate lets through, after a norm, with factors."""

    def __init__(self, w: QuantizeWorkload, arg: dict[str, Any], start: Any) -> None:
        self.w, self.arg, self.start = w, arg, start
        if w.residual:
            self._add()
        self.inverse_root = self._inverse_root() if w.norm else None

    def at(self, column: Any, count: int) -> Any:
        """fp32: the ``count`` values (16, or fewer at the end) from ``column`` on, then zeros."""
        y = self._x(column, count)
        if self.inverse_root is not None:
            weight = v.to_float(self._loaded("norm_weight", column, count), LANES)
            y = y * self.inverse_root * (weight + splat(self.w.offset) if self.w.offset else weight)
        if self.w.smooth:
            y = y * self._loaded("smooth", column, count)
        return v.held(y)

    def _x(self, column: Any, count: int) -> Any:
        if self.w.gate:
            return self._gated(column, count)
        return self._floats("residual" if self.w.residual else "x", self.start + column, count)

    def _floats(self, name: str, at: Any, count: int) -> Any:
        return v.held(v.to_float(self._loaded(name, at, count), LANES))

    def _rounded(self, y: Any) -> Any:
        """fp32 to x's dtype, as its buffers hold it."""
        return v.from_float(v.held(y), self.w.dtype, LANES)

    def _add(self) -> None:
        """The sum in the residual's place, in the dtype of both."""
        held = self.arg["residual"]
        for column, count in _vectors(0, self.w.k):
            at = T.bind(self.start + column)
            found = v.held(self._rounded(self._floats("x", at, count) + self._floats("residual", at, count)))
            if count == LANES:
                v.store(held, at, found, LANES)
            else:
                for i in range(count):
                    T.buffer_store(held, tirx.Shuffle([found], [i]), [at + i])

    def _gated(self, column: Any, count: int) -> Any:
        """activation(gate) * up, rounded to x's dtype."""
        at = T.bind(self.start * 2 + column)
        gate, up = self._floats("x", at, count), self._floats("x", at + self.w.k, count)
        return v.held(v.to_float(v.held(self._rounded(activated(gate, self.w.gate) * up)), LANES))

    def _loaded(self, name: str, at: Any, count: int) -> Any:
        source = self.arg[name]
        if count == LANES:
            return v.load(source, at, LANES)
        dtype = str(source.dtype)
        vector = v.local(LANES, dtype)
        v.store(vector, 0, splat(tirx.const(0, dtype), dtype), LANES)
        for i in range(count):
            T.buffer_store(vector, source[at + i], [i])
        return v.load(vector, 0, LANES)

    def _inverse_root(self) -> Any:
        """1 / sqrt(mean(x^2) + eps) in all lanes; NaN where the sum of squares is not finite."""
        sums = v.sums(1, LANES)
        for column, count in _vectors(0, self.w.k):
            x = self._x(column, count)
            T.buffer_store(sums, v.fma(x, x, sums[0]), [0])
        total = sum_everywhere(sums[0])
        mean = v.held(total / splat(float(self.w.k)) + splat(self.w.eps))
        root = tirx.call_llvm_pure_intrin("float32x16", "llvm.sqrt", mean)
        finite = T.reinterpret("int32x16", total) < splat(INFINITY, "int32")
        return v.held(tirx.Select(finite, splat(1.0) / root, splat(math.nan)))


def _vectors(begin: Any, count: int) -> Any:
    """Yields (column, values) of each vector of ``count`` values from ``begin`` on; the first ones
    are in a loop, whose body is what the caller does with one."""
    if count >= LANES:
        with T.serial(count // LANES) as i:
            yield T.bind(begin + i * LANES), LANES
    if count % LANES:
        yield begin + count // LANES * LANES, count % LANES


def _quantize_group(values: _Values, begin: Any, size: int, place: Any) -> None:
    """The ``size`` values from column ``begin`` on, which have one scale."""
    w, arg = values.w, values.arg
    most = v.local(1, "int32x16")
    T.buffer_store(most, splat(0, "int32"), [0])
    for column, count in _vectors(begin, size):
        # as integers, where NaN is more than infinity
        magnitude = T.reinterpret("int32x16", values.at(column, count)) & splat(0x7FFFFFFF, "int32")
        T.buffer_store(most, T.max(most[0], magnitude), [0])
    bits = max_everywhere(T.max(most[0], splat(int(np.float32(w.floor).view(np.int32)), "int32")))
    amax = v.held(T.reinterpret("float32x16", bits))
    finite = bits < splat(INFINITY, "int32")
    scale = v.held(tirx.Select(finite, amax / splat(w.largest), splat(math.nan)))
    T.buffer_store(arg["scales"], tirx.Shuffle([scale], [0]), [place])
    inverse = v.held(splat(w.largest) / amax)
    kept = v.held(tirx.Select(finite, splat(-1, "int32"), splat(0, "int32")))
    for column, count in _vectors(begin, size):
        code = v.held((_code(w, values.at(column, count), inverse) & kept).astype("int8x16"))
        at = T.bind(values.start + column)
        if count == LANES:
            v.store(arg["codes"], at, code, LANES)
        else:
            for i in range(count):
                T.buffer_store(arg["codes"], tirx.Shuffle([code], [i]), [at + i])


def _code(w: QuantizeWorkload, y: Any, inverse: Any) -> Any:
    """int32: codes in the low bytes."""
    if w.out == "e4m3":
        return to_e4m3(v.held(y * inverse))
    return T.reinterpret("int32x16", v.fma(y, inverse, splat(ROUNDER))) - splat(ROUNDER_BITS, "int32")
