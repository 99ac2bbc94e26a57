"""The operands of a packed-weight GEMM as its CUDA programs see them: extents, groups per stage,
device calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ...layouts.formats import PER_CHANNEL
from ...schedules.gemm.codecs import CONVERSIONS, codec_of
from ...schedules.gemm.joined import first_joined, scatters, stage_rows
from ...schedules.gemm.parts import GATE_ROWS, Part, parts
from ...schedules.gemm.rules import LEAST_STAGED, exchanged_split, stage_groups, staged_columns
from ...schedules.gemm.workload import X_ROW_BYTES, Workload
from ...schedules.operands import present
from ...schedules.schedule import Schedule
from ..compiler.headers import GATES, TYPES

_OF = {"m": "tilebit::OfRow", "mn": "tilebit::OfElement"}  # parts that are not of a whole output channel
BARRIER = 7  # named barrier of the epilogue; generated code takes the first ones (0 to 3 have been seen)


@dataclass(frozen=True, slots=True)
class Operands:
    """Extents of one (workload, schedule): all in elements unless said otherwise."""

    workload: Workload
    schedule: Schedule

    @property
    def n(self) -> int:
        return self.workload.n

    @property
    def columns(self) -> int:
        """Of y."""
        return self.workload.columns

    @property
    def n_tiles(self) -> int:
        """64-row slabs of the packed weight."""
        return -(-self.n // 64)

    @property
    def n_pad(self) -> int:
        return self.n_tiles * 64

    @property
    def kx(self) -> int:
        """Columns of x as the kernel reads it: k rounded up to whole 16 bytes, as TMA wants rows."""
        whole = X_ROW_BYTES // self.workload.x_bytes
        return -(-self.workload.k // whole) * whole

    @property
    def sums_dtype(self) -> str:
        """Of what leaves a program's loop over k: of groups of x that have scales, their integer sums
        times these."""
        return "int32" if self.integer_sums else "float32"

    @property
    def integer_sums(self) -> bool:
        """Sums over all of k are integers."""
        return self.workload.format.integer_sums and not self.x_grouped

    @property
    def x_grouped(self) -> bool:
        """Groups of x have scales, by which their sums are multiplied in the loop over k."""
        return self.workload.format.x_grouped

    @property
    def step_sums(self) -> bool:
        """A step's sums are made by themselves, then scaled and added to fp32 ones."""
        return self.workload.format.step_sums

    @property
    def product_dtype(self) -> str:
        """Of what tensor cores sum."""
        return "int32" if self.workload.format.integer_sums else "float32"

    @property
    def parameter_dtype(self) -> str:
        """Of scales."""
        return self.workload.format.parameter_dtype(self.workload.dtype)

    @property
    def zero_dtype(self) -> str:
        """Of zero points or offsets."""
        return self.workload.format.zero_dtype(self.workload.dtype)

    def copied_as(self, dtype: str) -> tuple[str, int]:
        """How cp.async takes a tile's row of scales, zero points or offsets of ``dtype``: as what it
        copies them, and how many of these there are. Four bytes together, the least that it copies:
        a narrower copy would be a load and a store between two barriers at each step."""
        return "int32", self.schedule.block_n // _in_four_bytes(dtype)

    def copied(self, T: Any, parameters: Any, dtype: str) -> Any:
        """The tensor ``parameters`` of ``dtype``, as ``copied_as`` says."""
        return T.view(parameters, (self.groups, self.n_pad // _in_four_bytes(dtype)), "int32")

    @property
    def record_k(self) -> int:
        """k of one 2,048-byte record: 64 at 4 bits, 32 at 8."""
        return 256 // self.workload.format.bits

    @property
    def k_tiles(self) -> int:
        return -(-self.workload.k // self.record_k)

    @property
    def records(self) -> int:
        """Records of one slab in one pipeline step."""
        return self.schedule.block_k // self.record_k

    @property
    def steps(self) -> int:
        """Pipeline steps that cover k."""
        return -(-self.workload.k // self.schedule.block_k)

    def halves(self, T: Any) -> tuple[Any, int, int]:
        """The weight's shape as half records: a shared extent over 256 would be boxed by the TMA
        copy. Not all Python numbers: those TileLang compares as int32, and the bits of a large
        weight exceed it."""
        return T.int32(self.n_tiles), self.k_tiles * 2, 256

    def first_row(self, T: Any, bx: Any) -> Any:
        """Of W, of block ``bx`` along n of a streaming program. Where block_n does not divide the rows, the
        last block is moved back to end with the last of them: it finds rows that the one before has,
        too, and does not store them."""
        bn = self.schedule.block_n
        return bx * bn if self.n_pad % bn == 0 else T.min(bx * bn, self.n_pad - bn)

    @property
    def asymmetric(self) -> bool:
        return not self.workload.format.symmetric

    @property
    def grouped(self) -> bool:
        """Scales are applied to the weights (per group); per-channel scales are applied to the
        accumulators."""
        return self.workload.format.group_size != PER_CHANNEL

    @property
    def groups(self) -> int:
        return self.workload.format.groups(self.workload.k)

    @property
    def step_groups(self) -> int:
        """Scale groups that one step touches."""
        return max(1, self.schedule.block_k // self.workload.format.group_size) if self.grouped else 1

    @property
    def stage_groups(self) -> int:
        """Rows of scales and of zero points that a stage of ``gemm_wgmma`` has room for:
        ``step_groups``, or one more where its bytes would be no multiple of the 128 that TMA's places
        are aligned to."""
        return stage_groups(self.workload.format, self.schedule)

    def group_of(self, step: Any) -> Any:
        """First scale group of pipeline step ``step`` (an int or a TIR expression)."""
        if not self.grouped:
            return 0
        return step * self.schedule.block_k // self.workload.format.group_size

    def tensors(self, T: Any, arch: str, *names: str, m: Any) -> tuple[Any, ...]:
        """The declarations of optional operands ``names``, of ``m`` rows of x. None for one that
        this workload does not have: an argument annotated None is left out of the kernel."""
        stated = {o.name: o for o in present(self.workload.operands(arch))}
        shapes = {name: [m if size == "m" else size for size in o.shape] for name, o in stated.items()}
        return tuple(T.Tensor(shapes[name], stated[name].dtype) if name in stated else None for name in names)

    def after(self, applied: Collection[str] = (), /, **tensors: Any) -> tuple[tuple[Part, Any], ...]:
        """The parts that follow the product, each with its operand among ``tensors``; not those
        whose operands are ``applied``."""
        return tuple((part, tensors[part.operand]) for part in parts(self.workload, applied))

    @property
    def slabs(self) -> int:
        """64-row slabs that one group of four warps holds."""
        return self.schedule.block_n // 64 // (self.schedule.num_warps // 4)

    def dequantize_call(self, part: int = 0, parts: int = 1) -> str:
        """``tilebit::dequantize`` of one of ``parts`` parts of a step, with its template arguments
        (``device/codecs/dequant.cuh``), or ``tilebit::dequantize_bytes``
        (``device/codecs/int8.cuh``)."""
        w, s, codec = self.workload, self.schedule, codec_of(self.workload.format)
        if w.format.x:
            k32_steps = min(s.block_k, w.format.group_size) // 32 if self.grouped else s.block_k // 32
            of_bytes = (codec.device(w.format), self.slabs, part, self.records // parts, k32_steps, stage_rows(s))
            return f"{codec.dequantize or 'tilebit::dequantize_bytes'}<{', '.join(map(str, of_bytes))}>"
        k16_steps = s.block_k // 16
        group_steps = min(k16_steps, w.format.group_size // 16) if self.grouped else k16_steps
        arguments = (
            TYPES[w.dtype], codec.device(w.format), _cpp(w.format.symmetric), self.slabs, part, self.records // parts,
            group_steps, s.block_n, _cpp(self.grouped),
        )  # fmt: skip
        return f"{codec.dequantize or 'tilebit::dequantize'}<{', '.join(map(str, arguments))}>"

    def join_call(self, part: int, parts: int) -> str:
        """``tilebit::join_nibbles`` of a part of a step (``device/codecs/nibble_pairs.cuh``)."""
        return f"tilebit::join_nibbles<{self.slabs}, {part}, {self.records // parts}, {stage_rows(self.schedule)}>"

    @property
    def first_joined(self) -> int:
        """The row with which the tiles of bytes begin; without any the end."""
        return first_joined(self.workload, self.schedule)

    def add_group_call(self, rows: int) -> str:
        """``tilebit::add_group`` of a tile of so many rows of x (``device/codecs/group_sums.cuh``)."""
        floats = () if self.workload.format.integer_sums else ("float", _cpp(self.x_grouped))
        codec = codec_of(self.workload.format)
        unit = (f"{codec.device(self.workload.format)}::UNIT",) if floats else ()
        how = () if codec.conversion == CONVERSIONS[0] else ("int", "true", 1, f"tilebit::Conversion::{codec.conversion}")
        arguments = (TYPES[self.parameter_dtype], self.slabs, rows, *floats, *unit, *how)
        return f"tilebit::add_group<{', '.join(map(str, arguments))}>"

    @property
    def magic_start(self) -> bool:
        """A step's int32 sums start at the bits of a number, which is taken away from them as floats."""
        return codec_of(self.workload.format).conversion == "MAGIC_START"

    def start_sums_call(self, rows: int) -> str:
        """``tilebit::start_sums`` of a tile of so many rows of x (``device/codecs/group_sums.cuh``)."""
        return f"tilebit::start_sums<{self.schedule.block_n * rows // (self.schedule.num_warps * 32)}>"

    def stage_call(self) -> str:
        """``tilebit::stage_transposed`` with its template arguments
        (``device/store/epilogue.cuh``)."""
        s = self.schedule
        arguments = (TYPES[self.workload.dtype], self.slabs, s.block_m, s.num_warps * 32, BARRIER)
        return f"tilebit::stage_transposed<{', '.join(map(str, arguments))}>"

    @property
    def staged_columns(self) -> int:
        """Columns of the tile that pass through shared memory at a time when ``gemm_wgmma`` stores
        it, whole times; of a tile whose halves two blocks store, so few that these have equally
        many."""
        return staged_columns(self.schedule.block_m // (2 if exchanged_split(self.schedule) else 1))

    def store_type(self, rows: int) -> str:
        """``tilebit::Store`` with its template arguments (``device/store/tile.cuh``), of a tile
        of so many rows of x."""
        s, w = self.schedule, self.workload
        columns = LEAST_STAGED if rows % self.staged_columns else self.staged_columns
        arguments = (
            TYPES[w.dtype], self.n, self.slabs, s.block_n, rows, columns, s.num_warps * 32, BARRIER,
        )  # fmt: skip
        other = f"{self.sum_type() or ', float'}, {w.width}" if w.width or w.gate else self.sum_type()
        joined = f", void, {self.first_joined}, {_cpp(scatters(s))}" if s.joined else ""
        gate = f", {GATES[w.gate]}" if w.gate else joined
        return f"tilebit::Store<{', '.join(map(str, arguments))}{other}{gate}>"

    def sum_type(self) -> str:
        """The accumulators' type as a further template argument, where it is not fp32."""
        return ", int" if self.integer_sums else ""

    def part_types(self) -> str:
        """The types of the parts that follow the product (``device/store/parts.cuh``), as further
        template arguments."""
        types = [(f"tilebit::{part.does.title()}<{TYPES[part.dtype]}>", part.axis) for part in parts(self.workload)]
        return "".join(f", {_OF[axis]}<{does}>" if axis in _OF else f", {does}" for does, axis in types)


def finish(value: Any, after: Sequence[tuple[Part, Any]], **at: Any) -> Any:
    """What is stored for the sum ``value``: after all parts, in fp32. ``at``: its indices by axis,
    m=row, n=channel."""
    for part, tensor in after:
        if part.does == "place":
            continue
        index = (at["m"], at["n"]) if part.axis == "mn" else (0,) * (len(tensor.shape) - 1) + (at[part.axis],)
        number = tensor[index].astype("float32")
        value = value * number if part.does == "multiply" else value + number
    return value


def gate_of(index: Any) -> Any:
    """The channel of the weight, or the row of a tile, whose sum is the gate of column ``index`` of y, or of a
    tile of it; what it gates is ``GATE_ROWS`` further."""
    return index // GATE_ROWS * (2 * GATE_ROWS) + index % GATE_ROWS


def column_of(channel: Any, after: Sequence[tuple[Part, Any]]) -> Any:
    """Of y, where what row ``channel`` of the weight makes is stored."""
    return next((tensor[channel] for part, tensor in after if part.does == "place"), channel)


def stored(channel: Any, after: Sequence[tuple[Part, Any]], columns: int) -> Any:
    """Whether it is: an index may say that it is added to another, or be wrong, which costs no other memory."""
    return next(((tensor[channel] >= 0) & (tensor[channel] < columns) for part, tensor in after if part.does == "place"), True)


def addresses(T: Any, after: Sequence[tuple[Part, Any]]) -> list[Any]:
    """Where the parts' operands begin."""
    return [T.address_of(tensor[(0,) * len(tensor.shape)]) for _, tensor in after]


def _cpp(flag: bool) -> str:
    return "true" if flag else "false"


def _in_four_bytes(dtype: str) -> int:
    """How many scales, zero points or offsets of ``dtype`` lie there: of uint8, fp32 or 16 bits."""
    return {"uint8": 4, "float32": 1}.get(dtype, 2)
