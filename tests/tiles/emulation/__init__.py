"""The CUDA GEMM programs on a CPU: their device code by the host compiler, their tile program by a stand-in for TileLang, one block at a time."""
