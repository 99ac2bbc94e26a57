"""Which of many cases of a kind run at every edit."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]


def slow_functions() -> dict[str, int]:
    """By test function, as a path in tests/ and a name, how many of its cases ``make test`` runs: what tests/slow.txt says."""
    lines = [line.split() for line in (TESTS / "slow.txt").read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return {name: 0 if rest == ["none"] else 1 for name, *rest in lines}


def one_of_each(cases: Iterable[Any], sort: Callable[[Any], Hashable], several: bool = False) -> list[Any]:
    """``cases`` as parameters of a test: the first of each ``sort(case)`` runs always, the others are marked slow. ``several``: a case is
    a tuple of the values of several parameters."""
    seen: set[Hashable] = set()
    parameters = []
    for case in cases:
        marks = [pytest.mark.slow] if sort(case) in seen else []
        seen.add(sort(case))
        parameters.append(pytest.param(*(case if several else (case,)), marks=marks))
    return parameters
