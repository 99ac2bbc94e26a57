"""The command line: ``tilebit quantize | generate | evaluate``, for models, and ``compile | tune | bench | explain | show | pack |
attention | workload | doctor``.

Exit codes: 0 done, 1 the task failed (the reason is on stderr), 2 bad usage. With ``--json`` stdout holds JSON alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import __version__
from .attention import attention
from .model_options import (
    Batches,
    BenchedCaches,
    BenchedModel,
    PackedCaches,
    PackedModel,
    PackedTokens,
    PackedWidths,
    Parts,
    PromptTokens,
    Skip,
    Steps,
    TunedCache,
    TunedModel,
    TunedTokens,
)  # fmt: skip
from .models import bench_whole, evaluate, generate, pack_whole, quantize, tune_whole
from .output import failures, new_file, new_table, print_json, print_parts, printed, usage
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
from .workload import workload

if TYPE_CHECKING:
    from ..schedules.gemm.workload import Workload
    from ..schedules.target import Target

app = typer.Typer(
    name="tilebit",
    help="Models in low bits: quantize them, run them; and their GEMM and attention kernels: compile, tune, measure, ship them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (quantize, generate, evaluate):
    app.command()(command)
app.add_typer(attention, name="attention")
app.add_typer(workload, name="workload")

N = Annotated[int, typer.Option("--n", "-n", help="Output channels: rows of the weight.", min=1)]
K = Annotated[int, typer.Option("--k", "-k", help="Input channels: columns of the weight.", min=1)]
ModelsN = Annotated[int | None, typer.Option("--n", "-n", help="Output channels: rows of the weight.", min=1)]  # or none, but a model
ModelsK = Annotated[int | None, typer.Option("--k", "-k", help="Input channels: columns of the weight.", min=1)]
Ms = Annotated[
    list[int] | None,
    numbers("--m", "-m", help="Rows of x; repeat it, or 1,16 for several. Default: 1, 16, 64, 256 and 4096 (on the CPU: 1 and 32)."),
]
Format = Annotated[str, typer.Option("--format", help="Weight format, such as w4a16_g128, w4a16_g64_asym or w8a16_channel.")]
BenchedFormat = Annotated[
    str | None, typer.Option("--format", help="Weight format, such as w8a16_channel. Default: w4a16_g128; a packed model's own.")
]
Dtype = Annotated[str, typer.Option("--dtype", help="float16 or bfloat16: the type of x, y, scales and bias.")]
TunedDtype = Annotated[
    str | None, typer.Option("--dtype", help="float16 or bfloat16. Default: float16; with --model what its config says.")
]
Bias = Annotated[bool, typer.Option("--bias", help="The layer has a bias.")]
Residual = Annotated[bool, typer.Option("--residual", help="y is added to a residual.")]
Gate = Annotated[str, typer.Option("--gate", help="Of n channels half are gates of the others: silu, gelu_tanh or gelu.")]
GateHalves = Annotated[bool, typer.Option("--gate-halves", help="The gates are the first half of the channels, not eight in turn.")]
NormEps = Annotated[float | None, typer.Option("--norm-eps", help="x is normed first (RMSNorm), with this eps.")]
Dependent = Annotated[bool, typer.Option("--dependent", help="Launched while the kernel before it still runs, as in a model's step.")]
Width = Annotated[int, typer.Option("--width", help="Columns of y that an index stores n rows to, two for some; 0: n, in order.")]
Nibbles = Annotated[
    bool, typer.Option("--nibbles", help="With --width: rows that make a channel together are nibbles of bytes, as in a mixed layer.")
]

DEFAULT_MS = {True: (1, 16, 64, 256, 4096), False: (1, 32)}  # by Target.is_cuda


def main() -> None:
    """The ``tilebit`` command."""
    with printed():
        app(prog_name="tilebit")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tilebit {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Options of ``tilebit`` itself."""


@app.command("compile")
def compile_command(
    n: N,
    k: K,
    m: Ms = None,
    format: Format = "w4a16_g128",
    dtype: Dtype = "float16",
    bias: Bias = False,
    width: Width = 0,
    nibbles: Nibbles = False,
    residual: Residual = False,
    gate: Gate = "",
    gate_halves: GateHalves = False,
    norm_eps: NormEps = None,
    dependent: Dependent = False,
    target: TargetName = "auto",
    jobs: Jobs = None,
    as_json: Json = False,
) -> None:
    """Compile the kernels that calls of this shape will use, into the artifact cache. Needs no GPU: name the --target to cross-compile."""
    chosen, workloads = _asked(n, k, m, format, dtype, bias, target, width, nibbles, residual, gate, gate_halves, norm_eps, dependent)
    compile_kernels(_subject(workloads[0]), workloads, chosen, jobs, as_json)


@app.command()
def tune(
    n: ModelsN = None,
    k: ModelsK = None,
    m: Ms = None,
    format: Format = "w4a16_g128",
    dtype: TunedDtype = None,
    bias: Bias = False,
    width: Width = 0,
    nibbles: Nibbles = False,
    residual: Residual = False,
    gate: Gate = "",
    gate_halves: GateHalves = False,
    norm_eps: NormEps = None,
    target: TargetName = "auto",
    budget: Budget = None,
    jobs: Jobs = None,
    model: TunedModel = None,
    batch: Batches = None,
    kv_format: TunedCache = None,
    tokens: TunedTokens = None,
    part: Parts = None,
    as_json: Json = False,
) -> None:
    """Measure candidate schedules on this machine's device and record the results; later calls use the fastest. Measures nothing twice.
    Of a product (--n, --k), or with --model of all products of a model's decode steps, which are then measured where they run."""
    of_products = {"--m": m, "--bias": bias, "--width": width, "--residual": residual, "--gate": gate, "--norm-eps": norm_eps is not None}
    of_products |= {"--target": target != "auto", "--nibbles": nibbles, "--gate-halves": gate_halves}
    _one_kind(n, k, model, of_products, {"--batch": batch, "--kv-format": kv_format, "--tokens": tokens, "--part": part})
    if model is not None:
        tune_whole(model, format, kv_format or "kv4_channel", batch, tokens, part, budget, jobs, dtype or "auto", as_json)
        return
    assert n is not None and k is not None
    chosen, workloads = _asked(n, k, m, format, dtype or "float16", bias, target, width, nibbles, residual, gate, gate_halves, norm_eps)
    tune_schedules(_subject(workloads[0]), workloads, chosen, budget, jobs, as_json)


@app.command()
def bench(
    n: ModelsN = None,
    k: ModelsK = None,
    m: Ms = None,
    format: BenchedFormat = None,
    dtype: Dtype = "bfloat16",
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda[:i]: where to measure.")] = "auto",
    out: Annotated[Path | None, typer.Option("--out", help="Append the rows to this JSON-lines file.", dir_okay=False)] = None,
    model: BenchedModel = None,
    kv_format: BenchedCaches = None,
    batch: Batches = None,
    prompt_tokens: PromptTokens = None,
    steps: Steps = None,
    as_json: Json = False,
) -> None:
    """Time a product, or with --model a whole model. A product (--n, --k): tilebit and torch on this machine, interleaved in one process:
    torch's 16-bit linear (cuBLAS on a GPU) and, on the CPU, its int4 kernel. A model: prompts and decode steps beside the 16-bit model."""
    of_models = {"--kv-format": kv_format, "--batch": batch, "--prompt-tokens": prompt_tokens is not None, "--steps": steps is not None}
    _one_kind(n, k, model, {"--m": m}, of_models)
    if out is not None:
        new_file(out, folders=True)
    if model is not None:
        bench_whole(model, format, kv_format, batch, prompt_tokens or 512, steps or 32, dtype, device, out, as_json)
        return
    assert n is not None and k is not None
    chosen, workloads = _asked(n, k, m, format or "w4a16_g128", dtype, False, {"auto": "auto", "cpu": "cpu"}.get(device, device))
    rows: list[dict[str, Any]] = []
    with failures():
        from ..autotune.measure import busy
        from .bench import measure_workloads, write_rows

        for measured in measure_workloads(workloads, device if device != "auto" else ("cuda:0" if chosen.is_cuda else "cpu")):
            rows += measured
            if out is not None:
                write_rows(out, measured)
    if as_json:
        print_json(rows)
        return
    table = new_table(f"[{n}, {k}] {dtype} on {chosen.name}", "m", "implementation", "us", "p20..p80", "against torch", "rel. error")
    dense = {row["m"]: row["us"] for row in rows if row["impl"] in ("torch", "cublas")}
    for row in rows:
        name = f"{row['impl']} {row['format']}" + (f" g{row['group_size']}" if row["group_size"] else "")
        table.add_row(
            str(row["m"]),
            name,
            f"{row['us']:.2f}",
            f"{row['us_p20']:.2f}..{row['us_p80']:.2f}",
            f"{dense[row['m']] / row['us']:.2f}x",
            f"{row['rel_err']:.1e}",
        )
    print_parts(table, busy((row["us_p20"], row["us_p80"], row["others"]) for row in rows), f"rows: {out}" if out is not None else "")


@app.command()
def explain(
    n: N,
    k: K,
    m: Annotated[int, typer.Option("--m", "-m", help="Rows of x.", min=1)] = 1,
    format: Format = "w4a16_g128",
    dtype: Dtype = "float16",
    bias: Bias = False,
    width: Width = 0,
    nibbles: Nibbles = False,
    residual: Residual = False,
    gate: Gate = "",
    gate_halves: GateHalves = False,
    norm_eps: NormEps = None,
    dependent: Dependent = False,
    target: TargetName = "auto",
    limit: Limit = 20,
    as_json: Json = False,
) -> None:
    """Print every candidate schedule of a workload, the chosen one first, and why the others lost."""
    chosen, (workload,) = _asked(n, k, [m], format, dtype, bias, target, width, nibbles, residual, gate, gate_halves, norm_eps, dependent)
    explain_schedules(workload, chosen, limit, as_json)


@app.command()
def show(
    name: Annotated[
        str,
        typer.Argument(
            help="A packed weight (sm_90a:4, cpu:8; for int8 or e4m3 x sm_90a:4:int8), a KV cache (format:head_dim[:page_size], as "
            "kv4_channel:128), a checkpoint layout (awq:4) or a fragment (wgmma_a:k16). 'list' prints names."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write, .svg or .png. Default: NAME.svg here.", dir_okay=False)
    ] = None,
    by: Annotated[
        str, typer.Option("--by", help="How a packed layout is drawn: word (storage order) or element (the weight matrix).")
    ] = "word",
    as_json: Json = False,
) -> None:
    """Draw which thread and register holds which element of a fragment, which bit of a packed layout holds which weight, or which lane owns
    which token and channel of a KV cache and where its scales lie."""
    from .pictures import names, picture, write

    if name == "list":
        if as_json:
            print_json(names())
        else:
            typer.echo("\n".join(names()))
        return
    path = out or Path(name.replace(":", "_") + ".svg")
    try:
        drawn = picture(name, by)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if path.suffix not in (".svg", ".png"):
        raise typer.BadParameter(f"{str(path)!r} ends in {path.suffix!r}; accepted: .svg, .png", param_hint="--out")
    new_file(path)
    with failures():
        write(drawn, path)
    if as_json:
        print_json({"name": name, "path": str(path)})
    else:
        typer.echo(str(path))


@app.command()
def pack(
    path: PackPath,
    n: ModelsN = None,
    k: ModelsK = None,
    m: Ms = None,
    format: Annotated[
        str | None, typer.Option("--format", help="Weight format. Default: w4a16_g128; with --model: as the directory is.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float16 or bfloat16. Default: float16; with --model: what config.json says.")
    ] = None,
    bias: Bias = False,
    width: Width = 0,
    nibbles: Nibbles = False,
    residual: Residual = False,
    gate: Gate = "",
    gate_halves: GateHalves = False,
    norm_eps: NormEps = None,
    dependent: Dependent = False,
    target: TargetName = "auto",
    jobs: Jobs = None,
    model: PackedModel = None,
    kv_format: PackedCaches = None,
    batch: Batches = None,
    max_tokens: PackedTokens = None,
    bits: PackedWidths = None,
    skip: Skip = None,
    as_json: Json = False,
) -> None:
    """Compile kernels and export them as a pack: a directory that loads with torch and apache-tvm-ffi alone (tilebit.packs.load). Those of
    a product (--n, --k), or with --model of a whole model: all that generate needs, with --kv-format fused steps and attention too."""
    of_products = {"--m": m, "--bias": bias, "--width": width, "--residual": residual, "--gate": gate, "--norm-eps": norm_eps is not None}
    of_products |= {"--nibbles": nibbles, "--gate-halves": gate_halves, "--dependent": dependent}
    of_models = {"--kv-format": kv_format, "--batch": batch, "--max-tokens": max_tokens, "--bits": bits, "--skip": skip}
    _one_kind(n, k, model, of_products, of_models)
    if model is not None:
        pack_whole(path, model, format, skip, kv_format, batch, max_tokens, bits, dtype, target, jobs, as_json)
        return
    assert n is not None and k is not None
    product = (format or "w4a16_g128", dtype or "float16", bias, target, width, nibbles, residual, gate, gate_halves, norm_eps, dependent)
    chosen, workloads = _asked(n, k, m, *product)
    pack_kernels(path, workloads, chosen, jobs, as_json)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what this machine can do with tilebit, what is missing, and how to get it. Exits with 1 if it cannot compile and run for its
    own device."""
    from .doctor import diagnose

    diagnosis = diagnose()
    if as_json:
        print_json(diagnosis.to_json())
    else:
        table = new_table("This machine", "", "found", "what to do")
        marks = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "missing": "[red]missing[/]"}
        from rich.markup import escape

        for f in diagnosis.findings:
            table.add_row(f"{marks[f.status]} {f.name}", escape(f.found), escape(f.do))
        can = new_table("It can", "", "")
        for task, possible in diagnosis.abilities.items():
            can.add_row(task, "[green]yes[/]" if possible else "[red]no[/]")
        print_parts(table, can)
    if not diagnosis.healthy:
        raise typer.Exit(1)


def _one_kind(n: int | None, k: int | None, model: Path | None, of_products: dict[str, Any], of_models: dict[str, Any]) -> None:
    """Refuse what is neither a product nor a model, or both, and options that the other one has."""
    if (model is None) == (n is None or k is None):
        raise typer.BadParameter("accepted: a product, by --n and --k, or a model, by --model, not both")
    strange = [name for name, given in (of_models if model is None else of_products).items() if given]
    if strange:
        kind, other = ("a product", "a model's") if model is None else ("a model", "a product's")
        raise typer.BadParameter(f"{', '.join(strange)} with {kind}; accepted: {kind} without {other} options")


def _asked(
    n: int, k: int, ms: list[int] | None, format: str, dtype: str, bias: bool, arch: str, width: int = 0,
    nibbles: bool = False, residual: bool = False,
    gate: str = "", gate_halves: bool = False, norm_eps: float | None = None, dependent: bool = False,
) -> tuple[Target, list[Workload]]:  # fmt: skip
    """The target of ``arch`` (or of a device, "cuda:1") and one workload per m; what cannot be one is bad usage."""
    from ..layouts.formats import QuantFormat
    from ..schedules.gemm.workload import Workload

    target = named_target(arch)
    with usage():
        parsed = QuantFormat.parse(format)
        norm = {} if norm_eps is None else {"norm": True, "eps": norm_eps}
        gates: dict[str, Any] = {"gate": gate, "gate_halves": gate_halves}
        asked = Workload(
            1, n, k, parsed, dtype, bias, width=width, nibbles=nibbles, residual=residual, dependent=dependent, **gates, **norm
        )
        return target, [asked.with_m(m) for m in dict.fromkeys(ms or DEFAULT_MS[target.is_cuda])]


def _subject(workload: Workload) -> str:
    return f"{workload.format.name} [{workload.n}, {workload.k}] {workload.dtype}"
