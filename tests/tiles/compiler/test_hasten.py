"""What TileLang rewrites once is bound anew each time; that its output stays the same, the goldens say."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("tilelang")

from tilebit.tiles.compiler.hasten import Z3_OPTIONS, hasten_tilelang


def added(T: Any, number: int) -> Any:
    @T.prim_func
    def main(x: T.Tensor((16,), "int32")):
        with T.Kernel(1, threads=16):
            for i in T.Parallel(16):
                x[i] = x[i] + number

    return main


def test_a_text_is_rewritten_once_and_its_variables_are_bound_each_time(monkeypatch: pytest.MonkeyPatch):
    import tilelang.language as T
    import z3
    from tilelang.language.eager import ast

    hasten_tilelang()
    visits: list[Any] = []
    visit = ast.DSLMutator.visit_FunctionDef

    def counted(self: Any, node: Any) -> Any:
        visits.append(node)
        return visit(self, node)

    monkeypatch.setattr(ast.DSLMutator, "visit_FunctionDef", counted)
    first, second = (added(T, number).script() for number in (12345, 54321))
    assert len(visits) == 1 and "12345" in first and "54321" in second and "12345" not in second
    assert {name: int(z3.get_param(name)) for name in Z3_OPTIONS} == Z3_OPTIONS
