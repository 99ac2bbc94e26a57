"""What generated CUDA calls of TileLang, stated by ``tiles/device/tilelang`` and this file in place
of TileLang's own headers. Those include CUTLASS: half and more of the time that nvcc takes for a
kernel, whose machine code is the same (``results/notes/compile-time.md``)."""

from __future__ import annotations

import re

from ..program import DEVICE_DIR

FILES = ("tilelang/numbers.cuh", "tilelang/warps.cuh", "tilelang/hopper.cuh")
THEIRS = "#if defined(_MSC_VER)"  # begins TileLang's includes
KERNEL = 'extern "C" __global__'  # ends them
# A product of a warpgroup: its left side in registers or shared memory, types of operands and sums,
# columns, depth, and which sides lie across.
WGMMA = re.compile(
    r"tl::wgmma_(rs|ss)<tl::DataType::k(\w+), tl::DataType::k\2, tl::DataType::k(\w+), 64, (\d+), (\d+), (true|false), (true|false), 1, 1>"
)
OPERANDS = {"Float16": "f16", "BFloat16": "bf16", "Int8": "s8", "Float8_e4m3": "e4m3"}  # as PTX names them
SUMS = {"Float32": ("f32", "f", "float"), "Int32": ("s32", "r", "uint32_t")}  # in PTX, as a constraint, in C++
LEFT = {"rs": "const uint32_t* a", "ss": "uint64_t a"}
PARAMETERS = "DataType A, DataType B, DataType C, int M, int N, int K, bool A_ACROSS, bool B_ACROSS, int, int"


def with_own_prelude(source: str) -> str | None:
    """``source`` as TileLang generated it, with our statements in the place of its includes. None
    where it has none that are known here."""
    start = source.find(THEIRS)
    kernel = source.find(KERNEL, start)
    if start < 0 or kernel < 0:
        return None
    ours = [(DEVICE_DIR / name).read_text() for name in FILES]
    return "\n".join((source[:start], *ours, _warpgroup_products(source[kernel:]), source[kernel:]))


def _warpgroup_products(kernel: str) -> str:
    """A function for each kind of warpgroup product that ``kernel`` calls."""
    kinds = sorted(set(WGMMA.findall(kernel)))
    forms = sorted({form for form, *_ in kinds})
    general = [
        f"template <{PARAMETERS}>\n__device__ void wgmma_{form}({LEFT[form]}, uint64_t b, uint32_t* d, bool keep);" for form in forms
    ]
    return "\n".join(("namespace tl {", *general, *(_product(*kind) for kind in kinds), "}  // namespace tl")) if kinds else ""


def _product(form: str, operand: str, total: str, n: str, k: str, a_across: str, b_across: str) -> str:
    """d = a * b, added to d where ``keep`` (PTX ISA, ``wgmma.mma_async``). Registers of a thread: n / 2
    of d, 4 of an a that is not in shared memory."""
    ptx, constraint, type_name = SUMS[total]
    sums, left = int(n) // 2, 4 if form == "rs" else 1
    flags = [] if operand == "Int8" else ["1", "1"]  # neither side is negated, which integers cannot be
    if operand in ("Float16", "BFloat16"):  # others never lie across
        flags += [str(int(across == "true")) for across in ((a_across, b_across) if form == "ss" else (b_across,))]
    d = ", ".join(f"%{i}" for i in range(sums))
    a = "{" + ", ".join(f"%{sums + i}" for i in range(4)) + "}" if form == "rs" else f"%{sums}"
    name = f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{ptx}.{OPERANDS[operand]}.{OPERANDS[operand]}"
    call = ", ".join((f"{name} {{{d}}}", a, f"%{sums + left}", "p", *flags))
    outputs = ", ".join(f'"+{constraint}"(s[{i}])' for i in range(sums))
    inputs = ", ".join(f'"r"(a[{i}])' for i in range(4)) if form == "rs" else '"l"(a)'
    types = f"DataType::k{operand}, DataType::k{operand}, DataType::k{total}, 64, {n}, {k}, {a_across}, {b_across}, 1, 1"
    return f"""template <>
__device__ __forceinline__ void wgmma_{form}<{types}>({LEFT[form]}, uint64_t b, uint32_t* d, bool keep) {{
  {type_name}* s = reinterpret_cast<{type_name}*>(d);
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{sums + left + 1}, 0;\\n{call};\\n}}"
               : {outputs}
               : {inputs}, "l"(b), "r"(static_cast<int32_t>(keep)));
}}"""
