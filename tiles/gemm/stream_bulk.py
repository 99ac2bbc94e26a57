"""``gemm_stream_bulk``: the small-m GEMM of ``stream.py`` with sm_90's bulk copies, clusters and
dependent launch."""

from ...schedules.gemm.stream import BULK
from .stream import stream_program

PROGRAM = stream_program(BULK)
