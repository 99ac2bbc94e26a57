"""From a PrimFunc whose body is parallel loops to C functions over ranges of their iterations.

A parallel loop in TVM is lowered to a call into TVM's runtime. Here every loop becomes ``void
loop<i>(int32 begin, int32 end, int32 sizes..., pointers...)`` instead, and ``device/cpu_launch.c``
hands out the iterations. Accepted bodies: allocations (the call's workspace), then parallel loops.
The tensors' symbolic sizes (a GEMM's ``m``) are read from the tensors of a call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

THREADS = "tilebit.threads"  # attribute of the function: how many threads share a loop
LOCAL_ARRAYS = "tilebit.local_arrays"  # attribute of the function: its loops keep arrays on the stack on purpose; accesses are no spills
TOGETHER = "tilebit.together"  # annotation of a loop: how many neighbouring iterations share data, and are best done by one thread
_DTYPE_CODES = {"int": "kDLInt", "uint": "kDLUInt", "float": "kDLFloat", "bfloat": "kDLBfloat", "float8_e4m3fn": "kDLFloat8_e4m3fn"}
BITS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}  # types that arrive as their bits


@dataclass(frozen=True, slots=True)
class Outlined:
    """``module`` has the C functions ``loop0 ..`` and ``sizes``; ``header`` declares them and the
    tensors of a call."""

    module: Any
    header: str


def outline(function: Any) -> Outlined:
    """Raises ``ValueError`` for a body that is anything but allocations and parallel loops, or
    tensors without a symbolic size."""
    import tvm

    tirx: Any = tvm.tirx
    body = function.body
    statements = list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]
    workspaces = [s.buffer for s in statements if isinstance(s, tirx.stmt.AllocBuffer)]
    loops = [s for s in statements if isinstance(s, tirx.For) and s.kind == tirx.ForKind.PARALLEL]
    if not loops or len(workspaces) + len(loops) != len(statements):
        raise ValueError(
            f"the function's statements are {[type(s).__name__ for s in statements]}; accepted: allocations, then parallel loops"
        )
    operands = [function.buffer_map[p] for p in function.params]
    symbols: list[Any] = []
    for size in (d for buffer in operands for d in (*buffer.shape, *buffer.strides) if isinstance(d, tirx.Var)):
        if not any(size.same_as(known) for known in symbols):
            symbols.append(size)
    if not symbols:
        raise ValueError("the function's tensors have no symbolic size; accepted: at least one, for example m")
    # TVM's LLVM code generator crashes on a pointer to bf16: such tensors arrive as pointers to
    # their bits.
    bits = {
        b.data: tirx.Var(b.data.name, tvm.ir.PointerType(tvm.ir.PrimType(BITS[str(b.dtype)]))) for b in operands if str(b.dtype) in BITS
    }
    pointers = [bits.get(buffer.data, buffer.data) for buffer in (*operands, *workspaces)]

    functions = {"sizes": _sizes(tvm, symbols, workspaces, loops)}
    for number, loop in enumerate(loops):
        begin, end = tirx.Var("begin", "int32"), tirx.Var("end", "int32")
        iterations = tirx.stmt_functor.substitute(loop.body, bits)
        serial = tirx.For(loop.loop_var, begin, end - begin, tirx.ForKind.SERIAL, iterations)
        functions[f"loop{number}"] = tirx.PrimFunc([begin, end, *symbols, *pointers], serial).with_attr("tirx.noalias", True)
    module = tvm.IRModule({name: f.with_attr("global_symbol", name) for name, f in functions.items()})
    names = [str(p.name) for p in function.params]
    return Outlined(module, _header(tvm, dict(zip(names, operands, strict=True)), symbols, len(workspaces), len(loops)))


def _sizes(tvm: Any, symbols: list[Any], workspaces: list[Any], loops: list[Any]) -> Any:
    """``void sizes(int32 symbols..., int64* out)``: bytes of every workspace, then extent and
    togetherness of every loop."""
    tirx = tvm.tirx
    values = []
    for buffer in workspaces:
        size = tirx.const(tvm.DataType(buffer.dtype).bits // 8, "int64")
        for extent in buffer.shape:
            size = size * tirx.Cast("int64", extent)
        values.append(size)
    for loop in loops:
        values += [loop.extent, loop.annotations.get(TOGETHER, 1)]
    out = tirx.decl_buffer((len(values),), "int64", name="out")
    converted = [tirx.const(value, "int64") if isinstance(value, int) else tirx.Cast("int64", value) for value in values]
    stores = [tirx.BufferStore(out, value, [i]) for i, value in enumerate(converted)]
    return tirx.PrimFunc([*symbols, out.data], tirx.SeqStmt([tirx.stmt.DeclBuffer(out), *stores]))


def _header(tvm: Any, operands: dict[str, Any], symbols: list[Any], workspaces: int, loops: int) -> str:
    """C: counts, the tensors of a call (size -1 - i: symbolic size i; the stride of rows that lie
    apart likewise, 0: they do not), prototypes, and functions that call them with arrays."""
    pointers = len(operands) + workspaces
    tensors = []
    for name, buffer in operands.items():
        dtype = str(buffer.dtype)
        code = _DTYPE_CODES[dtype.rstrip("0123456789")]
        dims = ", ".join(str(int(d)) if isinstance(d, (int, tvm.tirx.IntImm)) else str(-1 - _index(d, symbols)) for d in buffer.shape)
        apart = -1 - _index(buffer.strides[0], symbols) if buffer.strides else 0
        tensors.append(f'  {{"{name}", {code}, {tvm.DataType(dtype).bits}, {len(buffer.shape)}, {{{dims}}}, {apart}}},')
    names = ", ".join(f'"{symbol.name}"' for symbol in symbols)
    scalars, given = "int32_t, " * len(symbols), "".join(f"s[{i}], " for i in range(len(symbols)))
    lines = [
        f"enum {{ NUM_TENSORS = {len(operands)}, NUM_SYMBOLS = {len(symbols)}, NUM_WORKSPACES = {workspaces}, NUM_LOOPS = {loops} }};",
        "static const Expected TENSORS[] = {",
        *tensors,
        "};",
        f"static const char* const SYMBOLS[] = {{{names}}};",
        f"void sizes({scalars}int64_t* out);",
        *(f"void loop{i}(int32_t begin, int32_t end, {scalars}{', '.join(['void*'] * pointers)});" for i in range(loops)),
        f"static void sizes_of(const int32_t* s, int64_t* out) {{ sizes({given}out); }}",
        "static void run_loop(int loop, int32_t begin, int32_t end, const int32_t* s, void* const* p) {",
        "  switch (loop) {",
        *(f"    case {i}: loop{i}(begin, end, {given}{', '.join(f'p[{j}]' for j in range(pointers))}); break;" for i in range(loops)),
        "  }",
        "}",
    ]
    return "\n".join(lines) + "\n"


def _index(size: Any, symbols: list[Any]) -> int:
    return next(i for i, symbol in enumerate(symbols) if symbol.same_as(size))
