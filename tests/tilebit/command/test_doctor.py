"""The doctor sees what is missing and says how to get it."""

from __future__ import annotations

import importlib.metadata

import pytest

from tilebit.command import doctor


def finding(diagnosis: doctor.Diagnosis, name: str) -> doctor.Finding:
    return next(f for f in diagnosis.findings if f.name == name)


def with_versions(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Pretend that distributions (underscores for dashes) have these versions; None: not installed."""
    real = importlib.metadata.version

    def version(name: str) -> str:
        wanted = versions.get(name.replace("-", "_"), real)
        if wanted is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return wanted if isinstance(wanted, str) else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_findings_are_complete_and_each_problem_has_advice():
    diagnosis = doctor.diagnose()
    assert len({f.name for f in diagnosis.findings}) == len(diagnosis.findings)
    for f in diagnosis.findings:
        assert f.status in (doctor.OK, doctor.WARNING, doctor.MISSING) and f.found
        assert bool(f.do) == (f.status != doctor.OK), f
    assert diagnosis.to_json()["healthy"] == diagnosis.healthy


@pytest.mark.parametrize(
    ("name", "tasks"),
    [
        ("apache-tvm", ["compile for CPUs"]),
        ("tilelang", ["cross-compile for NVIDIA GPUs"]),
        ("apache-tvm-ffi", ["run kernels", "compile for CPUs", "cross-compile for NVIDIA GPUs", "compile for this machine"]),
        ("matplotlib", []),
    ],
)
def test_a_missing_package_is_named_with_how_to_install_it(monkeypatch, name, tasks):
    before = doctor.diagnose().abilities
    with_versions(monkeypatch, **{name.replace("-", "_"): None})
    diagnosis = doctor.diagnose()
    f = finding(diagnosis, name)
    assert f.status != doctor.OK and f.found == "not installed" and "pip install" in f.do
    assert all(not diagnosis.abilities[task] for task in tasks)
    assert all(diagnosis.abilities[t] == before[t] for t in before if not tasks), "an optional package takes no ability"


def test_a_version_that_is_not_the_pin_is_named(monkeypatch):
    with_versions(monkeypatch, apache_tvm_ffi="0.1.15", torch="2.1.0")
    diagnosis = doctor.diagnose()
    ffi, torch = finding(diagnosis, "apache-tvm-ffi"), finding(diagnosis, "torch")
    assert ffi.status == doctor.WARNING and "0.1.12" in ffi.do and ffi.found == "0.1.15"
    assert torch.status == doctor.MISSING and "2.11" in torch.do


def test_a_missing_nvcc_and_c_compiler(monkeypatch, tmp_path):
    from tilebit.tiles.compiler import cuda, host_stub

    def no_nvcc() -> str:
        raise cuda.NvccError("nvcc was not found; install a CUDA toolkit")

    def no_compiler() -> str:
        raise host_stub.StubError("no C compiler was found; install gcc")

    monkeypatch.setattr(cuda, "find_nvcc", no_nvcc)
    monkeypatch.setattr(cuda, "nvcc_version", no_nvcc)
    monkeypatch.setattr(host_stub, "c_compiler", no_compiler)
    diagnosis = doctor.diagnose()
    assert finding(diagnosis, "nvcc").status == finding(diagnosis, "C compiler").status == doctor.MISSING
    assert "gcc" in finding(diagnosis, "C compiler").do
    assert diagnosis.abilities["run kernels"] and not diagnosis.abilities["compile for CPUs"] and not diagnosis.healthy


def test_a_cache_that_cannot_be_used(monkeypatch, tmp_path):
    occupied = tmp_path / "file"
    occupied.write_text("")
    monkeypatch.setenv("TILEBIT_CACHE", str(occupied / "cache"))
    f = finding(doctor.diagnose(), "artifact cache")
    assert f.status == doctor.MISSING and "TILEBIT_CACHE" in f.do


def test_the_probe_leaves_nothing_behind(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEBIT_CACHE", str(tmp_path))
    doctor.diagnose()
    assert not [path for path in (tmp_path / "building").iterdir()]


def test_a_cpu_without_vector_instructions(monkeypatch):
    from dataclasses import replace

    from tilebit.schedules import target

    plain = replace(target.cpu_target(), features=())
    monkeypatch.setattr(target, "cpu_target", lambda: plain)
    f = finding(doctor.diagnose(), "CPU")
    assert f.status == doctor.WARNING and "AVX2" in f.do
