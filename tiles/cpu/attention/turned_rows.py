"""Rows of queries and keys on their way to the cache or to the caller, on a CPU: normalized head by
head and turned by their rotary embedding, as an append asks, in fp32 rounded once. Importing this
imports tvm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....schedules.attention.workload import AttentionWorkload
from .. import vectors as v
from ..gemm.lane_sums import permute, sum_everywhere
from ..numbers import splat
from ..vectors import T, tirx
from .granules import LANES


@dataclass(frozen=True, slots=True, eq=False)
class TurnedRows:
    """Rows of ``arg[name]`` ("q" or "k"), flat views of an append's operands by name."""

    w: AttentionWorkload
    arg: dict[str, Any]
    name: str

    def factor(self, start: Any) -> Any:
        """1 / sqrt(mean(x^2) + eps) of the row that begins at element ``start``, in all lanes; None
        where rows are not normalized."""
        if not self.w.qk_norm:
            return None
        squares = v.sums(1, LANES)
        with T.serial(self.w.head_dim // LANES) as i:
            x = v.held(self._loaded(start + i * LANES))
            T.buffer_store(squares, v.fma(x, x, squares[0]), [0])
        mean = v.fma(sum_everywhere(squares[0]), splat(1.0 / self.w.head_dim), splat(self.w.norm_eps))
        return v.held(splat(1.0) / tirx.call_llvm_pure_intrin("float32x16", "llvm.sqrt", mean))

    def channels(self, start: Any, factor: Any, token: Any, i: Any) -> Any:
        """Channels 16 i .. of the row of ``token`` at ``start``, in the model's type (bf16 as its
        bits)."""
        w, at = self.w, T.bind(i * LANES)
        if not w.rotary and not w.qk_norm:
            return v.load(self.arg[self.name], start + at, LANES)
        x = v.held(self._normalized(start, factor, at))
        return v.from_float(self._turned(x, start, factor, token, at) if w.rotary else x, w.dtype, LANES)

    def _loaded(self, at: Any) -> Any:
        return v.to_float(v.load(self.arg[self.name], at, LANES), LANES)

    def _normalized(self, start: Any, factor: Any, at: Any) -> Any:
        x = self._loaded(start + at)
        if factor is None:
            return x
        weights = v.to_float(v.load(self.arg[f"{self.name}_norm"], at, LANES), LANES)
        return x * factor * (weights + splat(self.w.norm_offset))

    def _turned(self, x: Any, start: Any, factor: Any, token: Any, at: Any) -> Any:
        dim, half, table = self.w.turned_channels, self.w.turned_channels // 2, self.arg["cos_sin"]
        angles = T.bind(token.astype("int64") * dim)
        if self.w.rotary == "half":
            other = v.held(self._normalized(start, factor, T.bind((at + half) % dim)))
            cosine, sine = (v.load(table, angles + part * half + at % half, LANES) for part in range(2))
            sign = splat(T.if_then_else(at < half, tirx.const(-1.0, "float32"), tirx.const(1.0, "float32")))
        else:
            other = permute(x, [lane ^ 1 for lane in range(LANES)])
            both = [lane // 2 for lane in range(LANES)]
            cosine, sine = (tirx.Shuffle([v.load(table, angles + part * half + at % dim // 2, LANES // 2)] * 2, both) for part in range(2))
            sign = v.constant([-1.0, 1.0] * (LANES // 2), "float32")
        # As the GPU's: one product is rounded, the other joins it in a fused multiply-add.
        turned = v.held(v.fma(x, cosine, other * sine * sign))
        return turned if dim == self.w.head_dim else tirx.Select(tirx.Broadcast(at < dim, LANES), turned, x)
