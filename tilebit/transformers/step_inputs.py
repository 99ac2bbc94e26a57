"""Masks and positions as transformers' ``generate`` makes them for one token after another: what they hold
is known without reading them, which would wait for the device.

``generate`` makes them anew for each token, from the last ones: a mask gets a column of ones, positions
one that is 1 more than the last, and the model is given the last column of positions. So what has
been read once is known of what follows, as long as nobody writes to it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

GROW, SLICE = "_update_model_kwargs_for_generation", "prepare_inputs_for_generation"  # transformers' methods
MASK, POSITIONS, IDS = "attention_mask", "position_ids", "input_ids"


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """One number of each row that is the same in all ``tensors`` (None: not read yet). Each is held weakly,
    with the version that it had: a number that grows when somebody writes to it."""

    tensors: tuple[tuple[weakref.ref[Tensor], int], ...] = ()
    numbers: tuple[int, ...] | None = None

    @classmethod
    def of(cls, *tensors: Tensor, numbers: tuple[int, ...] | None = None) -> _Known:
        return cls(tuple((weakref.ref(t), t._version) for t in tensors if not t.is_inference()), numbers)

    def has(self, tensor: Tensor) -> bool:
        return any(held() is tensor and version == tensor._version for held, version in self.tensors)

    def says(self, tensor: Tensor, numbers: Sequence[int]) -> bool:
        return self.numbers == tuple(numbers) and self.has(tensor)

    def read(self, tensor: Tensor, numbers: Sequence[int]) -> _Known:
        return _Known(self.tensors, tuple(numbers)) if self.has(tensor) else self

    def grown(self, before: Any, after: Any) -> _Known:
        """Of ``after``, which is ``before`` with a column more."""
        if not isinstance(before, Tensor) or not isinstance(after, Tensor) or after is before:
            return _Known()
        known = self.numbers if self.has(before) else None
        return _Known.of(after, numbers=None if known is None else tuple(n + 1 for n in known))


class StepInputs:
    """What is known of the mask and the positions that ``generate`` made last for ``model``: of the mask the
    tokens of each row, of positions the last one. Tensors that others made are never known."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._mask = self._positions = _Known()
        self._cut: tuple[_Known, weakref.ref[Tensor]] | None = None  # the last column of tokens, and all of them
        self._own: dict[str, Callable[..., Any]] = {}

    def install(self) -> None:
        """Be told what ``generate`` makes, where its methods do what is known here."""
        if _as_known(self.model):
            self._own = {name: getattr(self.model, name) for name in (GROW, SLICE)}
            for name, method in ((GROW, StepInputs._grow), (SLICE, StepInputs._slice)):
                replaced = functools.wraps(getattr(type(self.model), name))(method)  # generate looks at what it takes
                self.model.__dict__[name] = MethodType(replaced, self)

    def uninstall(self) -> None:
        for name in self._own:
            self.model.__dict__.pop(name, None)
        self._own = {}

    def hold(self, mask: Tensor | None, positions: Tensor | None, seen: int, lengths: Sequence[int]) -> bool:
        """Whether it is known, without reading them, that a mask and positions bring one token to each row,
        behind ``seen`` columns, ``lengths`` of them tokens."""
        if (mask is None or positions is None) and any(length != seen for length in lengths):
            return False  # the model would count columns
        shape, tokens = (len(lengths), seen + 1), [length + 1 for length in lengths]
        if mask is not None and (tuple(mask.shape) != shape or not self._mask.says(mask, tokens)):
            return False
        return positions is None or self._positions.says(positions, lengths)

    def learn(self, mask: Tensor | None, positions: Tensor | None, lengths: Sequence[int]) -> None:
        """That they have been read, and do."""
        if mask is not None:
            self._mask = self._mask.read(mask, [n + 1 for n in lengths])
        if positions is not None:
            self._positions = self._positions.read(positions, lengths)

    def cut_from(self, ids: Tensor) -> Tensor | None:
        """The tokens [rows, columns] whose last column ``generate`` made ``ids`` of; None: not known."""
        return self._cut[1]() if self._cut is not None and self._cut[0].has(ids) else None

    def _grow(self, outputs: Any, model_kwargs: dict[str, Any], *given: Any, **named: Any) -> dict[str, Any]:
        mask, positions = model_kwargs.get(MASK), model_kwargs.get(POSITIONS)
        with _versions():
            made = self._own[GROW](outputs, model_kwargs, *given, **named)
        one = not given and set(named) <= {"is_encoder_decoder"}  # else several tokens, perhaps
        self._mask = self._mask.grown(mask, made.get(MASK)) if one else _Known()
        self._positions = self._positions.grown(positions, made.get(POSITIONS)) if one else _Known()
        return made

    def _slice(self, *given: Any, **named: Any) -> dict[str, Any]:
        with _versions():
            made = self._own[SLICE](*given, **named)
        whole, last = named.get(POSITIONS), made.get(POSITIONS)
        if isinstance(whole, Tensor) and isinstance(last, Tensor) and last is not whole and last.shape[-1] == 1:
            self._positions = _Known.of(whole, last, numbers=self._positions.numbers if self._positions.has(whole) else None)
        tokens, ids = given[0] if given else named.get(IDS), made.get(IDS)
        cut = isinstance(tokens, Tensor) and isinstance(ids, Tensor) and ids is not tokens and ids.shape == (len(tokens), 1)
        self._cut = (_Known.of(ids), weakref.ref(tokens)) if cut else None
        return made


@contextmanager
def _versions() -> Iterator[None]:
    """Tensors that are made inside have versions, under ``torch.inference_mode``, too."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield


def _as_known(model: PreTrainedModel) -> bool:
    """Whether both methods are transformers' own, and do to two small rows what is said above."""
    if not all(getattr(type(model), name).__module__.startswith("transformers.") for name in (GROW, SLICE)):
        return False
    ids, mask, positions = torch.tensor([[0, 5], [6, 7]]), torch.tensor([[0, 1], [1, 1]]), torch.tensor([[0, 0], [0, 1]])
    try:
        grown = getattr(model, GROW)(CausalLMOutputWithPast(), {MASK: mask, POSITIONS: positions}, is_encoder_decoder=False)
        made = getattr(model, SLICE)(ids, next_sequence_length=1, use_cache=True, **grown)
        expected = {MASK: [[0, 1, 1], [1, 1, 1]], POSITIONS: [[1], [2]]}
        return grown[POSITIONS].tolist() == [[0, 0, 1], [0, 1, 2]] and all(made[name].tolist() == rows for name, rows in expected.items())
    except Exception:  # a version that calls them otherwise: what is not known is read
        return False
