"""Packs: complete or absent, checked, chosen by bucket of m, and loadable where no compiler is installed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent / "tiles"))
from sample.artifacts import key_of, make_kernel
from serving_environment import serving_python, serving_variables

from tilebit import packs
from tilebit.layouts.formats import QuantFormat
from tilebit.layouts.kv_formats import KVFormat
from tilebit.runtime import CorruptArtifact, read_manifest
from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import AnyWorkload, candidates, workload_from_json
from tilebit.schedules.target import cpu_target, target_from_name
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileRequest, compile_kernel
from tilebit.tiles.compiler.kernel import Kernel

SHAPE = Workload(1, 64, 64)
AVX2 = replace(cpu_target(), features=("avx2",))


def kernel(folder: Path, workload: AnyWorkload, value: float, arch: str = "cpu") -> Kernel:
    path = make_kernel(folder / key_of(f"{workload} {arch}")[:8], key_of(f"{workload} {arch}"), workload, value, arch)
    return Kernel(path, read_manifest(path))


@pytest.fixture
def pack(tmp_path: Path) -> packs.Pack:
    """Kernels for m of 1, 16 and 256 of one shape, and one for another arch."""
    made = [kernel(tmp_path / "made", SHAPE.with_m(m), float(m)) for m in (1, 16, 256)]
    return packs.export(tmp_path / "pack", [*made, kernel(tmp_path / "made", SHAPE, 7.0, "sm_80")])


def value_of(loaded) -> float:
    y = torch.zeros(1)
    loaded(y)
    return y.item()


def test_export_then_read(pack: packs.Pack) -> None:
    again = packs.read(pack.path)
    assert len(again) == len(pack.kernels) == 4 and again.arches == ("cpu", "sm_80")
    assert {e.key for e in again.kernels} == {e.key for e in pack.kernels}
    manifest = json.loads((pack.path / "pack.json").read_text())
    assert {"schema", "created", "versions", "kernels", "files"} <= set(manifest)
    files = {p.relative_to(pack.path).as_posix() for p in pack.path.rglob("*") if p.is_file()} - {"pack.json"}
    assert files == set(manifest["files"])
    assert repr(pack).startswith("Pack(") and "kernels=4" in repr(pack)


@pytest.mark.parametrize(("m", "value"), [(0, 1), (1, 1), (2, 16), (16, 16), (17, 256), (256, 256), (9999, 256)])
def test_the_kernel_of_the_bucket_is_chosen(pack: packs.Pack, m: int, value: int) -> None:
    assert value_of(pack.kernel_for(SHAPE.with_m(123), m, "cpu")) == value


def test_a_mapping_says_what_each_kernel_serves(tmp_path: Path) -> None:
    one = kernel(tmp_path / "made", SHAPE, 5.0)
    made = packs.export(tmp_path / "pack", {SHAPE.with_m(1): one, SHAPE.with_m(64): one})
    assert len(made) == 2 and len(list((made.path / "kernels").iterdir())) == 1
    assert value_of(made.kernel_for(SHAPE, 64)) == 5.0
    with pytest.raises(ValueError, match=r"accepted for .* one that differs in m and dependent only"):
        packs.export(tmp_path / "other", {Workload(1, 128, 64): one})
    assert not (tmp_path / "other").exists()


def test_a_kernel_for_steps_and_one_for_the_product_alone(tmp_path: Path) -> None:
    """Of either kind its own comes first; in a step also what was made for the product alone, for as many rows as it serves best."""
    step = replace(SHAPE, dependent=True)
    made = [kernel(tmp_path / "made", w, value) for w, value in ((step.with_m(1), 1.5), (step.with_m(16), 16.5))]
    alone = [kernel(tmp_path / "made", SHAPE.with_m(m), float(m)) for m in (8, 16, 64)]
    pack = packs.export(tmp_path / "pack", [*made, *alone])
    assert [value_of(pack.kernel_for(SHAPE, m)) for m in (1, 9, 16, 17, 99)] == [8.0, 16.0, 16.0, 64.0, 64.0]
    assert [value_of(pack.kernel_for(step, m)) for m in (1, 2, 9, 16, 17, 99)] == [1.5, 8.0, 16.5, 16.5, 64.0, 64.0]
    shared = packs.export(tmp_path / "shared", {SHAPE.with_m(1): made[0], step: made[0]})
    assert {entry.workload for entry in shared.kernels} == {SHAPE, step} and len({entry.key for entry in shared.kernels}) == 1
    of_steps = packs.export(tmp_path / "steps", made)
    assert [value_of(of_steps.kernel_for(SHAPE, m)) for m in (1, 2, 99)] == [1.5, 16.5, 16.5], "better than none"


def test_packs_become_one(pack: packs.Pack, tmp_path: Path) -> None:
    """Each kernel serves what it served, on every arch; what several packs hold is there once."""
    one = kernel(tmp_path / "more", SHAPE.with_m(64), 64.0)
    other = packs.export(tmp_path / "other", {SHAPE.with_m(32): one, SHAPE.with_m(64): one})
    both = packs.export(tmp_path / "both", pack.kernels + other.kernels + pack.kernels)
    assert [(e.key, e.workload, e.arch) for e in both.kernels] == [(e.key, e.workload, e.arch) for e in pack.kernels + other.kernels]
    assert [value_of(both.kernel_for(SHAPE, m, "cpu")) for m in (16, 17, 33, 65)] == [16.0, 64.0, 64.0, 256.0]


def test_a_missing_kernel_says_how_to_build_it(pack: packs.Pack) -> None:
    wanted = Workload(8, 96, 64, QuantFormat(8, 32, False), "bfloat16", True)
    with pytest.raises(LookupError) as caught:
        pack.kernel_for(wanted, 8, "cpu")
    text = str(caught.value)
    assert "no kernel for 96x64 w8a16_g32_asym bfloat16 with bias on cpu; it holds 64x64 w4a16_g128 float16" in text
    assert "tilebit pack PATH --n 96 --k 64 --m 8 --format w8a16_g32_asym --dtype bfloat16 --bias --target cpu" in text
    with pytest.raises(LookupError, match="none for this device"):
        pack.kernel_for(SHAPE, 1, "sm_90a")
    with pytest.raises(ValueError, match=r"arch is not given and the pack .* holds cpu, sm_80"):
        pack.kernel_for(SHAPE, 1)


def test_loaded_packs_are_found_the_latest_first(pack: packs.Pack, tmp_path: Path) -> None:
    newer = packs.export(tmp_path / "newer", [kernel(tmp_path / "made2", SHAPE, 50.0)])
    assert packs.find(SHAPE, AVX2) is None
    loaded = [packs.load(pack.path), packs.load(newer.path)]
    try:
        found = packs.find(SHAPE, AVX2)
        assert found is not None and value_of(found) == 50.0
        assert [p.path for p in packs.loaded()] == [newer.path, pack.path]
        loaded[0] = packs.load(pack.path)  # read again: now the latest, and only once in the list
        found = packs.find(SHAPE, AVX2)
        assert found is not None and value_of(found) == 1.0 and len(packs.loaded()) == 2
        assert packs.find(Workload(1, 65, 64), AVX2) is None
        assert packs.find(SHAPE, target_from_name("sm_90a")) is None
    finally:
        for one in loaded:
            packs.unload(one)
    assert packs.find(SHAPE, AVX2) is None


def test_kernels_for_other_instruction_sets_are_passed_over(pack: packs.Pack) -> None:
    assert pack.entry_for(SHAPE.with_m(1), "cpu", ("avx512", "avx2")) is not None
    assert pack.entry_for(SHAPE.with_m(1), "cpu", ()) is None


DAMAGE = [
    (lambda root: (root / "pack.json").unlink(), "there is no pack.json"),
    (lambda root: (root / "pack.json").write_text("{"), "pack.json is not readable JSON"),
    (lambda root: _edit(root, schema=1), "pack.json has schema 1, this version reads 2"),
    (lambda root: _edit(root, files={}), "its manifest lists no files"),
    (lambda root: _edit(root, kernels=[{"key": 1}]), "pack.json lists no files for the kernel 1"),
    (lambda root: _edit(root, kernels=3), "kernels in pack.json is a int where a list belongs"),
    (lambda root: _edit(root, kernels=[[]]), "pack.json lists no files for the kernel None"),
    (lambda root: shutil.rmtree(next((root / "kernels").iterdir())), "cannot be read"),
    (lambda root: next((root / "kernels").glob("*/kernel.so")).write_bytes(b"short"), "kernel.so has 5 bytes where"),
    (lambda root: _swap(next((root / "kernels").glob("*/kernel.so"))), "kernel.so is not the manifest's"),
    (lambda root: _swap(next((root / "kernels").glob("*/manifest.json"))), "manifest.json is not the manifest's"),
]


def _edit(root: Path, **changes: object) -> None:
    manifest = json.loads((root / "pack.json").read_text())
    (root / "pack.json").write_text(json.dumps({**manifest, **changes}))


def _swap(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(("damage", "words"), DAMAGE, ids=[words[:30] for _, words in DAMAGE])
def test_a_damaged_pack_is_refused(pack: packs.Pack, damage, words: str) -> None:
    damage(pack.path)
    with pytest.raises(CorruptArtifact) as caught:
        packs.load(pack.path)
    assert words in str(caught.value) and "copy the pack again or export it anew" in str(caught.value)
    assert not packs.loaded()


ATTENDED = AttentionWorkload("decode", 8, 1, 1024, 8, 2, 64, KVFormat("int4", "int4"), soft_cap=30.0, sink_tokens=4, window=512)


@pytest.fixture
def two_kinds(tmp_path: Path) -> packs.Pack:
    made = [kernel(tmp_path / "made", SHAPE, 1.0), kernel(tmp_path / "made", ATTENDED, 2.0), kernel(tmp_path / "made", SHAPE, 3.0, "sm_80")]
    return packs.export(tmp_path / "pack", made)


def _others(value: object) -> list[object]:
    """Values that could stand where ``value`` does."""
    if isinstance(value, bool) or value is None:
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value * 2, -value, str(value)]
    if isinstance(value, str):
        return [f"{value}x", {"cpu": "sm_80", "float16": "bfloat16", "decode": "prefill"}.get(value, "")]
    return [[*value, "avx512"], []] if isinstance(value, list) else []


def _leaves(row: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in row.items() if isinstance(row, dict) else ():
        yield (*path, key)
        yield from _leaves(value, (*path, key))


def test_a_row_says_what_its_kernel_s_manifest_says(two_kinds: packs.Pack) -> None:
    """Every value of every row, changed in turn: but for the sizes that a kernel takes any of, the pack is refused."""
    place = two_kinds.path / "pack.json"
    manifest, tried = json.loads(place.read_text()), 0
    for i, row in enumerate(manifest["kernels"]):
        sizes = workload_from_json(row["workload"]).DYNAMIC
        for path in _leaves(row):
            if path[0] == "workload" and path[-1] in sizes:
                continue
            value = row
            for key in path:
                value = value[key]
            for other in (*_others(value), [], {}):
                changed = json.loads(json.dumps(manifest))
                at = changed["kernels"][i]
                for key in path[:-1]:
                    at = at[key]
                at[path[-1]] = other
                if other == value or changed == manifest:
                    continue
                tried += 1
                place.write_text(json.dumps(changed))
                with pytest.raises(CorruptArtifact, match="copy the pack again or export it anew"):
                    packs.read(two_kinds.path)
    assert tried > 150
    place.write_text(json.dumps(manifest))
    packs.read(two_kinds.path)


@pytest.mark.parametrize("field", ["key", "path", "arch", "workload"])
def test_rows_that_changed_places_are_refused(two_kinds: packs.Pack, field: str) -> None:
    rows = json.loads((two_kinds.path / "pack.json").read_text())["kernels"]
    rows[0][field], rows[1][field], rows[2][field] = rows[1][field], rows[2][field], rows[0][field]
    _edit(two_kinds.path, kernels=rows)
    with pytest.raises(CorruptArtifact, match=r"is not what its manifest says|lists no files"):
        packs.load(two_kinds.path)
    assert not packs.loaded()


def test_a_kernel_outside_the_pack_is_refused(two_kinds: packs.Pack, tmp_path: Path) -> None:
    """Also a good one, in a row that is right for it."""
    outside = kernel(tmp_path / "outside", SHAPE.with_m(2), 5.0)
    shutil.copytree(outside.path, tmp_path / outside.key)
    manifest = json.loads((two_kinds.path / "pack.json").read_text())
    for place in (f"../{outside.key}", f"kernels/../../{outside.key}", str(tmp_path / outside.key)):
        rows = [{**manifest["kernels"][0], "key": outside.key, "path": place}]
        _edit(two_kinds.path, kernels=rows)
        with pytest.raises(CorruptArtifact, match="lists no files for the kernel"):
            packs.read(two_kinds.path)


def _exchange(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


@pytest.mark.parametrize("opened", [False, True])
def test_a_kernel_exchanged_after_reading_is_refused(pack: packs.Pack, tmp_path: Path, opened: bool) -> None:
    """For another of the pack, and for one of elsewhere with a good manifest; opened before or not."""
    first, second = (pack.entry_for(SHAPE.with_m(m), "cpu") for m in (1, 16))
    assert first is not None and second is not None
    if opened:
        assert value_of(pack.kernel_for(SHAPE, 1, "cpu")) == 1.0
    _exchange(first.path, second.path)
    for m in (1, 16):
        with pytest.raises(CorruptArtifact, match=r"took its place.*copy the pack again or export it anew, then restart"):
            pack.kernel_for(SHAPE, m, "cpu")
    assert value_of(pack.kernel_for(SHAPE, 256, "cpu")) == 256.0
    _exchange(first.path, second.path)
    assert value_of(pack.kernel_for(SHAPE, 1, "cpu")) == 1.0, "put back, it serves again"

    foreign = make_kernel(tmp_path / "foreign", second.key, SHAPE.with_m(16), 66.0)  # whose manifest has the key that belongs there
    _exchange(second.path, foreign)
    with pytest.raises(CorruptArtifact, match="took its place"):
        pack.kernel_for(SHAPE, 16, "cpu")
    with pytest.raises(CorruptArtifact, match="took its place"):
        packs.export(tmp_path / "again", pack.kernels)
    assert not (tmp_path / "again").exists()


def test_calls_meet_an_exchanged_kernel_as_an_error(pack: packs.Pack) -> None:
    loaded = packs.load(pack.path)
    try:
        first, second = (loaded.entry_for(SHAPE.with_m(m), "cpu") for m in (1, 16))
        assert first is not None and second is not None
        _exchange(first.path, second.path)
        with pytest.raises(CorruptArtifact, match="took its place"):
            packs.find(SHAPE.with_m(1), AVX2)
    finally:
        packs.unload(loaded)


def test_a_kernel_damaged_after_reading_is_refused(pack: packs.Pack) -> None:
    entry = pack.entry_for(SHAPE.with_m(16), "cpu")
    assert entry is not None
    (entry.path / "kernel.so").write_bytes(b"short")
    with pytest.raises(CorruptArtifact, match=r"kernel.so has 5 bytes"):
        pack.kernel_for(SHAPE, 16, "cpu")


def test_a_missing_pack_is_no_corrupt_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no pack directory .*; accepted: a directory that tilebit\.packs\.export wrote"):
        packs.load(tmp_path / "nowhere")


def test_export_replaces_only_when_told(pack: packs.Pack, tmp_path: Path) -> None:
    one = kernel(tmp_path / "made3", SHAPE, 9.0)
    with pytest.raises(FileExistsError, match="pass overwrite=True"):
        packs.export(pack.path, [one])
    assert len(packs.read(pack.path)) == 4
    assert len(packs.export(pack.path, [one], overwrite=True)) == 1
    with pytest.raises(ValueError, match="kernels is empty"):
        packs.export(tmp_path / "none", [])


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_full_disk_leaves_no_pack_and_keeps_the_old_one(
    pack: packs.Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    place = pack.path if overwrite else tmp_path / "fresh"
    one = kernel(tmp_path / "made3", SHAPE, 9.0)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(packs.shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space left"):
        packs.export(place, [one], overwrite=overwrite)
    monkeypatch.undo()
    assert place.exists() == overwrite
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    if overwrite:
        assert len(packs.read(place)) == 4


def test_a_damaged_kernel_is_not_exported(tmp_path: Path) -> None:
    one = kernel(tmp_path / "made", SHAPE, 1.0)
    _swap(one.path / "kernel.so")
    with pytest.raises(CorruptArtifact, match=r"sha256 of kernel.so"):
        packs.export(tmp_path / "pack", [one])
    assert not (tmp_path / "pack").exists()


SERVE = """
import importlib.util, sys
for name in ("tilelang", "tvm"):
    assert importlib.util.find_spec(name) is None, name + " is visible"
import numpy as np, torch
from tilebit import packs
from tilebit.schedules.gemm.workload import Workload
pack = packs.load(sys.argv[1])
entry = pack.kernels[0]
kernel = pack.kernel_for(entry.workload, 3)
data = np.load(sys.argv[2])
tensors = [torch.from_numpy(data[name]) for name in kernel.params[:-1]]
y = torch.full((3, entry.workload.n), float("nan"), dtype=torch.float16)
kernel(*tensors, y)
np.save(sys.argv[3], y.numpy())
assert not [m for m in sys.modules if m.split(".")[0] in ("tvm", "tilelang")]
"""


def test_a_pack_serves_without_a_compiler(tmp_path: Path) -> None:
    """A virtual environment with neither tilelang nor apache-tvm loads a CPU pack and multiplies; the result is exact."""
    import numpy as np

    from tilebit.layouts.packing import gemm_layout

    n, k = 96, 256
    workload = Workload(4, n, k, QuantFormat(4, 128, False))
    schedules = candidates(workload, cpu_target())
    if not schedules:
        pytest.skip("needs a CPU with AVX2")
    built = compile_kernel(CompileRequest(schedules[0].program, workload, schedules[0], cpu_target()), ArtifactCache())
    packs.export(tmp_path / "pack", [built])

    rng = np.random.default_rng(0)
    codes, zeros = rng.integers(0, 16, (n, k), dtype=np.uint8), rng.integers(0, 16, (n, 2), dtype=np.uint8)
    scales = rng.choice([1.0, 2.0, 4.0], (n, 2)) / 64
    x = rng.integers(-4, 5, (3, k)).astype(np.float16)
    layout = gemm_layout("cpu", 4)
    n_pad = layout.padded(n, k)[0]
    pad = ((0, 0), (0, n_pad - n))
    operands = {
        "x": x,
        "weight": layout.pack(codes).view(np.int32),
        "scales": np.ascontiguousarray(np.pad(scales.T, pad), np.float16),
        "zeros": np.ascontiguousarray(np.pad(zeros.T, pad), np.float16),
    }
    np.savez(tmp_path / "operands.npz", **operands)

    python = serving_python(tmp_path / "venv")
    command = [str(python), "-c", SERVE, str(tmp_path / "pack"), str(tmp_path / "operands.npz"), str(tmp_path / "y.npy")]
    env = serving_variables(tmp_path / "cache")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    weights = (codes.astype(np.float64) - zeros.repeat(128, axis=1)) * scales.repeat(128, axis=1)
    expected = (x.astype(np.float64) @ weights.T).astype(np.float16)
    assert np.array_equal(np.load(tmp_path / "y.npy"), expected)
