"""Bookkeeping of pages and slots: what is handed out comes back, nothing is owned twice, and a call that fails changes nothing."""

from __future__ import annotations

import copy
import random

import pytest

from tilebit.cache.sequences import CacheFull, SequenceTable
from tilebit.cache.state import table_state

PAGE_SIZES = (16, 32, 64, 128, 256)


def owners(table: SequenceTable) -> list[int]:
    """How many sequences hold each page."""
    counts = [0] * table.num_pages
    for sequence in table.sequences.values():
        for page in sequence.pages:
            counts[page] += 1
    return counts


def check(table: SequenceTable) -> None:
    """What must always hold."""
    counts = owners(table)
    assert counts == table.references
    assert sorted(table._free_pages) == [page for page, count in enumerate(counts) if not count]
    slots = [s.slot for s in table.sequences.values()]
    assert sorted([*slots, *table._free_slots]) == list(range(table.slots))
    for sequence in table.sequences.values():
        assert len(sequence.pages) == len(set(sequence.pages)) >= table.pages_for(sequence.length)
        # Whatever is still to be written lies in a page of its own.
        writable = sequence.pages[sequence.length // 128 * 128 // table.page_size :]
        assert all(counts[page] == 1 for page in writable)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("seed", range(8))
def test_any_history_keeps_the_books(page_size, seed):
    chance = random.Random(seed)
    table = SequenceTable(num_pages=3072 // page_size, slots=5, page_size=page_size, max_pages=1536 // page_size)
    model: dict[int, int] = {}
    full = 0
    for _ in range(300):
        live, before = sorted(model), copy.deepcopy(table).__dict__
        try:
            match chance.choice(("allocate", "extend", "extend", "extend", "fork", "truncate", "free")):
                case "allocate":
                    model |= dict.fromkeys(table.allocate(chance.randint(0, 2), chance.choice((0, 0, 300))), 0)
                case "extend" if live:
                    chosen = chance.sample(live, chance.randint(1, len(live)))
                    counts = [chance.choice((0, 1, 5, 127, 128, 129, 400)) for _ in chosen]
                    table.extend(chosen, counts)
                    for handle, count in zip(chosen, counts, strict=True):
                        model[handle] += count
                case "fork" if live:
                    source = chance.choice(live)
                    new, _ = table.fork(source)
                    assert new not in before["sequences"]
                    model[new] = model[source]
                case "truncate" if live:
                    handle = chance.choice(live)
                    packed = model[handle] // 128 * 128
                    length = chance.choice((chance.randint(packed, model[handle]), chance.randint(0, packed // 128) * 128))
                    table.truncate(handle, length)
                    model[handle] = length
                case "free" if live:
                    table.free(live[0])
                    del model[live[0]]
        except CacheFull:
            full += 1
            assert {h: (s.slot, s.length, s.pages) for h, s in table.sequences.items()} == {
                h: (s.slot, s.length, s.pages) for h, s in before["sequences"].items()
            }
            assert table.version == before["version"] and table._free_pages == before["_free_pages"]
        assert {handle: s.length for handle, s in table.sequences.items()} == model
        check(table)
        saved = SequenceTable(table.num_pages, table.slots, page_size, table.max_pages)
        saved.become(table_state(table.state(), saved))
        check(saved)
    assert full, "the cache never ran full: the test says little"


def test_a_new_cache_hands_out_pages_in_order():
    table = SequenceTable(8, 4, 128, 4)
    a, b = table.allocate(2, tokens=512)
    assert table.sequence(a).pages == [0, 1, 2, 3] and table.sequence(b).pages == [4, 5, 6, 7]
    table.extend([a, b], [512, 100])
    assert table.free_pages == 0 and table.sequence(a).pages == [0, 1, 2, 3]


@pytest.mark.parametrize("page_size", [64, 128, 256])
def test_a_reservation_outlives_a_cut(page_size):
    table = SequenceTable(512 // page_size, 3, page_size, 512 // page_size)
    a, b = table.allocate(2, tokens=256)
    pages = list(table.sequence(a).pages)
    for length in (200, 256):
        table.extend([a], [length])
        table.truncate(a, 0)
        assert table.sequence(a).pages == pages and table.free_pages == 0
    table.free(b)
    table.extend([a], [512])
    table.truncate(a, 128)
    assert table.sequence(a).pages == pages and table.free_pages == 256 // page_size, "what is beyond it is given back"
    check(table)


def test_reserved_pages_that_a_fork_shares_are_the_fork_s():
    table = SequenceTable(4, 2, 128, 4)
    (a,) = table.allocate(1, tokens=512)
    table.extend([a], [300])
    b, _ = table.fork(a)
    table.truncate(a, 128)
    assert table.sequence(a).pages == [0, 2, 3] and table.sequence(b).pages == [0, 1]
    check(table)


def test_the_residual_window_needs_no_page():
    table = SequenceTable(1, 2, 128, 1)
    a, b = table.allocate(2)
    table.extend([a, b], [127, 127])
    assert table.free_pages == 1
    table.extend([a], [1])
    assert table.free_pages == 0
    with pytest.raises(CacheFull, match="1 more pages"):
        table.extend([b], [1])
    assert table.sequence(b).length == 127


def test_a_half_filled_page_is_copied_and_a_full_one_shared():
    table = SequenceTable(4, 3, 256, 2)
    (a,) = table.allocate(1)
    table.extend([a], [128])
    b, copies = table.fork(a)
    assert copies == [(0, 1)] and table.sequence(b).pages == [1]
    table.extend([a], [128])
    c, copies = table.fork(a)
    assert not copies and table.sequence(c).pages == [0]
    assert table.truncate(c, 128) == [(0, 2)], "its second half will be written again"
    assert table.truncate(a, 128) == [], "now nobody else holds the page"
    check(table)


def test_handles_are_never_used_twice():
    table = SequenceTable(1, 1, 128, 1)
    (a,) = table.allocate(1)
    table.free(a)
    (b,) = table.allocate(1)
    assert b != a
    with pytest.raises(ValueError, match=f"sequence {a} was freed"):
        table.extend([a], [1])
    for wrong in (7, -1, "x"):
        with pytest.raises(ValueError, match="is no handle of this cache"):
            table.free(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda t, a, b: t.extend([a, a], [1, 1]), "named twice"),
        (lambda t, a, b: t.extend([a, b], [1]), "1 numbers of new tokens"),
        (lambda t, a, b: t.extend([a], [-1]), "accepted: for each a whole number from 0"),
        (lambda t, a, b: t.allocate(-1), "the number of sequences is -1; accepted: whole numbers from 0"),
        (lambda t, a, b: t.truncate(a, 127), "accepted: 128 to 200, or a smaller multiple of 128"),
        (lambda t, a, b: t.truncate(a, 201), "cannot be cut to 201"),
        (lambda t, a, b: t.truncate(a, -1), "cannot be cut to -1"),
        (lambda t, a, b: table_state({"sequences": [[0, 0, 128, [9]]], "next": 1}, t), "uses page 9"),
    ],
)
def test_wrong_calls_say_what_is_accepted(call, says):
    table = SequenceTable(4, 2, 128, 4)
    a, b = table.allocate(2)
    table.extend([a], [200])
    before = table.state()
    with pytest.raises(ValueError, match=says):
        call(table, a, b)
    assert table.state() == before
    check(table)


def test_a_sequence_has_no_more_pages_than_a_table_row():
    table = SequenceTable(9, 2, 64, 4)
    (a,) = table.allocate(1)
    table.extend([a], [383])
    with pytest.raises(CacheFull, match="holds up to 383"):
        table.extend([a], [1])
    with pytest.raises(CacheFull, match="holds up to 383"):
        table.allocate(1, tokens=384)
