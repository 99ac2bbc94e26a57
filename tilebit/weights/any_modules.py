"""``AnyPrecisionLinear``: a linear layer that computes in any of the widths that one store of its
weight holds, and what sets the width of a whole model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ..accepted import expect, expect_tensors
from ..layouts.planes import plane_layout
from ..ops.gemm import call
from ..progress import counted
from .any_files import layer_entries
from .any_kind import AnyKind
from .any_packed import AnyPrecisionWeight, any_format, check_width, pack_any
from .any_state import PLANES, WEIGHTS, StoredAny, codebook_entry, expect_entries
from .casting import PackedLayer, cast_bias, dtype_after, expect_bias, own_bias
from .checkpoint_config import CheckpointError
from .extra_state import EXTRA
from .layers import expect_computed, linears_of, once, replace_layers
from .packed import DTYPES, arch_of
from .quantize_any import MAX_BITS, AnyPrecisionTensor, quantize_any


class AnyPrecisionLinear(PackedLayer):
    """y[..., n] = x[..., k] @ w^T (+ bias), with w [n, k] in ``bits`` bits: a width of a call
    (``layer(x, bits=4)``), else of the layer (``layer.bits``), at first the widest.

    Buffers: ``planes`` int32, ``codebook_3`` to ``codebook_8`` (those of the widths that are held)
    and ``bias`` [n]; shapes and layout are those of ``AnyPrecisionWeight``. ``state_dict`` holds
    them and, as a uint8 tensor of JSON, n, k, the widths and the layout's architecture; not the
    layer's width. The layer computes in the codebooks' dtype, fp16 or bf16, and ``.to(dtype)``
    rounds these; a cast to another dtype, of planes, or of codebooks or a bias that do not fit is a
    ``ValueError`` and leaves the layer as it was. Moving it to a device whose kernels read another
    layout repacks it; so does loading a state_dict that was packed for another one.
    ``load_state_dict`` refuses entries that are not this layer's, and then changes nothing.
    Derivatives are those of ``tilebit.gemm``: with respect to x and bias.

    On a GPU one row of x may be rounded to 2^-22 of its largest number at widths of up to 4 bits,
    and then makes a row of NaN where it has a number that is not finite.
    """

    planes: Tensor
    bias: Tensor | None

    def __init__(self, packed: AnyPrecisionWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        expect(
            "packed",
            packed,
            AnyPrecisionWeight,
            "an AnyPrecisionWeight: pack_any(q, dtype), or AnyPrecisionLinear.from_quantized(q, ...)",
        )
        self.in_features, self.out_features, self.widths = packed.k, packed.n, packed.widths
        self._names = {bits: (codebook_entry(bits), any_format(bits).name) for bits in self.widths}  # made once: calls pass them
        self._hold(packed)
        self.register_buffer("bias", own_bias(bias, packed.n, packed.dtype, packed.device))
        self._bits = packed.max_bits

    @classmethod
    def from_float(
        cls,
        linear: nn.Linear,
        seed_bits: int = 3,
        max_bits: int = MAX_BITS,
        sensitivity: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> AnyPrecisionLinear:
        """``linear`` in every width from ``seed_bits`` to ``max_bits``, quantized on its own device by
        ``quantize_any``; it computes in ``dtype``: by default the weight's, fp16 for fp32 weights.
        Raises ``TypeError`` and ``ValueError`` as ``quantize_any`` and ``pack_any`` do."""
        expect("linear", linear, nn.Linear, "a torch.nn.Linear")
        weight = linear.weight.detach()
        chosen = dtype or (weight.dtype if weight.dtype in DTYPES else torch.float16)
        return cls(pack_any(quantize_any(weight, seed_bits, max_bits, sensitivity), chosen), linear.bias)

    @classmethod
    def from_quantized(
        cls,
        weight: AnyPrecisionTensor,
        bias: Tensor | None = None,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str | None = None,
    ) -> AnyPrecisionLinear:
        """``weight``, as ``quantize_any`` and ``load_any_precision`` give it, on ``device`` (default:
        where it is), with ``bias`` [n]; it computes in ``dtype``, fp16 or bf16. Raises ``TypeError`` and
        ``ValueError`` as ``pack_any`` does."""
        return cls(pack_any(weight, dtype, device), bias)

    @classmethod
    def from_state(
        cls,
        state: Mapping[str, Tensor],
        name: str = "",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> AnyPrecisionLinear:
        """A layer from what ``state_dict`` said of one: ``planes``, codebooks, ``bias`` where there is one,
        and ``_extra_state``, which names n, k and the widths; ``name`` and a dot stand before each.

        Tensors are copied. The layer computes in ``dtype`` (default: the codebooks'), on ``device``
        (default: theirs); planes that were packed for another one are packed again. Raises ``TypeError``
        and ``ValueError`` for entries that are missing, of other widths, shapes or dtypes, and for
        codebooks that ``dtype`` does not hold.
        """
        prefix = f"{name}." if name else ""
        expect_entries(state, prefix, [EXTRA])
        stored = StoredAny.parse(state[prefix + EXTRA])
        known = {prefix + entry for entry in stored.entries}
        others = [prefix + entry for entry in WEIGHTS if prefix + entry in state and prefix + entry not in known]
        if others:
            raise ValueError(f"the state_dict holds {others[0]} and stores {stored.widths[0]} to {stored.widths[-1]} bits; accepted: these")
        copied = {entry: tensor.clone() if isinstance(tensor, Tensor) else tensor for entry, tensor in state.items() if entry in known}
        weight = stored.weight(copied, prefix)
        return cls(weight.cast(weight.dtype if dtype is None else dtype), state.get(prefix + "bias")).to(device or weight.device)

    @classmethod
    def from_file(
        cls, path: str | Path, name: str = "", dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> AnyPrecisionLinear:
        """The layer ``name`` of a directory, .safetensors file or pickled state_dict (of which only
        tensors are read), as ``from_state`` makes it; "" is a file of one layer. Nothing is quantized.
        Raises ``CheckpointError`` for files that cannot be read and for what is no such layer."""
        state = layer_entries(Path(path), name)
        try:
            return cls.from_state(state, "", dtype, device)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{name or path}: {error}") from None

    @property
    def bits(self) -> int:
        """The width of calls that name none. Setting it raises ``TypeError`` and ``ValueError`` for
        one that is not held."""
        return self._bits

    @bits.setter
    def bits(self, bits: int) -> None:
        check_width(bits, self.widths)
        self._bits = bits

    @property
    def kind(self) -> str:
        """The widths that are stored, and that of the layer where it is not the widest: ``w3-8a16_any@4``."""
        return AnyKind.of(self.widths, self._bits).name

    @property
    def dtype(self) -> torch.dtype:
        """What the layer computes in."""
        return self._buffers[codebook_entry(self.widths[-1])].dtype  # type: ignore[union-attr]

    @property
    def packed(self) -> AnyPrecisionWeight:
        """The weight in all widths (sharing the buffers)."""
        books = {bits: self.get_buffer(codebook_entry(bits)) for bits in self.widths}
        return AnyPrecisionWeight(self.planes, books, self.out_features, self.in_features, self.arch)

    def forward(self, x: Tensor, bits: int | None = None) -> Tensor:
        if bits is None:
            bits = self._bits
        elif bits not in self._names or type(bits) is not int:
            check_width(bits, self.widths)
        held: dict[str, Any] = {**self._buffers, **self._parameters} if self._parameters else self._buffers
        try:  # costs nothing where it is one
            width = x.shape[-1]
        except (AttributeError, IndexError):
            expect_tensors(x=x)
            width = 0
        if width != self.in_features:
            raise ValueError(f"x is {x.dtype} {list(x.shape)}; accepted: {self.dtype} [..., {self.in_features}]")
        planes = held["planes"]
        if is_dynamo_compiling():
            bits = next(one for one in self.widths if one == bits)  # a graph for each width: dynamo takes a second one for a symbol
            weight = planes[:bits]
        else:
            weight = self._view(planes, bits)
        book, name = self._names[bits]
        return call(x, weight, held[book], None, None, held["bias"], self.out_features, name, False)

    def _view(self, planes: Tensor, bits: int) -> Tensor:
        """The first planes. Kept, because plans of calls are found by the weight's identity, and made
        anew when another tensor has taken the planes' place."""
        if self._views.get(0) is not planes:
            self._views = {0: planes, **{width: planes[:width] for width in self.widths}}
        return self._views[bits]

    def extra_repr(self) -> str:
        shape = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{shape}, bits={self._bits} of {self.widths[0]} to {self.widths[-1]}, arch={self.arch}"

    def _hold(self, packed: AnyPrecisionWeight) -> None:
        self.arch, self._views = packed.arch, {}
        self.register_buffer(PLANES, packed.planes)
        for bits, book in packed.codebooks.items():
            self.register_buffer(codebook_entry(bits), book)

    def expect_cast(self, dtype: torch.dtype) -> None:
        if self.bias is not None:
            cast_bias(self.bias, dtype)
        if not self.planes.is_meta:
            self.packed.cast(dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AnyPrecisionLinear:
        dtype = dtype_after(fn, self.dtype, self.planes.device)
        if dtype != self.dtype:
            self.expect_cast(dtype)
        super()._apply(fn, recurse)  # type: ignore[arg-type]
        self._views = {}
        if self.planes.device.type in ("cpu", "cuda"):
            arch = arch_of(self.planes.device)
            packed = self.packed
            if packed.layout.name != plane_layout(arch).name:
                self._hold(pack_any(packed.unpack(), self.dtype, arch=arch))
            self.arch = arch
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_views": {}}  # copies make their own

    def get_extra_state(self) -> Tensor:
        return self._stored.to_tensor()

    @property
    def _stored(self) -> StoredAny:
        return StoredAny(self.out_features, self.in_features, self.widths, self.arch)

    def set_extra_state(self, state: Any) -> None:
        """Checked in ``_load_from_state_dict``, before any buffer is touched."""

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
        held = [name for name in self._buffers if prefix + name in state_dict]
        if held:
            try:
                state_dict = {**state_dict, **self._as_stored_here(state_dict, prefix)}
            except (TypeError, ValueError) as error:
                errors.append(f"{prefix.rstrip('.') or type(self).__name__}: {error}")
                return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        self._views = {}

    def _as_stored_here(self, state: Mapping[str, Any], prefix: str) -> dict[str, Tensor]:
        """The weight of ``state`` in this layer's layout and dtype. Raises ``ValueError`` for one of
        another shape or other widths, and for entries that are missing or of another kind."""
        own = self._stored
        expect_entries(state, prefix, [EXTRA, *own.entries, *(["bias"] if self.bias is not None else [])])
        stored = StoredAny.parse(state[prefix + EXTRA])
        if stored.described != own.described:
            raise ValueError(f"the state_dict holds {stored.described}; this layer is {own.described}: build the layer that fits")
        packed = stored.weight(state, prefix)
        biases: dict[str, Tensor] = {}
        if self.bias is not None:
            bias = expect_bias(state[prefix + "bias"], self.out_features)
            biases[prefix + "bias"] = cast_bias(bias, self.dtype).contiguous()
        if packed.layout.name != plane_layout(self.arch).name:
            packed = pack_any(packed.unpack(), packed.dtype, arch=self.arch)
        rounded = packed.cast(self.dtype)
        books = {prefix + codebook_entry(bits): book for bits, book in rounded.codebooks.items()}
        return {prefix + PLANES: rounded.planes, **books, **biases}


def quantize_model_any(
    model: nn.Module,
    seed_bits: int = 3,
    max_bits: int = MAX_BITS,
    skip: Iterable[str] | Callable[[str, nn.Linear], bool] = ("lm_head",),
    sensitivity: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    progress: bool = False,
) -> list[str]:
    """Replace every ``nn.Linear`` inside ``model`` by an ``AnyPrecisionLinear``, in place; returns
    the names replaced.

    ``skip``, ``dtype``, and experts that are no linear layers, as in ``quantize_model``.
    ``progress`` shows a bar on a terminal. ``sensitivity``: [n, k] by layer, as ``quantize_any``
    takes it; layers without one are clustered with all values alike. Layers are converted before
    any is replaced: an error leaves the model as it was. Raises ``ValueError`` when nothing is left
    to replace, for fp32 layers without ``dtype``, and for a sensitivity of no layer. Afterwards
    ``save_pretrained`` of a transformers model writes a directory that ``from_pretrained`` reads
    once ``tilebit.transformers`` is imported, with the width that each layer is set to; of another
    library's it is an error.
    """
    expect("model", model, nn.Module, "a torch.nn.Module with torch.nn.Linear inside")
    found, given = linears_of(model, skip), sensitivity or {}
    strange = [name for name in given if name not in found]
    if strange:
        raise ValueError(f"sensitivity names {strange[0]!r}; accepted: layers that are replaced: {', '.join(list(found)[:5])}, ...")
    expect_computed(found, dtype)
    layers = once(found)
    converted = {
        layer: AnyPrecisionLinear.from_float(layer, seed_bits, max_bits, given.get(name), dtype)
        for name, layer in counted(layers.items(), "quantizing layers", len(layers), progress)
    }
    return replace_layers(model, found, converted, dtype)


def precision_view(model: nn.Module, bits: int) -> nn.Module:
    """A copy of ``model`` whose ``AnyPrecisionLinear`` compute in ``bits`` bits, and whose tensors are
    those of ``model``: it costs no memory, and drafts for it (``generate(assistant_model=...)`` of
    transformers). What either writes to a parameter or buffer the other sees. Raises ``TypeError``
    and ``ValueError`` as ``set_precision`` does."""
    expect("model", model, nn.Module, "a torch.nn.Module with AnyPrecisionLinear inside")
    shared: dict[int, Any] = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    copied = copy.deepcopy(model, shared)
    set_precision(copied, bits)
    return copied


def set_precision(model: nn.Module, bits: int) -> int:
    """Set the width of every ``AnyPrecisionLinear`` of ``model`` (itself included); returns how many
    there are. Raises ``TypeError`` and ``ValueError`` where there is none, and for a width that one
    of them does not hold; then none has changed."""
    expect("model", model, nn.Module, "a torch.nn.Module with AnyPrecisionLinear inside")
    layers = [module for module in model.modules() if isinstance(module, AnyPrecisionLinear)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no AnyPrecisionLinear inside; accepted: a model with some: quantize_model_any(model)")
    for layer in layers:
        check_width(bits, layer.widths)
    for layer in layers:
        layer.bits = bits
    return len(layers)
