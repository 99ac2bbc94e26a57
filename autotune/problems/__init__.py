"""What the tuner measures: operands for each operation, and the gate that a kernel passes before it is timed."""
