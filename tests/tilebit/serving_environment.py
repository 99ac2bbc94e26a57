"""A virtual environment with what pip would install of tilebit and of packages that are named, and nothing else: links to what is installed
here."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("layouts", "schedules", "tiles", "autotune")  # of the checkout, which a wheel has under its import name


def serving_python(venv: Path, *packages: str) -> Path:
    """Its interpreter; the environment is made in ``venv``, of tilebit, its dependencies, and ``packages`` with theirs."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)}))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for held in needed([*project["dependencies"], *packages]):
        for top in {file.parts[0] for file in held.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():  # several may share a folder
                (site / top).symlink_to(Path(str(held.locate_file(top))))
    package = site / "tilebit"
    package.mkdir()
    for folder in ("", *FOLDERS):
        spec = importlib.util.find_spec(f"tilebit.{folder}" if folder else "tilebit")
        assert spec is not None and spec.origin is not None
        source = Path(spec.origin).parent
        for path in [source] if folder else source.iterdir():
            link = package / (folder or path.name)
            if not link.exists() and path.name != "__pycache__":
                link.symlink_to(path)
    return venv / "bin" / "python"


def needed(requirements: list[str]) -> Iterator[Distribution]:
    """The distributions that ``requirements`` ask for here, each once, with those that they ask for in turn. What is not installed
    here is not needed here either."""
    seen: set[str] = set()
    asked = [Requirement(text) for text in requirements]
    while asked:
        requirement = asked.pop()
        if requirement.name in seen or (requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(requirement.name)
        try:
            held = distribution(requirement.name)
        except PackageNotFoundError:
            continue
        asked += [Requirement(text) for text in held.requires or ()]
        yield held


def serving_variables(cache: Path) -> dict[str, str]:
    """Of a process there: kernels come from packs alone, and no folder of this checkout is in its path."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return {**kept, "TILEBIT_NO_COMPILE": "1", "TILEBIT_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
