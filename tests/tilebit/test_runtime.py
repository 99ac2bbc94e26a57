"""Loading kernels: digests before dlopen, no compiler imported, clear errors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent / "tiles"))
from sample import artifacts
from sample.artifacts import key_of, make_kernel, write_manifest

from tilebit import runtime
from tilebit.runtime import CorruptArtifact, LoadedKernel, load_kernel

KEY = key_of("runtime")


@pytest.fixture
def kernel_dir(tmp_path: Path) -> Path:
    return make_kernel(tmp_path / "kernel", KEY, value=2.0)


def test_a_kernel_loads_and_runs(kernel_dir: Path) -> None:
    kernel = load_kernel(kernel_dir)
    assert isinstance(kernel, LoadedKernel) and kernel.params == ("y",) and kernel.manifest["key"] == KEY
    y = torch.zeros(5)
    kernel(y)
    kernel.run(y)
    kernel.prepare()  # nothing to do on a CPU
    assert torch.equal(y, torch.full((5,), 4.0))
    with pytest.raises(TypeError, match="one tensor, please"):
        kernel(y, y)


def test_dependent_launch_is_there_if_the_library_has_it(kernel_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_kernel(kernel_dir).run_dependent is None
    early = artifacts.SOURCE.replace("__tvm_ffi_run", "__tvm_ffi_run_dependent").replace("+= VALUE", "-= VALUE")
    monkeypatch.setattr(artifacts, "SOURCE", artifacts.SOURCE + early)
    kernel = load_kernel(make_kernel(tmp_path / "early", key_of("early"), value=2.0))
    y = torch.zeros(5)
    kernel.run_dependent(y)
    assert torch.equal(y, torch.full((5,), -2.0))
    kernel(y)
    assert torch.equal(y, torch.zeros(5))


def test_a_kernel_is_loaded_once(kernel_dir: Path) -> None:
    first = load_kernel(kernel_dir)
    assert load_kernel(str(kernel_dir) + "/../kernel") is first
    shutil.rmtree(kernel_dir)
    make_kernel(kernel_dir, KEY, value=2.0)  # as after quarantine and a rebuild: the same key, the same kernel
    assert load_kernel(kernel_dir) is first
    (kernel_dir / "kernel.so").write_bytes(b"short")
    with pytest.raises(CorruptArtifact, match="has 5 bytes"):
        load_kernel(kernel_dir)
    shutil.rmtree(kernel_dir)
    make_kernel(kernel_dir, key_of("another"), value=3.0)
    with pytest.raises(CorruptArtifact, match=r"another kernel took its place .* restart the process"):
        load_kernel(kernel_dir)


def test_a_kernel_is_tied_to_a_digest_of_its_manifest(kernel_dir: Path, tmp_path: Path) -> None:
    """Also where it is loaded already, and without a look at the library: what lists a kernel opens that one or none."""
    digest = runtime.file_digest(kernel_dir / "manifest.json")
    for wanted in (digest, None):
        assert load_kernel(kernel_dir, wanted).manifest["key"] == KEY
    with pytest.raises(CorruptArtifact, match="another kernel, or a changed manifest, took its place"):
        load_kernel(kernel_dir, "0" * 64)
    exchanged = tmp_path / "exchanged"
    shutil.copytree(make_kernel(tmp_path / "other", key_of("other"), value=9.0), exchanged)
    with pytest.raises(CorruptArtifact, match="took its place"):
        load_kernel(exchanged, digest)
    y = torch.zeros(1)
    load_kernel(exchanged)(y)
    assert y.item() == 9.0, "it is a good kernel otherwise"


def test_a_file_whose_times_were_set_back_is_read_again(kernel_dir: Path) -> None:
    """Of a length that is the same, in the same inode: only the time of its change tells."""
    library = kernel_dir / "kernel.so"
    before, stat = runtime.file_digest(library), library.stat()
    with library.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xa5")
    os.utime(library, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (library.stat().st_ino, library.stat().st_size, library.stat().st_mtime_ns) == (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    assert runtime.file_digest(library) != before
    with pytest.raises(CorruptArtifact, match=r"the sha256 of kernel\.so"):
        load_kernel(kernel_dir)


def test_digests_are_computed_once_per_file(kernel_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    original = runtime.hashlib.file_digest

    def counting(*args):
        nonlocal count
        count += 1
        return original(*args)

    monkeypatch.setattr(runtime.hashlib, "file_digest", counting)
    runtime.read_manifest(kernel_dir)
    files = len(json.loads((kernel_dir / "manifest.json").read_text())["files"])
    assert count == files
    runtime.read_manifest(kernel_dir)
    assert count == files
    os.utime(kernel_dir / "kernel.so", (1, 1))
    runtime.read_manifest(kernel_dir)
    assert count == files + 1


def truncate(folder: Path) -> None:
    library = folder / "kernel.so"
    library.write_bytes(library.read_bytes()[:4096])  # dlopen of this one ends the process with SIGBUS or SIGSEGV


def swap(folder: Path) -> None:
    data = bytearray((folder / "kernel.so").read_bytes())
    data[-1] ^= 255
    (folder / "kernel.so").write_bytes(bytes(data))


def not_a_library(folder: Path) -> None:
    (folder / "kernel.so").write_bytes(b"not an ELF file")
    write_manifest(folder, KEY)


def no_run(folder: Path) -> None:
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(folder / "kernel.so")], input="int x;", text=True, check=True)
    write_manifest(folder, KEY)


DAMAGE = [
    (truncate, "kernel.so has 4096 bytes where the manifest says"),
    (swap, "the sha256 of kernel.so is not the manifest's"),
    (not_a_library, "kernel.so does not load here"),
    (no_run, "kernel.so does not load here"),
    (lambda folder: (folder / "kernel.so").unlink(), "kernel.so cannot be read"),
    (lambda folder: (folder / "kernel.ll").unlink(), "kernel.ll cannot be read"),
    (lambda folder: (folder / "manifest.json").unlink(), "there is no manifest.json"),
    (lambda folder: (folder / "manifest.json").write_text('{"schema": 1'), "manifest.json is not readable JSON"),
    (lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe"), "manifest.json is not readable JSON"),
    (lambda folder: (folder / "manifest.json").write_text("3"), "not readable JSON: it holds a int; accepted: a JSON object"),
    (lambda folder: (folder / "manifest.json").write_text("{}"), "manifest.json lacks schema, key, program"),
    (lambda folder: write_manifest(folder, KEY, schema=2), "manifest.json has schema 2, this version reads 1"),
    (lambda folder: write_manifest(folder, KEY, files={"kernel.ll": {"sha256": "0", "bytes": 1}}), "its manifest does not list kernel.so"),
    (lambda folder: write_manifest(folder, KEY, files={"kernel.so": {"sha256": "0"}}), "has no bytes and sha256"),
    (lambda folder: write_manifest(folder, KEY, files={"/etc/passwd": {}, "kernel.so": {}}), "which leaves the directory"),
    (lambda folder: write_manifest(folder, KEY, files={"a/../../x": {}, "kernel.so": {}}), "which leaves the directory"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGE, ids=[words[:30] for _, words in DAMAGE])
def test_damage_is_found_before_the_library_is_opened(kernel_dir: Path, damage, words: str) -> None:
    damage(kernel_dir)
    with pytest.raises(CorruptArtifact) as caught:
        load_kernel(kernel_dir)
    text = str(caught.value)
    assert (
        words in text and str(kernel_dir) in text and "accepted: a complete, unmodified kernel directory" in text and "To repair:" in text
    )
    assert caught.value.path == kernel_dir


def test_a_missing_directory_is_corrupt(tmp_path: Path) -> None:
    with pytest.raises(CorruptArtifact, match="there is no manifest"):
        load_kernel(tmp_path / "nowhere")


def test_the_runtime_is_a_leaf(kernel_dir: Path) -> None:
    """Loading and running a kernel imports no compiler and none of the four folders."""
    script = (
        "import sys, tilebit.runtime as r, torch; k = r.load_kernel(sys.argv[1]); y = torch.zeros(3); k(y); assert y.sum() == 6.0;"
        "print([m for m in sys.modules if m.split('.')[0] in ('tvm', 'tilelang') or m.startswith(('tilebit.layouts', 'tilebit.schedules',"
        " 'tilebit.tiles', 'tilebit.autotune'))])"
    )
    done = subprocess.run([sys.executable, "-c", script, str(kernel_dir)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
