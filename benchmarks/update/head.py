"""Log-probabilities and their gradient for all tokens of a row, and for a share of them: what documents cost.

    python -m benchmarks.update.head --model FOLDER

Alternating in one process; prints the median seconds of each, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.logprobs import token_logprobs
from calibadv_jax.policy.transformer import Numerics, Params, Policy


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="HuggingFace folder; its sizes are taken")
    parser.add_argument("--length", type=int, default=2048, help="number of tokens of the row")
    parser.add_argument("--share", type=float, default=0.15, help="of the tokens, those that are trained")
    parser.add_argument("--chunk", type=int, default=1024, help="policy.logprob_chunk")
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    architecture = architecture_from_hf(json.loads((arguments.model / "config.json").read_text()))
    policy = Policy(architecture, Numerics())
    params = jax.jit(policy.init)(jax.random.key(0))
    hidden = jax.random.normal(jax.random.key(1), (1, arguments.length, architecture.hidden_size))
    targets = jax.random.randint(jax.random.key(2), (1, arguments.length), 0, architecture.vocab_size)
    trained = jax.random.uniform(jax.random.key(3), (1, arguments.length)) < arguments.share

    def gradient(params: Params, mask: jax.Array) -> tuple[Params, jax.Array]:
        def loss(params: Params, hidden: jax.Array) -> jax.Array:
            decoder = policy.merge(params)
            logprobs, _ = token_logprobs(decoder, hidden, targets, 1.0, arguments.chunk, False, mask)
            return jnp.sum(jnp.where(trained, logprobs, 0.0))

        return jax.grad(loss, argnums=(0, 1))(params, hidden)

    seconds: dict[str, list[float]] = {"all": [], "trained": []}
    masks = {"all": jnp.ones_like(trained), "trained": trained}
    compute = jax.jit(gradient)
    for repeat in range(arguments.repeat + 1):
        for name, mask in masks.items():
            begun = time.monotonic()
            jax.block_until_ready(compute(params, mask))
            if repeat:  # the first one compiles
                seconds[name].append(time.monotonic() - begun)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in medians.items():
        sys.stdout.write(f"{name}: {int(masks[name].sum())} tokens, {value:.3f} s\n")
    sys.stdout.write(f"ratio {medians['all'] / medians['trained']:.2f}\n")


if __name__ == "__main__":
    main()
