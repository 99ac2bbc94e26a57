"""``attention_decode_bulk``: see ``decode.py``."""

from ...schedules.attention import decode as rules
from .decode import decode_program

PROGRAM = decode_program(rules.BULK)
