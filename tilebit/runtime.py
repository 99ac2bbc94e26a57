"""Load compiled kernels: a directory with ``manifest.json`` and ``kernel.so``, checked before it is
opened. Imports no compiler.

A leaf: it needs torch and apache-tvm-ffi only, and nothing else of this package, so that kernels
run where the compilers cannot be installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA = 1
MANIFEST_NAME = "manifest.json"
LIBRARY_NAME = "kernel.so"
REQUIRED_FIELDS = ("schema", "key", "program", "workload", "schedule", "target", "params", "resources", "lint", "versions", "files")


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
_digests: dict[tuple[str, int, int, int], str] = {}
_loaded: dict[str, tuple[tuple[int, int, int], LoadedKernel]] = {}


def file_digest(path: Path) -> str:
    """sha256 of a file in hex, computed once per process while its inode, size and modification
    time stay the same."""
    stat = path.stat()
    stamp = (str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns)
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
        except OSError as error:
            raise CorruptArtifact(directory, f"{name} cannot be read ({error.strerror})") from None
        except (KeyError, TypeError):
            raise CorruptArtifact(directory, f"the manifest's entry for {name} has no bytes and sha256") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from ``path``; raises ``CorruptArtifact`` when it is missing, torn or no
    object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CorruptArtifact(path.parent, f"there is no {path.name}") from None
    except (OSError, ValueError) as error:
        raise CorruptArtifact(path.parent, f"{path.name} is not readable JSON ({error})") from None
    if not isinstance(data, dict):
        raise CorruptArtifact(path.parent, f"{path.name} holds a {type(data).__name__}, not an object")
    return data


def read_manifest(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a kernel directory with every file's digest checked. Raises
    ``CorruptArtifact``; opens no library."""
    root = Path(directory)
    manifest = read_json(root / MANIFEST_NAME)
    missing = [name for name in REQUIRED_FIELDS if name not in manifest]
    if missing:
        raise CorruptArtifact(root, f"{MANIFEST_NAME} lacks {', '.join(missing)}")
    if manifest["schema"] != SCHEMA:
        raise CorruptArtifact(
            root, f"{MANIFEST_NAME} has schema {manifest['schema']!r}, this version reads {SCHEMA}", "compile it again with this version"
        )
    if LIBRARY_NAME not in manifest["files"]:
        raise CorruptArtifact(root, f"its manifest does not list {LIBRARY_NAME}")
    check_files(root, manifest["files"])
    return manifest


def load_kernel(directory: str | os.PathLike[str]) -> LoadedKernel:
    """Check a kernel directory and load its library, once per process and file.

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
    if known is not None and known[0] == stamp:
        return known[1]
    manifest = read_manifest(root)
    if known is not None:  # the loader would hand out the library that is already open under this name
        if known[1].manifest["key"] != manifest["key"]:
            raise CorruptArtifact(root, "another kernel took its place while this process was using it", "restart the process")
        with _lock:
            _loaded[str(root)] = (stamp, known[1])  # equal keys mean equal kernels
        return known[1]

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
        _loaded[str(root)] = (stamp, kernel)
    return kernel
