"""Kernel directories made by hand, without a compiler of tilebit's: what the cache, the runtime and the packs handle."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import tvm_ffi.libinfo

from tilebit.layouts.formats import QuantFormat
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import AnyWorkload
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import cpu_target
from tilebit.tiles.compiler.host_stub import c_compiler

# y[i] += value for a contiguous float32 tensor y, so that a call is seen to have happened
SOURCE = """
#include <tvm/ffi/extra/c_env_api.h>
TVM_FFI_DLL_EXPORT int __tvm_ffi_run(void* self, const TVMFFIAny* args, int32_t num_args, TVMFFIAny* result) {
  const TVMFFIAny* a = &args[0];
  const DLTensor* t = (const DLTensor*)(a->type_index == kTVMFFITensor ? (char*)a->v_obj + sizeof(TVMFFIObject) : (char*)a->v_ptr);
  if (num_args != 1) { TVMFFIErrorSetRaisedFromCStr("TypeError", "one tensor, please"); return -1; }
  for (int64_t i = 0; i < t->shape[0]; ++i) ((float*)t->data)[i] += VALUE;
  return 0;
}
"""


def key_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def make_library(folder: Path, value: float = 1.0) -> Path:
    """``folder/kernel.so``, whose ``run(y)`` adds ``value`` to y."""
    include = [f"-I{tvm_ffi.libinfo.find_include_path()}", f"-I{tvm_ffi.libinfo.find_dlpack_include_path()}"]
    command = [c_compiler(), "-shared", "-fPIC", "-x", "c", f"-DVALUE={value}f", *include, "-", "-o", str(folder / "kernel.so")]
    subprocess.run(command, input=SOURCE, text=True, check=True)
    return folder / "kernel.so"


def write_manifest(folder: Path, key: Any, workload: AnyWorkload | None = None, arch: str = "cpu", **changes: Any) -> dict[str, Any]:
    """A manifest that matches the files of ``folder``; ``changes`` replace fields."""
    target = {**cpu_target().to_json(), "arch": arch, "features": ["avx2"] if arch == "cpu" else []}
    contents = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}
    files = {name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)} for name, data in contents.items()}
    manifest = {
        "schema": 1,
        "key": key,
        "program": "gemm_cpu",
        "workload": (workload or Workload(1, 64, 64, QuantFormat())).to_json(),
        "schedule": Schedule("gemm_cpu", 32, 1, 32).to_json(),
        "target": target,
        "params": [{"name": "y", "dtype": "float32", "shape": ["m"]}],
        "resources": {},
        "lint": [],
        "versions": {"apache-tvm-ffi": "0.1.12"},
        "files": files,
        **changes,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return manifest


def make_kernel(folder: Path, key: str, workload: AnyWorkload | None = None, value: float = 1.0, arch: str = "cpu") -> Path:
    """A complete kernel directory at ``folder`` (created)."""
    folder.mkdir(parents=True, exist_ok=True)
    make_library(folder, value)
    (folder / "kernel.ll").write_text("; for reading\n")
    write_manifest(folder, key, workload, arch)
    return folder
