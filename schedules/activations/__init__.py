"""Quantization of activations: what is asked, which schedules its programs accept, and what they
cost."""
