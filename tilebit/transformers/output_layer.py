"""The output layer of a model, where it is not quantized: its product of a few rows."""

from __future__ import annotations

from torch import Tensor, nn

from ..ops import known
from ..ops.linear import linear
from ..schedules.gemm.dense import MAX_M, RULE, DenseWorkload
from ..schedules.gemm.workload import X_COLUMNS
from ..schedules.target import Target


def plain(layer: nn.Module) -> bool:
    """Whether ``layer`` computes x @ weight^T and nothing else, with a weight that is an ordinary tensor."""
    own = type(layer) is nn.Linear and layer.bias is None and "forward" not in vars(layer)
    return own and not layer._forward_hooks and not layer._forward_pre_hooks and known.plain(layer.weight)  # type: ignore[arg-type]


def logits_of(layer: nn.Module, rows: Tensor) -> Tensor:
    """What ``layer`` makes of ``rows``, by ``tilebit.linear`` where it is plain."""
    return linear(rows, layer.weight, dependent=True) if plain(layer) else layer(rows)  # type: ignore[arg-type]


def workload_of(layer: nn.Module, rows: int, dtype: str, target: Target) -> DenseWorkload | None:
    """What the product of ``rows`` rows could ask of ``target``; None: there is no kernel for it."""
    if not plain(layer) or target.arch not in RULE.arches or not 0 < rows <= MAX_M or layer.in_features % X_COLUMNS:  # type: ignore[operator]
        return None
    return DenseWorkload(rows, layer.out_features, layer.in_features, dtype)  # type: ignore[arg-type]
