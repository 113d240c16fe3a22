"""Replacements of plain formulas, with the same values but for rounding.

| module | instead of | where |
|---|---|---|
| `blockwise` | attention within packed rows | `policy.attention` xla: on a CPU, or where it is asked for |
| `flash` | the same | splash on a TPU, triton on a GPU |
| `custom_gradients` | products of activations and weights | as `blockwise` |
| `custom_gradients` | RMS norm, the gate of SwiGLU, sums of products | everywhere; a CPU gains by it |
"""
