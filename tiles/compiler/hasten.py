"""TileLang in less time: what it generates stays the same, which ``tests/tiles/test_goldens.py``
holds it to."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

# Z3's own names: of its older simplex, which proves what TileLang asks (are indices in bounds, do
# divisions cancel) in half of the time that the newer one takes; and that it derives no bounds from
# rows, which is an eighth less of the time in which a kernel is generated.
Z3_OPTIONS = {"smt.arith.solver": 2, "smt.arith.propagation_mode": 0}


@functools.cache
def hasten_tilelang() -> None:
    """Once a process, before a program is built. Imports TileLang, and sets ``Z3_OPTIONS`` for all that
    the process asks of Z3."""
    import z3
    from tilelang.language.eager import builder

    for name, value in Z3_OPTIONS.items():
        z3.set_param(name, value)
    builder.mutate = remembering(builder.mutate)


def remembering(mutate: Callable[..., Any]) -> Callable[..., Any]:
    """``mutate`` of TileLang, which rewrites the syntax tree of a macro each time that it is defined,
    and a program defines the same ones for each kernel. Here a text is rewritten once; only its
    variables from around are bound anew."""
    from tilelang.language.eager import utils
    from tilelang.language.eager.ast import DSLMutator, IRGenerator

    rewritten: dict[tuple[str, int, str, tuple[str, ...]], tuple[CodeType, str, dict[str, Any]]] = {}

    @functools.wraps(mutate)
    def found(func: Callable[..., Any]) -> Any:
        lines, start = inspect.getsourcelines(func)
        bound = utils.get_func_nonlocals(func)
        file = inspect.getsourcefile(func) or inspect.getfile(func)
        key = (file, start, "".join(lines), tuple(bound))
        if key not in rewritten:
            mutator = DSLMutator(bound, func.__globals__, file)
            tree = ast.fix_missing_locations(mutator.visit(utils.get_ast(func)))
            rewritten[key] = compile(tree, file, "exec"), ast.unparse(tree), mutator.extra_type_hints
        code, source, hints = rewritten[key]
        names: dict[str, Any] = {}
        exec(code, func.__globals__, names)
        return IRGenerator(gen=names["make_closure"](**bound), source=source, extra_type_hints=dict(hints))

    return found
