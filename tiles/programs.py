"""Finding a tile program by its name, and the sources that decide what it builds."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from functools import lru_cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from threading import Lock

from ..schedules.operations import find_rule
from .program import DEVICE_DIR, TileProgram

LIBRARY = __name__.partition(".")[0]
# Threads that compile ahead may meet here: CPython 3.11 counts the depth of all their syntax trees in
# one place and raises SystemError for a count that another one moved.
_PARSING = Lock()


def program(name: str) -> TileProgram:
    """The tile program called ``name``; imports its module on first use, which is cheap: it imports
    its compiler only inside ``build``. Raises ``ValueError`` for an unknown one."""
    return importlib.import_module(find_rule(name).module).PROGRAM


def program_sources(name: str) -> tuple[Path, ...]:
    """Every source file that decides what program ``name`` builds, sorted: the Python files of its
    package, what these import from this library and from the program's own (transitively), and its
    device headers."""
    module = importlib.import_module(find_rule(name).module)
    libraries = {LIBRARY, module.__name__.partition(".")[0]}
    package = module.__name__.rpartition(".")[0] or module.__name__
    waiting = [f"{package}.{path.stem}" for path in Path(str(module.__file__)).parent.glob("*.py")]
    specs: dict[str, ModuleSpec | None] = {}
    seen: set[str] = set()
    found: set[Path] = set()
    while waiting:
        current = waiting.pop()
        path = None if current in seen else _source(current, specs)
        seen.add(current)
        if path is not None:
            found.add(path)
            waiting += _imports(current, path, libraries)
    return (*sorted(found), *(DEVICE_DIR / header for header in sorted(module.PROGRAM.headers)))


def _source(module: str, known: dict[str, ModuleSpec | None]) -> Path | None:
    spec = _spec(module, known)
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None


def _spec(module: str, known: dict[str, ModuleSpec | None]) -> ModuleSpec | None:
    """Of a module, or None for a name inside one; ``known`` keeps them. Nothing is imported, packages above
    it neither: those of programs import their compilers, and a package of models its library, which takes
    seconds."""
    if module not in known:
        above, _, _ = module.rpartition(".")
        package = _spec(above, known) if above else None
        path = package.submodule_search_locations if package is not None else None
        known[module] = None if above and path is None else _found(module, path)
    return known[module]


def _found(module: str, path: Sequence[str] | None) -> ModuleSpec | None:
    try:
        return next(filter(None, (finder.find_spec(module, path) for finder in sys.meta_path)), None)
    except ImportError:  # of a finder that refuses
        return None


def _imports(module: str, path: Path, libraries: set[str]) -> list[str]:
    """Names of the libraries' modules that the file at ``path`` may import, wherever in it; some
    are names inside modules."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return [name for name in _imported(path.read_text(encoding="utf-8"), package) if name.partition(".")[0] in libraries]


@lru_cache(maxsize=512)
def _imported(text: str, package: str) -> tuple[str, ...]:
    """Names that a file of ``package`` with this text may import. Programs share most of their
    files, and parsing takes most of the time."""
    names = []
    with _PARSING:
        tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return tuple(names)
