"""Functions that are replayed on a GPU give what they give when they run."""

from __future__ import annotations

import pytest
import torch

from tilebit.layouts.formats import FORMATS
from tilebit.weights.gptq import gptq, gptq_mixed
from tilebit.weights.replayed import Replayed


def test_arguments_of_every_call_count(device: torch.device) -> None:
    """Of the first, of the captured one, of replays, and of other shapes between; arguments may be written to."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x[0] += 1
        return x @ y, y.amax(0)

    replayed, generator = Replayed(function), torch.Generator().manual_seed(0)
    for n in (3, 3, 5, 3, 3):
        x, y = (torch.randint(-9, 9, (n, n), generator=generator).float().to(device) for _ in range(2))
        expected = [found.clone() for found in function(x.clone(), y.clone())]
        assert all(map(torch.equal, replayed(x.clone(), y.t().contiguous().t()), expected))
    assert (replayed._graph is not None) == (device.type == "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("clip_search", [False, True])
@pytest.mark.parametrize("name", [name for name, format in FORMATS.items() if format.integer])
def test_gptq_is_what_it_is_without_replays(name: str, clip_search: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    w, x = (torch.randn(n, 616, generator=generator).cuda() for n in (40, 900))  # a last group that is shorter
    hessian = x.t() @ x
    got = gptq(w, hessian, name, clip_search=clip_search)
    mixed = gptq_mixed(w, hessian, torch.arange(5), name, "w8a16_g128", clip_search=clip_search) if name == "w4a16_g128" else None
    monkeypatch.setattr(Replayed, "__call__", lambda replayed, *given: replayed._function(*given))
    expected = gptq(w, hessian, name, clip_search=clip_search)
    for field in ("codes", "scales", "zeros", "perm", "row_scales"):
        a, b = getattr(got, field), getattr(expected, field)
        assert (a is None and b is None) or torch.equal(a, b), field  # pyright: ignore[reportArgumentType]
    if mixed is not None:
        again = gptq_mixed(w, hessian, torch.arange(5), name, "w8a16_g128", clip_search=clip_search)
        assert torch.equal(mixed.dequantize(), again.dequantize())
