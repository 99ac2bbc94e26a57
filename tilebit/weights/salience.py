"""What quantizing each output channel of a model costs in its loss, estimated from gradients.

MixLLM (Zheng et al. 2024, arXiv:2412.14590), section 3.2, equations 1 to 4: the loss is expanded to
second order around the weight of a channel, with the empirical Fisher matrix g g^T of a sample in
place of the Hessian, so that both terms follow from one number, g . dw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..accepted import expect, format_of
from ..layouts.formats import GemmFormat, QuantFormat
from ..progress import counted
from .batches import batches_of, evaluating, next_token_loss
from .layers import linears_of, once
from .quantize import quantize

Terms = Literal["both", "first", "second"]


@dataclass(frozen=True, slots=True, eq=False)
class Salience:
    """Of each output channel of a layer [n, k]: means over ``samples`` samples, fp64 [n] on the
    CPU, of |d + d^2 / 2| (``both``), |d| (``first``) and d^2 / 2 (``second``), where d = g . dw."""

    k: int
    samples: int
    both: Tensor
    first: Tensor
    second: Tensor

    def of(self, terms: Terms) -> Tensor:
        """One of the three. Raises ``ValueError`` for another name."""
        if terms not in ("both", "first", "second"):
            raise ValueError(f"terms is {terms!r}; accepted: 'both', 'first', 'second'")
        return {"both": self.both, "first": self.first, "second": self.second}[terms]


def channel_salience(
    model: nn.Module,
    calibration: Iterable[Any],
    format: GemmFormat | str = QuantFormat(4, 128, False),
    skip: Iterable[str] | Callable[[str, nn.Linear], bool] = ("lm_head",),
    clip_search: bool = False,
    loss: Callable[[nn.Module, Any], Tensor] = next_token_loss,
    progress: bool = False,
) -> dict[str, Salience]:
    """The salience of every output channel of every ``nn.Linear`` inside ``model``, by the layer's
    name, in the model's order (MixLLM, equation 4):

        S_c = mean over samples of |g . dw + (g . dw)^2 / 2|

    g is the gradient of a sample's loss with respect to the channel's weight, dw what ``format``
    (round to nearest; ``clip_search`` as in ``quantize``) changes in it. Each batch of
    ``calibration`` is one sample, with ``loss(model, batch)`` its scalar loss: by default the mean
    cross entropy of next tokens (``batches.next_token_loss``). ``skip`` is ``quantize_model``'s.

    Takes a forward and a backward pass a sample, in evaluation mode on the model's device; memory:
    the activations of one sample, one copy of the layers' weights (dw, in their dtype) and the
    gradient of one layer. fp16 gradients may underflow: bf16 or fp32 models. The model is as it was
    afterwards, its gradients and ``requires_grad`` included.

    Raises ``TypeError`` and ``ValueError`` as ``quantize_model``, ``quantize`` and ``calibrate``
    do, ``TypeError`` for a loss that is no tensor, ``ValueError`` for one that is no finite scalar
    or has no gradient, for gradients that are not finite, and for a layer whose weight another
    module has too (its gradient would not be the layer's): leave it out with ``skip``.
    """
    expect("model", model, nn.Module, "a torch.nn.Module with torch.nn.Linear inside")
    format = format_of(format)
    layers = once(linears_of(model, skip))
    _refuse_tied(model, layers)
    batches = batches_of(calibration)
    changes = {name: _change(layer, format, clip_search) for name, layer in layers.items()}
    sums = {name: torch.zeros(3, layer.out_features, dtype=torch.float64, device=layer.weight.device) for name, layer in layers.items()}

    def adding_to(name: str) -> Callable[[Tensor], None]:
        def add(weight: Tensor) -> None:
            assert weight.grad is not None
            d = (weight.grad.float() * changes[name]).sum(1).double()
            weight.grad = None
            sums[name] += torch.stack(((d + d.square() / 2).abs(), d.abs(), d.square() / 2))

        return add

    with ExitStack() as held, torch.enable_grad():
        held.enter_context(evaluating(model))
        held.enter_context(_gradients_of(model, [layer.weight for layer in layers.values()]))
        for name, layer in layers.items():
            held.callback(layer.weight.register_post_accumulate_grad_hook(adding_to(name)).remove)
        for place, batch in counted(enumerate(batches), "salience", len(batches), progress):
            value = loss(model, batch)
            expect(f"the loss of batch {place}", value, Tensor, "a torch.Tensor of one number, as the model computed it")
            if value.numel() != 1 or not bool(torch.isfinite(value).all()):
                raise ValueError(f"the loss of batch {place} is {value.detach().flatten()[:3].tolist()}; accepted: one finite number")
            if not value.requires_grad:
                raise ValueError(
                    f"the loss of batch {place} has no gradient; accepted: one computed from the layers, outside of torch.no_grad and "
                    "torch.inference_mode"
                )
            value.backward()
    for name, total in sums.items():
        if not bool(torch.isfinite(total).all()):
            raise ValueError(f"{name} has gradients that are NaN or infinite; accepted: finite ones (fp16 overflow is the usual cause)")
    means = {name: (total / len(batches)).cpu() for name, total in sums.items()}
    return {name: Salience(layers[name].in_features, len(batches), *means[name].unbind()) for name in layers}


def _change(layer: nn.Linear, format: GemmFormat, clip_search: bool) -> Tensor:
    weight = layer.weight.detach()
    return (quantize(weight, format, clip_search).dequantize() - weight.float()).to(weight.dtype)


def _refuse_tied(model: nn.Module, layers: dict[str, nn.Linear]) -> None:
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    for name, layer in layers.items():
        if len(owners[id(layer.weight)]) > 1:
            raise ValueError(f"the weight of {name} is that of another module, too; accepted: layers with their own: name it in skip")


@contextmanager
def _gradients_of(model: nn.Module, weights: Sequence[nn.Parameter]):
    """Gradients of ``weights`` alone; afterwards every parameter's ``requires_grad`` and ``grad``
    are what they were."""
    before = [(parameter, parameter.requires_grad, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _, _ in before:
            parameter.requires_grad_(False)
            parameter.grad = None
        for weight in weights:
            weight.requires_grad_(True)
        yield
    finally:
        for parameter, required, grad in before:
            parameter.requires_grad_(required)
            parameter.grad = grad
