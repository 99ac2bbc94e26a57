"""Compile requests: what their key depends on, and every CUDA program on every architecture, compiled without a GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))
from sample import faulty

from tilebit.layouts.formats import QuantFormat
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import programs
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import cpu_target, target_from_name
from tilebit.tiles import programs as lookup
from tilebit.tiles.compiler import cuda, request
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileFailure, CompileRequest, compile_request
from tilebit.tiles.program import DEVICE_DIR

HOPPER = target_from_name("sm_90a")
BASE = CompileRequest("gemm_wgmma", Workload(64, 256, 512), Schedule("gemm_wgmma", 128, 64, 128, 4, 8), HOPPER)


def test_the_key_ignores_m_and_how_it_is_launched_and_nothing_else() -> None:
    assert replace(BASE, workload=replace(BASE.workload, m=1)).key == BASE.key
    assert replace(BASE, workload=replace(BASE.workload, dependent=True)).key == BASE.key
    others = [
        replace(BASE, workload=Workload(64, 320, 512)),
        replace(BASE, workload=Workload(64, 256, 640)),
        replace(BASE, workload=replace(BASE.workload, dtype="bfloat16")),
        replace(BASE, workload=replace(BASE.workload, bias=True)),
        replace(BASE, workload=replace(BASE.workload, format=QuantFormat(symmetric=False))),
        replace(BASE, workload=replace(BASE.workload, format=QuantFormat(bits=8))),
        replace(BASE, workload=replace(BASE.workload, format=QuantFormat(group_size=64))),
        *(
            replace(BASE, schedule=replace(BASE.schedule, **{f: v}))
            for f, v in (("block_n", 64), ("block_m", 32), ("block_k", 64), ("num_stages", 3))
        ),
        *(
            replace(BASE, schedule=replace(BASE.schedule, **{f: v}))
            for f, v in (("num_warps", 4), ("split_k", 2), ("min_blocks", 2), ("raster", 4), ("stream_k", True), ("cluster", 2))
        ),
        replace(BASE, target=target_from_name("sm_80")),
        replace(BASE, program="gemm_mma"),
    ]
    keys = [BASE.key, *(other.key for other in others)]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 64 for key in keys)


def test_the_key_depends_on_the_processor_features() -> None:
    schedule = Schedule("gemm_cpu", 32, 1, 32)
    wide, narrow = (replace(cpu_target(), features=f) for f in (("avx512", "avx2"), ("avx2",)))
    assert CompileRequest("gemm_cpu", BASE.workload, schedule, wide).key != CompileRequest("gemm_cpu", BASE.workload, schedule, narrow).key


def test_the_key_depends_on_sources_and_versions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    key = BASE.key
    with monkeypatch.context() as patch:
        patch.setattr(request, "compiler_versions", lambda compiler: {"tilelang": "0.1.15", "apache-tvm-ffi": "0.1.12", "nvcc": "99.9"})
        assert BASE.key != key
    edited = tmp_path / "dequant.cuh"
    edited.write_text("// edited\n")
    originals = lookup.program_sources("gemm_wgmma")
    with monkeypatch.context() as patch:
        patch.setattr(request, "program_sources", lambda name: tuple(edited if p.name == edited.name else p for p in originals))
        request._sources_digest.cache_clear()
        assert BASE.key != key
    request._sources_digest.cache_clear()
    assert BASE.key == key


def test_sources_include_what_a_program_is_made_of() -> None:
    names = {"/".join(path.parts[-3:]) for path in lookup.program_sources("gemm_wgmma")}
    ends = ("tiles/gemm/wgmma.py", "device/codecs/dequant.cuh", "tiles/program.py", "layouts/formats.py", "schedules/schedule.py")
    assert all(any(name.endswith(end) for name in names) for end in ends), names


def test_a_programs_headers_are_among_its_sources() -> None:
    for name in programs():
        sources = {path.relative_to(DEVICE_DIR).as_posix() for path in lookup.program_sources(name) if path.is_relative_to(DEVICE_DIR)}
        assert sources == set(lookup.program(name).headers)
        assert "codecs/raw.cuh" not in sources or name.startswith("gemm_stream")


def test_unknown_programs_are_named() -> None:
    with pytest.raises(ValueError, match=f"unknown tile program 'gemm_tpu'; accepted: {', '.join(sorted(programs()))}, or a module"):
        lookup.program("gemm_tpu")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (replace(BASE, target=target_from_name("sm_80")), "gemm_wgmma does not run on sm_80; accepted: sm_90a"),
        (replace(BASE, program="gemm_mma"), "the schedule is for 'gemm_wgmma', the request for 'gemm_mma'"),
        (replace(BASE, schedule=replace(BASE.schedule, block_n=100)), "block_n"),
    ],
)
def test_illegal_requests_import_no_compiler(tmp_path: Path, changed: CompileRequest, words: str) -> None:
    with pytest.raises(CompileFailure, match=words) as caught:
        compile_request(changed, ArtifactCache(tmp_path / "cache"))
    assert caught.value.kind == "illegal"
    assert "tilelang" not in sys.modules


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path / "cache")
    failing = CompileRequest("sample.faulty", Workload(1, faulty.RAISE, 64), Schedule("sample.faulty", 32, 1, 32), cpu_target())
    with pytest.raises(CompileFailure, match="RuntimeError: cannot build"):
        compile_request(failing, cache)
    assert cache.keys() == [] and not list(cache.building.iterdir())


def test_missing_nvcc_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, str(tmp_path / "nowhere"))
    monkeypatch.setattr(cuda.shutil, "which", lambda *_: None)
    with pytest.raises(cuda.NvccError, match="pip install nvidia-cuda-nvcc"):
        cuda.find_nvcc()
    request.compiler_versions.cache_clear()
    assert request.compiler_versions("tilelang")["nvcc"] is None
    request.compiler_versions.cache_clear()


def test_nvcc_is_looked_for_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder in ("toolkit/bin", "path"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "nvcc").write_text("#!/bin/sh\n")
        (tmp_path / folder / "nvcc").chmod(0o755)
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert cuda.find_nvcc() == str(tmp_path / "path/nvcc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert cuda.find_nvcc() == str(tmp_path / "toolkit/bin/nvcc")
    monkeypatch.setenv("CUDACXX", str(tmp_path / "path/nvcc"))
    assert cuda.find_nvcc() == str(tmp_path / "path/nvcc")
