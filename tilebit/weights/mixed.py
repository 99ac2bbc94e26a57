"""``MixedLinear``: a linear layer with some output channels in more bits than the others (MixLLM, Zheng
et al. 2024, arXiv:2412.14590, section 3.4)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..accepted import expect, expect_tensors, format_of
from ..layouts.formats import GemmFormat, QuantFormat
from ..ops.gemm_mixed import LAUNCHES, Launches, check_channels, check_pair, gemm_mixed
from ..ops.operands import describe
from ..ops.quantize import QUANTIZE
from ..schedules.activations.workload import EPS
from .mixed_tensor import MixedTensor, split_channels
from .modules import QuantLinear
from .packed import DTYPES, WEIGHTS, PackedWeight, pack
from .precision import LayerPrecision, PrecisionPlan
from .quantize import QuantizedTensor, quantize

JOINT = "+"  # between the names of a layer's two formats
LOW, HIGH = QuantFormat.parse("w4a8_g128_asym"), QuantFormat.parse("w8a8_g128")
PARTS = ("low", "high")


class MixedLinear(nn.Module):
    """y[..., n] = x[..., k] @ w^T (+ bias), with the output channels of w [n, k] in two formats that
    take the same int8 x: x is quantized once, and the two products write their channels of one y.

    ``low`` and ``high`` are ``QuantLinear`` of the channels in either format (None where a format has
    none: then the layer computes as that one does); ``low_channels`` and ``high_channels`` int32 say
    which channel of y each of their rows is. ``state_dict`` holds all of it, and moving, casting and
    loading are those of ``QuantLinear``; ``load_state_dict`` also refuses channels that are not each
    of y's once, and then changes nothing.

    ``launches`` (no part of ``state_dict``) says how the two kernels follow each other on a GPU:
    "in_turn", "dependent" or "parallel", as ``torch.ops.tilebit.gemm_mixed`` describes; results are
    the same. No derivatives, as of any int8 x. Raises ``TypeError`` and ``ValueError`` for parts that
    do not make one layer.
    """

    low_channels: Tensor
    high_channels: Tensor
    low: QuantLinear | None
    high: QuantLinear | None

    def __init__(
        self,
        low: PackedWeight | None,
        high: PackedWeight | None,
        channels: Tensor,
        bias: Tensor | None = None,
        launches: Launches = "parallel",
    ) -> None:
        """``channels`` [n], of any integer dtype: the channel of y of each row, those of ``low`` first;
        where a part is None, 0 to n - 1 in order. ``bias`` [n] in the order of y."""
        super().__init__()
        for name, part in (("low", low), ("high", high)):
            expect(name, part, PackedWeight | None, "a PackedWeight (tilebit.pack), or None")
        expect_tensors(("bias",), channels=channels, bias=bias)
        parts = [part for part in (low, high) if part is not None]
        if not parts:
            raise ValueError("low and high are None; accepted: at least one PackedWeight")
        first, n = parts[0], sum(part.n for part in parts)
        if any((part.k, part.dtype, part.device, part.arch) != (first.k, first.dtype, first.device, first.arch) for part in parts):
            said = " and ".join(f"[{part.n}, {part.k}] in {part.dtype} for {part.arch} on {part.device}" for part in parts)
            raise ValueError(f"low and high are {said}; accepted: one k, dtype, device and architecture: pack them alike")
        for one, other in pairwise(parts):
            check_pair(one.format, other.format)
        check_pair(first.format, first.format)
        if any(part.perm is not None for part in parts):
            raise ValueError("a part's columns are reordered (act order); accepted: weights without: quantize with act_order=False")
        if channels.ndim != 1 or channels.is_floating_point() or channels.is_complex():
            raise ValueError(f"channels are {describe(channels)}; accepted: whole numbers [{n}]")
        if bias is not None and (tuple(bias.shape) != (n,) or not bias.is_floating_point()):
            raise ValueError(f"bias is {describe(bias)}; accepted: floating point [{n}]")
        channels = channels.detach().to(first.device, torch.int64)
        count = 0 if low is None else low.n
        check_channels(channels[:count], channels[count:], n)
        if len(parts) == 1 and not torch.equal(channels, torch.arange(n, device=channels.device)):
            raise ValueError(f"channels of a single part are not in order; accepted: 0 to {n - 1}: pack its rows in that order")
        self.in_features, self.out_features = first.k, n
        for name, part, own in (("low", low, channels[:count]), ("high", high, channels[count:])):
            self.register_buffer(f"{name}_channels", own.to(torch.int32))
            of_part = None if part is None else QuantLinear(part, None if bias is None else bias.to(first.device)[own])
            self.register_module(name, of_part)
        self.launches = launches

    @classmethod
    def from_float(
        cls,
        linear: nn.Linear,
        channels: Tensor,
        low: GemmFormat | str = LOW,
        high: GemmFormat | str = HIGH,
        clip_search: bool = False,
        dtype: torch.dtype | None = None,
        launches: Launches = "parallel",
    ) -> MixedLinear:
        """``linear`` with its output ``channels`` (whole numbers, as ``PrecisionPlan.channels`` has them)
        in ``high`` and the others in ``low``, rounded to nearest (``clip_search`` as in ``quantize``)
        on its own device; it computes in ``dtype``: by default the weight's, fp16 for fp32 weights.
        Raises ``TypeError`` and ``ValueError`` as ``quantize`` and ``pack`` do, and for channels that
        it does not have."""
        expect("linear", linear, nn.Linear, "a torch.nn.Linear")
        weight = linear.weight.detach()
        chosen = dtype or (weight.dtype if weight.dtype in DTYPES else torch.float16)
        order, count = split_channels(channels.to(weight.device), len(weight))
        low_part, high_part = (
            quantize(weight[rows], format_of(format), clip_search, chosen) if len(rows) else None
            for format, rows in ((low, order[:count]), (high, order[count:]))
        )
        return cls.from_quantized(MixedTensor(low_part, high_part, order), linear.bias, chosen, launches)

    @classmethod
    def from_quantized(cls, weight: MixedTensor, bias: Tensor | None, dtype: torch.dtype, launches: Launches = "parallel") -> MixedLinear:
        """Of a quantized ``weight``, whose device it is on; it computes in ``dtype``. ``bias`` [n] in
        the order of y. Raises as ``pack`` and the constructor do."""
        low, high = (None if part is None else pack(part, dtype) for part in (weight.low, weight.high))
        return cls(low, high, weight.channels, bias, launches)

    @classmethod
    def of_layers(cls, low: QuantLinear | None, high: QuantLinear | None, channels: Tensor) -> MixedLinear:
        """Of layers of its parts, each with the bias of its own rows; ``channels`` as the constructor
        takes them. Raises as that does."""
        parts = [layer for layer in (low, high) if layer is not None]
        biases = [layer.bias for layer in parts if layer.bias is not None]
        if biases and len(biases) < len(parts):
            raise ValueError("one of low and high has a bias; accepted: both, or none")
        placed = None
        if biases:
            order, count = channels.to(biases[0].device, torch.int64), 0 if low is None else low.out_features
            check_channels(order[:count], order[count:], sum(len(bias) for bias in biases))
            placed = torch.empty_like(torch.cat(biases)).index_copy_(0, order, torch.cat(biases))
        return cls(None if low is None else low.packed, None if high is None else high.packed, channels, placed)

    @property
    def launches(self) -> Launches:
        """How the two kernels follow each other. Setting it raises ``ValueError`` for another word."""
        return self._launches

    @launches.setter
    def launches(self, value: Launches) -> None:
        if value not in LAUNCHES:
            raise ValueError(f"launches is {value!r}; accepted: {', '.join(map(repr, LAUNCHES))}")
        self._launches = value

    @property
    def parts(self) -> tuple[tuple[str, QuantLinear], ...]:
        """("low", its layer) and ("high", its layer), without one that has no channels."""
        return tuple((name, layer) for name in PARTS if (layer := self._modules[name]) is not None)  # type: ignore[misc]

    @property
    def share(self) -> float:
        """Of the output channels that are in the higher format."""
        return self.high_channels.numel() / self.out_features

    @property
    def dtype(self) -> torch.dtype:
        """What the layer computes in."""
        return self.parts[0][1].dtype

    @property
    def format_name(self) -> str:
        """As rows of results name it: of ``w4a8_g128_asym`` with a tenth in ``w8a8_g128``
        ``w4.4a8_g128``."""
        formats = [layer.format for _, layer in self.parts]
        if len(formats) == 1:
            return formats[0].name
        bits = formats[0].bits + self.share * (formats[1].bits - formats[0].bits)
        return f"w{bits:.3g}{formats[1].name.removeprefix(f'w{formats[1].bits}')}"

    @property
    def kind(self) -> str:
        """The formats, whatever the shares: ``w4a8_g128_asym+w8a8_g128``."""
        return JOINT.join(layer.format.name for _, layer in self.parts)

    @property
    def x_group(self) -> int:
        """Values of x that share a scale where the layer takes int8 codes of x (``of_codes``); -1: a row's."""
        return self.parts[0][1].format.x_group

    def forward(self, x: Tensor) -> Tensor:
        low, high = self._modules["low"], self._modules["high"]
        if low is None or high is None:
            return (high or low)(x)  # type: ignore[misc]
        dtype = self.dtype
        expect_tensors(x=x)
        if x.ndim < 1 or x.dtype is not dtype or x.shape[-1] != self.in_features:
            accepted = f"{str(dtype).removeprefix('torch.')} [..., {self.in_features}]"
            raise ValueError(f"x is {describe(x)}; accepted: {accepted}; convert it with x.to(...) or pass what fits")
        return self.of_codes(*QUANTIZE(x, None, None, "int8", self.x_group, EPS, False))

    def of_codes(self, codes: Tensor, token_scales: Tensor) -> Tensor:
        """y of an x that is quantized already: int8 ``codes`` and fp32 ``token_scales`` as
        ``quantize_activations`` gives them for ``x_group``. Raises ``ValueError`` for what does not fit."""
        low, high = self._modules["low"], self._modules["high"]
        if low is None or high is None:
            return self.parts[0][1].of_codes(codes, token_scales)
        assert isinstance(low, QuantLinear) and isinstance(high, QuantLinear)
        a: dict[str, Any] = low._buffers
        b: dict[str, Any] = high._buffers
        own: dict[str, Any] = self._buffers
        return gemm_mixed(
            codes, token_scales,
            a["weight"], a["scales"], a["zeros"], a["row_scales"], a["bias"], own["low_channels"],
            b["weight"], b["scales"], b["zeros"], b["row_scales"], b["bias"], own["high_channels"],
            self.out_features, self.in_features, low._format_name, high._format_name, low.dtype, self._launches,
        )  # fmt: skip

    def dequantize(self) -> Tensor:
        """The weight [n, k] in the layer's dtype, rows in the order of y."""
        w = torch.empty(self.out_features, self.in_features, dtype=self.dtype, device=self.low_channels.device)
        for name, layer in self.parts:
            w[self.get_buffer(f"{name}_channels").long()] = layer.packed.dequantize()
        return w

    def extra_repr(self) -> str:
        shape = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{shape}, {self.format_name}{'' if self._launches == 'parallel' else f', launches={self._launches}'}"

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        wrong = list(self._misfits(state_dict, prefix, local_metadata))
        if wrong:
            errors += wrong
            for name in [name for name in state_dict if name.startswith(tuple(f"{prefix}{part}." for part in PARTS))]:
                del state_dict[name]  # of this call alone: no part is loaded where the other, or the index, is not
            return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    def _misfits(self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> list[str]:
        """What keeps the entries from being this layer's, in sentences."""
        found: list[str] = []
        for name, layer in self.parts:
            found += layer.fitting(state_dict, f"{prefix}{name}.", local_metadata)[1]
        held = [state_dict.get(f"{prefix}{name}_channels") for name in PARTS]
        there = [name for name, channels in zip(PARTS, held, strict=True) if channels is not None]
        some = there or any(f"{prefix}{name}.{entry}" in state_dict for name, _ in self.parts for entry in WEIGHTS)
        if some and len(there) < len(PARTS):
            found.append(
                f"the state_dict has not both {prefix}low_channels and {prefix}high_channels; accepted: all of the layer or nothing"
            )
        for name, channels in zip(PARTS, held, strict=True):
            own = self.get_buffer(f"{name}_channels")
            if channels is not None and not (isinstance(channels, Tensor) and (channels.dtype, channels.shape) == (torch.int32, own.shape)):
                said = describe(channels) if isinstance(channels, Tensor) else type(channels).__name__
                found.append(f"{prefix}{name}_channels is {said}; this module needs int32 {list(own.shape)}")
        if not found and there and not any(channels.is_meta for channels in held if channels is not None):
            try:
                check_channels(*held, self.out_features)  # type: ignore[arg-type]
            except ValueError as error:
                found.append(f"{prefix.rstrip('.') or 'MixedLinear'}: {error}")
        return found


def mixed_layers(
    layers: Mapping[str, nn.Linear], plan: PrecisionPlan, given: Mapping[nn.Linear, QuantizedTensor | MixedTensor]
) -> dict[nn.Linear, Tensor]:
    """The channels of the higher format by layer of ``plan``. Raises ``TypeError`` and ``ValueError`` for
    one that is of no layer or of another shape, for a layer that it has twice, or whose ``given`` weight
    is in other formats, or has other channels in the higher one."""
    expect("precision", plan, PrecisionPlan, "a PrecisionPlan: tilebit.select_channels(tilebit.channel_salience(model, batches), share)")
    found: dict[nn.Linear, Tensor] = {}
    for entry in plan.layers:
        if entry.name not in layers:
            raise ValueError(f"precision names {entry.name!r}; accepted: layers that are replaced: {', '.join(list(layers)[:5])}, ...")
        layer = layers[entry.name]
        if tuple(layer.weight.shape) != (entry.n, entry.k):
            raise ValueError(f"precision has {entry.name!r} as [{entry.n}, {entry.k}]; the layer is {list(layer.weight.shape)}")
        if layer in found:
            raise ValueError(f"precision names {entry.name!r}, which it names too; accepted: one of them")
        if layer in given and not _planned(given[layer], entry, plan):
            raise ValueError(
                f"weights[{entry.name!r}] are not in {plan.low.name} with the channels in {plan.high.name} that precision says; accepted: "
                "tilebit.calibrate(model, calibration, precision=...) of the same plan, or the layer in one of them"
            )
        found[layer] = entry.channels
    return found


def _planned(weight: QuantizedTensor | MixedTensor, entry: LayerPrecision, plan: PrecisionPlan) -> bool:
    """Whether a weight is what ``plan`` says of its layer."""
    if not isinstance(weight, MixedTensor):
        return False
    order, count = split_channels(entry.channels.to(weight.channels.device), entry.n)
    formats = [part.format for part in weight.parts]
    expected = [format for format, rows in ((plan.low, count), (plan.high, entry.n - count)) if rows]
    own = torch.cat([part.sort().values for part in (weight.channels[:count], weight.channels[count:])])  # in whatever order they lie
    return formats == expected and torch.equal(order, own)


def kind_of(kind: str) -> str:
    """The name of a format, or of the two of a mixed layer, as ``MixedLinear.kind`` writes it. Raises
    ``ValueError`` for anything else."""
    formats = [format_of(name) for name in kind.split(JOINT)]
    if len(formats) > 2:
        raise ValueError(
            f"{kind!r} names {len(formats)} formats; accepted: one, or two of a mixed layer, such as '{LOW.name}{JOINT}{HIGH.name}'"
        )
    check_pair(*formats) if len(formats) == 2 else None
    return JOINT.join(format.name for format in formats)
