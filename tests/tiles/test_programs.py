"""The sources of a program, found by threads that compile ahead, and without a compiler."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
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
    programs._imported.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(programs.program_sources, ["gemm_cpu", "quantize_cpu"] * 2))
    assert found[:2] == found[2:] and not met


def test_no_compiler_is_imported_for_a_key() -> None:
    """What only looks up a kernel, such as the first call of a product, waits for no compiler to load."""
    code = """
import sys
from tilebit.schedules.operations import OPERATIONS
from tilebit.tiles.programs import program_sources
names = [rule.program for operation in OPERATIONS.values() for rule in operation.rules]
assert len(names) > 10 and all(len(program_sources(name)) > 5 for name in names)
print([name for name in ("tvm", "tilelang") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_no_package_is_imported_for_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program of another package may stand beside what imports all of this one, models too."""
    for name, text in (("__init__", ""), ("rule", "RULE = None"), ("inside/__init__", "raise SystemExit"), ("inside/part", "")):
        (tmp_path / "apart" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "apart" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert programs._source("apart.inside.part", {}) == tmp_path / "apart/inside/part.py"
    assert programs._source("apart.inside.part.name", {}) is programs._source("apart.nothing", {}) is None
    assert "apart" not in sys.modules
