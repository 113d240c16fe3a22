"""Where the time of one decoded token of all slots goes in the embedded sampler on a CPU.

    taskset -c 0 python -m benchmarks.sampling.decode_step [--shape 30m] [--rows 16] [--length 1024]

Times the parts alone, each as a loop of tokens in one program: the layers with attention to so many columns
of the cache, as a program of one width and as the sampler's program that branches among eight; the output
head; and drawing the token. Random weights. Prints CPU milliseconds a token, the best of `--repeats` calls.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.device import SHAPES
from benchmarks.update.update_speed import seconds
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.attention import Cache
from calibadv_jax.policy.transformer import Numerics, Params, Policy
from calibadv_jax.sampler.engine import even_widths
from calibadv_jax.sampler.sampling import sample_tokens

TOKENS = 8  # of one call


def main() -> None:
    arguments = parse()
    policy = Policy(architecture_from_hf(SHAPES[arguments.shape]), Numerics(jnp.dtype(arguments.dtype)))
    params = jax.jit(policy.init)(jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf.astype(policy.numerics.compute_dtype), params)
    rows, widths = arguments.rows, even_widths(arguments.length)
    cache = policy.empty_cache(rows, arguments.length)
    hidden = jnp.ones((rows, policy.architecture.hidden_size), policy.numerics.compute_dtype)
    logits = jax.random.normal(jax.random.key(1), (rows, policy.architecture.vocab_size))
    parts: dict[str, Callable[[], object]] = {
        "output head": partial(jax.jit(partial(head, policy)), params, hidden),
        "drawing": partial(jax.jit(draw), logits),
    }
    for number in sorted({0, len(widths) // 2, len(widths) - 1}):
        width = widths[number]
        parts[f"layers, {width} columns"] = layers_call(policy, params, cache, [width], 0)
        parts[f"layers, {width} columns, branching"] = layers_call(policy, params, cache, widths, number)
    for name, part in parts.items():
        call = partial(finished, part)
        call()
        best = min(seconds(call)[1] for _ in range(arguments.repeats))
        sys.stdout.write(f"{name:34}{1000 * best / TOKENS:8.2f} ms\n")
        sys.stdout.flush()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sampling.decode_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="30m")
    parser.add_argument("--rows", type=int, default=16, help="number of slots")
    parser.add_argument("--length", type=int, default=1024, help="number of columns of the cache")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=4)
    return parser.parse_args()


def finished(part: Callable[[], object]) -> None:
    jax.block_until_ready(part())


def layers_call(
    policy: Policy, params: Params, cache: Cache, widths: list[int], number: int
) -> Callable[[], object]:
    """Call `layers` with a cache that is written in place, as the sampler's."""
    program = jax.jit(partial(layers, policy, widths), donate_argnums=1)
    holder = [jax.tree.map(jnp.copy, cache)]

    def call() -> object:
        tokens, holder[0] = program(params, holder[0], number)
        return tokens, holder[0]

    return call


def head(policy: Policy, params: Params, hidden: jax.Array) -> jax.Array:
    def body(_: Any, hidden: jax.Array) -> jax.Array:
        logits = policy.merge(params).logits(hidden)
        return hidden + logits[:, : hidden.shape[1]].astype(hidden.dtype)

    return jax.lax.fori_loop(0, TOKENS, body, hidden)


def draw(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows = len(logits)
    seeds, ones, zeros = jnp.arange(rows, dtype=jnp.uint32), jnp.ones(rows), jnp.zeros(rows, jnp.int32)

    def body(step: Any, last: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        changed = logits + last[0][:, None]  # else the compiler takes the softmax out of the loop
        return sample_tokens(changed, seeds, zeros + step, ones, ones, zeros, False)

    return jax.lax.fori_loop(0, TOKENS, body, (zeros, jnp.zeros(rows)))


def layers(
    policy: Policy, widths: list[int], params: Params, cache: Cache, number: Any
) -> tuple[jax.Array, Cache]:
    """Decode `tokens` tokens of every row after the first ones of the cache."""
    decoder, rows = policy.merge(params), cache[0][0].shape[1]

    def body(step: Any, carry: tuple[jax.Array, Cache]) -> tuple[jax.Array, Cache]:
        tokens, cache = carry
        positions = jnp.full((rows, 1), widths[0] // 2) + step
        hidden, cache = decoder.decode(tokens, positions, positions >= 0, cache, window=(widths, number))
        return (hidden[..., 0] > 0).astype(jnp.int32), cache

    return jax.lax.fori_loop(0, TOKENS, body, (jnp.zeros((rows, 1), jnp.int32), cache))


if __name__ == "__main__":
    main()
