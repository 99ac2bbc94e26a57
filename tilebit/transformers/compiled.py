"""``compile``: decode steps of a model of transformers as one fused step, on GPUs as one CUDA graph,
and prompts in as few kernels."""

from __future__ import annotations

import copy
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MethodType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..accepted import expect
from ..cache.batch import Batch
from ..cache.kvcache import KVCache
from ..ops.plans import bucket
from ..weights.any_modules import AnyPrecisionLinear
from .ahead import StepAhead
from .anatomy import anatomy
from .attend import MOST_AT_ONCE
from .cache import NAME, TilebitCache
from .fused import FusedStep
from .parted import BY_DEFAULT, PARTS, Part, prepared
from .rehearsal import rehearse
from .step_inputs import StepInputs
from .unchanged import Built

ALLOWED = {"input_ids", "past_key_values", "attention_mask", "position_ids", "use_cache", "return_dict", "logits_to_keep"}

CHANGES = ("_apply", "load_state_dict")  # methods after which a model's tensors may be other ones


def compile(
    model: PreTrainedModel, batch_sizes: Iterable[int] = (1,), max_tokens: int | None = None, parts: Iterable[Part] = BY_DEFAULT
) -> PreTrainedModel:
    """``model`` itself, whose decode steps and prompts are fused from now on, also in ``generate``:

        tilebit.transformers.compile(model, batch_sizes=(1, 16))
        model.generate(**inputs, past_key_values=TilebitCache(model.config, "kv4_channel", max_tokens=4096, sequences=1))

    A call under ``torch.no_grad`` with one new token a row, ``batch_sizes`` rows and a filled
    ``TilebitCache`` takes the fused step: q, k and v are one product, gate and up another, norms
    take the residual sum with them, rotary embeddings the write to the cache, and each kernel is
    launched before the one before it ends. Windows that fill are packed behind all layers: the
    token that fills one reads it in 16 bits. On a GPU the step is captured as a CUDA graph at the
    second such call with a cache, and replayed from then on: use one cache again (``reset()``)
    rather than making another. Each width of any-precision layers (``set_precision``) has a graph
    of its own. A call with more than 16 new tokens in each of any number of rows, a prompt or a
    chunk of one, takes the same kernels, without a graph, where the model has no norms of q and k.
    Any other call runs as it did: drafts of several tokens, outputs of hidden states, training.
    ``generate`` finds most steps launched when it asks for them: each is launched when its tokens
    are chosen, while the host reads whether all rows have ended, and one that nobody asks for is
    taken back. Beams and drafts have none of that, nor has ``torch.inference_mode``, whose tensors
    do not say who wrote to them. Masks and positions that ``generate`` makes are read at its first
    step and known from then on; those of calls, or that others have written to, are read at each
    step, which waits for the device.

    Kernels of the step's products are compiled here, in parallel, for as many rows as
    ``batch_sizes`` names, and counted by a bar on a terminal's standard error. Weights are held
    once: the model's layers become views of the joined ones. ``max_tokens`` bounds a sequence
    (default: the model's own bound). Layers that are replaced afterwards, hooks in the model, and a
    model that is moved, cast or loaded are noticed at the next call; tensors of its parts that are
    loaded, cast or written to, at the next prompt, or the next step behind another call. They are
    joined again; with hooks, or layers that are not known, the model runs as before. Layers of any
    precision make a product each, in the width that they are set to: the first call behind
    ``set_precision`` has the kernels of a new width ready, compiled then if they must be.

    ``parts`` are what products do in their own kernels where their layers are of ``QuantLinear``:
    "gate" (gate and up apply the activation up to 16 rows of x: on an H200 1 to 2 % of a step of up
    to 16 sequences), "residual" (o and down add to the residual stream) and "norm" (qkv, and gate
    and up, norm up to 16 rows of x, behind a "residual"). The default is the gate; ``()`` asks for
    none. The last two save nothing that shows at one sequence, and cost time at 16 and more
    (results/notes/step-parts.md). Sums are then rounded once where they were rounded twice. No part
    needs memory. Packs of models hold the kernels of steps with the default.

    Known are Llama, Mistral, Qwen2, Qwen3, Phi-3 and Gemma-2 with a head of 64, 128 or 256
    channels; for another model one warning says what is not known, and it runs as it did. Raises
    ``TypeError`` and ``ValueError`` for what is no model of transformers, no number of rows or no
    part, and ``KernelUnavailable`` where a kernel cannot be built.
    """
    expect("model", model, PreTrainedModel, "a causal language model of transformers")
    sizes = sorted(set(batch_sizes))
    if not sizes or any(type(size) is not int or size < 1 for size in sizes):
        raise ValueError(f"batch_sizes is {sizes}; accepted: one or more numbers of rows, 1 and above")
    bound = getattr(model.config, "max_position_embeddings", None) if max_tokens is None else max_tokens
    if type(bound) is not int or bound < 1:
        raise ValueError(f"max_tokens is {bound!r}; accepted: the most tokens that a sequence may have, 1 and above")
    chosen = tuple(parts)
    if isinstance(parts, str) or not set(chosen) <= set(PARTS):
        raise ValueError(f"parts is {parts!r}; accepted: any of {', '.join(map(repr, PARTS))}, in a list")
    release(model)
    try:
        steps = DecodeSteps(model, sizes, bound, chosen)
    except ValueError as error:
        warnings.warn(f"{type(model).__name__} is not compiled, and runs as before: {error}", stacklevel=2)
        return model
    model.set_attn_implementation(NAME)
    steps.install()
    return model


def release(model: PreTrainedModel) -> None:
    """Let ``model`` run as it did before ``compile``."""
    held = model.__dict__.pop("tilebit_steps", None)
    if held is not None:
        held.uninstall()


@dataclass(slots=True, eq=False)
class Captured:
    """A step as a CUDA graph: it adds ``growth`` to the numbers of its batch, reads ``ids`` and writes
    ``logits``, in the memory of the cache that the batch is of."""

    graph: torch.cuda.CUDAGraph
    ids: Tensor
    logits: Tensor
    growth: np.ndarray
    added: Tensor  # the same on the device


Widths = tuple[int, ...]  # of any-precision layers
# None: one step has run, and loaded its kernels
Graphs = weakref.WeakKeyDictionary[Batch, dict[Widths, Captured | None]]


class DecodeSteps:
    """The fused steps of a model, for batches of ``sizes`` rows, one graph for each batch of a cache and
    each width that its layers are set to; and its fused prompts."""

    def __init__(self, model: PreTrainedModel, sizes: list[int], max_tokens: int, parts: tuple[Part, ...] = BY_DEFAULT) -> None:
        self.model, self.sizes, self.max_tokens, self.parts = model, sizes, max_tokens, parts
        self._graphs: Graphs = weakref.WeakKeyDictionary()
        self.inputs, self.ahead = StepInputs(model), StepAhead(self)
        self._build()

    def _build(self) -> None:
        self.step = FusedStep(anatomy(self.model), self.model.device, self.max_tokens, self.parts)
        self._built = Built(self.model)
        self._any = [layer for layer in self.model.modules() if isinstance(layer, AnyPrecisionLinear)]
        self._prompts: set[tuple[int, int, str, Widths]] = (
            set()
        )  # tokens and rows, rounded up, and caches' formats, whose kernels are there
        self._stale = self._unknown = self._read = False
        self.renew()

    def renew(self) -> None:
        """Take the kernels that are chosen now; steps are captured anew."""
        self._graphs.clear()
        self._prompts.clear()
        self._ready: set[Widths] = set()  # whose products' kernels are there
        self._in_width()

    def _in_width(self) -> Widths:
        """The widths that layers are set to, whose kernels are there."""
        widths = self.widths()
        if widths not in self._ready:
            prepared(self.step.products, self.sizes)
            self._ready.add(widths)
        return widths

    # ---- in the model ----

    def install(self) -> None:
        """Be asked first wherever the model is called or changed. Bound methods, so that a copy of the
        model has its own."""
        model = self.model
        self._own = {name: getattr(model, name) for name in ("forward", *CHANGES)}
        model.__dict__["tilebit_steps"] = self
        model.__dict__["forward"] = MethodType(_called(type(model)), self)
        model.__dict__.update({name: MethodType(_changed(type(model), name), self) for name in CHANGES})
        self.inputs.install()
        self.ahead.install()

    def uninstall(self) -> None:
        self.ahead.uninstall()
        self.inputs.uninstall()
        for name in self._own:
            self.model.__dict__.pop(name, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> DecodeSteps:
        """Of a copied model, whose step is built at its first call."""
        made = memo[id(self)] = type(self).__new__(type(self))
        made.model, made._own = copy.deepcopy(self.model, memo), copy.deepcopy(self._own, memo)
        made.sizes, made.max_tokens, made.parts, made._built, made._stale = self.sizes, self.max_tokens, self.parts, None, True
        made._unknown = made._read = False
        made._graphs, made.inputs = weakref.WeakKeyDictionary(), copy.deepcopy(self.inputs, memo)
        made.ahead = copy.deepcopy(self.ahead, memo)
        return made

    def __reduce__(self) -> NoReturn:
        raise TypeError("a compiled model cannot be pickled; accepted: save_pretrained, or release(model) before")

    def original(self, *given: Any, **named: Any) -> Any:
        """A call of the model as it ran before."""
        return self._own["forward"](*given, **named)

    def called(self, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        plain = not given and self._plain(named)
        logits = self.ahead.taken(named if plain else None)
        if logits is not None:
            return _answer(logits, named["past_key_values"])
        taken = self._taker(named) if plain else None
        if taken is None:
            # Tensors are read at the next step: not at each of a model that is not known.
            self._read = self._read and self._unknown and plain and named["input_ids"].shape[1] == 1
            return self.original(*given, **named)
        return taken()

    def changed(self, name: str, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        self._stale = True
        return self._own[name](*given, **named)

    def is_current(self) -> bool:
        """Whether each layer is the one that the step was built of."""
        return not self._stale and self._built is not None and self._built.layers_same()

    def _current(self, read: bool) -> bool:
        """Whether the step is of the model as it is, once built again if need be; ``read``: its
        tensors, too."""
        if self._unknown and not read:
            return False
        if not self.is_current() or (read and self._built is not None and not self._built.tensors_same()):
            try:
                self._build()
            except ValueError as error:
                if not self._unknown:
                    warnings.warn(f"{type(self.model).__name__} runs as before it was compiled: {error}", stacklevel=2)
                self._stale = self._unknown = self._read = True
                return False
        self._read = self._read or read
        return True

    # ---- a call ----

    def _plain(self, named: dict[str, Any]) -> bool:
        """Whether a call asks for nothing that fused kernels do not give."""
        ids, mask = named.get("input_ids"), named.get("attention_mask")
        if not isinstance(named.get("past_key_values"), TilebitCache) or not isinstance(ids, Tensor) or ids.ndim != 2:
            return False
        others = {name for name, value in named.items() if name not in ALLOWED and value not in (None, False)}
        if others or named.get("return_dict") is False or not (mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)):
            return False
        config: Any = self.model.config
        if config.output_hidden_states or config.output_attentions:
            return False
        return not torch.is_grad_enabled() and not self.model.training and (self._built is None or self._built.plain())

    def _taker(self, named: dict[str, Any]) -> Callable[[], CausalLMOutputWithPast] | None:
        """Who takes a plain call with these arguments; None: the model itself."""
        ids, cache, mask, positions = (named.get(name) for name in ("input_ids", "past_key_values", "attention_mask", "position_ids"))
        assert isinstance(ids, Tensor) and isinstance(cache, TilebitCache)
        rows, columns = ids.shape
        if not cache.fusible or cache.seen + columns > self.max_tokens:
            return None
        if columns == 1:
            known = rows in self.sizes and cache.seen > 0 and self._one_each(cache, mask, positions, rows)
            if known and self._current(read=not self._read):
                return lambda: self._stepped(cache, ids)
        elif columns > MOST_AT_ONCE and self._current(read=True):
            kept = named.get("logits_to_keep", 0)
            whole = isinstance(kept, int) and (mask is None or bool(mask[:, -(kept or columns) :].all()))  # logits of padding are its own
            if whole and cache.continues(mask, positions, rows, columns):
                return lambda: self._prompted(cache, ids, mask, kept or columns)
        return None

    def _one_each(self, cache: TilebitCache, mask: Tensor | None, positions: Tensor | None, rows: int) -> bool:
        """Whether a call brings one token to each row; masks and positions are read where that is not known."""
        lengths = cache.pool.lengths()
        if len(lengths) == rows and self.inputs.hold(mask, positions, cache.seen, lengths):
            return True
        if not cache.continues(mask, positions, rows, 1):
            return False
        self.inputs.learn(mask, positions, lengths)
        return True

    def _stepped(self, cache: TilebitCache, ids: Tensor) -> CausalLMOutputWithPast:
        logits = self.run(cache, ids[:, 0])
        self.ahead.stepped(cache, len(ids))
        return _answer(logits, cache)

    def _prompted(self, cache: TilebitCache, ids: Tensor, mask: Tensor | None, kept: int) -> CausalLMOutputWithPast:
        """Logits of the last ``kept`` columns of a prompt, or of a chunk of one."""
        rows, columns = ids.shape
        begun = cache.begin_step(rows, columns, mask, self.model.dtype, ids.device)
        tokens, last = ids.flatten(), torch.arange(rows * columns, device=ids.device).view(rows, columns)[:, -kept:].reshape(-1)
        if begun.places is not None:
            tokens, last = tokens[begun.places], torch.searchsorted(begun.places, last.contiguous())
        kv = cache.pool.cache
        try:
            self._prepare_prompt(len(tokens), kv, begun.batch, lambda: self.step.prompt(tokens, kv, begun.batch, last))
            logits = self.step.prompt(tokens, kv, begun.batch, last)
        except Exception:
            cache.abandon()
            raise
        cache.settle()
        return CausalLMOutputWithPast(logits=logits.view(rows, -1, logits.shape[-1]), past_key_values=cache)  # type: ignore[arg-type]

    def _prepare_prompt(self, tokens: int, kv: KVCache, batch: Batch, call: Callable[[], object]) -> None:
        """Compile what the first prompt of about this size will launch, in parallel."""
        kind = (bucket(tokens), bucket(batch.size), kv.format.name, self.widths())
        if kind in self._prompts:
            return
        prepared(self.step.products, [tokens])
        if not any(batch.past_lengths):  # else a window might be packed before its rows are read
            rehearse(batch, call)
        self._prompts.add(kind)

    def run(self, cache: TilebitCache, ids: Tensor) -> Tensor:
        """Logits [rows, vocabulary] behind ``ids`` [rows]: on a GPU a buffer that the next step writes to."""
        logits = self.launched(cache, ids)
        cache.settle()
        return logits

    def launched(self, cache: TilebitCache, ids: Tensor) -> Tensor:
        """``run`` for who says later whether the step counts: ``cache.settle()``, or ``cache.take_back()``."""
        step = cache.begin_step(len(ids), 1, None, self.model.dtype, ids.device, all_tokens=True)
        try:
            return self.launch(cache.pool.cache, step.batch, ids)
        except Exception:
            cache.abandon()
            raise

    def launch(self, kv: KVCache, batch: Batch, ids: Tensor) -> Tensor:
        """``run`` for who keeps sequences in a ``KVCache`` of their own, with a layer for each of the model's:
        ``batch`` has been advanced by one token each, best ``deferred``. On a GPU, captured at the second call
        with both; from then on ``ids`` that are ``tokens(batch)`` are read where they lie."""
        graphs, widths = self._graphs.setdefault(batch, {}), self._in_width()
        if widths not in graphs:
            rehearse(batch, lambda: self.step(ids, kv, batch))
            graphs[widths] = None
            return self.step(ids, kv, batch)  # kernels load, and workspaces are made, outside of the graph
        if not self._captures(ids):
            return self.step(ids, kv, batch)
        captured = graphs[widths]
        if captured is None:
            captured = graphs[widths] = self._captured(kv, batch, ids)
        if ids.data_ptr() != captured.ids.data_ptr():
            captured.ids.copy_(ids)
        batch.lag(captured.growth)
        captured.graph.replay()
        return captured.logits

    def tokens(self, batch: Batch) -> Tensor | None:
        """The int64 [rows] that the captured step of ``batch`` reads its tokens from, for who samples into
        it; None before it is captured."""
        captured = self._graphs.get(batch, {}).get(self.widths())
        return None if captured is None else captured.ids

    def replay(self, batch: Batch) -> None:
        """The captured step of ``batch`` once more, as it is: what is left without the host's work."""
        captured = self._graphs[batch][self.widths()]
        assert captured is not None
        batch.lag(captured.growth)
        captured.graph.replay()

    def widths(self) -> Widths:
        """The widths that any-precision layers are set to."""
        return tuple(layer.bits for layer in self._any)

    def _captures(self, ids: Tensor) -> bool:
        return ids.is_cuda

    def _captured(self, kv: KVCache, batch: Batch, ids: Tensor) -> Captured:
        held, growth = ids.clone(), batch.growth()
        added = torch.from_numpy(growth).to(ids.device)
        batch.refresh()  # its numbers are no part of the graph
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            batch.grow(added)
            logits = self.step(held, kv, batch)
        return Captured(graph, held, logits, growth, added)


def _answer(logits: Tensor, cache: TilebitCache) -> CausalLMOutputWithPast:
    """Of a step, whose ``logits`` [rows, vocabulary] the next one may write to."""
    return CausalLMOutputWithPast(logits=logits.clone()[:, None], past_key_values=cache)  # type: ignore[arg-type]


def _called(kind: type) -> Callable[..., Any]:
    @functools.wraps(kind.forward)  # generate looks at what a model's forward takes
    def forward(steps: DecodeSteps, *given: Any, **named: Any) -> Any:
        return steps.called(given, named)

    return forward


def _changed(kind: type, name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(kind, name))
    def change(steps: DecodeSteps, *given: Any, **named: Any) -> Any:
        return steps.changed(name, given, named)

    return change
