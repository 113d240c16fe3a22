"""One training step of the learner: samples in, updated state and averaged metrics out."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.random import Generator

from calibadv_jax.config import LearnerConfig
from calibadv_jax.core.trajectory import Trajectory
from calibadv_jax.learner.batching import Arrays, Batch, Rows, Sample, row_shapes, token_weights
from calibadv_jax.learner.learner import State
from calibadv_jax.learner.objective import TOKEN_METRICS, LossFunction, PolicyLoss
from calibadv_jax.learner.prefix_sharing import PrefixSharedRows
from calibadv_jax.policy.transformer import Params

PROBE_TOKENS = 256  # Tokens on which workers and learner are compared.
# Metrics that are averaged over the updates of a step, and omitted if nothing was trained.
LOSS_TERMS = {"actor/loss", "actor/pg_loss", "actor/kl_loss", "teacher/loss"}
# Aggregations whose token weights sum to 1 over a mini-batch.
MEAN_AGGREGATIONS = ("token_mean", "sequence_mean")


def make_sample(trajectory: Trajectory, advantages: np.ndarray) -> Sample:
    """Concatenate prompt and response of a trajectory.

    Args:
        trajectory: with P tokens of the prompt and T of the response.
        advantages: of the response's tokens, [T]; converted to float32.

    Returns:
        A sample of P + T tokens, of which only those are trained that `Trajectory.trained` names.
    """
    prompt = trajectory.prompt_ids.astype(np.int32)
    zeros = np.zeros(len(prompt), np.float32)
    return Sample(
        tokens=np.concatenate([prompt, trajectory.response_ids]),
        mask=np.concatenate([zeros.astype(bool), trajectory.trained]),
        advantages=np.concatenate([zeros, advantages.astype(np.float32)]),
        logprobs=np.concatenate([zeros, trajectory.logprobs]),
        prompt=len(prompt),
        is_demonstration=trajectory.is_demonstration,
    )


class Updater(Protocol):
    """The methods of a `Learner` that `learn` calls."""

    def update(
        self,
        state: State,
        batches: Sequence[Batch],
        loss: LossFunction,
        reference: Params | None = None,
    ) -> tuple[State, dict[str, float]]:
        """Update once; see `Learner.update`.

        Args:
            state: before the update; donated.
            batches: packed rows [R, L]; none: the gradient is 0.
            loss: computes the loss of packed rows.
            reference: parameters of the KL term's policy; None: no term.

        Returns:
            The new state, and metrics.
        """
        ...

    def logprobs(self, params: Params, batch: Batch) -> np.ndarray:
        """Return log-probabilities of packed rows; see `Learner.logprobs`.

        Args:
            params: trained parameters.
            batch: packed rows [R, L].

        Returns:
            Of the targets in nats, float32 [R, L].
        """
        ...

    def position_cost(self, length: int) -> float:
        """Return the cost of one column of a row; see `Learner.position_cost`.

        Args:
            length: columns of the row.

        Returns:
            The cost, in any unit.
        """
        ...


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The result of a step.

    Attributes:
        state: after all updates.
        metrics: averaged over the updates, or over the trained tokens for TOKEN_METRICS. Empty if no sample
            has a token to train; without the loss and TOKEN_METRICS if nothing was computed.
        samples: in the given order, with recomputed `old_logprobs`. Demonstrations always have them, and
            `logprobs` equal to them.
    """

    state: State
    metrics: dict[str, float]
    samples: list[Sample]


def learn(
    learner: Updater,
    state: State,
    samples: Sequence[Sample],
    config: LearnerConfig,
    loss: PolicyLoss,
    rng: Generator,
    reference: Params | None = None,
) -> StepResult:
    """Train on the step's samples, `config.epochs` times, in mini-batches of `config.minibatch_size`.

    Samples without a token to train are ignored. Samples that cannot change the gradient, since they have no
    advantage, are not computed, but count in the mean. The ratio of a demonstration starts at 1, whatever
    `loss.old_logprobs` is: no sampler has probabilities of its tokens.

    Args:
        learner: computes log-probabilities and updates.
        state: before the step; donated.
        samples: of the step.
        config: section `learner`.
        loss: from `objective`.
        rng: draws the order of the samples, and tokens for losses that need it.
        reference: parameters of the KL term's policy; None: no term.

    Returns:
        State, metrics, and samples.

    Raises:
        ValueError: if a sample is longer than a row.
    """
    samples = list(samples)
    has_gradient = [loss.has_gradient(sample) for sample in samples]
    demonstrated = [sample.is_demonstration and bool(sample.mask.any()) for sample in samples]
    recomputed = np.array(has_gradient) & loss.recomputes | np.array(demonstrated)
    _recompute_logprobs(learner, state["params"], samples, np.flatnonzero(recomputed), config)
    history: list[dict[str, float]] = []
    counts: Counter[str] = Counter()
    for chosen in mini_batches(samples, config, rng):
        members = [samples[index] for index in chosen]
        weights = token_weights(members, loss.config.aggregation, loss.config.length_norm)
        # Samples without gradient keep their share of a mean, but are left out of every pass.
        computed: list[Sample] = []
        computed_weights: list[np.ndarray] = []
        for index, sample, sample_weights in zip(chosen, members, weights, strict=True):
            if has_gradient[index]:
                computed.append(sample)
                computed_weights.append(sample_weights)
        rows = pack_rows(learner, computed, config, computed_weights)
        batches: list[Batch] = []
        if computed:
            current = None
            if loss.definition.needs_logprobs:
                current = _row_logprobs(learner, state["params"], rows)
            batches = rows.batches(loss.factors(computed, computed_weights, current, rng))
        state, metrics = learner.update(state, batches, loss, reference)
        is_mean = loss.config.aggregation in MEAN_AGGREGATIONS
        total_weight = 1.0 if is_mean else float(sum(values.sum() for values in weights))
        history.append(metrics | _row_metrics(rows, batches, total_weight))
        counts["tokens"] += rows.tokens
        counts["positions"] += rows.positions
        counts["trained"] += sum(int(np.count_nonzero(batch.weights)) for batch in batches)
    means = _means(history, counts) if history else {}
    means.update(_demonstration_metrics(samples))
    return StepResult(state, means, samples)


def _row_metrics(rows: Rows, batches: Sequence[Batch], total_weight: float) -> dict[str, float]:
    """Return the share of the weights that is computed, and the share of the columns that hold a token."""
    computed_weight = float(sum(batch.weights.sum() for batch in batches))
    num_columns = sum(batch.tokens.size for batch in batches)
    return {
        "actor/computed_share": computed_weight / total_weight,
        "actor/row_fill": rows.computed / max(1, num_columns),
    }


def _recompute_logprobs(
    learner: Updater,
    params: Params,
    samples: list[Sample],
    indices: np.ndarray,
    config: LearnerConfig,
) -> None:
    """Replace samples by copies with the learner's log-probabilities as the ratio's denominator.

    Args:
        learner: computes log-probabilities.
        params: trained parameters before the first update.
        samples: of the step; changed in place.
        indices: of the samples to replace.
        config: section `learner`.
    """
    if not len(indices):
        return
    recomputed = sample_logprobs(learner, params, [samples[index] for index in indices], config)
    for index, logprobs in zip(indices, recomputed, strict=True):
        sample = samples[index]
        old_logprobs = np.where(sample.mask, logprobs, 0.0).astype(np.float32)
        sample = dataclasses.replace(sample, old_logprobs=old_logprobs)
        if sample.is_demonstration:
            sample = dataclasses.replace(sample, logprobs=old_logprobs)
        samples[index] = sample


def _demonstration_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the mean log-probability of the trained tokens of demonstrations, before the first update."""
    values = [np.zeros(0, np.float32)]
    for sample in samples:
        if sample.is_demonstration:
            values.append(sample.denominator[sample.mask])
    logprobs = np.concatenate(values)
    if not len(logprobs):
        return {}
    return {"demonstrations/logprob": float(logprobs.mean(dtype=np.float64))}


def sample_logprobs(
    learner: Updater, params: Params, samples: Sequence[Sample], config: LearnerConfig
) -> list[np.ndarray]:
    """Return a policy's log-probability of every token.

    Args:
        learner: computes log-probabilities.
        params: trained parameters of the policy.
        samples: with T tokens each.
        config: section `learner`, for the rows.

    Returns:
        Nats, float32 [T] for each sample, 0 at its first token. With `config.share_prefixes` tokens outside
        the mask have 0.

    Raises:
        ValueError: if a sample is longer than a row.
    """
    return _row_logprobs(learner, params, pack_rows(learner, samples, config))


def probe_tokens(vocab_size: int, max_length: int) -> np.ndarray:
    """Draw the tokens on which workers and learner are compared.

    Args:
        vocab_size: V; tokens are drawn below it.
        max_length: of a worker's sequence. One token less is drawn, since the worker samples one.

    Returns:
        int32 [T], the same in every call.
    """
    length = min(PROBE_TOKENS, max_length - 1)
    return np.random.default_rng(0).integers(0, vocab_size, length).astype(np.int32)


def logprob_mismatch(
    learner: Updater,
    params: Params,
    config: LearnerConfig,
    tokens: np.ndarray,
    worker_logprobs: Arrays,
) -> dict[str, float]:
    """Compare the log-probabilities of tokens under each worker's weights with the learner's.

    Args:
        learner: computes the learner's log-probabilities.
        params: trained parameters that the workers should have.
        config: section `learner`.
        tokens: int32 [T], from `probe_tokens`.
        worker_logprobs: float32 [T - 1] for each worker, of tokens 1 … T - 1.

    Returns:
        Metrics: mean and largest absolute difference in nats, and the number of workers. Empty without a
        worker.
    """
    if not worker_logprobs:
        return {}
    zeros = np.zeros(len(tokens), np.float32)
    sample = Sample(tokens, np.ones(len(tokens), bool), zeros, zeros)
    one_width = dataclasses.replace(config, row_widths=1)
    (logprobs,) = sample_logprobs(learner, params, [sample], one_width)
    gaps = [np.abs(values - logprobs[1:]) for values in worker_logprobs]
    return {
        "rollout/probe_logprob_diff_mean": float(np.mean(gaps)),
        "rollout/probe_logprob_diff_max": float(np.max(gaps)),
        "rollout/workers": float(len(gaps)),
    }


def _row_logprobs(learner: Updater, params: Params, rows: Rows) -> list[np.ndarray]:
    """Return the log-probabilities of packed samples, float32 [T] for each."""
    return rows.unpack([learner.logprobs(params, batch) for batch in rows.batches()])


def pack_rows(
    learner: Updater, samples: Sequence[Sample], config: LearnerConfig, weights: Arrays | None = None
) -> Rows:
    """Pack samples into rows of the config's widths.

    Args:
        learner: gives the cost of a column.
        samples: to pack.
        config: section `learner`.
        weights: float32 [T] for each sample; None: 0, for a pass that computes no loss.

    Returns:
        The rows; `PrefixSharedRows` with `config.share_prefixes`.

    Raises:
        ValueError: if a sample is longer than a row.
    """
    shapes = row_shapes(config.pack_length, config.microbatch_rows, config.row_widths, learner.position_cost)
    rows_class = PrefixSharedRows if config.share_prefixes else Rows
    return rows_class(samples, shapes, weights)


def mini_batches(samples: Sequence[Sample], config: LearnerConfig, rng: Generator) -> Iterator[np.ndarray]:
    """Yield the mini-batches of all epochs.

    Args:
        samples: of the step; those without a token to train are left out.
        config: `minibatch_size`, `shuffle` and `epochs` are read.
        rng: draws the order of each epoch, if it has more than one mini-batch.

    Yields:
        int [minibatch_size], indices of samples; the last mini-batch of an epoch may be smaller.
    """
    trained = np.flatnonzero([sample.mask.any() for sample in samples])
    if not len(trained):
        return
    groups = _shuffled_groups(samples, trained.tolist(), config)
    size = config.minibatch_size or len(trained)
    for _ in range(config.epochs):
        order = rng.permutation(len(groups)) if size < len(trained) else range(len(groups))
        indices = np.concatenate([groups[place] for place in order])
        for start in range(0, len(indices), size):
            yield indices[start : start + size]


def _shuffled_groups(
    samples: Sequence[Sample], indices: Sequence[int], config: LearnerConfig
) -> list[list[int]]:
    """Return the indices in groups that stay together: of one prompt, or of one sample."""
    if config.shuffle != "groups":
        return [[index] for index in indices]
    by_prompt: dict[bytes, list[int]] = {}
    for index in indices:
        by_prompt.setdefault(samples[index].prompt_ids.tobytes(), []).append(index)
    return list(by_prompt.values())


def _means(history: Sequence[Mapping[str, float]], counts: Mapping[str, int]) -> dict[str, float]:
    """Average the metrics of a step's updates.

    Args:
        history: metrics of each update.
        counts: tokens, computed positions and trained tokens of all updates.

    Returns:
        Means over the updates, and over the trained tokens for TOKEN_METRICS; of ``teacher/kl`` over the
        tokens that a teacher guides.
    """
    means = {"actor/updates": float(len(history))}
    names: dict[str, None] = {}  # in the order in which they first occur
    for metrics in history:
        names.update(dict.fromkeys(metrics))
    for name in names:
        is_token_metric = name in TOKEN_METRICS
        needs_trained_tokens = is_token_metric or name in LOSS_TERMS
        if needs_trained_tokens and not counts["trained"]:
            continue
        total = math.fsum(metrics.get(name, 0.0) for metrics in history)
        means[name] = total / (counts["trained"] if is_token_metric else len(history))
    if means.get("teacher/guided_share"):
        means["teacher/kl"] /= means["teacher/guided_share"]  # a mean over the guided tokens alone
    if counts["tokens"]:
        means["perf/packing"] = counts["positions"] / counts["tokens"]
    return means
