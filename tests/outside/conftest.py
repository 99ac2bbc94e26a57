"""The machine that the toy package's kernels are compiled for."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tilebit.schedules.target import Target, detect_target


@pytest.fixture(scope="session")
def here() -> Target:
    if find_spec("tvm") is None:
        pytest.skip("needs apache-tvm, which compiles for the CPU: pip install tilebit[compile]")
    target = detect_target("cpu")
    if not target.features:
        pytest.skip("this CPU has neither AVX-512 nor AVX2")
    return target
