"""The operators of torch.ops.tilebit, and the way from a call to a launch."""
