"""What is asked of the quantization of activations: the problem a kernel is chosen, compiled and
measured for."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

from ..gemm.parts import ACTIVATIONS
from ..gemm.workload import DTYPES, X_COLUMNS
from ..operands import Operand

OUTS = ("int8", "e4m3")
LARGEST = {"int8": 127.0, "e4m3": 448.0}  # of a code: what the largest value of a row or group becomes
PER_TOKEN = -1
GROUPS = (PER_TOKEN, 128)
CODE_COLUMNS = 16  # CUDA kernels write rows of codes of whole 16 bytes, which products read so
EPS = 1e-6
LEAST_SCALE = 2.0**-126  # it and one over it are normal fp32 numbers
MOST_ROWS = 1 << 17  # the largest bucket
# Fields that are absent from what was stored before there were any, and where they say nothing.
_LATER: dict[str, Any] = {"residual": False, "offset": 0.0, "gate": ""}


@dataclass(frozen=True, slots=True)
class QuantizeWorkload:
    """Rows of activations to 8-bit codes: ``codes[m, k]`` and ``scales`` of ``x[m, k]``, with

        scale = amax / largest,    code = round(y * (largest / amax))

    ``amax`` the largest |y| of a token (``group`` -1: the whole row) or of each 128 values of it
    (``group`` 128; the last group may be shorter), at least ``floor``, in fp32. ``out`` "int8":
    largest is 127, the exact product is rounded once, to the nearest integer, ties to even. "e4m3":
    largest is 448, the product is rounded to fp32 and then to the nearest e4m3 number, ties to even. y is x of ``dtype``
    ("float16" or "bfloat16"), and with ``norm`` x * rsqrt(mean(x^2) + ``eps``) * (norm_weight +
    ``offset``), with ``smooth`` the result times a factor for each column, all in fp32: nothing is
    rounded to 16 bits on the way. A row or group of zeros gets codes 0; one whose y is not finite
    everywhere gets scale NaN and codes 0, so that a product with it is NaN.

    With ``residual`` x is first added to it: the sum, rounded to ``dtype``, is the new residual, and
    takes the place of x. With ``gate``, "silu", "gelu_tanh" (GELU's approximation by tanh) or "gelu", x is [m,
    2 k] and gate(x[:, :k]) * x[:, k:], rounded to ``dtype``, takes the place of x. What is quantized
    is so what a norm or a product would be given in 16 bits.

    ``m`` is the number of rows the schedule is chosen for; compiled kernels accept any m. ``eps`` and
    ``offset`` are set to their defaults where there is no norm. Raises ``ValueError`` when a field is
    out of range, or where there is both a residual and a gate.

    Int8 of tokens after smoothing is what LiquidGEMM's products take (section 6), int8 of groups of
    128 MixLLM's (3.1.2, 3.3; with scales in 16 bits there). Factors by column are SmoothQuant's (Xiao
    et al., 2023), which divide, as their reciprocals.
    """

    DYNAMIC: ClassVar[tuple[str, ...]] = ("m",)  # fields that compiled kernels do not depend on
    SIZES: ClassVar[tuple[str, ...]] = ("m", "k")  # whole numbers
    COMMAND: ClassVar[str] = "workload"  # the command line's group of commands

    m: int
    k: int
    dtype: str = "float16"
    out: str = "int8"
    group: int = PER_TOKEN
    norm: bool = False
    eps: float = EPS
    smooth: bool = False
    residual: bool = False
    offset: float = 0.0
    gate: str = ""

    def __post_init__(self) -> None:
        if self.m < 0 or self.k < 1:
            raise ValueError(f"(m, k) is ({self.m}, {self.k}); accepted: m >= 0, k >= 1")
        for name, accepted in (("dtype", DTYPES), ("out", OUTS), ("group", GROUPS), ("gate", ("", *ACTIVATIONS))):
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} is {getattr(self, name)!r}; accepted: {', '.join(map(repr, accepted))}")
        if not 0 <= self.eps < float("inf"):
            raise ValueError(f"eps is {self.eps!r}; accepted: finite numbers from 0")
        if not abs(self.offset) < float("inf"):
            raise ValueError(f"offset is {self.offset!r}; accepted: finite numbers")
        if self.residual and self.gate:
            raise ValueError(f"gate is {self.gate!r} and there is a residual; accepted: one of both, as two calls")
        object.__setattr__(self, "eps", float(self.eps) if self.norm else EPS)
        object.__setattr__(self, "offset", float(self.offset) if self.norm else 0.0)

    @property
    def op(self) -> str:
        return "quantize"

    @property
    def kind(self) -> str:
        """The class of numbers that records must share to say something about each other."""
        return "quantize"

    @property
    def largest(self) -> float:
        """The largest code, as a number."""
        return LARGEST[self.out]

    @property
    def floor(self) -> float:
        """The least "largest value": smaller ones, and zeros, have the scale 2^-126."""
        return self.largest * LEAST_SCALE

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return 1 if self.group == PER_TOKEN else -(-self.k // self.group)

    def columns(self, arch: str) -> int:
        """Of x as kernels read it: on CUDA rows of whole 16 bytes, zeros behind k."""
        return self.k if arch == "cpu" else -(-self.k // X_COLUMNS) * X_COLUMNS

    def code_columns(self, arch: str) -> int:
        """Of the codes: on CUDA a multiple of 16, zeros behind k."""
        return self.k if arch == "cpu" else -(-self.k // CODE_COLUMNS) * CODE_COLUMNS

    def operands(self, arch: str) -> tuple[Operand, ...]:
        """The tensors of a call on ``arch``, in call order; the residual is read, then written, and x
        with a gate is gates and then what they gate, either padded for itself. Codes are bytes, of e4m3 as well. Scales
        of groups lie group by group, ``[groups, m]``: what a product reads for a tile of rows and
        one step of k is contiguous; of tokens they are the ``token_scales`` of a product."""
        columns = self.columns(arch)
        padded = f"on CUDA with zeros up to a multiple of {X_COLUMNS}"
        return (
            Operand("x", self.dtype, ("m", (1 + bool(self.gate)) * columns)),
            Operand("residual", self.dtype, ("m", columns), written=True, optional=True, absent=not self.residual),
            Operand("norm_weight", self.dtype, (columns,), optional=True, absent=not self.norm, advice=f"pass the norm's weight, {padded}"),
            Operand("smooth", "float32", (columns,), optional=True, absent=not self.smooth, advice=f"pass a factor a column, {padded}"),
            Operand("codes", "int8", ("m", self.code_columns(arch)), written=True, read=False),
            Operand("scales", "float32", ("m",) if self.group == PER_TOKEN else (self.groups, "m"), written=True, read=False),
        )

    @property
    def flops(self) -> int:
        """About what is computed with each value; no products."""
        return self.m * self.k * (4 + 3 * self.norm + self.smooth + self.residual + 6 * bool(self.gate))

    @property
    def bytes(self) -> int:
        """Bytes that one call must move at least: x once, the residual twice, codes and scales once,
        what columns share once."""
        row = self.k * (3 + 4 * self.residual + 2 * bool(self.gate)) + 4 * self.groups
        return self.m * row + self.k * (2 * self.norm + 4 * self.smooth)

    def options(self) -> str:
        """The command line's words for this workload."""
        return shlex.quote(json.dumps(self.to_json()))

    def bucketed(self) -> QuantizeWorkload:
        """The workload whose tuned schedule serves this one: m at powers of two."""
        return replace(self, m=min(1 << max(self.m - 1, 0).bit_length(), MOST_ROWS))

    def static(self) -> QuantizeWorkload:
        """Equal for all workloads that one compiled kernel serves."""
        return replace(self, m=0)

    @property
    def title(self) -> str:
        """What a person calls it: ``quantize m=4 k=4096 int8 a group of 128 after a norm``."""
        return f"quantize m={self.m} {self._what}"

    @property
    def served(self) -> str:
        """``title`` without what a compiled kernel does not depend on, and with the dtype."""
        return f"quantize {self._what} {self.dtype}"

    @property
    def _what(self) -> str:
        scaled = "a token" if self.group == PER_TOKEN else f"a group of {self.group}"
        source = " of a sum" * self.residual + (f" of {self.gate}" if self.gate else "")
        return f"k={self.k} {self.out} {scaled}{source}{' after a norm' * self.norm}{' with factors' * self.smooth}"

    def to_json(self) -> dict[str, Any]:
        said = {name: value for name, value in asdict(self).items() if name not in _LATER or _LATER[name] != value}
        return {"op": self.op, **said}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> QuantizeWorkload:
        """Raises ``ValueError`` for another op and ``KeyError`` for a missing field."""
        if data["op"] != "quantize":
            raise ValueError(f"op is {data['op']!r}; accepted: 'quantize'")
        given = {**_LATER, **data}
        return cls(**{f.name: given[f.name] for f in fields(cls)})
