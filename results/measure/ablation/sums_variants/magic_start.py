"""Sums start at the bits of 1.5 * 2^23, which is taken away from each: one subtraction (MixLLM section 3.3)."""

from .variant import variant

FORMAT, CODEC = variant(__name__, "MAGIC_START")
