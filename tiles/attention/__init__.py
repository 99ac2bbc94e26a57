"""Attention over a low-bit KV cache: decode, append, gather and prefill."""
