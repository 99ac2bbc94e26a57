"""``gemm_stream`` and ``gemm_stream_bulk``: the packed-weight GEMM for few rows of x, built for
bandwidth.

    y[m, n] = sum_k x[m, k] * w[n, k] (* row_scales[n]) (+ bias[n]) (+ residual[m, n]),   w = (number of q - z) * s

At m <= 16 the weight's bytes decide. A block computes ``block_n`` output channels for ``block_m``
rows of x; its ``num_warps`` warps take the steps of k (``block_k`` deep) in turn, and each streams
the packed lines of its own rows through a ring of ``num_stages`` slots that no other warp touches:
nobody waits for anybody before the last product. A warp holds 64, 80, 112, 48, 32 or 16 rows, the
first of these that divides block_n; where that is not all of them, neighbouring warps share the
slots of x. Where block_n does not divide the rows, the last tile ends with the last of them.
``split_k`` blocks share an output tile. Codes go to the tensor cores as they are
(``codecs/raw.cuh``): a mask makes a 4-bit code an fp16 subnormal, and scale and zero point are
applied to the fp32 sums once a group. Of int8 x the codes become int8 operands
(``codecs/byte_product.cuh``) and sums stay int32 until all parts are added up; where groups of x
have scales, a step is a group or a part of one, and its int32 sums are scaled and added to fp32
ones (``codecs/group_product.cuh``); of e4m3 x e4m3 operands, whose sums leave the tensor cores step
by step. Every sum has a fixed order. There is no path for CUDA cores: in fp32 a word of eight codes
would take them eight conversions and eight FMAs where the tensor core takes one instruction, seven
of whose eight columns are idle at m = 1 at no cost (fp16 sums would do with four FMAs, and lose
what subnormal codes stand for).

Rows of the weight are stored in order, or by an index (``channels``), two added up where it says so.

Every block reads all of x that its share of k needs: a norm of x costs a multiplication and two FMAs
for each register of x, and its factor of a row, of the squares of all shares, is found where sums
are added up (``codecs/row_norm.cuh``).

``gemm_stream_bulk`` (sm_90a): weights by 1-D bulk copies, the blocks of a cluster send each other
their shares of k, and weights are requested before the wait of a dependent launch. ``gemm_stream``
(sm_80 and later): cp.async, and a workspace.

The grid, the loop, its rings (``stream_ring.py``) and the sums at its end (``stream_sums.py``) are
Python. What a thread computes is CUDA, in ``device/codecs/*_product.cuh``: operands are exchanged
between a warp's lanes by ``mma.sync`` and ``ldmatrix``. So are copies of several rows: as TIR every
row's address is found anew in every step (m = 16: 546 instructions, so 446).
"""

from typing import Any

from ...layouts.formats import PER_CHANNEL
from ...schedules.gemm import stream as rules
from ...schedules.gemm.codecs import CONVERSIONS, codec_of
from ...schedules.gemm.workload import Workload
from ...schedules.schedule import Schedule
from ...schedules.target import Target
from ..compiler.headers import TYPES, device_source
from ..program import TileProgram
from .operands import Operands
from .stream_ring import ring_macros
from .stream_sums import sum_macros

HEADERS = (
    "ptx/instructions.cuh", "codecs/dequant.cuh", "codecs/raw.cuh", "codecs/row_norm.cuh", "codecs/raw_product.cuh",
    "codecs/byte_product.cuh", "codecs/group_sums.cuh", "codecs/group_product.cuh",
    "pipeline/copies.cuh", "pipeline/dependent.cuh", "store/split_k.cuh", "store/sums.cuh",
    "store/gate.cuh", "activations/inverse_root.cuh",
)  # fmt: skip

# Warps loop for different lengths: nothing may be moved, shared or guarded behind the program's
# back.
PASS_CONFIGS = {
    "tl.disable_thread_storage_sync": True,  # a barrier of the block would stand in the loops of its warps
    "tl.disable_safe_memory_legalize": True,  # a predicate on every copy, all of which are inside by construction
    "tl.disable_shared_memory_reuse": True,
}


def product_type(workload: Workload, schedule: Schedule) -> str:
    """``tilebit::RawProduct`` with its template arguments (``device/codecs/raw_product.cuh``), or
    ``tilebit::ByteProduct`` (``byte_product.cuh``) or ``tilebit::GroupProduct``
    (``group_product.cuh``)."""
    f, s = workload.format, schedule
    if f.x_grouped:
        how = codec_of(f).conversion
        of_groups = (
            TYPES[workload.dtype], codec_of(f).device(f), rules.warp_rows(s) // 16, s.block_m, s.block_k * f.bits // 256,
            *(() if how == CONVERSIONS[0] else (f"tilebit::Conversion::{how}",)),
        )  # fmt: skip
        return f"tilebit::GroupProduct<{', '.join(map(str, of_groups))}>"
    if f.x:
        k32_steps = 0 if f.group_size == PER_CHANNEL else f.group_size // 32
        floats = () if f.integer_sums else ("float", TYPES[f.parameter_dtype(workload.dtype)])
        of_bytes = (codec_of(f).device(f), k32_steps, rules.warp_rows(s) // 16, s.block_m, s.block_k * f.bits // 256, *floats)
        return f"tilebit::ByteProduct<{', '.join(map(str, of_bytes))}>"
    arguments = (
        TYPES[workload.dtype], codec_of(f).device(f), str(f.symmetric).lower(), 0 if f.group_size == PER_CHANNEL else f.group_size // 16,
        rules.warp_rows(s) // 16, s.block_m, s.block_k * f.bits // 256,
    )  # fmt: skip
    return f"tilebit::RawProduct<{', '.join(map(str, arguments))}>"


def warps_apart(schedule: Schedule) -> bool:
    """Whether warps that share x may be most of a step apart: each says when it has read x, where
    else they meet at a step's end. It pays where many or tall warps share x for 16 columns (in
    alternation, H200: 57344 x 8192 2.6 to 5.8 %, 28672 x 4096 2.3 %) and costs 1 % elsewhere."""
    s = schedule
    return s.program == rules.BULK and rules.warps_n(s) > 1 and s.block_m > 8 and s.block_n >= 192


def build(workload: Workload, schedule: Schedule, target: Target) -> Any:
    """The TileLang PrimFunc of one (workload, schedule); parameters as in ``wgmma.build``, m
    dynamic."""
    import tilelang.language as T

    p, s, dtype, bulk = Operands(workload, schedule), schedule, workload.dtype, schedule.program == rules.BULK
    of_bytes = bool(workload.format.x)
    zero = 0 if p.integer_sums else 0.0
    splits, stages, rings, warps_n, rows = s.split_k, s.num_stages, rules.rings(s), rules.warps_n(s), rules.warp_rows(s)
    threads, apart = s.num_warps * 32, warps_apart(s)
    row_tiles, column_tiles = rows // 16, max(1, s.block_m // 8)
    cluster = [1, 1, splits] if bulk and splits > 1 else None
    product, sum_pitch = product_type(workload, s), rules.sum_pitch(s)
    store_sums = f"tilebit::store_sums<{row_tiles}, {s.block_m}, {sum_pitch}>"
    normed, store_squares = workload.norm, f"tilebit::store_squares<{s.block_m}, {sum_pitch}>"
    ring, end_of_tile = ring_macros(workload, s), sum_macros(workload, s)
    shifted = of_bytes and p.asymmetric and not p.grouped  # zero points of channels, which no slot holds

    m, words = T.dynamic("m"), T.dynamic("words")
    Zeros, RowScales, TokenScales, Bias, Residual, Channels = p.tensors(
        T, target.arch, "zeros", "row_scales", "token_scales", "bias", "residual", "channels", m=m
    )
    NormWeight = T.Tensor((p.kx,), dtype) if normed else None
    Workspace = T.Tensor((words,), "int32") if splits > 1 and not bulk else None

    @T.macro
    def open_rings(shared, own):
        """Barriers of the slots: one is filled when its weights' bytes, which one lane announces,
        and all lanes' copies have come."""
        if own.member == 0 and own.lane < stages:
            T.call_extern("handle", "tilebit::mbarrier_init", ring.filled(shared, own, own.lane), 33 * warps_n)
            if apart:
                T.call_extern("handle", "tilebit::mbarrier_init", ring.x_read(shared, own, own.lane), warps_n)
        T.call_extern("handle", "tilebit::fence_barriers")
        ring.meet(own)

    @T.macro
    def fill_rings(x, norm_weight, weight, scales, zeros, token_scales, shared, own, step, end):
        """Requests the first ``num_stages`` steps: weights, which no earlier kernel writes, before
        that one has ended."""
        for stage in T.unroll(stages):
            if step + stage * rings < end:
                ring.request_weights(weight, shared, own, step + stage * rings, stage)
                ring.request_parameters(scales, zeros, shared, own, step + stage * rings, stage)
        if bulk:
            T.call_extern("handle", "tilebit::wait_for_predecessor")
        for stage in T.unroll(stages):
            if step + stage * rings < end:
                ring.request_x(x, norm_weight, token_scales, shared, own, step + stage * rings, stage)
            if not bulk:
                T.ptx_commit_group()

    @T.macro
    def leave_squares(shared, own, squares):
        """The ring's sums of squares of x, behind its sums of each column: its warps have all of them."""
        if own.member == 0:
            at = own.ring * (s.block_m * sum_pitch) + s.block_n
            T.call_extern("handle", store_squares, squares.access_ptr("r"), T.address_of(shared[at]), own.lane)

    @T.macro
    def await_slot(shared, own, slot, phase):
        if bulk:
            T.call_extern("handle", "tilebit::mbarrier_wait", ring.filled(shared, own, slot), phase)
        else:
            T.ptx_wait_group(stages - 1)
            ring.meet(own)

    @T.macro
    def await_readers(shared, own, slot, phase):
        """All that share the slot have read its x."""
        if apart:
            T.call_extern("handle", "tilebit::mbarrier_wait", ring.x_read(shared, own, slot), phase)
        else:
            ring.meet(own)

    @T.prim_func
    def main(
        x: T.Tensor((m, p.kx), workload.x_dtype),
        weight: T.Tensor((p.n_tiles, p.k_tiles, 512), "int32"),
        scales: T.Tensor((p.groups, p.n_pad), p.parameter_dtype),
        zeros: Zeros,
        row_scales: RowScales,
        token_scales: TokenScales,
        bias: Bias,
        residual: Residual,
        channels: Channels,
        norm_weight: NormWeight,
        workspace: Workspace,
        y: T.Tensor((m, p.columns), dtype),
    ):
        with T.Kernel(-(-p.n_pad // s.block_n), T.ceildiv(m, s.block_m), splits, threads=threads, cluster_dims=cluster) as (bx, by, bz):
            T.import_source(device_source(tuple(dict.fromkeys((*HEADERS, *codec_of(workload.format).headers)))))
            T.annotate_min_blocks_per_sm(s.min_blocks)
            shared = T.alloc_shared((rules.shared_words(workload, s, target),), p.sums_dtype)  # rings and barriers, then sums
            sums = T.alloc_local((row_tiles * column_tiles * 4,), p.sums_dtype)
            products = T.alloc_local((row_tiles * column_tiles * 4,), "float32") if not of_bytes else None
            x_sums = T.alloc_local((column_tiles * 4,), "float32") if not of_bytes else None
            thread = T.get_thread_binding()
            squares = T.alloc_local((column_tiles,), "float32") if normed else None
            # Of 16-bit x per-channel scales need its sum: ``RawProduct::finish``.
            after = p.after(
                () if of_bytes else ("scales",), scales=scales, row_scales=row_scales, token_scales=token_scales, bias=bias,
                residual=residual, channels=channels,
            )  # fmt: skip
            own = ring.own(thread, bx, by)
            step, end = T.alloc_var("int32", init=bz * p.steps // splits + own.ring), (bz + 1) * p.steps // splits
            slot, phase = T.alloc_var("int32", init=0), T.alloc_var("int32", init=0)  # phase: how often the slot was read, modulo 2

            if bulk:
                if splits > 1:
                    end_of_tile.await_parts(shared, thread)
                open_rings(shared, own)
                T.call_extern("handle", "tilebit::launch_dependents")
            for i in T.unroll(row_tiles * column_tiles * 4):
                sums[i] = zero
                if not of_bytes:
                    products[i] = 0.0
            if not of_bytes:
                for i in T.unroll(column_tiles * 4):
                    x_sums[i] = 0.0
            if normed:
                for i in T.unroll(column_tiles):
                    squares[i] = 0.0
            fill_rings(x, norm_weight, weight, scales, zeros, token_scales, shared, own, step, end)

            while step < end:  # the ring's share of the block's steps
                await_slot(shared, own, slot, phase)
                T.call_extern(
                    "handle", f"{product}::multiply<{str(apart).lower()}{', true' if normed else ''}>", ring.x_at(shared, own, slot),
                    ring.weights_at(shared, own, slot),
                    T.address_of(zeros[0, own.row]) if shifted else ring.parameters_at(shared, own, slot),
                    *(kept.access_ptr("rw") for kept in (sums, products, x_sums) if kept is not None), own.lane,
                    ring.x_read(shared, own, slot), *((ring.norm_at(shared, own, slot), squares.access_ptr("rw")) if normed else ()),
                )  # fmt: skip
                T.sync_warp()  # all lanes have read the weights, which are the warp's own
                if step + stages * rings < end:
                    ring.request_weights(weight, shared, own, step + stages * rings, slot)
                await_readers(shared, own, slot, phase)
                if step + stages * rings < end:
                    ring.request_parameters(scales, zeros, shared, own, step + stages * rings, slot)
                    ring.request_x(x, norm_weight, token_scales, shared, own, step + stages * rings, slot)
                if not bulk:
                    T.ptx_commit_group()
                step = step + rings
                phase = T.if_then_else(slot == stages - 1, phase ^ 1, phase)
                slot = T.if_then_else(slot == stages - 1, 0, slot + 1)
            if not of_bytes:
                T.call_extern(
                    "handle", f"{product}::finish", sums.access_ptr("rw"), products.access_ptr("rw"), x_sums.access_ptr("rw"),
                    T.address_of(scales[0, own.row]), T.address_of(zeros[0, own.row]) if p.asymmetric else T.address_of(scales[0, own.row]),
                    own.lane,
                )  # fmt: skip

            T.sync_threads()  # the rings become sums [ring][column][sum_pitch]
            own_sums = thread // 32 // warps_n * (s.block_m * sum_pitch) + thread // 32 % warps_n * rows
            T.call_extern("handle", store_sums, sums.access_ptr("r"), T.address_of(shared[own_sums]), own.lane)
            if normed:
                leave_squares(shared, own, squares)
            T.sync_threads()
            if splits == 1:
                end_of_tile.store_alone(shared, y, after, bx, by, thread)
            elif bulk:
                end_of_tile.store_by_cluster(shared, y, after, bx, by, bz, thread)
            else:
                end_of_tile.store_by_ticket(shared, workspace, y, after, bx, by, bz, thread)

    return main


def stream_program(name: str) -> TileProgram:
    """The tile program called ``name``, one of the two."""
    return TileProgram(
        name=name,
        compiler="tilelang",
        build=build,
        headers=HEADERS,
        pass_configs=PASS_CONFIGS,
        newest_arch="sm_89" if name == rules.ASYNC else None,
    )


PROGRAM = stream_program(rules.ASYNC)
