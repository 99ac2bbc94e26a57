"""Kernels that misbehave, as real shared libraries in real kernel directories: a plain C GEMM on the packed operands, and what can go
wrong with it."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from tvm_ffi import libinfo

from tilebit.layouts.packing import gemm_layout
from tilebit.schedules.gemm.workload import Workload
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileRequest, write_manifest
from tilebit.tiles.compiler.host_plan import Param
from tilebit.tiles.compiler.kernel import Kernel

# What a kernel does instead of returning the right answer ("right": nothing).
BEHAVIOURS = ("right", "hang", "segfault", "abort", "wrong", "nan", "stray", "unstable", "raise", "print", "killed", "killed_once")

_SOURCE = r"""
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <math.h>
#include <tvm/ffi/c_api.h>

static const int32_t slot_of[TILE_N * TILE_K] = {SLOTS};  /* of each element of a tile, in units of 4 bits */

static DLTensor* tensor(const TVMFFIAny* a) {
  return a->type_index == kTVMFFIDLTensorPtr ? (DLTensor*)a->v_ptr : (DLTensor*)((char*)a->v_obj + sizeof(TVMFFIObject));
}

static void* data(const TVMFFIAny* a) { return (char*)tensor(a)->data + tensor(a)->byte_offset; }

static int killed_before(void) {
  FILE* f = fopen(MARK, "r");
  if (f) { fclose(f); return 1; }
  fclose(fopen(MARK, "w"));
  return 0;
}

int __tvm_ffi_run(void* self, const TVMFFIAny* args, int32_t num_args, TVMFFIAny* result) {
  static int calls = 0;
  const _Float16 *x = data(&args[0]), *scales = data(&args[2]);
  const uint8_t* weight = data(&args[1]);
  _Float16* y = data(&args[3]);
  int64_t m = tensor(&args[0])->shape[0], k = tensor(&args[0])->shape[1], n = tensor(&args[3])->shape[1];
  int64_t tiles_k = (k + TILE_K - 1) / TILE_K, n_pad = (n + TILE_N - 1) / TILE_N * TILE_N;
  calls++;
  BEFORE
  usleep(MICROSECONDS);
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < n; j++) {
      float sum = 0;
      for (int64_t l = 0; l < k; l++) {
        int64_t tile = j / TILE_N * tiles_k + l / TILE_K;
        int64_t nibble = tile * TILE_N * TILE_K + slot_of[j % TILE_N * TILE_K + l % TILE_K];
        int code = weight[nibble / 2] >> nibble % 2 * 4 & 15;
        sum += (float)x[i * k + l] * (code - 8) * (float)scales[l / GROUP * n_pad + j];
      }
      y[i * n + j] = (_Float16)sum;
    }
  AFTER
  result->type_index = kTVMFFINone;
  result->v_int64 = 0;
  return 0;
}
"""
_BEFORE = {
    "hang": "for (;;) pause();",
    "segfault": "*(volatile int*)8 = 1;",
    "abort": 'fprintf(stderr, "heap corruption\\n"); abort();',
    "killed": "raise(SIGKILL);",
    "killed_once": "if (!killed_before()) raise(SIGKILL);",
    "raise": 'TVMFFIErrorSetRaisedFromCStr("ValueError", "x must be contiguous"); return -1;',
    "print": 'printf("{\\"event\\": \\"done\\"}\\n"); fflush(stdout);',
}
_AFTER = {
    "wrong": "y[(m - 1) * n + n / 2] += 4;",
    "nan": "y[n - 1] = NAN;",
    "stray": "y[m * n] = 0;",
    "unstable": "if (x[0] != (int)x[0]) y[0] += (_Float16)(calls % 2) * (_Float16)1e-3;",  # only on the random problem
}


@functools.cache
def _library(behaviour: str, microseconds: int, group: int, mark: str) -> bytes:
    layout = gemm_layout("cpu", 4)
    inverse = layout.inverse_order()
    include = [libinfo.find_include_path(), libinfo.find_dlpack_include_path()]
    words = {"BEFORE": _BEFORE.get(behaviour, ""), "AFTER": _AFTER.get(behaviour, ""), "MICROSECONDS": str(microseconds)}
    words |= {"SLOTS": ",".join(map(str, np.asarray(inverse))), "GROUP": str(group), "MARK": f'"{mark}"'}
    words |= {"TILE_N": str(layout.tile_n), "TILE_K": str(layout.tile_k)}
    source = _SOURCE
    for name, value in words.items():
        source = source.replace(name, value)
    with tempfile.TemporaryDirectory() as folder:
        c, so = Path(folder, "kernel.c"), Path(folder, "kernel.so")
        c.write_text(source)
        flags = [f"-I{path}" for path in include] + [f"-L{Path(libinfo.find_libtvm_ffi()).parent}", "-ltvm_ffi"]
        subprocess.run(["cc", "-O2", "-w", "-shared", "-fPIC", str(c), "-o", str(so), *flags], check=True)
        return so.read_bytes()


def publish_kernel(
    request: CompileRequest, cache: ArtifactCache, behaviour: str = "right", microseconds: int = 0, mark: Path | None = None
) -> Kernel:
    """A kernel directory for ``request`` (symmetric 4-bit, fp16, no bias) whose library behaves as told and takes about ``microseconds``
    longer. "killed_once" leaves the file ``mark`` and is right from then on."""
    found = cache.lookup(request.key)
    if found is not None:
        return found
    folder = cache.build_dir()
    w, layout = request.workload, gemm_layout("cpu", 4)
    assert isinstance(w, Workload), "a GEMM"
    group = w.k if w.format.group_size < 0 else w.format.group_size
    (folder / "kernel.so").write_bytes(_library(behaviour, microseconds, group, str(mark)))
    params = (
        Param("x", w.dtype, ("m", w.k)),
        Param("weight", "int32", layout.storage_shape(w.n, w.k)),
        Param("scales", w.dtype, (w.format.groups(w.k), layout.padded(w.n, w.k)[0])),
        Param("y", w.dtype, ("m", w.n)),
    )
    write_manifest(request, folder, {"params": [p.to_json() for p in params], "resources": {}, "lint": []})
    return cache.publish(request.key, folder)
