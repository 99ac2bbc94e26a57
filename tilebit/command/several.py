"""Options that take several values: repeated, and numbers separated by commas, too."""

from __future__ import annotations

from typing import Annotated, Any

import typer

Layers = Annotated[
    list[str] | None,
    typer.Option("--layer", metavar="NAME=FORMAT", help="A layer, by name or its last parts, in a format of its own; repeat it."),
]


def numbers(*names: str, help: str) -> Any:
    """An option of whole numbers from 1 on, a list: ``--batch 1,16 --batch 64`` is [1, 16, 64]."""
    return typer.Option(*names, help=help, parser=_numbers, callback=_flat, metavar="N[,N...]")


def formats_by_layer(said: list[str] | None) -> dict[str, str]:
    """``NAME=FORMAT`` of each layer. Raises ``ValueError``."""
    found: dict[str, str] = {}
    for text in said or ():
        name, _, format = text.partition("=")
        if not name or not format:
            raise ValueError(f"--layer is {text!r}; accepted: NAME=FORMAT, such as mlp.down_proj=w8a16_g128")
        if name in found:
            raise ValueError(f"--layer names {name} twice; accepted: each layer once")
        found[name] = format
    return found


def _numbers(text: str) -> list[int]:
    found = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and int(part) for part in found):
        raise typer.BadParameter(f"{text!r} is no whole number from 1 on, and no list of such; accepted: 16, or 1,16,64")
    return [int(part) for part in found]


def _flat(given: list[list[int]] | None) -> list[int] | None:
    return None if given is None else [number for numbers in given for number in numbers]
