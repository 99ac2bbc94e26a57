"""``gemm_any`` on planes that lie as its lanes read them, codes put together bit by bit."""

from .variant import Ideas, variant

RULE, PROGRAM = variant(__name__, Ideas.PERMUTED)
