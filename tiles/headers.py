"""The CUDA functions under ``tiles/device``, as programs include and name them."""

from .program import DEVICE_DIR

TYPES = {"float16": "half", "bfloat16": "__nv_bfloat16"}


def device_source(headers: tuple[str, ...]) -> str:
    """The CUDA functions of ``headers`` (names of files under ``tiles/device``), which a kernel includes as text."""
    return "\n".join((DEVICE_DIR / name).read_text() for name in headers)
