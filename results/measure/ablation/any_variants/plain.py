"""``gemm_any`` on planes as rows of bits in the order of k; codes are put together bit by bit."""

from .variant import Ideas, variant

RULE, PROGRAM = variant(__name__, Ideas.PLAIN)
