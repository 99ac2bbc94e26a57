"""``save_pretrained`` of models with tilebit's linear layers, whoever quantized them."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..weights.any_modules import AnyPrecisionLinear
from ..weights.mixed import MixedLinear
from ..weights.modules import QuantLinear
from .config import TilebitConfig
from .quantizer import TilebitQuantizer
from .tying import untie


def attach(model: nn.Module) -> None:
    """Let the models of transformers in ``model`` save what they hold as tilebit's directories. Their
    configs become theirs alone: another model that shared one has other weights."""
    copies: dict[int, Any] = {}  # of all configs, so that those inside others stay the same ones
    quantizer = TilebitQuantizer(TilebitConfig(), pre_quantized=True)
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            module.config = copy.deepcopy(config, copies)  # type: ignore[assignment]
        if isinstance(module, PreTrainedModel):
            module.hf_quantizer = quantizer
    kinds = QuantLinear | MixedLinear | AnyPrecisionLinear
    untie(model, [name for name, layer in model.named_modules(remove_duplicate=False) if isinstance(layer, kinds)])
