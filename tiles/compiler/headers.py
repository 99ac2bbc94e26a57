"""The CUDA functions under ``tiles/device``, as programs include and name them, and the numbers
handed to them."""

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
    return "\n".join(_constants(name) + (DEVICE_DIR / name).read_text() for name in headers)


def _constants(header: str) -> str:
    stated = "".join(f"constexpr int {name} = {value};\n" for name, value in CONSTANTS.get(header, {}).items())
    return f"namespace tilebit {{\n{stated}}}  // namespace tilebit\n" if stated else ""


def literal(value: float) -> float:
    """A number as a kernel has it in fp32: a literal of more digits is a warning of nvcc."""
    return float(np.float32(value))
