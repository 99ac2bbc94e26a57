"""The artifact cache: complete kernel directories, published by one rename and checked before use."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import time
import uuid
from pathlib import Path

from filelock import FileLock

from ...runtime import MANIFEST_NAME, CorruptArtifact, read_manifest
from ...schedules.remembered import default_root
from .kernel import Kernel

STALE_SECONDS = 24 * 3600  # a build directory older than this belongs to a process that died
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OTHERS_ENTER = stat.S_IXGRP | stat.S_IXOTH
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class CacheError(Exception):
    """The cache directory cannot be used or written."""


class ArtifactCache:
    """Kernels by key under ``root``: ``kernels/<key>`` (complete entries), ``building/`` (private
    work), ``quarantine/`` (corrupted ones).

    The directories are created with mode 0700: artifacts are code. None of them may be another
    user's or writable by others. An entry appears by renaming a complete directory under a lock, so
    readers see all of it or nothing; what lies in an entry's place and is none (a file, a link, a
    directory that others may write) goes to quarantine like a corrupted one. Raises ``CacheError``
    when a directory cannot be made or trusted, or the disk is full.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None) -> None:
        self.root = Path(root) if root is not None else default_root()
        self.kernels = self.root / "kernels"
        self.building = self.root / "building"
        self.quarantined = self.root / "quarantine"
        for directory in (self.root, self.kernels, self.building, self.quarantined):
            self._ensure(directory)

    def _ensure(self, directory: Path) -> None:
        """Make one of the cache's directories, or see that it is one to be trusted."""
        try:
            if not directory.is_dir():
                directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                directory.chmod(0o700)
            found = directory.stat()
        except FileExistsError:
            raise CacheError(
                f"{directory} is no directory but a file or a link to nothing; accepted: a directory of your own. Run rm {directory}, "
                "or set TILEBIT_CACHE to another one"
            ) from None
        except OSError as error:
            raise CacheError(self.explain("create", error)) from None
        if found.st_uid != os.getuid():
            raise CacheError(
                f"the cache {directory} belongs to user {found.st_uid} and this process runs as {os.getuid()}; accepted: a directory of "
                "your own, because its libraries are executed. Set TILEBIT_CACHE to one"
            )
        if found.st_mode & OTHERS_WRITE:
            raise CacheError(
                f"the cache {directory} is writable by others (mode {found.st_mode & 0o777:o}) and its libraries are executed; "
                f"accepted: mode 0700. Run chmod 700 {directory}, and rm -r {self.kernels} if others may have written there"
            )

    def explain(self, verb: str, error: OSError) -> str:
        """A sentence for a failed file operation: what failed, and what to do."""
        if error.errno in DISK_FULL:
            return (
                f"cannot {verb} in the cache {self.root}: its disk is full ({error.strerror}); nothing was published. "
                f"Free space there, or set TILEBIT_CACHE to a directory on another disk"
            )
        of = f": {error.filename}" if error.filename is not None else ""
        return f"cannot {verb} in the cache {self.root} ({error.strerror}{of}); accepted: a writable directory. Set TILEBIT_CACHE to one"

    def _lock(self, key: str) -> FileLock:
        return FileLock(self.root / f"lock-{key[:2]}", mode=0o600)

    def entry(self, key: str) -> Path:
        """Where the entry of ``key`` lies or would lie. Raises ``ValueError`` when ``key`` is no
        sha256 in hex."""
        if len(key) != 64 or set(key) - set("0123456789abcdef"):
            raise ValueError(f"key is {key!r}; accepted: 64 lower-case hexadecimal digits")
        return self.kernels / key

    def lookup(self, key: str) -> Kernel | None:
        """The kernel of ``key``, its digests checked, or None. A corrupted entry is moved to
        quarantine and reported as absent."""
        entry = self.entry(key)
        if not os.path.lexists(entry):
            return None
        try:
            return self._read(key, entry)
        except CorruptArtifact:
            try:
                with self._lock(key):
                    try:
                        return self._read(key, entry)  # another process may have replaced it meanwhile
                    except CorruptArtifact as error:
                        self.quarantine(key, error.what)
            except OSError as error:
                raise CacheError(self.explain("set a corrupted kernel aside", error)) from None
        return None

    def _read(self, key: str, entry: Path) -> Kernel:
        try:
            return self._trusted(key, entry, entry.lstat())
        except OSError as error:  # another process removed it meanwhile
            raise CorruptArtifact(entry, f"it cannot be read ({error.strerror})") from None

    def _trusted(self, key: str, entry: Path, found: os.stat_result) -> Kernel:
        if not stat.S_ISDIR(found.st_mode):
            raise CorruptArtifact(entry, "it is no directory")
        manifest = read_manifest(entry)
        if manifest["key"] != key:
            raise CorruptArtifact(entry, f"its manifest says key {manifest['key']!r}")
        files = (entry / name for name in (MANIFEST_NAME, *manifest["files"])) if found.st_mode & OTHERS_ENTER else ()
        for path in (entry, *files):
            trusted = path.stat()
            if trusted.st_mode & OTHERS_WRITE or trusted.st_uid != os.getuid():
                raise CorruptArtifact(entry, f"{path.name} can be written by others (mode {trusted.st_mode & 0o777:o})")
        return Kernel(entry, manifest)

    def quarantine(self, key: str, reason: str) -> Path | None:
        """Move an entry out of the way, with a note that says why; returns where it went. The next
        request builds it again."""
        entry = self.entry(key)
        place = self.quarantined / f"{key[:16]}-{uuid.uuid4().hex[:8]}"
        try:
            if entry.is_dir() and not entry.is_symlink():
                os.rename(entry, place)
            else:
                place.mkdir(mode=0o700)  # for the file or link and the note that says why
                os.rename(entry, place / "entry")
        except FileNotFoundError:
            self.discard(place)
            return None
        with contextlib.suppress(OSError):  # a full disk must not keep a corrupted entry in place
            (place / "REASON").write_text(reason + "\n")
        return place

    def build_dir(self) -> Path:
        """A new private directory on the cache's file system, to be filled and given to ``publish``
        (or ``discard``)."""
        directory = self.building / f"{int(time.time())}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        try:
            directory.mkdir(mode=0o700)
        except OSError as error:
            raise CacheError(self.explain("make a build directory", error)) from None
        return directory

    def discard(self, build_dir: Path) -> None:
        """Remove a directory, or what lies in its place, as far as that can be done."""
        if build_dir.is_dir() and not build_dir.is_symlink():
            shutil.rmtree(build_dir, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                build_dir.unlink()

    def publish(self, key: str, build_dir: Path) -> Kernel:
        """Make ``build_dir`` (complete, with its manifest) the entry of ``key``; returns the entry.

        When another process published the same key first, its entry is kept and ``build_dir`` is
        dropped: equal keys mean equal kernels. Raises ``CorruptArtifact`` when ``build_dir`` is not
        what its manifest says and ``CacheError`` when it cannot be moved; in both cases nothing is
        published.
        """
        entry = self.entry(key)
        try:
            self._read(key, build_dir)
            _sync(build_dir)
            with self._lock(key):
                if os.path.lexists(entry):
                    try:
                        kernel = self._read(key, entry)
                        self.discard(build_dir)
                        return kernel
                    except CorruptArtifact as error:
                        self.quarantine(key, error.what)
                os.rename(build_dir, entry)
                _sync(self.kernels)
        except OSError as error:
            self.discard(build_dir)
            raise CacheError(self.explain("publish", error)) from None
        except CorruptArtifact:
            self.discard(build_dir)
            raise
        return self._read(key, entry)

    def keys(self) -> list[str]:
        return sorted(p.name for p in self.kernels.iterdir() if (p / MANIFEST_NAME).is_file())

    def size(self) -> int:
        """Bytes of all files of the cache."""
        sizes = 0
        for path in self.root.rglob("*"):
            with contextlib.suppress(OSError):  # another process removed it meanwhile
                sizes += path.stat().st_size if path.is_file() else 0
        return sizes

    def remove_stale(self, older_than: float = STALE_SECONDS) -> int:
        """Drop build directories that nobody finished within ``older_than`` seconds; returns how
        many."""
        stale = 0
        for path in self.building.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process finished it meanwhile
                if time.time() - path.lstat().st_mtime > older_than:
                    self.discard(path)
                    stale += 1
        return stale

    def clear(self) -> int:
        """Remove every entry, everything in quarantine and stale build directories; returns the
        number of entries removed."""
        removed = 0
        for key in [p.name for p in self.kernels.iterdir()]:
            doomed = self.building / f"clear-{uuid.uuid4().hex}"
            with self._lock(key):
                try:
                    os.rename(self.kernels / key, doomed)  # first out of sight, then deleted
                except FileNotFoundError:
                    continue
            self.discard(doomed)
            removed += 1
        for path in self.quarantined.iterdir():
            self.discard(path)
        self.remove_stale()
        return removed


def _sync(directory: Path) -> None:
    """Flush a directory and its files, so that a rename never becomes durable before the data it
    names."""
    for path in (*(p for p in directory.iterdir() if p.is_file()), directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
