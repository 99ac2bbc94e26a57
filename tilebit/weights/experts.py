"""Stacks of experts, one tensor for the weights of many, which quantizers of linear layers leave as they are."""

from __future__ import annotations

import re
import warnings

from torch import nn


def stacked_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes of floating-point weights [experts, n, k] by the name of the module that holds them, each once:
    in modules that say in their names or their classes that they are experts'."""
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        if "expert" in name.lower() or "expert" in type(module).__name__.lower():
            stacks = [value for value in module.parameters(recurse=False) if value.ndim == 3 and value.is_floating_point()]
            if stacks:
                found[name] = sum(value.nbytes for value in stacks)
    return found


def warn_of_stacks(model: nn.Module, stacklevel: int) -> None:
    """One warning that names the modules with stacks of experts in ``model``, quantized, and says what
    share of its bytes they are; none where there are none. ``stacklevel`` as of ``warnings.warn`` in the
    caller."""
    stacks = stacked_bytes(model)
    if not stacks:
        return
    tensors = {id(value): value for value in (*model.parameters(), *model.buffers())}
    share = sum(stacks.values()) / sum(value.nbytes for value in tensors.values())
    names = list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in stacks))
    warnings.warn(
        f"the experts of {len(stacks)} modules stay as they are, {share:.1%} of the bytes that the model now takes: {', '.join(names)}. "
        "Only linear layers are quantized, and these are stacks [experts, n, k]",
        stacklevel=stacklevel + 1,
    )
