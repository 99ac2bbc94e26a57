"""A compiled kernel: its manifest, where it lies, and a call."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...runtime import LoadedKernel, load_kernel
from ...schedules.operations import AnyWorkload, workload_from_json
from ...schedules.schedule import Schedule


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """A kernel directory and its manifest. Nothing is loaded until the first call or ``load()``.

    Call it with torch tensors in the order of ``params``; it launches on torch's current stream and
    returns nothing.
    """

    path: Path
    manifest: dict[str, Any]

    @property
    def key(self) -> str:
        return self.manifest["key"]

    @property
    def resources(self) -> dict[str, Any]:
        """registers, spills, stack, smem (bytes of shared memory), threads ... as far as the
        compiler reports them."""
        return self.manifest["resources"]

    @property
    def workload(self) -> AnyWorkload:
        """What the kernel was chosen for; it serves every m, or every batch, length and q_len."""
        return workload_from_json(self.manifest["workload"])

    @property
    def schedule(self) -> Schedule:
        return Schedule.from_json(self.manifest["schedule"])

    @property
    def params(self) -> tuple[str, ...]:
        """Names of the tensors of a call, in order."""
        return tuple(p["name"] for p in self.manifest["params"])

    def load(self) -> LoadedKernel:
        """The loaded library (cached per process). Raises ``CorruptArtifact``."""
        return load_kernel(self.path)

    def __call__(self, *tensors: Any) -> None:
        self.load().run(*tensors)

    def __repr__(self) -> str:
        return f"Kernel({self.manifest['program']!r}, key={self.key[:12]!r}, path={str(self.path)!r})"
