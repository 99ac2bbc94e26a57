"""The pictures that ``tilebit show`` knows by name: packed weights, KV caches, checkpoint layouts and MMA fragments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..layouts import fragments
from ..layouts.checkpoints import checkpoint_layout
from ..layouts.draw import Picture, draw_fragment, draw_packed, save
from ..layouts.draw_kv import draw_kv
from ..layouts.formats import BITS
from ..layouts.fragments import Fragment
from ..layouts.kv import HEAD_DIMS, KVLayout
from ..layouts.kv_formats import KVFormat
from ..layouts.packing import PackedLayout, gemm_layout
from ..layouts.planes import plane_layout
from ..schedules.target import ARCHES

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
    **{f"{arch}:{bits}:int8": lambda arch=arch, bits=bits: gemm_layout(arch, bits, int8=True) for arch in ARCHES for bits in BITS},
    **{f"{plane_layout(arch).name}:1": lambda arch=arch: plane_layout(arch) for arch in ("sm_90a", "cpu")},
    **{f"{storage}:{bits}": lambda storage=storage, bits=bits: checkpoint_layout(storage, bits).weight for storage, bits in _CHECKPOINTS},
}


_KV_FORMATS = {form.name: form for form in KVFormat.all()}
_KV = tuple(f"{form.name}:{head_dim}" for form in _KV_FORMATS.values() if form.key == form.value for head_dim in HEAD_DIMS)


def names() -> tuple[str, ...]:
    """Names that ``picture`` accepts: "sm_90a:4" (that arch's packed weight of 4 bits), "sm_90a:4:int8" (the same where x is int8 or
    e4m3), "planes_mma:1" (a bit plane), "kv4_channel:128" (a KV cache's page, by head_dim), "awq:4" (a checkpoint's
    weight), "wgmma_a:k16" (a fragment). KV caches of two precisions ("k8_channel_v4:128") and of other page sizes than 128 tokens
    ("kv4_channel:128:16") have pictures too."""
    return (*_LAYOUTS, *_KV, *_FRAGMENTS)


def picture(name: str, by: str = "word") -> Picture:
    """The picture called ``name``. Layouts are drawn ``by`` "word" (storage order) or "element" (the weight matrix). Raises
    ``ValueError`` otherwise."""
    if by not in VIEWS:
        raise ValueError(f"by is {by!r}; accepted: {', '.join(VIEWS)}")
    if name in _LAYOUTS:
        return draw_packed(_LAYOUTS[name](), "word" if by == "word" else "element")
    if name in _FRAGMENTS:
        return draw_fragment(_FRAGMENTS[name]())
    form, *sizes = name.split(":")
    if form in _KV_FORMATS and len(sizes) in (1, 2) and all(size.isdecimal() for size in sizes):
        return draw_kv(KVLayout(_KV_FORMATS[form], *map(int, sizes)))
    raise ValueError(f"{name!r} has no picture; accepted: {', '.join(names())}")


def write(drawn: Picture, path: Path) -> Path:
    """Write ``drawn`` to ``path`` (.svg, or .png with matplotlib). Raises ``ValueError`` for another suffix."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{str(path)!r} ends in {path.suffix!r}; accepted: {', '.join(SUFFIXES)}")
    return save(drawn, path)
