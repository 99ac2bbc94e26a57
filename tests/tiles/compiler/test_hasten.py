"""What TileLang rewrites once is bound anew each time; that its output stays the same, the goldens say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tilebit.tiles.compiler.hasten import Z3_OPTIONS

pytest.importorskip("z3", reason="needs TileLang and its Z3")

# In a process of its own: others test that nothing imports TileLang.
MACROS = f"""
import tilelang.language as T
import z3
from tilebit.tiles.compiler.hasten import hasten_tilelang
from tilelang.language.eager.ast import DSLMutator

def added(number):
    @T.macro
    def add(x):
        return x + number

    return {{cell.cell_contents for cell in add.ir_gen.gen.__closure__}}

hasten_tilelang()
visits, visit = [], DSLMutator.visit_FunctionDef
DSLMutator.visit_FunctionDef = lambda self, node: visits.append(node) or visit(self, node)
first, second = added(12345), added(54321)
assert len(visits) == 1, visits
assert 12345 in first and 54321 in second and 12345 not in second, (first, second)
for name, value in {Z3_OPTIONS!r}.items():
    assert int(z3.get_param(name)) == value, name
"""


def test_a_text_is_rewritten_once_and_its_variables_are_bound_each_time(tmp_path: Path):
    script = tmp_path / "macros.py"  # a file: TileLang reads the text of a macro there
    script.write_text(MACROS)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=os.environ.copy())
    assert done.returncode == 0, done.stderr
