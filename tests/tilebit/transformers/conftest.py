"""Models of transformers: skipped where it is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5.17")
sys.path.append(str(Path(__file__).parent))  # tiny_models
