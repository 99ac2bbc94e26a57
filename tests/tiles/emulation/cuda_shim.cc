// The bodies of what cuda_shim.h declares, compiled once for all the device code of a run.
#include "cuda_shim.h"

#include "cuda_threads.cc"
#include "cuda_ptx.cc"
#include "cuda_wgmma.cc"

template struct tilebit_host::Float16<10, -14, 0x7c00>;
template struct tilebit_host::Float16<7, -126, 0x7f80>;
TILEBIT_ARITHMETIC(, half)
TILEBIT_ARITHMETIC(, __nv_bfloat16)

// What the compiler calls where a number is not aligned to its type (-fsanitize=alignment): on a GPU such an access ends the process.
extern "C" void __ubsan_handle_type_mismatch_v1(void*, uintptr_t) { tilebit_host::fault = "a load or store is not aligned to its type"; }
