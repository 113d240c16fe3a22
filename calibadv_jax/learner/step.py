"""One training step of the learner: samples in, updated state and averaged metrics out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from calibadv_jax.config import LearnerConfig, LossConfig
from calibadv_jax.learner.batching import Batch, Sample, pack, token_weights, unpack
from calibadv_jax.learner.learner import Learner, State, on_policy_only
from calibadv_jax.learner.losses import LossFunction
from calibadv_jax.policy.transformer import Params
from calibadv_jax.trajectory import Trajectory


def make_samples(
    trajectories: Sequence[Trajectory], advantages: Sequence[np.ndarray]
) -> tuple[list[Sample], int]:
    """Prompt and response concatenated; advantages float32 [T] are those of the response.

    Returns:
        The samples that have a token to train, and how many trajectories had none or could not be finished.
    """
    samples = []
    for trajectory, advantage in zip(trajectories, advantages, strict=True):
        if not _is_trained(trajectory):
            continue
        mask = trajectory.mask
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


def _is_trained(trajectory: Trajectory) -> bool:
    return trajectory.error is None and bool(trajectory.mask.any())


def with_old_logprobs(
    learner: Learner,
    params: Params,
    samples: Sequence[Sample],
    config: LearnerConfig,
    loss_config: LossConfig,
) -> list[Sample]:
    """The samples with the log-probabilities of the policy that is about to change, if the loss needs them.

    Those that cannot change the gradient get none.
    """
    on_policy = on_policy_only(loss_config, config.minibatch_size, config.epochs)
    if loss_config.old_logprobs == "sampler" or on_policy:
        return list(samples)
    return _with_recomputed(learner, params, samples, loss_config, config.row_length)


def old_logprobs(trajectories: Sequence[Trajectory], samples: Sequence[Sample]) -> list[np.ndarray | None]:
    """Float32 [T] of each trajectory's response, 0 where not sampled; None where they were not computed.

    Args:
        samples: of the same trajectories, from `with_old_logprobs`.
    """
    remaining = iter(samples)
    known = [next(remaining).old_logprobs if _is_trained(one) else None for one in trajectories]
    return [
        None if values is None else values[len(one.prompt_ids) :]
        for one, values in zip(trajectories, known, strict=True)
    ]


class Updater(Protocol):
    """What `learn` needs of a `Learner`."""

    def update(
        self, state: State, batch: Batch, loss: LossFunction, reference: Params | None = None
    ) -> tuple[State, dict[str, float]]: ...


def learn(
    learner: Updater,
    state: State,
    samples: Sequence[Sample],
    config: LearnerConfig,
    loss_config: LossConfig,
    loss: LossFunction,
    rng: np.random.Generator,
    reference: Params | None = None,
) -> tuple[State, dict[str, float]]:
    """Goes over the step's samples, `config.epochs` times in mini-batches of `config.minibatch_size`.

    Samples without any advantage are not computed where they cannot change the gradient; they count in
    the mean all the same.

    Args:
        samples: from `with_old_logprobs`.

    Returns:
        The new state, and each metric's mean over the updates. ``actor/loss``, ``actor/pg_loss`` and
        ``actor/grad_norm`` are those of all samples, the other metrics means over the tokens that were
        computed, whose share of the weights is ``actor/computed_share``. ``actor/row_fill`` is the share of
        the packed rows that holds tokens.
    """
    size = config.minibatch_size or len(samples)
    history: list[dict[str, float]] = []
    for _ in range(config.epochs):
        order = rng.permutation(len(samples)) if size < len(samples) else np.arange(len(samples))
        for start in range(0, len(samples), size):
            chosen = [samples[index] for index in order[start : start + size]]
            batch = _packed(chosen, loss_config, config.row_length)
            state, metrics = learner.update(state, batch, loss, reference)
            filled = float(np.mean(batch.segment_ids > 0)) if batch.segment_ids.size else 0.0
            history.append(_means(metrics, float(batch.weights.sum())) | {"actor/row_fill": filled})
    means = {name: float(np.mean([metrics[name] for metrics in history])) for name in history[0]}
    return state, means | {"actor/updates": float(len(history))}


def _matters(sample: Sample, config: LossConfig) -> bool:
    """False where the sample's gradient is zero: no advantage, and no other term of the loss."""
    if config.kl_coef or config.entropy_coef:
        return True
    return bool(np.any(sample.advantages[sample.mask]))


def _packed(samples: Sequence[Sample], config: LossConfig, row_length: int) -> Batch:
    """The samples that matter in rows, each token with its share of the mean over all samples."""
    weights = token_weights(samples, config.aggregation)
    kept = [index for index, sample in enumerate(samples) if _matters(sample, config)]
    return pack([samples[index] for index in kept], row_length, weights=[weights[index] for index in kept])


def _means(metrics: dict[str, float], share: float) -> dict[str, float]:
    """An update's metrics, those that are sums of weighted values divided by the sum of the weights."""
    whole = {"actor/loss", "actor/pg_loss", "actor/grad_norm", "actor/skipped"}
    means = {name: value if name in whole or not share else value / share for name, value in metrics.items()}
    return means | {"actor/computed_share": share}


def _with_recomputed(
    learner: Learner, params: Params, samples: Sequence[Sample], config: LossConfig, row_length: int
) -> list[Sample]:
    """The samples, those that matter with the log-probabilities of the policy that is about to change."""
    kept = [index for index, sample in enumerate(samples) if _matters(sample, config)]
    chosen = [samples[index] for index in kept]
    values = learner.logprobs(params, pack(chosen, row_length))
    recomputed = unpack(values, [len(sample.tokens) for sample in chosen], row_length)
    changed = list(samples)
    for index, sample, new in zip(kept, chosen, recomputed, strict=True):
        old = np.where(sample.mask, new, 0.0).astype(np.float32)
        changed[index] = dataclasses.replace(sample, old_logprobs=old)
    return changed
