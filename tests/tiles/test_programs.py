"""The sources of a program, found by threads that compile ahead."""

from __future__ import annotations

import ast
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from types import SimpleNamespace

import pytest

from tilebit.tiles import programs


def test_threads_make_syntax_trees_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython 3.11 raises SystemError where two meet in its counting."""
    parse, inside, met = ast.parse, Lock(), []

    def alone(source: str) -> ast.AST:
        if not inside.acquire(blocking=False):
            met.append(source)
            return parse(source)
        try:
            time.sleep(0.002)
            return parse(source)
        finally:
            inside.release()

    monkeypatch.setattr(programs, "ast", SimpleNamespace(**{**vars(ast), "parse": alone}))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(programs.program_sources, ["gemm_cpu", "quantize_cpu"] * 2))
    assert found[:2] == found[2:] and not met
