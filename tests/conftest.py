"""What every test gets: private cache and record folders, one thread budget, fixed seeds, and a reason where a GPU is missing."""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from lanes import slow_functions  # of tests/tiles, which is in the path

ROOT = Path(__file__).resolve().parent.parent
THREADS = 2  # of the whole run: continuous integration has two cores

# The results generator is a part of the checkout, not of the package. Appended: an installed tilebit must win over the checkout's folder.
sys.path.append(str(ROOT))
pytest_plugins = ["gpu_kernels"]  # of tests/tiles, which is in the path

# The same examples in every run, and no complaint that a busy machine draws them slowly.
settings.register_profile("tests", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    """One temporary folder for the cache, the records and the emulation of the whole run: made by the controller, inherited by its xdist
    workers."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    os.environ["OMP_NUM_THREADS"] = str(max(1, THREADS // workers))  # before torch is imported, and for every subprocess
    if hasattr(config, "workerinput"):
        return
    folder = tempfile.mkdtemp(prefix="tilebit-tests-")
    os.environ["TILEBIT_CACHE"] = os.path.join(folder, "cache")
    os.environ["TILEBIT_RECORDS"] = os.path.join(folder, "records")
    os.environ["TILEBIT_EMULATION"] = folder
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For small problems: on a busy machine a second thread of torch's is waited for longer than it works."""
    import torch  # seconds: only where a test computes

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _mark_slow(items: list[pytest.Item]) -> None:
    left = {f"tests/{name}": count for name, count in slow_functions().items()}
    for item in items:
        function = item.nodeid.split("[")[0]
        if function in left and item.get_closest_marker("slow") is None:
            left[function] -= 1
            if left[function] < 0:
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses among marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _mark_slow(items)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch  # seconds: only when a collected test asks for a GPU

    if torch.cuda.is_available():
        return
    for item in on_gpu:
        item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, and torch sees none"))


@pytest.fixture(scope="session", autouse=True)
def _nothing_remembered() -> Iterator[None]:
    """Tests change what choices depend on while a process runs: each asks the rules and records that it has."""
    from tilebit.schedules import remembered

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remembered, "ENABLED", False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _few_compilers() -> Iterator[None]:
    """One compiler for each test process that shares the cores with others, where a program would start one for each core, and kept for the
    whole run: it takes seconds of a core to start, several kernels' worth."""
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) == 1:
        yield
        return
    from tilebit.tiles.compiler import kept_workers
    from tilebit.tiles.compiler.pool import CompilePool

    def of_one_core(pool: CompilePool, jobs: int | None = None, *rest: Any, **options: Any) -> None:
        made(pool, 1 if jobs is None else jobs, *rest, **options)

    made = CompilePool.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompilePool, "__init__", of_one_core)
        patch.setattr(kept_workers, "SECONDS", 3600.0)
        yield


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    """The same random numbers for every test, whatever ran before it and in whichever process."""
    import numpy as np

    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    """``torch.compile`` counts recompilations by line of code: cases of one test would use up each other's."""
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"]._dynamo.reset()
