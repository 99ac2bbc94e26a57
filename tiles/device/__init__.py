"""Device code: CUDA headers, the C around compiled kernels, and numpy twins of the CUDA functions."""
