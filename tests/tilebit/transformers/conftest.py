"""Models of transformers: skipped where it is not installed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from replayed import Replay

pytest.importorskip("transformers", minversion="5.17")
sys.path.append(str(Path(__file__).parent))  # tiny_models


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Replay]:
    """Every replay of a step that would be captured on a GPU."""
    from replayed import Replay

    from tilebit.transformers.compiled import DecodeSteps

    found: list[Replay] = []
    monkeypatch.setattr(DecodeSteps, "_captures", lambda self, ids: True)
    monkeypatch.setattr(DecodeSteps, "_captured", lambda self, kv, batch, ids: Replay(self, kv, batch, ids, found).captured())
    return found
