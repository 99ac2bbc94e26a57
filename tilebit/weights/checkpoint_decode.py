"""One stored layer of any kind -> ``QuantizedTensor``; and what its tensors' shapes alone say of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..layouts.checkpoints import checkpoint_layout
from ..layouts.formats import GemmFormat
from .checkpoint_config import CheckpointError, LayerScheme
from .checkpoint_floats import decode_floats, float_format, refuse_stack
from .checkpoint_int8 import decode_fp8, decode_int8
from .checkpoint_layers import PARTS, PLAIN_KINDS, StoredLayer
from .checkpoint_qserve import decode_qserve
from .checkpoint_report import check_kind
from .quantize import QuantizedTensor


def decode(name: str, kind: str, tensors: Mapping[str, Tensor], scheme: LayerScheme | None, gptq_format: str | None) -> QuantizedTensor:
    """The weight of the layer ``name``, of which ``tensors`` holds the parts (``PARTS[kind]``) that
    there are, as ``scheme`` says; without one, as shapes and dtypes do, and ``gptq_format`` of GPTQ's
    zero points. Raises ``CheckpointError``."""
    check_kind(name, kind, scheme)
    if kind == "qserve":
        return decode_qserve(name, tensors, None if scheme is None else scheme.format)
    if kind == "int-quantized":
        return decode_int8(name, tensors)
    if kind in PLAIN_KINDS:
        assert scheme is not None  # which check_kind saw to
        return decode_fp8(name, kind, tensors, scheme.format)
    format = _float_format_of(kind, tensors, scheme)
    if format is not None:
        weight, scales = (tensors.get(part) for part in PARTS[kind][:2])
        return decode_floats(name, weight, scales, tensors.get("weight_global_scale"), format)
    layer = StoredLayer.read(name, kind, dict(tensors))
    return layer.decode(layer.infer(kind, gptq_format) if scheme is None else scheme)


def size_of(name: str, kind: str, tensors: Mapping[str, Tensor], scheme: LayerScheme) -> tuple[int, int]:
    """(n, k) of the layer, with the shapes of packed integers checked against ``scheme``; reads no
    values of weights, scales or zero points. Raises ``CheckpointError``."""
    check_kind(name, kind, scheme)
    if kind in ("qserve", *PLAIN_KINDS) or _float_format_of(kind, tensors, scheme) is not None:
        weight = tensors[PARTS[kind][0]]
        refuse_stack(name, tuple(weight.shape))
        if weight.ndim < 2 or 0 in weight.shape:
            raise CheckpointError(
                f"{name}: the weight is {list(weight.shape)}; accepted: at least 2 axes, none of length 0: copy the checkpoint again"
            )
        each = 1 if kind in PLAIN_KINDS else 2  # codes a byte
        return len(weight), each * weight[0].numel()
    layer = StoredLayer.read(name, kind, dict(tensors))
    return layer.size(checkpoint_layout(scheme.storage, scheme.format.bits), scheme.format)


def _float_format_of(kind: str, tensors: Mapping[str, Tensor], scheme: LayerScheme | None) -> GemmFormat | None:
    """The format of 4-bit floats, None of integers."""
    weight, scales = (tensors.get(part) for part in PARTS[kind][:2])
    if scheme is not None:
        return None if scheme.format.integer else scheme.format
    return float_format(scales) if weight is not None and weight.dtype == torch.uint8 else None
