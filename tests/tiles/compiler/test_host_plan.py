"""What is read from a lowered host function and from PTX, on hand-made nodes: only their class names and fields are looked at."""

from __future__ import annotations

from typing import Any

import pytest

from tilebit.tiles.compiler.cuda import waits_for_predecessor
from tilebit.tiles.compiler.host_plan import FIELD_ARG, FIELD_SHAPE, FIELD_STRIDES, PITCH, Param, UnsupportedHost, _Reader

PARAMS = (Param("x", "float16", ("m", 8)), Param("workspace", "int32", ("words",)))


class _Node:
    """A TIR node: anything with fields, equal to itself alone."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class Var(_Node):
    name: str

    def __str__(self) -> str:
        return self.name


class Call(_Node): ...


class IntImm(_Node):
    value: int

    def __int__(self) -> int:
        return self.value


class BufferLoad(_Node): ...


def struct_get(handle: Any, index: int, field: int) -> Call:
    return Call(op=_Node(name="tirx.tvm_struct_get"), args=[handle, index, field])


def dimension(reader: _Reader, name: str, param: int, axis: int) -> Var:
    """The variable ``name``, bound to dimension ``axis`` of parameter ``param`` as a lowered host function binds it."""
    variable, shape, handle = Var(name=name), Var(name="shape"), Var(name=f"handle_{param}")
    reader.bound[handle] = struct_get(Var(name="args"), param, FIELD_ARG)
    reader.bound[shape] = struct_get(handle, 0, FIELD_SHAPE)
    reader.bound[variable] = BufferLoad(buffer=_Node(data=shape), indices=[axis])
    return variable


def test_a_launch_may_depend_on_any_length_but_the_workspace_s() -> None:
    """A workspace that comes as an address has no length: a grid computed from it would be empty."""
    reader = _Reader(PARAMS, {})
    assert reader.c(dimension(reader, "m", 0, 0)) == "dim_m"
    assert reader.symbols == {"m": (0, 0)}
    with pytest.raises(UnsupportedHost, match="the launch depends on 'words', a dimension of 'workspace'; accepted: other parameters"):
        reader.c(dimension(reader, "words", 1, 0))


def test_rows_that_lie_apart_hand_their_stride_to_the_kernel() -> None:
    """As a lowered function reads it: 1 where a tensor has no strides, which the stub's own reading never needs."""
    reader = _Reader((Param("x", "float16", ("m", 8), "x_pitch"), Param("y", "float16", ("m", 8))), {})

    def stride(name: str, param: int, axis: int) -> Var:
        variable = dimension(reader, name, param, axis)
        loaded = reader.bound[variable]
        reader.bound[loaded.buffer.data] = struct_get(reader.bound[loaded.buffer.data].args[0], 0, FIELD_STRIDES)
        missing = Call(op=_Node(name="tirx.isnullptr"), args=[loaded.buffer.data])
        reader.bound[variable] = Call(op=_Node(name="tirx.if_then_else"), args=[missing, IntImm(value=1), loaded])
        return variable

    assert reader.c(stride("x_pitch", 0, 0)) == "dim_x_pitch" and reader.symbols == {"x_pitch": (0, PITCH)}
    with pytest.raises(UnsupportedHost, match="'y_pitch' is a stride of 'y'; accepted: of operands whose rows lie apart"):
        reader.c(stride("y_pitch", 1, 0))
    with pytest.raises(UnsupportedHost, match="no tensor's shape and no stride of its rows"):
        reader.c(stride("x_columns", 0, 1))


PTX = """
.visible .entry first_kernel(
{
        ld.global.u32 %r1, [%rd1];
        ret;
}
.visible .entry first_kernel_1(
{
        griddepcontrol.launch_dependents;
        griddepcontrol.wait;
        ret;
}
.visible .entry last(
{
        griddepcontrol.launch_dependents;
        ret;
}
"""


@pytest.mark.parametrize(("kernel", "waits"), [("first_kernel", False), ("first_kernel_1", True), ("last", False), ("absent", False)])
def test_a_kernel_is_launched_early_only_if_its_own_code_waits(kernel: str, waits: bool) -> None:
    assert waits_for_predecessor(PTX, kernel) == waits
