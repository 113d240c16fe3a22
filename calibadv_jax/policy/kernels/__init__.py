"""What stands where a plain formula would, since a platform computes it better so.

| module | instead of | where |
|---|---|---|
| `blockwise` | attention within packed rows | `policy.attention` xla: on a CPU, or where it is asked for |
| `flash` | the same | splash on a TPU, triton on a GPU |
| `cpu_products` | `jax.lax.dot_general` of activations and weights | as `blockwise` |
| `elementwise` | RMS norm, the gate of SwiGLU, sums of products | everywhere; a CPU gains by it |

The values are those of the formula but for rounding. Nothing else here depends on the platform.
"""
