"""``quantize_rows``: rows of activations to 8-bit codes, in one pass over x.

    scale = amax / largest,    code = round(y * (largest / amax)),    amax = max(|y|, floor)

of a token or of each 128 values of it, with y = x (* rsqrt(mean(x^2) + eps) * (norm_weight +
offset)) (* smooth), and x perhaps the residual sum, or a gate's activation times what it gates:
``schedules/activations/workload.py`` says it exactly.

The threads of a row hold it in registers, 16 values of it in a chunk, from its one load to the
codes; a chunk is loaded and its codes are stored 16 bytes at a time. The largest value of a token
is found by shuffles and, where a row has several warps, through a word of shared memory for each;
that of a group by eight neighbouring lanes. What a thread does with its chunk is CUDA
(``device/activations/quantize.cuh``); y is computed twice, so that only x is held. A residual sum
or a gated row becomes x as it is loaded (``incoming.cuh``): nothing else differs.

A block has ``block_m`` rows and ends (``num_stages`` 1), or as many blocks as run at once,
``min_blocks`` on an SM, go through all rows (2): the next rows are on their way while codes of the
present ones are found, and a thread keeps what the norm and the factors are for its columns in
shared memory, in an order in which lanes read whole lines of it. Read anew for each row, they are
three times the bytes of the row, and a lane's 64 bytes of factors are as many lines of L1 as lanes.
"""

from typing import Any

from ...schedules.activations.operation import CHUNK, ROWS, chunks, row_threads
from ...schedules.activations.workload import ACTIVATIONS, PER_TOKEN, QuantizeWorkload
from ...schedules.schedule import Schedule
from ...schedules.target import Target
from ..attention.leaves import caller
from ..compiler.headers import GATES, TYPES, device_source, literal
from ..program import TileProgram

HEADERS = (
    "ptx/instructions.cuh", "ptx/lanes.cuh", "pipeline/dependent.cuh", "kv/pairs.cuh", "codecs/e4m3.cuh", "activations/quantize.cuh",
)  # fmt: skip
SUMMED_HEADERS = (  # where what comes in is not x itself
    *HEADERS, "store/gate.cuh", "activations/inverse_root.cuh", "activations/rows.cuh", "activations/incoming.cuh",
)  # fmt: skip
WARP = 32
FEW_CHUNKS = 2  # of a thread, which has registers to keep what it computed of them


def rows_source(w: QuantizeWorkload, arch: str, held: int, keeping: int) -> str:
    """``struct Rows``: what the device functions know of a workload whose threads hold ``held`` chunks;
    ``keeping`` threads of a block keep what all rows share, or none."""
    numbers = {
        "bool NORM": str(w.norm).lower(),
        "bool SMOOTH": str(w.smooth).lower(),
        "bool E4M3": str(w.out == "e4m3").lower(),
        "bool AGAIN": str(held > (1 if keeping else FEW_CHUNKS)).lower(),
        "int KEEPING": str(keeping),
        "int COLUMNS": w.columns(arch),
        "int CODE_COLUMNS": w.code_columns(arch),
        "float K": f"{float(w.k)!r}f",
        "float LARGEST": f"{w.largest!r}f",
        "float FLOOR": f"{literal(w.floor):.9g}f",
        "float EPS": f"{literal(w.eps):.9e}f",
        "float OFFSET": f"{literal(w.offset):.9e}f",
    }
    return _struct("Rows", w, numbers)


def incoming_source(w: QuantizeWorkload, arch: str) -> str:
    """``struct Sources``: what comes in where it is not x itself."""
    numbers = {
        "int K": w.columns(arch),
        "bool RESIDUAL": str(w.residual).lower(),
        "bool GATED": str(bool(w.gate)).lower(),
        "float EPS": "0.0f",  # the norm is Rows' affair
        "float OFFSET": "0.0f",
    }
    return _struct("Sources", w, numbers, f"  using Activation = {GATES[w.gate or ACTIVATIONS[0]]};")


def _struct(name: str, w: QuantizeWorkload, numbers: dict[str, Any], *types: str) -> str:
    lines = (f"  static constexpr {declared} = {value};" for declared, value in numbers.items())
    return "\n".join([f"struct {name} {{", f"  using T = {TYPES[w.dtype]};", *types, *lines, "};", ""])


def build(workload: QuantizeWorkload, schedule: Schedule, target: Target) -> Any:
    """The TileLang PrimFunc over x [m, columns], of a gate [m, 2 columns], residual [m, columns],
    norm_weight and smooth [columns] where there are any,
    codes int8 [m, code columns], scales fp32 [m] or [groups, m]; m is dynamic, from 1 up."""
    import tilelang.language as T

    w, block_m, threads = workload, schedule.block_m, schedule.num_warps * WARP
    per_row, held, by_token = row_threads(schedule), chunks(workload, schedule), workload.group == PER_TOKEN
    warps, block_warps = per_row // WARP, schedule.num_warps  # of a row, and of all
    columns, code_columns, words = w.columns(target.arch), w.code_columns(target.arch), CHUNK // 2
    through = schedule.num_stages == 2
    other = bool(w.residual or w.gate)  # than x itself
    rows = rows_source(w, target.arch, held, threads if through else 0)
    source = f"{device_source(SUMMED_HEADERS if other else HEADERS)}\n{rows}{incoming_source(w, target.arch) if other else ''}"
    m = T.dynamic("m")
    Residual = T.Tensor((m, columns), w.dtype) if w.residual else None
    NormWeight = T.Tensor((columns,), w.dtype) if w.norm else None
    Smooth = T.Tensor((columns,), "float32") if w.smooth else None
    Scales = T.Tensor((m,) if by_token else (w.groups, m), "float32")

    most_blocks = target.units * schedule.min_blocks  # that go through the rows
    kept_weight, kept_factor = through and w.norm, through and w.smooth
    call = caller({"Incoming": "tilebit::Incoming<Sources>"}, "Rows")

    def load(x: Any, residual: Any, row: Any, rows: Any, column: Any, words: Any) -> Any:
        """A chunk of x, or of what takes its place."""
        if other:
            return call("Incoming::load", x, residual if w.residual else x, row, rows, column, words)
        return call("Chunk::load", x, row, rows, column, words)

    def kept(buffer: Any, chunk: Any, thread: Any) -> Any:
        """Where a thread's first four of ``chunk`` are, in words of ``weights`` and of ``factors``."""
        four = int(buffer.shape[0]) // (held * threads * CHUNK // 4)
        return T.address_of(buffer[(chunk * (CHUNK // 4) * threads + thread) * four])

    @T.prim_func
    def main(
        x: T.Tensor((m, (2 if w.gate else 1) * columns), w.dtype),
        residual: Residual,
        norm_weight: NormWeight,
        smooth: Smooth,
        codes: T.Tensor((m, code_columns), "int8"),
        scales: Scales,
    ):
        with T.Kernel(most_blocks if through else T.ceildiv(m, block_m), threads=threads) as index:
            T.import_source(source)
            if through:
                T.annotate_min_blocks_per_sm(schedule.min_blocks)
            raw = T.alloc_local((held * words,), "uint32")
            ahead = T.alloc_local((held * words,), "uint32")  # of the rows after these
            weights = T.alloc_shared((held * words * threads if kept_weight else 1,), "uint32")
            factors = T.alloc_shared((held * CHUNK * threads if kept_factor else 1,), "float32")
            most = T.alloc_local((held,), "uint32")  # bits of the largest value of each chunk, then of what shares its scale
            # In turn: slower warps still read what was written for the rows before.
            sums, tops = T.alloc_shared((2 * schedule.num_warps,), "float32"), T.alloc_shared((2 * schedule.num_warps,), "uint32")
            row, place = T.alloc_var("int32"), T.alloc_var("int32")
            total, root = T.alloc_var("float32"), T.alloc_var("float32")
            top = T.alloc_var("uint32")
            thread = T.get_thread_binding()
            row = index * block_m + thread // per_row
            place = thread % per_row * CHUNK  # the column of the thread's first chunk
            if through and (w.norm or w.smooth):
                for c in T.unroll(held, explicit=True):
                    call(
                        "Chunk::keep", norm_weight if w.norm else x, smooth if w.smooth else x, place + c * per_row * CHUNK,
                        kept(weights, c, thread), kept(factors, c, thread),
                    )  # fmt: skip
            T.call_extern("handle", "tilebit::launch_dependents")
            T.call_extern("handle", "tilebit::wait_for_predecessor")  # which may write x
            if through:
                for c in T.unroll(held, explicit=True):
                    load(x, residual, row, m, place + c * per_row * CHUNK, T.address_of(ahead[c * words]))
            for step in T.serial(T.ceildiv(T.ceildiv(m, block_m) - index, most_blocks) if through else 1):
                if through:
                    for i in T.unroll(held * words, explicit=True):
                        raw[i] = ahead[i]
                    for c in T.unroll(held, explicit=True):
                        load(x, residual, row + most_blocks * block_m, m, place + c * per_row * CHUNK, T.address_of(ahead[c * words]))
                else:
                    for c in T.unroll(held, explicit=True):
                        load(x, residual, row, m, place + c * per_row * CHUNK, T.address_of(raw[c * words]))
                root = T.float32(1.0)
                if w.norm:
                    total = T.float32(0.0)
                    for c in T.unroll(held, explicit=True):
                        total = total + call("Chunk::sum_of_squares", T.address_of(raw[c * words]), returns="float32")
                    total = T.call_extern("float32", "tilebit::sum_of_lanes", total)
                    if warps > 1:
                        if thread % WARP == 0:
                            sums[step % 2 * block_warps + thread // WARP] = total
                        T.sync_threads()
                        total = T.float32(0.0)
                        for i in T.unroll(warps, explicit=True):
                            total = total + sums[step % 2 * block_warps + thread // per_row * warps + i]
                    root = call("Chunk::inverse_root", total, returns="float32")
                for c in T.unroll(held, explicit=True):
                    most[c] = call(
                        "Chunk::largest", T.address_of(raw[c * words]), place + c * per_row * CHUNK, root,
                        kept(weights, c, thread) if kept_weight else norm_weight if w.norm else x,
                        kept(factors, c, thread) if kept_factor else smooth if w.smooth else x, returns="uint32",
                    )  # fmt: skip
                if by_token:
                    top = most[0]
                    for c in T.unroll(held - 1, explicit=True):
                        top = T.max(top, most[c + 1])
                    top = T.call_extern("uint32", "tilebit::largest_of_lanes<32>", top)
                    if warps > 1:
                        if thread % WARP == 0:
                            tops[step % 2 * block_warps + thread // WARP] = top
                        T.sync_threads()
                        for i in T.unroll(warps, explicit=True):
                            top = T.max(top, tops[step % 2 * block_warps + thread // per_row * warps + i])
                    for c in T.unroll(held, explicit=True):
                        most[c] = top
                    if place == 0 and row < m:
                        scales[row] = call("Chunk::scale_of", top, returns="float32")
                else:
                    for c in T.unroll(held, explicit=True):
                        most[c] = T.call_extern("uint32", f"tilebit::largest_of_lanes<{w.group // CHUNK}>", most[c])
                        if place % w.group == 0 and place + c * per_row * CHUNK < w.k and row < m:
                            scales[(place + c * per_row * CHUNK) // w.group, row] = call("Chunk::scale_of", most[c], returns="float32")
                for c in T.unroll(held, explicit=True):
                    call(
                        "Chunk::store", T.address_of(raw[c * words]), row, m, place + c * per_row * CHUNK, most[c], root,
                        kept(weights, c, thread) if kept_weight else norm_weight if w.norm else x,
                        kept(factors, c, thread) if kept_factor else smooth if w.smooth else x, codes,
                    )  # fmt: skip
                if through:
                    row = row + most_blocks * block_m

    return main


PROGRAM = TileProgram(
    name=ROWS,
    compiler="tilelang",
    build=build,
    headers=SUMMED_HEADERS,
    pass_configs={
        "tl.disable_thread_storage_sync": True,  # the barriers that are needed stand here
        "tl.disable_safe_memory_legalize": True,  # copies are inside by construction
        "tl.disable_shared_memory_reuse": True,
    },
    newest_arch="sm_89",
)
