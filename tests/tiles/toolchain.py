"""What a test of the compile pipeline needs on this machine."""

from __future__ import annotations

import pytest

from tilebit.tiles.compiler.cuda import NvccError, find_nvcc


def have_nvcc() -> bool:
    try:
        find_nvcc()
    except NvccError:
        return False
    return True


needs_nvcc = pytest.mark.skipif(
    not have_nvcc(), reason="needs nvcc to compile CUDA ($CUDACXX, $CUDA_HOME, PATH or the nvidia-cuda-nvcc wheel)"
)
