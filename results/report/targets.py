"""The speed that was asked for, as a table: what is compared with what, at which points, by which figure,
how much is asked and what is aimed at. ``target_times.py`` reads the rows, ``target_found.py`` computes
each target from them, ``targets_page.py`` writes the page.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Where = tuple[int, ...]  # n and k of a product, or the tokens of a step's cache or of a prompt
FAST, LONG, TAKES = "times as fast", "times as long", "ms"  # the first at least what is asked, the others at most

H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
SHAPES: tuple[Where, ...] = ((4096, 4096), (6144, 4096), (4096, 14336), (10240, 8192), (28672, 4096), (8192, 28672), (57344, 8192))
MS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 512, 1024, 4096)
FEW, BETWEEN, MANY = MS[:7], MS[7:11], MS[11:]  # rows of x: bytes decide, between, operations decide


@dataclass(frozen=True, slots=True)
class Others:
    """What ``name`` stands for: all of these series must have been timed at a point, and the fastest
    counts. ``m``: at this number of rows, in place of the point's own. ``elsewhere``: timed in another
    process, which ratios else never are."""

    name: str
    series: tuple[str, ...]
    m: int | None = None
    elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """One thing that is asked of the rows of ``study``: of the series ``ours`` beside ``against``, at
    every one of ``ms`` (rows of x, or sequences of a batch) of every one of ``where``.

    The geometric mean over all points of ``figure`` (``FAST``, ``LONG`` or ``TAKES``, which has nothing
    beside it) must keep ``asked``; with ``every`` each of them must. ``over``, one of ``OVER``, divides
    a ratio of times by the ratio that is expected. ``gpus`` are the devices whose rows are held against it.
    """

    study: str
    ours: str
    against: Others | None
    where: tuple[Where, ...]
    ms: tuple[int, ...]
    asked: float
    aim: float | None = None
    figure: str = FAST
    every: bool = False
    over: str = ""
    gpus: tuple[str, ...] = (H200, H100)


def mixed_bytes(where: Where, m: int) -> float:
    """How many times the bytes of a product with all channels in 4 bits one with a tenth of them in 8
    moves: codes, int8 x and 16-bit y."""
    n, k = where
    return (4.4 / 8 * n * k + m * (k + 2 * n)) / (4 / 8 * n * k + m * (k + 2 * n))


OVER = {"the ratio of bytes": mixed_bytes, "the ratio of operations": lambda where, m: 1.0}
W4A8 = Others(
    "fastest W4A8 kernel of others",
    ("humming w4a8_int8", "humming w4a8_fp8", "marlin w4a8_int8", "vllm w4a8_fp8", "vllm_best w4a8_fp8"),
)
W8A8_FP8 = Others("fastest fp8 W8A8 of others", ("vllm w8a8_fp8", "torch_row w8a8_fp8"))
W8A8_INT8 = Others("vLLM's int8 W8A8", ("vllm w8a8_int8",))
W4A16, CUBLAS = Others("tilebit W4A16", ("tilebit w4a16_g128",)), Others("cuBLAS, fp16", ("cublas fp16",))
LQQ, GROUPS = ("w4a8_lqq_g64", "w4a8_lqq_g128"), {"w8a8_g128": "w8a8_channel", "w4a8_g128_asym": "w4a8_lqq_g128"}
MIXED, BASE = "tilebit w4.4a8_g128", Others("w4a8_g128_asym", ("tilebit w4a8_g128_asym",))


def _int8(ours: str, against: Others, ms: tuple[int, ...], asked: float, aim: float | None = None, every: bool = False) -> Target:
    return Target("int8", f"tilebit {ours}", against, SHAPES, ms, asked, aim, every=every)


def _longer(ms: tuple[int, ...], asked: float, over: str) -> Target:
    return Target("int8", MIXED, BASE, SHAPES, ms, asked, figure=LONG, over=over)


INT8 = (
    *(
        target
        for name in LQQ
        for target in (
            _int8(name, W4A8, FEW, 1.25, 1.45),
            _int8(name, W4A8, BETWEEN, 1.10, 1.25),
            _int8(name, W4A8, MANY, 1.05, 1.15),
            _int8(name, W4A8, MS, 0.95, every=True),
            _int8(name, W4A16, MS[:5], 0.97),
            _int8(name, W4A16, (64,), 1.2),
            _int8(name, W4A16, MS[8:], 1.5),
            _int8(name, CUBLAS, MANY, 1.9),
            _int8(name, W8A8_INT8, MANY, 0.97),
        )
    ),
    *(
        target
        for name, base in GROUPS.items()
        for target in (
            _int8(name, Others(base, (f"tilebit {base}",)), MS[:8], 0.95),
            _int8(name, Others(base, (f"tilebit {base}",)), MANY, 0.80, 0.90),
            _int8(name, W4A16, MANY, 1.35),
        )
    ),
    _longer(FEW, 1.03, "the ratio of bytes"),
    _longer(MS[8:], 1.05, "the ratio of operations"),
    _int8("w8a8_fp8", W8A8_FP8, FEW, 1.05),
    _int8("w8a8_fp8", W8A8_FP8, MS[8:], 0.97),
)

AT_ONE_ROW = {3: (3.4, 4.2), 4: (2.8, 3.4), 5: (2.4, None), 6: (2.0, None), 7: (1.75, None), 8: (1.55, 1.8)}  # bits: asked, aim
AT_MORE = ((16, 2.0), (64, 1.3), (256, 0.9), (1024, 0.85), (4096, 0.9))  # rows of x, asked of every width


def _any(bits: int, against: Others, ms: tuple[int, ...], asked: float, aim: float | None = None, **more: Any) -> Target:
    return Target("any_precision", f"tilebit w{bits}a16_any", against, SHAPES, ms, asked, aim, **more)


def _cublas_beside(bits: int) -> Others:
    return Others("cuBLAS, fp16", (f"16 bits beside w{bits}a16_any",))


def _originals(bits: int) -> Others:
    return Others("Any-Precision LLM's kernel", (f"any_precision_llm w{bits}a16_any",), elsewhere=True)


ANY_PRECISION = (
    *(_any(bits, _cublas_beside(bits), (1,), asked, aim) for bits, (asked, aim) in AT_ONE_ROW.items()),
    *(_any(bits, _cublas_beside(bits), (m,), asked) for m, asked in AT_MORE for bits in AT_ONE_ROW),
    *(_any(less, Others(f"w{more}a16_any", (f"tilebit w{more}a16_any",)), (1,), 1.0, every=True) for less, more in pairwise(AT_ONE_ROW)),
    *(_any(bits, Others("itself at m = 1", (f"tilebit w{bits}a16_any",), m=1), (8,), 1.4, 1.15, figure=LONG) for bits in AT_ONE_ROW),
    *(_any(bits, _originals(bits), (1,), 1.5, gpus=(H200,)) for bits in AT_ONE_ROW),
)

OF_TILEBIT = "tilebit w4a16_g128 kv4_channel"
IN_16_BITS = Others("16 bits (cuBLAS, FA3)", ("cublas_fa3 fp16 kv16",))
OF_VLLM = Others("vLLM's kernels", ("vllm_kernels w4a16_g128 kv16",))
BATCHES = {1: (1.65, 1.38, 2.9), 16: (2.5, None, 2.8), 64: (5.4, None, 2.4)}  # ms of 4096 tokens: asked, aim; times as fast as 16 bits
PLACES = ((4096, 1), (4096, 16), (4096, 64), (32768, 1), (32768, 16))  # 64 x 32768 tokens in 16 bits are 275 GB


def _step(ours: str, against: Others | None, tokens: int, batch: int, asked: float, **more: Any) -> Target:
    return Target("step", ours, against, ((tokens,),), (batch,), asked, **more)


STEP = (
    *(_step(OF_TILEBIT, None, 4096, b, ms, aim=aim, figure=TAKES, gpus=(H200,)) for b, (ms, aim, _) in BATCHES.items()),
    *(_step(OF_TILEBIT, IN_16_BITS, tokens, b, BATCHES[b][2]) for tokens, b in PLACES),
    *(_step(OF_TILEBIT, OF_VLLM, tokens, b, 1.5) for tokens, b in PLACES),
    _step("tilebit w4a8_lqq_g128 kv4_channel", Others("w4a16_g128, the same cache", (OF_TILEBIT,)), 4096, 64, 1.0),
)

OF_A_PROMPT = {"w4a16_g128": 0.97, "w4a8_lqq_g128": 1.5}  # times as fast as 16 bits, for one prompt of 8192 tokens
FUSED = Others("16 bits, fused likewise", ("cublas fp16 kv4_channel",))
PROMPT = tuple(Target("prompt", f"tilebit {format} kv4_channel", FUSED, ((8192,),), (1,), asked) for format, asked in OF_A_PROMPT.items())

TARGETS = (*INT8, *ANY_PRECISION, *STEP, *PROMPT)
