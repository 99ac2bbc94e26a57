"""Calls of the functions under ``device/kv`` from a TileLang program."""

from collections.abc import Callable, Mapping
from typing import Any


def caller(types: Mapping[str, str], usual: str) -> Callable[..., Any]:
    """``call(name, *arguments, returns="handle")``: a call of the device function ``name``,
    "Type::function".

    Types are templates of ``usual`` ("Softmax" is ``tilebit::Softmax<usual>``) or what ``types``
    says. Arrays and tensors go as the addresses of their first elements, everything else as it is.
    """
    import tilelang.language as T

    def passed(argument: Any) -> Any:
        is_array = callable(getattr(argument, "scope", None)) and argument.scope() != "local.var"  # a variable is a buffer, too
        return T.address_of(argument[(0,) * len(argument.shape)]) if is_array else argument

    def call(name: str, *arguments: Any, returns: str = "handle") -> Any:
        group, _, function = name.partition("::")
        return T.call_extern(returns, f"{types.get(group, f'tilebit::{group}<{usual}>')}::{function}", *map(passed, arguments))

    return call
