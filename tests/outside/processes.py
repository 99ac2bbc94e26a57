"""Processes that find the toy package by its modules on PYTHONPATH, or do not, and that have no compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
WITHOUT_COMPILERS = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tvm", "tilelang"):
            raise ImportError(name + " is not for serving")
sys.meta_path.insert(0, Refuse())
"""


def environment(folder: Path, toy: bool = True) -> dict[str, str]:
    """The environment of a process with a cache and records in ``folder``, which finds the toy package, or does not."""
    path = [str(HERE)] * toy + [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    places = {"PYTHONPATH": os.pathsep.join(path), "TILEBIT_CACHE": str(folder / "cache"), "TILEBIT_RECORDS": str(folder / "records.jsonl")}
    return {**os.environ, **places}


def python(arguments: list[str], environment: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], env=environment, cwd=folder, capture_output=True, text=True, timeout=280)
