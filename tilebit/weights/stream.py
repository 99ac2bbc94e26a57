"""A model's linear layers visited in the order in which they are computed, each with what its
inputs say (``InputProducts``, or ``input_rows.InputRows``), so that a layer sees what the layers before it
became.

Decoder blocks that are computed one after the other are streamed: the inputs of one block for all
batches are held. Layers of a block that take the same input, such as q, k and v, are visited
together; a block is computed once for each such group, to see its inputs, and once with what all of
its layers became. Other layers, those in a row that take the same input together, take a pass through the
whole model each.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ..progress import counted
from .batches import evaluating, run
from .layer_inputs import LayerInputs

Layers = Mapping[str, nn.Linear]
T = TypeVar("T", covariant=True)


class Gathered(Protocol[T]):
    """What the inputs of some layers say, by the layer's name, over every call while it is open."""

    @property
    def of(self) -> Mapping[str, T]: ...
    def __enter__(self) -> Any: ...
    def __exit__(self, *_: object) -> None: ...


@dataclass(slots=True)
class _Call:
    """One block's call for one batch: all but its first argument."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class InputProducts(LayerInputs):
    """X^T X of the inputs X [rows, k] of some layers, summed in fp32 over every call while this is
    open; ``of[name]`` is [k, k] on the layer's device, 0 for a layer that was not called. A tensor
    that several layers take in a row is multiplied once."""

    def __init__(self, layers: Layers) -> None:
        super().__init__(layers)
        self.of = {name: torch.zeros(layer.in_features, layer.in_features, device=layer.weight.device) for name, layer in layers.items()}
        self._product: Tensor | None = None  # of the last input

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._product = None

    def _take(self, name: str, x: Tensor) -> None:
        if not self._repeats(x) or self._product is None:
            rows = x.detach().reshape(-1, x.shape[-1]).float()
            self._product = rows.t() @ rows
        self.of[name] += self._product


def visit_layers(
    model: nn.Module,
    layers: Layers,
    batches: Sequence[Any],
    visit: Callable[[str, nn.Linear, T], Tensor],
    progress: bool = False,
    gather: Callable[[Layers], Gathered[T]] = InputProducts,
) -> None:
    """Call ``visit(name, layer, said)`` for each of ``layers`` in the order in which ``model``
    computes them; ``said`` is what ``gather`` has of the layer's inputs over all ``batches``: X^T X fp32 [k, k],
    or ``Inputs`` (``InputRows``). What it returns, [n, k], is the layer's weight for the layers after it.

    Layers in a row that take the same input are visited together, and in the blocks of the model's
    longest list of them so are those of all experts: they see one another as they were (GPTQ's
    "true sequential" order; what it gains is in results/notes/quality-gptq.md). The model computes in evaluation mode,
    without gradients, and is as it was afterwards, also after an error: its layers' own weights are kept beside
    the others until then. A layer that no batch reaches is visited last, with what is said of no inputs.
    """
    originals: list[tuple[nn.Linear, nn.Parameter]] = []

    def settle(names: Sequence[str], gathered: Gathered[T]) -> Iterator[str]:
        for name in names:
            layer = layers[name]
            became = visit(name, layer, gathered.of[name])
            originals.append((layer, layer.weight))
            layer.weight = nn.Parameter(became.to(layer.weight), requires_grad=False)
            yield name

    with torch.no_grad(), evaluating(model):
        try:
            steps = _steps(model, layers, batches, gather, settle)
            for _ in counted(steps, "calibrating", len(layers), progress):
                pass
        finally:
            for layer, weight in originals:
                layer.weight = weight


def _steps(
    model: nn.Module,
    layers: Layers,
    batches: Sequence[Any],
    gather: Callable[[Layers], Gathered[T]],
    settle: Callable[[Sequence[str], Gathered[T]], Iterator[str]],
) -> Iterator[str]:
    blocks = find_blocks(model, layers)
    inside = {id(module) for block in blocks for module in block.modules()}
    inputs_of = _call_order(model, layers, batches[0])
    order = list(inputs_of)
    first = next((place for place, name in enumerate(order) if id(layers[name]) in inside), len(order))
    before, rest = order[:first], order[first:]

    def whole_passes(names: Sequence[str]) -> Iterator[str]:
        for _, in_a_row in groupby(names, inputs_of.__getitem__):
            group = list(in_a_row)
            gathered = gather({name: layers[name] for name in group})
            with gathered:
                for batch in batches:
                    run(model, batch)
            yield from settle(group, gathered)

    yield from whole_passes(before)
    held = _block_inputs(model, blocks, batches) if blocks else None
    if held is None:
        yield from whole_passes(rest)
        return
    inputs, calls = held
    for block, own_calls in zip(blocks, calls, strict=True):
        within = {id(module) for module in block.modules()}
        names = [name for name in rest if id(layers[name]) in within]
        for group in _sharing_inputs(block, {name: layers[name] for name in names}, inputs[0], own_calls[0]):
            gathered = gather({name: layers[name] for name in group})
            with gathered:
                for x, call in zip(inputs, own_calls, strict=True):
                    block(x.clone(), *call.args, **call.kwargs)
            yield from settle(group, gathered)
        for place, call in enumerate(own_calls):
            inputs[place] = _first(block(inputs[place], *call.args, **call.kwargs))
    yield from whole_passes([name for name in rest if id(layers[name]) not in inside])


def _sharing_inputs(block: nn.Module, layers: Layers, x: Tensor, call: _Call) -> list[list[str]]:
    """The names of ``layers``, in order, in groups: a kind of layer that is first called with the
    input of the kind before it joins that one's group. Layers of one kind have the same path but for
    numbers in it: experts."""
    kinds: dict[str, list[str]] = {}
    for name in layers:
        kinds.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "#", name), []).append(name)
    taken: dict[str, Any] = {}  # by kind, in the order of calls

    def taking(kind: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            taken.setdefault(kind, args[0] if args else kwargs["input"])

        return take

    with ExitStack() as hooks:
        for kind, names in kinds.items():
            for name in names:
                hooks.callback(layers[name].register_forward_pre_hook(taking(kind), with_kwargs=True).remove)
        block(x.clone(), *call.args, **call.kwargs)
    groups: list[list[str]] = []
    before: Any = None
    for kind in (*taken, *(kind for kind in kinds if kind not in taken)):
        if taken.get(kind) is None or taken[kind] is not before:
            groups.append([])
        before = taken.get(kind)
        groups[-1] += kinds[kind]
    return groups


def find_blocks(model: nn.Module, layers: Layers) -> list[nn.Module]:
    """The modules of the ``nn.ModuleList`` or ``nn.Sequential`` of ``model`` that holds most of
    ``layers``, two modules at least, none of which shares a module with another; else none."""
    wanted = {id(layer) for layer in layers.values()}
    best, held = [], 0
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1:
            parts = [id(part) for block in module for part in block.modules()]
            count = len(wanted.intersection(parts))
            if count > held and len(parts) == len(set(parts)):
                best, held = list(module), count
    return best


def _call_order(model: nn.Module, layers: Layers, batch: Any) -> dict[str, int]:
    """The names of ``layers`` in the order of their first calls, those not called at the end, each with a
    number: that of the layer before it where both took the same input, else another one."""
    called: dict[str, int] = {}
    last, number = None, 0

    def calling(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def call(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal last, number
            if name not in called:
                x = args[0] if args else kwargs["input"]
                number += x is not last
                called[name], last = number, x

        return call

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.callback(layer.register_forward_pre_hook(calling(name), with_kwargs=True).remove)
        run(model, batch)
    return called | {name: -place for place, name in enumerate(layers) if name not in called}


def _block_inputs(model: nn.Module, blocks: Sequence[nn.Module], batches: Sequence[Any]) -> tuple[list[Tensor], list[list[_Call]]] | None:
    """The first block's input for each batch, and by block and batch the rest of the call. None
    where blocks are not called once each, in order, each with the output of the one before it as
    its first argument, where what else they are given is a block's output too (it would be that of
    layers as they were), or where they write to a cache that they are given."""
    inputs: list[Tensor] = []
    calls: list[list[_Call]] = [[] for _ in blocks]
    chained = True
    previous: Any = None
    made: dict[int, weakref.ref[Tensor]] = {}  # the tensors that blocks gave, by id

    def enter(place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal chained
        x = args[0] if args else None
        expected = len(inputs) if place == 0 else len(inputs) - 1
        cached = any(value is not None for name, value in kwargs.items() if name.startswith("past_key_value"))
        others = (value for value in (*args[1:], *kwargs.values()) if isinstance(value, Tensor))
        cached |= any((made[id(value)]() if id(value) in made else None) is value for value in others)
        chained &= isinstance(x, Tensor) and len(calls[place]) == expected and (place == 0 or x is previous) and not cached
        if place == 0 and isinstance(x, Tensor):
            inputs.append(x.clone())
        calls[place].append(_Call(args[1:], dict(kwargs)))

    def leave(output: Any) -> None:
        nonlocal previous
        previous = _first(output)
        made.update(
            (id(part), weakref.ref(part)) for part in (output if isinstance(output, tuple) else (output,)) if isinstance(part, Tensor)
        )

    with ExitStack() as hooks:
        for place, block in enumerate(blocks):
            before = block.register_forward_pre_hook(lambda _, args, kwargs, place=place: enter(place, args, kwargs), with_kwargs=True)
            hooks.callback(before.remove)
            hooks.callback(block.register_forward_hook(lambda _module, _args, output: leave(output)).remove)
        for batch in batches:
            run(model, batch)
            if not chained:
                return None
    return (inputs, calls) if all(len(own) == len(batches) for own in calls) else None


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output
