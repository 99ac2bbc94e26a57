"""GPTQ: what it gains, when it is rounding to nearest, and its order of columns."""

from __future__ import annotations

import pytest
import torch
from lanes import one_of_each

from tilebit.layouts.formats import FORMATS as EVERY
from tilebit.layouts.formats import GemmFormat, QuantFormat
from tilebit.weights.gptq import DAMPING, gptq
from tilebit.weights.packed import pack
from tilebit.weights.quantize import QuantizedTensor, quantize

pytestmark = pytest.mark.usefixtures("one_thread")

FORMATS = [format for format in EVERY.values() if format.integer]


def _problem(n: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(w [n, k], x [512, k]): inputs that are correlated, channels of very different size."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(n, k, generator=generator) * 0.05
    mixing = torch.randn(k // 4 + 1, k, generator=generator)
    x = torch.randn(512, k // 4 + 1, generator=generator) @ mixing + 0.3 * torch.randn(512, k, generator=generator)
    return w, x * torch.exp(torch.randn(k, generator=generator))


def _error(q: QuantizedTensor, w: torch.Tensor, x: torch.Tensor) -> float:
    return float((x.double() @ (q.dequantize() - w).double().t()).norm())


@pytest.mark.parametrize("k", [192, 200])  # the latter has a shorter last group
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_beats_rounding_to_nearest(format: GemmFormat, k: int) -> None:
    w, x = _problem(24, k)
    nearest = _error(quantize(w, format), w, x)
    for act_order in (False, True):
        assert _error(gptq(w, x.t() @ x, format, act_order, damping=0.01), w, x) < 0.6 * nearest


@pytest.mark.parametrize("clip_search", [False, True])
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_is_rounding_to_nearest_for_uncorrelated_inputs(format: GemmFormat, clip_search: bool) -> None:
    w, _ = _problem(5, 300, seed=1)
    got, expected = gptq(w, torch.eye(300), format, act_order=False, clip_search=clip_search), quantize(w, format, clip_search)
    assert torch.equal(got.codes, expected.codes) and torch.equal(got.scales, expected.scales) and got.perm is None
    assert (got.zeros is None and expected.zeros is None) or torch.equal(got.zeros, expected.zeros)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("block", [16, 128])
def test_follows_the_paper_s_formula(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Column by column with the inverse itself, eliminated a column at a time (equations 2 and 3)."""
    monkeypatch.setattr("tilebit.weights.gptq.BLOCK", block)
    w, x = _problem(3, 40, seed=2)
    format, hessian = QuantFormat(4, -1, True), (x.t() @ x).double()
    got = gptq(w, hessian, format, act_order=False)
    damped = hessian + DAMPING * hessian.diagonal().mean() * torch.eye(40)
    inverse, left, step = torch.linalg.inv(damped), w.double().clone(), got.scales[:, 0].double()
    for j in range(40):
        code = ((left[:, j] / step).round() + 8).clamp(0, 15)
        assert torch.equal(code, got.codes[:, j].double())
        error = (left[:, j] - (code - 8) * step) / inverse[j, j]
        left -= error[:, None] * inverse[j]
        inverse -= torch.outer(inverse[:, j], inverse[j]) / inverse[j, j].clone()


@pytest.mark.parametrize("format", [EVERY[name] for name in ("w4a16_g32_asym", "w4a16_g128", "w8a16_g64_asym", "w4a8_lqq_g64")], ids=repr)
def test_act_order_sorts_columns_and_says_so(format: GemmFormat) -> None:
    w, x = _problem(7, 160, seed=3)
    hessian = x.t() @ x
    q = gptq(w, hessian, format)
    assert q.perm is not None and torch.equal(q.perm, hessian.diagonal().argsort(descending=True, stable=True))
    # The same as quantizing the sorted columns: groups are contiguous in that order.
    sorted_, order = gptq(w[:, q.perm], hessian[q.perm][:, q.perm], format, act_order=False), q.perm
    assert torch.equal(q.codes, sorted_.codes) and torch.equal(q.scales, sorted_.scales)
    assert torch.equal(q.dequantize()[:, order], sorted_.dequantize())
    assert torch.equal(pack(q, torch.float16, arch="cpu").unpack().dequantize(), q.dequantize())


@pytest.mark.parametrize("format", [EVERY[name] for name in ("w4a16_g64_asym", "w4a8_lqq_g64", "w8a8_channel")], ids=repr)
def test_few_inputs_help_with_others_too(format: GemmFormat) -> None:
    """Hardly more tokens than columns: what is made up for must hold for tokens that were not seen."""
    generator = torch.Generator().manual_seed(11)
    directions = torch.linalg.qr(torch.randn(128, 128, generator=generator))[0] * torch.arange(1.0, 129)[:, None] ** -0.6
    x, w = torch.randn(3000, 128, generator=generator) @ directions, torch.randn(24, 128, generator=generator)
    seen, others = x[:160], x[160:]
    lost = _error(gptq(w, seen.t() @ seen, format), w, others)
    assert lost < 0.8 * _error(quantize(w, format), w, others)
    assert lost < 0.95 * _error(gptq(w, seen.t() @ seen, format, damping=0.01), w, others)


def test_one_scale_a_channel_needs_no_order() -> None:
    w, x = _problem(7, 160, seed=4)
    q = gptq(w, x.t() @ x, "w4a16_channel")
    assert q.perm is None and _error(q, w, x) < 0.6 * _error(quantize(w, q.format), w, x)
    assert _error(q, w, x) != _error(gptq(w, x.t() @ x, "w4a16_channel", act_order=False), w, x)


@pytest.mark.parametrize("format", one_of_each(FORMATS, lambda format: (format.bits, format.symmetric, bool(format.x))), ids=repr)
def test_clip_search_helps_and_never_hurts_much(format: GemmFormat) -> None:
    """Where some columns are large; what remains to be made up for decides, not how large inputs are."""
    plain = searched = 0.0
    for seed in range(4):
        w, x = _problem(16, 256, seed=5 + seed)
        w[:, ::64] *= 8
        plain += _error(gptq(w, x.t() @ x, format), w, x) ** 2
        searched += _error(gptq(w, x.t() @ x, format, clip_search=True), w, x) ** 2
    assert searched < 1.03 * plain
    if format.bits == 4 and format.symmetric and format.group_size in (128, -1):
        assert searched < 0.95 * plain


@pytest.mark.parametrize("k", [576, 130, 1])
def test_a_shorter_last_group(k: int) -> None:
    w, x = _problem(4, k, seed=6)
    q = gptq(w, x.t() @ x, QuantFormat(4, 128, False), act_order=False)
    assert q.scales.shape == (4, -(-k // 128)) and q.codes.shape == (4, k)
    assert float((q.dequantize() - w).abs().max()) < 1


def test_is_the_same_each_time_and_for_any_scale_of_the_hessian() -> None:
    w, x = _problem(12, 256, seed=7)
    hessian = x.t() @ x
    first = gptq(w, hessian, "w4a16_g64_asym", clip_search=True)
    for other in (
        gptq(w, hessian, "w4a16_g64_asym", clip_search=True),
        gptq(w, hessian.double() / 1024, "w4a16_g64_asym", clip_search=True),
    ):
        assert torch.equal(first.codes, other.codes) and torch.equal(first.dequantize(), other.dequantize())
    assert hessian.equal(x.t() @ x)


@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1e-80, 1e80, 1e200, 1e300])
def test_any_scale_of_the_hessian_is_as_good(scale: float) -> None:
    w, x = _problem(12, 256, seed=7)
    hessian = (x.t() @ x).double()
    expected, q = gptq(w, hessian, "w4a16_g64_asym"), gptq(w, hessian * scale, "w4a16_g64_asym")
    assert torch.equal(q.perm, expected.perm) and float((q.codes != expected.codes).double().mean()) < 0.01  # pyright: ignore[reportArgumentType]
    assert _error(q, w, x) == pytest.approx(_error(expected, w, x), rel=0.01)


def test_much_damping_is_rounding_to_nearest() -> None:
    w, x = _problem(6, 96, seed=8)
    for damping in (1e12, 1e300):
        q = gptq(w, x.t() @ x, "w8a16_g32", act_order=False, damping=damping)
        assert torch.equal(q.dequantize(), quantize(w, q.format).dequantize())


def test_what_requires_gradients_leaves_no_graph() -> None:
    w, x = _problem(4, 64, seed=9)
    w.requires_grad_(True)
    for hessian in (x.t() @ x, (x.t() @ x).requires_grad_(True)):
        for name in ("w4a16_g32_asym", "w4a8_lqq_g64"):
            q = gptq(w, hessian, name)
            assert not any(tensor is not None and tensor.requires_grad for tensor in (q.scales, q.zeros, q.row_scales))


def test_columns_that_nothing_reached_are_rounded_to_nearest() -> None:
    w, x = _problem(6, 96, seed=8)
    dead = torch.tensor([0, 5, 50, 95])
    x[:, dead] = 0
    q = gptq(w, x.t() @ x, "w8a16_g32", act_order=False, damping=0.01)
    step = q.scales.float().repeat_interleave(32, 1)
    assert bool(((q.dequantize() - w)[:, dead].abs() <= step[:, dead] / 2 * 1.0001).all())
    assert torch.isfinite(q.dequantize()).all() and _error(q, w, x) < 0.6 * _error(quantize(w, q.format), w, x)
    nothing = gptq(w, torch.zeros(96, 96), "w4a16_g32_asym")
    assert torch.equal(nothing.dequantize(), quantize(w, nothing.format).dequantize())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype: torch.dtype) -> None:
    w, x = _problem(4, 64, seed=9)
    q = gptq(w.to(dtype), x.t() @ x, "w4a16_g32")
    assert q.scales.dtype == (torch.float16 if dtype == torch.float32 else dtype)
    assert gptq(w.to(dtype), x.t() @ x, "w4a16_g32", scale_dtype=torch.float32).scales.dtype == torch.float32


@pytest.mark.parametrize(
    "w,hessian,options,words",
    [
        (torch.ones(2, 4), torch.eye(5), {}, r"accepted for this w: floating point \[4, 4\]"),
        (torch.ones(2, 4), torch.eye(4, device="meta"), {}, "on meta"),
        (torch.ones(2, 4), torch.eye(4) * float("nan"), {}, "hessian has NaN"),
        (torch.ones(2, 4), -torch.eye(4) + 2 * torch.ones(4, 4), {}, "not positive definite"),
        (torch.full((2, 4), float("inf")), torch.eye(4), {}, "NaN or infinite values in rows"),
        (torch.ones(4), torch.eye(4), {}, "accepted: a floating point"),
        (torch.ones(2, 4), torch.eye(4), {"format": "w4a16_mxfp4"}, "accepted: formats of integers"),
        (torch.ones(2, 4), torch.eye(4), {"format": "w4a16_nvfp4"}, "accepted: formats of integers"),
        (torch.ones(2, 4), torch.eye(4), {"format": "sample.two_levels"}, "accepted: formats of integers"),
        (torch.ones(1, 131136), torch.eye(4), {"format": "w8a8_channel"}, "k is 131136; accepted for int32 sums: up to 131072"),
        (torch.ones(1, 131136), torch.eye(4), {"format": "w4a8_lqq_g64"}, "k is 131136; accepted for int32 sums: up to 131072"),
        (torch.ones(2, 4), torch.eye(4), {"damping": -1.0}, "damping is -1.0; accepted: a finite number from 0"),
        (torch.ones(2, 4), torch.eye(4), {"damping": float("inf")}, "damping is inf; accepted: a finite number from 0"),
        (torch.ones(2, 4), torch.eye(4), {"damping": float("nan")}, "damping is nan"),
        (torch.full((2, 4), 1e-12), torch.eye(4), {}, "make 0, all of them; rescale the weight"),
        (torch.ones(2, 4), torch.eye(4), {"scale_dtype": torch.float64}, "scale_dtype is torch.float64"),
        (torch.full((2, 4), 1e8), torch.eye(4), {}, "scale above 65504"),
    ],
)
def test_bad_arguments(w: torch.Tensor, hessian: torch.Tensor, options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        gptq(w, hessian, **{"format": "w4a16_g32", **options})


def test_bad_types() -> None:
    with pytest.raises(TypeError, match="hessian is list"):
        gptq(torch.ones(2, 2), [[1.0]], "w4a16_g32")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="format is int"):
        gptq(torch.ones(2, 2), torch.eye(2), 4)  # type: ignore[arg-type]
