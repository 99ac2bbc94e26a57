"""TileLang in less time: what it generates does the same, and for the kernels of
``tests/tiles/test_goldens.py`` is the same text (results/notes/lowering-time.md)."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import Any

# Z3's own names: of its older simplex, which proves what TileLang asks (are indices in bounds, do
# divisions cancel) in half of the time that the newer one takes; and that it derives no bounds from
# rows, which is an eighth less of the time in which a kernel is generated.
Z3_OPTIONS = {"smt.arith.solver": 2, "smt.arith.propagation_mode": 0}

# The order of passes in which this version of TileLang lowers a kernel for CUDA is known here. Those whose work a
# later one does as well, by module and name: which of the calls for a kernel. Other versions run all of theirs.
ORDER_OF = "0.1.15"
LEFT_OUT = {
    ("tilelang.transform", "Simplify"): (1, 2, 3, 4),
    ("tilelang.cuda.pipeline.tirx.transform", "Simplify"): (1,),
}
NEGATIVE = ("tilelang.transform", "LegalizeNegativeIndex")  # a slow search; ``reject_negative`` stands in its place


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


@contextmanager
def without_repeats() -> Iterator[None]:
    """While one kernel is lowered: ``LEFT_OUT`` are left out, and an index that is below 0 is an error, which
    TileLang would count from a buffer's end."""
    import tilelang

    if tilelang.__version__.partition("+")[0] != ORDER_OF:
        yield
        return
    with ExitStack() as stack:
        for (module, name), calls in LEFT_OUT.items():
            held = _named(module)
            stack.enter_context(_replaced(held, name, _without(getattr(held, name), calls)))
        stack.enter_context(_replaced(_named(NEGATIVE[0]), NEGATIVE[1], lambda: reject_negative))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _named(path: str) -> Any:
    """A module, or one that a module holds under that name."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        owner, _, name = path.rpartition(".")
        return getattr(_named(owner), name)


def _without(make: Callable[..., Any], calls: Collection[int]) -> Callable[..., Any]:
    """``make``, which makes a pass, but at these of its calls one that does nothing."""
    made = 0

    @functools.wraps(make)
    def found(*given: Any, **named: Any) -> Any:
        nonlocal made
        made += 1
        return (lambda module: module) if made - 1 in calls else make(*given, **named)

    return found


def reject_negative(module: Any) -> Any:
    """``module`` itself. Raises ``ValueError`` for a buffer's index that is a number below 0."""
    from tilelang import tvm

    def look(node: Any) -> None:
        if isinstance(node, (tvm.tirx.BufferLoad, tvm.tirx.BufferStore)):
            for index in node.indices:
                if isinstance(index, tvm.tirx.IntImm) and index.value < 0:
                    raise ValueError(f"an index of {node.buffer.name} is {index.value}; accepted: 0 and above")

    for function in module.functions.values():
        tvm.tirx.stmt_functor.post_order_visit(function.body, look)
    return module
