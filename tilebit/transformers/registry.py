"""tilebit's names in transformers' registries."""

from __future__ import annotations

from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from .config import METHOD, TilebitConfig
from .quantizer import TilebitQuantizer


def register() -> None:
    """Make transformers know the quantization method "tilebit". Importing ``tilebit.transformers``
    does it; once more changes nothing."""
    AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = TilebitConfig
    AUTO_QUANTIZER_MAPPING[METHOD] = TilebitQuantizer
