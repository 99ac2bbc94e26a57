"""Problems of attention over a low-bit cache: operands made on the device, as the kernels read
them, and the answers they must give.

Packed pages are random words (random words are random codes) with parameters that make their values
about N(0, 1), windows are normal, tables are a random permutation of the pages: a cache of any size
is made on its device in one pass. Table entries that no kernel may read are -1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...layouts.kv import RESIDUAL, KVLayout
from ...layouts.kv_formats import KVFormat
from ...schedules.attention.workload import AttentionWorkload
from ...tiles.attention import reference
from ...tiles.attention.unpacked import random_pages, unpack_cache

LAYERS = 2  # of a cache whose windows are packed
SPARE_PAGES = 2  # of a pool that no sequence owns
CHUNK_SCORES = 1 << 27  # computed at once for a reference (1 GiB in fp64)
ROTARY_BASE = 10000.0
Attended = tuple[Tensor, Tensor]  # out, log-sum-exp
Attention = Callable[[Tensor, Tensor, Tensor, AttentionWorkload, "Tensor | None"], Attended]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionProblem:
    """One call of an attention kernel with its operands on a device.

    ``operands`` are what the kernel reads, by the names of its parameters; ``written`` what it
    writes: (shape, dtype) of each output. "append" changes ``pages`` and ``windows`` in place, "pack"
    ``pages``: they are among both, and ``operands`` holds their state before the call."""

    workload: AttentionWorkload
    operands: dict[str, Tensor]
    written: dict[str, tuple[tuple[int, ...], torch.dtype]]

    @property
    def device(self) -> torch.device:
        return self.operands["lengths" if "lengths" in self.operands else "cu_q"].device

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence, those of this call included."""
        o = self.operands
        return (o["lengths"] if "lengths" in o else o["cu_kv"].diff()).tolist()

    @property
    def bytes(self) -> int:
        """Of all operands."""
        return sum(tensor.nbytes for tensor in self.operands.values())

    def named(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a call that writes to ``outputs``, by the names of a kernel's parameters."""
        return {**self.operands, **outputs}

    def outputs(self) -> dict[str, Tensor]:
        """New tensors to write to, by name; those that a call changes in place hold the state
        before it."""
        return {
            name: self.operands[name].clone() if name in self.operands else torch.empty(shape, dtype=dtype, device=self.device)
            for name, (shape, dtype) in self.written.items()
        }

    def copied(self) -> AttentionProblem:
        """The same problem in other memory: rotating over copies keeps caches from holding the
        operands."""
        return replace(self, operands={name: _copied(tensor) for name, tensor in self.operands.items()})

    def cache(self) -> list[tuple[Tensor, Tensor]]:
        """(k, v) of each sequence in fp64, [length, heads_kv, head_dim], as the cache means them."""
        o, w = self.operands, self.workload
        dtype, tables = getattr(torch, w.dtype), o["block_tables"]
        return unpack_cache(
            o["pages"], o["windows"], tables, o["slots"], o["lengths"], w.layout, dtype, o.get("head_scales"), w.full_windows
        )

    def attended(self, attention: Attention) -> Attended:
        """What a "decode" or "prefill" call returns, computed by ``attention`` sequence by sequence
        and in chunks of rows: out like q, and lse [.., heads_q], in fp64 or whatever ``attention``
        returns."""
        o, w = self.operands, self.workload
        if w.op == "decode":
            sequences = [(q, k, v) for q, (k, v) in zip(o["q"], self.cache(), strict=True)]
        else:
            rows, tokens = o["cu_q"].tolist(), o["cu_kv"].tolist()
            sequences = [
                (o["q"][rows[b] : rows[b + 1]], o["k"][tokens[b] : tokens[b + 1]], o["v"][tokens[b] : tokens[b + 1]])
                for b in range(len(rows) - 1)
            ]
        parts = [_in_chunks(attention, *sequence, w, o.get("sinks")) for sequence in sequences]
        join = torch.stack if w.op == "decode" else torch.cat
        return join([out for out, _ in parts]), join([lse for _, lse in parts])


def exact_attention(q: Tensor, k: Tensor, v: Tensor, w: AttentionWorkload, sinks: Tensor | None) -> Attended:
    """The reference in fp64 (``tiles/attention/reference.py``): q [rows, heads_q, head_dim], k and
    v [length, heads_kv, head_dim]."""
    return reference.attend(q, k, v, w.softmax_scale, w.window, w.sink_tokens, sinks, w.soft_cap)


def torch_attention(q: Tensor, k: Tensor, v: Tensor, w: AttentionWorkload, sinks: Tensor | None) -> Attended:
    """The same as torch computes it in the workload's dtype, on keys and values rounded to it:
    ``scaled_dot_product_attention``, or with a soft cap, which that does not have, products and a
    softmax in that dtype."""
    dtype, rows, length = q.dtype, len(q), len(k)
    columns = q.unflatten(1, (w.heads_kv, w.group)).permute(1, 2, 0, 3).flatten(1, 2)  # [heads_kv, group * rows, head_dim]
    keys, values = (x.to(dtype).transpose(0, 1) for x in (k, v))
    seen = reference.visible(rows, length, w.window, w.sink_tokens).to(q.device).repeat(w.group, 1)
    bias = torch.zeros(w.heads_kv, w.group * rows, length, dtype=dtype, device=q.device).masked_fill(~seen, -torch.inf)
    if sinks is not None:  # one more key, of zeros: its score is the sink
        column = sinks.to(dtype).view(w.heads_kv, w.group, 1, 1).expand(-1, -1, rows, 1).flatten(1, 2)
        bias = torch.cat((bias, column), dim=2)
        keys, values = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (keys, values))
    scores = columns @ keys.transpose(1, 2) * w.softmax_scale
    scores = (w.soft_cap * torch.tanh(scores / w.soft_cap) if w.soft_cap else scores) + bias
    if w.soft_cap:
        out = scores.softmax(dim=2) @ values
    else:
        attend = torch.nn.functional.scaled_dot_product_attention
        out = attend(columns[None], keys[None], values[None], attn_mask=bias[None], scale=w.softmax_scale)[0]
    out = out.masked_fill((bias == -torch.inf).all(2, keepdim=True), 0.0)  # a softmax over nothing is NaN

    def by_row(x: Tensor) -> Tensor:
        return x.unflatten(1, (w.group, rows)).permute(2, 0, 1, *range(3, x.dim() + 1)).flatten(1, 2)

    return by_row(out), by_row(scores.float().logsumexp(dim=2))


def _in_chunks(attention: Attention, q: Tensor, k: Tensor, v: Tensor, w: AttentionWorkload, sinks: Tensor | None) -> Attended:
    """Rows of queries a chunk at a time, each with the tokens up to its last: they are the newest
    of those."""
    rows, length = len(q), len(k)
    step = max(1, CHUNK_SCORES // max(1, length * w.heads_q))
    parts = []
    for first in range(0, rows, step):
        last = min(first + step, rows)
        end = max(0, length - rows + last)
        parts.append(attention(q[first:last], k[:end], v[:end], w, sinks))
    if not parts:
        return q, q.new_zeros(q.shape[:2], dtype=torch.float32)
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def random_attention(workload: AttentionWorkload, seed: int, device: str = "cpu") -> AttentionProblem:
    """``batch`` sequences of ``kv_len`` tokens and ``q_len`` new rows, slightly ragged."""
    w, host = workload, torch.Generator().manual_seed(seed)
    ragged = min(RESIDUAL - 1, w.kv_len // 8)
    less = torch.randint(0, ragged + 1, (w.batch,), generator=host).tolist()
    lengths = [max(w.kv_len - (cut if b else 0), min(w.q_len, w.kv_len)) for b, cut in enumerate(less)]
    rows = [
        min(length, w.q_len - (cut * w.q_len // max(8 * ragged, 1) if b else 0))
        for b, (length, cut) in enumerate(zip(lengths, less, strict=True))
    ]
    return attention_problem(w, lengths, rows, seed, device)


def edge_attention(workload: AttentionWorkload, seed: int, device: str = "cpu") -> AttentionProblem:
    """A small problem of the lengths at which kernels go wrong (nothing, the window's and the
    page's borders) and another q_len than the workload's: kernels take any."""
    page = workload.page_size
    lengths = sorted({0, 1, RESIDUAL - 1, RESIDUAL, RESIDUAL + 1, page - 1, page + 1, 2 * page, 3 * RESIDUAL + 41})
    rows = [(0, 1, RESIDUAL + 2, RESIDUAL - 1, 7)[b % 5] for b in range(len(lengths))]
    if workload.full_windows and workload.op == "append":
        rows = [int(length % 5 != 0) for length in lengths]  # one token a sequence, or none
    workload = replace(workload, batch=len(lengths), q_len=workload.q_len + 1 if workload.op == "decode" else max(rows), kv_len=lengths[-1])
    return attention_problem(workload, lengths, [min(pair) for pair in zip(lengths, rows, strict=True)], seed, device)


def attention_problem(
    workload: AttentionWorkload, lengths: Sequence[int], rows: Sequence[int], seed: int, device: str = "cpu"
) -> AttentionProblem:
    """A random problem of one sequence for each of ``lengths`` (tokens after the call); ``rows``
    are each sequence's new rows ("append") or queries ("prefill"; "decode" has ``workload.q_len``
    queries for each)."""
    w, generator = workload, torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, w.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    operands: dict[str, Tensor] = {} if w.op == "prefill" else _cache(w, lengths, seed, generator)
    if w.op != "prefill":
        operands["lengths"] = ints(lengths)
    if w.sinks:
        operands["sinks"] = torch.randn(w.heads_q, generator=generator, device=device)
    total, new = sum(lengths), sum(rows)
    written: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    if w.op == "decode":
        operands["q"] = normal(len(lengths), w.q_len, w.heads_q, w.head_dim)
    elif w.op == "append":
        if w.queries:  # slices of one product, as a fused projection gives them
            q, k, v = normal(new, w.heads_q + 2 * w.heads_kv, w.head_dim).split((w.heads_q, w.heads_kv, w.heads_kv), dim=1)
            operands |= {"q": q, "k": k, "v": v}
        else:
            operands |= {"k": normal(new, w.heads_kv, w.head_dim), "v": normal(new, w.heads_kv, w.head_dim)}
        operands["cu_seqlens"] = ints(_starts(rows))
        if w.rotary:
            operands["cos_sin"] = _rotary_table(max(lengths, default=1), w.turned_channels).to(device)
        if w.qk_norm:
            operands |= {name: (1 + normal(w.head_dim) / 4).to(dtype) for name in ("q_norm", "k_norm")}
        written = {name: (tuple(operands[name].shape), torch.int32) for name in ("pages", "windows")}
    elif w.op == "pack":
        others = [_cache(w, lengths, seed + layer, generator) for layer in range(1, LAYERS)]
        for name in ("pages", "windows", *(["head_scales"] if w.format.has_head_scales else [])):
            operands[name] = torch.stack([operands[name], *(other[name] for other in others)])
        written = {"pages": (tuple(operands["pages"].shape), torch.int32)}
    elif w.op == "gather":
        operands["cu_kv"] = ints(_starts(lengths))
        written = {name: ((total, w.heads_kv, w.head_dim), dtype) for name in ("out_k", "out_v")}
    else:
        operands |= {"q": normal(new, w.heads_q, w.head_dim), "k": normal(total, w.heads_kv, w.head_dim)}
        operands |= {"v": normal(total, w.heads_kv, w.head_dim), "cu_q": ints(_starts(rows)), "cu_kv": ints(_starts(lengths))}
    if "q" in operands:
        written["out"] = (tuple(operands["q"].shape), dtype)
        if w.lse:
            written["lse"] = (tuple(operands["q"].shape[:-1]), torch.float32)
    return AttentionProblem(w, operands, written)


def _cache(w: AttentionWorkload, lengths: Sequence[int], seed: int, generator: torch.Generator) -> dict[str, Tensor]:
    """A random cache that holds ``lengths`` tokens of each sequence, its pages and slots in random
    order."""
    dtype, host = getattr(torch, w.dtype), torch.Generator().manual_seed(seed)
    counts = [-(-(length // RESIDUAL * RESIDUAL) // w.page_size) for length in lengths]
    num_pages, batch = sum(counts) + SPARE_PAGES, len(lengths)
    order = torch.randperm(num_pages, generator=host).tolist()
    tables = torch.full((batch, max(1, max(counts, default=0))), -1, dtype=torch.int32)
    for b, count in enumerate(counts):
        tables[b, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    slots = torch.randperm(batch + 1, generator=host)[:batch].to(torch.int32)
    found = {
        "pages": random_pages(num_pages, w.heads_kv, w.layout, dtype, generator),
        "windows": random_pages(batch + 1, w.heads_kv, KVLayout(KVFormat(), w.head_dim, RESIDUAL), dtype, generator),
        "block_tables": tables.to(generator.device),
        "slots": slots.to(generator.device),
    }
    if w.format.has_head_scales:
        found["head_scales"] = 0.5 + torch.rand(2, w.heads_kv, generator=generator, device=generator.device)
    return found


def _copied(tensor: Tensor) -> Tensor:
    """The same numbers in other memory, rows as far apart."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _rotary_table(positions: int, dim: int) -> Tensor:
    """fp32 [positions, dim]: cosines, then sines, of each position's dim / 2 angles."""
    angles = torch.arange(positions)[:, None] * ROTARY_BASE ** (-torch.arange(0, dim, 2) / dim)
    return torch.cat((angles.cos(), angles.sin()), dim=1).float()


def _starts(counts: Sequence[int]) -> list[int]:
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return starts
