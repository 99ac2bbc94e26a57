"""The chain of a decoder's linears, small and on the CPU: it is checked before it is timed, and the checks can fail."""

from __future__ import annotations

import pytest
import torch

from results.measure import chain
from tilebit.layouts.formats import GemmFormat, QuantFormat
from tilebit.schedules.target import cpu_target

LAYER = (("up", 128, 64), ("down", 64, 96))  # the second takes m x 96 of the first one's m x 128 numbers
SYMMETRIC = QuantFormat(4, 128, True)


@pytest.mark.parametrize("format", chain.FORMATS)
def test_weights_keep_the_size_of_their_input(format: GemmFormat):
    weights = chain.make_weights((("wide", 512, 256), ("deep", 256, 512)), 3, format, "cpu")
    assert len(weights.packed) == len(weights.dense) == 6
    x = torch.randn(16, 256)
    assert 0.5 < float(chain.dense_chain(x, weights).std()) < 2  # six linears later
    for packed, dense in zip(weights.packed, weights.dense, strict=True):
        assert torch.equal(packed.unpack().dequantize(torch.float16), dense)


def test_an_input_is_the_output_s_own_memory():
    y = torch.arange(3 * 128).view(3, 128)
    x = chain.as_input(y, 96)
    assert x.shape == (3, 96) and x.is_contiguous() and x.data_ptr() == y.data_ptr()
    assert torch.equal(x.flatten(), torch.arange(3 * 96))


@pytest.mark.slow
@pytest.mark.parametrize("m", [1, 3])
def test_both_chains_are_the_same_product(m: int):
    """Several layers, in which every linear takes a part of the one before it."""
    weights = chain.make_weights(LAYER, 2, SYMMETRIC, "cpu")
    x = torch.randn(m, 64).half()
    reference = chain.dense_chain(x.float(), weights)
    torch.testing.assert_close(chain.tilebit_chain(x, weights, False).float(), reference, rtol=0, atol=0.01 * float(reference.abs().max()))


def test_rows_of_a_small_chain(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chain, "copies_needed", lambda *_: 1)  # the CPU's cache holds thousands of such layers
    rows = {row["impl"]: row for row in chain.measure_chain(cpu_target(), "cpu", 1, SYMMETRIC, LAYER)}
    assert set(rows) == {"tilebit", "tilebit_pdl", "torch"}
    for row in rows.values():
        assert row["us_p20"] <= row["us"] <= row["us_p80"] and row["rel_err"] < 2e-3 and row["m"] == 1
        assert row["chain"]["layers"] == chain.MIN_LAYERS and row["chain"]["linears"] == [[128, 64], [64, 96]]
    saved = (rows["tilebit"]["us"] - rows["tilebit_pdl"]["us"]) / len(LAYER)
    assert rows["tilebit_pdl"]["saving_us"] == pytest.approx(saved, abs=1e-3)
    assert set(rows["tilebit"]["schedule"]) == {"up", "down"} and rows["torch"]["format"] == "fp16"


def test_a_chain_that_is_wrong_is_not_timed():
    weights = chain.make_weights(LAYER, 2, SYMMETRIC, "cpu")
    x = torch.randn(2, 64).half()
    right = chain.dense_chain(x.float(), weights).half()
    chain.checked(x, weights, {"tilebit": lambda: right, "tilebit_pdl": lambda: right.clone()})

    with pytest.raises(ValueError, match="tilebit_pdl: the chain's relative error"):
        chain.checked(x, weights, {"tilebit": lambda: right, "tilebit_pdl": lambda: right * float("nan")})
    off_by_a_bit = right.clone()
    off_by_a_bit.view(torch.int16)[0, 0] += 1
    with pytest.raises(ValueError, match="dependent launch changes"):
        chain.checked(x, weights, {"tilebit": lambda: right, "tilebit_pdl": lambda: off_by_a_bit})
