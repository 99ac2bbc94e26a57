"""The packed-weight GEMM on CPUs."""
