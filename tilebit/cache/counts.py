"""Numbers as callers give them (counts, lengths, handles, options of attention's scores), checked
before anything changes."""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any


def whole(what: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """``value`` as an int: an int, or what stands for one (numpy's, a tensor of one integer), but
    no bool. Raises ``ValueError`` for anything else and for what is below ``least`` or above
    ``most``; ``what`` names it in the message."""
    number = value if type(value) is int else as_int(value)
    if number is None or (least is not None and number < least) or (most is not None and number > most):
        span = "" if least is None else f" from {least}" if most is None else f" from {least} to {most}"
        raise ValueError(f"{what} is {value!r}; accepted: whole numbers{span}")
    return number


def as_int(value: Any) -> int | None:
    """What ``value`` stands for; None where that is no whole number."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # a tensor raises whichever of them
        return None


def real(what: str, value: Any) -> float:
    """``value`` as a float: a float or an int, numpy's too, but no bool. Raises ``ValueError``."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{what} is {value!r}; accepted: numbers, such as {what}=0.5")
    return float(value)


def score_options(scale: Any, window: Any, sink_tokens: Any, soft_cap: Any) -> tuple[float | None, int, int, float]:
    """These options of attention as Python's own numbers, which plans are found by. Raises
    ``ValueError`` for what are none; what range they have is asked once for each plan."""
    if type(window) is int and type(sink_tokens) is int and type(soft_cap) is float and (scale is None or type(scale) is float):
        return scale, window, sink_tokens, soft_cap
    windows = whole("window", window, 0), whole("sink_tokens", sink_tokens, 0)
    return None if scale is None else real("scale", scale), *windows, real("soft_cap", soft_cap)
