"""What a kernel is called with, stated once: parameters, launch binding, checks, schemas and the
tuner's problems follow from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

WORKSPACE = "workspace"  # the scratch memory of a launch: no operand of a workload, a rule says how long it is


@dataclass(frozen=True, slots=True)
class Operand:
    """One tensor of an operation, in the place it has in every call.

    ``dtype`` is torch's name ("float16", "int32"). ``shape`` holds whole numbers and names of sizes
    that a call binds: a name means what it met first, "batch + 1" one more than "batch".
    ``written``: the kernel writes it (and reads it first where ``read``); ``optional``: some calls
    of the operation have none, and ``absent``: those of this workload have none. ``apart``: rows,
    along the first dimension, may lie any multiple of 16 bytes apart, such as slices of wider rows;
    kernels find that stride in the tensor. ``advice`` says what to do about one that does not fit.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    written: bool = False
    read: bool = True
    optional: bool = False
    absent: bool = False
    apart: bool = False
    advice: str = ""

    def text(self) -> str:
        """What is accepted, in words: ``float16 [m, 4096]``."""
        return f"{self.dtype} [{', '.join(map(str, self.shape))}]"

    @property
    def pitch(self) -> str:
        """The name of the stride of rows that lie ``apart``, in elements."""
        return f"{self.name}_pitch"


def present(operands: Iterable[Operand]) -> tuple[Operand, ...]:
    """Those that calls of the workload have, in call order."""
    return tuple(o for o in operands if not o.absent)


def kernel_params(operands: Sequence[Operand], workspace: bool) -> tuple[str, ...]:
    """A kernel's parameters in call order: what it reads, its workspace where it takes one, what it
    only writes."""
    given = present(operands)
    first = [o.name for o in given if o.read]
    return (*first, *([WORKSPACE] if workspace else []), *(o.name for o in given if not o.read))


def binds(shape: Sequence[int], wanted: Sequence[int | str], sizes: dict[str, int]) -> bool:
    """Whether ``shape`` is what ``wanted`` says, given the ``sizes`` bound so far, to which it
    adds. A size "max_..." must be above 0."""
    return len(shape) == len(wanted) and all(_same(size, name, sizes) for size, name in zip(shape, wanted, strict=True))


def _same(size: int, name: int | str, sizes: dict[str, int]) -> bool:
    if isinstance(name, int):
        return size == name
    base, _, more = name.partition(" + ")
    if name.startswith("max_") and size < 1:
        return False
    return sizes.setdefault(base, size - int(more or 0)) + int(more or 0) == size


def known_sizes(wanted: Sequence[int | str], sizes: Mapping[str, int]) -> list[str]:
    """``batch = 3``, for the names in ``wanted`` that are bound."""
    return [f"{name} = {sizes[name]}" for name in wanted if isinstance(name, str) and name in sizes]
