"""``QuantEmbedding``: an embedding whose weight stays packed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from ..accepted import expect, expect_tensors, format_of
from ..layouts.formats import GemmFormat
from ..schedules.gemm.codecs import packed_layout
from .modules import QuantLinear
from .packed import DTYPES, pack, row_places, unpack_rows
from .quantize import dequantized, quantize

ROWS = "rows"  # the part of an embedding's name that its packed weight has


class QuantEmbedding(nn.Module):
    """y[..., k] = w[ids[...]], with w [num_embeddings, embedding_dim] packed as a product's weight. The rows
    that are looked up are dequantized, bit for bit as ``QuantizedTensor.dequantize`` does it, and rounded
    to ``dtype``, fp16 or bf16; no others are read. ``ids`` is int32 or int64 of any shape.

    ``rows`` is a ``QuantLinear`` of that weight: moving, casting, saving and loading are its. An output layer
    of the same weight and format may be that very module: the packed weight is then held once.
    ``scale`` is what looked-up rows are multiplied with, rounded to ``dtype`` (Gemma's embeddings).

    Formats: 4- or 8-bit integers with x of 16 bits (w4a16, w8a16; symmetric or not, any groups). No
    derivatives. Look-ups are ordinary operations of torch, on CPUs and GPUs, in CUDA graphs and under
    ``torch.compile``. Raises ``TypeError`` and ``ValueError`` for another weight. An id that is no row's is an
    error of torch's (``IndexError``, ``RuntimeError``) on CPUs and an assertion of the device on GPUs, as of
    ``nn.Embedding``. While it runs, a look-up takes about 25 bytes for each value that it gives.
    """

    rows: QuantLinear

    def __init__(self, rows: QuantLinear, scale: float | None = None) -> None:
        super().__init__()
        expect("rows", rows, QuantLinear, "a QuantLinear of the weight [num_embeddings, embedding_dim]")
        check_embedded(rows.format)
        if rows.perm is not None:
            raise ValueError("the columns are reordered (act order); accepted: a weight without: quantize with act_order=False")
        self.num_embeddings, self.embedding_dim = rows.out_features, rows.in_features
        self.rows = rows
        self.scale = scale
        self._place()

    @classmethod
    def from_float(
        cls, floats: nn.Embedding, format: GemmFormat | str, clip_search: bool = False, dtype: torch.dtype | None = None
    ) -> QuantEmbedding:
        """``floats`` quantized (round to nearest; ``clip_search`` as in ``quantize``) on its own device,
        giving ``dtype``: by default the weight's, fp16 for fp32 weights. Raises ``TypeError`` and
        ``ValueError`` as ``quantize``, ``pack`` and ``scale_of`` do."""
        scale, format = scale_of(floats), format_of(format)
        check_embedded(format)
        weight = floats.weight.detach()
        chosen = dtype or (weight.dtype if weight.dtype in DTYPES else torch.float16)
        return cls(QuantLinear(pack(quantize(weight, format, clip_search, chosen), chosen)), scale)

    @property
    def format(self) -> GemmFormat:
        return self.rows.format

    @property
    def dtype(self) -> torch.dtype:
        """Of what is looked up."""
        return self.rows.dtype

    def forward(self, ids: Tensor) -> Tensor:
        expect_tensors(ids=ids)
        if ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"ids are {ids.dtype} {list(ids.shape)}; accepted: int64 or int32, of any shape")
        held = self.rows
        if held.arch != self._arch or held.weight.device != self._places.device:  # it was moved without this module
            self._place()
        wanted, n = ids.reshape(-1).long(), self.num_embeddings
        scales = embedding(wanted, held.scales[:, :n].t())  # which refuses an id that is no row's, negative ones too
        zeros = None if held.zeros is None else embedding(wanted, held.zeros[:, :n].t())
        codes = unpack_rows(held.weight, self._layout, self._places, wanted, self.embedding_dim)
        rows = dequantized(codes, scales, zeros, held.format).to(held.dtype).view(*ids.shape, self.embedding_dim)
        return rows if self.scale is None else rows * torch.full((), self.scale, dtype=rows.dtype, device=rows.device)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}{'' if self.scale is None else f', scale={self.scale:g}'}"

    def _place(self) -> None:
        """Where the codes of a row lie in the layout that the weight now has. No buffer: transformers makes
        those anew that no directory holds."""
        self._arch = self.rows.arch
        self._layout = packed_layout(self._arch, self.format)
        self._places = row_places(self._layout).to(self.rows.weight.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantEmbedding:
        super()._apply(fn, recurse)  # type: ignore[arg-type]
        self._place()
        return self


def check_embedded(format: GemmFormat) -> None:
    """Raise ``ValueError`` for a format whose rows are not looked up."""
    if not format.integer or format.x or format.codebook:
        raise ValueError(
            f"embeddings are to be in {format.name}; accepted: 4- or 8-bit integers with 16-bit x, such as w8a16_channel and w4a16_g64"
        )


def scale_of(floats: nn.Module) -> float | None:
    """What the embedding ``floats`` multiplies its rows with (Gemma's kinds), None: nothing. Raises ``ValueError`` for one
    that does something else."""
    scale = getattr(floats, "scalar_embed_scale", None)
    plain = type(floats) is nn.Embedding or (isinstance(floats, nn.Embedding) and isinstance(scale, int | float))
    if not plain or floats.max_norm is not None or "forward" in vars(floats):  # type: ignore[union-attr]
        raise ValueError(
            f"the embedding is a {type(floats).__name__}, which may do more than look rows up; accepted: torch.nn.Embedding without "
            "max_norm, and those of Gemma's kinds: leave embeddings as they are"
        )
    return None if scale is None else float(scale)
