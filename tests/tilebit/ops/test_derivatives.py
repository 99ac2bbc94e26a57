"""Derivatives of a product with respect to x and bias: those of torch's own product with the
dequantized weight, however they are asked for; every other derivative is refused before a launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from door_cases import FORMATS, K, N, exact, workload
from torch import Tensor
from torch.autograd import grad

import tilebit
from tilebit.ops import gemm as ops

EVERY = pytest.mark.parametrize("case", [*FORMATS, ("sample.two_levels", "bfloat16", True)], ids=lambda case: f"{case[0]}-{case[1]}")


class Products:
    """A product of tilebit and torch's of the same numbers, in fp32 inside: both functions of x and bias."""

    def __init__(self, case: tuple[str, str, bool], rows: int = 5) -> None:
        _, self.packed, bias, _ = exact(workload(case, rows))
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randint(-4, 5, (rows, K), generator=generator).to(self.packed.dtype)
        self.bias = torch.randint(-4, 5, (N,), generator=generator).to(self.packed.dtype) if bias is not None else None
        self.dy = torch.randint(-2, 3, (rows, N), generator=generator).to(self.packed.dtype)
        self.weight = self.packed.unpack().dequantize(self.packed.dtype)

    def ours(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return tilebit.gemm(x, self.packed, bias)

    def raw(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        p = self.packed
        return torch.ops.tilebit.gemm.default(x, p.weight, p.scales, p.zeros, p.row_scales, bias, N, p.format_name)

    def torchs(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.nn.functional.linear(x, self.weight, bias)

    @property
    def both(self) -> tuple[Callable[..., Tensor], ...]:
        return self.ours, self.raw


def close(got: Any, expected: Any) -> None:
    """Equal but for the rounding of 16-bit values in between; tensors, or tuples of them."""
    if isinstance(got, tuple | list):
        assert len(got) == len(expected)
        for pair in zip(got, expected, strict=True):
            close(*pair)
        return
    assert got.shape == expected.shape and got.dtype == expected.dtype
    assert float((got.float() - expected.float()).norm() / expected.float().norm()) < 2**-6


@EVERY
def test_backward_of_x_and_bias(cpu_kernels, case):
    p = Products(case)
    for shape in ((5, K), (5, 1, K)):
        for product in p.both:
            x = p.x.clone().view(shape).requires_grad_()
            bias = None if p.bias is None else torch.nn.Parameter(p.bias.clone())
            dy = p.dy.view(*shape[:-1], N)
            wanted = [x] if bias is None else [x, bias]
            y = product(x, bias)
            assert torch.equal(y, p.ours(x.detach(), p.bias))
            got, expected = grad(y, wanted, dy), grad(p.torchs(x, bias), wanted, dy)
            close(got, expected)
            assert got[0].abs().max() > 0
    x = p.x[0].clone().requires_grad_()
    bias = torch.nn.Parameter(torch.zeros(N, dtype=x.dtype)) if p.bias is not None else None
    wanted = [x] if bias is None else [x, bias]
    close(grad(p.ours(x, bias), wanted, p.dy[0]), grad(p.torchs(x, bias), wanted, p.dy[0]))


def test_only_the_bias_is_trained(cpu_kernels):
    p = Products(FORMATS[1])
    assert p.bias is not None
    bias = torch.nn.Parameter(p.bias.clone())
    (got,) = grad(p.ours(p.x, bias), [bias], p.dy)
    assert torch.equal(got, p.dy.sum(0))


def test_a_layer_on_a_trained_input(cpu_kernels):
    """What stands before a frozen layer learns through it; act-order columns find their places."""
    p = Products(FORMATS[0])
    perm = torch.randperm(K, generator=torch.Generator().manual_seed(0))
    q = p.packed
    layer = tilebit.QuantLinear(tilebit.PackedWeight(q.weight, q.scales, q.zeros, N, K, q.format, q.dtype, "cpu", perm))
    x = p.x.clone().requires_grad_()
    layer(x).backward(p.dy)
    assert x.grad is not None
    close(x.grad, p.dy @ layer.unpack().dequantize(x.dtype))


def test_double_backward(cpu_kernels):
    p = Products(FORMATS[1])

    def second(product: Callable[..., Tensor]) -> Tensor:
        x = p.x.clone().requires_grad_()
        (first,) = grad((product(x, p.bias).float() / 64).pow(3).sum(), x, create_graph=True)
        return grad(first.float().pow(2).sum(), x)[0]

    for product in p.both:
        close(second(product), second(p.torchs))


@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "vmap of grad", "grad of vmap", "jacrev", "jacfwd", "vmap of both"])
def test_transforms_of_torch_func(cpu_kernels, transform):
    p, f = Products(FORMATS[1]), torch.func
    assert p.bias is not None
    bias = p.bias

    def result(product: Callable[..., Tensor]) -> Any:
        def loss(x: Tensor) -> Tensor:
            return (product(x, bias).float() / 64).pow(2).sum()

        if transform == "grad":
            return f.grad(lambda x, b: (product(x, b).float() / 64).pow(2).sum(), argnums=(0, 1))(p.x, bias)
        if transform == "vjp":
            return f.vjp(product, p.x, bias)[1](p.dy)
        if transform == "jvp":
            return f.jvp(product, (p.x, bias), (p.x, bias)), f.jvp(lambda b: product(p.x, b), (bias,), (bias,))
        if transform == "vmap of grad":
            return torch.vmap(f.grad(loss))(p.x)
        if transform == "grad of vmap":
            return f.grad(lambda x: (torch.vmap(lambda row: product(row, bias))(x).float() / 64).pow(2).sum())(p.x)
        if transform in ("jacrev", "jacfwd"):
            return getattr(f, transform)(lambda t: product(p.x * t, bias).sum(0))(torch.ones(5, 1, dtype=p.x.dtype))
        return torch.vmap(product, in_dims=(1, 0))(p.x.t(), torch.stack([bias * i for i in range(5)]))

    expected = result(p.torchs)
    for product in p.both:
        close(result(product), expected)


def test_vmap_is_one_product(cpu_kernels, launches):
    p = Products(FORMATS[0], 33)
    ops.dispatch.forget()
    assert torch.equal(torch.vmap(p.ours, in_dims=1, out_dims=0)(p.x.t()), p.ours(p.x))
    assert {rows for _, rows in launches.seen} == {33}


def test_forward_mode(cpu_kernels):
    p = Products(FORMATS[0])
    with forward_ad.dual_level():
        for product in p.both:
            y = forward_ad.unpack_dual(product(forward_ad.make_dual(p.x, p.x.flip(0)), p.bias))
            close(y.tangent, p.torchs(p.x.flip(0)))
            assert torch.equal(y.primal, p.ours(p.x, p.bias))
            plain = forward_ad.unpack_dual(product(p.x, p.bias))
            assert plain.tangent is None


@pytest.mark.parametrize("dynamic", [False, True])
def test_derivatives_of_a_compiled_function(cpu_kernels, dynamic):
    p = Products(FORMATS[1])
    assert p.bias is not None
    traced = torch.compile(lambda x, b: p.ours(x * 1, b) * 2, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (5, 3):
        x, bias = p.x[:rows].clone().requires_grad_(), torch.nn.Parameter(p.bias)
        close(grad(traced(x, bias), [x, bias], p.dy[:rows]), grad(p.torchs(x, bias) * 2, [x, bias], p.dy[:rows]))
    inside = torch.compile(torch.func.grad(lambda x: (p.ours(x, p.bias).float() / 64).pow(2).sum()), fullgraph=True, backend="aot_eager")
    close(inside(p.x), torch.func.grad(lambda x: (p.torchs(x, p.bias).float() / 64).pow(2).sum())(p.x))


def test_opcheck_with_derivatives(cpu_kernels):
    p = Products(FORMATS[1])
    q = p.packed
    assert p.bias is not None
    bias = torch.nn.Parameter(p.bias)
    arguments = (p.x.clone().requires_grad_(), q.weight, q.scales, q.zeros, q.row_scales, bias, N, q.format_name)
    assert set(torch.library.opcheck(torch.ops.tilebit.gemm.default, arguments).values()) == {"SUCCESS"}
    weight = (q.weight, q.scales, q.zeros, q.row_scales, N, K, q.format_name)
    assert set(torch.library.opcheck(torch.ops.tilebit.gemm_weight.default, weight).values()) == {"SUCCESS"}


@pytest.mark.parametrize("which", ["scales", "zeros", "row_scales"])
@pytest.mark.parametrize("way", ["backward", "torch.func", "forward mode"])
def test_other_derivatives_are_refused(cpu_kernels, launches, which, way):
    p = Products(("sample.two_levels", "bfloat16", True) if which == "row_scales" else FORMATS[1])
    operand = getattr(p.packed, which)
    ops.dispatch.forget()

    def product(tensor: Tensor) -> Tensor:
        fields = {name: getattr(p.packed, name) for name in ("weight", "scales", "zeros", "row_scales")} | {which: tensor}
        return ops.call(p.x, *fields.values(), p.bias, N, p.packed.format_name, False)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match=rf"respect to {which} is asked for; tilebit.gemm has .* x and bias: pass {which}.detach"):
        if way == "backward":
            product(operand.clone().requires_grad_())
        elif way == "torch.func":
            torch.func.grad(lambda t: product(t).float().sum())(operand)
        else:
            torch.func.jvp(product, (operand,), (operand,))
    assert not launches.seen
    with torch.no_grad():
        assert not product(operand.clone().requires_grad_()).requires_grad


@pytest.mark.gpu
@EVERY
def test_derivatives_on_a_gpu(case):
    arch = ops.dispatch.device_target(torch.device("cuda", 0)).arch
    x, packed, bias, _ = exact(workload(case, 5), arch=arch, device="cuda")
    weight = packed.unpack().dequantize(packed.dtype)
    dy = torch.randint(-2, 3, (5, N), device="cuda").to(x.dtype)
    x = x.clone().requires_grad_()
    close(grad(tilebit.gemm(x, packed, bias), x, dy), grad(torch.nn.functional.linear(x, weight), x, dy))
