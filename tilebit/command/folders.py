"""Directories of models, written whole or not at all."""

from __future__ import annotations

import glob
import shutil
import uuid
from pathlib import Path
from typing import Any

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def weight_bytes(folder: Path) -> int:
    """Bytes of the files that hold the weights of ``folder``."""
    from ..weights.checkpoint_files import tensor_files

    return sum(file.stat().st_size for file in set(tensor_files(folder).values()))


def unfinished(out: Path) -> list[Path]:
    """What runs have left that were killed while they wrote ``out``, or what one is writing now."""
    return sorted(out.parent.glob(f".{glob.escape(out.name)}.{'[0-9a-f]' * 12}.part"))


def save_model(model: Any, source: Path, out: Path) -> None:
    """Write ``model`` to the new directory ``out``, with what lies beside the weights in
    ``source``: tokenizer, chat template, generation config. ``out`` appears when all of it is
    written: until then it is a directory beside it of a name that nothing had, which a process that
    is killed leaves behind."""
    written = out.with_name(f".{out.name}.{uuid.uuid4().hex[:12]}.part")
    written.mkdir()
    try:
        model.save_pretrained(written)
        for file in sorted(source.iterdir()):
            weights = file.suffix in _WEIGHTS or file.name.endswith(".index.json")
            if file.is_file() and not weights and not file.name.startswith(".") and not (written / file.name).exists():
                shutil.copyfile(file, written / file.name)
        if out.exists() or out.is_symlink():
            raise ValueError(f"{out} has come into being meanwhile; accepted: a directory that does not exist yet: name another")
        written.rename(out)
    except BaseException:
        shutil.rmtree(written, ignore_errors=True)
        raise
