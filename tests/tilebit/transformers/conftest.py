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


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each fused step."""
    from tilebit.transformers.compiled import DecodeSteps

    found: list[int] = []
    real = DecodeSteps.run

    def run(self: DecodeSteps, cache: Any, ids: Any, *rest: Any) -> Any:
        found.append(len(ids))
        return real(self, cache, ids, *rest)

    monkeypatch.setattr(DecodeSteps, "run", run)
    return found
