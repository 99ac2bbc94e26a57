"""``quantize_rows``: rows of activations to 8-bit codes, in one pass over x.

    scale = amax / largest,    code = round(y * (largest / amax)),    amax = max(|y|, floor)

of a token or of each 128 values of it, with y = x (* rsqrt(mean(x^2) + eps) * norm_weight) (*
smooth): ``schedules/activations/workload.py`` says it exactly.

A block has ``block_m`` rows. The threads of a row hold it in registers, 16 values of it in a chunk,
from its one load to the codes; a chunk is loaded and its codes are stored 16 bytes at a time. The
largest value of a token is found by shuffles and, where a row has several warps, through a word of
shared memory for each; that of a group by eight neighbouring lanes. What a thread does with its
chunk is CUDA (``device/activations/quantize.cuh``); y is computed twice, so that only x is held.
"""

from typing import Any

from ...schedules.activations.operation import CHUNK, ROWS, chunks, row_threads
from ...schedules.activations.workload import PER_TOKEN, QuantizeWorkload
from ...schedules.schedule import Schedule
from ...schedules.target import Target
from ..attention.leaves import caller
from ..compiler.headers import TYPES, device_source, literal
from ..program import TileProgram

HEADERS = ("ptx/instructions.cuh", "pipeline/dependent.cuh", "kv/pairs.cuh", "codecs/e4m3.cuh", "activations/quantize.cuh")
WARP = 32
FEW_CHUNKS = 2  # of a thread, which has registers to keep what it computed of them


def rows_source(w: QuantizeWorkload, arch: str, held: int) -> str:
    """``struct Rows``: what the device functions know of a workload whose threads hold ``held`` chunks."""
    numbers = {
        "bool NORM": str(w.norm).lower(),
        "bool SMOOTH": str(w.smooth).lower(),
        "bool E4M3": str(w.out == "e4m3").lower(),
        "bool AGAIN": str(held > FEW_CHUNKS).lower(),
        "int COLUMNS": w.columns(arch),
        "int CODE_COLUMNS": w.code_columns(arch),
        "float K": f"{float(w.k)!r}f",
        "float LARGEST": f"{w.largest!r}f",
        "float FLOOR": f"{literal(w.floor):.9g}f",
        "float EPS": f"{literal(w.eps):.9e}f",
    }
    lines = (f"  static constexpr {name} = {value};" for name, value in numbers.items())
    return "\n".join(["struct Rows {", f"  using T = {TYPES[w.dtype]};", *lines, "};", ""])


def build(workload: QuantizeWorkload, schedule: Schedule, target: Target) -> Any:
    """The TileLang PrimFunc over x [m, columns], norm_weight and smooth [columns] where there are any,
    codes int8 [m, code columns], scales fp32 [m] or [groups, m]; m is dynamic, from 1 up."""
    import tilelang.language as T

    w, block_m, threads = workload, schedule.block_m, schedule.num_warps * WARP
    per_row, held, by_token = row_threads(schedule), chunks(workload, schedule), workload.group == PER_TOKEN
    warps = per_row // WARP  # of a row
    columns, code_columns, words = w.columns(target.arch), w.code_columns(target.arch), CHUNK // 2
    source = f"{device_source(HEADERS)}\n{rows_source(w, target.arch, held)}"
    m = T.dynamic("m")
    NormWeight = T.Tensor((columns,), w.dtype) if w.norm else None
    Smooth = T.Tensor((columns,), "float32") if w.smooth else None
    Scales = T.Tensor((m,) if by_token else (w.groups, m), "float32")

    call = caller({}, "Rows")

    @T.prim_func
    def main(
        x: T.Tensor((m, columns), w.dtype),
        norm_weight: NormWeight,
        smooth: Smooth,
        codes: T.Tensor((m, code_columns), "int8"),
        scales: Scales,
    ):
        with T.Kernel(T.ceildiv(m, block_m), threads=threads) as index:
            T.import_source(source)
            raw = T.alloc_local((held * words,), "uint32")
            most = T.alloc_local((held,), "uint32")  # bits of the largest value of each chunk, then of what shares its scale
            sums, tops = T.alloc_shared((schedule.num_warps,), "float32"), T.alloc_shared((schedule.num_warps,), "uint32")
            row, place = T.alloc_var("int32"), T.alloc_var("int32")
            total, root = T.alloc_var("float32"), T.alloc_var("float32")
            top = T.alloc_var("uint32")
            thread = T.get_thread_binding()
            row = index * block_m + thread // per_row
            place = thread % per_row * CHUNK  # the column of the thread's first chunk
            T.call_extern("handle", "tilebit::wait_for_predecessor")  # which may write x
            T.call_extern("handle", "tilebit::launch_dependents")
            for c in T.unroll(held, explicit=True):
                call("Chunk::load", x, row, m, place + c * per_row * CHUNK, T.address_of(raw[c * words]))
            root = T.float32(1.0)
            if w.norm:
                total = T.float32(0.0)
                for c in T.unroll(held, explicit=True):
                    total = total + call("Chunk::sum_of_squares", T.address_of(raw[c * words]), returns="float32")
                total = T.call_extern("float32", "tilebit::sum_of_lanes", total)
                if warps > 1:
                    if thread % WARP == 0:
                        sums[thread // WARP] = total
                    T.sync_threads()
                    total = T.float32(0.0)
                    for i in T.unroll(warps, explicit=True):
                        total = total + sums[thread // per_row * warps + i]
                root = call("Chunk::inverse_root", total, returns="float32")
            for c in T.unroll(held, explicit=True):
                most[c] = call(
                    "Chunk::largest", T.address_of(raw[c * words]), place + c * per_row * CHUNK, root, norm_weight if w.norm else x,
                    smooth if w.smooth else x, returns="uint32",
                )  # fmt: skip
            if by_token:
                top = most[0]
                for c in T.unroll(held - 1, explicit=True):
                    top = T.max(top, most[c + 1])
                top = T.call_extern("uint32", "tilebit::largest_of_lanes<32>", top)
                if warps > 1:
                    if thread % WARP == 0:
                        tops[thread // WARP] = top
                    T.sync_threads()
                    for i in T.unroll(warps, explicit=True):
                        top = T.max(top, tops[thread // per_row * warps + i])
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
                    norm_weight if w.norm else x, smooth if w.smooth else x, codes,
                )  # fmt: skip

    return main


PROGRAM = TileProgram(
    name=ROWS,
    compiler="tilelang",
    build=build,
    headers=HEADERS,
    pass_configs={
        "tl.disable_thread_storage_sync": True,  # the barriers that are needed stand here
        "tl.disable_safe_memory_legalize": True,  # copies are inside by construction
        "tl.disable_shared_memory_reuse": True,
    },
    newest_arch="sm_89",
)
