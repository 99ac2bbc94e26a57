"""From a PrimFunc whose body is parallel loops to C functions over ranges of their iterations.

A parallel loop in TVM is lowered to a call into TVM's runtime. Here every loop becomes ``void loop<i>(int32 begin, int32 end, int32 m,
pointers...)`` instead, and ``device/cpu_launch.c`` hands out the iterations. Accepted bodies: allocations (the call's workspace), then
parallel loops, over one symbolic size, ``m``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

THREADS = "tilebit.threads"  # attribute of the function: how many threads share a loop
TOGETHER = "tilebit.together"  # annotation of a loop: how many neighbouring iterations share data, and are best done by one thread
_DTYPE_CODES = {"int": "kDLInt", "uint": "kDLUInt", "float": "kDLFloat", "bfloat": "kDLBfloat"}


@dataclass(frozen=True, slots=True)
class Outlined:
    """``module`` has the C functions ``loop0 ..`` and ``sizes``; ``header`` declares them and the tensors of a call."""

    module: Any
    header: str


def outline(function: Any) -> Outlined:
    """Raises ``ValueError`` for a body that is anything but allocations and parallel loops over one symbolic size."""
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
    symbols = {d for buffer in operands for d in buffer.shape if isinstance(d, tirx.Var)}
    if len(symbols) != 1:
        raise ValueError(f"the function's tensors have the symbolic sizes {sorted(map(str, symbols))}; accepted: one, m")
    (m,) = symbols
    # TVM's LLVM code generator crashes on a pointer to bf16: such tensors arrive as pointers to their bits.
    bits = {b.data: tirx.Var(b.data.name, tvm.ir.PointerType(tvm.ir.PrimType("uint16"))) for b in operands if b.dtype == "bfloat16"}
    pointers = [bits.get(buffer.data, buffer.data) for buffer in (*operands, *workspaces)]

    functions = {"sizes": _sizes(tvm, m, workspaces, loops)}
    for number, loop in enumerate(loops):
        begin, end = tirx.Var("begin", "int32"), tirx.Var("end", "int32")
        iterations = tirx.stmt_functor.substitute(loop.body, bits)
        serial = tirx.For(loop.loop_var, begin, end - begin, tirx.ForKind.SERIAL, iterations)
        functions[f"loop{number}"] = tirx.PrimFunc([begin, end, m, *pointers], serial).with_attr("tirx.noalias", True)
    module = tvm.IRModule({name: f.with_attr("global_symbol", name) for name, f in functions.items()})
    names = [str(p.name) for p in function.params]
    return Outlined(module, _header(tvm, dict(zip(names, operands, strict=True)), len(workspaces), len(loops)))


def _sizes(tvm: Any, m: Any, workspaces: list[Any], loops: list[Any]) -> Any:
    """``void sizes(int32 m, int64* out)``: bytes of every workspace, then extent and togetherness of every loop."""
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
    return tirx.PrimFunc([m, out.data], tirx.SeqStmt([tirx.stmt.DeclBuffer(out), *stores]))


def _header(tvm: Any, operands: dict[str, Any], workspaces: int, loops: int) -> str:
    """C: counts, the tensors of a call (size -1: m), prototypes, and one function that calls any loop with an array of pointers."""
    pointers = len(operands) + workspaces
    tensors = []
    for name, buffer in operands.items():
        dtype = str(buffer.dtype)
        code = _DTYPE_CODES[dtype.rstrip("0123456789")]
        dims = ", ".join(str(int(d)) if isinstance(d, (int, tvm.tirx.IntImm)) else "-1" for d in buffer.shape)
        tensors.append(f'  {{"{name}", {code}, {tvm.DataType(dtype).bits}, {len(buffer.shape)}, {{{dims}}}}},')
    lines = [
        f"enum {{ NUM_TENSORS = {len(operands)}, NUM_WORKSPACES = {workspaces}, NUM_LOOPS = {loops} }};",
        "static const Expected TENSORS[] = {",
        *tensors,
        "};",
        "void sizes(int32_t m, int64_t* out);",
        *(f"void loop{i}(int32_t begin, int32_t end, int32_t m{', void*' * pointers});" for i in range(loops)),
        "static void run_loop(int loop, int32_t begin, int32_t end, int32_t m, void* const* p) {",
        "  switch (loop) {",
        *(f"    case {i}: loop{i}(begin, end, m{''.join(f', p[{j}]' for j in range(pointers))}); break;" for i in range(loops)),
        "  }",
        "}",
    ]
    return "\n".join(lines) + "\n"
