"""Replacements of plain formulas, with the same values but for rounding.

`blockwise`: attention within packed rows in plain XLA. `flash`: the same by Splash on a TPU, Triton on a GPU.
`custom_gradients`: products (where `blockwise` is used), RMS norm, the gate of SwiGLU; a CPU gains by them.
"""
