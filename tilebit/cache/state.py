"""The state of a cache that someone hands in, read whole and checked before anything of it is used:
it may come from a file that is damaged, or from another program."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..layouts.kv import RESIDUAL
from ..ops.operands import describe
from .counts import whole

if TYPE_CHECKING:
    from .sequences import SequenceTable

ORIGIN = "accepted: what state() of a cache returned"


@dataclass(frozen=True, slots=True)
class TableState:
    """A table's state that was found right: (handle, slot, length, pages) of each sequence, the
    next handle, and of each page how many sequences hold it."""

    rows: list[tuple[int, int, int, list[int]]]
    next: int
    holders: dict[int, int]


def table_state(state: Any, table: SequenceTable) -> TableState:
    """What ``SequenceTable.state`` returned, for ``table``. Raises ``ValueError``."""
    try:
        following = whole("the next handle of the state", state["next"], 0)
        rows = [_row(*row, following) for row in state["sequences"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"the state's table is incomplete ({error!r}); {ORIGIN}") from None
    page = max((page for *_, pages in rows for page in pages), default=-1)
    slot = max((slot for _, slot, _, _ in rows), default=-1)
    longest = max((len(pages) for *_, pages in rows), default=0)
    if page >= table.num_pages or slot >= table.slots or longest > table.max_pages:
        raise ValueError(
            f"the state uses page {page}, slot {slot} and {longest} pages for a sequence; this "
            f"cache has {table.num_pages} pages, {table.slots} slots and {table.max_pages} pages for a sequence: make it as large"
        )
    for what, given in (("handle", [row[0] for row in rows]), ("slot", [row[1] for row in rows])):
        _once(given, f"{what}s of the state's sequences")
    holders: dict[int, int] = {}
    for *_, pages in rows:
        for page in pages:
            holders[page] = holders.get(page, 0) + 1
    for handle, _, length, pages in rows:
        _once(pages, f"pages of the state's sequence {handle}")
        if table.pages_for(length) > len(pages):
            raise ValueError(
                f"the state's sequence {handle} has {length} tokens and {len(pages)} pages of {table.page_size}; accepted: as many tokens "
                f"as they hold"
            )
        shared = [page for page in pages[length // RESIDUAL * RESIDUAL // table.page_size :] if holders[page] > 1]
        if shared:
            raise ValueError(f"the state's sequence {handle} shares page {shared[0]}, which is not full; accepted: full pages are shared")
    return TableState(rows, following, holders)


def _row(handle: Any, slot: Any, length: Any, pages: Any, following: int) -> tuple[int, int, int, list[int]]:
    handle = whole("a handle of the state", handle, 0, following - 1)
    what = f"of the state's sequence {handle}"
    own = [whole(f"a page {what}", page, 0) for page in pages]
    return handle, whole(f"the slot {what}", slot, 0), whole(f"the length {what}", length, 0), own


def _once(given: list[int], what: str) -> None:
    if len(set(given)) != len(given):
        raise ValueError(f"the {what} are {sorted(given)[:16]}; accepted: each once")


def rows_of(state: dict[str, Any], name: str, needed: Iterable[int], own: tuple[Tensor, ...]) -> tuple[list[int], Tensor]:
    """(index, values) of the state's ``name``: rows ``index`` of each layer of ``own``, all
    ``needed`` ones among them, values int32 [layers, len(index), ...] on ``own``'s device. Raises
    ``ValueError``."""
    try:
        given, values = state[name]
        index = [whole(f"a number in the state's {name}", row, 0, own[0].shape[0] - 1) for row in given]
    except (KeyError, TypeError) as error:
        raise ValueError(f"the state's {name} are incomplete ({error!r}); {ORIGIN}") from None
    _once(index, f"numbers of the state's {name}")
    missing = sorted(set(needed) - set(index))
    if missing:
        raise ValueError(f"the state's {name} lack {missing[:16]}, which its sequences use; {ORIGIN}")
    shape = (len(own), len(index), *own[0].shape[1:])
    if not isinstance(values, Tensor) or values.dtype != torch.int32 or tuple(values.shape) != shape:
        got = describe(values) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"the state's {name} are {got}; accepted: int32 {list(shape)}")
    return index, values.to(own[0].device)
