"""How the weights of a format reach the tensor cores: their packed layout, what unpacks them, and
what that costs.

A codec is the one thing that knows a kind of numbers on both sides: the packed layout is induced
from the fragment of the instruction that reads it (``layouts/packing.py``); ``device`` names the
C++ type whose functions turn a word into operand registers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf

from ...layouts.formats import FP8, INT8, PER_CHANNEL, STEP_K, GemmFormat
from ...layouts.outside import stated
from ...layouts.packing import PackedLayout, gemm_layout
from ...layouts.planes import plane_layout


def _induced(arch: str, format: GemmFormat) -> PackedLayout:
    return gemm_layout(arch, format.bits, bool(format.x))


CONVERSIONS = ("INSTRUCTION", "MAGIC_ADD", "MAGIC_START")
UNPACKING = frozenset({"gemm_mma", "gemm_wgmma"})  # programs that call a codec's ``dequantize``


@dataclass(frozen=True, slots=True)
class Codec:
    """``kind`` is that of the weight's numbers (``layouts.formats.Numbers``), ``x`` and ``x_group``
    those of x as the format says them. ``layout(arch,
    format)`` packs codes; ``device(format)`` is the C++ type whose functions turn a packed word
    into operand registers, ``programs`` those that have them, ``headers`` the files that hold them,
    under ``tiles/device`` or anywhere by an absolute path, beside what programs include.
    ``dequantize`` names the function that loads and unpacks a step of a tile in ``gemm_wgmma`` and
    ``gemm_mma``; empty: ``tilebit::dequantize`` (of bytes ``tilebit::dequantize_bytes``), whose arguments
    it takes. Other programs have no place for one. Raises ``ValueError`` where they are asked to.
    ``group_sizes`` are the groups of the inner scales that kernels take, ``largest_scale`` the
    largest of these scales. ``ops_per_weight`` is what dequantizing costs a lane, by bits of a code
    (the cost model's alpha, LiquidGEMM eq. 4); ``cpu_ops_per_weight`` on a CPU. ``arches`` have the instruction, empty:
    all; elsewhere users are told of ``instead``. ``conversion``: how a group's int32 sums become fp32, one of
    CONVERSIONS (``Conversion`` in ``device/codecs/group_sums.cuh``); all but the first are of sums of
    STEP_K products of bytes, which stay below 2^22. Raises ``ValueError`` elsewhere."""

    kind: str
    device: Callable[[GemmFormat], str]
    programs: frozenset[str]
    group_sizes: tuple[int, ...]
    ops_per_weight: Mapping[int, float]
    cpu_ops_per_weight: Mapping[int, float]
    headers: tuple[str, ...] = ()
    dequantize: str = ""
    largest_scale: float = inf
    layout: Callable[[str, GemmFormat], PackedLayout] = _induced
    x: str = ""
    x_group: int = PER_CHANNEL
    arches: tuple[str, ...] = ()
    instead: str = ""
    conversion: str = CONVERSIONS[0]

    def __post_init__(self) -> None:
        if self.dequantize and not self.programs <= UNPACKING:
            without = ", ".join(sorted(self.programs - UNPACKING))
            raise ValueError(
                f"dequantize is {self.dequantize!r}, which {without} would not call; accepted: programs {', '.join(sorted(UNPACKING))}"
            )
        accepted = CONVERSIONS if self.x == INT8 and self.x_group == STEP_K else CONVERSIONS[:1]
        if self.conversion not in accepted:
            raise ValueError(
                f"conversion is {self.conversion!r}; accepted for x {self.x!r} with scales of {self.x_group} k: {', '.join(accepted)} "
                f"(int32 sums of {STEP_K} k may be converted by all of {', '.join(CONVERSIONS)})"
            )

    def unserved(self, format: GemmFormat, program: str, arch: str) -> list[str]:
        """Why ``program`` does not take weights of ``format`` on ``arch``: sentences, empty when it
        does."""
        reasons = []
        if self.arches and arch not in self.arches:
            reasons.append(f"format is {format.name}; it runs on {', '.join(self.arches)}: use {self.instead} on {arch}.")
        if program not in self.programs:
            reasons.append(f"format is {format.name}; {program} has no codec for it.")
        if format.group_size not in self.group_sizes:
            reasons.append(f"groups of {format.group_size} values share a scale; accepted: {', '.join(map(str, self.group_sizes))}.")
        return reasons


_PROGRAMS = frozenset({"gemm_wgmma", "gemm_mma", "gemm_stream", "gemm_stream_bulk", "gemm_cpu"})
UINT = Codec(
    "uint",
    device=lambda f: f"tilebit::Uint<{f.bits}>",
    programs=_PROGRAMS,
    group_sizes=(32, 64, 128, -1),
    # What is not hidden of 1.25 and 1.5 counted per weight, with their waiting; fitted at 4 bits.
    ops_per_weight={4: 2.2, 8: 2.6},
    cpu_ops_per_weight={4: 1.0, 8: 0.75},
)
E2M1 = Codec(
    "e2m1",
    device=lambda f: "tilebit::E2m1",
    headers=("codecs/e2m1.cuh",),
    programs=_PROGRAMS,
    group_sizes=(16, 32),
    # A guess until a GPU has timed it: 19 instructions for eight weights, of integers 13 (fp16).
    ops_per_weight={4: 2.6},
    cpu_ops_per_weight={4: 1.0},
    largest_scale=2.0,  # a code's bits are a number 2^14 (bf16: 2^126) too small, which its scale makes good
)
BYTES = Codec(
    "uint",
    x=INT8,
    device=lambda f: "tilebit::Lqq" if f.offset else "tilebit::Centered" if f.symmetric else "tilebit::Shifted",
    headers=("codecs/int8.cuh",),
    programs=_PROGRAMS,
    group_sizes=(64, 128, -1),
    # Counted: seven instructions for eight weights, or one for four, and their loads.
    ops_per_weight={4: 1.2, 8: 0.6},
    cpu_ops_per_weight={4: 0.25, 8: 0.5},
)
# Sums are scaled group by group.
GROUPED_BYTES = replace(
    BYTES,
    x_group=128,
    group_sizes=(128,),
    headers=("codecs/int8.cuh", "codecs/group_sums.cuh"),
)
# e4m3 is multiplied as it is.
FLOATS = Codec(
    "e4m3",
    x=FP8,
    device=lambda f: "tilebit::E4m3",
    headers=("codecs/int8.cuh", "codecs/fp8.cuh", "codecs/group_sums.cuh"),
    programs=_PROGRAMS,
    group_sizes=(-1,),
    ops_per_weight={8: 0.6},
    cpu_ops_per_weight={8: 1.0},
    arches=("sm_89", "sm_90a", "cpu"),
    instead="w8a8_channel or w8a8_g128 (int8), or w8a16_channel",
)
# Groups of e4m3 x: not in the programs of few rows yet.
GROUPED_FLOATS = replace(FLOATS, x_group=STEP_K, group_sizes=(STEP_K,), programs=frozenset({"gemm_wgmma", "gemm_mma", "gemm_cpu"}))
NIBBLES = replace(
    FLOATS,
    kind="uint",
    device=lambda f: "tilebit::SignedNibbles",
    group_sizes=(STEP_K,),
    ops_per_weight={4: 1.7},  # counted: eleven instructions for eight weights, and their loads
    cpu_ops_per_weight=UINT.cpu_ops_per_weight,
    instead="w4a8_lqq_g128 (int8) or w4a16_g128",
)
ANY = Codec(
    "any",
    device=lambda f: "",
    programs=frozenset({"gemm_any", "gemm_any_binary", "gemm_any_wgmma", "gemm_any_cpu"}),
    group_sizes=(-1,),
    ops_per_weight={},
    cpu_ops_per_weight={},
    layout=lambda arch, f: plane_layout(arch),
)
CODECS: dict[tuple[str, str, int], Codec] = {
    (codec.kind, codec.x, codec.x_group): codec for codec in (UINT, E2M1, BYTES, GROUPED_BYTES, FLOATS, GROUPED_FLOATS, NIBBLES, ANY)
}


def codec_of(format: GemmFormat) -> Codec:
    """The codec of a format: by the kind of its weight's numbers and x's, or the ``CODEC`` of the
    module that the kind names. Raises ``ValueError`` for a kind without one."""
    kind = format.weight.kind
    if (kind, format.x, format.x_group) in CODECS:
        return CODECS[kind, format.x, format.x_group]
    if "." in kind:
        return stated(kind, "CODEC")
    known = ", ".join(repr(kind) for kind, *x in CODECS if x == [format.x, format.x_group])
    raise ValueError(f"weights are {kind!r} numbers; accepted: {known}, or a module path with a CODEC")


def sources_of(format: GemmFormat) -> tuple[str, ...]:
    """Files that say what a format's codes are: device functions, and the modules of a format and a
    kind of numbers of other packages."""
    modules = [name for name in (format.module, format.weight.kind) if "." in name]
    return (*codec_of(format).headers, *(str(importlib.import_module(name).__file__) for name in modules))


def packed_layout(arch: str, format: GemmFormat) -> PackedLayout:
    """Where the codes of a weight of ``format`` lie on ``arch``; of one with codebooks, where the
    bits of each of its planes lie."""
    return codec_of(format).layout(arch, format)
