"""The CUDA GEMM programs on a CPU: device code by the host compiler, the tile program by a stand-in for TileLang, block by block."""
