"""``QuantLinear``: a linear layer whose weight stays packed, and ``quantize_model``, which puts it
in place of ``nn.Linear``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..accepted import expect, expect_tensors, format_of, scaled
from ..layouts.formats import GemmFormat, QuantFormat
from ..ops.gemm import call
from ..ops.gemm_int8 import gemm_int8, of_rows
from ..schedules.gemm.codecs import packed_layout
from .casting import PackedLayer, cast_bias, dtype_after, own_bias
from .extra_state import EXTRA, from_tensor, to_tensor
from .layers import Quantized, expect_computed, given_weights, linears_of, replace_layers
from .loading import misfits
from .packed import DTYPES, WEIGHTS, PackedWeight, arch_of, by_group, fitting_scales, pack
from .quantize import QuantizedTensor
from .smooth import Smoothing, quantize_smoothed, smoothing_of

if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .precision import PrecisionPlan


class QuantLinear(PackedLayer):
    """y[..., n] = x[..., k] @ w^T (+ bias), with w [n, k] packed for the GEMM kernels of the device
    that the module is on.

    Buffers: ``weight`` int32, ``scales``, ``zeros`` (asymmetric formats), ``row_scales`` (formats
    with two levels of scales), ``bias`` [n], ``perm`` int64 [k] (act-order checkpoints), ``smooth``
    fp32 [k] (smoothed inputs, which the kernel that quantizes x multiplies by it); shapes and
    layout are those of ``PackedWeight``. ``state_dict`` holds them and, as a uint8 tensor of JSON
    (so that safetensors stores it), the format and the layout's architecture. Moving the module to
    a device whose kernels read another layout repacks the weight; so does loading a state_dict that
    was packed for another one. The module computes in ``dtype``, fp16 or bf16, that of its scales
    where these are neither bytes nor fp32, and ``.to(dtype)`` rounds them; a cast to another dtype,
    of codes, or of scales or a bias that do not fit is a ``ValueError`` and leaves the layer as it
    was. A format with 8-bit x quantizes x at each call, as ``tilebit.gemm`` does.
    ``load_state_dict`` refuses entries that are not a layer's of this kind, codes and permutations
    of another dtype among them, ``perm`` where the layer has none and the other way round, and then
    changes nothing; once loaded, the layer has the entries' ``smooth``, or none, whatever it had.
    Derivatives are those of ``tilebit.gemm``: with respect to x.

    ``dependent`` (off; no part of ``state_dict``) launches the kernel as ``tilebit.gemm``
    describes: it may start while the previous kernel of the stream still runs. The layer keeps that
    safe for what it does itself: switching the option on, and moving, casting, loading or copying
    the layer while it is on, waits for the device once. Code that writes to the buffers in place
    must do the same.
    """

    weight: Tensor
    scales: Tensor
    zeros: Tensor | None
    bias: Tensor | None
    perm: Tensor | None
    row_scales: Tensor | None
    smooth: Tensor | None

    def __init__(self, packed: PackedWeight, bias: Tensor | None = None, dependent: bool = False) -> None:
        super().__init__()
        if not isinstance(packed, PackedWeight):
            raise TypeError(
                f"got QuantLinear({type(packed).__name__}); accepted: a PackedWeight; use QuantLinear.from_float(linear) "
                f"or QuantLinear.from_checkpoint(...)"
            )
        scaled(packed.format)
        self.in_features, self.out_features = packed.k, packed.n
        self.format, self._format_name = packed.format, packed.format_name
        self._dtype = packed.dtype
        self._hold(packed, own_bias(bias, packed.n, packed.dtype, packed.device))
        self.dependent = dependent

    @classmethod
    def from_float(
        cls,
        linear: nn.Linear,
        format: GemmFormat | str = QuantFormat(),
        clip_search: bool = False,
        dtype: torch.dtype | None = None,
        dependent: bool = False,
        smoothing: Smoothing | None = None,
    ) -> QuantLinear:
        """``linear`` quantized (round to nearest; ``clip_search`` as in ``quantize``) on its own
        device, computing in ``dtype``: by default the weight's, fp16 for fp32 weights. ``smoothing``
        (``search_smoothing``, ``calibrate_smoothing``): its factors are folded into the weight, and the
        layer divides x by them. Raises ``TypeError`` and ``ValueError`` as ``quantize``,
        ``quantize_smoothed`` and ``pack`` do."""
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"got from_float({type(linear).__name__}); accepted: torch.nn.Linear")
        format = format_of(format)
        weight = linear.weight.detach()
        chosen = dtype or (weight.dtype if weight.dtype in DTYPES else torch.float16)
        return cls(pack(quantize_smoothed(weight, format, smoothing, clip_search, chosen), chosen), linear.bias, dependent)

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        name: str,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str = "cpu",
        dependent: bool = False,
    ) -> QuantLinear:
        """The layer ``name`` of ``checkpoint``, packed on ``device``. Raises as
        ``Checkpoint.quantized`` and ``pack`` do."""
        return cls(pack(checkpoint.quantized(name, device), dtype), checkpoint.bias(name, device), dependent)

    @property
    def dependent(self) -> bool:
        """Whether a call may start while the previous kernel of the stream still runs."""
        return self._dependent

    @dependent.setter
    def dependent(self, value: bool) -> None:
        self._dependent = bool(value)
        self._settle()

    def _settle(self) -> None:
        """Wait until the buffers are written, if kernels may read them before the preceding kernel
        has ended."""
        device = self.weight.device
        if self._dependent and device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    @property
    def dtype(self) -> torch.dtype:
        """What the module computes in."""
        return self._dtype if self.format.own_scales else self.scales.dtype

    @property
    def packed(self) -> PackedWeight:
        """The weight as ``tilebit.gemm`` takes it (sharing the buffers)."""
        return PackedWeight(
            self.weight, self.scales, self.zeros, self.out_features, self.in_features, self.format, self.dtype, self.arch,
            self.perm, self.row_scales, self.smooth,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        # As attributes they would cost 0.9 us each. A buffer that was replaced by a Parameter is
        # found among those.
        held: dict[str, Any] = {**self._buffers, **self._parameters} if self._parameters else self._buffers
        perm = held["perm"]
        try:  # costs nothing where it is one
            width = x.shape[-1]
        except (AttributeError, IndexError):
            expect_tensors(x=x)
            width = 0
        if width != self.in_features:
            raise ValueError(f"x is {x.dtype} {list(x.shape)}; accepted: {self.dtype} [..., {self.in_features}]")
        if perm is not None:
            x = x.index_select(-1, perm)
        if self.format.x:
            return of_rows(
                x, held["weight"], held["scales"], held["zeros"], held["row_scales"], held["smooth"], held["bias"],
                self.out_features, self.in_features, self._format_name, self.dtype, self._dependent,
            )  # fmt: skip
        return call(
            x, held["weight"], held["scales"], held["zeros"], held["row_scales"], held["bias"],
            self.out_features, self._format_name, self._dependent,
        )  # fmt: skip

    @property
    def x_group(self) -> int | None:
        """Values of x that share a scale where the layer takes int8 codes of x (``of_codes``), -1: those of
        a row; None where it takes 16-bit x alone, or quantizes it to e4m3 itself."""
        return self.format.x_group if self.format.integer_sums and self.perm is None else None

    def of_codes(self, codes: Tensor, token_scales: Tensor) -> Tensor:
        """y of an x that is quantized already: int8 ``codes`` and fp32 ``token_scales`` as
        ``quantize_activations`` gives them for ``x_group`` and ``smooth``. Raises ``ValueError`` for what does not fit,
        and for a layer that takes 16-bit x."""
        if self.x_group is None:
            order = "" if self.perm is None else ", with reordered columns,"
            raise ValueError(f"the layer of {self._format_name}{order} takes no codes; accepted: x of {self.dtype}: call the layer")
        held: dict[str, Any] = {**self._buffers, **self._parameters}
        return gemm_int8(
            codes, held["weight"], held["scales"], held["zeros"], held["row_scales"], token_scales, held["bias"],
            self.out_features, self.in_features, self._format_name, self.dtype, self._dependent,
        )  # fmt: skip

    def unpack(self) -> QuantizedTensor:
        """The weight as codes, scales and zero points."""
        return self.packed.unpack()

    def extra_repr(self) -> str:
        shape = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{shape}, format={self.format.name}, arch={self.arch}{', dependent=True' if self._dependent else ''}"

    def _hold(self, packed: PackedWeight, bias: Tensor | None) -> None:
        self.arch = packed.arch
        held = {"bias": bias, **{name: getattr(packed, name) for name in (*WEIGHTS, "perm", "smooth")}}
        for name in sorted(held, key=lambda name: held[name] is None):  # absent ones last: torch.export counts on it
            self.register_buffer(name, held[name])

    def expect_cast(self, dtype: torch.dtype) -> None:
        self._scales_in(dtype)

    def _scales_in(self, dtype: torch.dtype) -> Tensor:
        """The scales of the layer cast to ``dtype``. Raises ``ValueError`` where they or the bias
        do not fit."""
        packed = self.packed
        if self.bias is not None:
            cast_bias(self.bias, dtype)
        if self.format.own_scales or packed.scales.is_meta:
            return packed.scales
        held = packed.scales[:, : packed.n].t()
        return by_group(fitting_scales(held, packed.format, dtype, lambda: packed.unpack().codes), packed.scales.shape[1])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantLinear:
        """Every move and cast comes here. Codes pass through unpacked form when the new device's
        kernels read another layout."""
        before = self.packed
        dtype = dtype_after(fn, before.dtype, before.device)
        scales = before.scales if dtype == before.dtype else self._scales_in(dtype)
        super()._apply(fn, recurse)  # type: ignore[arg-type]
        if self.format.own_scales:  # then no buffer tells
            self.scales, self._dtype = scales.to(self.weight.device), dtype
        elif dtype != before.dtype:
            self.scales.detach().copy_(scales)  # other numbers than a cast gives where a group's weights are all zero
        for name in ("row_scales", "smooth"):  # fp32 whatever the module computes in
            if (held := getattr(before, name)) is not None:
                setattr(self, name, held.to(self.weight.device))
        if self.weight.device.type in ("cpu", "cuda") and before.device.type != "meta":
            self._repack_for(arch_of(self.weight.device))
        self._settle()
        return self

    def _repack_for(self, arch: str) -> None:
        if not _same_layout(arch, self.arch, self.format):
            codes = self.unpack()
            self._hold(pack(codes, self.dtype, arch=arch), self.bias)
        self.arch = arch

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Copying and unpickling come here."""
        super().__setstate__(state)
        self._settle()

    def get_extra_state(self) -> Tensor:
        described = {"n": self.out_features, "k": self.in_features, "format": self.format.to_json(), "arch": self.arch}
        return to_tensor(described | ({} if self.smooth is None else {"smooth": True}))

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
        state_dict, found = self.fitting(state_dict, prefix, local_metadata)
        if found:
            errors += found
            return
        if prefix + "weight" in state_dict:
            stored = state_dict.get(prefix + "smooth")
            if (stored is None) != (self.smooth is None):
                self.smooth = None if stored is None else torch.ones(self.in_features, device=self.weight.device)
            if self.weight.untyped_storage().nbytes() > self.weight.nbytes:  # a part of a joined layer, which has scales of its own
                self.weight = self.weight.clone()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        self._settle()

    def fitting(self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """(``state_dict`` with the layer's tensors in its own layout, what keeps them from being its, in
        sentences)."""
        described, smoothed = state_dict.get(prefix + EXTRA), prefix + "smooth" in state_dict
        if described is not None and all(prefix + name in state_dict for name in ("weight", "scales")):
            try:
                said = parse_described(described)
                if said.get("smooth", False) != smoothed:
                    raise ValueError(
                        f"the state_dict has {'' if smoothed else 'no '}{prefix}smooth, and says of the layer that its x is "
                        f"{'not ' * smoothed}smoothed; accepted: what state_dict() gave, with all its entries"
                    )
                state_dict = {**state_dict, **self._as_stored_here(state_dict, prefix, said)}
            except ValueError as error:
                return state_dict, [f"{prefix.rstrip('.') or 'QuantLinear'}: {error}"]
        buffers = {name: buffer for name, buffer in self._buffers.items() if buffer is not None and name != "smooth"}
        if smoothed:
            buffers["smooth"] = torch.empty(self.in_features, device="meta")
        taken = self.dtype if local_metadata.get("assign_to_params_buffers") else None
        return state_dict, [f"{text} ({self.extra_repr()})" for text in misfits(buffers, state_dict, prefix, self.format, taken)]

    def _as_stored_here(self, state_dict: dict[str, Any], prefix: str, described: dict[str, Any]) -> dict[str, Tensor]:
        """The packed tensors of ``state_dict`` in this module's layout. Raises ``ValueError`` when
        they belong to another shape or format."""
        own = {"n": self.out_features, "k": self.in_features, "format": self.format.to_json()}
        if {name: described.get(name) for name in own} != own:
            raise ValueError(
                f"the state_dict holds { ({name: described.get(name) for name in own}) }; this module is {own}: build the module that fits"
            )
        if _same_layout(described["arch"], self.arch, self.format):
            return {}
        weight, scales = state_dict[prefix + "weight"], state_dict[prefix + "scales"]
        zeros, rows = (state_dict.get(prefix + name) for name in ("zeros", "row_scales"))
        dtype = self._dtype if self.format.own_scales else scales.dtype
        stored = PackedWeight(
            weight, scales, zeros, self.out_features, self.in_features, self.format, dtype, described["arch"], row_scales=rows
        )
        packed = pack(stored.unpack(), dtype, arch=self.arch)
        found = {name: getattr(packed, name) for name in WEIGHTS}
        return {prefix + name: tensor for name, tensor in found.items() if tensor is not None}


def _same_layout(a: str, b: str, format: GemmFormat) -> bool:
    return a == b or packed_layout(a, format).name == packed_layout(b, format).name


def parse_described(state: Any) -> dict[str, Any]:
    """What the extra state of a ``state_dict`` says of a layer: n, k, format and arch. Raises
    ``ValueError``."""
    try:
        described = from_tensor(state)
        packed_layout(described["arch"], GemmFormat.from_json(described["format"]))
        return described
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise ValueError(
            f"the extra state is no description of a packed weight ({error}); accepted: a state_dict of a QuantLinear"
        ) from None


def quantize_model(
    model: nn.Module,
    format: GemmFormat | str = QuantFormat(),
    skip: Iterable[str] | Callable[[str, nn.Linear], bool] = ("lm_head",),
    clip_search: bool = False,
    dtype: torch.dtype | None = None,
    dependent: bool = False,
    weights: Mapping[str, Quantized] | None = None,
    precision: PrecisionPlan | None = None,
    smoothing: Mapping[str, Smoothing] | None = None,
) -> list[str]:
    """Replace every ``nn.Linear`` inside ``model`` by a ``QuantLinear`` of ``format``, in place;
    returns the names replaced.

    Layers of ``precision`` (``select_channels``) become ``MixedLinear`` of its two formats, each with
    the channels that it says, or ``QuantLinear`` of one where it says none or all; ``format`` is for
    the others.

    The layers compute in ``dtype``, fp16 or bf16: by default their own. Naming one casts the rest
    of the model to it too, where a layer has another; without it, layers of other types (fp32) are
    an error, because their first call would be one.

    ``skip`` lists names to keep (a full name, or its last parts: "lm_head", "mlp.gate"), or is a
    predicate of (name, layer). A layer shared under several names is quantized once. Layers are
    converted before any is replaced: an error leaves the model as it was. ``dependent`` is every
    new layer's. ``weights`` are weights quantized before, by layer (``calibrate``, which takes the
    same ``precision``); ``format``, ``precision`` and ``clip_search`` are for layers without one.
    ``smoothing`` (``calibrate_smoothing``, by layer): factors that are folded into the layers'
    weights before they are rounded, and that the layers divide x by. Raises ``ValueError`` when
    nothing is left to replace, for a layer that computes more than its weight and bias say (hooks,
    a ``forward`` of its own, a weight made at each call), for ``weights``, ``smoothing`` or layers
    of ``precision`` of no layer, of another shape, or of one layer twice, for ``weights`` that are
    not what ``precision`` says of their layer, and for ``smoothing`` of a layer that has one of
    ``weights`` (which ``calibrate`` smooths) or of a format with 16-bit x. Afterwards
    ``save_pretrained`` of a transformers model writes a directory that ``from_pretrained`` reads
    once ``tilebit.transformers`` is imported; of another library's it is an error. Experts that a
    model stacks in one tensor are no linear layers, and stay; one warning names them, with their
    share of the bytes.
    """
    expect("model", model, nn.Module, "a torch.nn.Module with torch.nn.Linear inside")
    format = format_of(format)
    from .mixed import layer_of, mixed_layers, rounded  # made of this module's layers

    found = linears_of(model, skip)
    given = given_weights(found, weights or {})
    mixed = {} if precision is None else mixed_layers(found, precision, given)
    smooth = smoothing_of(found, smoothing or {}, given)
    expect_computed(found, dtype)
    converted = {
        layer: _from_quantized(layer, weight, dtype, dependent)
        if isinstance(weight := given.get(layer), QuantizedTensor)
        else layer_of(layer, weight, dtype, dependent)
        if weight is not None
        else rounded(layer, mixed[layer], precision, clip_search, dtype, dependent, smooth.get(layer))
        if precision is not None and layer in mixed
        else QuantLinear.from_float(layer, format, clip_search, dtype, dependent, smooth.get(layer))
        for layer in dict.fromkeys(found.values())
    }
    return replace_layers(model, found, converted, dtype)


def _from_quantized(layer: nn.Linear, weight: QuantizedTensor, dtype: torch.dtype | None, dependent: bool) -> QuantLinear:
    """A layer in place of ``layer`` with the quantized ``weight``, on its device."""
    chosen = dtype or layer.weight.dtype
    return QuantLinear(pack(weight.to(layer.weight.device), chosen), layer.bias, dependent)
