"""Packs: directories of compiled kernels that load with torch and apache-tvm-ffi alone.

A pack is ``pack.json`` (schema, versions, one row per kernel with its full key, workload, bucket of
sizes and target, sha256 of every file) and ``kernels/<key>/`` for each kernel, exactly as the
compiler published it. It is written beside its place and moved there by one rename.

A row says of its own only for which sizes the kernel is; all else in it is what the kernel's
manifest says, and is compared with it. A pack that was read opens a kernel only while its manifest
is the one that was read.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, cast

from .layouts.outside import NotInstalled
from .runtime import (
    MANIFEST_NAME,
    CorruptArtifact,
    LoadedKernel,
    check_fields,
    check_files,
    file_digest,
    load_kernel,
    read_manifest,
    read_object,
)
from .schedules.operations import AnyWorkload, operation, workload_from_json
from .schedules.target import Target

PACK_SCHEMA = 2  # kernels of 1 read bit planes in another order
PACK_NAME = "pack.json"
FIELDS: dict[str, type] = {"schema": int, "versions": dict, "kernels": list, "files": dict}
REPAIR = "copy the pack again or export it anew"


class KernelDirectory(Protocol):
    """What ``export`` needs of a kernel (``tiles.Kernel``, ``LoadedKernel`` and ``PackEntry`` have
    it)."""

    @property
    def path(self) -> Path: ...


@dataclass(frozen=True, slots=True)
class PackEntry:
    """One kernel of a pack: ``workload`` (its sizes are the bucket it serves best), ``arch``, key
    and directory, and the sha256 of its manifest."""

    key: str
    workload: AnyWorkload
    arch: str
    features: tuple[str, ...]
    path: Path
    digest: str

    def load(self) -> LoadedKernel:
        """The loaded kernel. Raises ``CorruptArtifact`` when its files are not those that were read
        with the pack."""
        try:
            return load_kernel(self.path, self.digest)
        except CorruptArtifact as error:
            raise CorruptArtifact(error.path, error.what, f"{REPAIR}, then restart the process") from None


class Pack:
    """A loaded pack. ``kernel_for(workload, m)`` gives a callable kernel; no library is opened
    before it is asked for.

    ``kernels`` are its ``PackEntry`` rows, ``versions`` those of the compilers that made them.
    """

    __slots__ = ("_by_workload", "kernels", "path", "versions")

    def __init__(self, path: Path, kernels: tuple[PackEntry, ...], versions: dict[str, Any]) -> None:
        self.path = path
        self.kernels = kernels
        self.versions = versions
        self._by_workload: dict[tuple[AnyWorkload, str], list[PackEntry]] = {}
        for entry in sorted(kernels, key=lambda e: [getattr(e.workload, size) for size in e.workload.DYNAMIC]):
            self._by_workload.setdefault((entry.workload.static(), entry.arch), []).append(entry)

    def __len__(self) -> int:
        return len(self.kernels)

    def __repr__(self) -> str:
        return f"Pack({str(self.path)!r}, kernels={len(self.kernels)})"

    @property
    def arches(self) -> tuple[str, ...]:
        return tuple(sorted({entry.arch for entry in self.kernels}))

    def entry_for(self, workload: AnyWorkload, arch: str, features: tuple[str, ...] | None = None) -> PackEntry | None:
        """The entry that serves ``workload`` best, as its operation ranks them: of a GEMM that of
        its m, else of the next larger one, else of the largest; of attention, whose kernels serve
        all sizes alike, that of the nearest ones.

        ``features`` are the instruction sets this machine has: kernels that use others are passed
        over. None: do not ask.
        """
        wanted, rank = workload.bucketed(), operation(workload.op).rank
        return min(self.entries_for(workload, arch, features), key=lambda entry: rank(entry.workload, wanted), default=None)

    def entries_for(self, workload: AnyWorkload, arch: str, features: tuple[str, ...] | None = None) -> list[PackEntry]:
        """All entries for what ``workload`` has in common with every other that one kernel serves,
        and for these ``features``."""
        entries = self._by_workload.get((workload.static(), arch), [])
        return [e for e in entries if features is None or set(e.features) <= set(features)]

    def kernel_for(self, workload: AnyWorkload, m: int | None = None, arch: str | None = None) -> LoadedKernel:
        """The loaded kernel for ``workload`` (a GEMM: at ``m`` rows, if given) on ``arch``
        (default: the pack's only one).

        Raises ``LookupError`` that says what the pack holds and how to build the kernel when there
        is none, and ``CorruptArtifact`` when its files were changed.
        """
        if arch is None:
            if len(self.arches) != 1:
                raise ValueError(f"arch is not given and the pack {self.path} holds {', '.join(self.arches)}; accepted: one of these")
            (arch,) = self.arches
        if m is not None and "m" in workload.DYNAMIC:
            workload = replace(workload, m=max(m, 1))
        entry = self.entry_for(workload, arch)
        if entry is None:
            rows = sorted({e.workload.served for e in self.kernels if e.arch == arch})
            held = ", ".join(rows[:8] + ["..."] * (len(rows) > 8)) or "none for this device"
            raise LookupError(
                f"the pack {self.path} has no kernel for {workload.served} on {arch}; it holds {held}. "
                f"To build it, where the compilers are: `{command_line('pack PATH', workload, arch)}`"
            )
        return entry.load()


def command_line(command: str, workload: AnyWorkload, arch: str) -> str:
    """The command line that does ``command`` ("compile", "pack PATH", ...) for ``workload`` on
    ``arch``."""
    return " ".join(word for word in ("tilebit", workload.COMMAND, command, workload.options(), "--target", arch) if word)


_loaded: list[Pack] = []


def loaded() -> tuple[Pack, ...]:
    """The packs that operations look into, the latest first."""
    return tuple(reversed(_loaded))


def find(workload: AnyWorkload, target: Target) -> LoadedKernel | None:
    """A kernel for ``workload`` (at its sizes) on ``target`` from the loaded packs, the latest
    first; None when none has one."""
    for pack in loaded():
        entry = pack.entry_for(workload, target.arch, target.features)
        if entry is not None:
            return entry.load()
    return None


def entries(workload: AnyWorkload, target: Target) -> list[PackEntry]:
    """All kernels among which ``find`` chooses for the workload's shape, whatever its sizes are:
    those of the latest pack that has any."""
    return next((found for pack in loaded() if (found := pack.entries_for(workload, target.arch, target.features))), [])


def unload(pack: Pack) -> None:
    """Stop looking into ``pack``; kernels that are already in use stay loaded."""
    _loaded.remove(pack)
    _forget_plans()


def _forget_plans() -> None:
    """Operations decide once which kernel serves a shape: let them decide again."""
    for name in ("dispatch", "plans"):
        dispatch = sys.modules.get(f"{__package__}.ops.{name}")
        if dispatch is not None:
            dispatch.forget()


def export(
    path: str | os.PathLike[str], kernels: Mapping[AnyWorkload, KernelDirectory] | Iterable[KernelDirectory], overwrite: bool = False
) -> Pack:
    """Write a pack of ``kernels`` to the new directory ``path`` and return it read (``load`` makes
    operations use it).

    ``kernels`` is a mapping (workload with the sizes it is for -> kernel) or an iterable of
    kernels, which then serve what they were compiled for; those of other packs
    (``read(path).kernels``) serve what they serve there: packs become one. Every kernel is checked
    before it is copied. The directory appears complete or not at all; an existing one is replaced
    only with ``overwrite``. Raises ``FileExistsError``, ``ValueError`` for no kernels,
    ``CorruptArtifact``, or ``OSError`` from the disk.
    """
    target = Path(path)
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} exists; accepted: a new directory. Choose another or pass overwrite=True")
    pairs: list[tuple[AnyWorkload | None, KernelDirectory]]
    if isinstance(kernels, Mapping):
        pairs = list(cast("Mapping[AnyWorkload, KernelDirectory]", kernels).items())
    else:
        pairs = [(kernel.workload if isinstance(kernel, PackEntry) else None, kernel) for kernel in kernels]
    if not pairs:
        raise ValueError("kernels is empty; accepted: at least one compiled kernel")
    target.parent.mkdir(parents=True, exist_ok=True)
    building = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}"
    try:
        building.mkdir()
        manifest = _write(building, pairs)
        (building / PACK_NAME).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        if target.exists():
            retired = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}"
            os.rename(target, retired)
            os.rename(building, target)
            shutil.rmtree(retired, ignore_errors=True)
        else:
            os.rename(building, target)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return read(target)


def _write(building: Path, pairs: list[tuple[AnyWorkload | None, KernelDirectory]]) -> dict[str, Any]:
    """Copy the kernel directories and return the manifest; a workload that is None is the kernel's
    own."""
    rows: dict[tuple[str, AnyWorkload], dict[str, Any]] = {}
    for served, kernel in pairs:
        manifest = read_manifest(kernel.path, kernel.digest if isinstance(kernel, PackEntry) else None)
        own = workload_from_json(manifest["workload"])
        workload = own if served is None else served
        if own.static() != workload.static():
            only = " and ".join(own.DYNAMIC)
            raise ValueError(f"the kernel {kernel.path} was compiled for {own}; accepted for {workload}: one that differs in {only} only")
        place = building / "kernels" / manifest["key"]
        if not place.exists():
            place.mkdir(parents=True)
            for name in (MANIFEST_NAME, *manifest["files"]):
                shutil.copyfile(kernel.path / name, place / name)
        rows[manifest["key"], workload] = _row(manifest, workload)
    files = sorted(p for p in building.rglob("*") if p.is_file())
    listed = {p.relative_to(building).as_posix(): {"sha256": file_digest(p), "bytes": p.stat().st_size} for p in files}
    return {
        "schema": PACK_SCHEMA,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": next(iter(rows.values()))["versions"],
        "kernels": list(rows.values()),
        "files": listed,
    }


def _row(manifest: dict[str, Any], workload: AnyWorkload) -> dict[str, Any]:
    """What ``pack.json`` says of the kernel with this manifest, which serves ``workload``."""
    same = {name: manifest[name] for name in ("target", "program", "schedule", "versions")}
    arch, path = manifest["target"]["arch"], f"kernels/{manifest['key']}"
    return {"key": manifest["key"], "workload": workload.to_json(), "arch": arch, **same, "path": path}


def load(path: str | os.PathLike[str]) -> Pack:
    """Read a pack and let operations find its kernels before they compile any; a pack read again
    replaces its earlier self.

    Raises what ``read`` raises.
    """
    pack = read(path)
    _loaded[:] = [known for known in _loaded if known.path != pack.path] + [pack]
    _forget_plans()
    return pack


def read(path: str | os.PathLike[str]) -> Pack:
    """The pack in directory ``path``, every file's sha256 compared with its manifest. Imports no
    compiler, opens no kernel.

    Raises ``FileNotFoundError`` when there is no such directory, ``CorruptArtifact`` when it is not
    a complete, unmodified pack, and ``NotInstalled`` (a ``ValueError``) when its kernels are of an
    operation or format whose package is not installed.
    """
    root = Path(path).resolve()
    if not root.is_dir():
        raise FileNotFoundError(f"there is no pack directory {path}; accepted: a directory that tilebit.packs.export wrote")
    try:
        manifest = read_object(root / PACK_NAME)
        if manifest.get("schema") != PACK_SCHEMA:
            raise CorruptArtifact(root, f"{PACK_NAME} has schema {manifest.get('schema')!r}, this version reads {PACK_SCHEMA}", REPAIR)
        check_fields(root, PACK_NAME, manifest, FIELDS)
        check_files(root, manifest["files"])
        entries = tuple(_entry(root, row, manifest["files"]) for row in manifest["kernels"])
    except CorruptArtifact as error:
        raise CorruptArtifact(root, error.what, REPAIR) from None
    return Pack(root, entries, manifest["versions"])


def _entry(root: Path, row: Any, files: dict[str, Any]) -> PackEntry:
    """The entry of a row of ``pack.json``, compared with the manifest of its kernel. Raises
    ``CorruptArtifact``, and ``NotInstalled`` of a pack with which nothing is wrong."""
    key: Any = row.get("key") if isinstance(row, dict) else None
    listed = files.get(f"kernels/{key}/{MANIFEST_NAME}")
    if not isinstance(key, str) or listed is None:
        raise CorruptArtifact(root, f"{PACK_NAME} lists no files for the kernel {key!r}")
    place = root / "kernels" / key
    manifest = read_manifest(place, listed["sha256"])
    try:
        workload, own = workload_from_json(row.get("workload")), workload_from_json(manifest["workload"])
    except NotInstalled:
        raise
    except ValueError as error:
        raise CorruptArtifact(root, f"{PACK_NAME} does not say what the kernel {key} serves ({error})") from None
    expected = _row(manifest, workload)
    differing = [name for name, value in expected.items() if row.get(name) != value]
    differing += ["workload"] * (workload.static() != own.static())
    if key != manifest["key"] or differing:
        raise CorruptArtifact(root, f"the row of kernel {key} in {PACK_NAME} is not what its manifest says: {', '.join(differing)} differ")
    features = manifest["target"].get("features")
    return PackEntry(key, workload, manifest["target"]["arch"], tuple(features), place, listed["sha256"])
