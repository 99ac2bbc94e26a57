"""Linear layers that another quantizer loaded become tilebit's."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from ..accepted import expect
from ..weights.checkpoint_config import check_gptq_format
from ..weights.modules import QuantLinear
from ..weights.packed import DTYPES, pack
from .recognize import recognized
from .saving import attach


def takeover(model: nn.Module, dtype: torch.dtype | None = None, gptq_format: str | None = None) -> list[str]:
    """Replace the quantized linear layers that another library put into ``model`` by ``QuantLinear``,
    in place, one by one, with the same codes; returns the names replaced. AutoAWQ's, GPTQ's,
    compressed-tensors', QServe's and transformers' blocks of fp8 are recognized by the names and shapes
    of their tensors.

    The layers compute in ``dtype``, fp16 or bf16: by default that of the model's first parameter.
    ``gptq_format`` ("gptq", "gptq_v2") says how GPTQ's zero points are stored, where the modules
    do not. Layers that cannot be taken stay as they are; one warning names them all, with the
    reasons. Raises ``ValueError`` where none can be, or there is none, and then changes nothing.
    """
    expect("model", model, nn.Module, "a torch.nn.Module with quantized linear layers inside")
    check_gptq_format(gptq_format)
    chosen = dtype or next((value.dtype for value in model.parameters() if value.is_floating_point()), torch.float16)
    if chosen not in DTYPES:
        raise ValueError(f"the layers would compute in {chosen}; accepted: float16 and bfloat16: pass dtype=, and cast the model to it")
    taken: dict[nn.Module, QuantLinear] = {}
    names, reasons = [], {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        other = recognized(module) if name and module not in taken else None
        if other is not None:
            try:
                weight = pack(other.quantized(name, gptq_format), chosen)
                taken[module] = QuantLinear(weight, other.tensors.get("bias")).eval()
            except (TypeError, ValueError) as error:
                reasons.setdefault(str(error).removeprefix(f"{name}: ").replace(name, "the layer"), []).append(name)
        if module in taken:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, taken[module])
            names.append(name)
    listed = "; ".join(f"{left[0]}{f' and {len(left) - 1} more' if len(left) > 1 else ''}: {reason}" for reason, left in reasons.items())
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no linear layer that can be taken over{f': {listed}' if listed else ''}; accepted: a model with "
            "layers of AutoAWQ, GPTQ, compressed-tensors or blocks of fp8; floats are quantized by tilebit.quantize_model"
        )
    if reasons:
        warnings.warn(f"{sum(map(len, reasons.values()))} quantized layers stay as they are: {listed}", stacklevel=2)
    attach(model)
    return names
