// What the device headers need of CUDA, for a host compiler. Inline PTX arrives here as calls of ptx_* functions (ptx.py).
#pragma once
#define TILEBIT_HOST_EMULATION
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static  // of one block: no two blocks whose code has such a variable run at once

// clang-format off
#include "cuda_numbers.h"
#include "cuda_threads.h"
#include "cuda_ptx.h"
#include "cuda_wgmma.h"
#include "cuda_tilelang.h"
// clang-format on
