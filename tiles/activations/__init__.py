"""Quantization of activations on GPUs."""
