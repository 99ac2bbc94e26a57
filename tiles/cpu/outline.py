"""From a PrimFunc whose body is parallel loops to C functions over ranges of their iterations, and the C declarations that ``device/cpu_launch.c`` calls them by.

A parallel loop in TVM is lowered to a call into TVM's runtime. Here every loop becomes ``void loop<i>(int32 begin, int32 end, int32 m, pointers...)`` instead, and the
launcher hands out the iterations. Accepted bodies: allocations (workspace of the call), then parallel loops, in that order, over one symbolic size, ``m``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TOGETHER = "tilebit.together"  # loop annotation: how many neighbouring iterations share data, and so are best done by one thread
_DTYPE_CODES = {"int": "kDLInt", "uint": "kDLUInt", "float": "kDLFloat", "bfloat": "kDLBfloat"}


@dataclass(frozen=True, slots=True)
class Outlined:
    """``module`` has the functions ``loop0 ..`` and ``sizes``, with C arguments; ``header`` declares them and the tensors of a call."""

    module: Any
    header: str


def outline(function: Any) -> Outlined:
    """Raises ``ValueError`` for a body that is anything but allocations and parallel loops over one symbolic size."""
    import tvm
    from tvm import tirx

    body = function.body
    statements = list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]
    workspaces = [s.buffer for s in statements if isinstance(s, tirx.stmt.AllocBuffer)]
    loops = [s for s in statements if isinstance(s, tirx.For) and s.kind == tirx.ForKind.PARALLEL]
    if not loops or len(workspaces) + len(loops) != len(statements):
        found = [type(s).__name__ for s in statements]
        raise ValueError(f"the function's statements are {found}; accepted: allocations, then parallel loops")
    operands = [function.buffer_map[p] for p in function.params]
    sizes = {d for buffer in operands for d in buffer.shape if isinstance(d, tirx.Var)}
    if len(sizes) != 1:
        raise ValueError(f"the function's tensors have the symbolic sizes {sorted(map(str, sizes))}; accepted: one, m")
    (m,) = sizes
    # TVM's LLVM code generator has no type for a pointer to bf16 (it crashes): such tensors arrive as pointers to their bits.
    bits = {b.data: tirx.Var(b.data.name, tvm.ir.PointerType(tvm.ir.PrimType("uint16"))) for b in operands if b.dtype == "bfloat16"}
    pointers = [bits.get(buffer.data, buffer.data) for buffer in (*operands, *workspaces)]

    functions = {}
    for number, loop in enumerate(loops):
        begin, end = tirx.Var("begin", "int32"), tirx.Var("end", "int32")
        serial = tirx.For(loop.loop_var, begin, end - begin, tirx.ForKind.SERIAL, tirx.stmt_functor.substitute(loop.body, bits))
        functions[f"loop{number}"] = tirx.PrimFunc([begin, end, m, *pointers], serial).with_attr("tirx.noalias", True)

    # What the launcher must compute from m, in one array: bytes of every workspace, then extent and togetherness of every loop.
    out = tirx.decl_buffer((len(workspaces) + 2 * len(loops),), "int64", name="out")
    values = [_product([*(d.astype("int64") if hasattr(d, "astype") else d for d in b.shape)]) * (tvm.DataType(b.dtype).bits // 8) for b in workspaces]
    for loop in loops:
        values += [loop.extent, loop.annotations.get(TOGETHER, tirx.const(1, "int32"))]
    stores = [tirx.BufferStore(out, tirx.Cast("int64", value) if hasattr(value, "dtype") else tirx.const(value, "int64"), [i]) for i, value in enumerate(values)]
    functions["sizes"] = tirx.PrimFunc([m, out.data], tirx.SeqStmt([tirx.stmt.DeclBuffer(out), *stores]))
    module = tvm.IRModule({name: f.with_attr("global_symbol", name) for name, f in functions.items()})
    return Outlined(module, _header([(str(p.name), b) for p, b in zip(function.params, operands, strict=True)], len(workspaces), len(loops)))


def _product(factors: list[Any]) -> Any:
    product = factors[0]
    for factor in factors[1:]:
        product = product * factor
    return product


def _header(operands: list[tuple[str, Any]], workspaces: int, loops: int) -> str:
    """C: counts, the tensors of a call ("-1": m), prototypes, and one function that calls any loop with an array of pointers."""
    import tvm

    pointers = len(operands) + workspaces
    rows = []
    for name, buffer in operands:
        dtype = str(buffer.dtype)
        code = _DTYPE_CODES[dtype.rstrip("0123456789")]
        dims = ", ".join(str(int(d)) if isinstance(d, (int, tvm.tirx.IntImm)) else "-1" for d in buffer.shape)
        rows.append(f'  {{"{name}", {code}, {tvm.DataType(dtype).bits}, {len(buffer.shape)}, {{{dims}}}}},')
    prototypes = [f"void loop{i}(int32_t begin, int32_t end, int32_t m{', void*' * pointers});" for i in range(loops)]
    cases = [f"    case {i}: loop{i}(begin, end, m{''.join(f', p[{j}]' for j in range(pointers))}); break;" for i in range(loops)]
    return "\n".join([
        f"enum {{ NUM_TENSORS = {len(operands)}, NUM_WORKSPACES = {workspaces}, NUM_LOOPS = {loops} }};",
        "static const Expected TENSORS[] = {", *rows, "};",
        "void sizes(int32_t m, int64_t* out);", *prototypes,
        "static void run_loop(int loop, int32_t begin, int32_t end, int32_t m, void* const* p) {", "  switch (loop) {", *cases, "  }", "}", "",
    ])  # fmt: skip
