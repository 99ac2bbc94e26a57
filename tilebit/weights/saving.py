"""``save_pretrained`` of models whose layers were replaced: it writes what can be read, or is an error."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from torch import nn


def settle_saving(model: nn.Module) -> None:
    """Have every model inside ``model`` that has ``save_pretrained`` save what it is now: those of
    transformers as tilebit's directories; others refuse."""
    saved = [module for module in model.modules() if hasattr(module, "save_pretrained")]
    library = sys.modules.get("transformers")  # whose models none can be where nothing has imported it
    own = [module for module in saved if library is not None and isinstance(module, library.PreTrainedModel)]
    if own:
        from ..transformers.saving import attach

        attach(model)
    for module in saved:
        if module not in own:
            module.save_pretrained = _refuse_to_save  # type: ignore[assignment]


def _refuse_to_save(*_: Any, **__: Any) -> NoReturn:
    raise ValueError(
        "save_pretrained of a model with packed layers would write what from_pretrained cannot read; accepted: its state_dict: write "
        "it with torch.save or safetensors.torch.save_file(model.state_dict(), PATH), and read it by load_state_dict of a model that "
        "quantize_model or quantize_model_any has converted in the same way"
    )
