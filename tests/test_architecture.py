"""The house rules that imports, folders and the wheel must keep."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tilebit.schedules.operations import programs

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"layouts": 0, "schedules": 1, "tiles": 2, "autotune": 3, "tilebit": 4}  # a folder imports itself and lower ones
COMPILERS = {"tvm", "tilelang"}
LEAVES = ("tilebit.json_reader", "tilebit.runtime")  # a leaf imports no other file than leaves, and every folder may import it


def sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    """The import name of a source file: layouts/x.py is tilebit.layouts.x, tilebit/x.py is tilebit.x."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "tilebit" else ("tilebit", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, tree: ast.AST) -> list[str]:
    """Every module that ``tree`` (of the file at ``path``) imports, relative names resolved; ``from p import n`` gives ``p.n``."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            names += [".".join([*base, alias.name]) for alias in node.names]
    return names


def at_import_time(tree: ast.Module) -> ast.Module:
    """``tree`` without what only runs later or never: function bodies and blocks for type checkers."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST:
            if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
                return ast.Pass()
            return self.generic_visit(node)

    return ast.fix_missing_locations(Strip().visit(tree))


def folder_of(name: str) -> str | None:
    """The folder that an import name lies in; None outside the project."""
    parts = name.split(".")
    if parts[0] != "tilebit":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in FOLDERS else "tilebit"


def direction_errors(path: Path, source: str) -> list[str]:
    own = folder_of(module_name(path))
    assert own is not None
    errors = []
    for name in imported(path, ast.parse(source)):
        other = folder_of(name)
        leaf = any(name == known or name.startswith(f"{known}.") for known in LEAVES)
        lower = other is not None and FOLDERS[other] <= FOLDERS[own] and module_name(path) not in LEAVES
        allowed = other is None or leaf or lower
        if not allowed:
            errors.append(f"{path.relative_to(ROOT)} imports {name}: {own} may not import {other}")
    return errors


def test_imports_point_one_way():
    errors = [error for path in sources() for error in direction_errors(path, path.read_text())]
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("layouts/x.py", "from ..schedules.target import Target"),
        ("schedules/x.py", "def f():\n    from ..tiles import program"),
        ("tiles/gemm/x.py", "from ...autotune import tune"),
        ("autotune/x.py", "from tilebit.ops.gemm import gemm"),
        ("tiles/x.py", "import tilebit.weights.packed"),
        ("tilebit/runtime.py", "from .layouts import formats"),
        ("tilebit/json_reader.py", "from .packs import read"),
        ("schedules/x.py", "from ..packs import read"),
    ],
)
def test_the_direction_check_sees_a_wrong_import(path: str, source: str):
    assert direction_errors(ROOT / path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("tiles/gemm/x.py", "from ...runtime import load_kernel"),
        ("tilebit/runtime.py", "from .json_reader import read_json"),
        ("schedules/x.py", "from ..json_reader import parse_json"),
        ("tilebit/x.py", "from .layouts.formats import QuantFormat"),
        ("autotune/x.py", "from ..layouts.formats import QuantFormat"),
        ("schedules/rules/x.py", "from ..target import Target"),
    ],
)
def test_the_direction_check_accepts_a_right_import(path: str, source: str):
    assert not direction_errors(ROOT / path, source)


def test_compilers_are_imported_where_they_are_used():
    """tvm and tilelang cannot share a process, and serving environments have neither.

    Code that only a build runs may import its compiler at the top, when it lies beside its program (tiles/cpu, tiles/gemm, ...) and the
    program, like every other module, imports it inside a function.
    """
    first = {module_name(path): imported(path, at_import_time(ast.parse(path.read_text()))) for path in sources()}
    needs = {name: COMPILERS & {i.split(".")[0] for i in imports} for name, imports in first.items()}
    for _ in first:  # what a module imports, its importers need too
        for name, imports in first.items():
            needs[name] |= {c for i in imports for c in needs.get(i, set()) | needs.get(i.rpartition(".")[0], set())}
    found = {name: compilers for name, compilers in needs.items() if compilers}
    assert all(name.count(".") >= 3 and name.startswith("tilebit.tiles.") for name in found), found
    assert not {rule.module for rule in programs().values()} & set(found), found
    assert all(len(compilers) == 1 for compilers in found.values()), found


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("tilebit", {"tilebit.tiles", "tilebit.autotune", *COMPILERS}),
        ("tilebit.json_reader", {"torch", "tilebit.layouts", "tilebit.schedules", "tilebit.runtime", "tilebit.tiles", *COMPILERS}),
        ("tilebit.runtime", {"tilebit.layouts", "tilebit.schedules", "tilebit.tiles", "tilebit.autotune", *COMPILERS}),
        ("tilebit.layouts", {"torch", "tilebit.schedules", "tilebit.tiles", "tilebit.autotune", *COMPILERS}),
        ("tilebit.schedules", {"torch", "tilebit.tiles", "tilebit.autotune", *COMPILERS}),
    ],
)
def test_importing_stays_light(module: str, unwanted: set[str]):
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & {unwanted!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.split(), f"import {module} also imports {done.stdout.split()}"


def test_no_file_is_called_utils():
    assert not [path for path in sources() if re.fullmatch(r"_?utils?|helpers?|misc|common", path.stem)]


def test_no_package_exports_a_name_of_one_of_its_modules():
    """Such a name means the function or the module, depending on what was imported before."""
    found = []
    for path in sources():
        if path.name == "__init__.py":
            modules = {child.stem for child in path.parent.iterdir()}
            nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom) and node.module)
            found += [f"{module_name(path)}.{alias.name}" for node in nodes for alias in node.names if alias.name in modules]
    assert not found, found


def tree_files() -> list[Path]:
    """The files of the checkout, as git would add them; everything outside hidden and build folders where there is no git."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    skipped = {"build", "dist", "__pycache__"}
    inside = (path for path in ROOT.rglob("*") if path.is_file())
    return [
        p
        for p in inside
        if not any(part in skipped or part.endswith(".egg-info") or part in (".venv", ".git") for part in p.relative_to(ROOT).parts)
    ]


# Written in pieces, so that this file passes its own test.
LEAKS = re.compile(
    "|".join(
        ["/" + "work/", "/" + "root/", "/" + "farm/", "/" + r"home/\w", "/" + "opt/pypi", "/tmp/" + "(?:site|peers)", "pypi" + r"\.org"]
    )
)


def test_no_file_names_a_path_or_registry_of_one_machine():
    found = []
    for path in tree_files():
        if path.suffix in (".png", ".svg", ".pdf"):
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if LEAKS.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert not found, "\n".join(found)


def configured() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_listed():
    packages = set(configured()["tool"]["setuptools"]["packages"])
    folders = {path.parent for path in sources()}
    without = [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()]
    assert not without, f"folders with Python files and no __init__.py: {without}"
    assert packages == {module_name(folder / "__init__.py") for folder in folders}


def test_the_lock_holds_every_pin():
    """Every exact version in pyproject stands in constraints.txt, and every dependency has an entry there."""
    project = configured()["project"]
    lock = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().lower().splitlines() if "==" in line)
    lock = {name.replace("_", "-"): version for name, version in lock.items()}
    for requirement in [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]:
        name = re.split(r"[\[<>=!~]", requirement)[0].lower().replace("_", "-")
        assert name in lock, f"{requirement} has no entry in constraints.txt"
        if "==" in requirement:
            assert lock[name] == requirement.split("==")[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from a copy of the tree (a build in place would leave build/lib behind, which later wheels would pick up)."""
    folder = tmp_path_factory.mktemp("wheel")
    for path in tree_files():
        copy = folder / "source" / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder / "dist"), str(folder / "source")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return zipfile.ZipFile(next((folder / "dist").glob("*.whl")))


def test_the_wheel_holds_every_file(wheel: zipfile.ZipFile):
    inside = set(wheel.namelist())
    wanted = [
        *sources(),
        *(ROOT / "tiles" / "device").glob("*.*"),
        *(ROOT / "tiles" / "device").rglob("*.cuh"),
        *(ROOT / "schedules" / "tuned").glob("*.jsonl"),
    ]
    names = {path: path.relative_to(ROOT).as_posix() for path in wanted}
    missing = [name for name in names.values() if (name if name.startswith("tilebit/") else f"tilebit/{name}") not in inside]
    assert not missing, f"not in the wheel: {missing}; list their package or package-data in pyproject.toml"


def test_the_wheel_holds_nothing_else(wheel: zipfile.ZipFile):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert tops == {"tilebit", next(top for top in tops if top.endswith(".dist-info"))}
    metadata = next(wheel.read(name).decode() for name in wheel.namelist() if name.endswith("/METADATA"))
    assert "License-Expression: Apache-2.0" in metadata
