"""Which output layers are a plain product, what that asks of a GPU, and who computes it in a fused step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import llama, made
from torch import Tensor, nn

import tilebit
import tilebit.transformers
from tilebit.schedules.gemm.dense import MAX_M, DenseWorkload
from tilebit.schedules.target import cpu_target, target_from_name
from tilebit.transformers import output_layer
from tilebit.transformers.output_layer import logits_of, plain, workload_of
from tilebit.transformers.products import multiply_in_fp32

H200 = target_from_name("sm_90a")


def hooked() -> nn.Linear:
    layer = nn.Linear(64, 8, bias=False)
    layer.register_forward_hook(lambda *_: None)
    return layer


def in_fp32() -> nn.Linear:
    layer = nn.Linear(64, 8, bias=False, dtype=torch.bfloat16)
    multiply_in_fp32(layer)
    return layer


class Other(nn.Linear):
    """Computes whatever it likes."""


class Watched(Tensor):
    """Of another package: an operator that is not torch's would fail."""


def of_another_package() -> nn.Linear:
    layer = nn.Linear(64, 8, bias=False)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Watched))
    return layer


LAYERS = (nn.Linear(64, 8), hooked(), in_fp32(), Other(64, 8, bias=False), of_another_package(), nn.Identity())


@pytest.mark.parametrize("layer", LAYERS, ids=("bias", "hook", "forward", "subclass", "weight", "other"))
def test_what_does_more_than_a_product_is_called_as_it_is(layer: nn.Module, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(output_layer, "linear", lambda *_, **__: pytest.fail("not by a call of the layer"))
    assert not plain(layer) and workload_of(layer, 1, "float16", H200) is None
    rows = torch.randn(1, 64).to(next((p.dtype for p in layer.parameters()), torch.float32))
    assert torch.equal(logits_of(layer, rows), layer(rows))


def test_what_a_plain_one_asks_for():
    layer = nn.Linear(64, 8, bias=False)
    assert plain(layer) and workload_of(layer, 16, "bfloat16", H200) == DenseWorkload(16, 8, 64, "bfloat16")
    assert workload_of(layer, MAX_M + 1, "float16", H200) is None and workload_of(layer, 1, "float16", cpu_target()) is None
    assert workload_of(nn.Linear(65, 8, bias=False), 1, "float16", H200) is None


def test_a_fused_step_asks_for_it(monkeypatch: pytest.MonkeyPatch):
    """What it gives are the logits."""
    seen: list[bool] = []

    def product(x: Tensor, weight: Tensor, dependent: bool = False) -> Tensor:
        seen.append(dependent and weight is model.lm_head.weight)
        return nn.functional.linear(x, weight) * 2

    torch.manual_seed(0)
    model: Any = made(llama(), torch.float16)
    for layer in model.modules():
        vars(layer).pop("forward", None)  # of 16-bit products on a CPU
    tilebit.quantize_model(model, "w4a16_g64")
    tilebit.transformers.compile(model, (2,), 64)
    step = model.tilebit_steps.step
    residual = torch.randn(2, model.config.hidden_size).half()
    with torch.no_grad():
        plainly = step._logits(residual.clone(), None)
        monkeypatch.setattr(output_layer, "linear", product)
        assert torch.equal(step._logits(residual.clone(), None), 2 * plainly) and seen == [True]
