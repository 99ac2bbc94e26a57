"""Checkpoints that Any-Precision LLM's own tool writes, read as they are.

Of each layer: ``qweight`` int32 [max_bits, n, k / 32], plane 0 the highest bit, and ``lut3`` to
``lut8`` (those of its widths) fp16 [n, 2^b]. In a plane, weight 8 b + i of a row is bit 7 - i of
byte b; of 1024 weights byte b lies in word b % 32, there in byte (b / 32) xor 3 from the lowest on,
so that a lane's word holds bytes of four runs. A shorter last chunk has as many words as it fills.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from ..accepted import expect
from .checkpoint_config import CheckpointError
from .checkpoint_files import tensor_files
from .checkpoint_open import UNREADABLE, open_tensors
from .quantize_any import AnyPrecisionTensor

CHUNK_WORDS = 32
_LUT = re.compile(r"lut([2-8])")


def load_any_precision(path: str | Path) -> dict[str, AnyPrecisionTensor]:
    """Every any-precision layer of a directory, .safetensors file or pickled state_dict (of which
    only tensors are read), by name. Raises ``CheckpointError`` for files that cannot be read, that
    have no such layer, or whose tensors are of other shapes or dtypes, and ``TypeError`` for what
    is no path."""
    expect("path", path, str | Path, "the path of a directory or of a .safetensors file")
    files = tensor_files(Path(path))
    suffix = ".qweight"
    layers = [name.removesuffix(suffix) for name in files if name.endswith(suffix)]
    found = {}
    for layer in layers:
        luts = {name: int(bits[1]) for name in files if (bits := _LUT.fullmatch(name.removeprefix(layer + ".")))}
        if not luts:
            raise CheckpointError(
                f"{layer} has qweight and no lut3 to lut8; accepted: layers of Any-Precision LLM; load_checkpoint reads other tools' files"
            )
        try:
            read = {name: open_tensors(files[name]).tensor(name) for name in (layer + suffix, *luts)}
        except UNREADABLE as error:
            raise CheckpointError(f"{layer} cannot be read ({error}); accepted: whole files: copy them again") from None
        qweight, widest = read.pop(layer + suffix), max(luts.values())
        if qweight.ndim == 3 and len(qweight) != widest:
            raise CheckpointError(f"{layer} has {len(qweight)} planes and lut{widest} as its widest; accepted: as many planes as bits")
        try:
            found[layer] = AnyPrecisionTensor(stored_codes(qweight), {luts[name]: lut for name, lut in read.items()})
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{layer}: {error}") from None
    if not found:
        raise CheckpointError(f"{path} has no layer with qweight and lut3 to lut8; accepted: what Any-Precision LLM's tool writes")
    return found


def stored_codes(qweight: Tensor) -> Tensor:
    """``qweight`` int32 [max_bits, n, k / 32] -> codes uint8 [n, k]. Raises ``ValueError`` for another
    dtype or shape."""
    if qweight.dtype != torch.int32 or qweight.ndim != 3 or not qweight.numel() or len(qweight) > 8:
        raise ValueError(f"qweight is {qweight.dtype} {list(qweight.shape)}; accepted: int32 [bits up to 8, n, k / 32], not empty")
    words = qweight.shape[2]
    places = _places(words).to(qweight.device)
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=qweight.device)
    codes = torch.zeros(qweight.shape[1], 32 * words, dtype=torch.uint8, device=qweight.device)
    for plane in qweight:
        stored = plane.contiguous().view(torch.uint8).index_select(1, places)
        codes = codes << 1 | (stored[..., None] >> shifts & 1).flatten(1)
    return codes


def _places(words: int) -> Tensor:
    """int64 [4 words]: where each byte of a row of a plane lies."""
    found = []
    for first in range(0, words, CHUNK_WORDS):
        lanes = min(CHUNK_WORDS, words - first)
        byte = torch.arange(4 * lanes)
        found.append(4 * (first + byte % lanes) + (byte // lanes ^ 3))
    return torch.cat(found)
