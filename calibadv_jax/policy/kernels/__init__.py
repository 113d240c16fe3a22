"""Kernels of attention, and products and functions in the form that XLA computes best."""
