"""Arguments of the wrong kind, said before anything is done with them."""

from __future__ import annotations

from types import UnionType
from typing import Any, NoReturn

from torch import Tensor

from .layouts.formats import GemmFormat, QuantFormat


def expect(name: str, value: Any, kind: type | UnionType, accepted: str) -> None:
    """Raise ``TypeError`` unless ``value`` is of that kind."""
    if not isinstance(value, kind):
        _refuse(name, value, accepted)


def expect_tensors(optional: tuple[str, ...] = (), **tensors: Any) -> None:
    """Raise ``TypeError`` for the first that is no tensor; those that are ``optional`` may be None."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor) and not (value is None and name in optional):
            _refuse(name, value, f"a torch.Tensor{' or None' if name in optional else ''}")


def format_of(format: Any) -> GemmFormat:
    """A format, or the one that a name stands for ("w4a16_g128"). Raises ``TypeError`` for anything
    else and ``ValueError`` for a name without one, and for one with codebooks."""
    if isinstance(format, str):
        format = QuantFormat.parse(format)
    expect("format", format, GemmFormat, "a QuantFormat, or a name such as 'w4a16_g128'")
    return scaled(format)


def scaled(format: GemmFormat) -> GemmFormat:
    """``format``, whose weights are codes and scales. Raises ``ValueError`` for one with codebooks."""
    if format.codebook:
        raise ValueError(
            f"format is {format.name}, whose channels have codebooks; accepted here: formats with scales, for example 'w4a16_g128'; "
            f"quantize_any and pack_any make weights with codebooks (tilebit.weights.any_packed)"
        )
    return format


def _refuse(name: str, value: Any, accepted: str) -> NoReturn:
    raise TypeError(f"{name} is {type(value).__name__} {str(value)[:60]!r}; accepted: {accepted}")
