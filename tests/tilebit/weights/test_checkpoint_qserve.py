"""QServe's W4A8 checkpoints: read back as what its kernels compute, whatever codes, scales and zero points a group has."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import tilebit
from tilebit.weights.checkpoint import CheckpointError, load_checkpoint
from tilebit.weights.checkpoint_qserve import two_levels

N, K = 64, 256
LAYER = "model.layers.0.mlp.down_proj"


def packed(codes: np.ndarray) -> torch.Tensor:
    """qweight int8 [n, k / 2], a nibble at a time: tile (n / 32, k / 32), row % 8, k / 4 % 4, k / 16 % 2, row / 8 % 2, k % 4; the high
    nibble is 16 rows further."""
    n, k = codes.shape
    out = np.zeros((n * k // 2,), np.uint8)
    for row, column in itertools.product(range(n), range(k)):
        tile = row // 32 * (k // 32) + column // 32
        at = (((row % 8 * 4 + column // 4 % 4) * 2 + column // 16 % 2) * 2 + row // 8 % 2) * 4 + column % 4
        out[tile * 512 + at] |= codes[row, column] << 4 * (row // 16 % 2)
    return torch.from_numpy(out.view(np.int8)).view(n, k // 2)


def by_channel_order(values: np.ndarray) -> torch.Tensor:
    """int8 [groups, n] of [n, groups]: of 32 channels 0, 8, 16, 24, 1, 9, ..."""
    n = len(values)
    order = [tile + 8 * j + i for tile in range(0, n, 32) for i in range(8) for j in range(4)]
    return torch.from_numpy(np.ascontiguousarray(values[order].T.astype(np.int8)))


def per_channel(seed: int = 0) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(tensors, the weight that QServe's kernel multiplies by, fp64: q * s1 - s1_szeros)."""
    rng = np.random.default_rng(seed)
    codes, zeros = rng.integers(0, 16, (N, K)).astype(np.uint8), rng.integers(0, 16, N)
    zeros[:16] = range(16)
    exact = torch.from_numpy(rng.uniform(1e-6, 0.02, N))  # the smallest are no normal fp16 numbers
    s1, szeros = exact.half(), (exact * torch.from_numpy(zeros)).half()
    weight = torch.from_numpy(codes).double() * s1[:, None].double() - szeros[:, None].double()
    return {"qweight": packed(codes), "s1_scales": s1, "s1_szeros": szeros}, weight


def signed(codes: np.ndarray, s2: np.ndarray, stored: np.ndarray) -> np.ndarray:
    """What QServe's kernel multiplies by: bytes, whose sums wrap, as int8."""
    product = codes.astype(np.int32) * s2[..., None]
    return ((product + stored[..., None]) & 255).astype(np.uint8).view(np.int8)


def by_groups(seed: int = 0) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """As DeepCompressor does it: int8 weights up to 119 in magnitude, then groups of 128 with a scale and a zero point."""
    rng = np.random.default_rng(seed)
    first = rng.integers(-119, 120, (N, K // 128, 128))
    first[::3] = rng.integers(20, 119, first[::3].shape)  # groups without 0 and of few codes
    first[1::7] //= 30
    low, high = np.minimum(first.min(-1), 0), np.maximum(first.max(-1), 0)
    s2 = np.maximum(np.round((high - low) / 15), 1).astype(np.int32)
    zero = np.clip(np.round(-low / s2), 0, 15).astype(np.int32)
    codes = np.clip(np.round(first / s2[..., None]) + zero[..., None], 0, 15).astype(np.uint8)
    q8 = signed(codes, s2, -zero * s2)
    assert np.abs(q8.astype(int) - first).max() <= 16, "the kernel's bytes do not wrap"
    s1 = torch.from_numpy(rng.uniform(1e-4, 0.01, N)).half()
    tensors = {
        "qweight": packed(codes.reshape(N, K)),
        "s1_scales": s1,
        "s2_scales": by_channel_order(s2),
        "s2_zeros": by_channel_order((-zero * s2 & 255).astype(np.uint8).view(np.int8)),
    }
    return tensors, torch.from_numpy(q8.reshape(N, K)).double() * s1[:, None].double()


KINDS = {"w4a8_channel_asym": (per_channel, -1), "w4a8_lqq_g128": (by_groups, 128)}


def write(path: Path, tensors: dict[str, torch.Tensor], file: str, config: dict[str, Any] | None = None) -> Path:
    named = {f"{LAYER}.{part}": value for part, value in tensors.items()} | {"model.norm.weight": torch.ones(8).half()}
    path.mkdir(exist_ok=True)
    if file.endswith(".safetensors"):
        save_file(named, path / file)
    else:
        torch.save(named, path / file, _use_new_zipfile_serialization=not file.endswith(".bin"))  # files of before torch 1.6, too
    data = {"model_type": "llama"} if config is None else {"model_type": "llama", "quantization_config": config}
    (path / "config.json").write_text(json.dumps(data))
    return path


@pytest.mark.parametrize("file", ["quant_model.pt", "pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("name", KINDS)
def test_weights_are_what_the_kernels_compute(name: str, file: str, tmp_path: Path):
    make, _ = KINDS[name]
    tensors, weight = make()
    checkpoint = load_checkpoint(write(tmp_path, {**tensors, "bias": torch.arange(N).half()}, file))
    assert checkpoint.family == "qserve" and checkpoint.layers() == [LAYER]
    q = checkpoint.quantized(LAYER)
    assert q.format.name == name and (q.n, q.k) == (N, K)
    if name == "w4a8_lqq_g128":
        assert torch.equal(q.dequantize(torch.float64), (weight / tensors["s1_scales"][:, None].double()).float().mul(
            tensors["s1_scales"][:, None].float()).double())  # fmt: skip
    else:  # but for the rounding of z * s1, which is not kept
        bound = 2.0**-11 * weight.abs().amax(1, keepdim=True) * 2 + 15 * 2.0**-25
        assert bool(((q.dequantize(torch.float64) - weight).abs() <= bound).all()) and q.zeros is not None
        assert q.zeros[:16, 0].tolist() == list(range(16)) and torch.equal(q.scales[:, 0], tensors["s1_scales"])
    bias = checkpoint.bias(LAYER)
    assert bias is not None and torch.equal(bias, torch.arange(N).half())
    for arch in ("cpu", "sm_90a"):
        assert torch.equal(tilebit.pack(q, torch.float16, arch=arch).unpack().dequantize(), q.dequantize())


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_layer_multiplies(name: str, tmp_path: Path):
    checkpoint = load_checkpoint(write(tmp_path, {**KINDS[name][0]()[0], "bias": torch.arange(N).half()}, "quant_model.pt"))
    layer = tilebit.QuantLinear.from_checkpoint(checkpoint, LAYER, torch.float16)
    x = torch.randn(3, K).half()
    expected = x.double() @ checkpoint.quantized(LAYER).dequantize(torch.float64).T + torch.arange(N)
    assert float((layer(x).double() - expected).norm() / expected.norm()) < 0.02


@pytest.mark.parametrize("method", ["qserve", "qoq"])
@pytest.mark.parametrize("name", KINDS)
def test_the_config_says_the_same(name: str, method: str, tmp_path: Path):
    make, group = KINDS[name]
    path = write(tmp_path, make()[0], "model.safetensors", {"quant_method": method, "wbits": 4, "group_size": group})
    assert load_checkpoint(path).quantized(LAYER).format.name == name


@pytest.mark.parametrize("scales", [range(9), range(9, 18), (18, 20, 37, 64, 127)], ids=["small", "to 17", "beyond"])
def test_every_scale_zero_point_and_range_of_codes(scales: Sequence[int]):
    """Each kept to the byte for all codes that a group has, or refused: where the kernel's bytes wrap among them, or no shift of the codes
    holds all 16. None of those is refused whose scale is up to 16."""
    ranges, stored = [(low, high) for low in range(16) for high in range(low, 16)], np.arange(-128, 128)
    shape = (len(ranges), len(stored))
    codes = np.array([np.clip(np.arange(16), low, high) for low, high in ranges], np.uint8)
    codes = np.ascontiguousarray(np.broadcast_to(codes[:, None], (*shape, 16)))
    low, high = codes.min(-1).astype(int), codes.max(-1).astype(int)
    zeros = np.ascontiguousarray(np.broadcast_to(stored, shape)).astype(np.int32)
    for s2 in scales:
        factors = np.full(shape, s2, np.int32)
        least, most = (end * s2 + zeros + 128 for end in (low, high))
        sound = (high * s2 <= 255) & ((most <= 255) | (least >= 256))
        base = np.where(most > 255, zeros - 128, zeros + 128)
        possible = np.zeros(shape, bool)
        for d in range(-15, 16):
            moved_base = base - d * s2
            possible |= sound & (low + d >= 0) & (high + d <= 15) & (moved_base >= 0) & (moved_base + 15 * s2 <= 255)
        moved, factor, offset, misfit = (t.numpy() for t in two_levels(*map(torch.from_numpy, (codes, factors, zeros))))
        assert np.array_equal(misfit, ~possible) and (s2 > 16 or np.array_equal(possible, sound))
        restored = moved.astype(int) * factor[..., None] + offset[..., None] - 128
        assert np.array_equal(restored[possible], signed(codes, factors, zeros)[possible])
        assert moved[possible].max(initial=0) <= 15 and (factor * 15 + offset.astype(int))[possible].max(initial=0) <= 255


def broken(**changes: Any) -> dict[str, torch.Tensor]:
    """Tensors of both kinds, changed; a function gets the old one, None drops it."""
    tensors = (by_groups if any(part.startswith("s2") for part in changes) else per_channel)()[0]
    for part, change in changes.items():
        if change is None:
            del tensors[part]
        else:
            tensors[part] = change if isinstance(change, torch.Tensor) else change(tensors[part])
    return tensors


BROKEN = {
    "no zero points": ({"s1_szeros": None}, None, r"s2_scales is absent; accepted: int8 \[2, 64\]"),
    "zero points between codes": ({"s1_szeros": lambda t: t * 1.03}, None, "are no zero point of 0 to 15 times the scale"),
    "a zero point beyond": ({"s1_szeros": lambda t: t + 16 * 0.02}, None, "are no zero point of 0 to 15 times"),
    "infinite scales": ({"s1_scales": lambda t: t * float("inf")}, None, "negative, NaN or infinite"),
    "negative scales": ({"s1_scales": lambda t: -t}, None, "negative, NaN or infinite"),
    "scales of another type": ({"s1_scales": lambda t: t.float()}, None, r"s1_scales is float32 \[64\]; accepted: float16 or bfloat16"),
    "scales of other channels": ({"s1_scales": lambda t: t[:32]}, None, r"s1_scales is float16 \[32\]"),
    "half a tile": ({"qweight": lambda t: t[:16]}, None, r"qweight is int8 \[16, 128\]; accepted: int8 \[n, k / 2\], n and k multiples"),
    "words": ({"qweight": lambda t: t.view(torch.int32)}, None, r"qweight is int32"),
    "a zero point of another shape": ({"s2_zeros": lambda t: t[:1]}, None, r"s2_zeros is int8 \[1, 64\]; accepted: int8 \[2, 64\]"),
    "no zero points of groups": ({"s2_zeros": None}, None, r"s2_zeros is absent"),
    "both": ({"s2_scales": lambda t: t, "s1_szeros": torch.zeros(N).half()}, None, "accepted: s1_szeros, or s2_scales and s2_zeros"),
    "scales too large": ({"s2_scales": lambda t: t * 0 + 40}, None, r"whose weights are not int8 or that w4a8_lqq_g128 does not hold"),
    "negative scales of groups": ({"s2_scales": lambda t: -t}, None, "whose weights are not int8"),
    "another group size": ({"s2_scales": lambda t: t}, {"wbits": 4, "group_size": -1}, "as group_size says"),
    "channels labelled groups": ({"s1_szeros": lambda t: t}, {"wbits": 4, "group_size": 128}, "as group_size says"),
    "groups of 64": ({"s2_scales": lambda t: t}, {"wbits": 4, "group_size": 64}, r"group_size is 64; accepted: -1, 128"),
    "8 bits": ({"s1_szeros": lambda t: t}, {"wbits": 8, "group_size": -1}, r"wbits is 8; accepted: 4; .*'int-quantized' W8A8"),
    "no bits": ({"s1_szeros": lambda t: t}, {"group_size": -1}, r"wbits is None; accepted: 4"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_does_not_fit_is_named(case: str, tmp_path: Path):
    changes, config, words = BROKEN[case]
    path = write(tmp_path, broken(**changes), "quant_model.pt", None if config is None else {"quant_method": "qserve", **config})
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(path).quantized(LAYER)


def test_rows_of_zeros_are_kept(tmp_path: Path):
    tensors, _ = per_channel()
    for part in ("s1_scales", "s1_szeros"):
        tensors[part][3] = 0
    q = load_checkpoint(write(tmp_path, tensors, "quant_model.pt")).quantized(LAYER)
    assert not q.dequantize()[3].any() and q.dequantize()[4].any()


class Ran:
    """Pickled, it would create a file where it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_pickles_are_data(tmp_path: Path):
    """Nothing but tensors is read, and no other pickle."""
    tensors, _ = per_channel()
    path, trap = write(tmp_path / "a", tensors, "quant_model.pt"), tmp_path / "trap"
    torch.save({**{f"{LAYER}.{part}": t for part, t in tensors.items()}, "more": Ran(trap)}, path / "quant_model.pt")
    with pytest.raises(CheckpointError, match=r"quant_model\.pt .*no pickle of tensors alone .*weights_only=True"):
        load_checkpoint(path)
    assert not trap.exists()
    whole = write(tmp_path / "b", tensors, "quant_model.pt") / "quant_model.pt"
    data = whole.read_bytes()
    for damaged in (data[: len(data) // 2], data[:10], b"", b"not a pickle"):
        whole.write_bytes(damaged)
        for opened in (whole, whole.parent):
            with pytest.raises(CheckpointError, match="no pickle of tensors alone"):
                load_checkpoint(opened)
    torch.save([torch.zeros(2)], whole)
    with pytest.raises(CheckpointError, match=r"no pickle of tensors alone \(TypeError\)"):
        load_checkpoint(whole)
    torch.save({"step": 3, LAYER: {"qweight": torch.zeros(2)}}, whole)
    with pytest.raises(CheckpointError, match="no quantization config and no quantized layer"):
        load_checkpoint(whole)
    torch.save({}, whole.with_name("optimizer.pt"))
    with pytest.raises(CheckpointError, match=r"no \.safetensors file, but 2 pickles \(optimizer\.pt, \.\.\.\); accepted: .*one pickled"):
        load_checkpoint(whole.parent)
