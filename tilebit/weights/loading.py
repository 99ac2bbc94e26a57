"""What a state_dict may hold for a ``QuantLinear``: checked entry by entry before any buffer is
touched, because ``load_state_dict`` casts silently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..layouts.formats import GemmFormat
from .packed import WEIGHTS

# Entries whose numbers no other dtype may stand for; those of the others are floating point, or bytes.
_DTYPES = {"weight": torch.int32, "perm": torch.int64, "row_scales": torch.float32, "smooth": torch.float32}


def misfits(buffers: Mapping[str, Tensor], state: Mapping[str, Any], prefix: str, format: GemmFormat, assign: bool) -> Iterator[str]:
    """What keeps the entries of ``state`` from being this layer's, in sentences; ``buffers`` are
    those that it has. ``assign``: its tensors take the buffers' place, so that none is cast."""
    given = {name: state[prefix + name] for name in buffers if prefix + name in state}
    lacking = [name for name in ("_extra_state", *buffers) if name not in ("bias", "perm", "smooth") and prefix + name not in state]
    if lacking and any(name in given for name in WEIGHTS):
        held = next(name for name in WEIGHTS if name in given)
        yield f"the state_dict has {prefix}{held} but not {', '.join(lacking)}; accepted: all or none of them"
    for name, value in given.items():
        wrong = _misfit(name, value, buffers[name], format, assign)
        if wrong:
            yield f"{prefix}{name} is {wrong}; save the state_dict of the layer as it is, without casting it"


def _misfit(name: str, value: Any, buffer: Tensor, format: GemmFormat, assign: bool) -> str | None:
    if not isinstance(value, Tensor):
        return f"{type(value).__name__}; this module needs a tensor"
    own = buffer.dtype is torch.uint8 or (name == "scales" and format.own_scales)
    dtype = buffer.dtype if own else _DTYPES.get(name)
    described = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    needed = str(dtype).removeprefix("torch.") if dtype else "floating point"
    if value.shape != buffer.shape or (value.dtype != dtype if dtype else not value.is_floating_point()):
        return f"{described}; this module needs {needed} {list(buffer.shape)}"
    if value.is_meta:
        return None
    if name == "smooth" and not bool(((value > 0) & value.isfinite()).all()):
        return f"{described} with zero, negative, infinite or NaN factors; this module needs positive, finite ones"
    if name == "perm" and not torch.equal(value.sort().values, torch.arange(len(value), device=value.device)):
        return f"{described} and does not hold each of the columns 0..{len(value) - 1} once; this module needs a permutation"
    if dtype is None and not assign and value.dtype != buffer.dtype:
        cast = value.to(buffer.dtype)
        lost = value.isfinite() & ~cast.isfinite()
        if name == "scales":
            lost |= (value != 0) & (cast == 0)
        if name == "zeros" or (name == "scales" and not format.integer):  # numbers that must stay what they are
            lost |= cast.to(value.dtype) != value
        if bool(lost.any()):
            held = str(buffer.dtype).removeprefix("torch.")
            return f"{described}; {int(lost.sum())} of its values do not fit this module's {held}: cast the module first"
    return None
