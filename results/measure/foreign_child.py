"""The process that ``results.measure.foreign`` starts in a quantizer's own environment: a tiny random
model, quantized and saved by the tool, and what the tool's own copy of it computes on the CPU.

It imports torch, transformers and the tool alone, of many releases.
"""

# pyright: reportMissingImports=false
# The tools are not installed beside tilebit.

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024, "initializer_range": 0.05, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
PROMPT = 40  # tokens
SAMPLES, SAMPLE = 8, 128  # of calibration: random ones, and the tokens of each
# What each tool is asked for: of llm-compressor a preset, and in which order of columns GPTQ rounds, where it does; of the others arguments
# of their configs. Models are in float16 unless a scheme names another dtype.
SCHEMES: dict[str, dict[str, dict[str, Any]]] = {
    "llm-compressor": {
        "W4A16": {"scheme": "W4A16"},
        "W4A16_ASYM": {"scheme": "W4A16_ASYM"},
        "W4A16 GPTQ": {"scheme": "W4A16", "gptq": "weight"},
        "W4A16 GPTQ act order": {"scheme": "W4A16", "gptq": "group"},  # which newer releases refuse
        "W8A16": {"scheme": "W8A16"},
        "W8A8": {"scheme": "W8A8"},
        "FP8_DYNAMIC": {"scheme": "FP8_DYNAMIC"},
        "FP8_BLOCK": {"scheme": "FP8_BLOCK"},
        "NVFP4A16": {"scheme": "NVFP4A16", "dtype": "bfloat16"},  # to which the tool unpacks these, whatever the model's
        "MXFP4A16": {"scheme": "MXFP4A16", "dtype": "bfloat16"},
    },
    "gptqmodel": {
        "4 bits v1": {"bits": 4, "group_size": 128, "format": "gptq"},
        "4 bits v1 asymmetric": {"bits": 4, "group_size": 128, "sym": False, "format": "gptq"},
        "4 bits v2": {"bits": 4, "group_size": 128, "format": "gptq_v2"},
        "4 bits v2 asymmetric": {"bits": 4, "group_size": 32, "sym": False, "format": "gptq_v2"},
        "4 bits act order": {"bits": 4, "group_size": 64, "desc_act": True, "act_group_aware": False, "format": "gptq"},
        "8 bits channels": {"bits": 8, "group_size": -1, "act_group_aware": False, "format": "gptq"},
        "4 bits AWQ": {"bits": 4, "group_size": 128, "method": "awq", "format": "gemm"},
    },
    "autoawq": {
        "4 bits groups of 128": {"q_group_size": 128},
        "4 bits groups of 32": {"q_group_size": 32},
    },
}
PACKAGES = ("llmcompressor", "compressed-tensors", "gptqmodel", "autoawq", "transformers", "torch")


def versions() -> dict[str, str]:
    """Those of ``PACKAGES`` that are installed here."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def token_ids(rows: int, columns: int, seed: int) -> Any:
    """int64 [rows, columns], random, without the special tokens."""
    import torch

    return torch.randint(3, SIZES["vocab_size"], (rows, columns), generator=torch.Generator().manual_seed(seed))


def write_dense(folder: Path, dtype: str) -> None:
    """The 16-bit model, with a tokenizer of a word for each id, which tools want to copy."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).to(getattr(torch, dtype)).eval().save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(SIZES["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    special = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2", "unk_token": "w0"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


def llm_compressor(dense: Path, out: Path, options: dict[str, Any]) -> Any:
    """The model as transformers and compressed-tensors load what llm-compressor has saved."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM

    common = {"targets": "Linear", "scheme": options["scheme"], "ignore": ["lm_head"]}
    model, data = AutoModelForCausalLM.from_pretrained(dense, torch_dtype="auto"), {}
    recipe: Any = QuantizationModifier(**common)
    if "gptq" in options:
        from llmcompressor.modifiers.gptq import GPTQModifier

        ids = token_ids(SAMPLES, SAMPLE, 1).tolist()
        recipe = GPTQModifier(**common, actorder=options["gptq"])
        rows = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * SAMPLE] * SAMPLES})
        data = {"dataset": rows, "num_calibration_samples": SAMPLES, "max_seq_length": SAMPLE}
    oneshot(model=model, recipe=[recipe], **data)
    model.save_pretrained(out, save_compressed=True)
    return AutoModelForCausalLM.from_pretrained(out, torch_dtype="auto")


def gptqmodel(dense: Path, out: Path, options: dict[str, Any]) -> Any:
    """The model as GPTQModel's own plain kernel computes it."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # which its loader wants, and machines of few cores do not have by default
    import torch
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    model = GPTQModel.load(str(dense), QuantizeConfig(**{"desc_act": False, **options}, device="cpu"), dtype=torch.float16)
    rows = token_ids(SAMPLES, SAMPLE, 1).tolist()
    model.quantize([{"input_ids": row, "attention_mask": [1] * SAMPLE} for row in rows], batch_size=4)
    model.save(str(out))
    return GPTQModel.load(str(out), device="cpu", backend=BACKEND.TORCH, dtype=torch.float16)


def autoawq(dense: Path, out: Path, options: dict[str, Any]) -> Any:
    """The model as AutoAWQ's own layers compute it; what it saved it loads on GPUs alone, and with a library for Intel's CPUs."""
    from awq import AutoAWQForCausalLM
    from awq.modules.linear import gemm
    from transformers import AutoTokenizer

    model = AutoAWQForCausalLM.from_pretrained(str(dense), device_map="cpu")
    config = {"zero_point": True, "w_bit": 4, "version": "GEMM", **options}
    rows = token_ids(SAMPLES, SAMPLE, 1).tolist()
    model.quantize(AutoTokenizer.from_pretrained(dense), quant_config=config, calib_data=rows, max_calib_seq_len=SAMPLE)
    model.save_quantized(str(out))
    gemm.TRITON_AVAILABLE = False  # whose kernels want a GPU: without them weights are unpacked by torch
    return model


TOOLS: dict[str, Callable[[Path, Path, dict[str, Any]], Any]] = {
    "llm-compressor": llm_compressor, "gptqmodel": gptqmodel, "autoawq": autoawq,
}  # fmt: skip


def computed(model: Any) -> dict[str, Any]:
    """``ids`` [1, PROMPT], the model's ``logits`` of them, and the weight [n, k] that each layer of a decoder computes with; fp32."""
    import torch
    from transformers import PreTrainedModel

    model = next(module for module in model.modules() if isinstance(module, PreTrainedModel))  # which tools wrap
    ids = token_ids(1, PROMPT, 2)
    with torch.no_grad():
        found = {"ids": ids, "logits": model(ids).logits.float()}  # first: some unpack their weights then
        for name, layer in model.named_modules():
            if name.endswith("_proj"):
                found[name] = weight_of(layer, SIZES["intermediate_size" if name.endswith("down_proj") else "hidden_size"])
    return found


def weight_of(layer: Any, k: int) -> Any:
    """Where the layer holds no floats: its product with an identity."""
    import torch

    weight = getattr(layer, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        weight = layer(torch.eye(k, dtype=torch.float16)).reshape(k, -1).t()
    return weight.float().contiguous()


def main() -> None:
    """Answer one line for each scheme of the job."""
    from safetensors.torch import save_file

    said = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a tool prints must not end up between two answers
    job = json.loads(sys.argv[1])
    folder, tool = Path(job["folder"]), job["tool"]
    for scheme in job["schemes"]:
        options = dict(SCHEMES[tool][scheme])
        dtype = options.pop("dtype", "float16")
        dense, place = folder / dtype, folder / scheme
        place.mkdir()
        try:
            if not dense.exists():
                write_dense(dense, dtype)
            model = TOOLS[tool](dense, place / "quantized", options)
            save_file(computed(model), place / "computed.safetensors")
            answer = {"scheme": scheme, "dtype": dtype, "versions": versions()}
        except Exception as error:  # whatever a tool raises of what this release of it cannot do
            answer = {"scheme": scheme, "failed": f"{type(error).__name__}: {error}"}
        said.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
