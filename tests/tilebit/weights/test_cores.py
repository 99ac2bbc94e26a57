"""Parts of a tensor on several threads: each part once, in order, with one of torch's threads."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tilebit.weights.cores import side_by_side


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_every_part_is_done_once_with_one_thread(threads: int) -> None:
    before, seen = torch.get_num_threads(), []
    together = threading.Barrier(threads, timeout=60)  # parts wait for one another: they run at once

    def work(part: int) -> None:
        together.wait()
        seen.append((part, torch.get_num_threads(), torch.is_inference_mode_enabled()))

    try:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            assert list(side_by_side(work, range(8))) == list(range(8))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert sorted(seen) == [(part, 1, True) for part in range(8)]


@pytest.mark.parametrize("threads", [1, 3])
def test_what_a_part_raises_ends_the_rest(threads: int) -> None:
    before, done = torch.get_num_threads(), []

    def work(part: int) -> None:
        if part == 2:
            raise ValueError("part 2")
        if part > 2:
            time.sleep(0.02)  # all of them would take seconds
        done.append(part)

    try:
        torch.set_num_threads(threads)
        with pytest.raises(ValueError, match="part 2"):
            for _ in side_by_side(work, range(1000)):
                pass
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert {0, 1} <= set(done) and 2 not in done and len(done) < 1000
