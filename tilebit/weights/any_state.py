"""The entries of ``state_dict`` that a layer of any precision has: what they are called, and the weight
that they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..layouts.formats import CODEBOOK_BITS
from ..layouts.planes import plane_layout
from .any_packed import AnyPrecisionWeight
from .extra_state import from_tensor, to_tensor

PLANES = "planes"


def codebook_entry(bits: int) -> str:
    return f"codebook_{bits}"


WEIGHTS = (PLANES, *map(codebook_entry, CODEBOOK_BITS))  # of all widths


@dataclass(frozen=True, slots=True)
class StoredAny:
    """What the extra state says of a weight [n, k] in ``widths``, packed for ``arch``."""

    n: int
    k: int
    widths: range
    arch: str

    @classmethod
    def parse(cls, state: Any) -> StoredAny:
        """The inverse of ``to_tensor``. Raises ``ValueError`` for anything else, and for planes that lie as
        another version has them."""
        try:
            said = from_tensor(state)
            n, k, arch, widths = said["n"], said["k"], str(said["arch"]), said["widths"]
            there, known = plane_layout(arch).name, list(range(widths[0], widths[-1] + 1))
            if not (type(n) is type(k) is int and min(n, k) > 0 and widths == known and set(known) <= set(CODEBOOK_BITS)):
                raise ValueError(f"n, k and widths are {n}, {k} and {widths}")
        except (AttributeError, TypeError, ValueError, LookupError) as error:
            raise ValueError(f"the extra state is not an AnyPrecisionLinear's ({error}); accepted: its state_dict") from None
        stored = said.get("layout")
        if stored != there:
            raise ValueError(
                f"planes lie as {stored or 'an earlier version'} has them; accepted for {arch}: {there}. Quantize the layer again, or "
                "load it with the version that saved it and pack what `packed.unpack()` gives there"
            )
        return cls(n, k, range(widths[0], widths[-1] + 1), arch)

    def to_tensor(self) -> Tensor:
        """uint8 [bytes]."""
        return to_tensor({**self.described, "arch": self.arch, "layout": plane_layout(self.arch).name})

    @property
    def described(self) -> dict[str, Any]:
        """What a layer's own must be, wherever it was packed."""
        return {"n": self.n, "k": self.k, "widths": list(self.widths)}

    @property
    def entries(self) -> list[str]:
        """Of the weight."""
        return [PLANES, *map(codebook_entry, self.widths)]

    def weight(self, state: Mapping[str, Tensor], prefix: str = "") -> AnyPrecisionWeight:
        """The weight of ``state``, whose entries' names begin with ``prefix``. Raises ``ValueError`` for
        entries that are missing, and for tensors that make no such weight."""
        expect_entries(state, prefix, self.entries)
        books = {bits: state[prefix + codebook_entry(bits)] for bits in self.widths}
        return AnyPrecisionWeight(state[prefix + PLANES], books, self.n, self.k, self.arch)


def expect_entries(state: Mapping[str, Tensor], prefix: str, needed: list[str]) -> None:
    """Raise ``ValueError`` for those of ``needed`` that ``state`` lacks."""
    lacking = [prefix + name for name in needed if prefix + name not in state]
    if lacking:
        raise ValueError(f"the state_dict lacks {', '.join(lacking)}; accepted: all or none of a layer's")


def of_widths(state: Any) -> bool:
    """Whether an extra state is that of a layer of any precision."""
    try:
        return "widths" in from_tensor(state)
    except (AttributeError, TypeError, ValueError):
        return False
