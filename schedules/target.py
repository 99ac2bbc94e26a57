"""The device: what a schedule must fit into and what a cost model divides by."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

ARCHES = ("sm_80", "sm_86", "sm_89", "sm_90a", "cpu")


def file_stem(name: str) -> str:
    """A device's name as files of its records and rows are called: "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


@dataclass(frozen=True, slots=True)
class Target:
    """A device to compile and tune for.

    ``arch`` is one of ``ARCHES``; ``name`` the product ("NVIDIA H200"). ``units`` counts SMs (CPU:
    cores that work), ``smem`` is the shared memory one block may use and ``smem_per_sm`` what one
    SM has, in bytes, ``l2`` the last cache in bytes, ``read_gbps`` the measured read rate in GB/s,
    ``mma_tflops`` the measured dense fp16 rate in TFLOP/s, ``dequant_gops`` the rate of scalar
    integer/half operations of the whole device in G/s, ``features`` the instruction sets a CPU
    kernel may use, the best first (of "avx512_bf16", "avx512_vnni", "avx512", "avx_vnni", "avx2").
    """

    arch: str
    name: str
    units: int
    smem: int
    smem_per_sm: int
    l2: int
    read_gbps: float
    mma_tflops: float
    dequant_gops: float
    features: tuple[str, ...] = ()

    # What an SM has on every arch here (CUDA C++ Programming Guide, "Technical Specifications per
    # Compute Capability").
    REGISTERS_PER_SM: ClassVar[int] = 65536
    BLOCK_SMEM: ClassVar[int] = 1024  # bytes of its shared memory that each resident block costs beyond what it asked for

    @property
    def threads_per_sm(self) -> int:
        """Of all blocks that an SM holds at once."""
        return 1536 if self.arch in ("sm_86", "sm_89") else 2048

    @property
    def blocks_per_sm(self) -> int:
        """That an SM holds at once, however small they are."""
        return {"sm_86": 16, "sm_89": 24}.get(self.arch, 32)

    def smem_alone(self, blocks: int) -> int:
        """Fewest bytes of shared memory, a multiple of 16, that a block asks for so that no more than
        ``blocks`` of its kind are on an SM at once."""
        return -(-(self.smem_per_sm // (blocks + 1) - self.BLOCK_SMEM + 1) // 16) * 16

    @property
    def is_cuda(self) -> bool:
        return self.arch.startswith("sm_")

    @property
    def capability(self) -> tuple[int, int]:
        """(major, minor) of a CUDA arch; raises ``ValueError`` on a CPU."""
        if not self.is_cuda:
            raise ValueError(f"{self.arch} has no CUDA compute capability")
        digits = re.sub(r"\D", "", self.arch)
        return int(digits[:-1]), int(digits[-1])

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "features": list(self.features)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Target:
        return cls(**{**data, "features": tuple(data["features"])})


# Rates are measured where the name is a measured device (H200: 4 GiB plain read, 8192^3 fp16
# product), vendor figures x 0.8 elsewhere. dequant_gops = SMs x 64 lanes x 2 halves x boost clock.
_KNOWN = {
    "sm_80": Target("sm_80", "NVIDIA A100", 108, 163 * 1024, 164 * 1024, 40 << 20, 1250.0, 250.0, 19490.0),
    "sm_86": Target("sm_86", "NVIDIA RTX A6000", 84, 99 * 1024, 100 * 1024, 6 << 20, 610.0, 120.0, 19350.0),
    "sm_89": Target("sm_89", "NVIDIA L40S", 142, 99 * 1024, 100 * 1024, 96 << 20, 690.0, 290.0, 45800.0),
    "sm_90a": Target("sm_90a", "NVIDIA H200", 132, 227 * 1024, 228 * 1024, 60 << 20, 4706.0, 656.0, 33450.0),
}


def _cpu_features() -> tuple[str, ...]:
    """Instruction sets that this machine's kernels may use, widest first."""
    try:
        with open("/proc/cpuinfo") as file:
            flags = set(next((line for line in file if line.startswith("flags")), "").split())
    except OSError:
        flags = set()
    found = []
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags:
        if "avx512_vnni" in flags:  # whoever has vdpbf16ps has vpdpbusd
            found += ["avx512_bf16", "avx512_vnni"] if "avx512_bf16" in flags else ["avx512_vnni"]
        found.append("avx512")
    if {"avx2", "fma", "f16c"} <= flags:
        found += ["avx_vnni", "avx2"] if "avx_vnni" in flags else ["avx2"]
    return tuple(found)


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cpu_target() -> Target:
    """This machine's processor, with the cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    features = _cpu_features()
    tflops = 0.1 if "avx512" in features else 0.05  # of one core: measured 0.1 on an AVX-512 server core
    return Target("cpu", _cpu_name(), cores, 0, 0, 32 << 20, 10.0 * cores, tflops * cores, 50.0 * cores, features)


def target_from_name(name: str) -> Target:
    """The target of an arch name ("sm_80", "sm_86", "sm_89", "sm_90a", "cpu"); needs no device.
    Raises ``ValueError`` otherwise."""
    if name == "cpu":
        return cpu_target()
    if name not in _KNOWN:
        raise ValueError(f"unknown architecture {name!r}; accepted: {', '.join(ARCHES)}")
    return _KNOWN[name]


def target_from_capability(major: int, minor: int) -> Target:
    """The target whose kernels run on a GPU of this compute capability; raises ``ValueError`` when
    there is none."""
    if (major, minor) == (9, 0):
        return _KNOWN["sm_90a"]
    if (major, minor) >= (8, 9):  # newer parts run sm_89 binaries of their own major only; say so rather than fail at load
        if (major, minor) == (8, 9):
            return _KNOWN["sm_89"]
    elif (major, minor) >= (8, 6):
        return _KNOWN["sm_86"]
    elif (major, minor) >= (8, 0):
        return _KNOWN["sm_80"]
    raise ValueError(f"compute capability {major}.{minor} is not supported; accepted: 8.0, 8.6, 8.9, 9.0 ({', '.join(ARCHES[:-1])})")


def detect_target(device: str | None = None) -> Target:
    """The target of this machine: its first NVIDIA GPU (or that of ``device``, "cuda:1"), else its
    CPU (``device="cpu"`` forces it).

    Reads names and sizes from torch when a GPU is there; the rates stay those of the arch's
    reference device.
    """
    if device == "cpu":
        return cpu_target()
    import torch  # here, because naming a target must not need torch

    if not torch.cuda.is_available():
        if device is not None and device.startswith("cuda"):
            names = ", ".join(ARCHES)
            raise ValueError(f"device is {device!r} and torch sees no GPU; accepted here: 'cpu', or an arch name to compile for ({names})")
        return cpu_target()
    index = torch.device(device or "cuda").index or 0
    properties = torch.cuda.get_device_properties(index)
    base = target_from_capability(properties.major, properties.minor)
    scale = properties.multi_processor_count / base.units
    same = properties.name == base.name
    return replace(
        base,
        name=properties.name,
        units=properties.multi_processor_count,
        l2=getattr(properties, "L2_cache_size", base.l2),
        mma_tflops=base.mma_tflops if same else base.mma_tflops * scale,
        dequant_gops=base.dequant_gops if same else base.dequant_gops * scale,
    )


def driver_version() -> str | None:
    """The NVIDIA driver's version, or None without one."""
    try:
        out = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return out.stdout.split("\n")[0].strip() or None if out.returncode == 0 else None
