"""Files of tensors, opened: safetensors, and pickled state_dicts as torch saves them. Tensors stay in
the file until they are asked for."""

from __future__ import annotations

import zipfile
from pathlib import Path
from pickle import UnpicklingError
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

PICKLES = (".pt", ".pth", ".bin")
# What a file that is torn, of another kind, or more than tensors raises: torch says it in many ways.
UNREADABLE = (SafetensorError, UnpicklingError, OSError, EOFError, RuntimeError, ValueError, TypeError, LookupError, AttributeError)
_DTYPES = {
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.float8_e4m3fn: "F8_E4M3",
}  # in safetensors' words, which others keep in torch's


class TensorFile(Protocol):
    """An open file. Every method raises one of ``UNREADABLE``."""

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> list[int]: ...

    def dtype(self, name: str) -> str:
        """In safetensors' words ("U8", "I32")."""
        ...

    def tensor(self, name: str) -> Tensor: ...


def open_tensors(file: Path) -> TensorFile:
    """``file`` by its suffix. Raises one of ``UNREADABLE`` for a file that cannot be read."""
    return _Pickled(file) if file.suffix in PICKLES else _Safetensors(file)


class _Safetensors:
    def __init__(self, file: Path) -> None:
        self._file = safe_open(file, framework="pt")

    def names(self) -> list[str]:
        return list(self._file.keys())

    def shape(self, name: str) -> list[int]:
        return list(self._file.get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        return self._file.get_slice(name).get_dtype()

    def tensor(self, name: str) -> Tensor:
        return self._file.get_tensor(name)


class _Pickled:
    """``weights_only``: a pickle is a program, and no other than that of tensors is run."""

    def __init__(self, file: Path) -> None:
        held = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
        if not isinstance(held, dict):
            raise TypeError(f"a {type(held).__name__} is pickled")
        self._held = {name: value for name, value in held.items() if isinstance(name, str) and isinstance(value, Tensor)}

    def names(self) -> list[str]:
        return list(self._held)

    def shape(self, name: str) -> list[int]:
        return list(self._held[name].shape)

    def dtype(self, name: str) -> str:
        dtype = self._held[name].dtype
        return _DTYPES.get(dtype, str(dtype))

    def tensor(self, name: str) -> Tensor:
        return self._held[name].detach()
