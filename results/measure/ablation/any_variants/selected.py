"""``gemm_any`` with codes made by selecting bits, which are looked up in one table a row."""

from .variant import Ideas, variant

RULE, PROGRAM = variant(__name__, Ideas.SELECTED)
