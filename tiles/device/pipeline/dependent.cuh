// Programmatic dependent launch (sm_90): both are no-ops in a kernel that was launched without it,
// and on older devices.
#pragma once
#if !defined(TILEBIT_HOST_EMULATION) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define TILEBIT_DEPENDENT_LAUNCH
#endif

namespace tilebit {

// The next kernel of the stream may start, if it was launched to do so: it waits itself before it
// touches what this one writes.
__device__ __forceinline__ void launch_dependents() {
#ifdef TILEBIT_DEPENDENT_LAUNCH
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns when the kernels before this one have finished and what they wrote can be read.
__device__ __forceinline__ void wait_for_predecessor() {
#ifdef TILEBIT_DEPENDENT_LAUNCH
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace tilebit
