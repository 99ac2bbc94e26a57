"""Checkpoints of every family, read back exactly; and what a broken one says."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tilebit.weights.checkpoint import Checkpoint, CheckpointError, load_checkpoint
from tilebit.weights.packed import pack
from tilebit.weights.synthetic import write_checkpoint

LAYERS = {"model.layers.2.mlp.up_proj": (24, 256), "model.layers.10.mlp.down_proj": (16, 128)}
LAYER = "model.layers.2.mlp.up_proj"
MATRIX = [
    (family, bits, group, symmetric, desc_act)
    for family, bits, group, symmetric, desc_act in itertools.product(
        ("awq", "gptq", "gptq_v2", "compressed-tensors"), (4, 8), (32, 64, 128, -1), (True, False), (False, True)
    )
    if not (family == "awq" and (bits == 8 or desc_act))
]


def _code(family: str, raw: dict[str, torch.Tensor], name: str, bits: int, i: int, j: int) -> int:
    """Code (i, j), read with integer arithmetic from the stored words."""
    per_word, mask = 32 // bits, (1 << bits) - 1
    if family == "awq":
        word, slot = int(raw[f"{name}.qweight"][j, i // 8]), (0, 4, 1, 5, 2, 6, 3, 7)[i % 8]
    elif family == "compressed-tensors":
        word, slot = int(raw[f"{name}.weight_packed"][i, j // per_word]), j % per_word
    else:
        word, slot = int(raw[f"{name}.qweight"][j // per_word, i]), j % per_word
    return word >> slot * bits & mask


@pytest.mark.parametrize("family,bits,group,symmetric,desc_act", MATRIX)
def test_codes_scales_and_zeros_are_exact(family: str, bits: int, group: int, symmetric: bool, desc_act: bool, tmp_path: Path) -> None:
    reference = write_checkpoint(
        tmp_path, family, LAYERS, bits, group, symmetric, desc_act, shards=1 + desc_act, seed=bits + group, bias=True
    )
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.layers() == list(LAYERS)
    assert checkpoint.family == family.removesuffix("_v2")
    raw = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    rng = np.random.default_rng(0)
    for name, (n, k) in LAYERS.items():
        q = checkpoint.quantized(name)
        assert (q.n, q.k) == (n, k) and (q.format.bits, q.format.group_size, q.format.symmetric) == (bits, group, symmetric)
        assert torch.equal(q.dequantize(), reference[name])
        stored = raw[f"{name}.weight_scale"] if family == "compressed-tensors" else raw[f"{name}.scales"].t()
        assert torch.equal(q.scales, stored)
        perm = range(k) if q.perm is None else q.perm.tolist()
        for i, j in zip(rng.integers(0, n, 50).tolist(), rng.integers(0, k, 50).tolist(), strict=True):
            assert int(q.codes[i, j]) == _code(family, raw, name, bits, i, perm[j])
        assert (q.perm is not None) == (desc_act and group != -1 and k > group)
        assert (q.zeros is None) == symmetric
        if q.zeros is not None:  # the writer makes one channel one-sided each way: both ends of the range, and v1's wrap, occur
            assert int(q.zeros.min()) == 0 and int(q.zeros.max()) == (1 << bits) - 1
        bias = checkpoint.bias(name)
        assert bias is not None and bias.shape == (n,) and torch.equal(bias, raw[f"{name}.bias"])
        assert torch.equal(pack(q, torch.float16).unpack().dequantize(), reference[name])


@pytest.mark.parametrize("bits,group,symmetric", [(4, 128, True), (4, 32, False), (8, 64, True), (8, -1, False), (4, -1, True)])
def test_compressed_tensors_decompresses_to_the_same(bits: int, group: int, symmetric: bool, tmp_path: Path) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors.pack_quantized")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    write_checkpoint(tmp_path, "compressed-tensors", LAYERS, bits, group, symmetric, seed=5)
    config = quantization.QuantizationConfig.model_validate(json.loads((tmp_path / "config.json").read_text())["quantization_config"])
    (scheme,) = config.config_groups.values()
    raw = load_file(tmp_path / "model.safetensors")
    checkpoint = load_checkpoint(tmp_path)
    for name in LAYERS:
        state: dict[str, Any] = {key.removeprefix(f"{name}."): value for key, value in raw.items() if key.startswith(f"{name}.")}
        state["weight_shape"] = torch.Size(state["weight_shape"].tolist())  # the library indexes it as a shape
        weight = compressors.PackedQuantizationCompressor.decompress(state, scheme)["weight"]
        assert torch.equal(checkpoint.quantized(name).dequantize(weight.dtype), weight)


@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_tensors_written_by_its_library(bits: int, tmp_path: Path) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors.pack_quantized")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    n, k, middle = 20, 192, 1 << (bits - 1)
    args = quantization.QuantizationArgs(num_bits=bits, symmetric=False, group_size=64, strategy="group")
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    generator = torch.Generator().manual_seed(3)
    scale = torch.rand(n, 3, generator=generator) * 0.01 + 0.001
    zero = torch.randint(-middle, middle, (n, 3), dtype=torch.int8, generator=generator)
    weight = torch.randn(n, k, generator=generator) * 0.02
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    tensors = compressors.PackedQuantizationCompressor.compress(state, scheme)
    save_file({f"proj.{key}": value for key, value in tensors.items()}, tmp_path / "model.safetensors")
    config = quantization.QuantizationConfig(config_groups={"group_0": scheme}, format="pack-quantized", quantization_status="compressed")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config.model_dump(mode="json")}))
    q = load_checkpoint(tmp_path).quantized("proj")
    index = torch.arange(k) // 64
    codes = (weight / scale[:, index] + zero[:, index]).round().clamp(-middle, middle - 1) + middle
    assert torch.equal(q.codes, codes.to(torch.uint8))
    assert q.zeros is not None and torch.equal(q.zeros.int(), zero.int() + middle)


def test_compressed_tensors_ragged(tmp_path: Path) -> None:
    reference = write_checkpoint(tmp_path, "compressed-tensors", {"a": (13, 70), "b": (1, 3)}, 4, -1, False)
    checkpoint = load_checkpoint(tmp_path)
    for name, weight in reference.items():
        assert torch.equal(checkpoint.quantized(name).dequantize(), weight)


def test_compressed_tensors_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = write_checkpoint(tmp_path, "compressed-tensors", LAYERS, 4, 64, False, desc_act=True)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "compressed_tensors" else found(name))
    assert torch.equal(load_checkpoint(tmp_path).quantized(LAYER).dequantize(), reference[LAYER])
    _quantization(tmp_path, config_groups={"W4A16": ["Linear"]})
    with pytest.raises(CheckpointError, match="pip install compressed-tensors"):
        load_checkpoint(tmp_path)


def test_compressed_tensors_presets_targets_and_older_zero_points(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    reference = write_checkpoint(tmp_path, "compressed-tensors", LAYERS, 4, 128, True)
    _quantization(tmp_path, config_groups={"W4A16": ["Linear"]})
    assert torch.equal(load_checkpoint(tmp_path).quantized(LAYER).dequantize(), reference[LAYER])
    other = {"num_bits": 8, "strategy": "channel", "type": "int"}
    named = {"num_bits": 4, "group_size": 128, "strategy": "group", "type": "int"}
    groups = {"a": {"targets": ["Linear"], "weights": other}, "b": {"targets": ["re:.*up_proj"], "weights": named}}
    _quantization(tmp_path, config_groups=groups | {"c": {"targets": ["model.layers.10.mlp.down_proj"], "weights": named}})
    for name in LAYERS:
        assert torch.equal(load_checkpoint(tmp_path).quantized(name).dequantize(), reference[name])
    # Unpacked int8 zero points and an unused g_idx of -1, as early releases wrote them.
    reference = write_checkpoint(tmp_path, "compressed-tensors", LAYERS, 4, 128, False)
    zeros = load_checkpoint(tmp_path).quantized(LAYER).zeros
    assert zeros is not None
    _edit(tmp_path, weight_zero_point=(zeros.to(torch.int16) - 8).to(torch.int8), weight_g_idx=torch.full((256,), -1, dtype=torch.int32))
    assert torch.equal(load_checkpoint(tmp_path).quantized(LAYER).dequantize(), reference[LAYER])


@pytest.mark.parametrize("family,symmetric", list(itertools.product(("awq", "gptq", "gptq_v2", "compressed-tensors"), (True, False))))
def test_one_file_without_a_config(family: str, symmetric: bool, tmp_path: Path) -> None:
    reference = write_checkpoint(tmp_path / "model", family, LAYERS, 4, 64, symmetric, desc_act=family == "gptq")
    file = tmp_path / "weights.safetensors"
    (tmp_path / "model" / "model.safetensors").rename(file)
    override = family if family.startswith("gptq") else None
    checkpoint = load_checkpoint(file, checkpoint_format=override)
    assert checkpoint.family == family.removesuffix("_v2") and checkpoint.layers() == list(LAYERS)
    for name, weight in reference.items():
        q = checkpoint.quantized(name)
        assert torch.equal(q.dequantize(), weight)
        assert (q.format.bits, q.format.symmetric) == (4, symmetric)
    if override:
        with pytest.raises(CheckpointError, match="pass checkpoint_format="):
            load_checkpoint(file).quantized(LAYER)
    elif family == "awq":
        config = {"w_bit": 4, "q_group_size": 64, "zero_point": not symmetric, "version": "GEMM"}
        assert torch.equal(load_checkpoint(file, config=config).quantized(LAYER).dequantize(), reference[LAYER])


def test_older_config_files_and_file_names(tmp_path: Path) -> None:
    reference = write_checkpoint(tmp_path, "gptq", LAYERS, 8, 32, False, desc_act=True)
    (tmp_path / "config.json").unlink()
    (tmp_path / "model.safetensors").rename(tmp_path / "gptq_model-8bit-32g.safetensors")
    old = json.loads((tmp_path / "quantize_config.json").read_text())
    for key in ("quant_method", "checkpoint_format", "pack_dtype"):
        del old[key]
    (tmp_path / "quantize_config.json").write_text(json.dumps(old))
    assert torch.equal(load_checkpoint(tmp_path).quantized(LAYER).dequantize(), reference[LAYER])
    assert torch.equal(load_checkpoint(tmp_path / "gptq_model-8bit-32g.safetensors").quantized(LAYER).dequantize(), reference[LAYER])


def test_gptq_dynamic_and_missing_g_idx(tmp_path: Path) -> None:
    reference = write_checkpoint(tmp_path, "gptq", LAYERS, 4, 64, True)
    dynamic = {"-:.*lm_head": {}, r"+:.*\.down_proj": {"group_size": 64}, r".*\.up_proj": {"group_size": 64, "mse": 0.1}}
    _quantization(tmp_path, group_size=32, dynamic=dynamic)
    _edit(tmp_path, g_idx=None)
    for name, weight in reference.items():
        assert torch.equal(load_checkpoint(tmp_path).quantized(name).dequantize(), weight)


def test_override_of_the_zero_point_convention(tmp_path: Path) -> None:
    reference = write_checkpoint(tmp_path, "gptq_v2", LAYERS, 4, 64, False)
    _quantization(tmp_path, checkpoint_format="gptq")
    assert not torch.equal(load_checkpoint(tmp_path).quantized(LAYER).dequantize(), reference[LAYER])
    assert torch.equal(load_checkpoint(tmp_path, checkpoint_format="gptq_v2").quantized(LAYER).dequantize(), reference[LAYER])


def test_the_rest_of_a_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "awq", LAYERS, shards=2, dtype=torch.float16)
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.tensor("lm_head.weight").shape == (8, 256)
    assert checkpoint.bias(LAYER) is None
    assert "family='awq', layers=2" in repr(checkpoint)
    with pytest.raises(CheckpointError, match="not a quantized layer"):
        checkpoint.quantized("lm_head")
    with pytest.raises(CheckpointError, match="no tensor 'nothing'"):
        checkpoint.tensor("nothing")


def test_writers_refuse_what_the_tools_would_not_write(tmp_path: Path) -> None:
    for words, arguments in {
        "unknown family": ("int4", {"a": (8, 64)}),
        "no 8-bit": ("awq", {"a": (8, 64)}, 8),
        "no 4-bit act-order": ("awq", {"a": (8, 64)}, 4, 32, True, True),
        "multiple of the group size": ("gptq", {"a": (8, 100)}),
        "not a multiple of 8": ("gptq", {"a": (9, 128)}),
        "one layer a shard": ("gptq", {"a": (8, 128)}, 4, 128, True, False, 2),
    }.items():
        with pytest.raises(ValueError, match=words):
            write_checkpoint(tmp_path, *arguments)  # type: ignore[arg-type]


# ---- broken checkpoints --------------------------------------------------------------------------------------------------------------


def _quantization(path: Path, **changes: Any) -> None:
    """Change fields of the quantization config; ... removes one."""
    config = json.loads((path / "config.json").read_text())
    fields = config["quantization_config"] | changes
    config["quantization_config"] = {key: value for key, value in fields.items() if value is not ...}
    (path / "config.json").write_text(json.dumps(config))


def _weights(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())["quantization_config"]["config_groups"]
    config["group_0"]["weights"] |= changes
    _quantization(path, config_groups=config)


def _edit(path: Path, layer: str = LAYER, **changes: torch.Tensor | None) -> None:
    """Replace tensors of a layer (of every layer for None: removed)."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    for part, value in changes.items():
        if value is None:
            tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(f".{part}")}
        else:
            tensors[f"{layer}.{part}"] = value.contiguous()
    save_file(tensors, file)


def _stored(path: Path, part: str) -> torch.Tensor:
    return load_file(path / "model.safetensors")[f"{LAYER}.{part}"]


def _truncate(path: Path, keep: float) -> None:
    file = path / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])


def _index(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))


def _swap_scheme(path: Path, **scheme: Any) -> None:
    config = json.loads((path / "config.json").read_text())["quantization_config"]["config_groups"]
    config["group_0"] |= scheme
    _quantization(path, config_groups=config)


_ACTIVATIONS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}

Written = tuple[str, int, bool, bool, int]  # family, bits, symmetric, desc_act, shards; group_size is 64
AWQ: Written = ("awq", 4, True, False, 1)
AWQ_ASYM: Written = ("awq", 4, False, False, 1)
GPTQ: Written = ("gptq", 4, True, False, 1)
GPTQ_ASYM: Written = ("gptq", 4, False, False, 1)
GPTQ_ACT: Written = ("gptq", 4, True, True, 1)
GPTQ_8: Written = ("gptq", 8, False, False, 1)
GPTQ_8_SYM: Written = ("gptq", 8, True, False, 1)
GPTQ_V2: Written = ("gptq_v2", 4, True, False, 1)
SHARDED: Written = ("gptq", 4, True, False, 2)
CT: Written = ("compressed-tensors", 4, True, False, 1)
CT_ASYM: Written = ("compressed-tensors", 4, False, False, 1)
CT_ACT: Written = ("compressed-tensors", 4, True, True, 1)
CT_8: Written = ("compressed-tensors", 8, True, False, 1)

# name: (as written, what breaks it, words of the error)
BROKEN: dict[str, tuple[Written, Callable[[Path], object], str]] = {
    "truncated in the data": (GPTQ, lambda p: _truncate(p, 0.9), "not a whole safetensors file"),
    "truncated in the header": (AWQ, lambda p: _truncate(p, 0.01), "not a whole safetensors file"),
    "an empty file": (AWQ, lambda p: _truncate(p, 0), r"\(0 bytes\) is not a whole"),
    "text in place of tensors": (AWQ, lambda p: (p / "model.safetensors").write_text("version https://git-lfs"), "not a whole"),
    "a truncated shard": (SHARDED, lambda p: (p / "model-00002-of-00002.safetensors").write_bytes(b"12345678"), "model-00002"),
    "a missing shard": (SHARDED, lambda p: (p / "model-00002-of-00002.safetensors").unlink(), "copy the missing shard"),
    "a torn index": (SHARDED, lambda p: (p / "model.safetensors.index.json").write_text('{"weight_map": {'), "cannot read"),
    "an index without map": (SHARDED, lambda p: _index(p, lambda i: i.pop("weight_map")), "no weight_map"),
    "an index of another revision": (
        SHARDED,
        lambda p: _index(p, lambda i: i["weight_map"].update({"x.qweight": "model-00001-of-00002.safetensors"})),
        "does not hold it",
    ),
    "an index that leaves the directory": (
        SHARDED,
        lambda p: _index(p, lambda i: i["weight_map"].update({"x": "../x.safetensors"})),
        "in the same directory",
    ),
    "shards without index": (SHARDED, lambda p: (p / "model.safetensors.index.json").unlink(), "copy the index too"),
    "no weights": (AWQ, lambda p: (p / "model.safetensors").unlink(), "no .safetensors file"),
    "pickled weights": (AWQ, lambda p: (p / "model.safetensors").rename(p / "pytorch_model.bin"), "no pickle of tensors alone"),
    "torn config": (AWQ, lambda p: (p / "config.json").write_text('{"quant'), "cannot read"),
    "config that is a list": (AWQ, lambda p: (p / "config.json").write_text("[]"), "accepted: a JSON object"),
    "quantization config that is a string": (
        AWQ,
        lambda p: (p / "config.json").write_text('{"quantization_config": "awq"}'),
        "accepted: an object",
    ),
    "unknown method": (AWQ, lambda p: _quantization(p, quant_method="bitsandbytes"), "quant_method is 'bitsandbytes'"),
    "AWQ gemv": (AWQ, lambda p: _quantization(p, version="gemv"), "AWQ version is 'gemv'; accepted: 'gemm'"),
    "AWQ gemv_fast": (AWQ, lambda p: _quantization(p, version="GEMV_FAST"), "'gemv_fast'"),
    "AWQ marlin": (AWQ, lambda p: _quantization(p, version="marlin"), "AWQ version is 'marlin'"),
    "AWQ 8 bits": (AWQ, lambda p: _quantization(p, bits=8), "AWQ bits is 8; accepted: 4"),
    "AWQ wrong group": (AWQ, lambda p: _quantization(p, group_size=128), "the shapes fit group_size 64"),
    "AWQ odd group": (AWQ, lambda p: _quantization(p, group_size=48), "group_size is 48"),
    "AWQ no group": (AWQ, lambda p: _quantization(p, group_size=...), "group_size is None"),
    "AWQ labelled symmetric": (AWQ_ASYM, lambda p: _quantization(p, zero_point=False), "zero points out of range"),
    "AWQ zero_point not a bool": (AWQ_ASYM, lambda p: _quantization(p, zero_point="yes"), "zero_point is 'yes'"),
    "AWQ labelled GPTQ": (AWQ_ASYM, lambda p: _quantization(p, quant_method="gptq"), "4-bit gptq weight"),
    "GPTQ labelled AWQ": (GPTQ_ASYM, lambda p: _quantization(p, quant_method="awq"), "4-bit awq weight"),
    "GPTQ labelled compressed-tensors": (
        GPTQ,
        lambda p: _quantization(p, quant_method="compressed-tensors", format="pack-quantized", config_groups={"W4A16": ["Linear"]}),
        r"no tensor named \*.weight_packed",
    ),
    "GPTQ 3 bits": (GPTQ, lambda p: _quantization(p, bits=3), "bits is 3; accepted: 4, 8"),
    "GPTQ bits as text": (GPTQ, lambda p: _quantization(p, bits="4"), "bits is '4'"),
    "GPTQ 4 bits labelled 8": (GPTQ_ASYM, lambda p: _quantization(p, bits=8), "bits"),
    "GPTQ 8 bits labelled 4": (GPTQ_8, lambda p: _quantization(p, bits=4), "bits"),
    "GPTQ 4 bits labelled 8, no g_idx": (
        GPTQ_ASYM,
        lambda p: (_quantization(p, bits=8, group_size=32), _edit(p, g_idx=None)),
        "packed zero points are",
    ),
    "GPTQ wrong group": (GPTQ_ASYM, lambda p: _quantization(p, group_size=32), "scales hold 4 groups; group_size 32"),
    "GPTQ marlin": (GPTQ, lambda p: _quantization(p, checkpoint_format="marlin"), "checkpoint_format is 'marlin'"),
    "GPTQ marlin flag": (GPTQ, lambda p: _quantization(p, is_marlin_format=True), "checkpoint_format is 'marlin'"),
    "GPTQ bitblas": (GPTQ, lambda p: _quantization(p, checkpoint_format="bitblas"), "'bitblas'"),
    "GPTQ int64 words": (GPTQ, lambda p: _quantization(p, pack_dtype="int64"), "pack_dtype is 'int64'"),
    "GPTQ v2 labelled v1": (GPTQ_V2, lambda p: _quantization(p, checkpoint_format="gptq"), "pass checkpoint_format='gptq_v2'"),
    "GPTQ v1 labelled v2": (GPTQ_8_SYM, lambda p: _quantization(p, checkpoint_format="gptq_v2"), "pass checkpoint_format='gptq'"),
    "GPTQ labelled symmetric": (GPTQ_ASYM, lambda p: _quantization(p, sym=True), "zero points out of range"),
    "GPTQ sym not a bool": (GPTQ, lambda p: _quantization(p, sym=None), "sym is None"),
    "GPTQ act-order not declared": (GPTQ_ACT, lambda p: _quantization(p, desc_act=False), "config says no act-order"),
    "GPTQ act-order without g_idx": (GPTQ_ACT, lambda p: _edit(p, g_idx=None), "there is no g_idx"),
    "GPTQ g_idx of zeros": (
        GPTQ_ACT,
        lambda p: _edit(p, g_idx=torch.zeros(256, dtype=torch.int32)),
        "does not give each group 64 columns",
    ),
    "GPTQ g_idx out of range": (GPTQ_ACT, lambda p: _edit(p, g_idx=_stored(p, "g_idx") + 1), "g_idx reaches from 1 to 4"),
    "GPTQ g_idx negative": (GPTQ_ACT, lambda p: _edit(p, g_idx=_stored(p, "g_idx") - 1), "g_idx reaches from -1"),
    "GPTQ g_idx too short": (GPTQ_ACT, lambda p: _edit(p, g_idx=_stored(p, "g_idx")[:-1]), r"g_idx is int32 \[255\]"),
    "GPTQ g_idx of floats": (GPTQ_ACT, lambda p: _edit(p, g_idx=_stored(p, "g_idx").float()), "g_idx is float32"),
    "no scales": (GPTQ, lambda p: _edit(p, scales=None), "but not model.layers.2.mlp.up_proj.scales"),
    "no zero points": (AWQ_ASYM, lambda p: _edit(p, qzeros=None), "qzeros"),
    "float weight": (GPTQ, lambda p: _edit(p, qweight=_stored(p, "qweight").float()), "packed weight is float32"),
    "int8 zero points": (GPTQ_ASYM, lambda p: _edit(p, qzeros=_stored(p, "qzeros").to(torch.int8)), "zero points are int8"),
    "integer scales": (GPTQ, lambda p: _edit(p, scales=_stored(p, "scales").to(torch.int16)), "scales are int16"),
    "scales of one dimension": (GPTQ, lambda p: _edit(p, scales=_stored(p, "scales").flatten()), "scales are float16"),
    "scales without channels": (GPTQ, lambda p: _edit(p, scales=torch.zeros(4, 0).half()), r"up_proj: scales are .* \[4, 0\]; .*not empty"),
    "an empty weight": (GPTQ, lambda p: _edit(p, qweight=_stored(p, "qweight")[:0]), r"up_proj: the packed weight is int32 \[0, 24\]"),
    "scales with NaN": (GPTQ, lambda p: _edit(p, scales=_stored(p, "scales") * float("nan")), "NaN or infinite"),
    "weight of another layer": (GPTQ, lambda p: _edit(p, qweight=_stored(p, "qweight")[:, :16]), "copy the checkpoint again"),
    "zero points of another layer": (AWQ_ASYM, lambda p: _edit(p, qzeros=_stored(p, "qzeros")[:2]), r"packed zero points are \[2, 3\]"),
    "compressed-tensors int-quantized": (
        CT,
        lambda p: _quantization(p, format="int-quantized"),
        "num_bits of weights is 4; accepted: 8",
    ),
    "compressed-tensors not compressed": (
        CT,
        lambda p: _quantization(p, quantization_status="frozen"),
        "quantization_status is 'frozen'",
    ),
    "compressed-tensors sparse": (
        CT,
        lambda p: _quantization(p, sparsity_config={"format": "sparse-24-bitmask"}),
        "sparse-24-bitmask",
    ),
    "compressed-tensors no groups": (CT, lambda p: _quantization(p, config_groups={}), "no config_groups"),
    "compressed-tensors unknown preset": (
        CT,
        lambda p: _quantization(p, config_groups={"W4A17": ["Linear"]}),
        "compressed-tensors library",
    ),
    "compressed-tensors bad strategy": (CT, lambda p: _weights(p, strategy="row"), "library refuses"),
    "compressed-tensors tensor strategy": (
        CT,
        lambda p: _weights(p, strategy="tensor", group_size=None),
        "strategy is 'tensor'",
    ),
    "compressed-tensors float": (CT_8, lambda p: _weights(p, type="float"), "type is 'float'"),
    "compressed-tensors 6 bits": (CT, lambda p: _weights(p, num_bits=6), "bits is 6"),
    "compressed-tensors 4 labelled 8": (CT, lambda p: _weights(p, num_bits=8), "8-bit compressed-tensors weight"),
    "compressed-tensors wrong group": (CT, lambda p: _weights(p, group_size=128), "fit group_size 64"),
    "compressed-tensors group 16": (CT, lambda p: _weights(p, group_size=16), "group_size is 16"),
    "compressed-tensors labelled symmetric": (CT_ASYM, lambda p: _weights(p, symmetric=True), "out of range"),
    "compressed-tensors labelled asymmetric": (
        CT,
        lambda p: _weights(p, symmetric=False),
        "there are no zero points",
    ),
    "compressed-tensors activations": (
        CT,
        lambda p: _swap_scheme(p, input_activations=_ACTIVATIONS),
        "quantizes its activations",
    ),
    "compressed-tensors targets": (CT, lambda p: _swap_scheme(p, targets=["re:.*attn.*"]), "no config group"),
    "compressed-tensors zero points out of range": (
        CT_ASYM,
        lambda p: _edit(p, weight_zero_point=torch.full((24, 4), 8, dtype=torch.int8)),
        "from -8 to 7",
    ),
    "compressed-tensors no shape": (CT, lambda p: _edit(p, weight_shape=None), "weight_shape"),
    "compressed-tensors negative shape": (
        CT,
        lambda p: _edit(p, weight_shape=torch.tensor([24, -1])),
        r"weight_shape is int64 \[2\] \[24, -1\]",
    ),
    "compressed-tensors transposed shape": (
        CT,
        lambda p: _edit(p, weight_shape=torch.tensor([256, 24])),
        "scales for 24 channels",
    ),
    "compressed-tensors act-order without g_idx": (
        CT_ACT,
        lambda p: _edit(p, weight_g_idx=None),
        "there is no g_idx",
    ),
    "compressed-tensors act-order not declared": (
        CT_ACT,
        lambda p: _weights(p, actorder=None),
        "config says no act-order",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_checkpoints_say_what_is_wrong(case: str, tmp_path: Path) -> None:
    (family, bits, symmetric, desc_act, shards), spoil, words = BROKEN[case]
    write_checkpoint(tmp_path, family, LAYERS, bits, 64, symmetric, desc_act, shards)
    load_checkpoint(tmp_path).quantized(LAYER)
    spoil(tmp_path)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_checkpoint(tmp_path).quantized(LAYER)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("bias", [torch.zeros(23), torch.zeros(24, 1), torch.zeros(24, dtype=torch.int32)])
@pytest.mark.parametrize("family", ["awq", "compressed-tensors"])
def test_broken_bias(family: str, bias: torch.Tensor, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family, LAYERS, bias=True)
    _edit(tmp_path, bias=bias)
    with pytest.raises(CheckpointError, match=r"accepted: floating point \[24\]"):
        load_checkpoint(tmp_path).bias(LAYER)


def test_a_bias_beside_a_single_scale(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "awq", LAYERS, bias=True)
    checkpoint = load_checkpoint(tmp_path)
    _edit(tmp_path, scales=torch.tensor(1.0).half())
    with pytest.raises(CheckpointError, match=r"up_proj\.scales is one number; accepted beside a bias: one for each channel"):
        checkpoint.bias(LAYER)


def test_bad_paths_and_arguments(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        load_checkpoint(tmp_path / "nowhere")
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"not a \.safetensors file; accepted: one of those, a pickled state_dict \(\.pt, "):
        load_checkpoint(tmp_path / "model.gguf")
    save_file({"linear.weight": torch.zeros(4, 4)}, tmp_path / "plain.safetensors")
    with pytest.raises(CheckpointError, match="no quantization config and no quantized layer"):
        load_checkpoint(tmp_path / "plain.safetensors")
    with pytest.raises(CheckpointError, match=r"no tensor named \*.qweight"):
        load_checkpoint(tmp_path / "plain.safetensors", config={"quant_method": "gptq", "bits": 4, "group_size": 128})
    write_checkpoint(tmp_path / "awq", "awq", LAYERS)
    with pytest.raises(CheckpointError, match="only GPTQ has it"):
        load_checkpoint(tmp_path / "awq", checkpoint_format="gptq")
    write_checkpoint(tmp_path / "gptq", "gptq", LAYERS)
    with pytest.raises(CheckpointError, match="checkpoint_format is 'v2'"):
        load_checkpoint(tmp_path / "gptq", checkpoint_format="v2")
    assert isinstance(load_checkpoint(str(tmp_path / "gptq")), Checkpoint)
