"""The new tokens of one forward call: which columns of the batch they are, and the sequences that
they belong to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cache.batch import Batch


class Step:
    """``columns`` new columns of each row, ``counts`` of them tokens, in ``batch``. ``places`` int64
    are the tokens' places among rows times columns, None where none is padding."""

    def __init__(self, batch: Batch, columns: int, counts: Sequence[int], padding: Tensor | None, device: torch.device) -> None:
        self.batch, self.columns, self.counts = batch, columns, list(counts)
        self.places = None if padding is None else (~padding).flatten().nonzero().flatten().to(device)


def padding_of(mask: Tensor | None, columns: int, seen: int, lengths: Sequence[int]) -> Tensor | None:
    """Which of the new columns are padding, bool [rows, columns] on the host; None where none is.
    ``mask`` [rows, columns] is false where a column is padding; ``seen`` columns are in the cache,
    ``lengths`` of them tokens. Raises ``ValueError`` for a mask that says something else of these."""
    if mask is None:
        if any(length != seen for length in lengths):
            raise ValueError("the cache was filled with padding and attention_mask is None; accepted: the mask of all columns so far")
        return None
    if tuple(mask.shape) != (len(lengths), seen + columns):
        raise ValueError(
            f"attention_mask is {list(mask.shape)}; accepted: [{len(lengths)}, {seen + columns}]: the {seen} columns in the cache, then "
            f"the {columns} new ones"
        )
    held = torch.cat((mask[:, :seen].sum(1, keepdim=True), mask[:, seen:]), 1).cpu()  # one copy for both
    if held[:, 0].tolist() != list(lengths):
        raise ValueError(
            f"attention_mask shows {held[:, 0].tolist()[:8]} of the {seen} columns in the cache, which holds {list(lengths)[:8]} tokens of "
            "them; accepted: the mask that they came with"
        )
    padding = held[:, 1:] == 0
    return padding if bool(padding.any()) else None
