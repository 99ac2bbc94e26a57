"""Directories that other quantizers write, loaded: ``python -m results.measure.foreign --python PATH
--tool llm-compressor [--schemes W4A16,W8A8]`` appends rows to results/rows/foreign.

PATH is the Python of an environment of the tool's own, with torch and transformers as the tool wants
them:

    python -m venv FOLDER && FOLDER/bin/pip install llmcompressor  # or gptqmodel, or autoawq

A process there (``foreign_child.py``) makes a tiny random Llama in float16, and for each scheme has the
tool quantize and save it, and computes logits of a prompt with the tool's own copy of the model, on the
CPU. Here the directory is loaded with ``tilebit.transformers.load``, and compared: every layer's weight
with the one that the tool computes with, and the logits. Both differ by what 16 bits round; the program
ends with 1 where they differ by more, where tilebit refuses the directory, or where the tool fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tilebit.command.bench import process_fields, write_rows
from tilebit.schedules.target import cpu_target
from tilebit.transformers import load
from tilebit.weights.modules import QuantLinear

from ..report.foreign import within
from ..report.markdown import slug
from ..report.rows import ROWS
from .foreign_child import SCHEMES

CHILD = Path(__file__).with_name("foreign_child.py")
INHERITED = ("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH")  # of this environment, not of the tool's


def quantized(python: Path, tool: str, schemes: Sequence[str], folder: Path) -> Iterator[dict[str, Any]]:
    """Have ``tool`` write ``folder / SCHEME / "quantized"`` and what it computes, ``computed.safetensors`` beside it; an answer for
    each scheme, as soon as it is there: {scheme, dtype, versions}, or {scheme, failed: why}. Raises ``RuntimeError`` with the process's
    last words where it ends before."""
    environment = {**{name: value for name, value in os.environ.items() if name not in INHERITED}, "HF_HUB_OFFLINE": "1"}
    job = json.dumps({"tool": tool, "schemes": schemes, "folder": str(folder)})
    command = [str(python.absolute()), str(CHILD), job]  # no link is followed: an environment's Python is one
    with (folder / "words").open("w+") as words:
        with subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=words, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                yield json.loads(line)
        if process.returncode:
            words.seek(0)
            raise RuntimeError(f"{tool}'s process ended with {process.returncode}: {words.read().strip()[-2000:]}")


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference, over that of ``expected``."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def compared(folder: Path) -> dict[str, Any]:
    """How far the model in ``folder / "quantized"``, loaded here, is from what the tool computed, and what its layers are: each
    format and how many. Raises ``ValueError`` where ``load`` refuses it, or layers were quantized and are not here."""
    computed = load_file(folder / "computed.safetensors")
    ids, logits = computed.pop("ids"), computed.pop("logits")
    model: Any = load(folder / "quantized")
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}
    if set(layers) != set(computed):
        raise ValueError(f"the tool quantized {sorted(computed)}, and loaded are {sorted(layers)}; accepted: the same")
    weights = {name: layer.unpack().dequantize() for name, layer in layers.items()}
    with torch.no_grad():
        found = model(ids).logits
    counts = Counter(layer.packed.format.name for layer in layers.values())
    return {
        "loaded": dict(sorted(counts.items())),
        "weight_error": max(relative(weight, computed[name]) for name, weight in weights.items()),
        "logit_error": relative(found, logits),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m results.measure.foreign", description="Load what other quantizers write.")
    parser.add_argument("--python", type=Path, required=True, help="the Python of an environment in which the tool is installed")
    parser.add_argument("--tool", choices=sorted(SCHEMES), required=True, help="the quantizer")
    parser.add_argument("--schemes", help="of that tool, with commas between (default: all)")
    parser.add_argument("--out", type=Path, help="the file to append to (default: results/rows/foreign/DEVICE.jsonl)")
    options = parser.parse_args(arguments)
    known = SCHEMES[options.tool]
    schemes = list(known) if options.schemes is None else options.schemes.split(",")
    for scheme in schemes:
        if scheme not in known:
            parser.error(f"--schemes names {scheme!r}; accepted of {options.tool}: {', '.join(known)}")
    if not options.python.is_file():
        parser.error(f"--python is {options.python}, which is no file; accepted: the Python of an environment that has {options.tool}")
    fields = {**process_fields(cpu_target()), "op": "foreign", "tool": options.tool}
    out = options.out or ROWS / "foreign" / f"{slug(fields['gpu'])}.jsonl"
    right = 0
    with tempfile.TemporaryDirectory() as work:
        try:
            for answer in quantized(options.python, options.tool, schemes, Path(work)):
                if "failed" in answer:
                    print(f"{answer['scheme']}: {options.tool} did not write it: {answer['failed']}", flush=True)
                    continue
                try:
                    row = {**fields, **answer, **compared(Path(work) / answer["scheme"])}
                except ValueError as error:
                    print(f"{answer['scheme']}: not loaded: {error}", flush=True)
                    continue
                write_rows(out, [row])
                right += within(row)
                errors = f"errors of weights {row['weight_error']:.1e}, of logits {row['logit_error']:.1e}"
                print(f"{row['scheme']}: {row['loaded']}, {errors}{'' if within(row) else ': more than rounding makes'}", flush=True)
        except RuntimeError as error:
            print(error)
    print(f"foreign: {right} of {len(schemes)} schemes are what {options.tool} computes")
    return int(right < len(schemes))


if __name__ == "__main__":
    sys.exit(main())
