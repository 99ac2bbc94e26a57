"""One stored layer -> ``QuantizedTensor``, with every tensor checked against the others and against
the config first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from ..layouts.checkpoints import CheckpointLayout, checkpoint_layout
from ..layouts.formats import BITS, GROUP_SIZES, PER_CHANNEL, GemmFormat, QuantFormat
from .checkpoint_config import GPTQ_FORMATS, PLAIN, CheckpointError, LayerScheme, quant_format
from .packed import unpack_words
from .quantize import SCALE_DTYPES, QuantizedTensor

# The tensors of a layer, by its kind: the family, or of compressed-tensors one of ``PLAIN``. Weight,
# scales; of packed integers zero points, group of each column, shape; of 4-bit floats the factor of
# the whole weight.
PARTS = {
    "awq": ("qweight", "scales", "qzeros", "g_idx", "shape"),
    "gptq": ("qweight", "scales", "qzeros", "g_idx", "shape"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape", "weight_global_scale"),
    "mxfp4": ("blocks", "scales"),
    **dict.fromkeys(PLAIN, ("weight", "weight_scale", "weight_zero_point", "input_scale")),
    "fp8": ("weight", "weight_scale_inv", "input_scale"),
    "qserve": ("qweight", "s1_scales", "s1_szeros", "s2_scales", "s2_zeros"),
}
REQUIRED = {
    "awq": ("qweight", "scales", "qzeros"),
    "gptq": ("qweight", "scales", "qzeros"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_shape"),
    "mxfp4": ("blocks", "scales"),
    **dict.fromkeys(PLAIN, ("weight", "weight_scale")),
    "fp8": ("weight", "weight_scale_inv"),
    "qserve": ("qweight", "s1_scales"),
}
PLAIN_KINDS = (*PLAIN, "fp8")  # of 8-bit weights that are not packed


def stored_name(layer: str, kind: str, part: str) -> str:
    """gpt-oss holds parameters, not modules: ``gate_up_proj_blocks``, ``gate_up_proj_bias``."""
    return f"{layer}{'_' if kind == 'mxfp4' else '.'}{part}"


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """A layer's tensors as stored: ``weight`` and ``zeros`` packed, ``scales`` [n, groups],
    ``g_idx`` [k] the group of each column, ``shape`` [2] = (n, k).
    """

    name: str
    weight: Tensor
    scales: Tensor
    zeros: Tensor | None
    g_idx: Tensor | None
    shape: Tensor | None

    @classmethod
    def read(cls, name: str, family: str, tensors: dict[str, Tensor]) -> StoredLayer:
        """From the tensors of ``PARTS[family]`` that the checkpoint has."""
        weight, scales, zeros, g_idx, shape = (tensors.get(part) for part in PARTS[family][:5])
        if weight is None or scales is None or weight.dtype != torch.int32 or weight.ndim != 2 or not weight.numel():
            raise CheckpointError(
                f"{name}: the packed weight is {_describe(weight)}; accepted: 2-d int32, not empty: copy the checkpoint again"
            )
        if scales.dtype not in SCALE_DTYPES or scales.ndim != 2 or not scales.numel():
            raise CheckpointError(
                f"{name}: scales are {_describe(scales)}; accepted: 2-d float16, bfloat16 or float32, not empty: copy the checkpoint again"
            )
        return cls(name, weight, scales if family == "compressed-tensors" else scales.t(), zeros, g_idx, shape)

    def size(self, layout: CheckpointLayout, format: GemmFormat) -> tuple[int, int]:
        """(n, k), with all shapes checked against each other and ``format``; reads no values but
        ``shape``. Raises ``CheckpointError``."""
        n, k = self._size(layout)
        self._check_groups(k, format)
        if self.zeros is not None and self.zeros.dtype == torch.int32 and self.zeros.ndim == 2:
            self._check_zeros_shape(layout, n)
        return n, k

    def decode(self, scheme: LayerScheme) -> QuantizedTensor:
        """The layer's codes, scales and zero points, unchanged; raises ``CheckpointError`` when its
        tensors do not fit each other or ``scheme``.
        """
        layout, format = checkpoint_layout(scheme.storage, scheme.format.bits), scheme.format
        n, k = self.size(layout, format)
        if not bool(torch.isfinite(self.scales).all()):
            raise CheckpointError(
                f"{self.name}: scales hold NaN or infinite values; accepted: finite ones: copy or quantize the model again"
            )
        zeros = None if self.zeros is None else self._zero_points(layout, n)
        if format.symmetric and zeros is not None:
            if not bool((zeros == format.symmetric_zero_point).all()):
                self._explain_zeros(zeros, scheme)
            zeros = None
        if zeros is None and not format.symmetric:
            raise CheckpointError(
                f"{self.name}: the config says asymmetric but there are no zero points; copy the checkpoint again or repair the config"
            )
        perm = self._permutation(k, scheme)
        codes = unpack_words(self.weight, layout.weight, n, k)
        return QuantizedTensor(codes if perm is None else codes[:, perm], self.scales.contiguous(), zeros, format, perm)

    def infer(self, family: str, checkpoint_format: str | None) -> LayerScheme:
        """The scheme that the tensors' shapes imply, for a checkpoint without a config. Symmetric
        if every zero point is the middle code.
        """
        if family == "gptq" and checkpoint_format is None:
            raise CheckpointError(
                f"{self.name} is GPTQ without a config, which does not say how zero points are stored; pass checkpoint_format='gptq' (v1, "
                "the usual one) or 'gptq_v2'"
            )
        storage = checkpoint_format if family == "gptq" and checkpoint_format else family
        for bits in BITS if family != "awq" else (4,):
            layout = checkpoint_layout(storage, bits)
            try:
                n, k = self._size(layout)
                if self.zeros is not None and self.zeros.dtype == torch.int32:
                    self._check_zeros_shape(layout, n)
            except CheckpointError:
                continue
            group_size = _fitting_group(k, self.scales.shape[1])
            format = quant_format(self.name, bits, group_size, self.zeros is None)
            if self.zeros is not None:
                middle = bool((self._zero_points(layout, n) == format.symmetric_zero_point).all())
                format = QuantFormat(bits, format.group_size, middle)
            return LayerScheme(storage, format, None)
        raise CheckpointError(
            f"{self.name}: packed weight {list(self.weight.shape)} with scales {list(self.scales.shape)} fits no bits of {BITS} in a "
            f"{family} checkpoint; pass its config"
        )

    def _size(self, layout: CheckpointLayout) -> tuple[int, int]:
        """(n, k), checked against the packed weight and the scales."""
        rows, columns = self.weight.shape
        n = self.scales.shape[0]
        if self.shape is not None:
            if self.shape.numel() != 2 or self.shape.is_floating_point() or int(self.shape.min()) < 1:
                raise CheckpointError(
                    f"{self.name}: weight_shape is {_describe(self.shape)} {self.shape.tolist()}; accepted: two integers, n and k"
                )
            n, k = (int(value) for value in self.shape)
        elif layout.storage == "awq":
            k = rows
        else:
            k = rows * layout.weight.slots
        stored = layout.weight.storage_shape(n, k)
        # Checkpoints keep one word a tile: the last axis of the storage is 1.
        if (rows, columns) != stored[:2] or self.scales.shape[0] != n:
            fits = f" (the tensors look like {columns * 32 // n} bits)" if layout.storage == "awq" and columns * 32 % n == 0 else ""
            raise CheckpointError(
                f"{self.name}: the packed weight is {[rows, columns]} with scales for {self.scales.shape[0]} channels; a {layout.bits}-bit "
                f"{layout.storage} weight "
                f"[{n}, {k}] is {list(stored[:2])}{fits}: correct the bits in the config or copy the checkpoint again"
            )
        if self.g_idx is not None and (self.g_idx.ndim != 1 or len(self.g_idx) != k or self.g_idx.is_floating_point()):
            raise CheckpointError(
                f"{self.name}: g_idx is {_describe(self.g_idx)}; {layout.bits} bits make k = {k}, so int32 [{k}] is accepted: correct the "
                "bits or copy the checkpoint again"
            )
        return n, k

    def _check_groups(self, k: int, format: GemmFormat) -> None:
        groups = self.scales.shape[1]
        if groups != format.groups(k):
            fits = _fitting_group(k, groups)
            raise CheckpointError(
                f"{self.name}: scales hold {groups} groups; group_size {format.group_size} over k = {k} makes {format.groups(k)}"
                f"{f' (the shapes fit group_size {fits})' if fits else ''}: correct group_size in the config or copy the checkpoint again"
            )

    def _check_zeros_shape(self, layout: CheckpointLayout, n: int) -> None:
        assert self.zeros is not None
        groups = self.scales.shape[1]
        expected = layout.zeros.storage_shape(n, groups)[:2]
        if tuple(self.zeros.shape) != expected:
            raise CheckpointError(
                f"{self.name}: packed zero points are {list(self.zeros.shape)}; {layout.bits} bits, {n} channels and {groups} groups need "
                f"{list(expected)}: "
                "correct bits or group_size in the config or copy the checkpoint again"
            )

    def _zero_points(self, layout: CheckpointLayout, n: int) -> Tensor:
        """uint8 [n, groups], unsigned."""
        assert self.zeros is not None
        groups, middle = self.scales.shape[1], 1 << (layout.bits - 1)
        if self.zeros.dtype == torch.int8 and layout.storage == "compressed-tensors":  # releases before 0.9 left them unpacked
            low, high = int(self.zeros.min()), int(self.zeros.max())
            if tuple(self.zeros.shape) != (n, groups) or low < -middle or high >= middle:
                raise CheckpointError(
                    f"{self.name}: zero points are int8 {list(self.zeros.shape)} from {low} to {high}; accepted: [{n}, {groups}] from "
                    f"{-middle} to {middle - 1}: "
                    "correct the bits in the config or quantize the model again"
                )
            return (self.zeros.to(torch.int16) + middle).to(torch.uint8)
        if self.zeros.dtype != torch.int32 or self.zeros.ndim != 2:
            raise CheckpointError(
                f"{self.name}: zero points are {_describe(self.zeros)}; accepted: packed int32: copy the checkpoint again"
            )
        self._check_zeros_shape(layout, n)
        stored = unpack_words(self.zeros, layout.zeros, n, groups)
        return ((stored.to(torch.int16) + layout.zero_offset) & ((1 << layout.bits) - 1)).to(torch.uint8)

    def _explain_zeros(self, zeros: Tensor, scheme: LayerScheme) -> NoReturn:
        middle, low, high = scheme.format.symmetric_zero_point, int(zeros.min()), int(zeros.max())
        if scheme.storage in GPTQ_FORMATS and low == high == middle + (1 if scheme.storage == "gptq" else -1):
            other = GPTQ_FORMATS[1 - GPTQ_FORMATS.index(scheme.storage)]
            raise CheckpointError(
                f"{self.name}: read as {scheme.storage!r}, every zero point of this symmetric weight is {low}, not {middle}: it is stored "
                f"as {other!r}; "
                f"pass checkpoint_format={other!r} or correct the config"
            )
        raise CheckpointError(
            f"{self.name}: the config says symmetric, so every zero point must be {middle}; got {low} to {high} (zero points out of "
            "range): "
            "correct sym/zero_point in the config or copy the checkpoint again"
        )

    def _permutation(self, k: int, scheme: LayerScheme) -> Tensor | None:
        """The stable order that makes groups contiguous, int64 [k]; None if they are."""
        groups, name = self.scales.shape[1], self.name
        if self.g_idx is None or (scheme.storage == "compressed-tensors" and bool((self.g_idx == -1).all())):
            if scheme.desc_act and groups > 1:
                raise CheckpointError(
                    f"{name}: the config says act-order but there is no g_idx; without it columns have no groups: save the model again"
                )
            return None
        g_idx = self.g_idx.long()
        in_order = torch.arange(k, device=g_idx.device) // (k if scheme.format.group_size == PER_CHANNEL else scheme.format.group_size)
        if torch.equal(g_idx, in_order):
            return None
        low, high = int(g_idx.min()), int(g_idx.max())
        if low < 0 or high >= groups:
            raise CheckpointError(
                f"{name}: g_idx reaches from {low} to {high}; accepted: 0 to {groups - 1}, one of the {groups} groups: copy the checkpoint "
                "again"
            )
        if not torch.equal(torch.bincount(g_idx, minlength=groups), torch.bincount(in_order, minlength=groups)):
            raise CheckpointError(
                f"{name}: g_idx does not give each group {scheme.format.group_size} columns; act-order checkpoints do: correct group_size "
                "or save the model again"
            )
        if scheme.desc_act is False:
            raise CheckpointError(
                f"{name}: g_idx is out of order but the config says no act-order; set desc_act (actorder) in the config or save the model "
                "again"
            )
        return torch.argsort(g_idx, stable=True)


def _fitting_group(k: int, groups: int) -> int | None:
    """The accepted group size that cuts k into ``groups``, if there is one."""
    fitting = [size for size in GROUP_SIZES if QuantFormat(group_size=size).groups(k) == groups]
    return PER_CHANNEL if PER_CHANNEL in fitting else fitting[0] if fitting else None


def _describe(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
