"""How GPU tests are divided, asked of a made-up set of tests and of the real one; needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from gpu_kernels import KERNEL_SECONDS, TEST_SECONDS, _part, asked, split


def made_up(name: str, file: str, cases: Sequence[Any] = ()) -> Any:
    mark = pytest.mark.kernels(of=lambda: cases) if cases else None
    return SimpleNamespace(nodeid=name, path=file, get_closest_marker=lambda _: mark)


def check(items: Sequence[Any], parts: int) -> list[list[Any]]:
    """The parts, disjoint, complete, the same again, and of one kernel all tests in one part."""
    lists = split(items, parts)
    assert sorted(item.nodeid for part in lists for item in part) == sorted(item.nodeid for item in items) and len(lists) == parts
    assert split(items, parts) == lists
    places: dict[Any, set[int]] = {}
    for number, part in enumerate(lists):
        for item in part:
            places.setdefault(frozenset(asked(item)) or str(item.path), set()).add(number)
    assert all(len(numbers) == 1 for numbers in places.values())
    return lists


def test_parts_are_disjoint_complete_and_alike() -> None:
    items = [made_up(f"a{i}", "a", [("w", i // 2)]) for i in range(40)] + [made_up(f"b{i}", "b") for i in range(10)]
    items += [made_up("all", "a", [("w", i) for i in range(20)])]
    for parts in (1, 2, 3, 5):
        lists = check(items, parts)
        tests = [len(part) * TEST_SECONDS + KERNEL_SECONDS * len({c for item in part for c in asked(item)}) for part in lists]
        assert max(tests) <= 1.5 * min(tests), tests


def test_more_parts_than_groups_leave_some_empty() -> None:
    assert [len(part) for part in check([made_up("one", "a"), made_up("two", "a"), made_up("three", "b")], 4)] == [2, 1, 0, 0]


def test_the_collected_gpu_tests(request: pytest.FixtureRequest) -> None:
    """Of this run: all of them when the whole suite runs."""
    items = [item for item in request.session.items if item.get_closest_marker("gpu")]
    for parts in (1, 6):
        check(items, parts)


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "a/b", "1/0", "-1/2"])
def test_what_is_no_part(text: str) -> None:
    with pytest.raises(ValueError, match="accepted: I/N"):
        _part(text)
