"""The command line of attention over a low-bit KV cache: ``tilebit attention compile | tune | explain | pack``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from .output import usage
from .several import numbers
from .tasks import (
    Budget,
    Jobs,
    Json,
    Limit,
    PackPath,
    TargetName,
    compile_kernels,
    explain_schedules,
    named_target,
    pack_kernels,
    tune_schedules,
)

if TYPE_CHECKING:
    from ..schedules.attention.workload import AttentionWorkload
    from ..schedules.target import Target

attention = typer.Typer(
    help="Attention over a low-bit KV cache: compile its kernels, tune them on this device, explain their schedules, ship them.",
    no_args_is_help=True,
)

# By Target.is_cuda. A core needs seconds for what a GPU does in milliseconds.
DEFAULT_BATCHES = {True: (1, 32), False: (1,)}
DEFAULT_KV_LEN = {True: 4096, False: 1024}

Ops = Annotated[
    list[str] | None,
    typer.Option("--op", help="decode, append, pack, gather or prefill; repeat it for several. Default: all five, what a cache needs."),
]
Batches = Annotated[list[int] | None, numbers("--batch", help="Sequences; repeat it, or 1,16 for several. Default: 1 and 32 (CPU: 1).")]
KVLens = Annotated[
    list[int] | None, numbers("--kv-len", help="Tokens of a sequence; repeat it, or 1024,4096 for several. Default: 4096 (CPU: 1024).")
]
QLens = Annotated[
    list[int] | None,
    numbers("--q-len", help="New tokens of a sequence; repeat it, or 1,4 for several. Default: 1, of prefill all kv-len."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What kernels of attention depend on: the cache, the scores and the target. Each field is an option of every command; see
    ``AttentionWorkload`` for what they mean."""

    heads: Annotated[str, typer.Option("--heads", help="Query heads / heads of the cache, such as 32/8.")]
    head_dim: Annotated[int, typer.Option("--head-dim", help="Channels of a head: 64, 128 or 256.")] = 128
    format: Annotated[str, typer.Option("--format", help="Cache format, such as kv4_channel, kv8_token, kvfp8, kv16 or k8_channel_v4.")] = (
        "kv4_channel"
    )
    dtype: Annotated[str, typer.Option("--dtype", help="float16 or bfloat16: the type of q, k, v and the output.")] = "float16"
    page_size: Annotated[int, typer.Option("--page-size", help="Tokens of a page: 16, 32, 64, 128 or 256.")] = 128
    window: Annotated[int, typer.Option("--window", help="Tokens that a query sees, its own included; 0: all before it.", min=0)] = 0
    sink_tokens: Annotated[
        int, typer.Option("--sink-tokens", help="First tokens of a sequence that are seen besides the window.", min=0)
    ] = 0
    sinks: Annotated[bool, typer.Option("--sinks", help="Learned logits, one a head, join the softmax's denominator.")] = False
    soft_cap: Annotated[float, typer.Option("--soft-cap", help="c: scores become c * tanh(score / c); 0: they stay.", min=0.0)] = 0.0
    scale: Annotated[float | None, typer.Option("--scale", help="Of scores. Default: 1 / sqrt(head-dim).")] = None
    lse: Annotated[bool, typer.Option("--lse", help="The log-sum-exp is returned too.")] = False
    rotary: Annotated[
        str,
        typer.Option("--rotary", help="half or interleaved: appended keys are turned (by KVCache.prefill: before). Default: none."),
    ] = ""
    rotary_dim: Annotated[int, typer.Option("--rotary-dim", help="Channels that are turned, a multiple of 32; 0: all.", min=0)] = 0
    queries: Annotated[bool, typer.Option("--queries", help="An append turns the new tokens' queries, too.")] = False
    qk_norm: Annotated[bool, typer.Option("--qk-norm", help="An append normalizes queries and keys, head by head.")] = False
    norm_eps: Annotated[float, typer.Option("--norm-eps", help="What is added to the mean of squares.", min=0.0)] = 0.0
    norm_offset: Annotated[float, typer.Option("--norm-offset", help="What is added to the weights; 1 for Gemma.")] = 0.0
    full_windows: Annotated[
        bool, typer.Option("--full-windows", help="A step's append leaves windows that it fills to a pack, its decode reads them.")
    ] = False
    target: TargetName = "auto"

    @property
    def subject(self) -> str:
        return f"{self.format} {self.heads}x{self.head_dim} {self.dtype}"

    def asked(
        self, ops: list[str] | None, batches: list[int] | None, kv_lens: list[int] | None, q_lens: list[int] | None
    ) -> tuple[Target, list[AttentionWorkload]]:
        """The target and a workload for every combination of the sizes (None: their defaults); what cannot be one is bad usage."""
        from ..layouts.kv_formats import KVFormat
        from ..schedules.attention.workload import OPS, AttentionWorkload

        target, found = named_target(self.target), []
        with usage():
            heads_q, heads_kv = _heads(self.heads)
            options = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("heads", "target")}
            options |= {"heads_q": heads_q, "heads_kv": heads_kv, "format": KVFormat.from_name(self.format)}
            sizes = product(ops or OPS, batches or DEFAULT_BATCHES[target.is_cuda], kv_lens or [DEFAULT_KV_LEN[target.is_cuda]])
            for op, batch, kv_len in sizes:
                # A gather and a pack have no new tokens: the ops ask for 1, whatever the others are.
                news = [1] if op in ("gather", "pack") else q_lens or [kv_len if op == "prefill" else 1]
                found += [AttentionWorkload(op=op, batch=batch, q_len=q_len, kv_len=kv_len, **options) for q_len in news]
        return target, list(dict.fromkeys(found))


def _heads(text: str) -> tuple[int, int]:
    parts = text.split("/")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise ValueError(f"heads is {text!r}; accepted: query heads / heads of the cache, such as 32/8")
    return int(parts[0]), int(parts[1])


def _command(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register ``run(*, ..., kind, ...)`` as a command; in place of ``kind`` typer is shown an option for each field of ``Kind``."""

    def register(run: Callable[..., None]) -> Callable[..., None]:
        hints, parameters = get_type_hints(Kind, include_extras=True), []
        for parameter in inspect.signature(run, eval_str=True).parameters.values():
            if parameter.name != "kind":
                parameters.append(parameter)
                continue
            for f in fields(Kind):
                default = inspect.Parameter.empty if f.default is MISSING else f.default
                parameters.append(inspect.Parameter(f.name, parameter.kind, default=default, annotation=hints[f.name]))

        def command(**values: Any) -> None:
            run(kind=Kind(**{f.name: values.pop(f.name) for f in fields(Kind)}), **values)

        command.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
        command.__doc__ = run.__doc__
        attention.command(name)(command)
        return run

    return register


@_command("compile")
def compile_command(
    *,
    op: Ops = None,
    batch: Batches = None,
    kv_len: KVLens = None,
    q_len: QLens = None,
    kind: Kind,
    jobs: Jobs = None,
    as_json: Json = False,
) -> None:
    """Compile the kernels that calls of this kind will use, into the artifact cache. Needs no GPU: name the --target to cross-compile."""
    target, workloads = kind.asked(op, batch, kv_len, q_len)
    compile_kernels(kind.subject, workloads, target, jobs, as_json)


@_command("tune")
def tune(
    *,
    op: Ops = None,
    batch: Batches = None,
    kv_len: KVLens = None,
    q_len: QLens = None,
    kind: Kind,
    budget: Budget = None,
    jobs: Jobs = None,
    as_json: Json = False,
) -> None:
    """Measure candidate schedules on this machine's device and record the results; later calls use the fastest. Measures nothing twice."""
    target, workloads = kind.asked(op, batch, kv_len, q_len)
    tune_schedules(kind.subject, workloads, target, budget, jobs, as_json)


@_command("explain")
def explain(
    *,
    op: Annotated[str, typer.Option("--op", help="decode, append, gather or prefill.")] = "decode",
    batch: Annotated[int, typer.Option("--batch", help="Sequences.", min=1)] = 1,
    kv_len: Annotated[int | None, typer.Option("--kv-len", help="Tokens of a sequence. Default: 4096 (CPU: 1024).", min=1)] = None,
    q_len: Annotated[int | None, typer.Option("--q-len", help="New tokens of a sequence. Default: 1, of prefill kv-len.", min=1)] = None,
    kind: Kind,
    limit: Limit = 20,
    as_json: Json = False,
) -> None:
    """Print every candidate schedule of a workload, the chosen one first, and why the others lost."""
    target, (workload,) = kind.asked([op], [batch], [kv_len] if kv_len else None, [q_len] if q_len else None)
    explain_schedules(workload, target, limit, as_json)


@_command("pack")
def pack(
    *,
    path: PackPath,
    op: Ops = None,
    batch: Batches = None,
    kv_len: KVLens = None,
    q_len: QLens = None,
    kind: Kind,
    jobs: Jobs = None,
    as_json: Json = False,
) -> None:
    """Compile kernels and export them as a pack: a directory that loads with torch and apache-tvm-ffi alone (tilebit.packs.load)."""
    target, workloads = kind.asked(op, batch, kv_len, q_len)
    pack_kernels(path, workloads, target, jobs, as_json)
