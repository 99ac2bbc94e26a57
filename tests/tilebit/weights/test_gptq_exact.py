"""GPTQ against formulas that share nothing with it: each code by trying all of them, with the best real numbers behind it, and the
error of whole layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tilebit.layouts.formats import FORMATS as EVERY
from tilebit.layouts.formats import GemmFormat
from tilebit.weights import gptq as module
from tilebit.weights.gptq import DAMPING, gptq
from tilebit.weights.packed import pack
from tilebit.weights.quantize import QuantizedTensor, quantize

pytestmark = pytest.mark.usefixtures("one_thread")

FORMATS = [format for format in EVERY.values() if format.integer]
INT8 = [format for format in FORMATS if format.x]
LQQ = [format for format in INT8 if format.offset]


def _problem(n: int, k: int, seed: int, tokens: int = 300) -> tuple[Tensor, Tensor]:
    """(w [n, k], hessian fp64 [k, k]) of correlated inputs of very different size."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, k // 3 + 1, generator=generator) @ torch.randn(k // 3 + 1, k, generator=generator)
    x = (x + 0.3 * torch.randn(tokens, k, generator=generator)) * torch.exp(torch.randn(k, generator=generator))
    return torch.randn(n, k, generator=generator) * torch.exp(torch.randn(n, 1, generator=generator)), (x.t() @ x).double()


def _numbers(q: QuantizedTensor) -> Tensor:
    """fp64 [n, k, codes]: what each code would stand for, column by column of the codes, from the format's definition."""
    group = torch.arange(q.k) // (q.k if q.format.group_size == -1 else q.format.group_size)
    scale, codes = q.scales.double()[:, group, None], torch.arange(1 << q.format.bits, dtype=torch.float64)
    if q.format.offset:
        assert q.zeros is not None and q.row_scales is not None
        return (codes * scale + q.zeros.double()[:, group, None] - 128) * q.row_scales.double()[:, None, None]
    zero = torch.full_like(scale, 1 << (q.format.bits - 1)) if q.zeros is None else q.zeros.double()[:, group, None]
    return (codes - zero) * scale


def _wrong_codes(q: QuantizedTensor, w: Tensor, hessian: Tensor) -> int:
    """How many codes of ``q``, whose columns lie in the order of ``w``, are not the best ones: with the codes of the columns before
    them as they are, and the columns behind them any real numbers, some other code leaves less of (w - w') H (w - w')^T."""
    h = hessian + DAMPING * hessian.diagonal().mean() * torch.eye(q.k, dtype=torch.float64)
    numbers = _numbers(q)
    chosen = numbers.gather(-1, q.codes.long()[..., None])[..., 0]
    wrong = 0
    for j in range(q.k):
        # the columns up to j, with those behind them minimized away
        inner = h[: j + 1, : j + 1] - h[: j + 1, j + 1 :] @ torch.linalg.solve(h[j + 1 :, j + 1 :], h[j + 1 :, : j + 1])
        before = (w[:, :j].double() - chosen[:, :j])[:, None, :].expand(-1, numbers.shape[-1], -1)
        errors = torch.cat((before, w[:, j, None, None].double() - numbers[:, j, :, None]), -1)
        left = torch.einsum("nci,ij,ncj->nc", errors, inner, errors)
        own = left.gather(-1, q.codes[:, j, None].long())[:, 0]
        wrong += int((own > left.amin(-1) * (1 + 1e-4)).sum())
    return wrong


def _left(q: QuantizedTensor, w: Tensor, hessian: Tensor) -> float:
    error = q.dequantize().double() - w
    return float(((error @ hessian) * error).sum())


@pytest.mark.parametrize("clip_search", [False, True])
@pytest.mark.parametrize("format", [*INT8, EVERY["w4a16_g32_asym"], EVERY["w8a16_g64"]], ids=repr)
def test_every_code_is_the_best_there_is(format: GemmFormat, clip_search: bool) -> None:
    for seed in range(3):
        w, hessian = _problem(4, 70, seed)
        assert _wrong_codes(gptq(w, hessian, format, act_order=False, clip_search=clip_search), w, hessian) == 0


@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_never_worse_than_rounding(format: GemmFormat) -> None:
    """In the norm that the Hessian defines, for any inputs, also few."""
    for seed in range(6):
        w, hessian = _problem(8, 150, seed, tokens=(40, 300)[seed % 2])
        nearest = _left(quantize(w, format), w, hessian)
        for act_order in (False, True):
            q = gptq(w, hessian, format, act_order)
            assert _left(q, w, hessian) < nearest
            if format.offset:
                assert q.zeros is not None and q.scales.dtype == torch.uint8 and int(q.scales.min()) >= 1
                assert int((q.scales.int() * 15 + q.zeros).max()) <= 255


@pytest.mark.parametrize("format", LQQ, ids=repr)
def test_rows_far_apart_and_strong_compensation_stay_in_bytes(format: GemmFormat) -> None:
    """Few tokens, hardly any damping: columns take up more than the largest weight of their row."""
    w, hessian = _problem(6, 200, 0, tokens=12)
    w = w.clamp(-0.3, 0.3)
    w[0], w[1], w[2] = 0, w[1] * 1e-6, w[2] * 1e4
    seen: list[float] = []
    searched = module.search_groups

    def search(block: Tensor, *args: object, **options: object) -> tuple[Tensor, Tensor, Tensor]:
        seen.append(float(block.abs().max()))
        return searched(block, *args, **options)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "search_groups", search)
        q = gptq(w, hessian, format, act_order=False, damping=1e-6)
    assert max(seen) > 121  # so the case is met
    assert q.zeros is not None and int((q.scales.int() * 15 + q.zeros).max()) <= 255 and int(q.zeros.min()) >= 2
    assert not q.dequantize()[0].any()
    assert torch.equal(q.row_scales, quantize(w, format).row_scales)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("arch", ["cpu", "sm_90a"])
@pytest.mark.parametrize("format", INT8, ids=repr)
def test_what_it_gives_is_packed_and_kept(format: GemmFormat, arch: str) -> None:
    w, hessian = _problem(70, 160, 1)
    q = gptq(w, hessian, format)
    back = pack(q, torch.float16, arch=arch).unpack()
    assert torch.equal(back.codes, q.codes) and torch.equal(back.dequantize(), q.dequantize())
    assert (q.perm is None) == (format.group_size == -1)


def _rotated(codes: Tensor) -> Tensor:
    return codes.roll(1, 1)


PLANTED = {
    "the scales of the group beside it": lambda q: {"scales": _rotated(q.scales)},
    "the offsets of the group beside it": lambda q: {"zeros": _rotated(q.zeros)},
    "the scale of the row beside it": lambda q: {"row_scales": q.row_scales.roll(1)},
    "the codes of the column beside it": lambda q: {"codes": _rotated(q.codes)},
    "codes one too small": lambda q: {"codes": (q.codes.int() - 1).clamp(min=0).byte()},
}


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("format", LQQ, ids=repr)
def test_planted_mistakes_are_seen(format: GemmFormat, name: str) -> None:
    """Of the result."""
    w, hessian = _problem(4, 140, 0)
    q = gptq(w, hessian, format, act_order=False)
    try:
        wrong = QuantizedTensor(**{**{f: getattr(q, f) for f in ("codes", "scales", "zeros", "row_scales", "format")}, **PLANTED[name](q)})
    except ValueError as error:
        assert "make bytes up to" in str(error)
        return
    assert _wrong_codes(wrong, w, hessian) > 0


@pytest.mark.parametrize("format", [*LQQ, EVERY["w8a8_channel"]], ids=repr)
def test_planted_mistakes_of_the_way_there_are_seen(format: GemmFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    w, hessian = _problem(4, 140, 0)
    nearest = module.nearest_codes
    mistakes = {
        "nearest_codes": lambda values, step, zero, format: (nearest(values, step, zero, format) - 1).clamp_(min=0),
        "_inverse_factor": lambda h, *_: torch.linalg.cholesky(torch.linalg.inv(h + torch.eye(len(h))), upper=True).float(),
    }
    for name in ("nearest_codes", "_inverse_factor"):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, mistakes[name])
            assert _wrong_codes(gptq(w, hessian, format, act_order=False), w, hessian) > 0, name
    assert _wrong_codes(gptq(w, hessian, format, act_order=False, damping=1.0), w, hessian) > 0
