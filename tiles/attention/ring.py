"""The ring of slots that a warp of decode attention streams its units through: what is asked for,
from where, into which slot.

A slot holds the keys of a unit or its values, by turns, so that twice as many warps find room.
Requests run ``num_stages`` slots ahead of the computation; the copies are the warp's own
(``cp.async``, or bulk copies that a barrier of the slot counts), so no warp waits for another one.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ...layouts.kv import RESIDUAL
from ...schedules.attention import decode as rules
from ...schedules.attention.workload import AttentionWorkload
from ...schedules.schedule import Schedule

# Fields of a cursor: a place in the line of units (``tilebit::Decode::Cursor``). Its segment, a
# (sequence, head, pass), begins with unit BASE; the block's share ends with unit END; of TOTAL
# units of the segment the first PACKED_UNITS are packed, and PACKED is the first token after them.
BASE, END, LENGTH, PACKED, PACKED_UNITS, TOTAL, CURSOR_WORDS = 3, 4, 5, 6, 9, 10, 11
UNIT, UNITS_END, KEYS_FROM, VALUES_FROM, WANTED_WORDS = range(5)  # what a warp asks for next, and the pages that it comes from
SLOT, PHASE, RING_WORDS = range(3)  # the slot that is read next, and how often it was, modulo 2


def ring_macros(workload: AttentionWorkload, schedule: Schedule, call: Callable[..., Any]) -> SimpleNamespace:
    """TileLang macros over the arrays of one kernel: ``find_sources``, ``request_keys``,
    ``request_values``, ``await_slot``, ``refill_after_keys``, ``refill_after_values``. Their arrays
    are the launch, the cursor ``ahead`` of what is asked for, ``wanted`` and ``ring``."""
    import tilelang.language as T

    w, s, warps, stages, bulk = workload, schedule, schedule.num_warps, schedule.num_stages, schedule.program == rules.BULK
    # one page has a unit's keys and values, and the scales of its channels
    one_page = w.page_size >= (max(s.block_n, RESIDUAL) if w.format.key_scales == "channel" else s.block_n)

    @T.macro
    def find_sources(launch, ahead, wanted, warp):
        """Where the next unit comes from, of this segment or of the next one that this warp has a
        unit of."""
        while wanted[UNIT] >= wanted[UNITS_END] and ahead[BASE] < ahead[END]:
            call("Decode::advance", launch, ahead)
            wanted[UNIT] = ahead[BASE] + warp
            wanted[UNITS_END] = T.min(ahead[BASE] + ahead[TOTAL], ahead[END])
        if wanted[UNIT] < wanted[UNITS_END]:
            unit = wanted[UNIT] - ahead[BASE]
            wanted[KEYS_FROM] = call("Requests::source<false>", launch, ahead, unit, returns="int32")
            if one_page:
                wanted[VALUES_FROM] = wanted[KEYS_FROM]
            else:
                wanted[VALUES_FROM] = call("Requests::source<true>", launch, ahead, unit, returns="int32")

    @T.macro
    def request_keys(launch, ahead, wanted, warp, slot):
        if wanted[UNIT] < wanted[UNITS_END]:
            call("Requests::request<false>", launch, ahead, wanted[UNIT] - ahead[BASE], wanted[KEYS_FROM], slot)
        if not bulk:
            T.ptx_commit_group()

    @T.macro
    def request_values(launch, ahead, wanted, warp, slot):
        if wanted[UNIT] < wanted[UNITS_END]:
            call("Requests::request<true>", launch, ahead, wanted[UNIT] - ahead[BASE], wanted[VALUES_FROM], slot)
            wanted[UNIT] = wanted[UNIT] + warps
            find_sources(launch, ahead, wanted, warp)
        if not bulk:
            T.ptx_commit_group()

    @T.macro
    def await_slot(launch, ring):
        if bulk:
            call("Decode::await_slot", launch, ring[SLOT], ring[PHASE])
        else:
            T.ptx_wait_group(stages - 1)
            T.sync_warp()

    def refiller(values):
        """After a unit's keys (0) or its values (1): what comes ``num_stages`` slots later."""
        request = request_values if (values + stages) % 2 else request_keys

        @T.macro
        def refill(launch, ahead, wanted, warp, ring):
            """The slot is asked for again, and the next one is read."""
            T.sync_warp()  # all lanes have read it
            request(launch, ahead, wanted, warp, ring[SLOT])
            ring[PHASE] = T.if_then_else(ring[SLOT] == stages - 1, ring[PHASE] ^ 1, ring[PHASE])
            ring[SLOT] = T.if_then_else(ring[SLOT] == stages - 1, 0, ring[SLOT] + 1)

        return refill

    return SimpleNamespace(
        find_sources=find_sources,
        request_keys=request_keys,
        request_values=request_values,
        await_slot=await_slot,
        refill_after_keys=refiller(0),
        refill_after_values=refiller(1),
    )
