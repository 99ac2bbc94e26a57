"""Low-bit weights: quantizers, packed tensors, modules and checkpoints."""
