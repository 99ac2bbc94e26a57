"""How work is divided: the one description of a kernel's tiling, pipeline and split that every
program reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import Any


@dataclass(frozen=True, slots=True)
class Schedule:
    """A way to divide one GEMM.

    ``program`` names the tile program. ``block_n`` x ``block_m`` is the output tile of one block
    (n: output channels, m: tokens), ``block_k`` the depth of one pipeline stage, ``num_stages`` the
    stages in flight, ``num_warps`` the computing warps of a block, ``split_k`` the number of blocks
    (CPU: accumulators) that share one output tile along k, ``min_blocks`` the blocks that must fit
    on one SM, ``raster`` the number of neighbouring row tiles visited together (0: plain order),
    ``stream_k`` whether blocks take equal shares of all tiles' steps, across tile borders, instead
    of tiles (Osama et al., Stream-K, 2023), ``cluster`` the blocks that share their x, which one of
    them loads for all, or their weights, of which each looks up a part for all, ``tail`` the strips
    of fewer tokens that the tiles of a last, short wave are cut into (1: they are whole), ``joined``
    whether output channels whose bytes are nibbles in two rows are multiplied as bytes, in tiles of
    their own. What a field means on a device, and which values are legal there,
    is said by the program's rule in ``schedules``.
    """

    program: str
    block_n: int
    block_m: int
    block_k: int
    num_stages: int = 1
    num_warps: int = 4
    split_k: int = 1
    min_blocks: int = 1
    raster: int = 0
    stream_k: bool = False
    cluster: int = 1
    tail: int = 1
    joined: bool = False

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _TYPES}

    @classmethod
    def from_json(cls, data: Any) -> Schedule:
        """Unknown fields are ignored (a newer writer may have added some); what is no schedule
        raises ``ValueError``."""
        if not isinstance(data, dict):
            raise ValueError(f"a schedule is a {type(data).__name__}; accepted: an object with the fields {', '.join(_TYPES)}")
        known = {name: data[name] for name in _TYPES if name in data}
        wrong = [f"{name} is {value!r:.80}" for name, value in known.items() if type(value) is not _TYPES[name]]
        if wrong:
            raise ValueError(f"{', '.join(wrong)}; accepted: whole numbers, a program's name, and true or false for stream_k and joined")
        try:
            schedule = cls(**known)
        except TypeError as error:
            raise ValueError(f"not a schedule: {data!r:.200} ({error}); accepted: the fields {', '.join(_TYPES)}") from None
        least = {name: 0 if name == "raster" else 1 for name, kind in _TYPES.items() if kind is int}
        small = [f"{name} is {getattr(schedule, name)}" for name, value in least.items() if getattr(schedule, name) < value]
        if small:
            raise ValueError(f"a schedule's {', '.join(small)}; accepted: numbers from 1 on, raster from 0 on")
        return schedule


_TYPES = {f.name: {"str": str, "int": int, "bool": bool}[str(f.type)] for f in fields(Schedule)}


def in_turn(lists: Iterable[list[Schedule]]) -> list[Schedule]:
    """The first of each list, then the second of each, and so on, without duplicates."""
    return list(dict.fromkeys(s for row in zip_longest(*lists) for s in row if s is not None))
