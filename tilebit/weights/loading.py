"""What a state_dict may hold for a ``QuantLinear``: checked entry by entry before any buffer is
touched, because ``load_state_dict`` casts silently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..layouts.formats import GemmFormat
from .packed import DTYPES, WEIGHTS

# Entries whose numbers no other dtype may stand for; those of the others are floating point, or bytes.
_DTYPES = {"weight": torch.int32, "perm": torch.int64, "row_scales": torch.float32, "smooth": torch.float32}


def misfits(
    buffers: Mapping[str, Tensor], state: Mapping[str, Any], prefix: str, format: GemmFormat, taken: torch.dtype | None = None
) -> Iterator[str]:
    """What keeps the entries of ``state`` from being this layer's, in sentences; ``buffers`` are
    those that it has. ``taken``: what the layer computes in where tensors of ``state`` take the
    buffers' place, so that none is cast; None where they are copied into them."""
    given = {name: state[prefix + name] for name in buffers if prefix + name in state}
    lacking = [name for name in ("_extra_state", *buffers) if name not in ("bias", "smooth") and prefix + name not in state]
    held = [name for name in (*WEIGHTS, "perm") if name in given]
    if lacking and held:
        yield f"the state_dict has {prefix}{held[0]} but not {', '.join(lacking)}; accepted: all or none of them"
    if prefix + "perm" in state and "perm" not in buffers:
        yield (
            f"the state_dict has {prefix}perm, an order of the columns (act order), and this layer has none; accepted: a layer that was "
            "quantized in the same way: build it so, then load"
        )
    if taken is not None and not format.own_scales and isinstance(scales := given.get("scales"), Tensor):
        taken = scales.dtype
    for name, value in given.items():
        wrong = _misfit(name, value, buffers[name], format, taken)
        if wrong:
            yield f"{prefix}{name} is {wrong}; save the state_dict of the layer as it is, without casting it"


def _misfit(name: str, value: Any, buffer: Tensor, format: GemmFormat, taken: torch.dtype | None) -> str | None:
    if not isinstance(value, Tensor):
        return f"{type(value).__name__}; this module needs a tensor"
    own = buffer.dtype is torch.uint8 or (name == "scales" and format.own_scales)
    dtype = buffer.dtype if own else _DTYPES.get(name)
    described = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    needed = str(dtype).removeprefix("torch.") if dtype else "floating point"
    if value.shape != buffer.shape or (value.dtype != dtype if dtype else not value.is_floating_point()):
        return f"{described}; this module needs {needed} {list(buffer.shape)}"
    if taken is not None:
        if not value.is_contiguous():
            return f"{described}, not contiguous; with assign=True this module takes contiguous tensors: load it without"
        if dtype is None and (value.dtype != taken or taken not in DTYPES):
            accepted = " or ".join(str(one).removeprefix("torch.") for one in ((taken,) if taken in DTYPES else DTYPES))
            return f"{described}; with assign=True this module takes {accepted}: load it without, which casts"
    if value.is_meta:
        return None
    if name == "scales" and not bool(value.isfinite().all()):
        return f"{described} with NaN or infinite values; this module needs finite ones"
    if name == "smooth" and not bool(((value > 0) & value.isfinite()).all()):
        return f"{described} with zero, negative, infinite or NaN factors; this module needs positive, finite ones"
    if name == "perm" and not torch.equal(value.sort().values, torch.arange(len(value), device=value.device)):
        return f"{described} and does not hold each of the columns 0..{len(value) - 1} once; this module needs a permutation"
    if dtype is None and taken is None and value.dtype != buffer.dtype:
        cast = value.to(buffer.dtype)
        lost = value.isfinite() & ~cast.isfinite()
        if name == "scales":
            lost |= (value != 0) & (cast == 0)
        if name == "zeros" or (name == "scales" and not format.integer):  # numbers that must stay what they are
            lost |= cast.to(value.dtype) != value
        if bool(lost.any()):
            held = str(buffer.dtype).removeprefix("torch.")
            return f"{described}; {int(lost.sum())} of its values do not fit this module's {held}: cast the module first"
    if name == "zeros" and not format.offset:
        points = value.float()
        if not bool(((points >= 0) & (points <= format.max_code) & (points == points.round())).all()):
            return f"{described} with values that are no codes; this module needs whole numbers from 0 to {format.max_code}"
    return None
