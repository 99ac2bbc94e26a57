"""Checkpoints of Any-Precision LLM's tool, written here bit by bit by the format's description, and read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import tilebit
from tilebit.weights.any_checkpoint import load_any_precision
from tilebit.weights.checkpoint_config import CheckpointError

WIDTHS = range(3, 7)


def written(codes: np.ndarray, bits: int) -> np.ndarray:
    """int32 [bits, n, k / 32], weight after weight."""
    n, k = codes.shape
    planes = np.zeros((bits, n, k // 8), dtype=np.uint8)
    for p in range(bits):
        for i in range(n):
            for j in range(k):
                chunk, inside = divmod(j, 1024)
                lanes = min(1024, k - 1024 * chunk) // 32
                b = inside // 8
                address = 128 * chunk + 4 * (b % lanes) + ((b // lanes) ^ 3)
                planes[p, i, address] |= (int(codes[i, j]) >> (bits - 1 - p) & 1) << (7 - inside % 8)
    return planes.view(np.int32)


def layer(k: int, seed: int = 0) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    random = np.random.default_rng(seed)
    codes = random.integers(0, 1 << WIDTHS[-1], (3, k), dtype=np.uint8)
    luts = {f"a.lut{b}": torch.from_numpy(random.standard_normal((3, 1 << b)).astype(np.float16)) for b in WIDTHS}
    return codes, {"a.qweight": torch.from_numpy(written(codes, WIDTHS[-1])), **luts}


@pytest.mark.parametrize("k", [32, 96, 576, 1024, 1024 + 320, 2048])
@pytest.mark.parametrize("pickled", [False, True])
def test_codes_and_codebooks_are_read_exactly(tmp_path, k: int, pickled: bool) -> None:
    codes, tensors = layer(k)
    path = tmp_path / ("model.bin" if pickled else "model.safetensors")
    (torch.save if pickled else save_file)({**tensors, "norm.weight": torch.ones(3)}, path)
    (found,) = load_any_precision(path).items()
    assert found[0] == "a" and np.array_equal(found[1].codes.numpy(), codes)
    assert found[1].widths == WIDTHS and all(torch.equal(found[1].codebooks[b], tensors[f"a.lut{b}"]) for b in WIDTHS)


def test_a_layer_computes_what_the_file_says(tmp_path) -> None:
    codes, tensors = layer(96)
    save_file({**tensors, "a.bias": torch.arange(3.0)}, tmp_path / "model.safetensors")
    weight = tilebit.load_any_precision(tmp_path)["a"]
    made = tilebit.AnyPrecisionLinear.from_quantized(weight, torch.arange(3.0), torch.float16)
    x = torch.eye(96, dtype=torch.float16)[5:9]
    for bits in WIDTHS:
        numbers = tensors[f"a.lut{bits}"].gather(1, torch.from_numpy(codes >> (WIDTHS[-1] - bits)).long())
        assert torch.equal(made(x, bits), (numbers[:, 5:9].T.float() + torch.arange(3.0)).half())
    assert tilebit.AnyPrecisionLinear.from_quantized(weight, dtype=torch.bfloat16, device="cpu").dtype == torch.bfloat16
    with pytest.raises(TypeError, match="q is Tensor"):
        tilebit.AnyPrecisionLinear.from_quantized(weight.codes)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a.qweight": torch.zeros(6, 3, 2)}, r"a: qweight is torch\.float32 \[6, 3, 2\]; accepted: int32"),
        ({"a.lut4": torch.zeros(3, 8).half()}, r"a: codebook of 4 bits is torch\.float16 \[3, 8\]"),
        ({"a.lut4": None}, r"a: codebooks are of \[3, 5, 6\] bits"),
        ({"a.lut6": None}, "a has 6 planes and lut5 as its widest"),
        ({f"a.lut{b}": None for b in WIDTHS}, "a has qweight and no lut3 to lut8"),
        ({"a.qweight": None}, "has no layer with qweight"),
    ],
)
def test_other_contents_are_refused(tmp_path, change: dict[str, torch.Tensor | None], words: str) -> None:
    tensors = {name: t for name, t in {**layer(64)[1], **change}.items() if t is not None}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=words):
        load_any_precision(tmp_path)


def test_a_path_is_a_path() -> None:
    with pytest.raises(TypeError, match="path is int '5'; accepted: the path of a directory or"):
        load_any_precision(5)  # pyright: ignore[reportArgumentType]
