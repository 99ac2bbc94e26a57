"""A whole decode step of an 8B model: ``python -m results.measure.step`` appends rows to results/rows/step.

The model is a Llama-3-8B shape of transformers with random weights, compiled by
``tilebit.transformers.compile``; sequences are of lengths that are spread over a window, so that
windows fill at different steps. A timed step is what a server does: room for the next token is made
on the host, and the captured step is replayed; all sequences grow. With the peer harness staged
(``--peers``: its folder) the steps of ``results/peers/step_peers.py`` are timed in turn with tilebit's:
16-bit weights, and vLLM's kernels on the same codes, both over a 16-bit cache that does not grow.

Rows are ``tuned`` "step" where the user's records hold times of this device in steps
(``tilebit.transformers.tune``).

Weights of several formats (``--format``) are timed in turn with one another.

The step is as ``compile`` makes it by default. With ``--parts`` the same step is timed in turn as
``compile(..., parts=...)`` makes it ("none": ``()``), on the same caches: what products gain and lose by
doing their neighbours' work themselves. A row's ``parts`` are those that its products did at its batch.

Nothing is timed before it is checked. Steps must give the logits of the model as it runs uncompiled
over a cache of the same format, to 2 %, and peers those over a 16-bit one. Activations of 8 bits
magnify roundings. There the bound is measured: 1.25 times the change of the uncompiled logits when the
tokens' embeddings move by their rounding to fp16.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

import tilebit
import tilebit.transformers
from tilebit.cache.batch import Batch
from tilebit.command.bench import process_fields, write_rows
from tilebit.layouts.formats import GemmFormat
from tilebit.layouts.kv import RESIDUAL
from tilebit.schedules.records import user_records
from tilebit.schedules.target import detect_target, file_stem
from tilebit.transformers import TilebitCache
from tilebit.transformers.compiled import DecodeSteps
from tilebit.transformers.parted import PARTS, parts_of
from tilebit.transformers.tuning import filled

from ..peers.step_peers import CompiledGlue, Layer, PeerStep, Shape, VllmGlue, dense_product, marlin_product
from ..report.rows import OURS, ROWS
from ..report.step import PARTED

MODEL: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
    "tie_word_embeddings": False,
}  # fmt: skip
KV_FORMATS = ("kv16", "kv8_channel", "kv4_channel", "kv2_channel")
TOLERANCE = 0.02  # relative Frobenius error of a step's logits in fp16
ROUNDING, MARGIN = 5e-4, 1.25  # of a number in fp16; of what moving embeddings so far does to logits
MOST = 0.5  # that is accepted, however far that moves them: logits that have nothing in common are 1.4 apart
ROUNDS, STEPS = 12, 8
IN_16_BITS = "cublas_fa3"  # the peer that does not take the codes
NONE = "none"  # what asks for a step without parts
NEW = 2 * (2 + (ROUNDS + 1) * STEPS) + 8  # tokens that a sequence gets at most, of two steps in turn, and more

Step = Callable[[], object]
Name = TypeVar("Name")
Key = tuple[str, str, str]  # who steps, the format of weights, and of the cache


def made_model(format: str | None, layers: int, device: str) -> Any:
    """The model with random weights, float16, quantized to ``format`` (None: as it is)."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**{**MODEL, "num_hidden_layers": layers}), dtype=torch.float16).eval()
    if format is not None:
        tilebit.quantize_model(model, format)
    return model


def spread(batch: int, context: int) -> list[int]:
    """Lengths of about ``context`` tokens, evenly over a window; none fills at the first step."""
    return [context - 2 - b * (RESIDUAL // batch) for b in range(batch)]


def uncompiled(model: Any, cache: TilebitCache, ids: Tensor, lengths: Sequence[int]) -> Tensor:
    """The logits of the model as it ran before ``compile``; the cache is as it was, behind it."""
    mask = torch.arange(cache.seen + 1)[None] >= cache.seen - torch.tensor(lengths)[:, None]
    positions = torch.tensor(lengths, device=ids.device)[:, None]
    with torch.no_grad():
        found = model.tilebit_steps.original(
            input_ids=ids[:, None], attention_mask=mask.to(ids.device), position_ids=positions, past_key_values=cache
        )
    kv = cache.pool.cache
    for handle, length in zip(cache.pool.handles, lengths, strict=True):
        kv.truncate(handle, length)
    cache.seen -= 1
    cache.settle()
    return found.logits[:, -1]


def once(runner: Runner, cache: TilebitCache, lengths: Sequence[int]) -> Tensor:
    """The logits of a step, not captured; the cache is as it was, behind it."""
    found = runner().clone()
    for handle, length in zip(cache.pool.handles, lengths, strict=True):
        cache.pool.cache.truncate(handle, length)
    return found


def accepted_error(model: Any, ids: Tensor, expected: Tensor, run: Callable[[], Tensor]) -> float:
    """What logits may err by where codes of activations or of caches round to their neighbours: ``MARGIN`` times
    the change of ``run``'s, which are ``expected``, when the embeddings of the tokens ``ids`` move by their
    rounding; no less than others, and ``MOST``."""
    rows, kept = model.model.embed_tokens.weight.data, model.model.embed_tokens.weight.data[ids]
    noise = torch.randn(kept.shape, device=kept.device, generator=torch.Generator(kept.device).manual_seed(2))
    rows[ids] = (kept.float() * (1 + ROUNDING * noise)).to(kept.dtype)
    moved = relative(run(), expected)
    rows[ids] = kept
    return min(max(TOLERANCE, MARGIN * moved), MOST)


def relative(y: Tensor, reference: Tensor) -> float:
    return float((y.float() - reference.float()).norm() / reference.float().norm())


def timed(steps: Mapping[Name, Step], device: str, rounds: int, calls: int) -> dict[Name, list[float]]:
    """Microseconds a call of each round: ``calls`` of each in turn, one after another without waiting."""
    found: dict[Name, list[float]] = {key: [] for key in steps}
    for step in steps.values():  # clocks rise, caches fill
        for _ in range(calls):
            step()
    for _ in range(rounds):
        for key, step in steps.items():
            _wait(device)
            start = time.perf_counter()
            for _ in range(calls):
                step()
            _wait(device)
            found[key].append((time.perf_counter() - start) / calls * 1e6)
    return found


def spread_of(us: Sequence[float]) -> dict[str, float]:
    """A row's times: the median of rounds, and where a fifth of them lies below and above."""
    p20, median, p80 = (sorted(us)[len(us) * part // 10] for part in (2, 5, 8))
    return {"us": round(median, 1), "us_p20": round(p20, 1), "us_p80": round(p80, 1)}


def peer_steps(model: Any, device: str, harness: Any) -> dict[str, PeerStep]:
    """The steps of 16-bit weights and of Marlin on the model's codes."""
    config, blocks, step = model.config, model.model.layers, model.tilebit_steps.step
    shape = Shape(config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.rms_norm_eps)
    codes = [[getattr(part, "layer", part).unpack() for part in (b.qkv, b.o, b.gate_up, b.down)] for b in step.blocks]
    norms = [(layer.input_layernorm.weight, layer.post_attention_layernorm.weight) for layer in blocks]
    rest = (model.model.embed_tokens.weight, model.model.norm.weight, model.lm_head.weight, step.rotary)
    dense = [Layer([dense_product(q.dequantize(torch.float16)) for q in four], two) for four, two in zip(codes, norms, strict=True)]
    marlin = [Layer([marlin_product(q, harness) for q in four], two) for four, two in zip(codes, norms, strict=True)]
    try:
        glue: Any = VllmGlue(step.rotary, torch.float16)
    except AttributeError as error:
        print(f"vLLM's library has no {error}: its step has torch.compile's glue", flush=True)
        glue = CompiledGlue()
    return {IN_16_BITS: PeerStep(shape, dense, *rest, CompiledGlue()), "vllm_kernels": PeerStep(shape, marlin, *rest, glue)}


@dataclass(slots=True)
class Ready:
    """Steps of one batch and context, checked and captured, by impl, format of weights and format of cache: what
    a call is, how far its logits are from what they must be, and how far they may be. ``held`` lives as long."""

    steps: dict[Key, Step] = field(default_factory=dict)
    errors: dict[Key, float] = field(default_factory=dict)
    accepted: dict[Key, float] = field(default_factory=dict)
    held: list[Any] = field(default_factory=list)

    def checked(self) -> None:
        """Raise ``ValueError`` where logits are not what they must be."""
        wrong = {" ".join(key): (e, bound) for key, e in self.errors.items() if not e <= (bound := self.accepted.get(key, TOLERANCE))}
        if wrong:
            raise ValueError(f"relative errors of logits, and what is accepted, are {wrong}; no row is written")


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """What every step of a batch and a context is given: a token of each sequence, and what their caches hold."""

    ids: Tensor
    k: Tensor
    v: Tensor
    lengths: list[int]

    @classmethod
    def of(cls, config: Any, batch: int, context: int, device: str) -> Content:
        lengths, generator = spread(batch, context), torch.Generator(device).manual_seed(1)
        ids = torch.randint(config.vocab_size, (batch,), device=device, generator=generator)
        k, v = (torch.randn(sum(lengths), config.num_key_value_heads, config.head_dim, device=device, generator=generator) for _ in "kv")
        return cls(ids, k.half(), v.half(), lengths)


def make_ready(ready: Ready, of: Content, model: Any, format: str, kv_formats: Sequence[str], variants: dict[str, DecodeSteps]) -> None:
    """Add steps of ``model`` over caches of ``kv_formats``; ``variants``: tilebit's, by what rows call them."""
    codes = bool(GemmFormat.parse(format).x)
    for name in kv_formats:
        cache = filled(model, name, of.lengths, NEW, of.k, of.v)
        expected = uncompiled(model, cache, of.ids, of.lengths)
        sequences = cache.pool.cache.batch(cache.pool.handles)
        runners = {(impl, format, name): Runner(steps, cache, of.ids, sequences) for impl, steps in variants.items()}
        for key, runner in runners.items():
            ready.errors[key] = relative(once(runner, cache, of.lengths), expected)
        bound = TOLERANCE
        if codes:
            bound = accepted_error(model, of.ids, expected, lambda cache=cache: uncompiled(model, cache, of.ids, of.lengths))
        ready.accepted.update(dict.fromkeys(runners, bound))
        for key, runner in runners.items():
            again = once(runner, cache, of.lengths)  # captured, and replayed
            ready.errors[key] = max(ready.errors[key], relative(again, expected))
            if not bool(torch.isfinite(again).all()):
                raise ValueError(f"the captured step of {' '.join(key)} gives {again}")
            ready.steps[key] = runner
        ready.held.append(cache)


def make_peers_ready(ready: Ready, of: Content, model: Any, peers: dict[str, PeerStep], format: str) -> None:
    """Add the steps of ``peers``, over a 16-bit cache that does not grow. Their logits must be those of ``model``
    over such a cache, which is gone before theirs is made."""
    config = model.config
    cache = filled(model, "kv16", of.lengths, NEW, of.k, of.v)
    reference = uncompiled(model, cache, of.ids, of.lengths)
    del cache
    _emptied()
    shape = (config.num_hidden_layers, len(of.ids), max(of.lengths) + 8, *of.k.shape[1:])
    whole = [torch.zeros(shape, dtype=of.k.dtype, device=of.k.device) for _ in "kv"]
    for rows, cache in zip((of.k, of.v), whole, strict=True):
        for b, own in enumerate(rows.split(of.lengths)):
            cache[:, b, : len(own)] = own
    for name, peer in peers.items():
        key = (name, "fp16" if name == IN_16_BITS else format, "kv16")
        peer.hold(whole[0], whole[1], of.lengths)
        ready.errors[key] = relative(peer(of.ids), reference)
        ready.steps[key] = captured(peer, of.ids)


def measured(ready: Ready, device: str) -> list[dict[str, Any]]:
    """A row of each step, all timed in turn, and the replays of tilebit's alone before."""
    for step in ready.steps.values():
        step()  # a window may fill at the step before, which replays would repeat
    replays: dict[Key, Step] = {key: runner.replay for key, runner in ready.steps.items() if isinstance(runner, Runner) and device != "cpu"}
    alone = {key: statistics.median(us) for key, us in timed(replays, device, ROUNDS, STEPS).items()}
    rows = []
    for key, us in timed(ready.steps, device, ROUNDS, STEPS).items():
        own = spread_of(us)
        rows.append({
            **dict(zip(("impl", "format", "kv_format"), key, strict=True)), **own, "graph_us": round(alone.get(key, own["us"]), 1),
            "rel_err": ready.errors[key], "rel_err_accepted": ready.accepted.get(key, TOLERANCE),
        })  # fmt: skip
    return rows


class Runner:
    """A step of all sequences: room for a token each, then the compiled step, whose tokens are sampled where it
    reads them."""

    def __init__(self, steps: DecodeSteps, cache: TilebitCache, ids: Tensor, batch: Batch) -> None:
        self._steps, self._kv, self._ids, self._batch = steps, cache.pool.cache, ids, batch

    def __call__(self) -> Tensor:
        self._kv.advance(self._batch, deferred=True)
        ids = self._steps.tokens(self._batch)
        return self._steps.launch(self._kv, self._batch, self._ids if ids is None else ids)

    def replay(self) -> None:
        """The captured step alone: the last one again."""
        self._steps.replay(self._batch)


def captured(step: PeerStep, ids: Tensor) -> Step:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step(ids)
    return graph.replay


def _emptied() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m results.measure.step", description="Time whole decode steps of an 8B model.")
    parser.add_argument("--device", help="cuda or cpu; default: the GPU where there is one")
    parser.add_argument(
        "--format", default="w4a16_g128", help="of weights; with several, peers have the first's codes (default: w4a16_g128)"
    )
    parser.add_argument("--kv", default=",".join(KV_FORMATS), help=f"formats of caches (default: {','.join(KV_FORMATS)})")
    parser.add_argument("--points", default="1x4096,16x4096,64x4096", help="batches and contexts (default: 1x4096,16x4096,64x4096)")
    parser.add_argument("--layers", type=int, default=MODEL["num_hidden_layers"], help="of the model (default: 32)")
    parser.add_argument("--parts", default="", help=f"what products do themselves in a second step: any of {','.join(PARTS)}, or {NONE}")
    parser.add_argument("--peers", type=Path, help="the folder of the peer harness, whose libraries are staged")
    parser.add_argument("--out", type=Path, default=ROWS / "step", help="folder of the rows, one file per device")
    options = parser.parse_args(arguments)
    target = detect_target(options.device)
    device = "cuda:0" if target.is_cuda else "cpu"
    points = [tuple(int(part) for part in point.split("x")) for point in options.points.split(",")]
    batches, room = sorted({batch for batch, _ in points}), max(context for _, context in points) + NEW
    formats = options.format.split(",")
    models = {format: compiled(format, options.layers, device, batches, room) for format in formats}
    variants = {format: {OURS: model.tilebit_steps} for format, model in models.items()}
    if options.parts:
        asked = () if options.parts == NONE else tuple(options.parts.split(","))
        for format, model in models.items():
            variants[format][PARTED] = DecodeSteps(model, batches, room, asked)
    first = models[formats[0]]
    peers: dict[str, PeerStep] = {}
    if options.peers is not None:
        sys.path.insert(0, str(options.peers))
        harness: Any = __import__("gemm_peers")
        for library in ("_C.abi3.so", "_vllm_fa3_C.abi3.so"):
            __import__("common").load_so(library)
        peers = peer_steps(first, device, harness)
    in_steps = any(r.dependent and r.measured_on(target) for r in user_records())
    common = {**process_fields(target), "op": "step", "tuned": "step" if in_steps else "", "layers": options.layers}
    path = options.out / f"{file_stem(target.name)}.jsonl"
    for batch, context in points:
        ready, of = Ready(), Content.of(first.config, batch, context, device)
        try:
            for format, model in models.items():
                make_ready(ready, of, model, format, options.kv.split(","), variants[format])
            if peers:
                make_peers_ready(ready, of, first, peers, formats[0])
            ready.checked()
            found = measured(ready, device)
        except (ValueError, torch.OutOfMemoryError) as error:
            print(f"batch {batch}, context {context}: {error}", flush=True)
        else:
            done = {(impl, f): ",".join(parts_of(s.step.products, batch)) for f, own in variants.items() for impl, s in own.items()}
            place = {"batch": batch, "kv_len": context}
            write_rows(path, [{**common, **place, **row, "parts": done.get((row["impl"], row["format"]), "")} for row in found])
            times = "  ".join(f"{r['impl']} {r['format']} {r['kv_format']} {r['us']} ({r['graph_us']})" for r in found)
            print(f"batch {batch}, context {context} {times} us", flush=True)
        del ready, of
        _emptied()  # the last point's caches and graphs, before the next


def compiled(format: str, layers: int, device: str, batches: list[int], room: int) -> Any:
    """The model with weights of ``format``, compiled for ``batches`` rows of at most ``room`` tokens."""
    start = time.perf_counter()
    model = made_model(format, layers, device)
    made = time.perf_counter()
    tilebit.transformers.compile(model, batches, room)
    tilebit.prepare(model, batches)
    print(
        f"{format}: made and quantized in {made - start:.1f} s, compiled for {batches} rows in {time.perf_counter() - made:.1f} s",
        flush=True,
    )
    return model


if __name__ == "__main__":
    main()
