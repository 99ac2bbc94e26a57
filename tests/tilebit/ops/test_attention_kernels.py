"""Finding attention kernels: compiled once for all sizes, found in packs whatever these are, or an error that says how to build one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from bad_file_cases import artifact

from tilebit import packs
from tilebit.kernels import KernelUnavailable, build, find_kernel
from tilebit.layouts.kv_formats import KVFormat
from tilebit.runtime import read_manifest
from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.target import target_from_name
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileRequest
from tilebit.tiles.compiler.kernel import Kernel

H200 = target_from_name("sm_90a")
W = AttentionWorkload("decode", 8, 1, 4096, 32, 8, 128, KVFormat.from_name("kv4_channel"))
GEMM = Workload(16, 256, 256)


def kernel(folder: Path, workload, name: str) -> Kernel:
    target = {**H200.to_json(), "features": []}
    path = artifact(folder / name, key=name, program="p", workload=workload.to_json(), target=target, schedule={}, versions={})
    return Kernel(path, read_manifest(path))


def test_packs_hold_both_operations(tmp_path):
    sizes = {"short": W, "long": replace(W, batch=1, kv_len=65536), "speculative": replace(W, q_len=8)}
    made = [kernel(tmp_path, workload, name) for name, workload in sizes.items()]
    pack = packs.export(tmp_path / "pack", [*made, kernel(tmp_path, replace(W, op="append"), "append"), kernel(tmp_path, GEMM, "gemm")])

    def found(workload) -> str | None:
        entry = packs.read(pack.path).entry_for(workload, "sm_90a")
        return None if entry is None else entry.key

    assert {name: found(workload) for name, workload in sizes.items()} == {name: name for name in sizes}
    assert found(replace(W, batch=1, kv_len=100000)) == "long", "the nearest sizes"
    assert found(replace(W, batch=13, q_len=5)) == "speculative"
    assert found(replace(W, op="append", batch=300, q_len=3)) == "append"
    assert found(GEMM) == "gemm"
    for other in (replace(W, page_size=64), replace(W, dtype="bfloat16"), replace(W, window=5), replace(W, format=KVFormat())):
        assert found(other) is None
    with pytest.raises(LookupError, match=r"no kernel for decode 32/8x128 kv4_channel .*holds .*decode 32/8x128 kv4_channel float16"):
        pack.kernel_for(replace(W, window=5))


def test_a_kernel_cannot_be_packed_for_another_question(tmp_path):
    made = kernel(tmp_path, W, "k")
    assert len(packs.export(tmp_path / "pack", {W: made, replace(W, kv_len=1 << 17): made})) == 2
    with pytest.raises(ValueError, match="one that differs in batch and q_len and kv_len only"):
        packs.export(tmp_path / "other", {replace(W, lse=True): made})


def test_without_a_compiler_the_error_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEBIT_CACHE", str(tmp_path))
    monkeypatch.setenv("TILEBIT_NO_COMPILE", "1")
    with pytest.raises(KernelUnavailable, match=r"no kernel for decode batch=8 kv_len=4096 .* float16 on sm_90a") as caught:
        find_kernel(W, H200)
    for command in ("compile", "pack PATH"):
        assert f"`{packs.command_line(command, W, 'sm_90a')}`" in str(caught.value)


def test_a_cached_kernel_serves_every_size(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEBIT_CACHE", str(tmp_path))
    monkeypatch.setenv("TILEBIT_NO_COMPILE", "1")
    from tilebit.schedules.select import select

    schedule = select(W, H200)
    request = CompileRequest(schedule.program, W, schedule, H200)
    artifact(ArtifactCache().kernels / request.key, key=request.key, workload=W.to_json(), schedule=schedule.to_json())
    near = next(w for w in (replace(W, kv_len=n) for n in (4000, 8192, 2048)) if select(w, H200) == schedule)
    (found,) = build([near], H200)
    assert found.key == request.key and found.workload == W and json.loads(json.dumps(found.manifest["schedule"])) == schedule.to_json()
