"""What a backward pass keeps of the forward pass, and what it computes again (`policy.remat`)."""

from __future__ import annotations

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

# Settings of `policy.remat`: the fastest, which takes the most memory, first.
REMATS = ("none", "dots", "attention", "full")
# Name of the output and of the softmax statistics of attention in packed rows.
ATTENTION = "attention"
_SAVE_ATTENTION = jax.checkpoint_policies.save_only_these_names(ATTENTION)
# What is saved of a layer for its backward pass beside its input. "none" saves everything.
REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _SAVE_ATTENTION
    ),
    "attention": _SAVE_ATTENTION,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def name_attention(*results: Array) -> tuple[Array, ...]:
    """Name the output and the statistics of an attention kernel, for REMAT_POLICIES.

    Args:
        results: arrays of any shape. A kernel calls this where its backward pass takes them from; named
            outside of the kernel, the kernel would run again for its statistics.

    Returns:
        The same arrays; outside of `jax.checkpoint` the name has no effect.
    """
    return tuple(checkpoint_name(result, ATTENTION) for result in results)
