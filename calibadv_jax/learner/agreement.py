"""Whether samplers compute with the weights that the learner has: both on a fixed text, after every swap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from calibadv_jax.config import LearnerConfig
from calibadv_jax.learner.batching import Sample
from calibadv_jax.learner.learner import Learner
from calibadv_jax.learner.step import sample_logprobs
from calibadv_jax.policy.transformer import Params

FIXED_TOKENS = 256


def fixed_text(vocab_size: int, max_length: int) -> np.ndarray:
    """Random tokens int32 [T], always the same ones; room is left for one that a worker samples."""
    length = min(FIXED_TOKENS, max_length - 1)
    return np.random.default_rng(0).integers(0, vocab_size, length).astype(np.int32)


def agreement(
    learner: Learner, params: Params, config: LearnerConfig, tokens: np.ndarray, theirs: Sequence[np.ndarray]
) -> dict[str, float]:
    """How far the log-probabilities of a text under each worker's weights are from the learner's.

    Args:
        tokens: int32 [T].
        theirs: float32 [T - 1] of each worker, of tokens 1 … T - 1. Without one there is nothing to compare.
    """
    if not theirs:
        return {}
    nothing = np.zeros(len(tokens), np.float32)
    sample = Sample(tokens, nothing == 0, nothing, nothing)
    (ours,) = sample_logprobs(learner, params, [sample], replace(config, row_widths=1))
    gaps = [np.abs(values - ours[1:]) for values in theirs]
    return {
        "rollout/probe_logprob_diff_mean": float(np.mean(gaps)),
        "rollout/probe_logprob_diff_max": float(np.max(gaps)),
        "rollout/workers": float(len(gaps)),
    }
