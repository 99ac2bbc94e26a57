"""The one reader of JSON for files that others may have written: manifests, packs, records, rankers,
checkpoints' indexes and configs.

A leaf like ``runtime.py``: it needs Python alone. What cannot be read is a ``JsonError`` whatever is
wrong with it: who asked says which file it was and what to do about it.
"""

from __future__ import annotations

import json
import os
import stat
from itertools import chain
from pathlib import Path
from typing import Any

MAX_BYTES = 256 << 20  # of a file; the largest index of a checkpoint's shards has some 10 MB
MAX_DEPTH = 64  # objects and arrays inside one another; this project's files have 6


class JsonError(ValueError):
    """A text is no JSON that is read here; the message says why, as a sentence about "it"."""


def parse_json(text: str | bytes, max_bytes: int = MAX_BYTES) -> Any:
    """The value that ``text`` (bytes: UTF-8) states. Raises ``JsonError`` when it is no JSON, has
    more than ``max_bytes`` bytes (of a ``str``: characters), or is nested deeper than
    ``MAX_DEPTH``."""
    if len(text) > max_bytes:
        raise JsonError(f"it has more than {max_bytes} bytes; accepted: at most as many")
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(decoded)
    except RecursionError:
        raise JsonError(f"it is nested too deeply; accepted: at most {MAX_DEPTH} levels") from None
    except ValueError as error:  # no JSON, no UTF-8, a number of too many digits
        raise JsonError(f"it is not JSON ({error})") from None
    if decoded.count("{") + decoded.count("[") > MAX_DEPTH and _deeper(value):
        raise JsonError(f"it is nested too deeply; accepted: at most {MAX_DEPTH} levels")
    return value


def read_json(path: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The JSON object in the file ``path``. Raises ``JsonError`` when it is no regular file or holds
    anything else, and ``OSError`` when it cannot be opened."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # asked before it is opened, which a pipe would not return from
        raise JsonError("it is not a file; accepted: a file with a JSON object")
    with Path(path).open("rb") as file:
        value = parse_json(file.read(max_bytes + 1), max_bytes)
    if not isinstance(value, dict):
        raise JsonError(f"it holds a {type(value).__name__}; accepted: a JSON object")
    return value


def _deeper(value: Any) -> bool:
    """Whether ``value`` has more than ``MAX_DEPTH`` objects and arrays inside one another."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inside = chain.from_iterable(v.values() if isinstance(v, dict) else v for v in level)
        level = [v for v in inside if isinstance(v, dict | list)]
        if not level:
            return False
    return True
