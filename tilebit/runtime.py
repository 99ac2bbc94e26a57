"""Load compiled kernels: a directory with ``manifest.json`` and ``kernel.so``, checked before it is
opened. Imports no compiler.

A leaf: it needs torch and apache-tvm-ffi only, and nothing else of this package but the reader of
JSON, so that kernels run where the compilers cannot be installed.
"""

from __future__ import annotations

import hashlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .json_reader import JsonError, read_json

SCHEMA = 1
MANIFEST_NAME = "manifest.json"
LIBRARY_NAME = "kernel.so"
REQUIRED_FIELDS: dict[str, type] = {
    "schema": int, "key": str, "program": str, "workload": dict, "schedule": dict, "target": dict, "params": list, "resources": dict,
    "lint": list, "versions": dict, "files": dict,
}  # fmt: skip
TARGET_FIELDS: dict[str, type] = {"arch": str, "features": list}
_JSON_WORDS = {int: "a whole number", str: "a string", dict: "an object", list: "a list"}


class CorruptArtifact(Exception):
    """A kernel directory or pack does not hold what its manifest says. ``path`` is the directory,
    ``what`` the finding."""

    def __init__(self, path: str | os.PathLike[str], what: str, do: str = "delete the directory and compile the kernel again") -> None:
        super().__init__(f"{path}: {what}; accepted: a complete, unmodified kernel directory. To repair: {do}")
        self.path = Path(path)
        self.what = what


@dataclass(frozen=True, slots=True, eq=False)
class LoadedKernel:
    """A kernel ready to run. Calling it with torch tensors in the order of ``params`` launches it
    on torch's current stream.

    ``run`` is the bare tvm_ffi function (no Python in between), ``prepare`` loads a CUDA kernel
    onto a device before its first call. ``run_dependent`` is ``run`` with programmatic dependent
    launch: the kernel may start while the preceding kernel of the stream still runs, requests
    everything but x at once, and touches x and y when that kernel has ended. None where the kernel
    has no such launch.
    """

    path: Path
    manifest: dict[str, Any]
    run: Any
    module: Any
    run_dependent: Any = None

    @property
    def params(self) -> tuple[str, ...]:
        return tuple(p["name"] for p in self.manifest["params"])

    def __call__(self, *tensors: Any) -> None:
        self.run(*tensors)

    def prepare(self, device: int = 0) -> None:
        """Load the kernel onto CUDA device ``device`` now, for example before a graph is captured.
        A CPU kernel needs none."""
        if str(self.manifest["target"]["arch"]).startswith("sm_"):
            self.module["prepare"](device)


_lock = threading.Lock()
_digests: dict[tuple[str, int, int, int, int], str] = {}
# Of a directory its library's inode, size and time, its manifest's digest, and the kernel.
_loaded: dict[str, tuple[tuple[int, int, int], str, LoadedKernel]] = {}


def file_digest(path: Path) -> str:
    """sha256 of a file in hex, computed once per process while its inode, size and times stay the
    same: that of its modification can be set by anyone, that of its change cannot."""
    stat = path.stat()
    stamp = (str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    with _lock:
        known = _digests.get(stamp)
    if known is None:
        with path.open("rb") as file:
            known = hashlib.file_digest(file, "sha256").hexdigest()
        with _lock:
            _digests[stamp] = known
    return known


def check_files(directory: Path, files: Any) -> None:
    """Compare every file listed in ``files`` ({name: {"sha256", "bytes"}}, names relative to
    ``directory``) with what is on disk.

    Raises ``CorruptArtifact`` naming the first file that is missing, of another length or of other
    content.
    """
    if not isinstance(files, dict) or not files:
        raise CorruptArtifact(directory, "its manifest lists no files")
    for name, expected in files.items():
        parts = Path(name).parts
        if os.path.isabs(name) or ".." in parts or not parts:
            raise CorruptArtifact(directory, f"its manifest lists the file name {name!r}, which leaves the directory")
        path = directory / name
        try:
            size = path.stat().st_size
            if size != expected["bytes"]:
                raise CorruptArtifact(directory, f"{name} has {size} bytes where the manifest says {expected['bytes']}")
            if file_digest(path) != expected["sha256"]:
                raise CorruptArtifact(directory, f"the sha256 of {name} is not the manifest's")
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            raise CorruptArtifact(directory, f"{name} cannot be read ({getattr(error, 'strerror', error)})") from None
        except (KeyError, TypeError):
            raise CorruptArtifact(directory, f"the manifest's entry for {name} has no bytes and sha256") from None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object of a kernel directory's or pack's file ``path``. Raises ``CorruptArtifact``
    when it is missing or cannot be read."""
    try:
        return read_json(path)
    except FileNotFoundError:
        raise CorruptArtifact(path.parent, f"there is no {path.name}") from None
    except (OSError, JsonError) as error:
        raise CorruptArtifact(path.parent, f"{path.name} is not readable JSON: {error}") from None


def check_fields(directory: Path, name: str, data: dict[str, Any], wanted: dict[str, type]) -> None:
    """Compare the fields of ``data``, which ``directory / name`` holds, with the types ``wanted``.
    Raises ``CorruptArtifact`` for those that are missing and those that are of another type."""
    missing = [field for field in wanted if field not in data]
    if missing:
        raise CorruptArtifact(directory, f"{name} lacks {', '.join(missing)}")
    for field, kind in wanted.items():
        if type(data[field]) is not kind:
            raise CorruptArtifact(directory, f"{field} in {name} is a {type(data[field]).__name__} where {_JSON_WORDS[kind]} belongs")


def read_manifest(directory: str | os.PathLike[str], digest: str | None = None) -> dict[str, Any]:
    """The manifest of a kernel directory with every file's digest checked. ``digest`` is the sha256
    that the manifest itself must have (None: any), which ties it to whatever lists it. Raises
    ``CorruptArtifact``; opens no library."""
    root = Path(directory)
    manifest = read_object(root / MANIFEST_NAME)
    if digest is not None and file_digest(root / MANIFEST_NAME) != digest:
        raise CorruptArtifact(root, "another kernel, or a changed manifest, took its place after its pack was read")
    check_fields(root, MANIFEST_NAME, manifest, REQUIRED_FIELDS)
    if manifest["schema"] != SCHEMA:
        raise CorruptArtifact(
            root, f"{MANIFEST_NAME} has schema {manifest['schema']!r}, this version reads {SCHEMA}", "compile it again with this version"
        )
    check_fields(root, f"target in {MANIFEST_NAME}", manifest["target"], TARGET_FIELDS)
    names = [*manifest["target"]["features"], *(p.get("name") if isinstance(p, dict) else None for p in manifest["params"])]
    if not all(isinstance(name, str) for name in names):
        raise CorruptArtifact(root, f"the target's features or the params in {MANIFEST_NAME} have no names")
    if LIBRARY_NAME not in manifest["files"]:
        raise CorruptArtifact(root, f"its manifest does not list {LIBRARY_NAME}")
    check_files(root, manifest["files"])
    return manifest


def load_kernel(directory: str | os.PathLike[str], digest: str | None = None) -> LoadedKernel:
    """Check a kernel directory and load its library, once per process and file. ``digest``: see
    ``read_manifest``.

    Digests are compared before the library is opened: a truncated shared object would kill the
    process. Raises ``CorruptArtifact``.
    """
    root = Path(directory).resolve()
    library = root / LIBRARY_NAME
    try:
        stat = library.stat()
    except OSError:
        stat = None
    stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns) if stat else (0, 0, 0)
    with _lock:
        known = _loaded.get(str(root))
    if known is not None and known[0] == stamp and digest in (None, known[1]):
        return known[2]
    manifest = read_manifest(root, digest)
    present = file_digest(root / MANIFEST_NAME)
    if known is not None:  # the loader would hand out the library that is already open under this name
        if known[2].manifest["key"] != manifest["key"]:
            raise CorruptArtifact(root, "another kernel took its place while this process was using it", "restart the process")
        with _lock:
            _loaded[str(root)] = (stamp, present, known[2])  # equal keys mean equal kernels
        return known[2]

    import torch  # noqa: F401  before tvm_ffi, which then exchanges tensors and streams with it
    import tvm_ffi

    try:
        module = tvm_ffi.load_module(str(library))
        run = module["run"]
        dependent = module["run_dependent"] if module.implements_function("run_dependent") else None
    except (OSError, RuntimeError, AttributeError) as error:
        raise CorruptArtifact(root, f"{LIBRARY_NAME} does not load here ({error})", "compile the kernel on this machine") from None
    kernel = LoadedKernel(root, manifest, run, module, dependent)
    with _lock:
        _loaded[str(root)] = (stamp, present, kernel)
    return kernel
