"""What a model may see, as tilebit's attention is told of it: no matrix of queries and keys, but the
padding and the window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask, sliding_window_overlay

_WINDOW_CODE = sliding_window_overlay(1).__code__


class Visible:
    """The causal mask of one forward call. ``padding`` is bool [batch, columns], false where a column
    is padding, or None where none is; ``window`` the number of columns that a row sees, its own
    among them (0: all). ``dense`` and ``additive`` are the same as other attention functions take
    it."""

    ndim = 4  # what transformers asks a mask, of two dimensions where it is padding alone

    def __init__(self, window: int, asked: dict[str, Any]) -> None:
        self.window, self._asked = window, asked
        self.padding: Tensor | None = asked.get("attention_mask")
        self._dense: tuple[Tensor | None] | None = None

    def dense(self) -> Tensor | None:
        """Bool [batch, 1, queries, columns], or None where torch's ``is_causal`` says it all."""
        if self._dense is None:
            self._dense = (sdpa_mask(**self._asked),)
        return self._dense[0]

    def additive(self) -> Tensor | None:
        """What is added to scores."""
        return eager_mask(**self._asked)


def visible_mask(**asked: Any) -> Visible | Tensor | None:
    """tilebit's entry of transformers' ``AttentionMaskInterface``: a ``Visible`` for causal masks
    and sliding windows with padding, the matrix for anything else, and over a static cache, whose
    offset is a tensor that its layers count on before attention reads it."""
    made = asked.get("attention_mask")
    if isinstance(made, Visible):  # for a static cache ``generate`` has the mask made, and passes it to the model, which asks again
        return made
    if isinstance(asked.get("q_offset"), Tensor):
        return sdpa_mask(**{**asked, "allow_is_causal_skip": False})  # functions that add a mask take no None for a causal one
    window = _window_of(asked.get("mask_function", causal_mask_function))
    return sdpa_mask(**asked) if window is None else Visible(window, asked)


def _window_of(mask: Callable[..., Any]) -> int | None:
    """The window of a causal mask function, 0 without one; None for a function that is neither.
    transformers composes such functions as closures, and says nowhere else what they are."""
    if mask is causal_mask_function:
        return 0
    parts = _captured(mask).get("mask_functions", ())
    if len(parts) != 2 or parts[1] is not causal_mask_function or getattr(parts[0], "__code__", None) is not _WINDOW_CODE:
        return None
    return int(_captured(parts[0])["sliding_window"])


def _captured(function: Callable[..., Any]) -> dict[str, Any]:
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    return {} if code is None or cells is None else {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
