"""How a block of ``gemm_wgmma`` divides its work, and the device functions that it calls for it,
with their template arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...schedules.gemm import rules as rules
from ...schedules.gemm.joined import byte_tiles, n_blocks, scatters
from .operands import BARRIER, Operands

SCATTERERS = 2  # warps that store tiles of bytes, of the loading warpgroup
PRODUCERS = rules.WGMMA.producer_threads  # of the warpgroup that loads: registers are handed from warpgroup to warpgroup


@dataclass(frozen=True, slots=True)
class Plan:
    """Of one (workload, schedule). ``kinds`` of tiles below are indices into ``heights``: 0 a whole
    tile, 1 a strip of one."""

    operands: Operands
    below: bool = False  # blocks of a cluster have neighbouring rows of x, which they load by themselves; else neighbouring channels

    @property
    def parts(self) -> int:
        """Of a step, each of which is loaded by itself and has registers of its own for its
        weights."""
        return 2 if self.operands.records % 2 == 0 else 1

    @property
    def scales_part(self) -> int:
        """The part of a step with which its scales come: the first, for all that is dequantized; where
        they are those of sums, the last."""
        return self.parts - 1 if self.operands.step_sums else 0

    @property
    def lines(self) -> int:
        """Half records of a slab in a part."""
        return self.operands.records // self.parts * 2

    @property
    def heights(self) -> tuple[int, ...]:
        """Rows of x of a whole tile and, where a last wave is cut into strips, of a strip."""
        s = self.operands.schedule
        return (s.block_m,) if s.tail == 1 else (s.block_m, s.block_m // s.tail)

    @property
    def exchanged(self) -> bool:
        """The parts of a tile are added up by clusters of two, through their shared memory."""
        return rules.exchanged_split(self.operands.schedule)

    @property
    def paired(self) -> bool:
        """There are several such clusters, whose sums meet in a workspace."""
        return rules.paired_split(self.operands.schedule)

    @property
    def shared(self) -> bool:
        """Parts of a tile meet in a workspace."""
        s = self.operands.schedule
        return s.stream_k or (s.split_k > 1 and not rules.clustered_split(s))

    @property
    def scratch(self) -> bool:
        """The kernel takes a workspace."""
        return self.shared or self.scatters

    @property
    def scatters(self) -> bool:
        """Other warps store tiles of bytes, from the workspace."""
        return scatters(self.operands.schedule)

    @property
    def consumers(self) -> int:
        """Threads that compute."""
        return self.operands.schedule.num_warps * 32

    @property
    def order(self) -> str:
        """The type whose functions say which steps of which tiles a block takes."""
        p, s = self.operands, self.operands.schedule
        along, of_bytes = n_blocks(p.workload, s), f", {byte_tiles(p.workload, s)}" if s.joined else ""
        below = ", 0, true" if self.below else ""
        return f"tilebit::Order<{along}, {s.block_m}, {p.steps}, {s.split_k}, {s.cluster}, {max(1, s.raster)}, {s.tail}{of_bytes}{below}>"

    def dequantize(self, part: int) -> str:
        return self.operands.dequantize_call(part, self.parts)

    def join(self, part: int) -> str:
        return self.operands.join_call(part, self.parts)

    @property
    def whole_tiles(self) -> int:
        """Along n, before those of bytes whose nibbles are rows of their own."""
        return -(-self.operands.first_joined // self.operands.schedule.block_n)

    def alloc_sums(self, T: Any, kind: int) -> Any:
        """A thread's sums of a tile: a product's own accumulators, or what groups are added to, in the
        same order."""
        p, rows = self.operands, self.heights[min(kind, len(self.heights) - 1)]
        shape = (p.schedule.block_n, rows)
        return T.alloc_local((shape[0] * rows // self.consumers,), "float32") if p.step_sums else T.alloc_fragment(shape, p.sums_dtype)

    def clear(self, kind: int) -> str:
        s = self.operands.schedule
        return f"tilebit::clear_sums<{s.block_n * self.heights[kind] // self.consumers}>"

    def add_group(self, kind: int) -> str:
        return self.operands.add_group_call(self.heights[kind])

    def start_sums(self, kind: int) -> str:
        return self.operands.start_sums_call(self.heights[kind])

    def bring_token_scales(self, kind: int) -> str:
        return f"tilebit::bring_token_scales<{self.heights[kind]}>"

    def finish(self, kind: int) -> str:
        store = self.operands.store_type(self.heights[kind])
        shared = "true" if self.shared else "false"
        return f"tilebit::finish_tile<{self.order}, {store}, {self.consumers}, {BARRIER}, {shared}{self.operands.part_types()}>"

    @property
    def scatter(self) -> str:
        shares = 2 if self.shared else 0
        return f"tilebit::scatter_tile<{self.operands.store_type(self.heights[0])}, {shares}, {self.heights[0]}, {SCATTERERS}>"

    @property
    def bring_numbers(self) -> str:
        return f"tilebit::bring_numbers<{self.order}, {self.operands.store_type(self.heights[0])}{self.operands.part_types()}>"

    @property
    def own_chunks(self) -> tuple[int, ...]:
        """Each block's of a cluster, of the tile that it shares."""
        return tuple(range(-(-self.operands.schedule.block_m // self.operands.staged_columns // 2)))

    @property
    def send_half(self) -> str:
        return f"tilebit::send_half<{self.operands.store_type(self.heights[0])}, {self.consumers}>"

    def add_sent(self, chunk: int) -> str:
        return f"tilebit::add_sent<{self.operands.store_type(self.heights[0])}, {self.consumers}, {chunk}>"

    @property
    def meet_clusters(self) -> str:
        return f"tilebit::meet_clusters<{self.order}, {self.operands.store_type(self.heights[0])}, {self.consumers}, {BARRIER}>"

    def store_chunk(self, chunk: int) -> str:
        store, sent = self.operands.store_type(self.heights[0]), "false" if self.paired else "true"
        return f"tilebit::store_chunk<{store}, {self.consumers}, {chunk}, {sent}{self.operands.part_types()}>"

    @property
    def release(self) -> str:
        return f"tilebit::release<{1 if self.below else self.operands.schedule.cluster}>"

    @property
    def keep(self) -> str:
        return f"{self.order}::keep<{BARRIER}, {self.consumers}>"

    def ask(self, T: Any, what: str, *where: Any) -> Any:
        """A member of ``order``, which the device computes: as TIR the divisions would be written
        out at every use."""
        return T.call_pure_extern("int32", f"{self.order}::{what}", *where)

    def run(self, T: Any, kind: int, m: Any, block: Any) -> tuple[Any, Any]:
        """The iterations of a block that multiply tiles of ``kind``: (first, one past the last)."""
        first, end = self.ask(T, "first_strip", m, block) if len(self.heights) > 1 else None, self.ask(T, "iterations", m, block)
        return (first, end) if kind else (0, end if first is None else first)
