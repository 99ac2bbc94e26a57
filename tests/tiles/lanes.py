"""Which of many cases of a kind run at every edit."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import pytest


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
