"""The artifact cache: complete or absent, checked before use, private, and whole after a crash or a full disk."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))
from sample.artifacts import key_of, make_kernel, write_manifest

from tilebit.runtime import CorruptArtifact
from tilebit.tiles.compiler.cache import ArtifactCache, CacheError, default_root

KEY = key_of("one")


@pytest.fixture
def cache(tmp_path: Path) -> ArtifactCache:
    return ArtifactCache(tmp_path / "cache")


def built(cache: ArtifactCache, key: str = KEY, value: float = 1.0) -> Path:
    return make_kernel(cache.build_dir(), key, value=value)


def everything(cache: ArtifactCache) -> list[str]:
    return sorted(p.relative_to(cache.root).as_posix() for p in cache.root.rglob("*") if p.is_file() and not p.name.startswith("lock-"))


def test_publish_then_lookup(cache: ArtifactCache) -> None:
    assert cache.lookup(KEY) is None
    build = built(cache)
    kernel = cache.publish(KEY, build)
    assert not build.exists()
    found = cache.lookup(KEY)
    assert found is not None and found.path == kernel.path == cache.entry(KEY) and found.key == KEY
    assert cache.keys() == [KEY]
    assert cache.size() >= sum(p.stat().st_size for p in kernel.path.iterdir())


def test_root_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TILEBIT_CACHE", str(tmp_path / "here"))
    assert default_root() == tmp_path / "here"
    monkeypatch.delenv("TILEBIT_CACHE")
    assert default_root() == Path.home() / ".cache" / "tilebit"


def test_directories_are_private(cache: ArtifactCache) -> None:
    cache.publish(KEY, built(cache))
    for path in (cache.root, cache.kernels, cache.building, cache.entry(KEY)):
        assert path.stat().st_mode & 0o777 == 0o700, path


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o707, 0o720, 0o702, 0o775, 0o757])
@pytest.mark.parametrize("part", ["", "kernels", "building", "quarantine"])
def test_a_cache_that_others_may_write_is_refused(cache: ArtifactCache, mode: int, part: str) -> None:
    """Also a part of it under a private root; the command that is named mends it."""
    place = cache.root / part
    place.chmod(mode)
    with pytest.raises(CacheError, match=rf"{place} is writable by others \(mode {mode:o}\).*accepted: mode 0700") as caught:
        ArtifactCache(cache.root)
    command = re.search(r"Run (chmod \d+ \S+),", str(caught.value))
    assert command is not None
    subprocess.run(command[1].split(), check=True)
    assert ArtifactCache(cache.root).lookup(KEY) is None


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o711, 0o500])
def test_a_cache_that_others_may_read_is_used(cache: ArtifactCache, mode: int) -> None:
    for place in (cache.root, cache.kernels):
        place.chmod(mode)
    ArtifactCache(cache.root)
    cache.root.chmod(0o700)


@pytest.mark.parametrize("part", ["", "kernels"])
def test_a_cache_of_another_user_is_refused(cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    place, real = cache.root / part, Path.stat

    def stat(path: Path, **options: bool) -> os.stat_result:
        found = real(path, **options)
        return os.stat_result((*found[:4], found.st_uid + 1, *found[5:10])) if path == place else found

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(CacheError, match=rf"{place} belongs to user .* accepted: a directory of your own.*Set TILEBIT_CACHE"):
        ArtifactCache(cache.root)


@pytest.mark.parametrize("part", ["kernels", "building", "quarantine"])
@pytest.mark.parametrize("linked", [False, True])
def test_a_file_or_a_dangling_link_for_a_folder_is_refused(cache: ArtifactCache, part: str, linked: bool) -> None:
    place = cache.root / part
    place.rmdir()
    place.symlink_to(cache.root / "nowhere") if linked else place.write_text("")
    with pytest.raises(CacheError, match="is no directory but a file or a link to nothing") as caught:
        ArtifactCache(cache.root)
    command = re.search(r"Run (rm \S+),", str(caught.value))
    assert command is not None
    subprocess.run(command[1].split(), check=True)
    assert ArtifactCache(cache.root).lookup(KEY) is None and place.is_dir()


def test_a_cache_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=r"accepted: a directory of your own\. Run rm .*, or set TILEBIT_CACHE"):
        ArtifactCache(tmp_path / "file")
    with pytest.raises(CacheError, match=r"accepted: a writable directory\. Set TILEBIT_CACHE"):
        ArtifactCache(tmp_path / "file" / "below")


@pytest.mark.parametrize("key", ["", "abc", "../" + "a" * 61, "A" * 64, KEY + "0"])
def test_a_key_is_a_sha256(cache: ArtifactCache, key: str) -> None:
    with pytest.raises(ValueError, match="accepted: 64 lower-case hexadecimal digits"):
        cache.lookup(key)


DAMAGE = {
    "truncated library": lambda entry: (entry / "kernel.so").write_bytes((entry / "kernel.so").read_bytes()[:100]),
    "a flipped bit": lambda entry: _flip(entry / "kernel.so"),
    "missing library": lambda entry: (entry / "kernel.so").unlink(),
    "missing source": lambda entry: (entry / "kernel.ll").unlink(),
    "torn manifest": lambda entry: (entry / "manifest.json").write_text((entry / "manifest.json").read_text()[:60]),
    "no manifest": lambda entry: (entry / "manifest.json").unlink(),
    "manifest of another key": lambda entry: write_manifest(entry, key_of("other")),
    "manifest of another schema": lambda entry: write_manifest(entry, KEY, schema=99),
    "manifest that lists no files": lambda entry: write_manifest(entry, KEY, files={}),
    "manifest that leaves the directory": lambda entry: write_manifest(
        entry, KEY, files={"kernel.so": {}, "../x": {"sha256": "", "bytes": 0}}
    ),
    "manifest that is a list": lambda entry: (entry / "manifest.json").write_text("[]"),
    "manifest without a field": lambda entry: _drop(entry, "params"),
    "deeply nested manifest": lambda entry: (entry / "manifest.json").write_text("[" * 100_000),
    "a list for the key": lambda entry: write_manifest(entry, [KEY]),
    "a list for a name": lambda entry: write_manifest(entry, KEY, params=[{"name": ["y"]}]),
    "a file in its place": lambda entry: (shutil.rmtree(entry), entry.write_text("")),
    "a dangling link in its place": lambda entry: (shutil.rmtree(entry), entry.symlink_to(entry.with_name("nowhere"))),
    "a link to itself": lambda entry: (shutil.rmtree(entry), entry.symlink_to(entry)),
    "a link to a good one elsewhere": lambda entry: _link_elsewhere(entry),
    "a pipe in its place": lambda entry: (shutil.rmtree(entry), os.mkfifo(entry)),
    "writable by all": lambda entry: entry.chmod(0o777),
    "writable by the group": lambda entry: entry.chmod(0o770),
    "a library that all may write": lambda entry: (entry.chmod(0o755), (entry / "kernel.so").chmod(0o666)),
    "a manifest that all may write": lambda entry: (entry.chmod(0o711), (entry / "manifest.json").chmod(0o666)),
}


@pytest.mark.parametrize("damage", [name for name in DAMAGE if "place" in name or "link" in name])
def test_what_is_no_entry_does_not_keep_one_from_being_published(cache: ArtifactCache, damage: str) -> None:
    """Without a look at it before, as where two processes compile at once."""
    cache.publish(KEY, built(cache))
    DAMAGE[damage](cache.entry(KEY))
    cache.publish(KEY, built(cache))
    assert cache.lookup(KEY) is not None and len(list(cache.quarantined.iterdir())) == 1
    DAMAGE[damage](cache.entry(KEY))
    assert cache.clear() == 1 and cache.keys() == [] and not list(cache.kernels.iterdir())
    assert not list(cache.building.iterdir()) and not list(cache.quarantined.iterdir())


def test_what_lies_among_builds_stops_nobody(cache: ArtifactCache) -> None:
    (cache.building / "dangling").symlink_to(cache.root / "nowhere")
    (cache.building / "file").write_text("")
    assert cache.remove_stale() == 0 and ArtifactCache(cache.root).publish(KEY, built(cache)).key == KEY
    assert cache.remove_stale(older_than=-1) == 2 and not list(cache.building.iterdir())


def test_a_lock_that_cannot_be_taken_is_explained(cache: ArtifactCache) -> None:
    cache.publish(KEY, built(cache))
    _flip(cache.entry(KEY) / "kernel.so")
    lock = cache.root / f"lock-{KEY[:2]}"
    lock.unlink()
    lock.mkdir()
    with pytest.raises(CacheError, match=r"cannot set a corrupted kernel aside in the cache .*accepted: a writable directory"):
        cache.lookup(KEY)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def _link_elsewhere(entry: Path) -> None:
    elsewhere = entry.parents[1] / f"moved-{uuid.uuid4().hex}"
    entry.rename(elsewhere)
    entry.symlink_to(elsewhere)


def _drop(entry: Path, field: str) -> None:
    manifest = json.loads((entry / "manifest.json").read_text())
    del manifest[field]
    (entry / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("damage", DAMAGE)
def test_corrupted_entries_are_quarantined_and_can_be_built_again(cache: ArtifactCache, damage: str) -> None:
    cache.publish(KEY, built(cache))
    DAMAGE[damage](cache.entry(KEY))
    assert cache.lookup(KEY) is None
    assert not cache.entry(KEY).exists()
    (kept,) = cache.quarantined.iterdir()
    assert (kept / "REASON").read_text().strip()
    again = cache.publish(KEY, built(cache))
    assert cache.lookup(KEY) is not None and again.path == cache.entry(KEY)


def test_an_incomplete_build_is_not_published(cache: ArtifactCache) -> None:
    build = built(cache)
    (build / "kernel.so").write_bytes(b"cut")
    with pytest.raises(CorruptArtifact, match=r"kernel.so has 3 bytes where the manifest says"):
        cache.publish(KEY, build)
    assert cache.keys() == [] and not build.exists()


def test_a_corrupted_entry_is_replaced_by_publish(cache: ArtifactCache) -> None:
    cache.publish(KEY, built(cache))
    _flip(cache.entry(KEY) / "kernel.so")
    cache.publish(KEY, built(cache))
    assert cache.lookup(KEY) is not None
    assert len(list(cache.quarantined.iterdir())) == 1


@pytest.mark.parametrize("when", ["rename", "fsync"])
def test_a_full_disk_publishes_nothing_and_says_so(cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    cache.publish(key_of("two"), built(cache, key_of("two")))
    build = built(cache)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, when, full)
    with pytest.raises(CacheError, match=r"its disk is full.*nothing was published.*TILEBIT_CACHE"):
        cache.publish(KEY, build)
    monkeypatch.undo()
    assert cache.keys() == [key_of("two")] and not list(cache.building.iterdir())
    assert cache.lookup(key_of("two")) is not None


def test_a_really_full_disk_publishes_nothing(tmp_path: Path) -> None:
    """A small file system, where the machine allows mounting one."""
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160k,mode=700", "tmpfs", str(mount)], capture_output=True)
    if done.returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        cache = ArtifactCache(mount / "cache")
        build = built(cache)
        (build / "manifest.json").unlink()
        with (build / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space left"):
            while True:
                filler.write(b"x" * 4096)
        with pytest.raises(OSError, match="No space left"):
            write_manifest(build, KEY)  # the manifest is cut short
        with pytest.raises(CorruptArtifact):
            cache.publish(KEY, build)
        assert cache.keys() == [] and cache.lookup(KEY) is None and not list(cache.building.iterdir())
        cache.publish(KEY, built(cache))
        assert cache.lookup(KEY) is not None
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_the_first_of_several_publishers_wins(cache: ArtifactCache) -> None:
    builds = [built(cache, value=float(i)) for i in range(4)]
    inodes = {(build / "kernel.so").stat().st_ino for build in builds}
    errors: list[BaseException] = []
    paths: list[Path] = []
    start = threading.Barrier(len(builds))

    def publish(build: Path) -> None:
        try:
            start.wait()
            paths.append(cache.publish(KEY, build).path)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=publish, args=(build,)) for build in builds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and set(paths) == {cache.entry(KEY)}
    assert cache.lookup(KEY) is not None
    assert (cache.entry(KEY) / "kernel.so").stat().st_ino in inodes
    assert not list(cache.building.iterdir()) and not list(cache.quarantined.iterdir())


def test_a_killed_builder_leaves_no_entry(cache: ArtifactCache) -> None:
    script = (
        "import os, signal, sys; from tilebit.tiles.compiler.cache import ArtifactCache; c = ArtifactCache(sys.argv[1]); d = c.build_dir();"
        "(d / 'kernel.so').write_bytes(b'half'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(cache.root)])
    assert done.returncode == -9
    assert cache.keys() == [] and len(list(cache.building.iterdir())) == 1
    assert cache.remove_stale() == 0  # it might still be at work
    assert cache.remove_stale(older_than=0) == 1 and not list(cache.building.iterdir())


def test_stale_builds_are_told_by_age(cache: ArtifactCache) -> None:
    old, new = cache.build_dir(), cache.build_dir()
    past = time.time() - 48 * 3600
    os.utime(old, (past, past))
    assert cache.remove_stale() == 1
    assert new.exists() and not old.exists()


def test_clear_removes_everything(cache: ArtifactCache) -> None:
    for name in ("one", "two"):
        cache.publish(key_of(name), built(cache, key_of(name)))
    _flip(cache.entry(KEY) / "kernel.so")
    assert cache.lookup(KEY) is None
    assert cache.clear() == 1
    assert cache.keys() == [] and everything(cache) == []
