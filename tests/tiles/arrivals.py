"""Machine code of sm_90, read for one thing: whether a thread arrives at a barrier while its loads from shared memory are still on
their way. Such a load can find what the barrier let another thread, or a bulk copy, write there (results/notes/arrivals-loads.md)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

_FIRST = re.compile(r"\s+/\*([0-9a-f]{4,6})\*/\s+(.*?)\s*;?\s*/\* 0x[0-9a-f]{16} \*/")
_SECOND = re.compile(r"\s+/\* 0x([0-9a-f]{16}) \*/")
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")
NO_SCOREBOARD = 7


def instructions(listing: str) -> Iterator[tuple[str, int, int]]:
    """(text, scoreboard that it sets when it has written its registers, mask of scoreboards that it waits for) of each instruction of
    ``listing``, which is what ``nvdisasm -c -hex`` says."""
    lines = listing.splitlines()
    for first, second in pairwise(lines):
        if (words := _FIRST.match(first)) and (high := _SECOND.match(second)):
            control = int(high[1], 16) >> 41
            yield words[2], control >> 5 & 7, control >> 11 & 63


def early_arrivals(listing: str) -> list[str]:
    """The loads from shared memory that may be on their way at an arrival which comes after them, the last one of each arrival: neither
    has their scoreboard been waited for, nor is there a fence between. Followed is the code that falls through."""
    found, pending = [], {}
    for text, sets, waits in instructions(listing):
        pending = {scoreboard: load for scoreboard, load in pending.items() if not waits >> scoreboard & 1}
        name = _PREDICATE.sub("", text).split()[0]
        if name.startswith("SYNCS.ARRIVE") and pending:
            found.append(list(pending.values())[-1])
        if name.startswith("FENCE.VIEW.ASYNC") or (name in ("BRA", "EXIT", "RET") and not text.startswith("@")):
            pending = {}
        if name.startswith(("LDS", "LDSM")) and sets != NO_SCOREBOARD:
            pending[sets] = text
    return found
