"""What stored numbers mean, on both sides of a product: number formats of GEMM."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import isfinite, nan
from typing import Any

from .outside import stated

PER_CHANNEL = -1  # a scale for each output channel
GROUP_SIZES = (32, 64, 128, PER_CHANNEL)  # of integer weights
BITS = (4, 8)  # of integer weights
CODEBOOK_BITS = (2, 3, 4, 5, 6, 7, 8)  # of weights whose channels have codebooks of their own
INT8 = "int8"
FP8 = "float8_e4m3fn"
STEP_K = 128  # of what is summed before scales of groups of x, or of sums that would lose bits, are applied
CODEBOOK = "codebook"
OFFSET_ZERO = 128  # what a scaled number and its offset are less than as bytes: kernels flip the highest bit
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code; bit 3 is the sign (OCP Microscaling Formats 1.0, 5.3.3)
# By code, without infinities; bit 7 is the sign (OCP 8-bit Floating Point Specification 1.0, table 1).
E4M3 = (*(code * 2.0**-9 for code in range(8)), *((8 + code % 8) * 2.0 ** (code // 8 - 10) for code in range(8, 127)), nan)


_FLOATS = {"e2m1": E2M1, "e4m3": E4M3}
_SCALE_BYTES = {"uint8": 1, "float32": 4}  # of a scale that is not of the product's 16-bit type


@dataclass(frozen=True, slots=True)
class Scale:
    """What ``group`` numbers along k share (or PER_CHANNEL): a factor, and a ``zero`` point:
    "none", "middle" of the codes, or "stored" with the scale; or an "offset" that is added to the
    product of number and factor (see ``GemmFormat``). Kernels read factors of groups in the
    product's 16-bit type, an outer level's in fp32; ``of`` narrows which they may be: "e8m0", the
    powers of two, or "e4m3"; "": any of that type; "float32": fp32 ones of a product that applies
    them to sums; "uint8": bytes; "codebook": no factor, but the numbers of all codes."""

    group: int
    zero: str = "none"
    of: str = ""


@dataclass(frozen=True, slots=True)
class Numbers:
    """Codes of ``bits`` bits of a ``kind`` ("uint", "e2m1", "e4m3", or the module of another package's
    ``CODEC``) and their ``scales``, the inner level first. ``codebook``: the number of each code,
    where the kind does not say it. Raises ``ValueError`` for one that is not as long as there are
    codes."""

    kind: str
    bits: int
    scales: tuple[Scale, ...] = ()
    codebook: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.codebook and len(self.codebook) != 1 << self.bits:
            raise ValueError(f"codebook has {len(self.codebook)} numbers; accepted for {self.bits} bits: {1 << self.bits}")

    @property
    def values(self) -> tuple[float, ...]:
        """The number of each code, before zero point and scale."""
        if self.codebook:
            return self.codebook
        if self.kind in _FLOATS:
            return (*_FLOATS[self.kind], *(-value for value in _FLOATS[self.kind]))
        return tuple(float(code) for code in range(1 << self.bits))


@dataclass(frozen=True, slots=True, repr=False)
class GemmFormat:
    """The numbers of a product's weight, and those of x where it is not of the product's 16-bit
    type.

        w = (value(q) - zero) * scale (* row scale)             value: ``weight.values``; zero, scale: ``weight.scales``
        w = (value(q) * scale + offset - 128) * row scale       of bytes: whole numbers from -128 to 127 but for the row scale
        w = codebook[q]                                         each output channel's own, in place of scales

    The row scale is the factor of an outer level, PER_CHANNEL: a tensor's is the same in all rows.
    ``x``: "", or codes, each row with an fp32 scale of its own (``token_scales``): "int8", whose sums
    are int32, or "float8_e4m3fn", whose sums are fp32, as those of 16-bit x. ``x_group``: values of k
    that share such a scale, those of the weight's groups; then sums are int32 (of int8) within a group,
    and fp32 over groups.

    ``QuantFormat`` makes those of integer weights, ``parse`` any by its name. ``module``: where a
    format of another package is defined (as ``FORMAT``), which is its name too. Raises
    ``ValueError`` for a weight without scales.
    """

    weight: Numbers
    module: str = ""
    x: str = ""
    x_group: int = PER_CHANNEL

    def __post_init__(self) -> None:
        if not self.weight.scales:
            raise ValueError(f"weight is {self.weight}; accepted: numbers with at least one level of scales")
        if self.x not in ("", INT8, FP8):
            raise ValueError(f"x is {self.x!r}; accepted: '' (the product's 16-bit type), {INT8!r} and {FP8!r}")
        if self.x_grouped and (not self.x or self.x_group != self.group_size or self.offset):
            raise ValueError(f"x_group is {self.x_group}; accepted: {PER_CHANNEL}, or with codes for x and no offset the weight's groups")

    @property
    def bits(self) -> int:
        """Of a stored code of the weight."""
        return self.weight.bits

    @property
    def group_size(self) -> int:
        """Values of k that share a scale of the inner level."""
        return self.weight.scales[0].group

    @property
    def symmetric(self) -> bool:
        """Neither a zero point nor an offset is stored."""
        return self.weight.scales[0].zero not in ("stored", "offset")

    @property
    def offset(self) -> bool:
        """What is stored beside a scale is added to the scaled number: LiquidGEMM's two levels."""
        return self.weight.scales[0].zero == "offset"

    @property
    def codebook(self) -> bool:
        """Each output channel has the numbers of its 2^bits codes in place of a scale, and codes
        are stored as bit planes (``layouts/planes.py``)."""
        return self.weight.scales[0].of == CODEBOOK

    @property
    def integer_sums(self) -> bool:
        """x is integers as the weight is: sums are int32."""
        return self.x == INT8

    @property
    def x_grouped(self) -> bool:
        """Rows of x have a scale for each group of the weight."""
        return self.x_group != PER_CHANNEL

    @property
    def step_sums(self) -> bool:
        """Tensor cores sum STEP_K values of k at a time, which are then scaled and added to fp32 sums:
        where groups of x have scales, and where groups of a weight that is multiplied as e4m3 have. Sums
        of e4m3 without groups may stay on tensor cores for all of k, as in other libraries' fast
        accumulation (``short_sums``)."""
        return self.x_grouped or (self.x == FP8 and self.group_size != PER_CHANNEL)

    @property
    def short_sums(self) -> bool:
        """Programs may leave sums of e4m3 over all of k on tensor cores, which keep about 14 bits of them
        (DeepSeek-V3, arXiv:2412.19437, section 3.3.2)."""
        return self.x == FP8 and not self.step_sums

    def parameter_dtype(self, dtype: str) -> str:
        """Of the inner level's scales, in a product of 16-bit ``dtype``."""
        return self.weight.scales[0].of if self.own_scales else dtype

    @property
    def own_scales(self) -> bool:
        """The inner level's scales have a type of their own, whatever that of the product."""
        return self.weight.scales[0].of in _SCALE_BYTES

    def zero_dtype(self, dtype: str) -> str:
        """Of zero points and offsets, in a product of 16-bit ``dtype``: bytes where they are added to
        bytes."""
        return "uint8" if self.integer_sums else dtype

    @property
    def row_scaled(self) -> bool:
        """Groups' scales have a factor for each output channel."""
        return len(self.weight.scales) > 1

    @property
    def integer(self) -> bool:
        """The weight's codes are unsigned integers, whose numbers a zero point shifts."""
        return self.weight.kind == "uint"

    @property
    def _plain(self) -> bool:
        """``QuantFormat`` can say it."""
        return self.integer and not self.row_scaled and not self.module and not self.x

    @property
    def max_code(self) -> int:
        return (1 << self.bits) - 1

    @property
    def symmetric_zero_point(self) -> int:
        """The zero point where none is stored: the middle of integer codes; 0 of others, whose
        codes have a sign."""
        return 1 << (self.bits - 1) if self.integer else 0

    @property
    def largest(self) -> float:
        """The largest magnitude of a code's number less its zero point, whatever that is; with an
        offset of what the row scale is applied to."""
        if self.offset:
            return float(OFFSET_ZERO)
        if not self.symmetric:
            return float(self.max_code)
        return max(abs(value - self.symmetric_zero_point) for value in self.weight.values if isfinite(value))

    @property
    def unit(self) -> float:
        """What every code's number is a whole multiple of: a power of two."""
        return min(1.0, *(1.0 / Fraction(value).denominator for value in self.weight.values if isfinite(value)))

    def weight_of(self, numbers: Any, scales: Any, zeros: Any = None, row_scales: Any = None) -> Any:
        """The weight, as the class says, of arrays or tensors that fit each other's shapes;
        ``numbers`` are the codes' (``weight.values``). ``zeros`` (or offsets) None: none is
        stored."""
        if self.offset:
            weight = numbers * scales + (zeros - OFFSET_ZERO)
            return weight if row_scales is None else weight * row_scales
        weight = (numbers - (self.symmetric_zero_point if zeros is None else zeros)) * scales
        return weight if row_scales is None else weight * row_scales

    @property
    def group_bytes(self) -> int:
        """Of the scale of a group and of what is stored beside it; or of a channel's codebook."""
        if self.codebook:
            return 2 << self.bits
        zero = 0 if self.symmetric else 1 if self.integer_sums else 2
        return zero + _SCALE_BYTES.get(self.weight.scales[0].of, 2)

    def groups(self, k: int) -> int:
        """Number of scale groups along ``k`` values (the last group may be shorter)."""
        return 1 if self.group_size == PER_CHANNEL else -(-k // self.group_size)

    @property
    def kind(self) -> str:
        """The class of numbers that measurements must share to speak of each other: "w4", "w8"."""
        x = f"a8{'fp8' * (self.x == FP8)}{'lqq' * self.offset}{'g' * self.x_grouped}" if self.x else ""
        return f"w{self.bits}{'' if self.integer else self.weight.kind}{x}"

    @property
    def name(self) -> str:
        """compressed-tensors' words: ``w4a16_g128``, ``w8a16_channel_asym``."""
        return self.module or next(name for name, known in FORMATS.items() if known == self)

    @property
    def family(self) -> str:
        """What rows of results and ``group_size`` and ``symmetric`` beside it call it: ``w4a16``;
        not of integers its name."""
        if self.x:
            return f"w{self.bits}a8{'_lqq' * self.offset}{'_fp8' * (self.x == FP8)}"
        return f"w{self.bits}a16" if self.integer else self.name

    @classmethod
    def parse(cls, name: str) -> GemmFormat:
        """The inverse of ``name``; raises ``ValueError`` with examples for anything else."""
        if "." in name:
            return stated(name, "FORMAT")
        if name not in FORMATS:
            raise ValueError(f"unknown format {name!r}; accepted are names such as 'w4a16_g128', 'w4a16_g64_asym', 'w8a16_channel'")
        return FORMATS[name]

    def __repr__(self) -> str:
        if self._plain:
            return f"QuantFormat(bits={self.bits}, group_size={self.group_size}, symmetric={self.symmetric})"
        return f"GemmFormat.parse({self.name!r})"

    def to_json(self) -> dict[str, Any]:
        if self._plain:
            return {"bits": self.bits, "group_size": self.group_size, "symmetric": self.symmetric}
        return {"name": self.name}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> GemmFormat:
        """Raises ``KeyError`` for a missing field and ``ValueError`` for a format that is not
        known."""
        if "name" in data:
            return cls.parse(data["name"])
        return QuantFormat(bits=data["bits"], group_size=data["group_size"], symmetric=data["symmetric"])


class QuantFormat:
    """A format of integer weights with 16-bit activations: unsigned codes ``q`` of ``bits`` bits
    (4, 8) and, per output channel and group of ``group_size`` values of k,

        w = (q - zero_point) * scale

    ``symmetric`` formats store no zero point: it is ``2 ** (bits - 1)`` everywhere. ``group_size``
    is 32, 64, 128 or -1 (one group per output channel). Gives a ``GemmFormat``; raises
    ``ValueError`` for anything else.
    """

    def __new__(cls, bits: int = 4, group_size: int = 128, symmetric: bool = True) -> GemmFormat:  # pyright: ignore[reportInvalidTypeForm]
        if not isinstance(bits, int) or bits not in BITS:
            raise ValueError(f"bits is {bits!r}; accepted: {BITS}")
        if not isinstance(group_size, int) or group_size not in GROUP_SIZES:
            raise ValueError(f"group_size is {group_size!r}; accepted: {GROUP_SIZES} (-1: one group per output channel)")
        return GemmFormat(Numbers("uint", bits, (Scale(group_size, "middle" if symmetric else "stored"),)))

    @staticmethod
    def parse(name: str) -> GemmFormat:
        """The format called ``name`` ("w4a16_g128"); raises ``ValueError`` with examples for
        anything else."""
        return GemmFormat.parse(name)


def _integer_formats() -> dict[str, GemmFormat]:
    found = {}
    for bits in BITS:
        for group in GROUP_SIZES:
            shared = "channel" if group == PER_CHANNEL else f"g{group}"
            for symmetric in (True, False):
                found[f"w{bits}a16_{shared}{'' if symmetric else '_asym'}"] = QuantFormat(bits, group, symmetric)
    return found


def _lqq(group: int) -> GemmFormat:
    """LiquidGEMM's (section 4): int8 weights of each output channel, whose groups are 4-bit codes
    with a byte of scale and one of offset."""
    return GemmFormat(Numbers("uint", 4, (Scale(group, "offset", of="uint8"), Scale(PER_CHANNEL))), x=INT8)


def _group_wise(bits: int, zero: str) -> GemmFormat:
    """MixLLM's (section 3.3): weights and x both with a scale for each group of 128."""
    return GemmFormat(Numbers("uint", bits, (Scale(STEP_K, zero),)), x=INT8, x_group=STEP_K)


# Every format by its name: a new one is a line here, and a codec (schedules/gemm/codecs.py).
FORMATS: dict[str, GemmFormat] = {
    **_integer_formats(),
    # OCP Microscaling Formats 1.0: groups of 32 share a power of two.
    "w4a16_mxfp4": GemmFormat(Numbers("e2m1", 4, (Scale(32, of="e8m0"),))),
    # NVIDIA's: groups of 16 share an e4m3 number, all of a tensor (or of a row) an fp32 one.
    "w4a16_nvfp4": GemmFormat(Numbers("e2m1", 4, (Scale(16, of="e4m3"), Scale(PER_CHANNEL)))),
    "w4a8_lqq_g64": _lqq(64),
    "w4a8_lqq_g128": _lqq(128),
    # QServe's per channel: 4-bit codes with a scale and a zero point for each output channel.
    "w4a8_channel_asym": GemmFormat(Numbers("uint", 4, (Scale(PER_CHANNEL, "stored"),)), x=INT8),
    # SmoothQuant's: 8 bits on both sides, a scale for each output channel and each row of x.
    "w8a8_channel": GemmFormat(Numbers("uint", 8, (Scale(PER_CHANNEL, "middle"),)), x=INT8),
    "w8a8_g128": _group_wise(8, "middle"),
    "w4a8_g128_asym": _group_wise(4, "stored"),
    # e4m3 on both sides: a scale for each output channel and each row of x, ...
    "w8a8_fp8": GemmFormat(Numbers("e4m3", 8, (Scale(PER_CHANNEL, of="float32"),)), x=FP8),
    # ... or for each group of 128 of both: DeepSeek's blocks of 128 x 128, whose scale 128 channels repeat, ...
    "w8a8_fp8_g128": GemmFormat(Numbers("e4m3", 8, (Scale(STEP_K, of="float32"),)), x=FP8, x_group=STEP_K),
    # ... or 4-bit integers, all of which e4m3 holds.
    "w4a8_fp8": GemmFormat(Numbers("uint", 4, (Scale(STEP_K, "middle"),)), x=FP8),
    # Any-Precision LLM's: codes of b bits are the highest of 8, each channel has a codebook of each width.
    **{f"w{bits}a16_any": GemmFormat(Numbers("any", bits, (Scale(PER_CHANNEL, of=CODEBOOK),))) for bits in CODEBOOK_BITS},
}
