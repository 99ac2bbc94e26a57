"""Attention over a low-bit KV cache: what is asked, which schedules its programs accept, and what
they cost."""
