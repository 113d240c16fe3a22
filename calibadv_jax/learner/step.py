"""One training step of the learner: samples in, updated state and averaged metrics out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from calibadv_jax.config import LearnerConfig, LossConfig
from calibadv_jax.core.trajectory import Trajectory
from calibadv_jax.learner.batching import Batch, Sample, lay, taken, token_weights, weight_total
from calibadv_jax.learner.learner import Learner, State, on_policy_only
from calibadv_jax.learner.losses import TOKEN_METRICS, LossFunction, find_loss
from calibadv_jax.learner.losses.looks import Trained
from calibadv_jax.learner.packing import Plan, RowShape, plan, row_widths, rows_at
from calibadv_jax.policy.transformer import Params

LOSS_TERMS = frozenset({"actor/loss", "actor/pg_loss", "actor/kl_loss"})


def make_samples(
    trajectories: Sequence[Trajectory], advantages: Sequence[np.ndarray]
) -> tuple[list[Sample], int]:
    """Prompt and response concatenated; advantages float32 [T] are those of the response.

    Returns:
        The samples that have a token to train, and how many trajectories had none.
    """
    samples = []
    for trajectory, advantage in zip(trajectories, advantages, strict=True):
        mask = trajectory.mask
        if not mask.any():
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
    return _with_recomputed(learner, params, samples, config, loss_config)


def sample_logprobs(
    learner: Learner, params: Params, samples: Sequence[Sample], config: LearnerConfig
) -> list[np.ndarray]:
    """Log-probability of every token, float32 [T] a sample, 0 at its first: one forward pass, packed.

    Raises:
        ValueError: a sample is longer than `config.row_length`.
    """
    found = _planned(samples, learner, config)
    nothing = [np.zeros(len(sample.tokens), np.float32) for sample in samples]
    batches = _batches(samples, nothing, found)
    return list(taken([learner.logprobs(params, batch) for batch in batches], found.placements))


def old_logprobs(trajectories: Sequence[Trajectory], samples: Sequence[Sample]) -> list[np.ndarray | None]:
    """Float32 [T] of each trajectory's response, 0 where not sampled; None where they were not computed.

    Args:
        samples: of the same trajectories, from `with_old_logprobs`.
    """
    remaining = iter(samples)
    known = [next(remaining).old_logprobs if one.mask.any() else None for one in trajectories]
    return [
        None if values is None else values[len(one.prompt_ids) :]
        for one, values in zip(trajectories, known, strict=True)
    ]


class Updater(Protocol):
    """What `learn` needs of a `Learner`."""

    def update(
        self, state: State, batches: Sequence[Batch], loss: LossFunction, reference: Params | None = None
    ) -> tuple[State, dict[str, float]]: ...

    def logprobs(self, params: Params, batch: Batch) -> np.ndarray: ...

    def position_cost(self, length: int) -> float: ...


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
        The new state, and the step's metrics. ``actor/entropy`` and the other TOKEN_METRICS are means over
        the trained tokens that were computed, whose share of the weights is ``actor/computed_share``. The
        others are means over the updates; the loss and its terms are those of all samples. Where nothing was
        computed, neither the loss nor what is a mean over tokens is there. ``actor/row_fill`` is the share of
        the packed rows that holds tokens, ``perf/packing`` the positions computed for each of those tokens.
    """
    size = config.minibatch_size or len(samples)
    history: list[dict[str, float]] = []
    positions = tokens = trained = 0
    for _ in range(config.epochs):
        order = rng.permutation(len(samples)) if size < len(samples) else np.arange(len(samples))
        for start in range(0, len(samples), size):
            chosen = [samples[index] for index in order[start : start + size]]
            weights = token_weights(chosen, loss_config.aggregation, loss_config.length_norm)
            total = weight_total(chosen, loss_config.aggregation, loss_config.length_norm)
            batches, computed = _packed(chosen, weights, learner, state["params"], config, loss_config, rng)
            state, metrics = learner.update(state, batches, loss, reference)
            held = sum(int(np.count_nonzero(batch.segment_ids)) for batch in batches)
            cells = sum(batch.tokens.size for batch in batches)
            positions, tokens = positions + computed, tokens + held
            trained += sum(int(np.count_nonzero(batch.weights)) for batch in batches)
            share = float(sum(batch.weights.sum() for batch in batches)) / total
            own = {"actor/computed_share": share, "actor/row_fill": held / cells if cells else 0.0}
            history.append(metrics | own)
    means = _means(history, trained) | {"actor/updates": float(len(history))}
    return state, means | ({"perf/packing": positions / tokens} if tokens else {})


def _matters(sample: Sample, config: LossConfig) -> bool:
    """False where the sample's gradient is zero: no advantage, and no other term of the loss."""
    if config.kl_coef or config.entropy_coef or find_loss(config.name).every_sample:
        return True
    return bool(np.any(sample.advantages[sample.mask]))


def _packed(
    samples: Sequence[Sample],
    weights: Sequence[np.ndarray],
    learner: Updater,
    params: Params,
    config: LearnerConfig,
    loss_config: LossConfig,
    rng: np.random.Generator,
) -> tuple[list[Batch], int]:
    """The samples that matter in rows, each token with its weight and the factor of the loss's look.

    Returns:
        The batches, and how many positions are computed for them.
    """
    kept = [index for index, sample in enumerate(samples) if _matters(sample, loss_config)]
    chosen, shares = [samples[index] for index in kept], [weights[index] for index in kept]
    found = _planned(chosen, learner, config)
    batches = _batches(chosen, shares, found)
    loss = find_loss(loss_config.name)
    if loss.look is None:
        return batches, sum(found.positions)
    logprobs = [sample.old_logprobs for sample in chosen]
    if loss.asks_logprobs and chosen:
        logprobs = list(taken([learner.logprobs(params, batch) for batch in batches], found.placements))
    on_policy = on_policy_only(loss_config, config.minibatch_size, config.epochs)
    factors = look(chosen, shares, logprobs, on_policy, loss_config, rng)
    return _batches(chosen, shares, found, factors), sum(found.positions)


def look(
    samples: Sequence[Sample],
    weights: Sequence[np.ndarray],
    logprobs: Sequence[np.ndarray | None],
    on_policy: bool,
    config: LossConfig,
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """The factor of every token, float32 [T] a sample, from the loss's look at the whole mini-batch.

    Args:
        logprobs: of the current policy, float32 [T] a sample; None where they were not computed.
        on_policy: the ratio's denominator is the current policy itself.
        rng: of losses that draw.
    """
    rule = find_loss(config.name).look
    factors = [np.zeros(len(sample.tokens), np.float32) for sample in samples]
    if rule is None or not any(sample.mask.any() for sample in samples):
        return factors
    old = [s.logprobs if s.old_logprobs is None else s.old_logprobs for s in samples]
    new = [one if known is None else known for one, known in zip(old, logprobs, strict=True)]

    def joined(values: Sequence[np.ndarray]) -> np.ndarray:
        pairs = zip(samples, values, strict=True)
        return np.concatenate([one[sample.mask] for sample, one in pairs]).astype(np.float64)

    advantages = joined([sample.advantages for sample in samples])
    found = rule(
        Trained(advantages, joined(weights), joined(new), joined(new if on_policy else old)), config, rng
    )
    starts = np.cumsum([0, *(int(sample.mask.sum()) for sample in samples)])
    for sample, values, start in zip(samples, factors, starts, strict=False):
        values[sample.mask] = found[start : start + int(sample.mask.sum())]
    return factors


def _planned(samples: Sequence[Sample], learner: Updater, config: LearnerConfig) -> Plan:
    longest, rows = config.row_length, config.microbatch_rows
    shapes = [
        RowShape(width, rows_at(width, rows, longest), learner.position_cost(width))
        for width in row_widths(longest, config.row_widths)
    ]
    return plan([len(sample.tokens) for sample in samples], shapes)


def _batches(
    samples: Sequence[Sample],
    weights: Sequence[np.ndarray],
    found: Plan,
    factors: Sequence[np.ndarray] | None = None,
) -> list[Batch]:
    shapes = [(rows, shape.length) for rows, shape in zip(found.num_rows, found.shapes, strict=True)]
    return lay(samples, weights, found.placements, shapes, factors)


def _means(history: Sequence[Mapping[str, float]], trained: int) -> dict[str, float]:
    """A step's metrics from those of its updates, in which so many trained tokens were computed."""
    means = {}
    for name in history[0]:
        total = math.fsum(metrics[name] for metrics in history)
        if trained or name not in TOKEN_METRICS | LOSS_TERMS:
            means[name] = total / (trained if name in TOKEN_METRICS else len(history))
    return means


def _with_recomputed(
    learner: Learner,
    params: Params,
    samples: Sequence[Sample],
    config: LearnerConfig,
    loss_config: LossConfig,
) -> list[Sample]:
    """The samples, those that matter with the log-probabilities of the policy that is about to change."""
    kept = [index for index, sample in enumerate(samples) if _matters(sample, loss_config)]
    chosen = [samples[index] for index in kept]
    recomputed = sample_logprobs(learner, params, chosen, config)
    changed = list(samples)
    for index, sample, new in zip(kept, chosen, recomputed, strict=True):
        old = np.where(sample.mask, new, 0.0).astype(np.float32)
        changed[index] = dataclasses.replace(sample, old_logprobs=old)
    return changed
