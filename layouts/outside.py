"""What other packages add (formats, codecs, operations, programs): each is named by the path of its
module."""

from __future__ import annotations

import importlib
from typing import Any


class NotInstalled(ValueError):
    """A name is that of a module which this process cannot import."""


def stated(module: str, name: str) -> Any:
    """The attribute ``name`` ("FORMAT", "CODEC", "OPERATION", "RULE") of ``module``, a dotted path.

    Raises ``NotInstalled`` where there is no such module, and ``ValueError`` where it has no such
    attribute.
    """
    do = "install the package that has it, or name its folder in PYTHONPATH"
    if not all(part.isidentifier() for part in module.split(".")):
        raise ValueError(f"{module!r} is no path of a module; accepted: one with {name}, such as 'my_package.my_module'")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise NotInstalled(f"the module {module!r}, which {name} is read from, cannot be imported ({error}); {do}") from error
    if not hasattr(found, name):
        raise ValueError(f"the module {module!r} has no {name}; accepted: a module that states it")
    return getattr(found, name)
