"""A stand-in for ``tilelang.language`` that computes: the part of it that the GEMM programs use, on numpy, one cluster of blocks at a time.

It exists so that the very text of a tile program can be run, and run with a planted bug, where there is no GPU. Each group of threads that
takes a path of its own (a loading warp, the computing warps) runs the program by itself, in turns with the others (``crew.py``). Copies
past the end of a tensor read zeros, as TMA and guarded cp.async do. Scalars are evaluated element by element; products go through each
thread's registers. Inside a group, warps go in step: a race between two of them is not seen.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np

from tilebit.layouts.formats import FP8
from tilebit.layouts.fragments import wgmma_a, wgmma_c
from tilebit.schedules.gemm.rules import TMA_ALIGNMENT

from .crew import Crew
from .device_code import Argument, DeviceCode, Place
from .launch import Block, Cluster, Group, Plan, TensorType, ThreadIndex
from .shared_memory import BARRIER, Barrier, issue
from .tile_memory import STORED, Buffer, Element, IllegalAccess, RegisterTile, ThreadLocal

WAIT = "tilebit::wait_for_predecessor"
AWAIT = "tilebit::await_stage"  # what other groups of threads must do first


class TileLanguage:
    """Stands in for the module ``tilelang.language`` while one kernel runs. ``symbols`` are its dynamic extents."""

    GemmWarpPolicy = SimpleNamespace(FullRow="FullRow")
    Ref = int  # annotates a variable that a macro assigns: here none is read after the macro

    def __init__(self, symbols: dict[str, int], plan: Plan, device: DeviceCode | None, order: random.Random) -> None:
        self.symbols, self.plan, self.device, self.order = symbols, plan, device, order
        self.tensors: list[tuple[int, int]] = []  # where each begins and ends, for the checks of copies
        self.crew = Crew(order)
        self.local = threading.local()
        self.cluster: Cluster | None = None

    @property
    def group(self) -> Group:
        """Whose turn it is."""
        return self.local.group

    def run_cluster(self, indices: Sequence[tuple[int, ...]], main: Callable[[], None]) -> None:
        """``main`` for every group of threads of the blocks ``indices``, which form a cluster."""
        blocks = [Block(index, rank) for rank, index in enumerate(indices)]
        for block, (dtype, shape) in product(blocks, self.plan.allocations):
            block.shared.add(dtype, shape)
        place = Place.of(self.plan.grid, indices, [block.shared.address for block in blocks], self.tensors)
        self.cluster = Cluster(blocks, place, len(blocks) * len(self.plan.groups))
        self.crew = Crew(self.order)

        left = [len(self.plan.groups)] * len(blocks)

        def body(group: Group) -> Callable[[], None]:
            def run() -> None:
                self.local.group = group
                main()
                left[group.block.rank] -= 1
                if not left[group.block.rank]:
                    place.shared[group.block.rank] = 0  # others of its cluster can no longer reach it

            return run

        groups = [Group(block, *bounds) for block in blocks for bounds in self.plan.groups]
        self.crew.run([(f"block {g.block.index}, threads {g.low} to {g.high - 1}", body(g)) for g in groups])
        for block in blocks:
            block.shared.check()

    # ---- declarations ----
    def dynamic(self, name: str) -> int:
        return self.symbols[name]

    def Tensor(self, shape: tuple[int, ...], dtype: str) -> TensorType:
        return TensorType(tuple(map(int, shape)), dtype)

    def prim_func(self, function: Callable[..., None]) -> Callable[..., None]:
        return function

    macro = prim_func

    @contextmanager
    def Kernel(self, *grid: int, threads: int, cluster_dims: Any = None) -> Iterator[Any]:
        index = self.group.block.index[: len(grid)]
        yield index[0] if len(grid) == 1 else index

    def get_thread_binding(self) -> ThreadIndex:
        return ThreadIndex(self.group.low, self.group.high)

    def import_source(self, source: str) -> None:
        assert source == self.plan.source

    def ignored(self, *_: Any) -> None:
        """What decides speed and addresses, not values."""

    annotate_layout = annotate_min_blocks_per_sm = disable_warp_group_reg_alloc = use_swizzle = set_max_nreg = ignored

    # ---- memory ----
    def alloc_shared(self, shape: tuple[int, ...], dtype: str) -> Any:
        """What the group's block has there: all of its groups allocate the same."""
        self.group.allocated += 1
        return self.group.block.shared.taken[self.group.allocated - 1]

    def alloc_barrier(self, arrivals: list[int]) -> Any:
        return self.alloc_shared(tuple(arrivals), BARRIER)

    alloc_cluster_barrier = alloc_barrier

    def alloc_fragment(self, shape: tuple[int, int], dtype: str) -> RegisterTile:
        return RegisterTile(shape, dtype, self.group.size)

    def alloc_local(self, shape: tuple[int, ...], dtype: str) -> ThreadLocal:
        return ThreadLocal(shape, dtype, self.group.size)

    def alloc_var(self, dtype: str, init: int = 0) -> int:
        """A variable: the program's assignments bind the Python name."""
        return init

    def reshape(self, buffer: Buffer, shape: tuple[int, ...]) -> Buffer:
        view = Buffer(shape, buffer.dtype, buffer.data, buffer.start)
        assert view.size == buffer.size
        return view

    def view(self, buffer: Buffer, shape: tuple[int, ...], dtype: str) -> Buffer:
        size, own = (np.dtype(STORED[name]).itemsize for name in (buffer.dtype, dtype))
        view = Buffer(shape, dtype, buffer.data.view(STORED[dtype]), buffer.start * size // own, buffer.late)
        assert view.size * own == buffer.size * size
        return view

    def address_of(self, element: Element | Barrier) -> tuple[int, int]:
        if isinstance(element, Barrier):
            return element.address, 0
        self._may_touch(element.buffer)
        return element.buffer.address(element.indices)

    def _may_touch(self, buffer: Buffer) -> None:
        if buffer.late and WAIT in self.plan.calls and not self.group.waited:
            raise IllegalAccess("a tensor that an earlier kernel may still be writing is touched before wait_for_predecessor")

    # ---- loops and values ----
    def ceildiv(self, a: int, b: int) -> int:
        return -(-a // b)

    def min(self, a: int, b: int) -> int:
        return min(a, b)

    def float32(self, value: float) -> np.float32:
        return np.float32(value)

    def int32(self, value: int) -> int:
        return value

    def if_then_else(self, condition: bool, then: int, otherwise: int) -> int:
        return then if condition else otherwise

    def serial(self, *bounds: int) -> range:
        return range(*bounds)

    unroll = serial

    def Pipelined(self, count: int, num_stages: int) -> range:
        return range(count)

    def Parallel(self, *extents: int) -> Iterator[tuple[int, ...]]:
        return product(*map(range, extents))

    def call_pure_extern(self, dtype: str, name: str, *arguments: int) -> int:
        assert dtype == "int32" and self.device is not None and self.cluster is not None
        return self.device.value(name, arguments, self.cluster.place)

    # ---- what threads do ----
    def call_extern(self, _: str, name: str, *arguments: Any) -> None:
        if name == AWAIT:
            (address, _), parity = arguments
            return self.mbarrier_wait_parity(self.group.block.shared.barrier_at(address), parity)
        assert self.device is not None and self.cluster is not None
        group, cluster = self.group, self.cluster
        group.waited |= name == WAIT
        passed = [_passed(a) for a in arguments]
        self.device.call(name, passed, group.size, cluster.place, group.block.rank)
        self.crew.pause()

    def clear(self, tile: RegisterTile) -> None:
        tile.registers[:] = 0

    def copy(self, source: Element | RegisterTile, target: Buffer | RegisterTile) -> None:
        """From memory to memory; or from registers to those of another dtype, each thread its own."""
        if isinstance(source, RegisterTile) and isinstance(target, RegisterTile):
            assert source.shape == target.shape
            if source.place is None:  # no product yet: registers as they are, wherever their elements will be
                source.alike.append(target)
                target.registers[:] = source.registers
                return
            target.place = source.place
            target.fill(source.matrix())
            return
        assert isinstance(source, Element) and isinstance(target, Buffer) and source.buffer.dtype == target.dtype
        target.data[:] = source.buffer.window(source.start, target.shape).ravel()

    def tma_copy(self, source: Element, target: Element, barrier: Barrier, cluster_mask: int | None = None) -> None:
        """One thread's: expects the bytes in its own block; with a mask, rank 0 loads for the blocks of the mask, others for themselves."""
        assert self.cluster is not None
        self._may_touch(source.buffer)
        elements = prod(target.extents)
        if prod(source.extents) != elements:
            raise IllegalAccess(f"a region of {source.extents} is copied to one of {target.extents}")
        if target.buffer.offset(target.start) * target.buffer.data.itemsize % TMA_ALIGNMENT:
            raise IllegalAccess(f"a copy to {target.start} of {target.buffer.shape} is not aligned to {TMA_ALIGNMENT} bytes")
        barrier.change(0, elements * target.buffer.data.itemsize)
        rank, mask = self.group.block.rank, cluster_mask or 0
        blocks = [block for block in self.cluster.blocks if mask >> block.rank & 1] if rank == 0 and mask else [self.group.block]
        if rank == 0 or not mask >> rank & 1:
            self.crew.events += issue(source, [(self._of(block, target), self._of(block, barrier)) for block in blocks])
        self.crew.pause()

    def _of(self, block: Block, thing: Any) -> Any:
        """The element or barrier that has the place of ``thing`` in another block's shared memory."""
        holder = thing.array if isinstance(thing, Barrier) else thing.buffer
        other = block.shared.taken[next(i for i, taken in enumerate(self.group.block.shared.taken) if taken is holder)]
        return other[thing.index if isinstance(thing, Barrier) else thing.indices]

    def barrier_arrive(self, barrier: Barrier) -> None:
        barrier.change(self.group.size, 0)
        self.crew.pause()

    def mbarrier_wait_parity(self, barrier: Barrier, parity: int) -> None:
        self.crew.pause(barrier.passed(parity), f"{barrier}, parity {parity}")

    def cluster_arrive_relaxed(self) -> None:
        assert self.cluster is not None
        self.group.meeting = self.cluster.synced // self.cluster.groups
        self.cluster.synced += 1

    def cluster_wait(self) -> None:
        cluster, mine = self.cluster, self.group.meeting
        assert cluster is not None
        self.crew.pause(lambda: cluster.synced >= (mine + 1) * cluster.groups, "the cluster")

    def cluster_sync(self) -> None:
        self.cluster_arrive_relaxed()
        self.cluster_wait()

    def gemm(
        self, a: RegisterTile, b: Buffer | Element, c: RegisterTile, transpose_B: bool, policy: str, clear_accum: bool = False
    ) -> None:
        """c += a @ b^T in fp32, of int8 in int32. wgmma holds rows as four warps of mma.sync do, each of which has 16 of a slab's 64."""
        assert transpose_B and policy == "FullRow"
        self._multiply(a, b, c, clear_accum)

    def _multiply(self, a: RegisterTile, b: Buffer | Element, c: RegisterTile, clear_accum: bool) -> None:
        a.plays(wgmma_a, 32 if a.registers.itemsize == 1 else 16)
        c.plays(wgmma_c, c.shape[1])
        with np.errstate(invalid="ignore", over="ignore"):
            if a.dtype == FP8:
                c.fill(e4m3_product(a.matrix(), b.numbers(), np.zeros(c.shape) if clear_accum else c.matrix()))
                return
            product = a.matrix() @ b.numbers().T
            c.fill(product if clear_accum else c.matrix() + product)

    def wgmma_gemm(
        self, a: RegisterTile, b: Buffer | Element, c: RegisterTile, transpose_B: bool, policy: str, clear_accum: bool = False
    ) -> None:
        """``gemm``, as late as the program allows: with what its operands hold when it is waited for."""
        self.group.products.append(lambda: self._multiply(a, b, c, clear_accum))
        assert transpose_B and policy == "FullRow"
        self.crew.pause()

    def wait_wgmma(self, left: int) -> None:
        while len(self.group.products) > left:
            self.group.products.pop(0)()
        self.crew.pause()


def e4m3_product(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """c + a @ b^T, fp32 numbers, as tensor cores sum e4m3: of 32 products and the sum so far each keeps the bits down to 2^-13 of the
    largest one's highest (Hopper; DeepSeek-V3, section 3.3.2)."""
    total = c.astype(np.float32)  # exact here: 33 terms of at most 2^14 quanta each, and powers of two
    for k in range(0, a.shape[1], 32):
        terms = np.concatenate([a[:, None, k : k + 32] * b[None, :, k : k + 32], total[..., None]], axis=-1, dtype=np.float32)
        exponent = np.frexp(np.maximum(terms.max(-1), -terms.min(-1)))[1] - 1 - 13
        terms *= np.ldexp(np.float32(1), -exponent)[..., None]
        total = np.ldexp(np.trunc(terms, out=terms).sum(-1), exponent)
    return total


def _passed(argument: Any) -> Argument:
    """What the threads of a call get: addresses as they are, a number of each thread's own, floats as their bits."""
    if isinstance(argument, ThreadIndex):
        return argument.low - argument.offset, 1
    if isinstance(argument, np.floating):
        return int(np.float32(argument).view(np.uint32)), 0
    return argument if isinstance(argument, tuple) else (int(argument), 0)
