"""GEMM with packed weights: what is asked, which schedules its programs accept, and what they cost."""
