"""Memory of loading and running a model, and the time to its first tokens, from sources and from a
pack: ``python -m results.measure.loading --model FOLDER`` appends rows to results/rows/loading.

Each case is a process of its own (``loading_child.py``), after its imports: the 16-bit model as
transformers runs it, the same quantized while it loads, and its packed directory, from an empty
artifact cache (all kernels are compiled), from one that has them, and from a pack of the model with
compiling forbidden. Peaks are of the device's allocations on a GPU; of a process's resident memory on
a CPU, where pages of the weights' file that are mapped count, and compilers, which are other processes, do
not. The second token is there when the kernels of steps are, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tilebit.command.bench import process_fields, write_rows
from tilebit.schedules.target import detect_target

from ..report.markdown import slug
from ..report.rows import ROWS
from .loading_child import MARK

CASES = ("16 bits", "while loading", "empty cache", "filled cache", "pack")


def environment(cache: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "TILEBIT_CACHE": str(cache), **more}


def command(*words: str, cache: Path) -> None:
    """A command of ``tilebit``; raises ``CalledProcessError`` where it fails."""
    subprocess.run([sys.executable, "-m", "tilebit", *words], env=environment(cache), check=True, stdout=subprocess.DEVNULL)


def measured(case: dict[str, Any], cache: Path, compiling: bool = True) -> dict[str, Any]:
    """What a process of this case says. Raises ``RuntimeError`` with its last words where it fails."""
    words = [sys.executable, "-m", "results.measure.loading_child", json.dumps(case)]
    more = {} if compiling else {"TILEBIT_NO_COMPILE": "1"}
    done = subprocess.run(words, env=environment(cache, **more), capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        raise RuntimeError(f"the case {case} failed: {done.stderr[-2000:]}")
    return json.loads(lines[0].removeprefix(MARK))


def rows_of(model: Path, work: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row of each case, in the order of ``CASES``; directories, packs and caches are made in ``work``."""
    packed, pack, cache = (work / name for name in ("packed", "pack", "cache"))
    kind = ("--format", options.format, "--dtype", options.dtype, "--device", options.device)
    command("quantize", str(model), str(packed), *kind, cache=cache)
    tokens = str(options.prompt_tokens + options.new_tokens)
    common = {name: getattr(options, name) for name in ("device", "dtype", "prompt_tokens", "new_tokens")}
    found: dict[str, dict[str, Any]] = {}

    def run(name: str, directory: Path, cache: Path, quantize: str | None = None, used: Path | None = None, low: bool = True) -> None:
        case = {**common, "directory": str(directory), "quantize": quantize, "kv_format": options.kv_format if low else None}
        found[name] = measured({**case, "pack": None if used is None else str(used)}, cache, used is None)
        print(f"{name}: {found[name]}", flush=True)

    run("16 bits", model, cache, low=False)
    run("empty cache", packed, cache)
    run("filled cache", packed, cache)
    run("while loading", model, cache, options.format)
    target = ("--target", "cpu" if options.device == "cpu" else options.device)
    sizes = ("--kv-format", options.kv_format, "--max-tokens", tokens, "--dtype", options.dtype)
    command("pack", str(pack), "--model", str(packed), *sizes, *target, cache=cache)
    run("pack", packed, work / "nothing", used=pack)
    low = {"format": options.format, "kv_format": options.kv_format}
    named = {"16 bits": {"format": None, "kv_format": None}}
    return [{"case": name, **named.get(name, low), **common, **found[name]} for name in CASES]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m results.measure.loading", description="Measure memory and first tokens of a model.")
    parser.add_argument("--model", type=Path, required=True, help="the directory of a 16-bit model")
    parser.add_argument("--name", help="what rows call it (default: the directory's name)")
    parser.add_argument("--format", default="w4a16_g64", help="of weights (default: w4a16_g64)")
    parser.add_argument("--kv-format", default="kv4_channel", help="of the cache (default: kv4_channel)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:0 (default: cpu)")
    parser.add_argument("--dtype", default="float16", help="float16 or bfloat16 (default: float16)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="default: 64")
    parser.add_argument("--new-tokens", type=int, default=16, help="2 and more (default: 16)")
    parser.add_argument("--out", type=Path, help="the file to append to (default: results/rows/loading/DEVICE.jsonl)")
    options = parser.parse_args(arguments)
    if options.new_tokens < 2:
        parser.error(f"--new-tokens is {options.new_tokens}; accepted: 2 and more")
    fields = {**process_fields(detect_target(options.device)), "op": "loading", "model": options.name or options.model.resolve().name}
    fields |= {"load": os.getloadavg()[0], "cores": os.cpu_count()}
    out = options.out or ROWS / "loading" / f"{slug(fields['gpu'])}.jsonl"
    with tempfile.TemporaryDirectory() as work:
        write_rows(out, [{**fields, **row} for row in rows_of(options.model, Path(work), options)])
    print(f"loading: {len(CASES)} rows in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
