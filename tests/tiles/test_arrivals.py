"""The reader of machine code tells an arrival that waits for loads from one that does not."""

from __future__ import annotations

import pytest
from arrivals import NO_SCOREBOARD, early_arrivals

ARRIVAL = ("@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R69+URZ+0x8], RZ", NO_SCOREBOARD, 0)
LOAD = ("LDS.64 R70, [R53+0x1a020]", 4, 0)


def listing(*code: tuple[str, int, int]) -> str:
    """As nvdisasm writes it: two lines an instruction, the encoding's halves behind it."""
    lines = [".text.main_kernel:"]
    for place, (text, sets, waits) in enumerate(code):
        control = sets << 5 | waits << 11
        lines += [f"        /*{place * 16:04x}*/                   {text} ;          /* 0x{0x7CF0:016x} */"]
        lines += [f"                                                          /* 0x{control << 41:016x} */"]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("between", "early"),
    [
        ((), True),
        ((("FMUL R1, R70, R2", NO_SCOREBOARD, 1 << 4),), False),
        ((("FMUL R1, R3, R2", NO_SCOREBOARD, 1 << 3),), True),
        ((("FENCE.VIEW.ASYNC.S", 0, 0),), False),
        ((("@P1 BRA `(.L_x_3)", NO_SCOREBOARD, 0),), True),
        ((("BRA `(.L_x_3)", NO_SCOREBOARD, 0),), False),
        ((("LDS.U16 R9, [R8]", 2, 1 << 4),), True),
        ((("LDG.E R9, desc[UR14][R8.64]", 2, 1 << 4),), False),
    ],
)
def test_loads_on_their_way_are_found(between: tuple[tuple[str, int, int], ...], early: bool):
    assert bool(early_arrivals(listing(LOAD, *between, ARRIVAL))) == early


def test_an_arrival_before_a_load_is_none_of_it():
    assert early_arrivals(listing(ARRIVAL, LOAD)) == []
    assert early_arrivals(listing(LOAD, ARRIVAL)) == [LOAD[0]]
