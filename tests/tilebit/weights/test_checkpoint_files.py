"""Which files hold a directory's tensors."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tilebit.weights.checkpoint_files import tensor_files


def test_one_whole_file_goes_before_an_older_index(tmp_path: Path):
    """As transformers chooses: tensors of two models are never mixed."""
    shard, whole = "model-00001-of-00001.safetensors", "model.safetensors"
    save_file({"x": torch.zeros(1), "y": torch.zeros(1)}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": shard, "y": shard}}))
    assert tensor_files(tmp_path) == {"x": tmp_path / shard, "y": tmp_path / shard}
    save_file({"x": torch.ones(1)}, tmp_path / whole)
    assert tensor_files(tmp_path) == {"x": tmp_path / whole}
