"""The rings of ``gemm_stream`` and ``gemm_stream_bulk``: where the parts of a slot lie, and what is copied into them.

A slot holds what the ``warps_n`` warps of a ring multiply in one step: x, which they share, then for each of them the
packed weights of its own rows, their scales and their zero points. Warps copy for themselves; of x each copies a share.
"""

from types import SimpleNamespace
from typing import Any

from ...schedules.gemm import stream as rules
from ...schedules.gemm.workload import Workload
from ...schedules.schedule import Schedule
from ..compiler.headers import TYPES
from .operands import Operands

CHUNK = 8  # elements of 16 bytes, which one thread copies at a time


def ring_macros(workload: Workload, schedule: Schedule) -> SimpleNamespace:
    """Places in a block's one shared buffer of 32-bit words (one, because TileLang starts buffers at any multiple of 16 bytes, and bulk
    copies off a line of 128 are slow: 57344 x 8192 at m = 1 with weights 272 bytes into a slot took 64.7 us, so 58.5; H200), and macros that
    fill a slot. ``warp`` is a warp of the block, ``slot`` one of its ring's."""
    import tilelang.language as T

    p, s, bulk = Operands(workload, schedule), schedule, schedule.program == rules.BULK
    stages, rings, warps_n, rows = s.num_stages, rules.rings(s), rules.warps_n(s), rules.warp_rows(s)
    slot_bytes, x_bytes, warp_bytes = rules.slot_bytes(workload, s), rules.x_bytes(s), rules.warp_bytes(workload, s)
    weight_bytes, barriers_at = rules.weight_bytes(workload.format, s) // warps_n, rules.ring_bytes(workload, s) // 4
    x_chunks = s.block_k // CHUNK
    x_rows = 32 * warps_n // x_chunks  # that one pass of the ring's warps copies
    copy_rows = f"tilebit::async_copy_rows<{s.block_m}, {x_rows}, {rules.x_pitch(s)}>"
    copy_weights = f"tilebit::{'bulk' if bulk else 'async'}_copy_weights<{rows}, {p.records}>"
    whole = p.kx % s.block_k == 0  # no step reaches past k
    groups, row_chunks = rules.step_groups(workload.format, s), rows // CHUNK
    scale_chunks = groups * row_chunks  # those of zero points follow them
    chunks = scale_chunks * (2 if p.asymmetric else 1)

    # Written out wherever they are used: bound to a name they would lose their ranges, and indices become 64-bit.
    def ring_of(warp):
        return warp % s.num_warps // warps_n

    def row_of(warp):
        return warp % warps_n

    def x_at(shared, warp, slot, byte=0):
        return T.address_of(shared[((ring_of(warp) * stages + slot) * slot_bytes + byte) // 4])

    def weights_at(shared, warp, slot, byte=0):
        own = x_bytes + row_of(warp) * warp_bytes
        return T.address_of(shared[((ring_of(warp) * stages + slot) * slot_bytes + own + byte) // 4])

    def parameters_at(shared, warp, slot, byte=0):
        return weights_at(shared, warp, slot, weight_bytes + byte)

    def filled(shared, warp, slot):
        """The barrier of ``gemm_stream_bulk`` that counts what arrives in a slot."""
        return T.address_of(shared[barriers_at + (ring_of(warp) * stages + slot) * 2])

    def x_read(shared, warp, slot):
        """And the one that counts the warps that have read its x."""
        return T.address_of(shared[barriers_at + (rings * stages + ring_of(warp) * stages + slot) * 2])

    @T.macro
    def meet(warp):
        """Of the warps that share x."""
        if warps_n == 1:
            T.sync_warp()
        else:
            T.sync_threads(1 + ring_of(warp), 32 * warps_n)

    def first_parameter(row, lane):
        """Of the scales or zero points of a step's groups, the first that a lane copies, as an index into [groups, n_pad]."""
        return lane % scale_chunks // row_chunks * p.n_pad + row + lane % row_chunks * CHUNK if groups else 0

    @T.macro
    def request_weights(weight, shared, policy, row, warp, lane, step, slot):
        """The packed lines of the warp's rows, 512 bytes of each 16."""
        if bulk:
            if T.call_extern("bool", "tilebit::elect"):
                T.call_extern("handle", "tilebit::mbarrier_expect", filled(shared, warp, slot), weight_bytes)
                T.call_extern(
                    "handle", copy_weights, weights_at(shared, warp, slot), T.address_of(weight[row // 64, step * p.records, 0]),
                    row % 64, p.k_tiles, filled(shared, warp, slot), policy,
                )  # fmt: skip
        else:
            T.call_extern(
                "handle", copy_weights, weights_at(shared, warp, slot), T.address_of(weight[row // 64, step * p.records, 0]),
                row % 64, p.k_tiles, lane,
            )  # fmt: skip

    @T.macro
    def request_parameters(scales, zeros, shared, first, row, warp, lane, step, slot):
        """Scales and zero points, 8 rows' a lane. Not by bulk copies: so small ones cost the weights 5 % of their rate (57344 x 8192 at m =
        1: 67.7 us, so 63.9, H200). The last step may reach past k: no scale is there, and what is could be a NaN."""
        group = step * s.block_k // workload.format.group_size if groups else 0
        for i in T.unroll(-(-chunks // 32)):
            chunk = i * 32 + lane
            if chunks % 32 == 0 or chunk < chunks:
                at = group * p.n_pad + (first if i == 0 else first_parameter(row, chunk))
                T.call_extern(
                    "handle", "tilebit::async_copy_either", parameters_at(shared, warp, slot, chunk * 16), T.address_of(scales[0, at]),
                    T.address_of(zeros[0, at]) if p.asymmetric else T.address_of(scales[0, at]), chunk < scale_chunks,
                    True if whole else group + chunk % scale_chunks // row_chunks < p.groups,
                )  # fmt: skip

    def first_of_x(warp, lane):
        return (row_of(warp) * 32 + lane) // x_chunks * p.kx + lane % x_chunks * CHUNK

    def x_place(warp, lane):
        return (row_of(warp) * 32 + lane) // x_chunks * rules.x_pitch(s) + lane % x_chunks * 16

    @T.macro
    def request_x(x, shared, first, place, column, warp, lane, step, slot):
        """The warp's share of x. Rows past the last are left as they are (their columns of y are not stored), k past the last is zero."""
        x_row, x_chunk = (row_of(warp) * 32 + lane) // x_chunks, lane % x_chunks
        if s.block_m % x_rows == 0 or x_row < s.block_m:
            T.call_extern(
                "handle", copy_rows, x_at(shared, warp, slot, place),
                T.address_of(x[column, first + step * s.block_k]), p.kx * 2, x.shape[0] - column - x_row,
                column + s.block_m <= x.shape[0], True if whole else step * s.block_k + x_chunk * CHUNK < p.kx,
            )  # fmt: skip
        if bulk:
            T.call_extern("handle", "tilebit::mbarrier_arrive_after_copies", filled(shared, warp, slot))

    return SimpleNamespace(
        ring_of=ring_of, row_of=row_of, x_at=x_at, weights_at=weights_at, parameters_at=parameters_at, filled=filled, x_read=x_read,
        meet=meet, first_parameter=first_parameter, first_of_x=first_of_x, x_place=x_place, request_weights=request_weights, request_parameters=request_parameters,
        request_x=request_x,
    )  # fmt: skip
