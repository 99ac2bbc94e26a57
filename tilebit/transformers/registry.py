"""tilebit's names in transformers' registries."""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from .attend import attend
from .cache import NAME
from .config import METHOD, TilebitConfig
from .masks import visible_mask
from .quantizer import TilebitQuantizer


def register() -> None:
    """Make transformers know the quantization method and the attention "tilebit". Importing ``tilebit.transformers``
    does it; once more changes nothing."""
    AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = TilebitConfig
    AUTO_QUANTIZER_MAPPING[METHOD] = TilebitQuantizer
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, visible_mask)
