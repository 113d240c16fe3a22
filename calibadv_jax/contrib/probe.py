"""The probe: the golden answer's probability after every turn, in one packed forward pass.

Each sample consists of a trajectory up to a turn, the beginning of an answer and the golden answer. Samples
are separate segments of the packed rows, so that none sees another. Equal samples are computed once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from calibadv_jax.advantages.credit import sampled_turns
from calibadv_jax.config import LearnerConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.neutraliser import Neutraliser
from calibadv_jax.core.tokens import encode
from calibadv_jax.core.trajectory import Group, Question, Trajectory
from calibadv_jax.learner.batching import Sample
from calibadv_jax.learner.learner import Learner
from calibadv_jax.learner.step import sample_logprobs
from calibadv_jax.policy.transformer import Params
from calibadv_jax.rollout.tag_protocol import begin_answer_in_tags

BeginAnswer = Callable[[str], tuple[str, str]]
PROBE_TOKENS = 64  # Largest number of tokens that follow a turn; a longer golden answer is cut.


def with_golden_logprobs(
    learner: Learner,
    policies: Mapping[str, Params],
    groups: Sequence[Group],
    config: LearnerConfig,
    tokenizer: Any,
    begin_answer: BeginAnswer = begin_answer_in_tags,
) -> tuple[list[Group], dict[str, float]]:
    """Compute the golden answer's log-probability before each turn.

    It is that of the policy as it is sampled, at the learner's temperature: the chance that a trajectory
    would write the answer.

    Args:
        learner: computes log-probabilities.
        policies: name of each policy, such as "current" or "initial", and its parameters.
        groups: the groups of the step.
        config: the section `learner`. If the samples do not fit `pack_length`, rows are PROBE_TOKENS longer.
        tokenizer: a tokenizer of transformers.
        begin_answer: what stands before an answer, see `TurnProtocol.begin_answer`.

    Returns:
        Copies of the groups whose turns, up to the last sampled one, have `golden_logprobs` under each
        policy; and metrics: the number of tokens, and each policy's mean probability before the first and
        before the last sampled turn.

    Raises:
        UserError: if the tokenizer makes no token of a question's golden answers.
    """
    samples: dict[bytes, Sample] = {}
    # Golden answer's log-probability by policy, for each key of `samples`. Turns refer to these dictionaries,
    # which are filled after the forward pass.
    logprobs: dict[bytes, dict[str, float]] = defaultdict(dict)
    probed_groups: list[Group] = []
    probed: list[list[bytes]] = []  # the keys of the turns of each trajectory with sampled tokens
    for group in groups:
        trajectories = []
        for trajectory, turn_samples in zip(
            group.trajectories, _group_samples(group, tokenizer, begin_answer), strict=True
        ):
            turns = list(trajectory.turns)
            keys = []
            for number, sample in enumerate(turn_samples):
                key = _key(sample)
                samples.setdefault(key, sample)
                turns[number] = replace(turns[number], golden_logprobs=logprobs[key])
                keys.append(key)
            trajectories.append(replace(trajectory, turns=turns))
            if keys:
                probed.append(keys)
        probed_groups.append(replace(group, trajectories=trajectories))
    if any(len(sample.tokens) > config.pack_length for sample in samples.values()):
        config = replace(config, pack_length=config.pack_length + PROBE_TOKENS)
    for policy, params in policies.items():
        sample_values = sample_logprobs(learner, params, list(samples.values()), config)
        for (key, sample), token_logprobs in zip(samples.items(), sample_values, strict=True):
            logprobs[key][policy] = float(token_logprobs[sample.mask].mean(dtype=np.float64))
    num_tokens = sum(len(sample.tokens) for sample in samples.values())
    metrics = {"advantage/golden/tokens": float(num_tokens)}
    if probed:
        for policy in policies:
            first = [logprobs[keys[0]][policy] for keys in probed]
            last = [logprobs[keys[-1]][policy] for keys in probed]
            metrics[f"advantage/golden/{policy}/first"] = _mean_probability(first)
            metrics[f"advantage/golden/{policy}/last"] = _mean_probability(last)
    return probed_groups, metrics


def _mean_probability(logprobs: Sequence[float]) -> float:
    return float(np.mean([np.exp(logprob) for logprob in logprobs]))


def _group_samples(group: Group, tokenizer: Any, begin_answer: BeginAnswer) -> list[list[Sample]]:
    """Return for each trajectory of a group the samples of its turns up to the last sampled one."""
    if not group.trajectories:
        return []
    question = group.question
    continuations: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # by the opening of the turn
    samples = []
    for trajectory in group.trajectories:
        turn_samples = []
        for number, prefix in enumerate(prefixes(trajectory)):
            opening = trajectory.opening_of(number)
            if opening not in continuations:
                continuations[opening] = _continuation(question, begin_answer(opening), tokenizer)
            beginning, answer = continuations[opening]
            tokens = np.concatenate([prefix, beginning, answer])
            turn_samples.append(_sample(tokens, len(answer), len(trajectory.prompt_ids)))
        samples.append(turn_samples)
    return samples


def _key(sample: Sample) -> bytes:
    """Return a key that equal samples share: their tokens, and the length of the golden answer."""
    return sample.tokens.tobytes() + bytes([int(sample.mask.sum())])


def prefixes(trajectory: Trajectory) -> list[np.ndarray]:
    """Return the tokens before each turn up to the last sampled one.

    Returns:
        For each turn int32 [P + …]: the prompt, and all earlier turns with their observations.
    """
    token_prefixes = []
    segments = [trajectory.prompt_ids]
    for turn in sampled_turns(trajectory):
        token_prefixes.append(np.concatenate(segments).astype(np.int32))
        segments += [turn.token_ids, turn.observation_ids]
    return token_prefixes


def _continuation(
    question: Question, beginning_and_space: tuple[str, str], tokenizer: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Return the beginning of an answer in a turn, and the first golden answer that has tokens; int32."""
    text, space = beginning_and_space
    beginning = encode(tokenizer, text)
    max_answer_length = max(1, PROBE_TOKENS - len(beginning))
    for golden in question.golden_answers:
        answer = encode(tokenizer, space + Neutraliser().neutralise(golden))[:max_answer_length]
        if answer:
            return np.asarray(beginning, np.int32), np.asarray(answer, np.int32)
    raise UserError(
        f"question {question.id!r}: the tokenizer makes no token of its golden answers"
        f" {list(question.golden_answers)}: leave the question out, or choose another advantage.name"
    )


def _sample(tokens: np.ndarray, answer_length: int, prompt_length: int) -> Sample:
    """Return a sample whose mask is True on the last `answer_length` tokens, those of the golden answer."""
    zeros = np.zeros(len(tokens), np.float32)
    mask = np.arange(len(tokens)) >= len(tokens) - answer_length
    return Sample(tokens, mask, zeros, zeros, prompt=prompt_length)
