"""What a test of the compile pipeline needs on this machine."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tilebit.tiles.compiler.cuda import NvccError, find_nvcc
from tilebit.tiles.compiler.lint import NVDISASM, disassemble

WITHOUT = "needs nvdisasm to read machine code (pip install nvidia-cuda-nvdisasm)"


def have_nvcc() -> bool:
    try:
        find_nvcc()
    except NvccError:
        return False
    return True


needs_nvcc = pytest.mark.skipif(
    not have_nvcc(), reason="needs nvcc to compile CUDA ($CUDACXX, $CUDA_HOME, PATH or the nvidia-cuda-nvcc wheel)"
)


def machine_code(cubin: Path) -> str:
    """What ``cubin`` holds, by nvcc's toolkit or, where it has no nvdisasm, by the wheel of one."""
    for folder in _toolkits():
        listing = disassemble(cubin, folder)
        if listing is not None:
            return listing
    pytest.skip(WITHOUT)


def encoded_machine_code(cubin: Path) -> str:
    """The same with the encoding of each instruction beside it, as ``arrivals`` reads it."""
    for folder in _toolkits():
        if tool := shutil.which("nvdisasm") or shutil.which("nvdisasm", path=str(folder)):
            return subprocess.run([tool, *NVDISASM, "-hex", str(cubin)], capture_output=True, text=True, check=True).stdout
    pytest.skip(WITHOUT)


def _toolkits() -> list[Path]:
    wheels = Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/bin/nvdisasm")
    return [Path(find_nvcc()).resolve().parent, *(tool.parent for tool in wheels)]
