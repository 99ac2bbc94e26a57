"""The host side of a compiled CUDA kernel as C: generated from a ``HostPlan``, compiled by the C
compiler, loaded by tvm_ffi.

The library exports ``run(*tensors)``, ``prepare(device)`` and, where a kernel waits for its
predecessor itself, ``run_dependent(*tensors)``, which launches it with the
programmatic-stream-serialization attribute: it may then start before the preceding kernel of its
stream has ended (``run`` never lets it). A parameter called ``workspace`` is given as a tensor or
as its address, an integer. The library embeds the cubin and finds the driver at the first call, so
that it is built and loaded on machines without a GPU or a CUDA toolkit. A call allocates nothing
and waits for nothing: it may be captured in a CUDA graph. It encodes a tensor map only when a
pointer or a dimension is new to it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from ..program import DEVICE_DIR
from .host_plan import PITCH, WORKSPACE, HostPlan, KernelArg, Launch, Param, TensorMap, dim_name

CUBIN_NAME = "kernel.cubin"
STUB_NAME = "host.c"
LIBRARY_NAME = "kernel.so"
DL_CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4}
DL_TYPES = {"float8_e4m3fn": (10, 8)}  # (code, bits) of types that are not named by a number of bits
MAX_DIMS = 6  # tb_param.dims


class StubError(Exception):
    """The host stub could not be generated or compiled."""


def c_compiler() -> str:
    """The C compiler: ``$CC``, else cc, gcc or clang from PATH. Raises ``StubError`` when there is
    none."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        found = name and shutil.which(name)
        if found:
            return found
    raise StubError(
        "no C compiler was found ($CC, cc, gcc, clang); it builds the host side of kernels. Install one, for example `apt-get install gcc`"
    )


def _dl_type(dtype: str) -> tuple[int, int]:
    if dtype in DL_TYPES:
        return DL_TYPES[dtype]
    kind = dtype.rstrip("0123456789")
    if kind not in DL_CODES:
        accepted = f"{', '.join(sorted(DL_CODES))} of a number of bits, {', '.join(DL_TYPES)}"
        raise StubError(f"a parameter has dtype {dtype!r}; accepted: {accepted}")
    return DL_CODES[kind], int(dtype[len(kind) :])


def _param(param: Param) -> str:
    if len(param.shape) > MAX_DIMS:
        raise StubError(f"parameter {param.name!r} has {len(param.shape)} dimensions; accepted: at most {MAX_DIMS}")
    code, bits = _dl_type(param.dtype)
    dims = ", ".join(str(d) if isinstance(d, int) else "-1" for d in param.shape)
    fixed = int(all(isinstance(d, int) for d in param.shape))
    address = int(param.name == WORKSPACE)
    apart = int(bool(param.pitch))
    return f'  {{"{param.name}", "{param.dtype}", {code}, {bits}, {len(param.shape)}, {{{dims}}}, {fixed}, {address}, {apart}}},'


def _symbols(plan: HostPlan) -> list[str]:
    """Bind every symbolic dimension where it is defined and compare it with the others that must
    equal it."""
    lines, defined = [], {}
    for name, index, axis in plan.symbols:
        value = f"tb_pitch(t[{index}])" if axis == PITCH else f"t[{index}]->shape[{axis}]"
        lines.append(f"  const int64_t {dim_name(name)} = {value};")
        defined[name] = (index, axis)
    for index, param in enumerate(plan.params):
        for axis, dim in enumerate(param.shape):
            if isinstance(dim, str) and defined.get(dim) != (index, axis):
                if dim not in defined:
                    raise StubError(
                        f"dimension {axis} of {param.name!r} is {dim!r}; accepted: a constant or one symbolic dimension of its own"
                    )
                got, expected = f"t[{index}]->shape[{axis}]", dim_name(dim)
                lines.append(f'  if ({got} != {expected}) return tb_wrong_dim("{param.name}", {axis}, {got}, "{dim}", {expected});')
    for name in defined:
        value = dim_name(name)
        lines.append(
            f'  if ({value} > INT32_MAX) return tb_fail("ValueError", "{name} is %lld; accepted: at most 2147483647", (long long){value});'
        )
    return lines


def _map(index: int, tensor_map: TensorMap, symbols: list[str]) -> list[str]:
    address = f"a{tensor_map.param}"
    expressions = " ".join((*tensor_map.dims, *tensor_map.strides, *tensor_map.box))
    used = [dim_name(name) for name in symbols if dim_name(name) in re.findall(r"\w+", expressions)]
    same = "".join(f" && slot{index}->symbols[{i}] == {name}" for i, name in enumerate(used))
    mix = "".join(f" ^ ((uint64_t){name} << 20)" for name in used)
    fields = [
        f".dtype = {tensor_map.dtype}, .rank = {len(tensor_map.dims)}",
        f".dims = {{{', '.join(f'(uint64_t){e}' for e in tensor_map.dims)}}}",
        f".strides = {{{', '.join(f'(uint64_t){e}' for e in tensor_map.strides) or '0'}}}",
        f".box = {{{', '.join(f'(uint32_t){e}' for e in tensor_map.box)}}}",
        f".steps = {{{', '.join(f'(uint32_t){e}' for e in tensor_map.element_strides)}}}",
        ", ".join(f".{n} = (int){e}" for n, e in zip(("interleave", "swizzle", "promotion", "fill"), tensor_map.options, strict=True)),
    ]
    return [
        f"  static _Thread_local tb_map_slot slots{index}[TB_MAP_SLOTS];",
        f"  tb_map_slot* slot{index} = &slots{index}[tb_slot((uint64_t){address}{mix})];",
        f"  if (!(slot{index}->address == {address}{same})) {{",
        *(f"    slot{index}->symbols[{i}] = {name};" for i, name in enumerate(used)),
        "    const tb_map_spec spec = {",
        *(f"      {f}," for f in fields),
        "    };",
        f"    if (tb_encode(slot{index}, &tb_params[{tensor_map.param}], {address}, &spec, device) != 0) return -1;",
        "  }",
    ]


def _launch(index: int, launch: Launch, kernels: list[str]) -> list[str]:
    declarations, pointers = [], []
    for position, arg in enumerate(launch.args):
        pointers.append(_argument(arg, f"k{index}_{position}", declarations))
    dependent = "dependent" if launch.dependent else "0"
    cluster = "NULL" if launch.cluster is None else f"cluster{index}"
    return [
        *declarations,
        f"  void* params{index}[] = {{{', '.join(pointers)}}};",
        f"  const int64_t block{index}[3] = {{{', '.join(launch.block)}}};",
        *([] if launch.cluster is None else [f"  const int64_t {cluster}[3] = {{{', '.join(launch.cluster)}}};"]),
        f"  if (grid{index}[0] > 0 && grid{index}[1] > 0 && grid{index}[2] > 0 &&",
        f"      tb_launch(device, {kernels.index(launch.kernel)}, grid{index}, block{index}, {cluster}, {dependent}, stream,",
        f"                params{index}) != 0) return -1;",
    ]


def _argument(arg: KernelArg, name: str, declarations: list[str]) -> str:
    if arg.kind == "pointer":
        return f"&a{arg.value}"
    if arg.kind == "map":
        return f"&slot{arg.value}->map"
    declarations.append(f"  {arg.kind}_t {name} = ({arg.kind}_t){arg.value};")
    return f"&{name}"


def _export(name: str, dependent: int) -> str:
    """One of the library's functions that launch."""
    return f"""TVM_FFI_DLL_EXPORT int __tvm_ffi_{name}(void* self, const TVMFFIAny* args, int32_t num_args, TVMFFIAny* result) {{
  (void)self;
  (void)result;
  return tb_run(args, num_args, {dependent});
}}

"""


def generate_stub(plan: HostPlan, program_name: str, arch: str) -> str:
    """C source of the host side of ``plan``; the cubin is read from ``kernel.cubin`` in the
    compiler's directory.

    Raises ``StubError`` for what the stub cannot express.
    """
    kernels = list(dict.fromkeys(launch.kernel for launch in plan.launches))
    smem = [next(launch.smem for launch in plan.launches if launch.kernel == kernel) for kernel in kernels]
    symbols = [name for name, _, _ in plan.symbols]
    grids = [f"  const int64_t grid{i}[3] = {{{', '.join(launch.grid)}}};" for i, launch in enumerate(plan.launches)]
    nothing = " && ".join(f"(grid{i}[0] <= 0 || grid{i}[1] <= 0 || grid{i}[2] <= 0)" for i in range(len(plan.launches)))
    names = "\n".join(f'  "{kernel}",' for kernel in kernels)
    body = [
        *_symbols(plan),
        *grids,
        f"  if ({nothing}) return 0;  /* no rows: nothing to launch */",
        *(f"  if (tb_check_alignment(&tb_params[{i}], t[{i}]) != 0) return -1;" for i in range(len(plan.params))),
        *(f"  void* a{i} = tb_data(t[{i}]);" for i in range(len(plan.params))),
        *(f"  (void)a{i};" for i in range(len(plan.params))),
        *(line for i, tensor_map in enumerate(plan.maps) for line in _map(i, tensor_map, symbols)),
        *(line for i, launch in enumerate(plan.launches) for line in _launch(i, launch, kernels)),
        "  return 0;",
    ]
    params = "\n".join(_param(p) for p in plan.params)
    exports = _export("run", 0) + (_export("run_dependent", 1) if any(launch.dependent for launch in plan.launches) else "")
    lines = "\n".join(body)
    return f"""/* Generated from the lowered host function; do not edit. */
#define TB_PROGRAM "{program_name}"
#define TB_ARCH "{arch}"
#define TB_PARAM_NAMES "{", ".join(p.name for p in plan.params)}"
#define TB_PARAMS {len(plan.params)}
#define TB_SYMBOLS {len(symbols)}
#define TB_KERNELS {len(kernels)}
#include "host_runtime.h"

__asm__(".section .rodata\\n.balign 64\\n.hidden tb_cubin\\n.globl tb_cubin\\n"
        "tb_cubin:\\n.incbin \\"{CUBIN_NAME}\\"\\n.byte 0\\n.previous\\n");

static const char* const tb_kernel_names[TB_KERNELS] = {{
{names}
}};
static const int tb_kernel_smem[TB_KERNELS] = {{{", ".join(smem)}}};
static const tb_param tb_params[TB_PARAMS] = {{
{params}
}};

static int tb_body(const DLTensor* const* t, int device, CUstream stream, int dependent) {{
{lines}
}}

{exports}TVM_FFI_DLL_EXPORT int __tvm_ffi_prepare(void* self, const TVMFFIAny* args, int32_t num_args, TVMFFIAny* result) {{
  (void)self;
  (void)result;
  if (num_args != 1 || args[0].type_index != kTVMFFIInt)
    return tb_fail("TypeError", "prepare takes one integer, the index of a CUDA device");
  return tb_prepare((int)args[0].v_int64);
}}
"""


def compile_stub(source: str, cubin: bytes, build_dir: Path) -> Path:
    """Write ``host.c`` and ``kernel.cubin`` into ``build_dir`` and compile ``kernel.so`` there;
    returns its path. Raises ``StubError``."""
    import tvm_ffi.libinfo

    (build_dir / CUBIN_NAME).write_bytes(cubin)
    (build_dir / STUB_NAME).write_text(source)
    includes = [DEVICE_DIR, tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path()]
    command = [c_compiler(), "-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wno-unused-function"]
    command += [f"-I{path}" for path in includes] + [STUB_NAME, "-o", LIBRARY_NAME, "-ldl", "-lpthread"]
    done = subprocess.run(command, cwd=build_dir, capture_output=True, text=True)
    if done.returncode != 0:
        raise StubError(f"the C compiler failed on the host stub ({' '.join(command)}):\n{done.stderr.strip()[-4000:]}")
    return build_dir / LIBRARY_NAME
