"""Where and with what a number was measured: the fields of a record that say so."""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path

_PACKAGES = ("tilebit", "torch", "tilelang", "apache-tvm", "apache-tvm-ffi")


def now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@cache
def package_versions() -> dict[str, str]:
    """Versions of the installed packages that take part in a measurement."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@cache
def source_commit() -> str:
    """The commit of this source tree, with "-dirty" when tracked files differ from it; empty when
    this is not a checkout.

    ``$TILEBIT_COMMIT`` says it for a copy of the tree that travelled to a GPU machine without its
    history.
    """
    told = os.environ.get("TILEBIT_COMMIT")
    if told:
        return told
    here = Path(__file__)

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(here.parent), *arguments], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", here.name) is None:  # an installed copy may lie inside somebody else's checkout
        return ""
    commit = git("rev-parse", "HEAD")
    if commit is None:
        return ""
    return commit + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
