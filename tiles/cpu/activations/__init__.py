"""Quantization of activations on CPUs."""
