"""``gemm_any`` with codes made by transposing matrices of 8 x 8 bits."""

from .variant import Ideas, variant

RULE, PROGRAM = variant(__name__, Ideas.TURNED)
