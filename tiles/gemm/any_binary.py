"""``gemm_any_binary``: the GEMM on bit planes and codebooks of 2 to 4 bits for a row of x, on binary
tensor cores.

    y[m, n] = sum_k x[m, k] * codebook[n, q[n, k]] (* token_scales[m]) (+ bias[n]) (+ residual[m, n])

The paper (Any-Precision LLM, 5.3) makes codes of planes, looks numbers up and multiplies these. Here
planes are multiplied as they lie: a codebook is a sum over sets of planes, and of each set it is
counted for each bit of x at how many k both have a one (``device/codecs/any_binary.cuh``, in CUDA
because what a lane holds is the instruction's concern). One instruction counts 16 rows, 256 k and
eight bits of x.

An x is rounded to 2^-22 of the largest of its row. Where a row of x has a number that is not finite,
its row of y is not a number. Every sum has a fixed order.

A block of the persistent grid turns its row of x into bits, once, while the first planes are on
their way to its warps' rings; then it takes tile after tile of ``block_n`` output channels. A warp
has 16 channels and a share of k, and adds nothing to other warps' sums but at the end of a tile; its
ring goes on to the next tile.
"""

from typing import Any

from ...layouts.planes import CUDA_TILE_N
from ...schedules.gemm import any_binary as rules
from ...schedules.gemm.stream import sum_pitch
from ...schedules.gemm.workload import Workload
from ...schedules.schedule import Schedule
from ...schedules.target import Target
from ..compiler.headers import TYPES, device_source
from ..program import TileProgram
from .any import PASS_CONFIGS
from .operands import Operands
from .stream_sums import sum_macros

ROWS_OF = CUDA_TILE_N // rules.ROWS  # pieces of 16 rows that follow each other in a tile of planes
HEADERS = (
    "ptx/instructions.cuh", "ptx/lanes.cuh", "codecs/bit_matrix.cuh", "codecs/any_binary.cuh", "store/split_k.cuh", "store/gate.cuh",
)  # fmt: skip


class From:
    """A buffer as seen from its number ``first`` on."""

    def __init__(self, buffer: Any, first: Any) -> None:
        self.buffer, self.first = buffer, first

    def __getitem__(self, at: Any) -> Any:
        return self.buffer[self.first + at]


def build(workload: Workload, schedule: Schedule, target: Target) -> Any:
    """The TileLang PrimFunc of one (workload, schedule); parameters as in ``any.build``."""
    import tilelang.language as T

    p, s, dtype, bits = Operands(workload, schedule), schedule, workload.dtype, workload.format.bits
    stages, warps, threads = s.num_stages, s.num_warps, s.num_warps * 32
    steps, shares, groups, tiles = rules.steps(workload), rules.shares(s), rules.groups(s), rules.block_tiles(workload, s)
    grid, turns = rules.blocks(workload, s, target), -(-steps // shares)  # turns: steps of a warp for a tile
    sets, sums_words, slot_bytes = (1 << bits) - 1, rules.sums_bytes(s) // 4, rules.slot_bytes(bits)
    product = f"tilebit::BinaryProduct<{TYPES[dtype]}, {bits}>"
    end_of_tile = sum_macros(workload, s, rings=shares)

    m = T.dynamic("m")
    TokenScales, Bias, Residual = p.tensors(T, target.arch, "token_scales", "bias", "residual", m=m)

    def x_at(shared, step, byte=0):
        return T.address_of(shared[(rules.x_at(s) + step * rules.STEP_OF_X + byte) // 4])

    def agreed_at(shared, word=0):
        return T.address_of(shared[2 * sums_words + word])

    def rings_at(shared):
        return T.address_of(shared[rules.rings_at(workload, s) // 4])

    def after_slot(warp, slot):
        """The slot of a warp's ring that follows ``slot``; slots are bytes from where rings begin."""
        return T.if_then_else(slot == (warp * stages + stages - 1) * slot_bytes, warp * stages * slot_bytes, slot + slot_bytes)

    def place(warp, lane, tile):
        """Where a lane's first planes of a tile are, in bytes."""
        rows = tile * groups + warp // shares
        return T.cast(rows // ROWS_OF * steps + warp % shares, "int64") * 2048 + T.cast(rows % ROWS_OF * 512 + lane * 16, "int64")

    @T.macro
    def request(weight, scales, shared, warp, lane, asked, at):
        """The planes of a warp's next step, with a tile's last its codebooks. ``asked``: tile, turn and slot that come next."""
        if asked[0] < tiles:
            if asked[1] * shares + warp % shares < steps:
                T.call_extern(
                    "handle", f"tilebit::copy_planes<{bits}>", rings_at(shared), asked[2], T.address_of(weight[0, 0, 0, 0]), at[0],
                    T.int64(p.n_tiles * steps * 2048), lane,
                )  # fmt: skip
            asked[1] = asked[1] + 1
            at[0] = at[0] + shares * 2048
            if asked[1] == turns:
                T.call_extern(
                    "handle", f"tilebit::copy_codebooks<{bits}>", rings_at(shared), asked[2], T.address_of(scales[0, 0]),
                    asked[0] * groups + warp // shares, lane,
                )  # fmt: skip
                asked[0] = asked[0] + grid
                asked[1] = 0
                at[0] = place(warp, lane, asked[0])
        asked[2] = after_slot(warp, asked[2])
        T.ptx_commit_group()

    @T.macro
    def bring_x(x, shared, warp, lane, m_row):
        for i in T.serial(T.ceildiv(steps, warps)):
            step = i * warps + warp
            if step < steps:
                T.call_extern(
                    "handle", "tilebit::cp_async_16", x_at(shared, step, lane * 16), T.address_of(x[m_row, step * rules.STEP_K + lane * 8]),
                    step * rules.STEP_K + lane * 8 < p.kx,
                )  # fmt: skip
        T.ptx_commit_group()

    @T.macro
    def end(shared, counts, y, after, warp, lane, tile, m_row, thread, last, largest, total, first):
        """Of a tile, whose sums are numbers of ``shared`` from ``first`` on."""
        T.call_extern(
            "handle", f"{product}::finish", rings_at(shared), last, counts.access_ptr("r"),
            T.if_then_else(warp % shares == 0, total, T.float32(0)), T.call_extern("float32", f"tilebit::unit_of<{TYPES[dtype]}>", largest),
            T.address_of(shared[first + warp % shares * sum_pitch(s) + warp // shares * rules.ROWS]), lane,
        )  # fmt: skip
        T.sync_threads()  # sums of the tile after the next take this one's place, behind the next barrier
        end_of_tile.store_alone(From(shared, first), y, after, tile, m_row, thread)

    @T.prim_func
    def main(
        x: T.Tensor((m, p.kx), dtype),
        weight: T.Tensor((bits, p.n_tiles, steps, 512), "int32"),
        scales: T.Tensor((p.n_pad, 1 << bits), dtype),
        token_scales: TokenScales,
        bias: Bias,
        residual: Residual,
        workspace: None,
        y: T.Tensor((m, p.columns), dtype),
    ):
        with T.Kernel(grid, m, threads=threads) as (block, m_row):
            T.import_source(device_source(HEADERS))
            shared = T.alloc_shared((rules.shared_bytes(workload, s) // 4,), "float32")  # sums of two tiles, x, rings
            counts = T.alloc_local((sets * rules.BITS_OF_X // 8 * 4,), "int32")
            thread = T.get_thread_binding()
            after = p.after((), token_scales=token_scales, bias=bias, residual=residual)
            warp, lane = T.shfl_sync(thread // 32, 0), thread % 32
            largest, sum_of_x = T.alloc_var("uint32", init=0), T.alloc_var("int64", init=0)
            held = T.alloc_local((rules.held(bits),), "uint32")
            asked, at = T.alloc_local((3,), "int32"), T.alloc_local((1,), "int64")
            slot = T.alloc_var("int32", init=warp * stages * slot_bytes)

            bring_x(x, shared, warp, lane, m_row)
            asked[0], asked[1], asked[2] = block, 0, warp * stages * slot_bytes
            at[0] = place(warp, lane, block)
            for _ in T.unroll(stages - 1):
                request(weight, scales, shared, warp, lane, asked, at)
            T.ptx_wait_group(stages - 1)  # x is there: a lane reads what it asked for itself
            for i in T.serial(T.ceildiv(steps, warps)):
                if i * warps + warp < steps:
                    largest = T.call_extern("uint32", "tilebit::larger", largest, x_at(shared, i * warps + warp), lane)
            largest = T.call_extern("uint32", f"tilebit::largest_of_block<{warps}>", largest, agreed_at(shared), warp, lane)

            for i in T.serial(T.ceildiv(steps, warps)):
                if i * warps + warp < steps:
                    sum_of_x += T.call_extern("int32", f"tilebit::to_bits<{TYPES[dtype]}>", x_at(shared, i * warps + warp), largest, lane)
            T.call_extern("handle", "tilebit::tell_sum", T.cast(sum_of_x, "float32"), agreed_at(shared, warps), warp, lane)
            T.sync_threads()
            total = T.alloc_var("float32")
            total = T.call_extern("float32", f"tilebit::sum_of_block<{warps}>", agreed_at(shared, warps))

            for number in T.serial((tiles - block + grid - 1) // grid):
                tile = block + number * grid
                for turn in T.serial(turns):
                    T.ptx_wait_group(stages - 2)
                    T.sync_warp()  # all lanes' codebooks are there, and all have read the slot that is asked for next
                    if turn * shares + warp % shares < steps:
                        T.call_extern(
                            "handle", f"{product}::hold", rings_at(shared), slot, x_at(shared, 0),
                            (turn * shares + warp % shares) * rules.STEP_OF_X, held.access_ptr("w"), lane,
                        )  # fmt: skip
                    request(weight, scales, shared, warp, lane, asked, at)
                    if turn == 0:
                        T.call_extern("handle", f"{product}::count<true>", held.access_ptr("r"), counts.access_ptr("w"))
                    elif turn * shares + warp % shares < steps:
                        T.call_extern("handle", f"{product}::count<false>", held.access_ptr("r"), counts.access_ptr("rw"))
                    if turn < turns - 1:
                        slot = after_slot(warp, slot)
                end(shared, counts, y, after, warp, lane, tile, m_row, thread, slot, largest, total, number % 2 * sums_words)
                slot = after_slot(warp, slot)

    return main


PROGRAM = TileProgram(name=rules.PROGRAM, compiler="tilelang", build=build, headers=HEADERS, pass_configs=PASS_CONFIGS)
