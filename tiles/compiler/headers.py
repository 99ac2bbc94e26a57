"""The CUDA functions under ``tiles/device``, as programs include and name them, and the numbers
handed to them."""

import functools
import os

import numpy as np

from ...schedules.gemm.rules import TICKETS
from ...schedules.gemm.waves import SHARING_STEPS
from ..program import DEVICE_DIR

TYPES = {"float16": "half", "bfloat16": "__nv_bfloat16", "float32": "float", "int32": "int"}
GATES = {"silu": "tilebit::Silu", "gelu_tanh": "tilebit::GeluTanh", "gelu": "tilebit::Gelu"}  # of store/gate.cuh
# Numbers that schedules decide by and device functions use, by the file that uses them.
CONSTANTS = {
    "store/split_k.cuh": {"TICKETS": TICKETS},
    "order/tiles.cuh": {"SHARING_STEPS": SHARING_STEPS},
}


def device_source(headers: tuple[str, ...]) -> str:
    """The CUDA functions of ``headers`` (names of files under ``tiles/device``, or absolute paths),
    which a kernel includes as text, each after its ``CONSTANTS``."""
    paths = [os.path.join(DEVICE_DIR, name) for name in headers]
    return "\n".join(_constants(name) + _text(path, os.stat(path).st_mtime_ns) for name, path in zip(headers, paths, strict=True))


@functools.lru_cache(maxsize=256)
def _text(path: str, _changed: int) -> str:
    """What the file holds: a kernel includes some forty, the same ones as the next."""
    with open(path, encoding="utf-8") as file:
        return file.read()


def _constants(header: str) -> str:
    stated = "".join(f"constexpr int {name} = {value};\n" for name, value in CONSTANTS.get(header, {}).items())
    return f"namespace tilebit {{\n{stated}}}  // namespace tilebit\n" if stated else ""


def literal(value: float) -> float:
    """A number as a kernel has it in fp32: a literal of more digits is a warning of nvcc."""
    return float(np.float32(value))
