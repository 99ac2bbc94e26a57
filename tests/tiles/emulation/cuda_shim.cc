// The bodies of what cuda_shim.h declares, compiled once for all the device code of a run.
#include "cuda_shim.h"

#include "cuda_threads.cc"
#include "cuda_ptx.cc"
#include "cuda_wgmma.cc"

template struct tilebit_host::Float16<10, -14, 0x7c00>;
template struct tilebit_host::Float16<7, -126, 0x7f80>;
TILEBIT_ARITHMETIC(, half)
TILEBIT_ARITHMETIC(, __nv_bfloat16)
