"""What TileLang rewrites once is bound anew each time; that its output stays the same, the goldens say."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("tilelang")

from tilebit.tiles.compiler.hasten import Z3_OPTIONS, hasten_tilelang


def added(number: int) -> Any:
    import tilelang.language as T

    @T.macro
    def add(x):
        return x + number

    return add


def test_a_text_is_rewritten_once_and_its_variables_are_bound_each_time(monkeypatch: pytest.MonkeyPatch):
    import z3
    from tilelang.language.eager import ast

    hasten_tilelang()
    visits: list[Any] = []
    visit = ast.DSLMutator.visit_FunctionDef

    def counted(self: Any, node: Any) -> Any:
        visits.append(node)
        return visit(self, node)

    monkeypatch.setattr(ast.DSLMutator, "visit_FunctionDef", counted)
    bound = [{cell.cell_contents for cell in added(number).ir_gen.gen.__closure__} for number in (12345, 54321)]
    assert len(visits) == 1 and 12345 in bound[0] and 54321 in bound[1] and 12345 not in bound[1]
    assert {name: int(z3.get_param(name)) for name in Z3_OPTIONS} == Z3_OPTIONS
