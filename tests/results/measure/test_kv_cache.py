"""The quality study: problems have the structure that they claim, formats rank as they must, and the rows are what the program writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from results.measure import kv_cache
from results.measure.kv_cache import PROBLEMS, attended, compared, drawn, quantized
from results.report.kv_cache import accuracy_section
from results.report.rows import ROWS
from tilebit.layouts.kv_formats import KVFormat
from tilebit.tiles.attention import reference

SMALL = {"tokens": 256, "rows": 4, "heads_q": 4, "heads_kv": 2, "head_dim": 64}


def by_format(rows: list[dict]) -> dict[str, dict]:
    return {row["format"]: row for row in rows}


def test_outlier_channels_are_large_and_nearly_constant():
    plain, large, rotary = (replace(p, **SMALL) for p in PROBLEMS)
    for problem, expected in ((plain, 0), (large, 4)):
        _, k, v = drawn(problem, 0)
        means = k.mean(0).abs()
        assert (means > 8).sum(1).tolist() == [expected] * 2 and float(v.mean(0).abs().max()) < 1
        loud = k[:, means > 8]
        assert not expected or float((loud.std(0) / loud.mean(0).abs()).max()) < 0.3
    _, turned, _ = drawn(rotary, 0)
    _, still, _ = drawn(large, 0)
    assert not torch.equal(turned, still)
    half = 32  # a rotation keeps the length of every pair
    for k in (turned, still):
        pairs = torch.stack((k[..., :half], k[..., half:])).norm(dim=0)
        lengths = pairs if k is turned else None
        assert lengths is None or torch.allclose(lengths, torch.stack((still[..., :half], still[..., half:])).norm(dim=0), rtol=5e-3)


def test_attention_is_the_reference_s():
    q, k, v = drawn(replace(PROBLEMS[1], **SMALL), 1)
    last = q[-1:]  # the only row of the reference that sees every token
    assert torch.allclose(attended(last, k, v)[0], reference.attend(last, k, v)[0])


def test_a_cache_of_16_bits_loses_nothing():
    _, k, v = drawn(replace(PROBLEMS[1], **SMALL), 0)
    assert all(torch.equal(a, b) for a, b in zip(quantized(k, v, KVFormat()), (k, v), strict=True))


def test_formats_rank_as_they_must():
    """More bits are better, and outlier channels cost scales per token dearly and scales per channel nothing."""
    plain, large = (by_format(compared(replace(p, **SMALL), 0)) for p in PROBLEMS[:2])
    for rows in (plain, large):
        for fine, coarse in (("kv8_channel", "kv4_channel"), ("kv4_channel", "kv2_channel"), ("kv8_token", "kv4_token")):
            assert rows[fine]["rel_err"] < rows[coarse]["rel_err"] / 2 and rows[fine]["one_minus_cosine"] < rows[coarse]["one_minus_cosine"]
            assert rows[fine]["top1"] >= rows[coarse]["top1"]
    assert large["kv4_token"]["rel_err"] > 2 * plain["kv4_token"]["rel_err"]
    assert large["kv4_channel"]["rel_err"] < 1.5 * plain["kv4_channel"]["rel_err"]
    assert large["kv4_channel"]["token_bytes"] == 64 + 4 * 64 // 128 + 4  # codes, and the keys' and values' parameters


def test_the_rows_are_what_the_program_writes():
    """One problem again, with a few formats: the shipped rows are not of another program."""
    shipped = [json.loads(line) for line in (ROWS / "kv_cache" / "cpu.jsonl").read_text().splitlines()]
    assert len(shipped) == len(PROBLEMS) * len(kv_cache.SEEDS) * len(kv_cache.FORMATS)
    again = compared(PROBLEMS[2], 3, ["kv4_channel"])[0]
    (row,) = (r for r in shipped if (r["problem"], r["seed"], r["format"]) == (PROBLEMS[2].name, 3, "kv4_channel"))
    assert again.keys() == row.keys()
    for name, value in row.items():
        assert again[name] == (pytest.approx(value, rel=0.02) if isinstance(value, float) else value), name


def test_the_section_shows_means_over_seeds(tmp_path: Path):
    assert accuracy_section(tmp_path) == ""
    base = {"problem": "some outliers", "format": "kv4_channel", "token_bytes": 136, "head_dim": 128, "largest_weight": 0.25, "top1": 0.9}
    rows = [{**base, "seed": s, "rel_err": e, "rel_err_worst": 2 * e, "one_minus_cosine": e / 10} for s, e in ((0, 0.1), (1, 0.2))]
    file = tmp_path / "kv_cache.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = accuracy_section(tmp_path)
    assert "| kv4_channel | 136 | 15.00% (40.0%) | 0.98500 | 90.0% |" in section and "**some outliers** (2 seeds" in section
    file.write_text('{"problem": "x"}\n')
    with pytest.raises(ValueError, match="line 1: format, seed"):
        accuracy_section(tmp_path)


def test_the_command_writes_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kv_cache, "PROBLEMS", (replace(PROBLEMS[0], **SMALL),))
    monkeypatch.setattr(kv_cache, "SEEDS", (0,))
    kv_cache.main(["--out", str(tmp_path / "rows.jsonl")])
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["format"] for row in rows] == list(kv_cache.FORMATS) and rows[0]["kv_len"] == 256
