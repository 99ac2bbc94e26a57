"""``MixedLinear``: a linear layer with some output channels in 8 bits and the others in 4 (MixLLM, Zheng
et al. 2024, arXiv:2412.14590, section 3.4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..accepted import expect, expect_tensors, format_of
from ..layouts.formats import GemmFormat, QuantFormat
from ..ops.gemm_mixed import check_channels, gemm_mixed
from ..ops.operands import describe
from ..ops.quantize import QUANTIZE
from ..schedules.activations.workload import EPS
from ..schedules.gemm.parts import ADDED, GATE_ROWS
from .mixed_tensor import MixedTensor, split_channels
from .modules import QuantLinear
from .packed import DTYPES, WEIGHTS, PackedWeight, pack
from .paired import HIGH_OF, check_pair, dequantize_rows, holds_nibbles, split_nibbles
from .precision import LayerPrecision, PrecisionPlan
from .quantize import QuantizedTensor
from .smooth import Smoothing, quantize_smoothed

JOINT = "+"  # between the names of a layer's two formats
LOW, HIGH = QuantFormat.parse("w4a8_g128_asym"), QuantFormat.parse("w8a8_g128")
ROWS = "rows"  # the part of a layer's name that its packed rows have
HELD = (*WEIGHTS, "bias")  # of the rows
# Entries of layers that were saved as two packed weights, one of each format.
FORMER = ("low_channels", "high_channels")
AGAIN = "quantize the model again, and save that"


class MixedLinear(nn.Module):
    """y[..., n] = x[..., k] @ w^T (+ bias), with some output channels of w [n, k] in 8 bits and the
    others in 4, as one product in the 4-bit format: x is quantized once, and one kernel sums and
    stores. An 8-bit channel is two rows of 4 bits, its codes' high nibbles and their low ones
    (``split_nibbles``): the memory that is read is that of 8 bits, the operations are those of two
    channels, or, in kernels for many rows of x that join nibbles, of one.

    ``rows`` is a ``QuantLinear`` of all rows with their bias, and ``channels`` int32 [rows] says which
    channel of y each makes, -1 of one that is added to the row 8 before it, -2 of padding. ``nibbles`` says
    whether rows are as ``split_nibbles`` gives them; kernels may then multiply bytes, where there are many
    rows of x.
    ``state_dict`` holds both, and moving, casting and loading are those of ``QuantLinear``;
    ``load_state_dict`` also refuses channels that are not each of y's once, and then changes
    nothing. No derivatives, as of any int8 x. Raises ``TypeError`` and ``ValueError`` for rows that
    do not make one layer.
    """

    channels: Tensor
    rows: QuantLinear
    nibbles: bool

    def __init__(self, rows: PackedWeight, channels: Tensor, n: int, bias: Tensor | None = None) -> None:
        """``rows``: a packed weight [rows, k] in a 4-bit format of ``paired.HIGH_OF``; ``channels`` [rows],
        of any integer dtype, as ``split_nibbles`` gives them; ``bias`` [n] in the order of y."""
        super().__init__()
        expect("rows", rows, PackedWeight, "a PackedWeight (tilebit.pack)")
        expect("n", n, int, "the number of output channels")
        expect_tensors(("bias",), channels=channels, bias=bias)
        if rows.format not in HIGH_OF:
            raise ValueError(f"rows are in {rows.format_name}; accepted: {', '.join(format.name for format in HIGH_OF)}")
        if rows.perm is not None:
            raise ValueError("the columns are reordered (act order); accepted: rows without: quantize with act_order=False")
        whole = not (channels.is_floating_point() or channels.is_complex() or channels.dtype is torch.bool)
        if tuple(channels.shape) != (rows.n,) or not whole:
            raise ValueError(f"channels are {describe(channels)}; accepted: whole numbers [{rows.n}]")
        if bias is not None and (tuple(bias.shape) != (n,) or not bias.is_floating_point()):
            raise ValueError(f"bias is {describe(bias)}; accepted: floating point [{n}]")
        channels = channels.detach().to(rows.device, torch.int64)
        check_channels(channels, n)
        self.in_features, self.out_features = rows.k, n
        self.register_buffer("channels", channels.to(torch.int32))
        of_rows = None
        if bias is not None:
            of_rows = bias.detach().to(rows.device)[channels.clamp(min=0)].masked_fill_(channels < 0, 0)
        self.rows = QuantLinear(rows, of_rows)
        self.nibbles = holds_nibbles(rows.format, channels, n, self._held())

    @classmethod
    def from_float(
        cls,
        linear: nn.Linear,
        channels: Tensor,
        low: GemmFormat | str = LOW,
        high: GemmFormat | str = HIGH,
        clip_search: bool = False,
        dtype: torch.dtype | None = None,
        smoothing: Smoothing | None = None,
    ) -> MixedLinear:
        """``linear`` with its output ``channels`` (whole numbers, as ``PrecisionPlan.channels`` has them)
        in ``high`` and the others in ``low``, rounded to nearest (``clip_search`` as in ``quantize``)
        on its own device; it computes in ``dtype``: by default the weight's, fp16 for fp32 weights;
        ``smoothing`` as ``QuantLinear.from_float`` takes it. Raises ``TypeError`` and ``ValueError`` as
        ``quantize_smoothed``, ``split_nibbles`` and ``pack`` do, and for
        channels that it does not have."""
        expect("linear", linear, nn.Linear, "a torch.nn.Linear")
        low, high = format_of(low), format_of(high)
        check_pair(low, high)
        weight = linear.weight.detach()
        chosen = dtype or (weight.dtype if weight.dtype in DTYPES else torch.float16)
        order, count = split_channels(channels.to(weight.device), len(weight))
        low_part, high_part = (
            quantize_smoothed(weight[rows], format, smoothing, clip_search, chosen) if len(rows) else None
            for format, rows in ((low, order[:count]), (high, order[count:]))
        )
        return cls.from_quantized(MixedTensor(low_part, high_part, order), linear.bias, chosen, low)

    @classmethod
    def from_quantized(cls, weight: MixedTensor, bias: Tensor | None, dtype: torch.dtype, low: GemmFormat | None = None) -> MixedLinear:
        """Of a quantized ``weight``, whose device it is on; it computes in ``dtype``. ``bias`` [n] in
        the order of y; ``low`` as ``split_nibbles`` takes it. Raises as that, ``pack`` and the
        constructor do."""
        rows, channels = split_nibbles(weight, low)
        return cls(pack(rows, dtype), channels, weight.n, bias)

    @classmethod
    def of_layer(cls, rows: QuantLinear, channels: Tensor, n: int) -> MixedLinear:
        """Of the layer of its rows, which has a bias of each; ``channels`` and ``n`` as the constructor
        takes them. Raises as that does."""
        layer = cls(rows.packed, channels, n)
        if rows.bias is not None:
            layer.rows = QuantLinear(rows.packed, rows.bias)
            layer.nibbles = holds_nibbles(rows.format, layer.channels, n, layer._held())
        return layer

    def _held(self) -> dict[str, Tensor | None]:
        return {name: self.rows._buffers.get(name) for name in HELD}

    @property
    def high_channels(self) -> Tensor:
        """int64: the output channels in 8 bits, ascending."""
        added = (self.channels == ADDED).nonzero().flatten()
        return self.channels[added - GATE_ROWS].long().sort().values

    @property
    def smooth(self) -> Tensor | None:
        """fp32 [k]: what x is multiplied by before it is quantized; None: nothing."""
        return self.rows.smooth

    @property
    def share(self) -> float:
        """Of the output channels that are in 8 bits."""
        return self.high_channels.numel() / self.out_features

    @property
    def dtype(self) -> torch.dtype:
        """What the layer computes in."""
        return self.rows.dtype

    @property
    def format_name(self) -> str:
        """As rows of results name it: of ``w4a8_g128_asym`` with a tenth in ``w8a8_g128``
        ``w4.4a8_g128``."""
        low, high, share = self.rows.format, HIGH_OF[self.rows.format], self.share
        if share in (0, 1):
            return (low, high)[int(share)].name
        bits = low.bits + share * (high.bits - low.bits)
        return f"w{bits:.3g}{high.name.removeprefix(f'w{high.bits}')}"

    @property
    def kind(self) -> str:
        """The formats, whatever the shares: ``w4a8_g128_asym+w8a8_g128``."""
        return JOINT.join((self.rows.format.name, HIGH_OF[self.rows.format].name))

    @property
    def x_group(self) -> int:
        """Values of x that share a scale where the layer takes int8 codes of x (``of_codes``); -1: a row's."""
        return self.rows.format.x_group

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.dtype
        expect_tensors(x=x)
        if x.ndim < 1 or x.dtype is not dtype or x.shape[-1] != self.in_features:
            accepted = f"{str(dtype).removeprefix('torch.')} [..., {self.in_features}]"
            raise ValueError(f"x is {describe(x)}; accepted: {accepted}; convert it with x.to(...) or pass what fits")
        return self.of_codes(*QUANTIZE(x, None, self.smooth, "int8", self.x_group, EPS, False))

    def of_codes(self, codes: Tensor, token_scales: Tensor) -> Tensor:
        """y of an x that is quantized already: int8 ``codes`` and fp32 ``token_scales`` as
        ``quantize_activations`` gives them for ``x_group`` and ``smooth``. Raises ``ValueError`` for what does not fit."""
        rows: QuantLinear = self._modules["rows"]  # type: ignore[assignment]
        held: dict[str, Any] = rows._buffers
        return gemm_mixed(
            codes, token_scales, held["weight"], held["scales"], held["zeros"], held["row_scales"], held["bias"],
            self._buffers["channels"], self.out_features, self.in_features, rows._format_name, rows.dtype, self.nibbles,
        )  # fmt: skip

    def dequantize(self) -> Tensor:
        """The weight [n, k] in the layer's dtype, rows in the order of y: the exact one, rounded once."""
        return dequantize_rows(self.rows.unpack(), self.channels).to(self.dtype)

    def extra_repr(self) -> str:
        named = self.kind if self.channels.is_meta else self.format_name
        return f"in_features={self.in_features}, out_features={self.out_features}, {named}"

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
        wrong = self._misfits(state_dict, prefix, local_metadata)
        if wrong:
            errors += wrong
            for name in [name for name in state_dict if name.startswith(f"{prefix}{ROWS}.")]:
                del state_dict[name]  # of this call alone: no rows are loaded where their index is not
            return
        channels = state_dict.get(f"{prefix}channels")
        if channels is not None and not channels.is_meta:
            held = {name: state_dict.get(f"{prefix}{ROWS}.{name}") for name in HELD}
            self.nibbles = holds_nibbles(self.rows.format, channels, self.out_features, held)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    def _misfits(self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> list[str]:
        """What keeps the entries from being this layer's, in sentences."""
        if any(prefix + name in state_dict for name in FORMER):
            return [f"{prefix.rstrip('.') or 'the state_dict'} was saved as two packed weights, which one now is; accepted: {AGAIN}"]
        found = self.rows.fitting(state_dict, f"{prefix}{ROWS}.", local_metadata)[1]
        channels = state_dict.get(f"{prefix}channels")
        entries = [name for name in WEIGHTS if f"{prefix}{ROWS}.{name}" in state_dict]
        if (channels is None) != (not entries):
            lacking = f"{ROWS}.{WEIGHTS[0]}" if channels is not None else "channels"
            found.append(f"the state_dict has no {prefix}{lacking}; accepted: all of the layer or nothing")
        if channels is None:
            return found
        if not (isinstance(channels, Tensor) and (channels.dtype, channels.shape) == (torch.int32, self.channels.shape)):
            said = describe(channels) if isinstance(channels, Tensor) else type(channels).__name__
            found.append(f"{prefix}channels is {said}; this module needs int32 {list(self.channels.shape)}")
        if not found and not channels.is_meta:
            try:
                check_channels(channels, self.out_features)
            except ValueError as error:
                found.append(f"{prefix.rstrip('.') or 'MixedLinear'}: {error}")
        return found


def layer_of(layer: nn.Linear, weight: MixedTensor, dtype: torch.dtype | None, dependent: bool) -> QuantLinear | MixedLinear:
    """A layer in place of ``layer`` with the quantized ``weight``, on its device: a ``QuantLinear`` where
    all channels are in one format, which costs less. Raises as ``pack`` and ``MixedLinear`` do."""
    weight, chosen = weight.to(layer.weight.device), dtype or layer.weight.dtype
    if len(weight.parts) > 1:
        return MixedLinear.from_quantized(weight, layer.bias, chosen)
    (part,), order = weight.parts, weight.channels.argsort()
    held = {name: getattr(part, name) for name in ("codes", "scales", "zeros", "row_scales")}
    in_order = replace(part, **{name: tensor[order] for name, tensor in held.items() if tensor is not None})
    return QuantLinear(pack(in_order, chosen), layer.bias, dependent)


def rounded(
    layer: nn.Linear,
    channels: Tensor,
    plan: PrecisionPlan,
    clip_search: bool,
    dtype: torch.dtype | None,
    dependent: bool,
    smoothing: Smoothing | None = None,
) -> QuantLinear | MixedLinear:
    """A layer in place of ``layer`` with ``channels`` in the higher format of ``plan``, rounded to nearest; a
    ``QuantLinear`` where that is none of them or all. Raises as ``MixedLinear.from_float`` does."""
    low = split_channels(channels, layer.out_features)[1]
    if low in (0, layer.out_features):
        return QuantLinear.from_float(layer, plan.low if low else plan.high, clip_search, dtype, dependent, smoothing)
    return MixedLinear.from_float(layer, channels, plan.low, plan.high, clip_search, dtype, smoothing)


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
