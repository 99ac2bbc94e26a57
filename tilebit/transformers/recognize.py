"""Linear layers of other libraries, recognized by their tensors: none of these is imported."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..weights.any_modules import AnyPrecisionLinear
from ..weights.checkpoint_config import PLAIN, CheckpointError, LayerScheme, parse_quantization
from ..weights.checkpoint_decode import decode
from ..weights.mixed import MixedLinear
from ..weights.modules import QuantLinear
from ..weights.quantize import QuantizedTensor

_PLAIN = dict(zip((torch.int8, torch.float8_e4m3fn), PLAIN, strict=True))  # by the weight's dtype
_SHUFFLED = ("q_handle", "q4")  # of kernels that reorder the words of a weight in place, shapes kept


@dataclass(frozen=True, slots=True)
class OtherLinear:
    """A quantized layer of another library: ``kind`` is a key of ``PARTS``, None for one that is not
    known."""

    module: nn.Module
    kind: str | None
    tensors: dict[str, Tensor]

    def quantized(self, name: str, gptq_format: str | None) -> QuantizedTensor:
        """Its weight. Raises ``CheckpointError``."""
        if self.kind is None or any(hasattr(self.module, mark) for mark in _SHUFFLED):
            raise CheckpointError(
                f"{type(self.module).__name__} lays its weight out in a way of its own; accepted: AutoAWQ's, GPTQ's, "
                "compressed-tensors' and transformers' fp8 layouts, as their torch modules have them: load the directory with "
                "tilebit.transformers.load"
            )
        weight = decode(name, self.kind, self.tensors, self._scheme(name), gptq_format or self._gptq_format())
        needed = tuple(getattr(self.module, side, size) for side, size in (("out_features", weight.n), ("in_features", weight.k)))
        if needed != (weight.n, weight.k):
            raise CheckpointError(f"its tensors are a weight [{weight.n}, {weight.k}] and the layer says {list(needed)}")
        return weight

    def _scheme(self, name: str) -> LayerScheme | None:
        """What compressed-tensors left at the layer, or transformers' fp8; the others' tensors say all."""
        if self.kind == "fp8":
            said = {"weight_block_size": self.module.block_size, "activation_scheme": self.module.activation_scheme}
            return parse_quantization({"quant_method": "fp8", **said})[1](name)
        held = getattr(self.module, "quantization_scheme", None)
        if held is None or self.kind not in ("compressed-tensors", *PLAIN):
            return None
        group = {**(held if isinstance(held, dict) else held.model_dump(mode="json")), "targets": ["Linear"]}
        storage = group.get("format") or (self.kind if self.kind in PLAIN else "pack-quantized")
        _, schemes = parse_quantization({"quant_method": "compressed-tensors", "format": storage, "config_groups": {"group_0": group}})
        return schemes(name)

    def _gptq_format(self) -> str | None:
        """GPTQModel's modules say how their zero points are stored, which may have changed since they were
        loaded."""
        said = getattr(self.module, "qzero_format", None)
        return {1: "gptq", 2: "gptq_v2"}.get(said()) if callable(said) else None


def recognized(module: nn.Module) -> OtherLinear | None:
    """``module`` as a quantized linear layer of another library, or None."""
    if isinstance(module, QuantLinear | MixedLinear | AnyPrecisionLinear):
        return None
    held = {name: tensor.detach() for name, tensor in (*module.named_buffers(recurse=False), *module.named_parameters(recurse=False))}
    weight, words, scales = held.get("weight"), held.get("qweight"), held.get("scales")
    if "weight_packed" in held and "weight_scale" in held:
        kind = "compressed-tensors"
    elif weight is not None and weight.dtype in _PLAIN and "weight_scale" in held:
        kind = _PLAIN[weight.dtype]
    elif weight is not None and weight.dtype == torch.float8_e4m3fn and "weight_scale_inv" in held and hasattr(module, "block_size"):
        kind = "fp8"
    elif words is not None and "s1_scales" in held:
        kind = "qserve"
    elif words is not None and scales is not None and "qzeros" in held:
        # GPTQ packs along k, so its qweight is as wide as its scales; AWQ packs along n.
        kind = "gptq" if words.shape[-1:] == scales.shape[-1:] else "awq"
    elif hasattr(module, "in_features") and any(not tensor.is_floating_point() for tensor in held.values()):
        kind = None
    else:
        return None
    return OtherLinear(module, kind, held)
