"""Steps of ``generate`` over a compiled model do not wait for the device to read what is known on the host, and read it where it is not."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from comparison import own_cache, prompts
from compiled_models import model_of
from replays import Watched
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from tilebit.transformers import TilebitCache, compile, release
from tilebit.transformers.step_inputs import GROW, MASK, POSITIONS, SLICE, StepInputs

NEW = 12
BATCHES = {"one row": (1, 20, ()), "rows padded on the left": (3, 24, (0, 4, 7)), "a short prompt": (3, 9, (0, 4, 7))}
ATEN = torch.ops.aten
WAITS = [ATEN._local_scalar_dense.default, ATEN.item.default, ATEN.is_nonzero.default, ATEN.nonzero.default]
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": 300}  # which no row reaches


class Waits(TorchDispatchMode):
    """How often the host would wait for a GPU in each call of ``model``, and behind it, before the next."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.calls: list[list[int]] = []
        self.watched, self._where = True, 0
        model.register_forward_pre_hook(self._begins)
        model.register_forward_hook(self._ends)

    def _begins(self, *_: Any) -> None:
        self.calls.append([0, 0])
        self._where = 0

    def _ends(self, *_: Any) -> None:
        self._where = 1

    def __torch_dispatch__(self, op: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if op in WAITS:
            self.waited()
        return op(*given, **(named or {}))

    def waited(self) -> None:
        if self.watched and self.calls:
            self.calls[-1][self._where] += 1


@contextmanager
def waits(model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Waits]:
    """Replays are not watched: on a GPU they are one launch."""
    found = Waits(model)

    def counted(real: Any) -> Any:
        def call(tensor: Tensor, *given: Any, **named: Any) -> Any:
            found.waited()
            return real(tensor, *given, **named)

        return call

    def replay(real: Any) -> Any:
        def call(self: Watched) -> None:
            found.watched = False
            real(self)
            found.watched = True

        return call

    with monkeypatch.context() as patch, found:
        for name in ("tolist", "cpu", "numpy"):  # which a TorchDispatchMode does not see
            patch.setattr(Tensor, name, counted(getattr(Tensor, name)))
        patch.setattr(Watched, "replay", replay(Watched.replay))
        yield found


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("batch", BATCHES)
def test_a_step_does_not_wait(batch: str, mode: Any, replays: list[Watched], monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind it ``generate`` itself waits once, to see whether all rows have ended. The first step reads the mask and the positions, in
    one copy."""
    given = prompts(*BATCHES[batch])
    plain: Any = model_of("llama")
    with mode(), waits(plain, monkeypatch) as expected:
        plain.generate(**given, **GREEDY, past_key_values=DynamicCache(config=plain.config))
    model: Any = compile(model_of("llama"), (1, 3))
    with mode(), waits(model, monkeypatch) as found:
        tokens = model.generate(**given, **GREEDY, past_key_values=own_cache(model))
    assert len(replays) == NEW - 2
    assert found.calls[1:] == [[1, 1], *[[0, 1]] * (NEW - 2)]
    assert [behind for _, behind in expected.calls[1:]] == [1] * (NEW - 1)
    release(model)
    assert torch.equal(tokens, model.generate(**given, **GREEDY, past_key_values=own_cache(model)))


def test_what_others_write_to_a_mask_is_read(replays: list[Watched]) -> None:
    """A mask that becomes another one on the way is refused, as it was before its values were known."""
    model: Any = compile(model_of("llama"), (3,))
    seen: list[int] = []

    def write(_: Any, __: Any, named: dict[str, Any]) -> None:
        seen.append(named["input_ids"].shape[1])
        if len(seen) == 6:
            named[MASK][0, 3] = 0

    model.register_forward_pre_hook(write, with_kwargs=True)
    with pytest.raises(ValueError, match=r"attention_mask shows \[27, 24, 21\] of the 28 columns"):
        model.generate(**prompts(*BATCHES["rows padded on the left"]), **GREEDY, past_key_values=own_cache(model))
    assert len(seen) == 6 and len(replays) == 4  # one was launched ahead of that call, and taken back


class Loop:
    """What ``generate`` does between two calls of a model."""

    def __init__(self, model: Any, lengths: list[int]) -> None:
        self.model, self.lengths, seen = model, lengths, max(lengths)
        mask = torch.tensor([[0] * (seen - n) + [1] * n for n in lengths])
        self.kwargs: dict[str, Any] = {MASK: mask, POSITIONS: (mask.cumsum(1) - 1).clamp(min=0)}

    def next(self) -> tuple[Tensor, Tensor]:
        self.kwargs = getattr(self.model, GROW)(CausalLMOutputWithPast(), self.kwargs, is_encoder_decoder=False)
        ids = torch.zeros_like(self.kwargs[MASK])
        made = getattr(self.model, SLICE)(ids, next_sequence_length=1, use_cache=True, **self.kwargs)
        return made[MASK], made[POSITIONS]


@pytest.fixture
def inputs() -> Iterator[StepInputs]:
    """Of a model that is told what ``generate`` does."""
    found = StepInputs(model_of("llama", quantized=False))
    found.install()
    yield found
    found.uninstall()
    assert not {GROW, SLICE} & set(found.model.__dict__)


def test_what_is_known_of_a_mask_and_positions(inputs: StepInputs) -> None:
    loop, lengths = Loop(inputs.model, [5, 3]), [5, 3]
    mask, positions = loop.next()
    assert not inputs.hold(mask, positions, 5, lengths)  # not read yet
    inputs.learn(mask, positions, lengths)
    assert inputs.hold(mask, positions, 5, lengths)
    for step in range(1, 4):
        mask, positions = loop.next()
        grown = [n + step for n in lengths]
        assert mask.sum(1).tolist() == [n + 1 for n in grown] and positions.flatten().tolist() == grown  # as is said
        assert inputs.hold(mask, positions, 5 + step, grown)
    assert not inputs.hold(mask, positions, 8, [8, 5]) and not inputs.hold(mask, positions, 7, grown)  # of a cache that was cut
    assert not inputs.hold(mask, None, 8, grown) and not inputs.hold(None, positions, 8, grown)  # columns would be counted
    assert not inputs.hold(mask.clone(), positions, 8, grown) and not inputs.hold(mask, positions.clone(), 8, grown)
    positions[0, 0] += 0
    assert not inputs.hold(mask, positions, 8, grown)
    mask, positions = loop.next()
    assert inputs.hold(mask, positions, 9, [9, 7])  # of whole positions, which nobody wrote to
    loop.kwargs[MASK][0, 0] = 0
    mask, positions = loop.next()
    assert not inputs.hold(mask, positions, 10, [10, 8])
    inputs.learn(mask, positions, [10, 8])
    assert inputs.hold(mask, positions, 10, [10, 8])


def test_masks_that_others_made_are_never_known(inputs: StepInputs) -> None:
    mask, positions = torch.ones(2, 6, dtype=torch.int64), torch.tensor([[5], [5]])
    inputs.learn(mask, positions, [5, 5])
    assert not inputs.hold(mask, positions, 5, [5, 5])
    assert inputs.hold(None, None, 5, [5, 5]) and not inputs.hold(None, None, 5, [5, 4])
    getattr(inputs.model, GROW)(CausalLMOutputWithPast(), {MASK: mask, POSITIONS: positions}, num_new_tokens=2)
    assert inputs._mask.tensors == inputs._positions.tensors == ()  # of drafts


@pytest.mark.parametrize("case", ["positions by two", "a mask of more", "another error", "somebody else's"])
def test_another_loop_is_not_known(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = getattr(GenerationMixin, GROW)

    def grow(self: Any, outputs: Any, model_kwargs: dict[str, Any], **named: Any) -> dict[str, Any]:
        if case == "another error":
            raise TypeError("outputs")
        made = real(self, outputs, model_kwargs, **named)
        if case == "positions by two":
            made[POSITIONS][:, -1] += 1
        elif case == "a mask of more":
            made[MASK][:, 0] = 1
        return made

    grow.__module__ = "of.others" if case == "somebody else's" else "transformers.generation.utils"
    monkeypatch.setattr(GenerationMixin, GROW, grow)
    model = model_of("llama", quantized=False)
    inputs = StepInputs(model)
    inputs.install()
    assert not {GROW, SLICE} & set(model.__dict__)
    inputs.uninstall()


@torch.no_grad()
def test_a_copy_knows_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = compile(model_of("llama"), (1,))
    copied = copy.deepcopy(model)
    read: list[Any] = []
    real = TilebitCache.continues
    monkeypatch.setattr(TilebitCache, "continues", lambda self, *given: (read.append(self), real(self, *given))[1])
    for of in (model, copied):
        assert getattr(of, GROW).__self__ is of.tilebit_steps.inputs and of.tilebit_steps.inputs.model is of
        cache = own_cache(of)
        of.generate(**prompts(1, 20), **GREEDY, past_key_values=cache)
        assert read == [cache, cache]  # a prompt, and the first step
        read.clear()


@pytest.mark.gpu
def test_a_step_on_a_gpu_waits_once() -> None:
    model: Any = compile(model_of("llama").cuda(), (3,))
    given = {name: value.cuda() for name, value in prompts(*BATCHES["rows padded on the left"]).items()}
    cache = own_cache(model)
    model.generate(**given, **GREEDY, past_key_values=cache)  # kernels compile and load, the step is captured
    cache.reset()
    steps: list[int] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.register_forward_pre_hook(lambda *_: steps.append(len(said)))
        torch.cuda.set_sync_debug_mode("warn")
        try:
            model.generate(**given, **GREEDY, past_key_values=cache)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(steps) == NEW
    assert [after - before for before, after in pairwise(steps[2:])] == [1] * (NEW - 3)
