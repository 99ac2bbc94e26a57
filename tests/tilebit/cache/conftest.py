"""Shared by the tests of the cache: kernels that need no compiler."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from defined_kernels import DefinedKernels

from tilebit.ops import plans

sys.path.append(str(Path(__file__).parent))  # cache_rows


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> DefinedKernels:
    found = DefinedKernels()
    monkeypatch.setattr(plans, "find_kernel", found.find)
    monkeypatch.setattr(plans, "held", {})
    return found
