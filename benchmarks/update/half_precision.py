"""CPU time of a gradient through decoder layers with adapters, in float32 and in bfloat16.

    python -m benchmarks.update.half_precision [--tokens 1024] [--layers 2] [--repeats 5]

The layers have the shape of Qwen2.5-0.5B; the vocabulary is small, since the output head is not measured. CPU
time of all threads is taken, which says the same beside other work.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from calibadv_jax.config.sections.policy import LORA_TARGETS
from calibadv_jax.policy.adapters import Adapters, merge_params
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.transformer import Numerics, Policy

SHAPE = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def gradient_seconds(dtype: str, num_tokens: int, num_layers: int, repeats: int) -> float:
    """Return the least CPU time of a gradient of the adapters, in seconds.

    Args:
        dtype: Of activations, frozen weights and operands of products.
        num_tokens: Tokens of the single row.
        num_layers: Number of layers.
        repeats: Number of timings.
    """
    architecture = architecture_from_hf(SHAPE | {"num_hidden_layers": num_layers})
    adapters = Adapters(8, 16.0, tuple(sorted(LORA_TARGETS)), dtype)
    policy = Policy(architecture, Numerics(compute_dtype=jnp.dtype(dtype)), adapters)
    frozen, trained = policy.split(policy.init(jax.random.key(0)))
    drawn = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (1, num_tokens))
    tokens = jnp.asarray(drawn, jnp.int32)
    positions = jnp.arange(num_tokens, dtype=jnp.int32)[None]
    segment_ids = jnp.ones((1, num_tokens), jnp.int32)

    def mean_state(trained: dict[str, Any]) -> jax.Array:
        decoder = policy.merge(merge_params(frozen, trained))
        return decoder(tokens, positions, segment_ids).astype(jnp.float32).mean()

    gradient = jax.jit(jax.grad(mean_state))
    jax.block_until_ready(gradient(trained))
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        jax.block_until_ready(gradient(trained))
        seconds.append(time.process_time() - start)
    return min(seconds)


def main() -> None:
    """Print a line for each dtype."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    for dtype in ("float32", "bfloat16"):
        seconds = gradient_seconds(dtype, options.tokens, options.layers, options.repeats)
        sys.stdout.write(f"{dtype}: {seconds * 1e3:.0f} ms of CPU\n")


if __name__ == "__main__":
    main()
