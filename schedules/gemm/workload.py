"""What is asked: the problem a kernel is chosen, compiled and measured for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ...layouts.formats import GemmFormat, QuantFormat
from ..operands import Operand
from .codecs import packed_layout
from .parts import ACTIVATIONS, GATE_ROWS, HALVES, part_operands

DTYPES = ("float16", "bfloat16")
X_ROW_BYTES = 16  # CUDA kernels read rows of x of whole 16 bytes
X_COLUMNS = X_ROW_BYTES // 2  # of x of 16 bits

# Numbers of rows at which schedules for a shape's portfolio are proposed where it is not tuned.
PROPOSED_M = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 512, 704, 768, 1024, 1536, 2048, 3072, 4096)


@dataclass(frozen=True, slots=True)
class Workload:
    """One GEMM with a packed weight, ``y[m, n] = x[m, k] @ w[n, k]^T (* token_scales[m]) (+ bias[n])
    (+ residual[m, n])``.

    ``dtype`` is that of x, y, bias and scales ("float16" or "bfloat16"); accumulation and
    ``token_scales`` are fp32. Where the format's x is int8, x holds codes, ``token_scales`` (always
    there) are their scales, and sums are int32; of x whose groups have scales ``token_scales`` is
    [groups, m], and sums over groups are fp32.
    ``width`` (0: n): columns of a y to which this product stores by an index: row j of the weight makes
    column ``channels[j]`` of int32 [n], in no order but each once; the others are left as they are. Of
    each 16 rows any of the last 8 may be ADDED (``parts.py``): what it makes, after scales and bias, is
    added in fp32 to what the row 8 before it makes, and both together are one column. A row that is
    NOWHERE is not stored.
    ``nibbles``: of such a weight with int8 x the ADDED rows lie at its end, as ``weights.paired`` makes
    them: low nibbles of bytes whose high ones the row 8 before holds, with zero points 0 and 8 and, of the
    high ones, 16 times the scales; biases of the low ones are 0.
    ``residual``: y is the fp32 sum with it, rounded once; it may lie where y does.
    ``gate`` ("", "silu", "gelu_tanh", "gelu"): y [m, n / 2] is activation(gate) * up in fp32, rounded
    once; of each 16 rows of the weight the first 8 are gates, the others what these gate
    (``weights.gated.interleaved`` makes such a weight). ``gate_halves``: instead the first n / 2 rows are
    gates, the others what these gate, n a multiple of 64: one weight serves with a gate and without.
    ``norm``: x is normed, y = ((x * norm_weight) @ w^T) * rsqrt(mean(x^2) + ``eps``), before bias and
    what follows: x of 16 bits, x * norm_weight rounded to ``dtype``, the rest in fp32.
    ``dependent``: launched while the kernel before it still runs, as in a model's step. Its kernels
    are those of the product by itself; which of them is the fastest may differ.
    ``m`` is the number of rows the schedule is chosen for; compiled kernels accept any m. Raises
    ``ValueError`` when a field is out of range.
    """

    DYNAMIC: ClassVar[tuple[str, ...]] = ("m", "dependent")  # fields that compiled kernels do not depend on
    SIZES: ClassVar[tuple[str, ...]] = ("m", "n", "k")  # whole numbers
    COMMAND: ClassVar[str] = ""  # the command line's group of commands

    m: int
    n: int
    k: int
    format: GemmFormat = QuantFormat()
    dtype: str = "float16"
    bias: bool = False
    token_scales: bool = False
    width: int = 0
    nibbles: bool = False
    residual: bool = False
    gate: str = ""
    gate_halves: bool = False
    norm: bool = False
    eps: float = 0.0
    dependent: bool = False

    def __post_init__(self) -> None:
        if self.m < 0 or self.n < 1 or self.k < 1:
            raise ValueError(f"(m, n, k) is ({self.m}, {self.n}, {self.k}); accepted: m >= 0, n >= 1, k >= 1")
        most = 2 * (self.width + 2 * GATE_ROWS)  # two rows for each column, both parts padded to 16 rows
        if self.width < 0 or (self.width and self.n > most):
            raise ValueError(f"width is {self.width} with n = {self.n}; accepted: 0, or columns with at most two rows each, and 32 rows")
        if self.nibbles and not (self.width and self.format.bits == 4 and self.format.integer_sums and self.n % (2 * GATE_ROWS) == 0):
            raise ValueError(
                f"nibbles goes with n = {self.n}, width {self.width} and {self.format.name}; accepted: multiples of {2 * GATE_ROWS} rows "
                "with a width, in a format of 4 bits with int8 x"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; accepted: {DTYPES}")
        if self.gate not in ("", *ACTIVATIONS):
            raise ValueError(f"gate is {self.gate!r}; accepted: '', {', '.join(map(repr, ACTIVATIONS))}")
        if self.gate and self.n % (2 * GATE_ROWS):
            raise ValueError(f"n is {self.n} with a gate; accepted: multiples of {2 * GATE_ROWS}, gates and what they gate in turn")
        if self.gate_halves and (not self.gate or self.n % HALVES):
            raise ValueError(f"gate_halves goes with gate {self.gate!r} and n = {self.n}; accepted: a gate, and multiples of {HALVES}")
        if (self.width > 0) + self.residual + bool(self.gate) > 1:
            raise ValueError(
                f"(width, residual, gate) is ({self.width}, {self.residual}, {self.gate!r}); accepted: one of them, the others 0, False, ''"
            )
        if self.norm and (self.format.x or self.token_scales):
            raise ValueError(f"a norm goes with {self.format.name}; accepted: formats with x of 16 bits, without token_scales")
        if not 0 <= self.eps < float("inf") or (self.eps and not self.norm):
            raise ValueError(f"eps is {self.eps!r}; accepted: a finite number from 0, without a norm 0")
        if self.format.x:
            object.__setattr__(self, "token_scales", True)

    @property
    def op(self) -> str:
        return "gemm"

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def weight_bytes(self) -> int:
        """Bytes of codes, scales and zero points (unpadded)."""
        f = self.format
        codes = self.n * self.k * f.bits // 8
        return codes + self.n * (f.groups(self.k) * f.group_bytes + (4 if f.row_scaled else 0))

    @property
    def columns(self) -> int:
        """Of y."""
        return self.width or (self.n // 2 if self.gate else self.n)

    @property
    def x_dtype(self) -> str:
        return self.format.x or self.dtype

    @property
    def x_bytes(self) -> int:
        """Of one number of x."""
        return 1 if self.format.x else 2

    @property
    def bytes(self) -> int:
        """Bytes that one call must move at least: weights once, x once, y once."""
        after = (2 * self.n if self.bias else 0) + (4 * self.m * self._row_scales if self.token_scales else 0)
        after += (2 * self.k if self.norm else 0) + (4 * self.n if self.width else 0) + (2 * self.m * self.n if self.residual else 0)
        return self.weight_bytes + self.m * (self.x_bytes * self.k + 2 * min(self.n, self.columns)) + after

    @property
    def _row_scales(self) -> int:
        """Of each row of x."""
        return self.format.groups(self.k) if self.format.x_grouped else 1

    @property
    def kind(self) -> str:
        """The class of numbers that records and rankers must share to say something about each
        other: "w4", "w8"."""
        return self.format.kind

    def operands(self, arch: str) -> tuple[Operand, ...]:
        """The tensors of a call on ``arch``, in call order. x has zero columns up to whole 16 bytes
        on CUDA; weight, scales, zeros and row scales are padded to whole tiles of the packed
        layout (``codecs.packed_layout``). Of a format with codebooks the weight is planes, the
        highest bits first, and scales are the codebooks [n_pad, 2^bits]."""
        f, layout = self.format, packed_layout(arch, self.format)
        whole = 1 if arch == "cpu" else X_ROW_BYTES // self.x_bytes
        columns = -(-self.k // whole) * whole
        groups, stored = (f.groups(self.k), layout.padded(self.n, self.k)[0]), layout.storage_shape(self.n, self.k)
        if f.codebook:
            scales, stored = (groups[1], 1 << f.bits), (f.bits, *stored)
        else:
            scales = groups
        packing = f"pack the weight for this device and dtype with tilebit.pack ({arch})"
        return (
            Operand("x", self.x_dtype, ("m", columns)),
            Operand("weight", "int32", stored, advice=packing),
            Operand("scales", f.parameter_dtype(self.dtype), scales, advice=packing),
            Operand("zeros", f.zero_dtype(self.dtype), groups, optional=True, absent=f.symmetric, advice=packing),
            *part_operands(self, groups[1], packing),
            *((Operand("norm_weight", self.dtype, (columns,), advice="pass the norm's weight, as wide as x"),) if self.norm else ()),
            Operand("y", self.dtype, ("m", self.columns), written=True, read=False),
        )

    def options(self) -> str:
        """The command line's words for this workload."""
        bias = (" --bias" if self.bias else "") + (f" --width {self.width}" if self.width else "")
        bias += " --nibbles" * self.nibbles + " --residual" * self.residual + (f" --gate {self.gate}" if self.gate else "")
        bias += " --gate-halves" * self.gate_halves
        bias += (f" --norm-eps {self.eps!r}" if self.norm else "") + " --dependent" * self.dependent
        return f"--n {self.n} --k {self.k} --m {self.m} --format {self.format.name} --dtype {self.dtype}{bias}"

    def with_m(self, m: int) -> Workload:
        return self if m == self.m else replace(self, m=m)

    def bucketed(self) -> Workload:
        """The workload that is tuned for this one: itself, with at least one row."""
        return self.with_m(max(self.m, 1))

    def static(self) -> Workload:
        """Equal for all workloads that one compiled kernel serves."""
        return replace(self, m=0, dependent=False)

    @property
    def title(self) -> str:
        """What a person calls it: ``m=4 n=4096 k=4096 w4a16_g128``."""
        return f"m={self.m} n={self.n} k={self.k} {self.format.name}" + " dependent" * self.dependent

    @property
    def served(self) -> str:
        """``title`` without what a compiled kernel does not depend on, and with the dtype."""
        tokens = self.token_scales and not self.format.x  # with codes for x they go without saying
        after = f" in {self.width} columns" + " of nibbles" * self.nibbles if self.width else ""
        after += " with a residual" * self.residual + (f" with a gate ({self.gate})" if self.gate else "")
        after += " in halves" * self.gate_halves
        shape = f"{self.n}x{self.k} {self.format.name} {self.dtype}" + f" after a norm ({self.eps:g})" * self.norm
        return f"{shape}{' with bias' * self.bias}{' with token scales' * tokens}{after}"

    def to_json(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "m": self.m,
            "n": self.n,
            "k": self.k,
            "format": self.format.to_json(),
            "dtype": self.dtype,
            "bias": self.bias,
            # absent, as in what was stored before there were any
            **({"token_scales": True} if self.token_scales and not self.format.x else {}),
            **({"width": self.width} if self.width else {}),
            **({"nibbles": True} if self.nibbles else {}),
            **({"residual": True} if self.residual else {}),
            **({"gate": self.gate} if self.gate else {}),
            **({"gate_halves": True} if self.gate_halves else {}),
            **({"norm": True, "eps": self.eps} if self.norm else {}),
            **({"dependent": True} if self.dependent else {}),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Workload:
        if data.get("op", "gemm") != "gemm":
            raise ValueError(f"op is {data['op']!r}; accepted: 'gemm'")
        return cls(
            m=data["m"], n=data["n"], k=data["k"], format=GemmFormat.from_json(data["format"]), dtype=data["dtype"], bias=data["bias"],
            token_scales=data.get("token_scales", False), width=data.get("width", 0), nibbles=data.get("nibbles", False),
            residual=data.get("residual", False), gate=data.get("gate", ""), gate_halves=data.get("gate_halves", False),
            norm=data.get("norm", False), eps=data.get("eps", 0.0), dependent=data.get("dependent", False),
        )  # fmt: skip
