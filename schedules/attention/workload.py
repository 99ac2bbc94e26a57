"""What is asked of attention over a low-bit KV cache: the problem a kernel is chosen, compiled and
measured for."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from ...layouts.kv import HEAD_DIMS, PAGE_SIZES, RESIDUAL, KVLayout
from ...layouts.kv_formats import KVFormat
from ..gemm.workload import DTYPES
from ..operands import Operand
from .operands import attention_operands

OPS = ("decode", "append", "pack", "gather", "prefill")
ROTARY = ("", "half", "interleaved")
Q_BUCKETS = (1, 2, 4, 8, 16)  # of q_len in decode: tokens of a sequence that attend at once
_OF_SCORES = {"window": 0, "sink_tokens": 0, "sinks": False, "soft_cap": 0.0, "scale": None, "lse": False}
ROTARY_STEP = 32  # of the channels that are turned
_NO_NORM: dict[str, Any] = {"norm_eps": 0.0, "norm_offset": 0.0}
_TURNING: dict[str, Any] = {"queries": False, "rotary_dim": 0, "qk_norm": False, **_NO_NORM}
# Fields that are absent from what was stored before there were any, and where they say nothing.
_LATER: dict[str, Any] = {**_TURNING, "full_windows": False}
_OF_APPEND: dict[str, Any] = {"rotary": "", **_TURNING}
MOST_WINDOW = 2**31 - 1  # kernels count tokens in 32 bits
LEAST, MOST = 2.0**-60, 2.0**60  # of the numbers that kernels multiply and divide by each other in fp32
MOST_BATCH, MOST_TOKENS = 1024, 1 << 20  # the largest buckets


@dataclass(frozen=True, slots=True)
class AttentionWorkload:
    """One operation on a paged KV cache of packed keys and values with a 16-bit residual window per
    sequence.

    ``op`` is "decode" (``q_len`` newest tokens of each sequence attend to its cache), "append"
    (``q_len`` new rows of k and v a sequence join the cache), "pack" (windows that are full go to
    their pages, in all layers), "gather" (the cache's rows, dequantized) or "prefill" (``q_len``
    query rows over ``kv_len`` 16-bit rows). ``batch`` sequences, ``kv_len`` tokens each with the new
    ones, and ``q_len`` only choose a schedule: kernels take any. ``heads_q`` query heads in groups
    over ``heads_kv`` heads of the cache, ``head_dim`` 64, 128 or 256, ``dtype`` that of q, k, v and
    the output. ``format`` and ``page_size`` (tokens) describe the cache.

    ``window`` tokens are visible up to each query's own (0: all), and the sequence's first
    ``sink_tokens`` besides; ``sinks``: learned logits join the softmax's denominator; ``soft_cap``
    c > 0: scores become c * tanh(score / c); ``scale`` of scores (None: head_dim ** -0.5); ``lse``:
    the log-sum-exp is returned too; ``rotary`` embedding of appended keys ("half", "interleaved",
    "": none) of the first ``rotary_dim`` channels (0: all; else a multiple of 32); ``queries``: an
    append turns the new tokens' queries too, and with ``qk_norm`` first makes each head's RMS 1 and
    multiplies by weights plus ``norm_offset``: x / sqrt(mean x^2 + ``norm_eps``), queries and keys.
    ``full_windows``: an append, of one token a sequence, leaves a window that it fills as it is, and
    a decode reads all 128 tokens of such a one, until a "pack" behind them.

    What an op does not look at is set to its default, so that equal questions are equal: query
    heads (then ``heads_kv``) for "gather", "pack" and an "append" without ``queries``, all about
    scores for these, the cache's format and page size for "prefill", what is done to queries and keys
    for all but "append", ``full_windows`` for all but "append" and "decode", the number of tokens for
    "pack" (128). Raises ``ValueError`` when a field is out of range.
    """

    DYNAMIC: ClassVar[tuple[str, ...]] = ("batch", "q_len", "kv_len")  # fields that compiled kernels do not depend on
    COMMAND: ClassVar[str] = "attention"  # the command line's group of commands
    # whole numbers
    SIZES: ClassVar[tuple[str, ...]] = (*DYNAMIC, "heads_q", "heads_kv", "head_dim", "page_size", "window", "sink_tokens", "rotary_dim")

    op: str
    batch: int
    q_len: int
    kv_len: int
    heads_q: int
    heads_kv: int
    head_dim: int
    format: KVFormat
    dtype: str = "float16"
    page_size: int = 128
    window: int = 0
    sink_tokens: int = 0
    sinks: bool = False
    soft_cap: float = 0.0
    scale: float | None = None
    lse: bool = False
    rotary: str = ""
    queries: bool = False
    rotary_dim: int = 0
    qk_norm: bool = False
    norm_eps: float = 0.0
    norm_offset: float = 0.0
    full_windows: bool = False

    def __post_init__(self) -> None:
        for name, accepted in (
            ("op", OPS), ("head_dim", HEAD_DIMS), ("dtype", DTYPES), ("page_size", PAGE_SIZES), ("rotary", ROTARY)
        ):  # fmt: skip
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} is {getattr(self, name)!r}; accepted: {', '.join(map(repr, accepted))}")
        for name in ("batch", "q_len", "kv_len"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)!r}; accepted: finite numbers from 0")
        for name in ("window", "sink_tokens"):
            if type(getattr(self, name)) is not int or not 0 <= getattr(self, name) <= MOST_WINDOW:
                raise ValueError(f"{name} is {getattr(self, name)!r}; accepted: whole numbers from 0 to {MOST_WINDOW}")
        if self.soft_cap != 0 and not LEAST <= self.soft_cap <= MOST:
            raise ValueError(f"soft_cap is {self.soft_cap!r}; accepted: 0, or finite numbers from {LEAST:g} to {MOST:g}")
        if self.heads_kv < 1 or self.heads_q < 1 or self.heads_q % self.heads_kv:
            raise ValueError(
                f"heads_q is {self.heads_q} and heads_kv {self.heads_kv}; accepted: heads_q a multiple of heads_kv, both above 0"
            )
        if self.scale is not None and not LEAST <= self.scale <= MOST:
            raise ValueError(
                f"scale is {self.scale!r}; accepted: a number above 0, from {LEAST:g} to {MOST:g}, or None for head_dim ** -0.5"
            )
        if self.scale == self.head_dim**-0.5:
            object.__setattr__(self, "scale", None)  # said or not, it is one kernel
        unused: dict[str, Any] = {} if self.op == "append" else dict(_OF_APPEND)
        if self.op == "append":
            self._check_turning()
            unused = {"rotary_dim": self.rotary_dim % self.head_dim if self.rotary else 0} | ({} if self.qk_norm else _NO_NORM)
        if self.op == "prefill":
            unused |= {"format": KVFormat(), "page_size": RESIDUAL}
        elif self.op != "decode":
            unused |= _OF_SCORES | ({} if self.op == "append" and self.queries else {"heads_q": self.heads_kv})
        if self.op not in ("append", "decode"):
            unused["full_windows"] = False
        if self.op == "pack":
            unused |= {"q_len": RESIDUAL, "kv_len": RESIDUAL}
        for name, value in unused.items():
            object.__setattr__(self, name, value)

    def _check_turning(self) -> None:
        """What an append does to queries and keys on their way."""
        if self.queries and not self.rotary and not self.qk_norm:
            raise ValueError("queries is True, rotary '' and qk_norm False; accepted: queries with one of these, which changes them")
        if self.qk_norm and not self.queries:
            raise ValueError("qk_norm is True and queries False; accepted: both, since queries and keys are normalized together")
        if not 0 <= self.rotary_dim <= self.head_dim or self.rotary_dim % ROTARY_STEP:
            raise ValueError(f"rotary_dim is {self.rotary_dim}; accepted: multiples of {ROTARY_STEP} up to head_dim {self.head_dim}")
        if not 0 <= self.norm_eps <= MOST or not abs(self.norm_offset) <= MOST:
            raise ValueError(
                f"norm_eps is {self.norm_eps} and norm_offset {self.norm_offset}; accepted: finite numbers up to {MOST:g}, norm_eps from 0"
            )

    @property
    def turned_channels(self) -> int:
        """Channels of a head that its rotary embedding turns: the width of its table."""
        return self.rotary_dim or self.head_dim

    @property
    def kind(self) -> str:
        """The class of numbers that records must share to say something about each other."""
        return f"{self.op} {self.format.key} {self.format.value}"

    def operands(self, arch: str) -> tuple[Operand, ...]:
        """The tensors of a call, in call order; the same on every arch."""
        return attention_operands(self)

    def options(self) -> str:
        """The command line's words for this workload."""
        w = self.bucketed()
        asked: dict[str, Any] = {"op": w.op, "batch": w.batch, "kv-len": w.kv_len, "q-len": w.q_len, "heads": f"{w.heads_q}/{w.heads_kv}"}
        asked |= {"head-dim": w.head_dim, "format": w.format.name, "dtype": w.dtype, "page-size": w.page_size}
        asked |= {"window": w.window or None, "sink-tokens": w.sink_tokens or None, "soft-cap": w.soft_cap or None, "scale": w.scale}
        asked |= {"rotary": w.rotary or None, "rotary-dim": w.rotary_dim or None}
        asked |= {"norm-eps": w.norm_eps or None, "norm-offset": w.norm_offset or None}
        flags = [f"--{name.replace('_', '-')}" for name in ("sinks", "lse", "queries", "qk_norm", "full_windows") if getattr(w, name)]
        return " ".join([*(f"--{name} {value}" for name, value in asked.items() if value is not None), *flags])

    @property
    def group(self) -> int:
        """Query heads that share a head of the cache."""
        return self.heads_q // self.heads_kv

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def layout(self) -> KVLayout:
        return KVLayout(self.format, self.head_dim, self.page_size)

    @property
    def row_bytes(self) -> int:
        """Bytes of k and v of one token of one kv head in 16 bits."""
        return 4 * self.head_dim

    @property
    def visible_tokens(self) -> int:
        """Cached tokens of a sequence that at least one of its queries sees."""
        if not self.window:
            return self.kv_len
        return min(self.kv_len, self.window + max(self.q_len, 1) - 1 + self.sink_tokens)

    @property
    def flops(self) -> int:
        """Of the two products over what each query sees; 0 for append and gather."""
        if self.op not in ("decode", "prefill"):
            return 0
        first = max(self.kv_len - self.q_len, 0)  # position of the first query; what it sees grows by one a row, up to the window
        last = max(self.kv_len, first + self.q_len)
        most = self.window + self.sink_tokens if self.window else last
        growing = max(min(most, last) - first, 0)
        pairs = growing * (2 * first + growing + 1) // 2 + (self.q_len - growing) * most
        return 4 * self.head_dim * self.heads_q * self.batch * pairs

    @property
    def bytes(self) -> int:
        """Bytes that one call must move at least: what it reads of the cache or of new rows once,
        what it writes once."""
        rows, queries = self.batch * self.heads_kv, self.batch * self.q_len * self.heads_q
        written = self.row_bytes if self.q_len < RESIDUAL else self.layout.token_bytes
        attended = queries * (self.head_dim * 4 + (4 if self.lse else 0))
        return {
            "decode": rows * self._cached_bytes(self.visible_tokens) + attended,
            "append": rows * self.q_len * (self.row_bytes + written) + (attended if self.queries else 0),
            "pack": rows * RESIDUAL * (self.row_bytes + self.layout.token_bytes),
            "gather": rows * (self._cached_bytes(self.kv_len) + self.kv_len * self.row_bytes),
            "prefill": rows * self.kv_len * self.row_bytes + attended,
        }[self.op]  # fmt: skip

    def _cached_bytes(self, tokens: int) -> int:
        """Bytes of a sequence's newest ``tokens`` in one kv head: the window's in 16 bits, the
        others packed."""
        recent = min(tokens, self.kv_len % RESIDUAL)
        return recent * self.row_bytes + (tokens - recent) * self.layout.token_bytes

    def bucketed(self) -> AttentionWorkload:
        """The workload whose tuned schedule serves this one: batch and kv_len at powers of two,
        q_len of a decode at Q_BUCKETS."""
        batch, kv_len = _power_of_two(self.batch, MOST_BATCH), _power_of_two(self.kv_len, MOST_TOKENS)
        q_len = _power_of_two(self.q_len, Q_BUCKETS[-1] if self.op == "decode" else MOST_TOKENS)
        return replace(self, batch=batch, kv_len=max(kv_len, q_len), q_len=q_len)

    def static(self) -> AttentionWorkload:
        """Equal for all workloads that one compiled kernel serves."""
        return replace(self, batch=0, q_len=0, kv_len=0)

    @property
    def title(self) -> str:
        """What a person calls it: ``decode batch=8 kv_len=8192 q_len=1 heads=32/8x128
        kv4_channel``."""
        sizes = f"batch={self.batch} kv_len={self.kv_len} q_len={self.q_len} heads={self.heads_q}/{self.heads_kv}x{self.head_dim}"
        return f"{self.op} {sizes} {self.format.name}"

    @property
    def served(self) -> str:
        """``title`` without what a compiled kernel does not depend on, and with the dtype."""
        return f"{self.op} {self.heads_q}/{self.heads_kv}x{self.head_dim} {self.format.name} {self.dtype}"

    def to_json(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        said = {name: value for name, value in values.items() if name not in _LATER or _LATER[name] != value}
        return {**said, "format": self.format.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> AttentionWorkload:
        """Raises ``ValueError`` for another op and ``KeyError`` for a missing field."""
        if data["op"] not in OPS:
            raise ValueError(f"op is {data['op']!r}; accepted: {', '.join(map(repr, OPS))}")
        given = {**_LATER, **data}
        return cls(**{**{f.name: given[f.name] for f in fields(cls)}, "format": KVFormat.from_json(data["format"])})


def _power_of_two(value: int, most: int) -> int:
    """The first power of two from ``value`` on, at most ``most``."""
    return min(1 << max(value - 1, 0).bit_length(), most)
