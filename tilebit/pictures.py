"""The pictures that ``tilebit show`` knows by name: packed weights, checkpoint layouts and MMA fragments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .layouts import fragments
from .layouts.checkpoints import checkpoint_layout
from .layouts.draw import Picture, draw_fragment, draw_packed, save
from .layouts.formats import BITS
from .layouts.fragments import Fragment
from .layouts.packing import PackedLayout, gemm_layout
from .schedules.target import ARCHES

SUFFIXES = (".svg", ".png")
VIEWS = ("word", "element")

_FRAGMENTS: dict[str, Callable[[], Fragment]] = {
    "mma_a:k16": lambda: fragments.mma_a(16),
    "mma_a:k32": lambda: fragments.mma_a(32),
    "mma_b:k16": lambda: fragments.mma_b(16),
    "mma_b:k32": lambda: fragments.mma_b(32),
    "mma_c": lambda: fragments.mma_c(8),
    "wgmma_a:k16": lambda: fragments.wgmma_a(16),
    "wgmma_a:k32": lambda: fragments.wgmma_a(32),
    "wgmma_c:n16": lambda: fragments.wgmma_c(16),
    "ldmatrix:x4": lambda: fragments.ldmatrix(4),
    "ldmatrix:x4.trans": lambda: fragments.ldmatrix(4, trans=True),
}
_CHECKPOINTS = (("awq", 4), ("gptq", 4), ("gptq", 8), ("compressed-tensors", 4), ("compressed-tensors", 8))
_LAYOUTS: dict[str, Callable[[], PackedLayout]] = {
    **{f"{arch}:{bits}": lambda arch=arch, bits=bits: gemm_layout(arch, bits) for arch in ARCHES for bits in BITS},
    **{f"{storage}:{bits}": lambda storage=storage, bits=bits: checkpoint_layout(storage, bits).weight for storage, bits in _CHECKPOINTS},
}


def names() -> tuple[str, ...]:
    """Every name that ``picture`` accepts: "sm_90a:4" (that arch's packed weight of 4 bits), "awq:4" (a checkpoint's), "wgmma_a:k16" (a
    fragment)."""
    return (*_LAYOUTS, *_FRAGMENTS)


def picture(name: str, by: str = "word") -> Picture:
    """The picture called ``name``. Layouts are drawn ``by`` "word" (storage order) or "element" (the weight matrix). Raises
    ``ValueError`` otherwise."""
    if by not in VIEWS:
        raise ValueError(f"by is {by!r}; accepted: {', '.join(VIEWS)}")
    if name in _LAYOUTS:
        return draw_packed(_LAYOUTS[name](), "word" if by == "word" else "element")
    if name in _FRAGMENTS:
        return draw_fragment(_FRAGMENTS[name]())
    raise ValueError(f"{name!r} has no picture; accepted: {', '.join(names())}")


def write(drawn: Picture, path: Path) -> Path:
    """Write ``drawn`` to ``path`` (.svg, or .png with matplotlib). Raises ``ValueError`` for another suffix."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{str(path)!r} ends in {path.suffix!r}; accepted: {', '.join(SUFFIXES)}")
    return save(drawn, path)
