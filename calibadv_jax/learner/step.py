"""One training step of the learner: samples in, updated state and averaged metrics out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from calibadv_jax.config import LearnerConfig, LossConfig
from calibadv_jax.learner.batching import Sample, pack, unpack
from calibadv_jax.learner.learner import Learner, State, on_policy_only
from calibadv_jax.learner.losses import LossFunction
from calibadv_jax.policy.transformer import Params
from calibadv_jax.trajectory import Trajectory


def make_samples(
    trajectories: Sequence[Trajectory], advantages: Sequence[np.ndarray]
) -> tuple[list[Sample], int]:
    """Prompt and response laid end to end; advantages float32 [T] are those of the response.

    Returns:
        The samples that have a token to train, and how many trajectories had none or could not be finished.
    """
    samples = []
    for trajectory, advantage in zip(trajectories, advantages, strict=True):
        mask = trajectory.mask
        if trajectory.error is not None or not mask.any():
            continue
        prompt = trajectory.prompt_ids.astype(np.int32)
        nothing = np.zeros(len(prompt), np.float32)
        samples.append(
            Sample(
                np.concatenate([prompt, trajectory.response_ids]),
                np.concatenate([nothing.astype(bool), mask]),
                np.concatenate([nothing, advantage.astype(np.float32)]),
                np.concatenate([nothing, trajectory.logprobs]),
            )
        )
    return samples, len(trajectories) - len(samples)


def learn(
    learner: Learner,
    state: State,
    samples: Sequence[Sample],
    config: LearnerConfig,
    loss_config: LossConfig,
    loss: LossFunction,
    rng: np.random.Generator,
    reference: Params | None = None,
) -> tuple[State, dict[str, float]]:
    """Goes over the step's samples, `config.epochs` times in mini-batches of `config.minibatch_size`.

    Returns:
        The new state, and each metric's mean over the updates.
    """
    on_policy = on_policy_only(loss_config, config.minibatch_size, config.epochs)
    if loss_config.old_logprobs == "recompute" and not on_policy:
        samples = _with_recomputed(learner, state["params"], samples, config.row_length)
    size = config.minibatch_size or len(samples)
    history: list[dict[str, float]] = []
    for _ in range(config.epochs):
        order = rng.permutation(len(samples)) if size < len(samples) else np.arange(len(samples))
        for start in range(0, len(samples), size):
            chosen = [samples[index] for index in order[start : start + size]]
            batch = pack(chosen, config.row_length, loss_config.aggregation)
            state, metrics = learner.update(state, batch, loss, reference)
            history.append(metrics)
    means = {name: float(np.mean([metrics[name] for metrics in history])) for name in history[0]}
    return state, means | {"actor/updates": float(len(history))}


def _with_recomputed(
    learner: Learner, params: Params, samples: Sequence[Sample], row_length: int
) -> list[Sample]:
    """The samples with the learner's own log-probabilities of the policy that is about to change."""
    batch = pack(samples, row_length)
    values = learner.logprobs(params, batch)
    recomputed = unpack(values, [len(sample.tokens) for sample in samples], row_length)
    return [
        dataclasses.replace(sample, old_logprobs=np.where(sample.mask, new, 0.0).astype(np.float32))
        for sample, new in zip(samples, recomputed, strict=True)
    ]
