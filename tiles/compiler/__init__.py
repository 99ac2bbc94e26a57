"""From a tile program to a kernel directory: lowering, the compilers, the host stub, lint, and the
artifact cache."""
