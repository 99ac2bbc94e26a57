"""The other side of ``pool.py``: read pickled requests from standard input, compile, write pickled
results to standard output."""

from __future__ import annotations

import gc
import importlib.util
import os
import pickle
import sys
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import BinaryIO

from .cache import ArtifactCache
from .compile import compile_request
from .kernel import Kernel
from .pool import HEADER, READY
from .request import CompileFailure, CompileRequest

COMPILERS = {"tilelang", "tvm"}


class _TvmWithoutTorch:
    """Imports TVM as where torch is not installed, once. It would import torch for the tensors of calls,
    of which a compile has none, and that is two thirds of the time that a worker takes to start.
    Afterwards torch is there for whoever imports it. TileLang imports it before TVM, and has it."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "tvm":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None and "torch" not in sys.modules:
            spec.loader.exec_module = partial(_without_torch, spec.loader.exec_module)
        return spec


def _without_torch(run: Callable[[ModuleType], None], module: ModuleType) -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]  # an ImportError for whoever asks
    try:
        run(module)
    finally:
        del sys.modules["torch"]


def _answer(request: CompileRequest, cache: ArtifactCache) -> Kernel | CompileFailure:
    try:
        return compile_request(request, cache)
    except CompileFailure as failure:
        return failure
    except Exception as error:  # whatever a compiler raises belongs to this request alone
        return CompileFailure(request, "build", (f"{type(error).__name__}: {error}",))


def serve(requests: BinaryIO, results: BinaryIO) -> None:
    """Say that this worker has started, then answer requests, each with its cache's folder, until the
    input ends."""
    results.write(READY)
    results.flush()
    while header := requests.read(HEADER.size):
        root, request = pickle.loads(requests.read(HEADER.unpack(header)[0]))
        data = pickle.dumps(_answer(request, ArtifactCache(root)))
        if not gc.get_freeze_count() and not COMPILERS.isdisjoint(sys.modules):
            gc.collect()
            gc.freeze()  # a tenth of a compiler's time went into searching for garbage what it has loaded
        results.write(HEADER.pack(len(data)) + data)
        results.flush()


def main() -> None:
    """A worker's whole life."""
    answers = os.fdopen(os.dup(1), "wb")
    sys.meta_path.insert(0, _TvmWithoutTorch())
    os.dup2(2, 1)  # whatever a compiler prints must not end up between two answers
    serve(sys.stdin.buffer, answers)
