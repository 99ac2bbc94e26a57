"""The KV cache: its memory, its sequences and the batches that kernels read."""
