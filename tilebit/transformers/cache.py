"""``TilebitCache``: the cache that transformers' ``generate`` is given, over a ``KVCache``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, get_layer_types_and_kwargs

from ..accepted import expect
from ..cache.counts import whole
from ..layouts.kv_formats import KVFormat
from .masks import Visible
from .pool import Pool
from .rollback import Undo, drop
from .step import Step, padding_of

HEAD_DIMS = (64, 128, 256)
NAME = "tilebit"  # of the attention
PAGE_SIZE = 128


class TilebitLayer(CacheLayerMixin):
    """One layer's part: it marks new keys as its own, which tilebit's attention then writes."""

    is_croppable = True

    def __init__(self, owner: TilebitCache, index: int) -> None:
        super().__init__()
        self.owner, self.index = owner, index
        self.seen = 0  # columns, padding among them
        self._marked: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self._marked is not None or self.owner.attention != NAME:
            self._marked = None
            of_config = f"a TilebitCache was made of a config whose attention is {self.owner.attention!r}"
            found = "keys of the call before never came to tilebit's attention: it failed, or its model has another attention"
            raise ValueError(
                f"{found if self.owner.attention == NAME else of_config}; accepted: the config of a model whose attention is 'tilebit': "
                "load it with attn_implementation='tilebit', or call model.set_attn_implementation('tilebit'), and reset() the cache"
            )
        marked = self._marked = key_states.view_as(key_states)
        marked.tilebit_layer = self  # type: ignore[attr-defined]
        return marked, value_states

    def taken(self) -> None:
        """The marked keys have come to tilebit's attention."""
        self._marked = None

    @property
    def batch_size(self) -> int:
        return self.owner.rows

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return self.owner.max_tokens

    def reset(self) -> None:
        self.seen, self._marked = 0, None


class TilebitCache(Cache):
    """Keys and values of a model of ``config`` in ``format`` ("kv4_channel"), for ``generate``:

        model.set_attn_implementation("tilebit")
        model.generate(**inputs, past_key_values=TilebitCache(model.config, format="kv4_channel"))

    ``max_tokens`` bounds a sequence (default: the model's own bound): so many tokens fit; more are
    not refused while its last page and the window of its newest tokens hold them. With ``sequences``
    the memory for as many of them (rows of the batch: beams and returned sequences, too) is taken
    at the first call and never grows; without, it doubles when it is full. ``head_scales`` are
    fp8's, as ``KVCache`` takes them. The newest 0 to 127 tokens of a sequence are in 16 bits.
    Padding never enters the cache.

    Layers that tilebit has no attention for are kept in 16 bits and attended to by transformers'
    own; one warning names them. Raises ``ValueError`` where that is every layer, and where layers
    differ in their heads; ``TypeError`` for what is no config. ``generate`` in every mode,
    ``crop``, ``reset`` and continued prompts work as on ``DynamicCache``; ``crop`` raises
    ``ValueError`` where it would take packed tokens apart (``activate_past_recording``, which
    assisted decoding calls, makes steps revocable until ``reset``).
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        format: KVFormat | str = "kv4_channel",
        max_tokens: int | None = None,
        sequences: int | None = None,
        page_size: int = PAGE_SIZE,
        head_scales: Tensor | None = None,
    ) -> None:
        expect("config", config, PreTrainedConfig, "the config of a model, model.config")
        text = config.get_text_config(decoder=True)
        self._config = text
        kinds, options = get_layer_types_and_kwargs(text)
        heads, head_dim = _heads(text)
        layers: list[Any] = list(DynamicCache(config=text).layers)
        lacking = {i: reason for i, kind in enumerate(kinds) if (reason := _lacking(text, kind, head_dim)) is not None}
        self.own = [TilebitLayer(self, place) for place, _ in enumerate(i for i in range(len(layers)) if i not in lacking)]
        if not self.own:
            raise ValueError(f"no layer can use a TilebitCache: {lacking[0]}; accepted: a model with one that can, or a DynamicCache")
        for layer, i in zip(self.own, (i for i in range(len(layers)) if i not in lacking), strict=True):
            layers[i] = layer
        if lacking:
            i, reason = next(iter(lacking.items()))
            warnings.warn(f"{len(lacking)} of {len(layers)} layers keep a cache in 16 bits, layer {i} first: {reason}", stacklevel=2)
        self.windowed = bool(options.get("sliding_window"))
        bound = getattr(text, "max_position_embeddings", None) or 1 << 17
        self.max_tokens = bound if max_tokens is None else whole("max_tokens", max_tokens, 1)
        self.pool = Pool(
            self.max_tokens, sequences, page_size, format=format, heads_kv=heads, head_dim=head_dim, num_layers=len(self.own),
            head_scales=head_scales,
        )  # fmt: skip
        self.format = KVFormat.from_name(format) if isinstance(format, str) else format
        self.seen = 0
        self.step: Step | None = None
        self.pending: Callable[[], None] | None = None  # takes back a step that was launched ahead (``ahead.py``)
        self._undo: Undo | None = None
        self._recording = self._broken = False
        self._padding: list[tuple[int, Tensor]] = []  # (first column, bool [rows, columns], true where one is padding) of steps with some
        super().__init__(layers=layers)

    @property
    def attention(self) -> str:
        return str(self._config._attn_implementation)

    @property
    def rows(self) -> int:
        return len(self.pool.handles) or -1

    @property
    def memory_bytes(self) -> int:
        """Bytes that are allocated for keys and values."""
        return self.pool.memory_bytes

    def begin(self, visible: Visible, k: Tensor) -> Step:
        """The step that new keys ``k`` [rows, heads, columns, head_dim] belong to: at a forward call's
        first layer a new one, with room for its tokens. Raises before anything has changed."""
        rows, _, columns, _ = k.shape
        return self._begun(rows, columns, visible.padding, k.dtype, k.device)

    @property
    def fusible(self) -> bool:
        """Whether a compiled step or prompt may write all layers at once: each is tilebit's, and no step is to
        be revocable."""
        return len(self.own) == len(self.layers) and not self._recording

    def continues(self, mask: Tensor | None, positions: Tensor | None, rows: int, columns: int) -> bool:
        """Whether a call with ``attention_mask`` and ``position_ids`` brings tokens to every one of ``rows``
        rows, each at its place behind those that the cache holds."""
        lengths = self.pool.lengths() or [0] * rows
        if mask is not None and tuple(mask.shape) != (rows, self.seen + columns):
            return False  # whoever takes the call says what is wrong
        if (mask is None or positions is None) and columns == 1 and lengths != [self.seen] * rows:
            return False  # the model would count columns
        if columns == 1:
            return self._one_each(mask, positions, lengths)
        there = None if mask is None else mask[:, -columns:] != 0
        if positions is None:
            return lengths == [self.seen] * rows and (there is None or bool(there.all()))
        given = positions.expand(rows, columns)
        behind = torch.arange(columns, device=given.device)[None] if there is None else there.cumsum(1) - 1
        same = given == torch.tensor(lengths, device=given.device)[:, None] + behind
        return bool((same if there is None else same | ~there).all())

    def _one_each(self, mask: Tensor | None, positions: Tensor | None, lengths: list[int]) -> bool:
        """``continues`` for one column. The device is waited for once."""
        read = [] if mask is None else [mask[:, :-1].sum(1, keepdim=True), mask[:, -1:] != 0]
        if positions is not None:
            read.append(positions.expand(len(lengths), 1).to(positions.device if mask is None else mask.device))
        columns = torch.cat(read, 1).T.tolist() if read else []
        expected = [] if mask is None else [lengths, [1] * len(lengths)]
        return columns == (expected if positions is None else [*expected, lengths])

    def begin_step(
        self, rows: int, columns: int, mask: Tensor | None, dtype: torch.dtype, device: torch.device, all_tokens: bool = False
    ) -> Step:
        """``begin`` for new columns of each row, which are written in all layers before ``settle``; numbers
        of the batch are ``deferred`` (``KVCache.advance``). ``all_tokens``: it is known (``continues``) that
        none of them is padding, and the mask is not read."""
        return self._begun(rows, columns, mask, dtype, device, deferred=True, all_tokens=all_tokens)

    def settle(self) -> None:
        """All layers have been written."""
        for layer in self.own:
            layer.seen = self.seen

    def take_back(self) -> None:
        """The last step has been written, and does not count: the next one writes over it."""
        assert self.step is not None
        self.pool.cache.table.retract(self.pool.handles, self.step.counts)
        self.seen -= self.step.columns

    def _without_pending(self) -> None:
        if self.pending is not None:
            self.pending()

    def _begun(
        self,
        rows: int,
        columns: int,
        mask: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
        deferred: bool = False,
        all_tokens: bool = False,
    ) -> Step:
        if self._broken:
            raise ValueError("an earlier call failed between two layers, and the cache holds half of its tokens; accepted: reset() first")
        if any(layer.seen != self.seen for layer in self.own):
            raise ValueError("a layer was called out of order: a forward call did not end; accepted: reset() first")
        self.pool.begin(rows, dtype, device)
        padding = None if all_tokens else padding_of(mask, columns, self.seen, self.pool.lengths())
        if padding is not None and self.windowed and self._inside(padding):
            raise ValueError(
                "attention_mask has padding between tokens, and the model has sliding windows, which count it; accepted: padding before "
                "the first token of a row"
            )
        counts = [columns] * rows if padding is None else [columns - n for n in padding.sum(1).tolist()]
        self._undo = Undo(self.pool.cache, self.pool.handles, counts) if self._recording else None
        batch = self.pool.advance(counts, deferred)
        if self._undo is not None:  # it may have grown
            self._undo.cache = self.pool.cache
        if padding is not None:
            self._padding.append((self.seen, padding))
        self.step = Step(batch, columns, counts, padding, device)
        self.seen += columns
        return self.step

    def keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        if self._undo is not None:
            self._undo.keep(layer, k, v)

    def abandon(self) -> None:
        """A layer of the step has failed."""
        assert self.step is not None
        if self.step.batch.written:
            self._broken = True
            return
        self.pool.cache.table.retract(self.pool.handles, self.step.counts)
        self.seen -= self.step.columns
        self._padding = [(start, padding) for start, padding in self._padding if start < self.seen]

    def _inside(self, padding: Tensor) -> bool:
        """Whether a row has padding after a token."""
        before = torch.tensor(self.pool.lengths()) > 0
        tokens = before[:, None] | ((~padding).cumsum(1) > 0)
        return bool((padding & tokens).any())

    # ---- what generate asks for ----

    def crop(self, tokens_to_remove: int) -> None:
        self._without_pending()
        given = int(tokens_to_remove)  # generate passes a tensor; above 0 it is what is left, as of old
        removed = min(-given if given <= 0 else max(0, self.seen - given), self.seen)
        if removed and self.pool.handles:
            left = self.seen - removed
            counts = [removed - n for n in self._padded(left)]
            drop(self.pool.cache, self.pool.handles, counts, self._undo)
            self.seen = left
            for layer in self.own:
                layer.seen = left
            self._padding = [(start, padding[:, : left - start]) for start, padding in self._padding if start < left]
        self._undo = None
        for layer in self._others():
            layer.crop(-removed)

    def _padded(self, first: int) -> list[int]:
        """Columns of padding from ``first`` on, of each row."""
        counts = torch.zeros(len(self.pool.handles), dtype=torch.int64)
        for start, padding in self._padding:
            counts += padding[:, max(0, first - start) :].sum(1)
        return counts.tolist()

    def activate_past_recording(self) -> None:
        self._without_pending()
        self._recording = True
        super().activate_past_recording()

    def reset(self) -> None:
        self._without_pending()
        self.pool.reset()
        self.seen, self._padding, self._undo, self._broken, self._recording = 0, [], None, False, False
        for layer in self.own:
            layer.reset()
        if self._others():  # whose own reset leaves zeros to be attended to
            fresh = DynamicCache(config=self._config).layers
            self.layers[:] = [layer if isinstance(layer, TilebitLayer) else fresh[i] for i, layer in enumerate(self.layers)]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx.tolist())
        for layer in self._others():
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([row for row in range(len(self.pool.handles)) for _ in range(repeats)])
        for layer in self._others():
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        rows = torch.arange(len(self.pool.handles))[indices.cpu()]  # indices, or a mask
        self._select(rows.tolist())
        for layer in self._others():
            layer.batch_select_indices(indices)

    def _select(self, rows: Sequence[int]) -> None:
        self._without_pending()
        if not self.pool.handles:
            return
        self.pool.select(rows)
        self._padding = [(start, padding[list(rows)]) for start, padding in self._padding]
        self._undo = None

    def _others(self) -> list[Any]:
        return [layer for layer in self.layers if not isinstance(layer, TilebitLayer)]


def cache_bytes(cache: Any) -> int:
    """Bytes that a cache holds for keys and values: a ``TilebitCache``'s, or a ``DynamicCache``'s."""
    if isinstance(cache, TilebitCache):
        return cache.memory_bytes
    return sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values) if tensor is not None)


def _heads(config: PreTrainedConfig) -> tuple[int, int]:
    """How many heads of keys a layer has, and their channels."""
    try:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return heads, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    except RuntimeError as error:  # transformers' own, of a value that is each layer's
        raise ValueError(
            "layers of this model differ in their heads, and a TilebitCache has one number and size of them; accepted: a model with one, "
            "or a DynamicCache"
        ) from error


def _lacking(config: PreTrainedConfig, kind: str, head_dim: int) -> str | None:
    """What a layer of ``kind`` needs that tilebit's attention lacks."""
    if kind not in ("full_attention", "sliding_attention"):
        return f"its kind is {kind}"
    if head_dim not in HEAD_DIMS:
        return f"its heads have {head_dim} channels, and attention is for {', '.join(map(str, HEAD_DIMS))}"
    if getattr(config, "kv_lora_rank", None) or getattr(config, "num_kv_shared_layers", None):
        return "its keys are compressed, or shared with another layer"
    if getattr(config, "v_head_dim", None) not in (None, head_dim):
        return f"its values have {config.v_head_dim} channels and its keys {head_dim}"
    return None
