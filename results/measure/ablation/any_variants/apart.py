"""``gemm_any`` with a table for each lane, of single numbers."""

from .variant import Ideas, variant

RULE, PROGRAM = variant(__name__, Ideas.APART)
