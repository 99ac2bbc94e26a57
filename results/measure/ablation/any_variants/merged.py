"""``gemm_any`` with all its tables in shared memory, those of up to 4 bits of pairs."""

from .variant import Ideas, variant

RULE, PROGRAM = variant(__name__, Ideas.MERGED)
