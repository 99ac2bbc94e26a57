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


# A kernel that reads its input's last number by an index that is given.
NEGATIVE = """
import tilelang
import tilelang.language as T
from tilebit.tiles.compiler.cuda import lower_cuda
from tilebit.tiles.compiler.hasten import LEFT_OUT, NEGATIVE, ORDER_OF, _named

def kernel(index):
    @T.prim_func
    def main(x: T.Tensor((64,), "float32"), y: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            y[T.get_thread_binding()] = x[index]

    return main

def passes():
    return [getattr(_named(module), name) for module, name in (*LEFT_OUT, NEGATIVE)]

before = passes()
assert "x[63]" in lower_cuda(kernel(63), "sm_80").kernel_source
assert passes() == before
try:
    found = lower_cuda(kernel(-1), "sm_80").kernel_source
except ValueError as error:
    assert "an index of x is -1; accepted: 0 and above" in str(error), error
else:  # another version of TileLang, which counts from the end
    assert not tilelang.__version__.startswith(ORDER_OF) and "x[63]" in found, (tilelang.__version__, found)
assert passes() == before
"""


def run(tmp_path: Path, text: str) -> None:
    script = tmp_path / "script.py"  # a file: TileLang reads the text of a macro there
    script.write_text(text)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=os.environ.copy())
    assert done.returncode == 0, done.stderr


def test_an_index_below_zero_is_no_other_number(tmp_path: Path):
    """TileLang's pass that would count from the end is left out; what is left out comes back behind each kernel."""
    run(tmp_path, NEGATIVE)


def test_a_text_is_rewritten_once_and_its_variables_are_bound_each_time(tmp_path: Path):
    run(tmp_path, MACROS)
