"""The gate in front of every measurement of an attention kernel: is it right?

Outputs are NaN-poisoned between guard bands, and two runs on the same input must give the same bits
(``AttentionGate`` says when they need not). What is checked, on a problem of edges and on a random
one of the workload's size:

- decode, prefill: each sequence's relative error against fp64, at most twice that of torch in the same precision on the same values;
- gather: every row equal to the cache's fp32 value rounded once;
- append, pack: pages and windows equal, bit for bit, to those of the numpy twin (``layouts/kv_quantize.py``). With a rotary embedding the
  rotated keys may be rounded differently: then the values that the cache means are compared. Each number of a turned query is fp64's,
  rounded once, but for what fp32 leaves of a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ...layouts.kv import RESIDUAL, KVLayout
from ...layouts.kv_formats import KVFormat
from ...layouts.kv_quantize import dequantize_group, quantize_group
from ...layouts.kv_quantize import unpack_pages as unpack_groups
from ...schedules.attention.workload import AttentionWorkload
from ...tiles.attention.reference import normalize, rotate
from ...tiles.attention.unpacked import unpack_pages
from . import Verdict
from .attention import AttentionProblem, edge_attention, exact_attention, random_attention, torch_attention
from .verify import TORCH_FACTOR, GuardedOutput, check_guards, guarded_output

LSE_ERROR = 2.0**-9  # absolute; a rounding of queries or of a scale in 16 bits moves a score by about as much
ONE_FLIP_OF = 2048  # keys that were rounded the other way
ROTARY_ERROR = 1e-3  # relative, of a sequence's keys: few codes change when a key is rounded the other way
MOST_GROUPS = 512  # packed groups that are compared with the twin's: that many, evenly spread, where there are more

Outputs = dict[str, Tensor]
Run = Callable[[AttentionProblem, Outputs], None]


class AttentionGate:
    """The references of one workload, computed once, and the verdict on any number of kernels for
    it.

    ``verify`` takes ``run(problem, outputs)``, which launches the kernel on
    ``problem.named(outputs)``. ``reproducible``: two runs on the same input must give the same
    bits. False is for a call with a part that is not ours and whose last bits vary: each of the two
    runs must then pass by itself, and ``Verdict.rel_err`` is that of the worse one."""

    def __init__(self, edges: AttentionProblem, random: AttentionProblem, *, reproducible: bool = True) -> None:
        self.random, self.reproducible = random, reproducible
        self._checks = [("edges", _check_of(edges)), (random.workload.title, _check_of(random))]

    def verify(self, run: Run) -> Verdict:
        rel_err = None
        for name, check in self._checks:
            first, second = (_run(run, check.problem) for _ in range(2))
            reasons, rel_err = _judged(check, first)
            if not self.reproducible and not reasons:
                reasons, again = _judged(check, second)
                rel_err = max(rel_err, again)
            elif not reasons and not all(_same_bits(first[output].y, second[output].y) for output in first):
                reasons = ["two runs on the same input differ."]
            if reasons:
                return Verdict(tuple(f"{name}: {reason}" for reason in reasons))
        return Verdict((), rel_err)


def gate(workload: AttentionWorkload, seed: int, arch: str, device: str) -> AttentionGate:
    """The gate of the operations on a cache, whose packing is the same on every ``arch``."""
    del arch
    return AttentionGate(edge_attention(workload, seed, device), random_attention(workload, seed, device))


def sequence_errors(out: Tensor, expected: Tensor, rows: Sequence[int]) -> Tensor:
    """fp64 [sequences]: the relative Frobenius error of each sequence's ``rows[b]`` rows of ``out``
    [sum(rows), ..]; inf where it holds NaN or inf. A sequence whose reference is all zero counts
    its absolute error; one without rows has none."""
    pairs = zip(out.double().split(list(rows)), expected.double().split(list(rows)), strict=True)
    norms = torch.tensor([[float((a - b).norm()), float(b.norm())] for a, b in pairs], dtype=torch.float64).view(-1, 2)
    errors = norms[:, 0] / torch.where(norms[:, 1] > 0, norms[:, 1], 1.0)
    return torch.where(errors.isfinite(), errors, torch.inf)


class _Attended:
    """What "decode" and "prefill" return, against fp64 and against torch."""

    def __init__(self, problem: AttentionProblem) -> None:
        self.problem = problem
        self._exact, self._exact_lse = problem.attended(exact_attention)
        theirs, their_lse = problem.attended(torch_attention)
        self._rows = [1] * len(self._exact) if problem.workload.op == "decode" else problem.operands["cu_q"].diff().tolist()
        rounding = torch.finfo(getattr(torch, problem.workload.dtype)).eps / 4
        self._theirs = sequence_errors(theirs, self._exact, self._rows)
        self._allowed = TORCH_FACTOR * self._theirs.clamp(min=rounding)
        self._allowed_lse = TORCH_FACTOR * max(LSE_ERROR, _largest_difference(their_lse, self._exact_lse))

    def verdict(self, outputs: Outputs) -> tuple[list[str], float]:
        errors, reasons = sequence_errors(outputs["out"], self._exact, self._rows), []
        if not bool((errors <= self._allowed).all()):
            worst = int((errors / self._allowed).argmax())
            length = self.problem.lengths[worst]
            reasons.append(
                f"sequence {worst} of {len(errors)} (length {length}) has a relative error of {errors[worst]:.3g}; "
                f"accepted: {self._allowed[worst]:.3g} (torch's is {self._theirs[worst]:.3g})."
            )
        if "lse" in outputs and not (wrong := _largest_difference(outputs["lse"], self._exact_lse)) <= self._allowed_lse:
            reasons.append(f"the log-sum-exp is off by {wrong:.3g}; accepted: {self._allowed_lse:.3g}.")
        return reasons, float(errors.max()) if len(errors) else 0.0


class _Gathered:
    """The rows of a cache: fp32 values rounded once."""

    def __init__(self, problem: AttentionProblem) -> None:
        self.problem = problem
        dtype, cache = getattr(torch, problem.workload.dtype), problem.cache()
        self._expected = [torch.cat(rows).float().to(dtype) for rows in zip(*cache, strict=True)]

    def verdict(self, outputs: Outputs) -> tuple[list[str], float]:
        reasons = []
        for name, expected in zip(("out_k", "out_v"), self._expected, strict=True):
            got = outputs[name]
            if not torch.equal(got, expected):
                wrong = (got != expected).nonzero()
                token, head, channel = (int(v) for v in wrong[0])
                reasons.append(
                    f"{name}: {len(wrong)} of {got.numel()} elements are wrong; the first at [{token}, {head}, {channel}] is "
                    f"{got[token, head, channel].item()} and should be {expected[token, head, channel].item()}."
                )
        return reasons, 0.0


class _Appended:
    """A cache after an append, or a layer of one after a pack, group by group against the twin, and
    nothing else changed."""

    def __init__(self, problem: AttentionProblem) -> None:
        self.problem = problem
        w, o = problem.workload, problem.operands
        self._layout, self._dtype = w.layout, getattr(torch, w.dtype)
        starts = o["cu_seqlens"].tolist() if w.op == "append" else [0] * (len(problem.lengths) + 1)
        self._rows = [end - start for start, end in pairwise(starts)]
        self._before = {name: o[name].clone() for name in ("pages", "windows")}
        window = KVLayout(KVFormat(), w.head_dim, RESIDUAL)
        self._turned = _turned_queries(problem) if w.queries else None
        self._recent: list[tuple[Tensor, Tensor]] = []  # of each sequence: its rows from the last whole group before the call on
        for b, (length, slot) in enumerate(zip(problem.lengths, o["slots"].tolist(), strict=True)):
            waiting = length - self._rows[b] - self._groups(b).start * RESIDUAL
            k, v = (rows[:waiting] for rows in unpack_pages(o["windows"][slot : slot + 1], window, self._dtype))
            if w.op == "append":
                new = [o[name][starts[b] : starts[b + 1]].double() for name in ("k", "v")]
                new[0] = turned(problem, new[0], torch.arange(length - self._rows[b], length, device=new[0].device), "k_norm")
                k, v = (torch.cat((a, b.to(self._dtype).double())) for a, b in zip((k, v), new, strict=True))
            self._recent.append((k, v))

    def _groups(self, b: int) -> range:
        """The groups of sequence ``b`` that the call packs; the first is that of its window before it."""
        w, length = self.problem.workload, self.problem.lengths[b]
        if w.op == "pack" or w.full_windows:  # of an append that packs nothing
            first = max(length - 1, 0) // RESIDUAL
            return range(first, length // RESIDUAL if w.op == "pack" else first)
        return range((length - self._rows[b]) // RESIDUAL, length // RESIDUAL)

    def verdict(self, outputs: Outputs) -> tuple[list[str], float]:
        o, problem, reasons = self.problem.operands, self.problem, []
        pages, windows = outputs["pages"], outputs.get("windows", o["windows"])
        written, finished = set(), []
        for b, table in enumerate(o["block_tables"].tolist()):
            groups = self._groups(b)
            size = self._layout.page_size
            written |= {
                table[token // size] for group in groups for token in range(group * RESIDUAL, (group + 1) * RESIDUAL, min(size, RESIDUAL))
            }
            finished += [(b, head, group) for group in groups for head in range(problem.workload.heads_kv)]
            reasons += self._window_reasons(b, windows)
        step = max(1, len(finished) // MOST_GROUPS)
        reasons += [reason for where in finished[::step] for reason in self._group_reasons(where, pages)]
        kept = torch.ones(len(pages), dtype=torch.bool)
        kept[list(written)] = False
        if not torch.equal(pages[kept], self._before["pages"][kept]):
            reasons.append("pages that hold none of the new groups were changed.")
        unused = torch.ones(len(windows), dtype=torch.bool)
        unused[o["slots"].long().cpu()] = False
        if not torch.equal(windows[unused], self._before["windows"][unused]):
            reasons.append("windows of other sequences were changed.")
        if self._turned is not None:
            reasons += self._query_reasons(outputs["out"].double(), *self._turned)
        return reasons[:4], 0.0

    def _query_reasons(self, got: Tensor, expected: Tensor, accepted: Tensor) -> list[str]:
        wrong = ~((got - expected).abs() <= accepted)
        if not bool(wrong.any()):
            return []
        token, head, channel = (int(i) for i in wrong.nonzero()[0])
        return [
            f"out: {int(wrong.sum())} of {wrong.numel()} numbers of turned queries are wrong; the first at [{token}, {head}, {channel}] is "
            f"{got[token, head, channel].item()} and should be {expected[token, head, channel].item()}."
        ]

    def _window_reasons(self, b: int, windows: Tensor) -> list[str]:
        slot, left = int(self.problem.operands["slots"][b]), self.problem.lengths[b] - self._groups(b).stop * RESIDUAL
        got = unpack_pages(windows[slot : slot + 1], KVLayout(KVFormat(), self._layout.head_dim, RESIDUAL), self._dtype)
        reasons = []
        for name, a, rows in zip(("keys", "values"), got, self._recent[b], strict=True):
            expected = rows[len(rows) - left :]
            if not self._same(name, a[:left], expected):
                reasons.append(f"the {name} of sequence {b}'s window ({left} tokens of {self.problem.lengths[b]}) are wrong.")
        return reasons

    def _group_reasons(self, where: tuple[int, int, int], pages: Tensor) -> list[str]:
        """Compare a group, ``where`` = (sequence, kv head, group), with what the twin makes of its
        rows; the one before it in a page of two groups must be as it was."""
        w, o, layout, (b, head, group) = self.problem.workload, self.problem.operands, self._layout, where
        first = group * RESIDUAL // layout.page_size
        ids = o["block_tables"][b, first : first + max(1, RESIDUAL // layout.page_size)].long()
        place = group % max(1, layout.page_size // RESIDUAL)
        got = unpack_groups(pages[ids, head].cpu().numpy(), layout, place + 1)
        at = (group - self._groups(b).start) * RESIDUAL
        k, v = (rows[at : at + RESIDUAL, head].float().cpu().numpy() for rows in self._recent[b])
        key_scale, value_scale = o["head_scales"][:, head].tolist() if "head_scales" in o else (1.0, 1.0)
        scales = (key_scale, value_scale)
        expected = quantize_group(k, v, w.format, w.dtype, scales)
        named = f"sequence {b}, kv head {head}, tokens from {group * RESIDUAL}"
        meant = [dequantize_group(g, w.format, w.dtype, scales) for g in (got[place], expected)]
        equal = [
            np.array_equal(got[place].keys, expected.keys) and _same_numbers(got[place].key_parameters, expected.key_parameters),
            np.array_equal(got[place].values, expected.values) and _same_numbers(got[place].value_parameters, expected.value_parameters),
        ]
        if w.rotary or w.qk_norm:
            equal[0] = self._same("keys", *(torch.from_numpy(keys) for keys, _ in meant), flips=len(expected.keys.ravel()) // ONE_FLIP_OF)
        reasons = [
            f"packed {name} of {named} are not the twin's." for name, same in zip(("keys", "values"), equal, strict=True) if not same
        ]
        if place and at == 0:  # the page's first group was there before the call
            before = unpack_groups(self._before["pages"][ids, head].cpu().numpy(), layout, 1)[0]
            if not (np.array_equal(before.keys, got[0].keys) and np.array_equal(before.values, got[0].values)):
                reasons.append(f"the group before {named} was changed.")
        return reasons

    def _same(self, name: str, got: Tensor, expected: Tensor, flips: int = 0) -> bool:
        """``flips``: how many numbers may have the code beside their own, whose difference is large."""
        w = self.problem.workload
        if name == "values" or not (w.rotary or w.qk_norm):
            return torch.equal(got, expected)
        differences = (got - expected).abs().flatten().sort().values
        within = float(differences[: differences.numel() - flips].norm()) <= ROTARY_ERROR * float(expected.norm())
        return within and (not flips or float(differences[-1]) <= float(expected.max() - expected.min()))


class _Packed:
    """The layers of a cache after a pack, one by one."""

    def __init__(self, problem: AttentionProblem) -> None:
        self.problem, o = problem, problem.operands
        names = [name for name in ("pages", "windows", "head_scales") if name in o]
        layers = zip(*(o[name] for name in names), strict=True)
        self._layers = [_Appended(replace(problem, operands=o | dict(zip(names, layer, strict=True)))) for layer in layers]

    def verdict(self, outputs: Outputs) -> tuple[list[str], float]:
        found = [layer.verdict({"pages": pages})[0] for layer, pages in zip(self._layers, outputs["pages"], strict=True)]
        return [f"layer {i}: {reason}" for i, reasons in enumerate(found) for reason in reasons][:4], 0.0


_Check = _Attended | _Gathered | _Appended | _Packed


def _judged(check: _Check, run: dict[str, GuardedOutput]) -> tuple[list[str], float]:
    """What is wrong with the outputs of one run and their guard bands, and the largest relative
    error."""
    reasons = [f"{output}: {reason}" for output, guarded in run.items() for reason in check_guards(guarded)]
    wrong, rel_err = check.verdict({output: guarded.y for output, guarded in run.items()})
    return reasons + wrong, rel_err


def _check_of(problem: AttentionProblem) -> _Check:
    return {"append": _Appended, "pack": _Packed, "gather": _Gathered}.get(problem.workload.op, _Attended)(problem)


def turned(problem: AttentionProblem, rows: Tensor, positions: Tensor, norm: str) -> Tensor:
    """``rows`` of an append's queries or keys in fp64, normalized by its weights ``norm`` and turned
    as it asks."""
    w, o = problem.workload, problem.operands
    rows = normalize(rows, o[norm], w.norm_eps, w.norm_offset) if w.qk_norm else rows.double()
    return rotate(rows, positions, o["cos_sin"], w.rotary) if w.rotary else rows


def _turned_queries(problem: AttentionProblem) -> tuple[Tensor, Tensor]:
    """(the turned queries in fp64, how far each number may be from its own): half a step of the
    dtype, and what fp32 may lose of the difference of two products."""
    w, o = problem.workload, problem.operands
    counts, q = o["cu_seqlens"].diff().tolist(), o["q"]
    firsts = [length - count for length, count in zip(problem.lengths, counts, strict=True)]
    runs = [torch.arange(first, first + count, device=q.device) for first, count in zip(firsts, counts, strict=True)]
    positions = torch.cat(runs) if runs else torch.arange(0, device=q.device)
    expected, number = turned(problem, q, positions, "q_norm"), torch.finfo(q.dtype)
    largest = normalize(q, o["q_norm"], w.norm_eps, w.norm_offset) if w.qk_norm else q.double()
    lost = largest.abs().amax(-1, keepdim=True) * 2.0**-21
    return expected, (expected.abs() + lost).clamp(min=number.smallest_normal) * number.eps / 2 + lost


def _largest_difference(a: Tensor, b: Tensor) -> float:
    """Of two log-sum-exps, where equal infinities do not differ; inf for NaN."""
    difference = torch.where(a == b, 0.0, (a.double() - b.double()).abs())
    return float(difference.nan_to_num(nan=torch.inf).max()) if difference.numel() else 0.0


def _same_numbers(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bits, but for the payload of NaNs and the sign of zeros."""
    return np.array_equal(a, b, equal_nan=True)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    bits = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.view(bits), b.view(bits))


def _run(run: Run, problem: AttentionProblem) -> dict[str, GuardedOutput]:
    """The outputs of one run, in poisoned memory between guard bands; what the kernel changes in
    place holds the state before it."""
    outputs = {name: guarded_output(shape, dtype, problem.device) for name, (shape, dtype) in problem.written.items()}
    for name, guarded in outputs.items():
        if name in problem.operands:
            guarded.y.copy_(problem.operands[name])
    run(problem, {name: guarded.y for name, guarded in outputs.items()})
    if problem.device.type == "cuda":
        torch.cuda.synchronize(problem.device)
    return outputs
