"""What the host does for one kernel call, read from the lowered host function: tensor maps, kernel
arguments, launch geometry.

Nothing here is copied by hand: every number is an expression of the lowered host function, written
as C over the symbolic dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...schedules.operands import WORKSPACE, Operand

BINARY = {
    "Add": "({} + {})",
    "Sub": "({} - {})",
    "Mul": "({} * {})",
    "FloorDiv": "tb_floordiv({}, {})",
    "FloorMod": "tb_floormod({}, {})",
    "Min": "tb_min({}, {})",
    "Max": "tb_max({}, {})",
    "EQ": "({} == {})",
    "NE": "({} != {})",
    "LT": "({} < {})",
    "LE": "({} <= {})",
    "GT": "({} > {})",
    "GE": "({} >= {})",
    "And": "({} && {})",
    "Or": "({} || {})",
}
CALLS = {
    "tirx.shift_right": "({} >> {})",
    "tirx.shift_left": "({} << {})",
    "tirx.bitwise_and": "({} & {})",
    "tirx.if_then_else": "({} ? {} : {})",
}
# tvm_struct_get fields: DLTensor.data, .shape, .strides, TVMFFIAny payload
FIELD_DATA, FIELD_SHAPE, FIELD_STRIDES, FIELD_ARG = 1, 2, 3, 15
PITCH = -1  # of a symbol: no dimension, but the stride of the first one
GEOMETRY_TAGS = ("blockIdx.x", "blockIdx.y", "blockIdx.z", "threadIdx.x", "threadIdx.y", "threadIdx.z")
CLUSTER_TAGS = ("tir.cluster_dim_x", "tir.cluster_dim_y", "tir.cluster_dim_z")
DYNAMIC_SMEM_TAG = "tirx.use_dyn_shared_memory"


class UnsupportedHost(Exception):
    """The lowered host function does something the host stub cannot express."""


@dataclass(frozen=True, slots=True)
class Param:
    """One tensor argument: ``shape`` holds ints and names of symbolic dimensions; ``pitch`` names
    the stride of its first dimension, where rows may lie apart."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    pitch: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "dtype": self.dtype, "shape": list(self.shape)}


@dataclass(frozen=True, slots=True)
class TensorMap:
    """One ``cuTensorMapEncodeTiled`` call: C expressions, innermost dimension first; ``strides``
    are bytes of dimensions 1.. ."""

    param: int
    dtype: str
    dims: tuple[str, ...]
    strides: tuple[str, ...]
    box: tuple[str, ...]
    element_strides: tuple[str, ...]
    options: tuple[str, ...]  # interleave, swizzle, L2 promotion, out-of-bounds fill


@dataclass(frozen=True, slots=True)
class KernelArg:
    """``kind`` is "pointer" (``value``: parameter index), "map" (tensor map index), "int32" or
    "int64" (C expression)."""

    kind: str
    value: int | str


@dataclass(frozen=True, slots=True)
class Launch:
    kernel: str
    args: tuple[KernelArg, ...]
    grid: tuple[str, str, str]
    block: tuple[str, str, str]
    cluster: tuple[str, str, str] | None
    smem: str
    dependent: bool = False  # the kernel waits for its predecessor itself: `run_dependent` may launch it before that has ended


@dataclass(frozen=True, slots=True)
class HostPlan:
    params: tuple[Param, ...]
    symbols: tuple[tuple[str, int, int], ...]  # name, and the (parameter, dimension or PITCH) that defines it
    maps: tuple[TensorMap, ...]
    launches: tuple[Launch, ...]


def describe_params(function: Any, names: tuple[str, ...], declared: Sequence[Operand]) -> tuple[Param, ...]:
    """The tensor parameters of a PrimFunc, under the names that callers know them by.

    Raises ``UnsupportedHost`` when the counts differ, a parameter is no dense tensor, or it is not
    what the workload ``declared`` under that name (a workspace is declared by the rule: int32, of
    any length).
    """
    if len(function.params) != len(names):
        raise UnsupportedHost(
            f"the workload has {len(names)} parameters {names} and the program's function {len(function.params)}; make them agree"
        )
    known = {o.name: o for o in declared}
    params = []
    for var, name in zip(function.params, names, strict=True):
        if var not in function.buffer_map:
            raise UnsupportedHost(f"parameter {name!r} is a scalar; accepted: tensors")
        buffer = function.buffer_map[var]
        shape = tuple(int(d) if type(d).__name__ == "IntImm" else str(d) for d in buffer.shape)
        wanted = known.get(name, Operand(name, "int32", ("words",)))
        param = Param(name, str(buffer.dtype), shape, wanted.pitch if wanted.apart else "")
        fits = len(shape) == len(wanted.shape) and all(isinstance(b, str) or a == b for a, b in zip(shape, wanted.shape, strict=True))
        if not fits or param.dtype != wanted.dtype:
            raise UnsupportedHost(f"the program takes {name} as {param.dtype} {list(shape)}; the workload declares {wanted.text()}")
        params.append(param)
    return tuple(params)


class _Reader:
    def __init__(self, params: tuple[Param, ...], device_functions: dict[str, Any]) -> None:
        self.params = params
        self.device_functions = device_functions
        self.bound: dict[Any, Any] = {}  # variable -> the expression that defines it
        self.symbols: dict[str, tuple[int, int]] = {}
        self.map_of: dict[Any, int] = {}
        self.maps: list[TensorMap] = []
        self.launches: list[Launch] = []

    def statement(self, stmt: Any) -> None:
        kind = type(stmt).__name__
        if kind == "SeqStmt":
            for child in stmt.seq:
                self.statement(child)
        elif kind == "AttrStmt":
            self.statement(stmt.body)
        elif kind == "Bind":
            self.bound[stmt.var] = stmt.value
        elif kind in ("AssertStmt", "DeclBuffer"):
            pass  # the stub checks its arguments against the program's own parameters
        elif kind == "Evaluate":
            self.call(stmt.value)
        else:
            raise UnsupportedHost(f"the host function contains a {kind}; the stub runs straight-line launches only")

    def call(self, call: Any) -> None:
        if type(call).__name__ != "Call":
            return
        if call.op.name == "tirx.ret":
            return
        if call.op.name != "tirx.tvm_call_packed":
            raise UnsupportedHost(f"the host function calls {call.op.name}; the stub knows tvm_call_packed only")
        name, args = call.args[0].value, list(call.args[1:])
        if name == "__tvm_set_device":
            return
        if name == "__tvm_tensormap_create_tiled":
            self.tensor_map(args)
        elif name in self.device_functions:
            self.launch(name, args)
        else:
            raise UnsupportedHost(f"the host function calls {name!r}; the stub knows tiled tensor maps and kernel launches")

    def tensor_map(self, args: list[Any]) -> None:
        rank = int(args[2])
        dims, strides, box, steps = (tuple(self.c(a) for a in args[4 + i * rank : 4 + (i + 1) * rank]) for i in range(4))
        options = tuple(self.c(a) for a in args[4 + 4 * rank :])
        self.map_of[args[0]] = len(self.maps)
        self.maps.append(TensorMap(self.pointer(args[3]), self.c(args[1]), dims, strides[1:], box, steps, options))

    def launch(self, name: str, args: list[Any]) -> None:
        function = self.device_functions[name]
        tags = [str(tag) for tag in function.attrs["tirx.kernel_launch_params"]]
        values = {tag: self.c(a) for tag, a in zip(tags, args[len(args) - len(tags) :], strict=True)}
        unknown = set(tags) - {*GEOMETRY_TAGS, *CLUSTER_TAGS, DYNAMIC_SMEM_TAG}
        if unknown:
            raise UnsupportedHost(
                f"kernel {name} is launched with {sorted(unknown)}; the stub knows grid, block, cluster and dynamic shared memory"
            )
        x, y, z, tx, ty, tz = (values.get(tag, "1") for tag in GEOMETRY_TAGS)
        cluster = tuple(values.get(tag, "1") for tag in CLUSTER_TAGS) if CLUSTER_TAGS[0] in values else None
        kernel_args = tuple(self.kernel_arg(a) for a in args[: len(args) - len(tags)])
        smem = values.get(DYNAMIC_SMEM_TAG, "0")
        if not smem.isdigit():
            raise UnsupportedHost(f"kernel {name} wants {smem} bytes of dynamic shared memory; accepted: a constant")
        self.launches.append(Launch(name, kernel_args, (x, y, z), (tx, ty, tz), cluster, smem))  # type: ignore[arg-type]

    def kernel_arg(self, expr: Any) -> KernelArg:
        if expr in self.map_of:
            return KernelArg("map", self.map_of[expr])
        dtype = str(expr.dtype)
        if dtype == "handle":
            return KernelArg("pointer", self.pointer(expr))
        if dtype not in ("int32", "int64"):
            raise UnsupportedHost(f"a kernel argument has type {dtype}; accepted: tensors and integers")
        return KernelArg(dtype, self.c(expr))

    def pointer(self, expr: Any) -> int:
        """The parameter whose data pointer ``expr`` is."""
        value = self.bound.get(expr, expr)
        if _is_struct_get(value, FIELD_DATA):
            return self.argument(value.args[0])
        raise UnsupportedHost(f"{expr} is no tensor argument's data pointer")

    def argument(self, handle: Any) -> int:
        """The index of the argument that a tensor handle came from."""
        value = self.bound.get(handle, handle)
        if type(value).__name__ == "Select":  # a tensor object or a plain DLTensor*
            value = value.false_value
        if _is_struct_get(value, FIELD_ARG):
            return int(value.args[1])
        raise UnsupportedHost(f"{handle} is no tensor argument")

    def c(self, expr: Any) -> str:
        """``expr`` as a C expression of int64_t over the symbolic dimensions."""
        kind = type(expr).__name__
        if kind == "IntImm":
            return str(int(expr))
        if kind == "Var":
            return self.symbol(expr)
        if kind == "Cast":
            return self.c(expr.value)
        if kind in BINARY:
            return BINARY[kind].format(self.c(expr.a), self.c(expr.b))
        if kind == "Select":
            return f"({self.c(expr.condition)} ? {self.c(expr.true_value)} : {self.c(expr.false_value)})"
        if kind == "Call" and expr.op.name in CALLS:
            return CALLS[expr.op.name].format(*(self.c(a) for a in expr.args))
        raise UnsupportedHost(f"{expr} ({kind}) in the host function is no integer expression of the shapes")

    def symbol(self, var: Any) -> str:
        value = self.bound.get(var)
        if value is None:
            raise UnsupportedHost(f"{var} is not defined by the host function")
        given = value.args[2] if _is_optional(value) else value
        inner = given.value if type(given).__name__ == "Cast" else given
        if type(inner).__name__ != "BufferLoad":
            return self.c(value)
        source, name = self.bound.get(inner.buffer.data), str(var)
        if source is not None and _is_struct_get(source, FIELD_SHAPE):
            place = (self.argument(source.args[0]), int(inner.indices[0]))
        elif source is not None and _is_struct_get(source, FIELD_STRIDES) and int(inner.indices[0]) == 0:
            place = (self.argument(source.args[0]), PITCH)
            if self.params[place[0]].pitch != name:
                raise UnsupportedHost(f"{name!r} is a stride of {self.params[place[0]].name!r}; accepted: of operands whose rows lie apart")
        else:
            raise UnsupportedHost(f"{var} is read from {inner}, which is no tensor's shape and no stride of its rows")
        if self.params[place[0]].name == WORKSPACE:
            raise UnsupportedHost(
                f"the launch depends on {name!r}, a dimension of {WORKSPACE!r}; accepted: other parameters' dimensions, because a "
                f"workspace may come as an address alone"
            )
        if self.symbols.setdefault(name, place) != place:
            raise UnsupportedHost(f"two dimensions are both called {name!r}; give them different names")
        return dim_name(name)


def dim_name(symbol: str) -> str:
    """The C variable of a symbolic dimension."""
    return f"dim_{symbol}"


def _is_optional(expr: Any) -> bool:
    """Whether ``expr`` is what a tensor holds, or another number where it has none (strides)."""
    asked = expr.args[0] if type(expr).__name__ == "Call" and expr.op.name == "tirx.if_then_else" else None
    return asked is not None and type(asked).__name__ == "Call" and asked.op.name == "tirx.isnullptr"


def _is_struct_get(expr: Any, field: int) -> bool:
    return type(expr).__name__ == "Call" and expr.op.name == "tirx.tvm_struct_get" and int(expr.args[2]) == field


def read_host(host_module: Any, device_module: Any, params: tuple[Param, ...]) -> HostPlan:
    """The ``HostPlan`` of a lowered module pair (``CompiledArtifact.host_mod``, ``.device_mod``).

    Raises ``UnsupportedHost``, with a sentence, for anything it cannot express exactly.
    """
    device_functions = {str(f.attrs["global_symbol"]): f for f in device_module.functions.values()}
    host_functions = list(host_module.functions.values())
    if len(host_functions) != 1:
        raise UnsupportedHost(f"the lowered module has {len(host_functions)} host functions; accepted: 1")
    reader = _Reader(params, device_functions)
    reader.statement(host_functions[0].body)
    if not reader.launches:
        raise UnsupportedHost("the host function launches no kernel")
    # a dimension of a parameter may be symbolic without being needed by the launch (a workspace's
    # length): it is bound all the same
    for index, param in enumerate(params):
        for axis, dim in enumerate(param.shape):
            if isinstance(dim, str) and dim.isidentifier():
                reader.symbols.setdefault(dim, (index, axis))
    symbols = tuple((name, *place) for name, place in reader.symbols.items())
    return HostPlan(params, symbols, tuple(reader.maps), tuple(reader.launches))
