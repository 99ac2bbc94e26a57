"""The rings of ``gemm_stream`` and ``gemm_stream_bulk``: where the parts of a slot lie, and what is
copied into them.

A slot holds what the ``warps_n`` warps of a ring multiply in one step: x, which they share, then
for each of them the packed weights of its own rows, their scales and their zero points. Warps copy
for themselves; of x each copies a share.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ...schedules.gemm import stream as rules
from ...schedules.gemm.workload import Workload
from ...schedules.schedule import Schedule
from .operands import Operands

CHUNK_BYTES = 16  # which one thread copies at a time


@dataclass(frozen=True, slots=True)
class Own:
    """What a thread of a kernel knows of itself (TIR expressions): its ``lane``, its ``ring`` and
    the number of its warp in it (``member``), that warp's first ``row`` of W and the block's first
    ``column`` of x; where its copies begin at step 0, from which a step is one multiplication away:
    of parameters in [groups, n_pad], of x in the block's rows, of x in a slot (bytes); and the
    cache policy of bulk copies.

    Found anew for every step, requests were 146 of a step's 711 instructions (5120 x 27648 at m =
    16: 28.6 us; found once, with copies by an elected lane and scales by ldmatrix, 26.6; H200).
    """

    lane: Any
    ring: Any
    member: Any
    row: Any
    column: Any
    parameter: Any
    x: Any
    x_byte: Any
    policy: Any


def ring_macros(workload: Workload, schedule: Schedule) -> SimpleNamespace:
    """Places in a block's shared memory, and macros that fill a slot of a ring.

    ``shared`` is the block's one buffer of 32-bit words. One, because TileLang starts buffers at
    any multiple of 16 bytes, and bulk copies to places off a line of 128 are slow (57344 x 8192 at
    m = 1: 64.7 us with weights 272 bytes into a slot, 58.5 at a line; H200).
    """
    import tilelang.language as T

    p, s, bulk = Operands(workload, schedule), schedule, schedule.program == rules.BULK
    stages, rings, warps_n, rows = s.num_stages, rules.rings(s), rules.warps_n(s), rules.warp_rows(s)
    slot_bytes, x_bytes, warp_bytes = rules.slot_bytes(workload, s), rules.x_bytes(workload, s), rules.warp_bytes(workload, s)
    weight_bytes, barriers_at = rules.weight_bytes(workload.format, s) // warps_n, rules.ring_bytes(workload, s) // 4
    zero_bytes = (1 if p.zero_dtype == "uint8" else 2) if p.asymmetric else 0  # of a zero point or offset
    scale_bytes = workload.format.group_bytes - zero_bytes
    x_chunk_k, chunk_rows = CHUNK_BYTES // workload.x_bytes, CHUNK_BYTES // scale_bytes
    x_chunks, x_pitch = s.block_k // x_chunk_k, rules.x_pitch(workload, s)
    x_rows = 32 * warps_n // x_chunks  # that the ring's warps copy in one pass
    copy_weights = f"tilebit::{'bulk' if bulk else 'async'}_copy_weights<{rows}, {p.records}>"
    copy_x, copy_norm = (f"tilebit::async_copy_rows<{count}, {x_rows}, {x_pitch}>" for count in (s.block_m, 1))
    whole = p.kx % s.block_k == 0  # no step reaches past k
    groups, row_chunks = rules.step_groups(workload.format, s), rows // chunk_rows
    scale_chunks = groups * row_chunks  # which those of zero points follow
    chunks = scale_chunks + groups * rows * zero_bytes // CHUNK_BYTES
    copy_token_scales = f"tilebit::copy_token_scales<{s.block_m}, {x_pitch}>"

    def x_at(shared, own, slot, byte=0):
        return T.address_of(shared[((own.ring * stages + slot) * slot_bytes + byte) // 4])

    def norm_at(shared, own, slot, byte=0):
        """Of the norm's weight, which follows the rows of x."""
        return x_at(shared, own, slot, s.block_m * x_pitch + byte)

    def weights_at(shared, own, slot, byte=0):
        return x_at(shared, own, slot, x_bytes + own.member * warp_bytes + byte)

    def parameters_at(shared, own, slot, byte=0):
        """Of the scales of the step's groups [groups, rows]; zero points follow."""
        return weights_at(shared, own, slot, weight_bytes + byte)

    def filled(shared, own, slot):
        """The barrier that counts what bulk copies and threads bring into a slot."""
        return T.address_of(shared[barriers_at + (own.ring * stages + slot) * 2])

    def x_read(shared, own, slot):
        """The barrier that counts the warps that have read the slot's x."""
        return T.address_of(shared[barriers_at + (rings * stages + own.ring * stages + slot) * 2])

    def parameter_at(row, chunk):
        """The first element of a step's chunk of scales or zero points, in [groups, n_pad]."""
        if not groups:
            return 0
        if p.x_grouped:  # one group; its zero points are half as large as scales
            return row + T.if_then_else(chunk < scale_chunks, chunk, (chunk - scale_chunks) * 2) * chunk_rows
        return chunk % scale_chunks // row_chunks * p.n_pad + row + chunk % row_chunks * chunk_rows

    def row_of(bx, row):
        """Of W, which is row ``row`` of the block's: with gates as the first half, of these and then of as
        many that they gate."""
        if not workload.gate_halves:
            return p.first_row(T, bx) + row
        half = s.block_n // 2
        return bx * half + row + T.if_then_else(row < half, 0, p.n // 2 - half)

    def variable(dtype, value):
        return T.alloc_var(dtype, init=value)[0]

    def kept(value):
        """A number that is found once: nvcc would find it anew in every step."""
        return variable("int32", T.call_extern("int32", "tilebit::fresh", value))

    def below(number, count):
        """A number below ``count``, found once and written so that TIR knows it: the rest of a
        division by 12 of what it knows nothing of is one of 64 bits."""
        return variable("int32", number) & ((1 << (count - 1).bit_length()) - 1) if count > 1 else 0

    def own(thread, bx, by):
        warp = below(T.shfl_sync(thread // 32, 0), s.num_warps)  # so nvcc knows that a warp has one
        ring, member = below(warp // warps_n, rings), below(warp % warps_n, warps_n)
        lane, row = kept(thread % 32), kept(row_of(bx, member * rows))
        x_row, x_chunk = (member * 32 + lane) // x_chunks, lane % x_chunks
        return Own(
            lane, ring, member, row, by * s.block_m, kept(parameter_at(row, lane)) if groups else 0,
            kept(x_row * p.kx + x_chunk * x_chunk_k), kept(x_row * x_pitch + x_chunk * 16),
            variable("uint64", T.call_extern("uint64", "tilebit::evict_first")) if bulk else 0,
        )  # fmt: skip

    @T.macro
    def meet(own):
        """Of the warps of a ring."""
        if warps_n == 1:
            T.sync_warp()
        else:
            T.sync_threads(1 + own.ring, 32 * warps_n)

    @T.macro
    def request_weights(weight, shared, own, step, slot):
        """The warp's packed weights of a step."""
        if not bulk:
            T.call_extern(
                "handle", copy_weights, weights_at(shared, own, slot), T.address_of(weight[own.row // 64, step * p.records, 0]),
                own.row % 64, p.k_tiles, own.lane,
            )  # fmt: skip
        elif T.call_extern("bool", "tilebit::elect"):
            T.call_extern("handle", "tilebit::mbarrier_expect", filled(shared, own, slot), weight_bytes)
            T.call_extern(
                "handle", copy_weights, weights_at(shared, own, slot), T.address_of(weight[own.row // 64, step * p.records, 0]),
                own.row % 64, p.k_tiles, filled(shared, own, slot), own.policy,
            )  # fmt: skip

    @T.macro
    def request_parameters(scales, zeros, shared, own, step, slot):
        """The warp's scales and zero points of a step. Not by bulk copies: so small ones cost the
        weights 5 % of their rate (57344 x 8192 at m = 1: 67.7 us with them, 63.9 without; H200). The
        last step may reach past k: no scale is there, and what is could be a NaN."""
        if groups:
            group = step * s.block_k // workload.format.group_size
            for i in T.unroll(-(-chunks // 32)):
                chunk = i * 32 + own.lane
                if chunks % 32 == 0 or chunk < chunks:
                    at = group * p.n_pad + (own.parameter if i == 0 else parameter_at(own.row, chunk))
                    T.call_extern(
                        "handle", "tilebit::async_copy_either", parameters_at(shared, own, slot, chunk * 16),
                        T.address_of(scales[0, at]), T.address_of(zeros[0, at]) if p.asymmetric else T.address_of(scales[0, at]),
                        chunk < scale_chunks, True if whole else group + chunk % scale_chunks // row_chunks < p.groups,
                    )  # fmt: skip

    @T.macro
    def request_x(x, norm_weight, token_scales, shared, own, step, slot):
        """The warp's share of a step's x, and of the norm's weight; and behind its rows the scales of
        its group, if it has any. Rows past the last are left as they are (their columns of y are not
        stored), k past the last is zero."""
        if workload.norm:
            T.call_extern(
                "handle", copy_norm, norm_at(shared, own, slot, own.x_byte),
                T.address_of(norm_weight[own.lane % x_chunks * x_chunk_k + step * s.block_k]), 0,
                (own.member * 32 + own.lane) // x_chunks, 1, True,
                True if whole else step * s.block_k + own.lane % x_chunks * x_chunk_k < p.kx,
            )  # fmt: skip
        T.call_extern(
            "handle", copy_x, x_at(shared, own, slot, own.x_byte), T.address_of(x[own.column, own.x + step * s.block_k]),
            p.kx * workload.x_bytes, (own.member * 32 + own.lane) // x_chunks, x.shape[0] - own.column,
            own.column + s.block_m <= x.shape[0],
            True if whole else step * s.block_k + own.lane % x_chunks * x_chunk_k < p.kx,
        )  # fmt: skip
        if p.x_grouped and own.member == 0:
            T.call_extern(
                "handle", copy_token_scales, x_at(shared, own, slot, s.block_k),
                T.address_of(token_scales[step * s.block_k // workload.format.x_group, own.column]), x.shape[0] - own.column, own.lane,
            )  # fmt: skip
        if bulk:
            T.call_extern("handle", "tilebit::mbarrier_arrive_after_copies", filled(shared, own, slot))

    return SimpleNamespace(
        x_at=x_at, norm_at=norm_at, weights_at=weights_at, parameters_at=parameters_at, filled=filled, x_read=x_read,
        own=own, meet=meet, request_weights=request_weights, request_parameters=request_parameters, request_x=request_x,
    )  # fmt: skip
