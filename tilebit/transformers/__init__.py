"""Whole models of Hugging Face transformers (5.17 or newer) with tilebit's linear layers.

    import tilebit.transformers  # registers quantization method and attention "tilebit"

    model = AutoModelForCausalLM.from_pretrained(DIR, quantization_config=TilebitConfig("w4a16_g128"), dtype=torch.bfloat16)
    model = tilebit.transformers.load(DIR)  # that AutoAWQ, GPTQModel or llm-compressor quantized
    tilebit.transformers.compile(model, batch_sizes=(1, 16))  # decode steps, fused
    tilebit.transformers.tune(model)  # their products, on this device

Only this package imports transformers.
"""

from __future__ import annotations

from .cache import TilebitCache
from .compiled import compile, release
from .config import TilebitConfig
from .loading import load
from .registry import register
from .replacing import takeover
from .tuning import tune

__all__ = ["TilebitCache", "TilebitConfig", "compile", "load", "register", "release", "takeover", "tune"]

register()
