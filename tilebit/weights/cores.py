"""Work on parts of a tensor, side by side on the cores that torch may use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
_KEPT = 1 << 24  # bytes


def side_by_side(work: Callable[[T], None], parts: Sequence[T]) -> Iterator[T]:
    """Does ``work`` on each of ``parts``, on as many threads as ``torch.get_num_threads()`` says, and yields
    each part, in order, when it is done. A part has one thread, whatever their number, so that
    its results are the same. What ``work`` raises ends the rest."""
    threads = torch.get_num_threads()
    torch.empty(_KEPT, dtype=torch.uint8, device="cpu")  # glibc keeps freed memory up to twice the largest block freed: no page faults
    if threads == 1:
        for part in parts:
            work(part)
            yield part
        return
    inference = torch.is_inference_mode_enabled()  # of a thread, as is the number of torch's threads

    def alone(part: T) -> T:
        with torch.inference_mode(inference):
            work(part)
        return part

    pool = ThreadPoolExecutor(min(threads, len(parts)), "tilebit", torch.set_num_threads, (1,))
    try:
        yield from pool.map(alone, parts)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # of threads that start later
