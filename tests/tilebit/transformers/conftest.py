"""Models of transformers: skipped where it is not installed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.17")
sys.path.append(str(Path(__file__).parent))  # tiny_models


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Each replay of a captured step (``replays.Watched``)."""
    from replays import watch

    return watch(monkeypatch)
