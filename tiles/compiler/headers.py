"""The CUDA functions under ``tiles/device``, as programs include and name them, and the numbers handed to them."""

import numpy as np

from ..program import DEVICE_DIR

TYPES = {"float16": "half", "bfloat16": "__nv_bfloat16"}


def device_source(headers: tuple[str, ...]) -> str:
    """The CUDA functions of ``headers`` (names of files under ``tiles/device``, or absolute paths), which a kernel includes as text."""
    return "\n".join((DEVICE_DIR / name).read_text() for name in headers)


def literal(value: float) -> float:
    """A number as a kernel has it in fp32: a literal of more digits is a warning of nvcc."""
    return float(np.float32(value))
