"""The attention plug-in, driven as the peer harness drives it, with kernels that are their definitions."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from defined_kernels import CHOSEN, DefinedKernels
from torch import Tensor

from results.peers import attention_plugin
from results.peers.import_attention import KIND, PROCESS
from tilebit.kernels import KernelUnavailable
from tilebit.layouts.kv import KVLayout
from tilebit.layouts.kv_formats import KVFormat
from tilebit.ops import plans
from tilebit.schedules.attention import rules as rules
from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.operations import candidates
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name
from tilebit.tiles.attention import reference

D = attention_plugin.HEAD_DIM


class Case:
    """The harness's case, on the CPU and small."""

    def __init__(self, batch: int = 2, length: int = 300, heads_q: int = 4, heads_kv: int = 2, rows: int = 1) -> None:
        self.B, self.L, self.Hq, self.Hk, self.R = batch, length, heads_q, heads_kv, rows
        self.op = "decode" if rows == 1 else "prefill"
        self.q = torch.randn(batch, rows, heads_q, D).half()
        self.k, self.v = (torch.randn(batch, length, heads_kv, D).half() for _ in range(2))
        self.rows = torch.cat([torch.arange(64), torch.arange(rows - 64, rows)]) if rows > 1 else None
        self.c: dict[str, Tensor] = {}
        self.asked: list[str] = []

    def ref(self, key: str, q: Tensor | None = None, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        if key not in self.c:
            self.asked.append(key)
            keys, values = self.k if k is None else k, self.v if v is None else v
            found = [reference.attend(*sequence)[0].float() for sequence in zip(self.q, keys, values, strict=True)]
            self.c[key] = torch.stack(found) if self.rows is None else torch.stack(found)[:, self.rows]
        return self.c[key]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> DefinedKernels:
    """Stand-in kernels behind the ops and the plug-in, and what the plug-in uses of the harness: two rotating copies."""
    made = DefinedKernels()

    def find(workload: AttentionWorkload, target: Any) -> Any:
        kernel = made.find(workload, target)
        kernel.manifest, kernel.run_dependent = {"schedule": CHOSEN}, None
        return kernel

    monkeypatch.setattr(plans, "find_kernel", find)
    monkeypatch.setattr(attention_plugin, "find_kernel", find)
    monkeypatch.setattr(plans, "held", {})
    copies = types.SimpleNamespace(kvcopies=lambda *tensors: [tensors, tuple(t.clone() for t in tensors)])
    monkeypatch.setitem(sys.modules, "attn_peers", copies)
    return made


def relative_error(out: Tensor, expected: Tensor) -> float:
    return float((out.float() - expected).norm() / expected.norm())


def by_name() -> dict[str, Any]:
    return {peer.name: peer for peer in attention_plugin.peers()}


@pytest.mark.parametrize("name", list(attention_plugin.DECODE))
def test_a_decode_peer_runs_as_the_harness_runs_it(kernels: DefinedKernels, name: str):
    case, peer = Case(), by_name()[name]
    assert peer.kind == "attn" and peer.supports(case) is True and peer.supports(Case(1, 128, rows=128)) == "decode only"
    before = dict(vars(peer))
    peer.prepare(case)
    assert kernels.calls == ["append"]
    calls, out, expected, kv_bytes, note = peer.run(case)
    assert len(calls) == 2
    for call in calls:
        out().fill_(float("nan"))
        call()
        assert out().shape == (2, 1, 4, D) and relative_error(out(), expected) < 1e-3
    # What the cache stands for, not what it was made of.
    lossy = relative_error(expected, case.ref("f16"))
    bits = peer.format.key_bits
    assert lossy < 1e-6 if bits == 16 else {2: 0.1, 4: 0.02, 8: 1e-3}[bits] < lossy < {2: 1.0, 4: 0.3, 8: 0.1}[bits]
    page_words = KVLayout(peer.format, D, 128).page_words
    assert kv_bytes == 2 * 2 * (2 * page_words * 4 + 44 * 4 * D)  # 256 packed tokens of 2 sequences and 2 heads, and 44 in the window
    said = json.loads(note)
    assert (said["impl"], said["format"], said["page_size"]) == ("tilebit", peer.format.name, peer.page_size or 128)
    assert said["schedule"] == CHOSEN and set(KIND) | set(PROCESS) == set(said)
    vars(peer).clear()  # the harness drops what a case left behind
    vars(peer).update(before)
    assert not hasattr(peer, "operands")


def test_pages_of_a_paged_peer_lie_in_random_order(kernels: DefinedKernels):
    case = Case(1, 256)
    tables = {}
    for name in ("tilebit_kv4_channel", "tilebit_kv4_channel_page64", "tilebit_kv4_channel_page16"):
        peer = by_name()[name]
        peer.prepare(case)
        tables[name] = peer.operands["block_tables"][0].tolist()
        peer.run(case)
    contiguous, page64, page16 = tables.values()
    assert contiguous == [0, 1] and sorted(page64) == [0, 1, 2, 3] != page64 and sorted(page16) == list(range(16)) != page16
    assert case.asked == ["tilebit kv4_channel"]  # one reference for all


def test_the_reference_sees_a_wrong_cache(kernels: DefinedKernels):
    case, peer = Case(1, 256), by_name()["tilebit_kv4_channel"]
    peer.prepare(case)
    peer.copies[1].bitwise_xor_(0x11111111)
    calls, out, expected, _, _ = peer.run(case)
    calls[1]()
    assert relative_error(out(), expected) > peer.tol


@pytest.mark.parametrize(
    ("name", "length", "calls"),
    [
        ("tilebit_prefill16", 200, 1),
        ("tilebit_prefill_kv4", 300, 3),
        ("tilebit_prefill_kv4_128", 384, 5),
        ("tilebit_prefill_kv4_128", 300, 5),
    ],
)
def test_a_prefill_peer_computes_the_harness_s_rows(kernels: DefinedKernels, name: str, length: int, calls: int):
    """Halves of 300 rows are 256 and 44; three chunks are one prefill, and twice a gather and a prefill."""
    case = Case(1, length, rows=length)
    peer = by_name().get(name) or attention_plugin.PrefillPeer(name, "kv4_channel", 128)
    assert peer.supports(case) is True and isinstance(peer.supports(Case()), str)
    peer.prepare(case)
    kernels.calls.clear()
    found, out, expected, kv_bytes, note = peer.run(case) if length != 300 or calls == 3 else _with_rows(peer, case)
    assert len(found) == 2 and kv_bytes == 2 * 2 * length * 2 * D
    for call in found:
        kernels.calls.clear()
        out().fill_(float("nan"))
        call()
        assert len(kernels.calls) == calls and out().shape == case.q.shape
        assert relative_error(out()[:, case.rows], expected) < 1e-3
    whole = case.ref("f16")
    assert torch.equal(expected[:, :64], whole[:, :64])
    assert (relative_error(expected[:, 64:], whole[:, 64:]) > 0.02) == (calls > 1)  # the last rows attend to a 4-bit history
    assert json.loads(note)["q_len"] == length and set(json.loads(note)) == set(KIND) | set(PROCESS)


def _with_rows(peer: Any, case: Case) -> Any:
    """A case whose checked rows reach into a middle chunk is refused; the rows that are left can be checked."""
    with pytest.raises(ValueError, match="middle chunk"):
        peer.run(case)
    case.rows = torch.cat([torch.arange(64), torch.arange(256, 300)])
    case.c.clear()
    return peer.run(case)


def test_a_prompt_without_history_is_left_out():
    assert "no history" in str(by_name()["tilebit_prefill_kv4_2048"].supports(Case(1, 256, rows=256)))


def test_dependent_peers_use_the_dependent_entry(kernels: DefinedKernels, monkeypatch: pytest.MonkeyPatch):
    case, peer = Case(1, 128), by_name()["tilebit_kv8_channel_dependent"]
    peer.prepare(case)
    with pytest.raises(KernelUnavailable, match="no dependent launch"):
        peer.run(case)
    used: list[int] = []
    find = attention_plugin.find_kernel

    def able(workload: AttentionWorkload, target: Any) -> Any:
        kernel: Any = find(workload, target)
        kernel.run_dependent = lambda *tensors: used.append(len(tensors))
        return kernel

    monkeypatch.setattr(attention_plugin, "find_kernel", able)
    calls, _, _, _, note = peer.run(case)
    calls[0]()
    assert used == [7] and json.loads(note)["impl"] == "tilebit_pdl"  # q, the five tensors of a cache, out


def test_names_and_selection(monkeypatch: pytest.MonkeyPatch):
    names = list(by_name())
    assert len(names) == 2 * len(attention_plugin.DECODE) + len(attention_plugin.PREFILL) == 21
    assert {"tilebit_kv16", "tilebit_kvfp8_dependent", "tilebit_kv4_channel_page64", "tilebit_prefill_kv4"} <= set(names)
    monkeypatch.setenv("TILEBIT_PEERS", "*_token, tilebit_prefill16")
    assert list(by_name()) == ["tilebit_kv4_token", "tilebit_prefill16"]


def test_what_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Everything that the peers will ask for, in one pool; a given schedule where none was tuned."""
    built, given = [], []
    monkeypatch.setenv("TILEBIT_PEERS", "tilebit_kv4_*, tilebit_prefill*")
    monkeypatch.setattr(attention_plugin, "build", lambda wanted, target, jobs: built.extend(wanted))
    monkeypatch.setattr(attention_plugin, "compiled", lambda wanted, target, jobs: given.extend(wanted))
    arguments = ["--compile", "8x8192,128x1024", "32/8,64/8", "--prefill", "8192", "--target", "sm_90a"]
    assert attention_plugin.main(arguments) == 0
    assert not given and len(set(built)) == len(built)
    assert {w.op for w in built} == {"decode", "append", "gather", "prefill"}
    decode = [w for w in built if w.op == "decode"]
    assert len(decode) == 4 * 2 * 2  # kv4 by channel in three page sizes and by token, two cases, two kinds of heads
    assert AttentionWorkload("decode", 8, 1, 8192, 64, 8, D, KVFormat.from_name("kv4_token")) in decode
    target = target_from_name("sm_90a")
    schedule = (candidates(decode[0], target) or [])[-1]
    file = tmp_path / "given.json"
    file.write_text(json.dumps({"kv4_token": schedule.to_json()}))
    monkeypatch.setenv("TILEBIT_SCHEDULES", str(file))
    monkeypatch.setattr(attention_plugin, "choose", lambda *_: types.SimpleNamespace(source="model"))
    assert attention_plugin.main(arguments) == 0
    assert len(given) == 4 and {(w.format.name, s) for w, s in given} == {("kv4_token", schedule)}

    def fails(*_: Any, **__: Any) -> None:
        raise KernelUnavailable("no compiler here")

    monkeypatch.setattr(attention_plugin, "build", fails)
    assert attention_plugin.main(["--compile", "none", "32/8", "--target", "sm_90a"]) == 1
    assert "no compiler here" in capsys.readouterr().err


def test_what_is_compiled_ahead_is_what_is_asked_for(kernels: DefinedKernels, monkeypatch: pytest.MonkeyPatch):
    """The workloads that the ops look kernels up by are among those that were compiled."""
    monkeypatch.setenv("TILEBIT_PEERS", "tilebit_kv4_channel, *_page16, tilebit_kvfp8, tilebit_prefill16, tilebit_prefill_kv4")
    case, prompt = Case(2, 384), Case(1, 384, rows=384)
    for peer in attention_plugin.peers():
        for c in (case, prompt):
            if peer.supports(c) is True:
                peer.prepare(c)
                for call in peer.run(c)[0]:
                    call()
    ahead = set(attention_plugin.workloads([(2, 384)], [(4, 2)], [384]))
    assert {w.bucketed() for w in kernels.asked} <= ahead


def test_a_tuned_schedule_wins_over_a_given_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    target = target_from_name("sm_90a")
    workload = attention_plugin.decode_workload(8, 8192, 32, 8, KVFormat.from_name("kv4_channel"), 128)
    schedule = Schedule("attention_decode_bulk", 64, 8, D, 4, 8)
    (tmp_path / "given.json").write_text(json.dumps({"kv4_channel": schedule.to_json()}))
    assert attention_plugin.given_schedule(workload, target) is None
    monkeypatch.setenv("TILEBIT_SCHEDULES", str(tmp_path / "given.json"))
    for source, expected in (("model", schedule), ("tuned", None)):
        monkeypatch.setattr(attention_plugin, "choose", lambda *_, source=source: types.SimpleNamespace(source=source))
        assert attention_plugin.given_schedule(workload, target) == expected


def test_the_harness_can_load_it_by_path():
    """The harness executes the file alone, without its folder as a package."""
    path = Path(attention_plugin.__file__)
    spec = importlib.util.spec_from_file_location("peers_plugin_attention_plugin", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # as the harness does: sys.modules does not hold it
    assert len(module.peers()) == 21
