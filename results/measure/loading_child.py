"""The process that ``results.measure.loading`` starts for each case: loads a model, generates, and
prints what it took as a line of JSON."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from tilebit import packs
from tilebit.transformers import TilebitCache, TilebitConfig, compile
from tilebit.transformers.cache import cache_bytes
from tilebit.transformers.opening import open_model

MARK = "measured: "


class Clock(BaseStreamer):
    """When the prompt and each new token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


class Peak:
    """Bytes that a device or, of a CPU, this process held at most since ``start``, above what it held then."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.before = device, 0

    def start(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to VmRSS
        self.before = self._held("VmRSS")

    @property
    def bytes(self) -> int:
        return self._held("VmHWM") - self.before

    def _held(self, field: str) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1]) << 10


def measured(case: dict[str, Any]) -> dict[str, Any]:
    """What loading ``directory``, a prompt and ``new_tokens`` tokens take; ``kv_format`` None: as transformers runs it."""
    device = torch.device(case["device"])
    if device.type == "cuda":
        torch.zeros(1, device=device)  # the context is not the model's
    loading, running, clock = Peak(device), Peak(device), Clock()
    loading.start()
    start = time.perf_counter()
    if case["pack"] is not None:
        packs.load(case["pack"])
    quantization = None if case["quantize"] is None else TilebitConfig(case["quantize"])
    model = open_model(Path(case["directory"]), quantization, getattr(torch, case["dtype"]), device)
    loaded, load_peak = time.perf_counter(), loading.bytes
    running.start()
    prompt, new = case["prompt_tokens"], case["new_tokens"]
    cache: Any = DynamicCache(config=model.config)
    if case["kv_format"] is not None:
        cache = TilebitCache(model.config, format=case["kv_format"], max_tokens=prompt + new, sequences=1)
        model.set_attn_implementation("tilebit")
        compile(model, (1,), prompt + new)
    ids = torch.randint(2, model.config.vocab_size, (1, prompt), generator=torch.Generator().manual_seed(0)).to(device)
    asked: dict[str, Any] = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new, "attention_mask": torch.ones_like(ids)}
    model.generate(ids, past_key_values=cache, streamer=clock, **asked)  # pyright: ignore[reportCallIssue]
    _, first, second, *_ = clock.times
    return {
        "load_s": loaded - start, "first_token_s": first - start, "second_token_s": second - start, "load_peak_bytes": load_peak,
        "run_peak_bytes": loading.bytes if device.type == "cuda" else running.bytes + running.before - loading.before,
        "weight_bytes": model.get_memory_footprint(), "cache_bytes": cache_bytes(cache),
    }  # fmt: skip


if __name__ == "__main__":
    print(MARK + json.dumps(measured(json.loads(sys.argv[1]))))
