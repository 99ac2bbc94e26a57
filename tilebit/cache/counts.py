"""Whole numbers: counts, lengths and handles as callers give them, checked before anything changes."""

from __future__ import annotations

import operator
from typing import Any


def whole(what: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """``value`` as an int: an int, or what stands for one (numpy's, a tensor of one integer), but
    no bool. Raises ``ValueError`` for anything else and for what is below ``least`` or above
    ``most``; ``what`` names it in the message."""
    number = value if type(value) is int else _index(value)
    if number is None or (least is not None and number < least) or (most is not None and number > most):
        span = "" if least is None else f" from {least}" if most is None else f" from {least} to {most}"
        raise ValueError(f"{what} is {value!r}; accepted: whole numbers{span}")
    return number


def _index(value: Any) -> int | None:
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # a tensor raises whichever of them
        return None
