"""One training step of the learner: samples in, updated state and averaged metrics out."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.random import Generator

from calibadv_jax.config import LearnerConfig
from calibadv_jax.core.trajectory import Trajectory
from calibadv_jax.learner.batching import (
    Arrays,
    Batch,
    PrefixSharedRows,
    Rows,
    Sample,
    row_shapes,
    token_weights,
)
from calibadv_jax.learner.learner import State
from calibadv_jax.learner.losses import TOKEN_METRICS, LossFunction, PolicyLoss
from calibadv_jax.policy.transformer import Params

FIXED_TOKENS = 256
LOSS_TERMS = {"actor/loss", "actor/pg_loss", "actor/kl_loss"}


def make_sample(trajectory: Trajectory, advantages: np.ndarray) -> Sample:
    """Concatenate prompt and response; advantages are float32 [T] of the response."""
    prompt = trajectory.prompt_ids.astype(np.int32)
    zeros = np.zeros(len(prompt), np.float32)
    return Sample(
        np.concatenate([prompt, trajectory.response_ids]),
        np.concatenate([zeros.astype(bool), trajectory.mask]),
        np.concatenate([zeros, advantages.astype(np.float32)]),
        np.concatenate([zeros, trajectory.logprobs]),
        prompt=len(prompt),
    )


class Updater(Protocol):
    """The methods of a `Learner` that `learn` calls."""

    def update(
        self, state: State, batches: Sequence[Batch], loss: LossFunction, reference: Params | None = None
    ) -> tuple[State, dict[str, float]]: ...
    def logprobs(self, params: Params, batch: Batch) -> np.ndarray: ...
    def position_cost(self, length: int) -> float: ...


@dataclasses.dataclass(frozen=True)
class Learned:
    """The result of a step; the loss and TOKEN_METRICS are omitted if nothing was computed."""

    state: State
    metrics: dict[str, float]  # empty if no sample has a token to train
    samples: list[Sample]  # in the given order, with recomputed `old_logprobs`


def learn(
    learner: Updater,
    state: State,
    samples: Sequence[Sample],
    config: LearnerConfig,
    loss: PolicyLoss,
    rng: Generator,
    reference: Params | None = None,
) -> Learned:
    """Train on the step's samples, `config.epochs` times in mini-batches of `config.minibatch_size`.

    Samples without a token to train count nowhere. Samples that cannot change the gradient, since they have
    no advantage, are not computed, but count in the mean.
    """
    aggregation = loss.config.aggregation
    samples, is_moving = list(samples), [loss.has_gradient(sample) for sample in samples]
    moving = np.flatnonzero(is_moving)  # samples that change nothing are left out of every pass
    if loss.recomputes and len(moving):
        recomputed = sample_logprobs(learner, state["params"], [samples[index] for index in moving], config)
        for index, values in zip(moving, recomputed, strict=True):
            old = np.where(samples[index].mask, values, 0.0).astype(np.float32)
            samples[index] = dataclasses.replace(samples[index], old_logprobs=old)
    history: list[dict[str, float]] = []
    counts: Counter[str] = Counter()
    for chosen in mini_batches(samples, config, rng):
        members = [samples[index] for index in chosen]
        weights = token_weights(members, aggregation, loss.config.length_norm)
        places = [place for place, index in enumerate(chosen) if is_moving[index]]
        computed = [members[place] for place in places]
        computed_weights = [weights[place] for place in places]
        rows = packed(learner, computed, config, computed_weights)
        current = None
        if loss.definition.needs_logprobs and computed:
            current = _logprobs(learner, state["params"], rows)
        batches = []
        if computed:
            batches = rows.batches(loss.factors(computed, computed_weights, current, rng))
        state, metrics = learner.update(state, batches, loss, reference)
        is_mean = aggregation in ("token_mean", "sequence_mean")  # whose weights sum to 1
        total = 1.0 if is_mean else float(sum(values.sum() for values in weights))
        share = float(sum(batch.weights.sum() for batch in batches)) / total
        fill = rows.computed / max(1, sum(batch.tokens.size for batch in batches))
        history.append(metrics | {"actor/computed_share": share, "actor/row_fill": fill})
        counts["tokens"] += rows.tokens
        counts["positions"] += rows.positions
        counts["trained"] += sum(int(np.count_nonzero(batch.weights)) for batch in batches)
    return Learned(state, _means(history, counts) if history else {}, samples)


def sample_logprobs(
    learner: Updater, params: Params, samples: Sequence[Sample], config: LearnerConfig
) -> list[np.ndarray]:
    """Return a policy's log-probability of every token, float32 [T] of each sample, 0 at its first.

    With `config.share_prefixes` tokens outside the mask have 0. ValueError if a sample exceeds a row.
    """
    return _logprobs(learner, params, packed(learner, samples, config))


def probe_tokens(vocab_size: int, max_length: int) -> np.ndarray:
    """Draw tokens int32 [T], always the same ones, with room for one that a worker samples."""
    length = min(FIXED_TOKENS, max_length - 1)
    return np.random.default_rng(0).integers(0, vocab_size, length).astype(np.int32)


def logprob_mismatch(
    learner: Updater, params: Params, config: LearnerConfig, tokens: np.ndarray, worker_logprobs: Arrays
) -> dict[str, float]:
    """Compare the log-probabilities of tokens int32 [T] under each worker's weights with the learner's.

    `worker_logprobs`: float32 [T - 1] of each worker, of tokens 1 … T - 1. No metrics without a worker.
    """
    if not worker_logprobs:
        return {}
    zeros = np.zeros(len(tokens), np.float32)
    sample = Sample(tokens, np.ones(len(tokens), bool), zeros, zeros)
    (logprobs,) = sample_logprobs(learner, params, [sample], dataclasses.replace(config, row_widths=1))
    gaps = [np.abs(values - logprobs[1:]) for values in worker_logprobs]
    return {
        "rollout/probe_logprob_diff_mean": float(np.mean(gaps)),
        "rollout/probe_logprob_diff_max": float(np.max(gaps)),
        "rollout/workers": float(len(gaps)),
    }


def _logprobs(learner: Updater, params: Params, rows: Rows) -> list[np.ndarray]:
    return rows.by_sample([learner.logprobs(params, batch) for batch in rows.batches()])


def packed(
    learner: Updater, samples: Sequence[Sample], config: LearnerConfig, weights: Arrays | None = None
) -> Rows:
    """Pack samples into rows of the config's widths; `weights` as in `Rows`."""
    shapes = row_shapes(config.pack_length, config.microbatch_rows, config.row_widths, learner.position_cost)
    return (PrefixSharedRows if config.share_prefixes else Rows)(samples, shapes, weights)


def mini_batches(samples: Sequence[Sample], config: LearnerConfig, rng: Generator) -> Iterator[np.ndarray]:
    """Yield indices of samples with a token to train, `config.minibatch_size` at a time, each epoch."""
    trained = np.flatnonzero([sample.mask.any() for sample in samples])
    if not len(trained):
        return
    by_key: dict[Any, list[int]] = {}  # indices that stay together
    for index in trained.tolist():
        key = samples[index].prompt_ids.tobytes() if config.shuffle == "groups" else index
        by_key.setdefault(key, []).append(index)
    groups, size = list(by_key.values()), config.minibatch_size or len(trained)
    for _ in range(config.epochs):
        order = rng.permutation(len(groups)) if size < len(trained) else range(len(groups))
        indices = np.concatenate([groups[place] for place in order])
        for start in range(0, len(indices), size):
            yield indices[start : start + size]


def _means(history: Sequence[Mapping[str, float]], counts: Mapping[str, int]) -> dict[str, float]:
    means = {"actor/updates": float(len(history))}
    for name in {name: None for metrics in history for name in metrics}:
        total = math.fsum(metrics.get(name, 0.0) for metrics in history)
        if counts["trained"] or name not in TOKEN_METRICS | LOSS_TERMS:
            means[name] = total / (counts["trained"] if name in TOKEN_METRICS else len(history))
    return means | ({"perf/packing": counts["positions"] / counts["tokens"]} if counts["tokens"] else {})
