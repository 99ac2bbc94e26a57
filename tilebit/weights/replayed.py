"""Functions of small tensors that are called again and again with the same shapes: on a GPU, one launch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Replayed:
    """``function`` takes tensors on one device and gives a tuple of tensors. It must not read their values on the
    host, and may write to its arguments.

    On a GPU the first call runs it, and the second, with arguments of the same shapes and dtypes, captures it as a
    CUDA graph, which is replayed from then on, on copies of the arguments: what is returned is overwritten
    by the next call. Arguments of other shapes run it as it is. Graph and copies live as long as this object."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self._function = function
        self._kind: object = None  # of the first call's arguments
        self._graph: torch.cuda.CUDAGraph | None = None
        self._given: tuple[Tensor, ...] = ()
        self._found: tuple[Tensor, ...] = ()

    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        kind = [(x.shape, x.dtype, x.device) for x in given]
        if self._kind is None or kind != self._kind or not given[0].is_cuda:
            self._kind = self._kind or kind
            return self._function(*given)  # the first call loads kernels, which a graph cannot
        if self._graph is None:
            self._capture(given)
        for held, new in zip(self._given, given, strict=True):
            held.copy_(new)
        assert self._graph is not None
        self._graph.replay()
        return self._found

    def _capture(self, given: tuple[Tensor, ...]) -> None:
        self._given = tuple(map(torch.clone, given))
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(given[0].device), torch.cuda.graph(self._graph):
            self._found = self._function(*self._given)
