"""The next step of ``generate``, launched as soon as its tokens are chosen: the device computes it while the
host reads whether to go on, and prepares the call. The stopping criteria hear of new tokens first, so one of
them launches; the call that follows finds its logits. Where another call follows, or none, the step is taken
back: its rows lie behind the tokens of the cache, and are written anew by the next.

A stream of its own keeps the step out of the host's way: what ``generate`` reads meanwhile was launched on the
stream that it runs on, and does not wait for the step. results/notes/generate-ahead.md has what it gains.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from .cache import TilebitCache

if TYPE_CHECKING:
    from .compiled import DecodeSteps

GENERATE, CRITERIA = "generate", "_get_stopping_criteria"  # transformers' methods


@dataclass(frozen=True, slots=True, eq=False)
class _Launched:
    """A step of ``cache`` behind the last column of ``tokens`` [rows, columns], which had that ``version``;
    ``seen`` columns and ``lengths`` tokens were in the cache before."""

    cache: TilebitCache
    tokens: Tensor
    version: int
    seen: int
    lengths: list[int]
    widths: tuple[int, ...]  # of any-precision layers
    logits: Tensor


class _Launch(StoppingCriteria):
    """Stops nothing: launches the step behind new tokens, but those that are the last by ``max_length``."""

    def __init__(self, ahead: StepAhead, max_length: int | None) -> None:
        self.ahead, self.max_length = ahead, max_length

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        if self.max_length is None or input_ids.shape[1] < self.max_length:
            self.ahead.launch(input_ids)
        return False


class StepAhead:
    """Of the ``steps`` of a model: at most one is launched ahead at a time."""

    def __init__(self, steps: DecodeSteps) -> None:
        self.steps = steps
        self.held: _Launched | None = None
        self._latest: tuple[TilebitCache, int] | None = None  # the cache of the last call's step, and its rows
        self._vain = False  # a call followed that was another one: the rest of this ``generate`` is as it always was
        self._stream: Any = None
        self._own: dict[str, Callable[..., Any]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> StepAhead:
        """Of a copied model: nothing is launched."""
        made = memo[id(self)] = StepAhead(memo[id(self.steps)])
        made._own = {name: MethodType(method.__func__, made.steps.model) for name, method in self._own.items()}  # type: ignore[attr-defined]
        return made

    def install(self) -> None:
        """Be told of new tokens, and of the end of ``generate``."""
        model = self.steps.model
        self._own = {name: getattr(model, name) for name in (GENERATE, CRITERIA)}
        for name, method in ((GENERATE, StepAhead._generate), (CRITERIA, StepAhead._criteria)):
            replaced = functools.wraps(getattr(type(model), name))(method)  # callers look at what it takes
            model.__dict__[name] = MethodType(replaced, self)

    def uninstall(self) -> None:
        self.drop()
        for name in self._own:
            self.steps.model.__dict__.pop(name, None)
        self._own = {}

    def _generate(self, *given: Any, **named: Any) -> Any:
        self._latest, self._vain = None, False
        try:
            return self._own[GENERATE](*given, **named)
        finally:
            self.drop()
            self._latest = None

    def _criteria(self, generation_config: Any, *given: Any, **named: Any) -> StoppingCriteriaList:
        found = self._own[CRITERIA](generation_config, *given, **named)
        if not generation_config.is_assistant and (generation_config.num_beams or 1) == 1:
            found.append(_Launch(self, found.max_length))
        return found

    # ---- a step ----

    def stepped(self, cache: TilebitCache, rows: int) -> None:
        """A call has been a step of ``rows`` rows of ``cache``."""
        self._latest = cache, rows

    def launch(self, tokens: Tensor) -> None:
        """The step behind ``tokens`` [rows, columns], where the last call was a captured step, and all that the
        next one will be given is known."""
        steps, latest = self.steps, self._latest  # another thread's call may end meanwhile
        if latest is None or self._vain or self.held is not None or tokens.is_inference():
            return
        cache, rows = latest
        if (
            tuple(tokens.shape) != (rows, cache.seen + 1)
            or not cache.fusible
            or not cache.pool.has_room(1)
            or cache.seen >= steps.max_tokens
        ):
            return
        if cache.step is None or steps.tokens(cache.step.batch) is None:
            return
        lengths, seen = cache.pool.lengths(), cache.seen
        with self._aside(tokens.device):
            logits = steps.launched(cache, tokens[:, -1])
        self.held = _Launched(cache, tokens, tokens._version, seen, lengths, steps.widths(), logits)
        cache.pending = self.drop

    def taken(self, named: dict[str, Any] | None) -> Tensor | None:
        """Logits [rows, vocabulary] of the step that was launched, where a call with these arguments is its;
        else None, and the step is taken back. None for ``named``: a call with others."""
        held = self.held
        if held is None:
            return None
        if named is None or not self._asks(held, named):
            self._vain = True
            self.drop()
            return None
        self.held = held.cache.pending = None
        self._meet(held.tokens.device)
        held.cache.settle()
        return held.logits

    def drop(self) -> None:
        """Take a step back that no call has asked for."""
        held, self.held = self.held, None
        if held is not None:
            held.cache.pending = None
            self._meet(held.tokens.device)
            held.cache.take_back()

    def _asks(self, held: _Launched, named: dict[str, Any]) -> bool:
        """Whether a call asks for just that step: its cache, behind tokens that nobody has written to, with masks and positions
        that are known, in a model that is as it was."""
        inputs, ids = self.steps.inputs, named["input_ids"]
        return (
            named["past_key_values"] is held.cache
            and inputs.cut_from(ids) is held.tokens
            and held.tokens._version == held.version
            and held.widths == self.steps.widths()
            and inputs.hold(named.get("attention_mask"), named.get("position_ids"), held.seen, held.lengths)
            and self.steps.is_current()
        )

    # ---- streams ----

    @contextmanager
    def _aside(self, device: torch.device) -> Iterator[None]:
        """What is launched inside runs behind what has been launched, and nothing that comes later waits for it."""
        if device.type != "cuda":
            yield
            return
        if self._stream is None or self._stream.device != device:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield

    def _meet(self, device: torch.device) -> None:
        """What comes later waits for what was launched aside."""
        if device.type == "cuda":
            torch.cuda.current_stream(device).wait_stream(self._stream)
