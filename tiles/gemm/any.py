"""``gemm_any``: the GEMM on bit planes and codebooks (Any-Precision LLM), built for few rows of x.

    y[m, n] = sum_k x[m, k] * codebook[n, q[n, k]] (* token_scales[m]) (+ bias[n]) (+ residual[m, n])

A block computes ``block_n`` output channels for ``block_m`` rows of x. It lays out its channels'
tables in shared memory while the first planes are on their way; then its ``num_warps`` warps take
the steps of k (256 deep) in turn. A warp has the planes of its next ``num_stages`` steps in
registers or on their way there: of the planes only those that the format has, and shared memory is
left to tables, so that more warps find room. Its x passes through a ring of as many slots.
``split_k`` blocks share an output tile, through a workspace. Every sum has a fixed order.

Weights reach the tensor cores as numbers of the 16-bit type, looked up in the operand's registers
(``device/codecs/any_product.cuh``, in CUDA because what a lane holds there is the instruction's
concern): eight rows of x cost what one costs, and sums are fp32. For every further ``block_m`` rows
the planes are read and looked up again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...layouts.planes import CUDA_TILE_N
from ...schedules.gemm import any as rules
from ...schedules.gemm.workload import Workload
from ...schedules.schedule import Schedule
from ...schedules.target import Target
from ..compiler.headers import TYPES, device_source
from ..program import TileProgram
from .operands import Operands
from .stream_sums import sum_macros

HEADERS = (
    "ptx/instructions.cuh", "codecs/dequant.cuh", "codecs/any_product.cuh", "store/split_k.cuh", "store/sums.cuh", "store/gate.cuh",
)  # fmt: skip

# As of stream.py, for the same reasons: warps loop for different lengths.
PASS_CONFIGS = {
    "tl.disable_thread_storage_sync": True,
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_shared_memory_reuse": True,
}


@dataclass(frozen=True, slots=True)
class Leaves:
    """The CUDA functions of a kernel, all of them in ``source``.

    ``product`` is the struct that multiplies, ``request`` the function that asks for a step's
    planes, ``table`` the bytes of the tables of 16 rows (0: as the rule has them), ``keeps`` whether codebooks lie in registers
    too. ``place(row, step)`` gives indices of plane 0: where the planes of a step begin, of the
    block whose first row is ``row``.
    """

    source: str
    product: str
    request: str
    table: int
    keeps: bool
    place: Callable[[Any, Any], tuple[Any, Any, Any]]


def build(workload: Workload, schedule: Schedule, target: Target) -> Any:
    """The TileLang PrimFunc of one (workload, schedule); parameters as in ``wgmma.build``, m
    dynamic, with planes as the weight and codebooks as scales."""
    w, s = workload, schedule
    leaves = Leaves(
        device_source(HEADERS), f"tilebit::AnyProduct<{product_arguments(w, s)}, {rules.copies(w, s, target)}>", request_of(w, s), 0,
        rules.keeps_codebooks(w, s), place,
    )  # fmt: skip
    return build_with(leaves, w, s, target)


def product_arguments(workload: Workload, schedule: Schedule) -> str:
    """Of the templates that multiply."""
    return f"{TYPES[workload.dtype]}, {workload.format.bits}, {schedule.block_n // 16}, {schedule.block_m}"


def request_of(workload: Workload, schedule: Schedule) -> str:
    """The function that asks for a step's planes, which lie where ``place`` says."""
    return f"tilebit::request_planes<{workload.format.bits}, {schedule.block_n // 16}>"


def place(row: Any, step: Any) -> tuple[Any, Any, Any]:
    """``Leaves.place`` of planes as ``layouts/planes.py`` has them."""
    return row // CUDA_TILE_N, step, row % CUDA_TILE_N * 8


def build_with(leaves: Leaves, workload: Workload, schedule: Schedule, target: Target) -> Any:
    """``build`` with other CUDA functions."""
    import tilelang.language as T

    p, s, dtype, bits = Operands(workload, schedule), schedule, workload.dtype, workload.format.bits
    splits, stages, warps, threads = s.split_k, s.num_stages, s.num_warps, s.num_warps * 32
    row_tiles, column_tiles = s.block_n // 16, max(1, s.block_m // 8)
    steps, k_tiles = rules.steps(workload), rules.steps(workload)
    step_words = rules.plane_bytes(workload, s) // (32 * 4)  # of a lane
    slot_words, rings_at = rules.slot_bytes(s) // 4, rules.tables_bytes(workload, s, target, leaves.table) // 4
    product = leaves.product
    whole = p.kx % rules.STEP_K == 0  # no step reaches past k
    end_of_tile, sum_pitch = sum_macros(workload, s), s.block_n + rules.PADDED

    m, words = T.dynamic("m"), T.dynamic("words")
    TokenScales, Bias, Residual = p.tensors(T, target.arch, "token_scales", "bias", "residual", m=m)
    Workspace = T.Tensor((words,), "int32") if splits > 1 else None

    def x_at(shared, warp, slot):
        return T.address_of(shared[rings_at + (warp * stages + slot) * slot_words])

    def planes_at(weight, row, step):
        return T.address_of(weight[(0, *leaves.place(row, step))])

    def held(planes, slot, access):
        return planes.access_ptr(access, offset=slot * step_words, extent=step_words)

    @T.macro
    def request(weight, x, shared, planes, warp, lane, bx, by, step, slot):
        """What a step reads. Rows of x past the last are left as they are (their columns of y are not
        stored), k past the last is zero, as are the weights' codes there."""
        T.call_extern(
            "handle", leaves.request, held(planes, slot, "w"), planes_at(weight, bx * s.block_n, step),
            T.int64(p.n_tiles * k_tiles * 2048), lane,
        )  # fmt: skip
        T.call_extern(
            "handle", f"{product}::copy_x", x_at(shared, warp, slot), T.address_of(x[by * s.block_m, step * rules.STEP_K]),
            p.kx * 2, x.shape[0] - by * s.block_m, (by + 1) * s.block_m <= x.shape[0],
            rules.STEP_K if whole else p.kx - step * rules.STEP_K, lane,
        )  # fmt: skip

    @T.prim_func
    def main(
        x: T.Tensor((m, p.kx), dtype),
        weight: T.Tensor((bits, p.n_tiles, k_tiles, 512), "int32"),
        scales: T.Tensor((p.n_pad, 1 << bits), dtype),
        token_scales: TokenScales,
        bias: Bias,
        residual: Residual,
        workspace: Workspace,
        y: T.Tensor((m, p.columns), dtype),
    ):
        with T.Kernel(p.n_pad // s.block_n, T.ceildiv(m, s.block_m), splits, threads=threads) as (bx, by, bz):
            T.import_source(leaves.source)
            T.annotate_min_blocks_per_sm(s.min_blocks)
            shared = T.alloc_shared((rules.shared_bytes(workload, s, target, leaves.table) // 4,), "float32")  # tables and rings, then sums
            sums = T.alloc_local((row_tiles * column_tiles * 4,), "float32")
            planes = T.alloc_local((stages * step_words,), "uint32")
            kept = T.alloc_local((row_tiles * 8,), "uint32")  # codebooks of which some codes are looked up here
            thread = T.get_thread_binding()
            after = p.after((), token_scales=token_scales, bias=bias, residual=residual)
            warp, lane = T.shfl_sync(thread // 32, 0), thread % 32
            step, end = T.alloc_var("int32", init=bz * steps // splits + warp), (bz + 1) * steps // splits

            for i in T.unroll(row_tiles * column_tiles * 4):
                sums[i] = 0.0
            for slot in T.unroll(stages):
                if step + slot * warps < end:
                    request(weight, x, shared, planes, warp, lane, bx, by, step + slot * warps, slot)
                T.ptx_commit_group()
            T.call_extern(
                "handle", f"{product}::fill_tables<{threads}>", T.address_of(shared[0]), T.address_of(scales[bx * s.block_n, 0]), thread
            )
            if leaves.keeps:
                T.call_extern("handle", f"{product}::keep_codebooks", kept.access_ptr("w"), T.address_of(scales[bx * s.block_n, 0]), lane)
            T.sync_threads()

            while step < end:  # the warp's share of the block's steps
                for slot in T.unroll(stages):  # registers have no index: each slot's are named
                    if step < end:
                        T.ptx_wait_group(stages - 1)
                        T.sync_warp()
                        T.call_extern(
                            "handle", f"{product}::multiply", held(planes, slot, "r"), x_at(shared, warp, slot), T.address_of(shared[0]),
                            kept.access_ptr("r"), sums.access_ptr("rw"), lane,
                        )  # fmt: skip
                        T.sync_warp()  # all lanes have read the slot
                        if step + stages * warps < end:
                            request(weight, x, shared, planes, warp, lane, bx, by, step + stages * warps, slot)
                        T.ptx_commit_group()
                        step = step + warps

            T.sync_threads()  # tables and rings become sums [warp][column][sum_pitch]
            T.call_extern(
                "handle", f"tilebit::store_sums<{row_tiles}, {s.block_m}, {sum_pitch}>", sums.access_ptr("r"),
                T.address_of(shared[warp * (s.block_m * sum_pitch)]), lane,
            )  # fmt: skip
            T.sync_threads()
            if splits == 1:
                end_of_tile.store_alone(shared, y, after, bx, by, thread)
            else:
                end_of_tile.store_by_ticket(shared, workspace, y, after, bx, by, bz, thread)

    return main


PROGRAM = TileProgram(name=rules.PROGRAM, compiler="tilelang", build=build, headers=HEADERS, pass_configs=PASS_CONFIGS)
