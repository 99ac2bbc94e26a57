"""The commands of whole models: ``tilebit quantize | generate | evaluate``, and ``bench --model``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .folders import unfinished
from .model_options import ClipSearch, Device, Dtype, Embeddings, Folder, Skip, Smooth, WeightFormat, WeightFormats
from .output import fail, failures, new_file, new_table, print_json, print_parts, usage
from .several import Layers, formats_by_layer
from .tasks import Json, named_target, pack_kernels, schedule_text

if TYPE_CHECKING:
    import torch

    from ..transformers import TilebitConfig


def quantize(
    source: Annotated[Path, typer.Argument(metavar="IN", help="The directory of a 16-bit model.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write; it must not exist yet.")],
    format: Annotated[str, typer.Option("--format", help="Weight format, such as w4a16_g128; or w3-8a16_any.")] = "w4a16_g128",
    skip: Skip = None,
    layer: Layers = None,
    embeddings: Embeddings = None,
    clip_search: ClipSearch = False,
    smooth: Smooth = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Quantize a model while it loads, layer by layer, and save it packed, its tokenizer beside it. Of several names that fit a layer, in
    --skip and --layer, the longest counts. w3-8a16_any stores every width from 3 to 8 bits, by k-means; w3-8a16_any@4 is set to 4. With
    --smooth all of it is loaded first, and a text passes through it."""
    _needed()
    if out.exists() or out.is_symlink():
        fail(f"{out} exists; accepted: a directory that does not exist yet: name another, or remove it")
    new_file(out, folders=True)
    for left in unfinished(out):
        typer.echo(f"{left} is left of a run that was killed, if none is writing {out} now: remove it", err=True)
    chosen, place = _quantization(format, skip, clip_search, layer, embeddings), _device(device)
    with failures():
        from ..transformers.opening import open_model
        from ..transformers.smoothing import smoothed_model
        from .folders import save_model, weight_bytes

        if smooth is None:
            model = open_model(source, chosen, _dtype(dtype), place)
        else:
            model = smoothed_model(source, _text(smooth), chosen, _dtype(dtype), place, sys.stderr.isatty())
        save_model(model, source, out)
        found = {
            "out": str(out), "format": format, "per_layer": chosen.per_layer, "before_bytes": weight_bytes(source),
            "after_bytes": weight_bytes(out), "memory_bytes": model.get_memory_footprint(), "peak_bytes": _peak(place),
        }  # fmt: skip
    if as_json:
        print_json(found)
        return
    before, after = found["before_bytes"], found["after_bytes"]
    where = "GPU's peak memory" if place.type == "cuda" else "peak memory of the process"
    formats = ", ".join([format, *(f"{name} {kind}" for name, kind in chosen.per_layer.items())])
    typer.echo(f"{out}: {formats}, {_size(before)} before, {_size(after)} after ({before / after:.2f} times smaller)")
    typer.echo(f"{where}: {_size(found['peak_bytes'])}; next: tilebit generate {out} --prompt ...")


def generate(
    folder: Folder,
    prompt: Annotated[str | None, typer.Option("--prompt", help="The text to continue.")] = None,
    prompt_file: Annotated[Path | None, typer.Option("--prompt-file", help="A file that holds it.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="New tokens at most.", min=1)] = 128,
    kv_format: Annotated[
        str | None, typer.Option("--kv-format", help="Format of the KV cache, such as kv4_channel. Default: transformers' own, in 16 bits.")
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", help="Above 0: sample.", min=0.0)] = 0.0,
    greedy: Annotated[bool, typer.Option("--greedy", help="The most likely token each time, as without --temperature.")] = False,
    seed: Annotated[int, typer.Option("--seed", help="Of sampling.")] = 0,
    pack: Annotated[
        list[Path] | None, typer.Option("--pack", help="A pack to take kernels from, as `tilebit pack --model` writes it; repeat it.")
    ] = None,
    format: WeightFormat = None,
    skip: Skip = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Continue a text, printed as it comes; then say how fast that was and what memory it took. Kernels
    compile before the clock starts."""
    _needed()
    if greedy and temperature > 0:
        raise typer.BadParameter("--greedy and --temperature exclude each other; accepted: one of them")
    if (prompt is None) == (prompt_file is None):
        raise typer.BadParameter("accepted: a text to continue, by --prompt or by --prompt-file, not both")
    _formats_for(skip, format is not None)
    chosen, place = None if format is None else _quantization(format, skip, False), _device(device)
    if kv_format is not None:
        _known_cache(kv_format)
    with failures():
        import torch

        from .. import packs
        from ..transformers.opening import open_model, open_tokenizer, read_config
        from ..transformers.speaking import fitting_ids, speak

        for path in pack or []:
            packs.load(path)
        text = _text(prompt_file) if prompt_file is not None else prompt or ""
        read_config(folder)
        tokenizer = open_tokenizer(folder)
        model = open_model(folder, chosen, _dtype(dtype), place)
        ids = fitting_ids(model, tokenizer, text, max_tokens)
        torch.manual_seed(seed)
        spoken = speak(model, tokenizer, ids, max_tokens, _nothing if as_json else _stream, kv_format, temperature)
    rates = {"prefill_tokens_per_s": spoken.prefill_rate, "decode_tokens_per_s": spoken.decode_rate}
    memory = {"weight_bytes": model.get_memory_footprint(), "cache_bytes": spoken.cache_bytes}
    if as_json:
        counts = {"prompt_tokens": spoken.prompt_tokens, "new_tokens": spoken.new_tokens}
        print_json({"text": spoken.text, **counts, **rates, **memory})
        return
    decode = "-" if spoken.decode_rate is None else f"{spoken.decode_rate:.1f}"
    typer.echo(f"\n\nprefill {spoken.prefill_rate:.1f} tokens/s ({spoken.prompt_tokens}), decode {decode} tokens/s ({spoken.new_tokens})")
    typer.echo(f"memory: weights {_size(memory['weight_bytes'])}, cache {_size(spoken.cache_bytes)} ({kv_format or '16 bits'})")


def evaluate(
    folder: Folder,
    text: Annotated[Path, typer.Option("--text", help="The file of text to predict.")],
    kv_format: Annotated[
        list[str] | None,
        typer.Option("--kv-format", help="Format of the KV cache; repeat it for a row each. 'none' (the default): attention in 16 bits."),
    ] = None,
    reference: Annotated[Path | None, typer.Option("--reference", help="The 16-bit model's directory, to compare with.")] = None,
    window: Annotated[int, typer.Option("--window", help="Tokens that are seen at most.", min=2)] = 1024,
    stride: Annotated[int, typer.Option("--stride", help="Tokens from window to window.", min=1)] = 512,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="Tokens of the text to use.", min=2)] = None,
    format: WeightFormats = None,
    skip: Skip = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """How well the model predicts a text: perplexity, and how far its predictions are from the 16-bit
    model's (mean KL divergence per token; how often the most likely token is the same): a row for each
    format of weights and each of the cache."""
    _needed()
    if stride >= window:
        raise typer.BadParameter(f"--stride is {stride}; accepted: 1 to {window - 1}, less than --window")
    _formats_for(skip, any(name != "none" for name in format or ()))
    chosen = [None if name == "none" else _quantization(name, skip, False) for name in dict.fromkeys(format or ["none"])]
    place = _device(device)
    caches = [None if name == "none" else name for name in dict.fromkeys(kv_format or ["none"])]
    for name in caches:
        if name is not None:
            _known_cache(name)
    with failures():
        from ..transformers.evaluating import evaluate_model

        rows = evaluate_model(
            folder, _text(text), caches, reference, (window, stride), max_tokens, chosen, _dtype(dtype), place, sys.stderr.isatty()
        )
    if as_json:
        print_json(rows)
        return
    columns = ("model", "weights", "cache", "perplexity", "KL, nats", "same token")
    table = new_table(f"{text}: {rows[0]['tokens']} tokens predicted", *columns)
    for row in rows:
        kl, top1 = ("-" if row[name] is None else f"{row[name]:{kind}}" for name, kind in (("kl", ".2e"), ("top1", ".1%")))
        table.add_row(row["model"], row["format"] or "as they are", row["kv_format"] or "none", f"{row['perplexity']:.4g}", kl, top1)
    print_parts(table)


def bench_whole(
    model: Path,
    format: str | None,
    kv_format: list[str] | None,
    batch: list[int] | None,
    prompt_tokens: int,
    steps: int,
    dtype: str,
    device: str,
    out: Path | None,
    as_json: bool,
) -> None:
    """``tilebit bench --model``: prompts and decode steps of ``model`` quantized to ``format`` over each cache,
    beside the 16-bit model."""
    _needed()
    place, caches = _device(device), list(dict.fromkeys(kv_format or ["kv4_channel"]))
    for name in caches:
        _known_cache(name)
    if format is not None:
        _quantization(format, None, False)
    with failures():
        from ..schedules.target import detect_target
        from ..transformers.benching import Sizes, bench_model
        from .bench import process_fields, write_rows

        sizes = Sizes(list(dict.fromkeys(batch or [1])), prompt_tokens, steps)
        rows = bench_model(model, format, caches, sizes, _dtype(dtype), place)
        if out is not None:
            write_rows(out, [{**process_fields(detect_target(str(place))), "op": "model", "model": str(model), **row} for row in rows])
    if as_json:
        print_json(rows)
        return
    dense = {row["batch"]: row for row in rows if row["kv_format"] is None}
    table = new_table(f"{model}: prompts of {prompt_tokens} tokens", "batch", "weights", "cache", "prefill, tokens/s",
                      "against 16 bits", "decode, ms a step", "against 16 bits", "weights", "cache")  # fmt: skip
    for row in rows:
        base = dense.get(row["batch"])
        times = None if base is None else (row["prefill_tokens_per_s"] / base["prefill_tokens_per_s"], base["decode_ms"] / row["decode_ms"])
        prefill, decode = ("-", "-") if times is None else (f"{ratio:.2f}x" for ratio in times)
        table.add_row(
            str(row["batch"]), row["format"] or "16 bits", row["kv_format"] or "16 bits", f"{row['prefill_tokens_per_s']:.0f}",
            prefill, f"{row['decode_ms']:.3f}", decode, _size(row["weight_bytes"]), _size(row["cache_bytes"]),
        )  # fmt: skip
    print_parts(table, f"rows: {out}" if out is not None else "")


def tune_whole(
    model: Path, format: str, kv_format: str, batch: list[int] | None, tokens: int | None, part: list[str] | None, budget: float | None,
    jobs: int | None, dtype: str, as_json: bool,
) -> None:  # fmt: skip
    """``tilebit tune --model``: the products of ``model``, quantized to ``format``, each alone and then in decode steps
    of each number of rows."""
    _needed()
    _known_cache(kv_format)
    wanted, place, sizes = _quantization(format, None, False), _device("auto"), sorted(set(batch or [1]))
    with failures():
        from ..schedules.records import records_path
        from ..transformers import compile, tune
        from ..transformers.benching import low_bit_model

        parts: dict[str, Any] = {} if part is None else {"parts": () if part == ["none"] else part}
        of = compile(low_bit_model(model, wanted, _dtype(dtype), place), sizes, **parts)
        found = tune(of, None, kv_format, tokens, budget_s=budget, jobs=jobs, progress=not as_json)
    rows = [
        {
            "m": p.workload.m, "n": p.workload.n, "k": p.workload.k, "gate": p.workload.gate, "calls": p.calls, "us": p.us,
            "before_us": p.before_us, "tried": p.tried, "schedule": p.schedule.to_json(),
        }
        for p in found
    ]  # fmt: skip
    if as_json:
        print_json({"records": str(records_path()), "results": rows})
        return
    table = new_table(f"{model}: products in decode steps", "rows", "n", "k", "calls a step", "before, us", "us", "tried", "schedule")
    for row in rows:
        sizes_of = (str(row[name]) for name in ("m", "n", "k", "calls"))
        times = ("-" if row[name] is None else f"{row[name]:.2f}" for name in ("before_us", "us"))
        table.add_row(*sizes_of, *times, str(row["tried"]), schedule_text(row["schedule"]))
    print_parts(table, f"records: {records_path()}")


def pack_whole(
    path: Path,
    model: Path,
    format: str | None,
    skip: list[str] | None,
    kv_format: list[str] | None,
    batch: list[int] | None,
    max_tokens: int | None,
    bits: list[int] | None,
    dtype: str | None,
    target: str,
    jobs: int | None,
    as_json: bool,
) -> None:
    """``tilebit pack --model``: all kernels that ``generate`` needs of ``model``."""
    _needed()
    _formats_for(skip, format is not None)
    caches, chosen = list(dict.fromkeys(kv_format or [])), None if format is None else _quantization(format, skip, False)
    for name in caches:
        _known_cache(name)
    device, own = named_target(target), _dtype(dtype or "auto")
    with failures():
        from ..layouts.kv_formats import KVFormat
        from ..transformers.needed import kernels_of
        from ..transformers.opening import most_tokens
        from ..transformers.outline import outline

        found = outline(model, chosen, own, device.arch)
        most = most_tokens(found.config)
        if most is not None and (max_tokens or 0) > most:
            raise ValueError(f"--max-tokens is {max_tokens}; accepted: at most {most}, which is what the model was made for")
        tokens = max_tokens or most
        if tokens is None:
            raise ValueError(f"{model / 'config.json'} does not say how many tokens a sequence may have; accepted: --max-tokens")
        formats, rows = [KVFormat.from_name(name) for name in caches], list(dict.fromkeys(batch or [1]))
        workloads = kernels_of(found, formats, rows, tokens, device, bits or None)
        if not workloads:
            raise ValueError(
                f"{model} is in 16 bits and no cache is named, which needs no kernel; accepted: --format, --kv-format, or both"
            )
    pack_kernels(path, workloads, device, jobs, as_json)


def _needed() -> None:
    from importlib.util import find_spec

    if find_spec("transformers") is None:
        fail("transformers is not installed; accepted: 5.17 and newer: pip install 'tilebit[transformers]'")
    if not sys.stderr.isatty():
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()


def _quantization(
    format: str, skip: list[str] | None, clip_search: bool, layers: list[str] | None = None, embeddings: str | None = None
) -> TilebitConfig:
    with usage():
        from ..transformers import TilebitConfig

        return TilebitConfig(format, skip=skip, per_layer=formats_by_layer(layers), clip_search=clip_search, embeddings=embeddings)


def _formats_for(skip: list[str] | None, formats: bool) -> None:
    if skip and not formats:
        raise typer.BadParameter("--skip without --format keeps no layer, since none is quantized; accepted: --format with it, or neither")


def _known_cache(name: str) -> None:
    with usage():
        from ..layouts.kv_formats import KVFormat

        KVFormat.from_name(name)


def _dtype(name: str) -> torch.dtype | None:
    import torch

    known = {"auto": None, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if name not in known:
        raise typer.BadParameter(f"--dtype is {name!r}; accepted: {', '.join(known)}")
    return known[name]


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    there = name == "cpu" or (kind == "cuda" and (index or "0").isdecimal() and int(index or 0) < torch.cuda.device_count())
    if not there:
        raise typer.BadParameter(f"--device is {name!r}; accepted here: auto, cpu" + ", cuda[:i]" * torch.cuda.is_available())
    return torch.device("cpu") if name == "cpu" else torch.device("cuda", int(index or 0))


def _text(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text in UTF-8 ({error.reason} at byte {error.start}); accepted: UTF-8") from error
    if not text.strip():
        raise ValueError(f"{file} is empty; accepted: a file with text")
    return text


def _peak(place: torch.device) -> int:
    import resource

    import torch

    return torch.cuda.max_memory_allocated(place) if place.type == "cuda" else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _stream(text: str) -> None:
    typer.echo(text, nl=False)
    sys.stdout.flush()


def _nothing(_: Any) -> None:
    """JSON holds the text."""
