"""From the number of a task to a sequence and what of it, where lengths are known on the device
only. Importing this imports tvm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import vectors as v
from ..vectors import T


def find_sequence(task: Any, batch: Any, tasks_of: Callable[[Any], Any]) -> tuple[Any, Any]:
    """(sequence, its task), sequence b having ``tasks_of(b)`` consecutive tasks; sequence -1 where
    there are fewer."""
    found = v.local(2, "int32")
    T.buffer_store(found, v.tirx.const(-1, "int32"), [0])
    T.buffer_store(found, task, [1])
    with T.serial(batch) as b, T.If(found[0] < 0), T.Then():
        count = T.bind(tasks_of(b))
        with T.If(found[1] < count):
            with T.Then():
                T.buffer_store(found, b, [0])
            with T.Else():
                T.buffer_store(found, found[1] - count, [1])
    return T.bind(found[0]), T.bind(found[1])
