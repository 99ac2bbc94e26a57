"""What a layer's ``state_dict`` says of it beside its tensors: JSON, as a tensor, so that any file of
tensors holds it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..json_reader import parse_json

EXTRA = "_extra_state"  # torch's name of the entry


def to_tensor(described: Mapping[str, Any]) -> Tensor:
    """uint8 [bytes]."""
    return torch.tensor(list(json.dumps(described, sort_keys=True).encode()), dtype=torch.uint8)


def from_tensor(state: Any) -> dict[str, Any]:
    """What ``to_tensor`` was given. Raises ``AttributeError``, ``TypeError`` and ``ValueError`` for
    anything else."""
    return parse_json(bytes(state.tolist()))
