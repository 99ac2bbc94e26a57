"""Choices of earlier processes, kept beside the artifacts: the portfolios of an 8B model's shapes
take seconds to find, half of a program's way to its first token where kernels are at hand.

A choice depends on sources and measurements, so the file that keeps it is named by their digest:
all Python of ``schedules`` and ``layouts``, shipped and user's records and rankers, and XGBoost's
version. What another package defines is not remembered: its sources are not among them. A file that
cannot be written or read is done without, and so is a line that is no answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from functools import lru_cache
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from ..json_reader import parse_json
from .operations import AnyWorkload
from .ranker import SUFFIX
from .records import records_path
from .target import Target

ENABLED = True  # False: this process finds out for itself, where something else than files decides
MOST_LINE = 1 << 20  # bytes
MOST_FILES = 8  # of which each is of other sources or measurements: the oldest go
SOURCES = ("tilebit.layouts", "tilebit.schedules")  # what choices are made by
ENDS = (".py", ".jsonl", SUFFIX)


def default_root() -> Path:
    """Where artifacts and choices are kept: ``$TILEBIT_CACHE``, else ``~/.cache/tilebit``."""
    configured = os.environ.get("TILEBIT_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "tilebit"


def recall(what: str, workload: AnyWorkload, target: Target) -> Any | None:
    """What ``keep`` was given by a process with the same sources and measurements; None: nothing."""
    asked = _asked(what, workload, target)
    return _kept().get(asked) if asked is not None else None


def keep(what: str, workload: AnyWorkload, target: Target, answer: Any) -> None:
    """Remember ``answer``, which JSON can hold."""
    asked = _asked(what, workload, target)
    path = None if asked is None else _path()
    if path is None:
        return
    with contextlib.suppress(OSError):
        for folder in (path.parent.parent, path.parent):  # private, both: artifacts, which are code, lie beside it
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _drop_oldest(path.parent)
        line = json.dumps({"asked": asked, "answer": answer}).encode() + b"\n"
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line)  # at once: other processes write to the same file
        finally:
            os.close(descriptor)


def forget() -> None:
    """Find out anew which sources and measurements there are; nothing is deleted."""
    _path.cache_clear()
    _kept.cache_clear()


def _asked(what: str, workload: AnyWorkload, target: Target) -> str | None:
    """The question as text; None: it is not remembered."""
    if not ENABLED:
        return None
    stated = workload.to_json()
    if any("." in name for name in _names(stated)):  # a module's: of another package
        return None
    return json.dumps([what, stated, target.to_json()], sort_keys=True)


def _names(data: Any) -> Iterator[str]:
    """Every string in what JSON can hold."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict | list):
        for value in data.values() if isinstance(data, dict) else data:
            yield from _names(value)


@lru_cache(maxsize=1)
def _kept() -> dict[str, Any]:
    """All answers that are there."""
    path, found = _path(), dict[str, Any]()
    if path is None or not path.is_file():
        return found
    with contextlib.suppress(OSError):
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                data = parse_json(line, MOST_LINE)
                found[data["asked"]] = data["answer"]
    return found


@lru_cache(maxsize=1)
def _path() -> Path | None:
    """The file of these sources and measurements; None: they cannot be read."""
    digest = hashlib.sha256()
    try:
        digest.update(metadata.version("xgboost").encode())
    except metadata.PackageNotFoundError:
        digest.update(b"none")
    own = records_path()
    try:
        texts = [(name, file.read_bytes()) for package in SOURCES for name, file in _files(resources.files(package), package)]
        texts += [(path.name, path.read_bytes()) for path in sorted({own, *own.parent.glob(f"{own.stem}.*{SUFFIX}")}) if path.is_file()]
    except OSError:
        return None
    for name, text in texts:
        digest.update(f"\0{name}\0{len(text)}\0".encode() + text)
    return default_root() / "choices" / f"{digest.hexdigest()[:32]}.jsonl"


def _files(folder: Traversable, name: str) -> Iterator[tuple[str, Traversable]]:
    """The files of a package whose names end in ENDS, in order."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _files(entry, f"{name}/{entry.name}")
        elif entry.name.endswith(ENDS):
            yield f"{name}/{entry.name}", entry


def _drop_oldest(folder: Path) -> None:
    files = sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
    for path in files[: max(0, len(files) - MOST_FILES + 1)]:
        path.unlink(missing_ok=True)
