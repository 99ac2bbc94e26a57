"""tilebit: low-bit GEMM and attention for PyTorch, compiled and tuned for the device at hand.

Importing this package imports neither torch nor a compiler: names are looked up on first use (``tilebit.gemm`` imports torch and
registers ``torch.ops.tilebit``).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint import Checkpoint, load_checkpoint
    from .kernels import KernelUnavailable
    from .kvcache import KVCache
    from .layouts.formats import QuantFormat
    from .layouts.kv_formats import KVFormat
    from .modules import QuantLinear, quantize_model
    from .ops import gemm, prepare
    from .packed import PackedWeight, pack
    from .quantize import QuantizedTensor
    from .sequences import CacheFull

__version__ = "0.1.0"

_HOME = {
    "CacheFull": "sequences",
    "Checkpoint": "checkpoint",
    "KVCache": "kvcache",
    "KVFormat": "layouts.kv_formats",
    "KernelUnavailable": "kernels",
    "PackedWeight": "packed",
    "QuantFormat": "layouts.formats",
    "QuantLinear": "modules",
    "QuantizedTensor": "quantize",
    "gemm": "ops",
    "load_checkpoint": "checkpoint",
    "pack": "packed",
    "prepare": "ops",
    "quantize_model": "modules",
}
_MODULES = (
    "attention",
    "bench",
    "checkpoint",
    "demo",
    "dispatch",
    "doctor",
    "kernels",
    "kvcache",
    "modules",
    "ops",
    "packed",
    "packs",
    "pictures",
    "quantize",
    "runtime",
    "synthetic",
    "workspace",
)

__all__ = [
    "CacheFull",
    "Checkpoint",
    "KVCache",
    "KVFormat",
    "KernelUnavailable",
    "PackedWeight",
    "QuantFormat",
    "QuantLinear",
    "QuantizedTensor",
    "gemm",
    "load_checkpoint",
    "pack",
    "prepare",
    "quantize_model",
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
