"""tilebit: low-bit GEMM and attention for PyTorch, compiled and tuned for the device at hand.

Importing this package imports neither torch nor a compiler: names are looked up on first use
(``tilebit.gemm`` imports torch and registers ``torch.ops.tilebit``).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cache.kvcache import KVCache
    from .cache.sequences import CacheFull
    from .kernels import KernelUnavailable
    from .layouts.formats import QuantFormat
    from .layouts.kv_formats import KVFormat
    from .ops.gemm import gemm
    from .ops.linear import linear
    from .ops.prepare import prepare
    from .ops.quantize import quantize_activations
    from .ops.rows import add_norm, gated
    from .weights.any_checkpoint import load_any_precision
    from .weights.any_modules import AnyPrecisionLinear, precision_view, quantize_model_any, set_precision
    from .weights.calibrate import calibrate
    from .weights.calibrate_smooth import calibrate_smoothing
    from .weights.checkpoint import Checkpoint, load_checkpoint
    from .weights.embedding import QuantEmbedding
    from .weights.gptq import gptq
    from .weights.mixed import MixedLinear
    from .weights.modules import QuantLinear, quantize_model
    from .weights.packed import PackedWeight, pack
    from .weights.precision import PrecisionPlan, select_channels
    from .weights.quantize import QuantizedTensor
    from .weights.salience import channel_salience
    from .weights.smooth import search_smoothing

__version__ = "0.1.0"

_HOME = {
    "AnyPrecisionLinear": "weights.any_modules",
    "CacheFull": "cache.sequences",
    "Checkpoint": "weights.checkpoint",
    "KVCache": "cache.kvcache",
    "KVFormat": "layouts.kv_formats",
    "KernelUnavailable": "kernels",
    "MixedLinear": "weights.mixed",
    "PackedWeight": "weights.packed",
    "PrecisionPlan": "weights.precision",
    "QuantEmbedding": "weights.embedding",
    "QuantFormat": "layouts.formats",
    "QuantLinear": "weights.modules",
    "QuantizedTensor": "weights.quantize",
    "add_norm": "ops.rows",
    "calibrate": "weights.calibrate",
    "calibrate_smoothing": "weights.calibrate_smooth",
    "channel_salience": "weights.salience",
    "gated": "ops.rows",
    "gemm": "ops.gemm",
    "gptq": "weights.gptq",
    "linear": "ops.linear",
    "load_any_precision": "weights.any_checkpoint",
    "load_checkpoint": "weights.checkpoint",
    "pack": "weights.packed",
    "precision_view": "weights.any_modules",
    "prepare": "ops.prepare",
    "quantize_activations": "ops.quantize",
    "quantize_model": "weights.modules",
    "quantize_model_any": "weights.any_modules",
    "search_smoothing": "weights.smooth",
    "select_channels": "weights.precision",
    "set_precision": "weights.any_modules",
}
_MODULES = ("attention", "cache", "command", "kernels", "ops", "packs", "runtime", "weights")

__all__ = [
    "AnyPrecisionLinear",
    "CacheFull",
    "Checkpoint",
    "KVCache",
    "KVFormat",
    "KernelUnavailable",
    "MixedLinear",
    "PackedWeight",
    "PrecisionPlan",
    "QuantEmbedding",
    "QuantFormat",
    "QuantLinear",
    "QuantizedTensor",
    "add_norm",
    "calibrate",
    "calibrate_smoothing",
    "channel_salience",
    "gated",
    "gemm",
    "gptq",
    "linear",
    "load_any_precision",
    "load_checkpoint",
    "pack",
    "precision_view",
    "prepare",
    "quantize_activations",
    "quantize_model",
    "quantize_model_any",
    "search_smoothing",
    "select_channels",
    "set_precision",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module 'tilebit' has no attribute {name!r}; it has {', '.join(__all__)} and the modules {', '.join(_MODULES)}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, "__version__"])
