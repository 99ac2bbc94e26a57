"""The memory of a KV cache: pages, residual windows and head scales of every layer, in one
allocation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..accepted import expect
from ..layouts.kv import ORDER, KVLayout, window_words
from ..layouts.kv_formats import KVFormat
from ..ops.dispatch import DTYPE_NAMES
from ..ops.operands import describe
from .counts import whole
from .state import ORIGIN, rows_of

ALIGNED_WORDS = 32  # pages, and windows behind them, begin at a cache line


class CacheMemory:
    """``num_pages`` pages of ``page_size`` tokens and ``slots`` residual windows for each of
    ``num_layers`` layers of ``heads_kv`` heads.

    ``all_pages`` is int32 [num_layers, num_pages, heads_kv, page words], ``all_windows`` int32
    [num_layers, slots, heads_kv, window words], both views of ``memory``, which is zero at first;
    ``pages`` and ``windows`` are their layers, ``head_scales`` is fp32 [num_layers, 2, heads_kv] for fp8
    formats, else None. Raises ``ValueError``.
    """

    def __init__(
        self,
        num_pages: int,
        slots: int,
        heads_kv: int,
        head_dim: int,
        format: KVFormat | str,
        dtype: torch.dtype,
        page_size: int,
        device: torch.device | str,
        num_layers: int,
        head_scales: Tensor | None,
    ) -> None:
        num_pages, slots = whole("num_pages", num_pages, 1), whole("slots", slots, 1)
        heads_kv, num_layers = whole("heads_kv", heads_kv, 1), whole("num_layers", num_layers, 1)
        head_dim, page_size = whole("head_dim", head_dim, 1), whole("page_size", page_size, 1)
        expect("dtype", dtype, torch.dtype, "torch.float16 and torch.bfloat16")
        expect("format", format, KVFormat | str, "a KVFormat, or a name such as 'kv4_channel'")
        expect("device", device, torch.device | str, "a torch.device, or a name such as 'cuda'")
        if dtype not in DTYPE_NAMES:
            raise ValueError(f"dtype is {dtype}; accepted: torch.float16 and torch.bfloat16")
        self.format = KVFormat.from_name(format) if isinstance(format, str) else format
        self.layout = KVLayout(self.format, head_dim, page_size)
        self.heads_kv, self.head_dim, self.page_size, self.dtype, self.num_layers = heads_kv, head_dim, page_size, dtype, num_layers
        self._allocate(num_pages, slots, device)
        self.head_scales = self._checked_scales(head_scales)

    @torch.inference_mode(False)  # tensors that inference mode has made cannot be written outside of it
    def _allocate(self, num_pages: int, slots: int, device: torch.device | str) -> None:
        shapes = ((num_pages, self.heads_kv, self.layout.page_words), (slots, self.heads_kv, window_words(self.head_dim)))
        sizes = [self.num_layers * prod(shape) for shape in shapes]
        padded = [-(-size // ALIGNED_WORDS) * ALIGNED_WORDS for size in sizes]
        self.memory = torch.zeros(sum(padded), dtype=torch.int32, device=device)
        self.device = self.memory.device
        starts = (0, padded[0])
        self.all_pages, self.all_windows = (
            self.memory[start:][:size].view(self.num_layers, *shape) for start, size, shape in zip(starts, sizes, shapes, strict=True)
        )
        self.pages, self.windows = tuple(self.all_pages), tuple(self.all_windows)

    @property
    def memory_per_token(self) -> int:
        """Bytes of a packed token, all layers and heads, keys and values with their parameters."""
        return self.num_layers * self.heads_kv * self.layout.token_bytes

    @property
    def memory_per_window(self) -> int:
        """Bytes of a sequence's residual window, all layers and heads."""
        return self.num_layers * self.heads_kv * window_words(self.head_dim) * 4

    @property
    def memory_bytes(self) -> int:
        """Bytes of the allocation: ``num_pages * page_size * memory_per_token + slots *
        memory_per_window``, each rounded up to 128."""
        return self.memory.numel() * self.memory.element_size()

    def copy_pages(self, copies: list[tuple[int, int]]) -> None:
        for source, target in copies:
            for pages in self.pages:
                pages[target].copy_(pages[source])

    def copy_window(self, source: int, target: int) -> None:
        for windows in self.windows:
            windows[target].copy_(windows[source])

    def kept(self, pages: Sequence[int], slots: Sequence[int]) -> dict[str, Any]:
        """Copies of these pages and windows, and of the head scales: what ``restore`` takes."""
        return {
            "pages": (list(pages), torch.stack([own[list(pages)] for own in self.pages])),
            "windows": (list(slots), torch.stack([own[list(slots)] for own in self.windows])),
            "head_scales": None if self.head_scales is None else self.head_scales.clone(),
        }

    def checked(self, kept: dict[str, Any], pages: Iterable[int], slots: Iterable[int]) -> dict[str, Any]:
        """``kept`` as ``restore`` takes it, all of ``pages`` and ``slots`` among it, on this
        device. Raises ``ValueError``; changes nothing."""
        scales = kept.get("head_scales")
        if (scales is None) != (self.head_scales is None):
            raise ValueError(f"the state {'lacks' if scales is None else 'has'} head_scales; {ORIGIN}")
        held = {"pages": rows_of(kept, "pages", pages, self.pages), "windows": rows_of(kept, "windows", slots, self.windows)}
        return {**held, "head_scales": self._checked_scales(scales)}

    def restore(self, kept: dict[str, Any]) -> None:
        """Hold what ``kept`` returned, checked."""
        for own, (index, values) in ((self.pages, kept["pages"]), (self.windows, kept["windows"])):
            for layer, layer_values in zip(own, values, strict=True):
                layer[index] = layer_values
        if self.head_scales is not None:
            self.head_scales.copy_(kept["head_scales"])

    def config(self) -> dict[str, Any]:
        names = ("page_size", "heads_kv", "head_dim", "num_layers")
        return {"order": ORDER, "format": self.format.name, "dtype": str(self.dtype), **{name: getattr(self, name) for name in names}}

    @torch.inference_mode(False)
    def _checked_scales(self, given: Tensor | None) -> Tensor | None:
        shape = (self.num_layers, 2, self.heads_kv)
        if not self.format.has_head_scales:
            if given is not None:
                raise ValueError(f"head_scales are given and {self.format.name} has none; accepted: None; only fp8 formats have them")
            return None
        if given is None:
            return torch.ones(shape, dtype=torch.float32, device=self.device)
        if not isinstance(given, Tensor) or given.dtype != torch.float32 or given.shape not in (shape, shape[1:]):
            got = describe(given) if isinstance(given, Tensor) else repr(given)
            raise ValueError(f"head_scales are {got}; accepted: float32 {list(shape[1:])} or {list(shape)}")
        if not bool(((given > 0) & torch.isfinite(given) & torch.isfinite(1 / given)).all()):
            raise ValueError(f"head_scales are {given.tolist()}; accepted: finite numbers above 0, whose reciprocals are finite, too")
        return given.detach().to(self.device).expand(shape).clone(memory_format=torch.contiguous_format)  # the caller may change its own

    def scales(self, layer: int) -> Tensor | None:
        return None if self.head_scales is None else self.head_scales[layer]
