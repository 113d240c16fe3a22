"""The golden answer's probability after every turn, in one packed forward pass.

A trajectory up to a turn, an answer's beginning and the golden answer are a sample, so that nothing leaks
from one into another. Equal samples are computed once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from calibadv_jax.advantages.credit import sampled_turns
from calibadv_jax.config import LearnerConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.tags import OPEN_THINK, behind_opening, neutralise
from calibadv_jax.core.trajectory import Group, Trajectory
from calibadv_jax.learner.batching import Sample
from calibadv_jax.learner.learner import Learner
from calibadv_jax.learner.step import sample_logprobs
from calibadv_jax.policy.transformer import Params
from calibadv_jax.rollout.observation import encode

PROBE_TOKENS = 64  # that stand after a turn at most; a longer golden answer is cut
BEGINNING = f"{OPEN_THINK}</think>\n<answer>"


def with_golden_logprobs(
    learner: Learner,
    policies: Mapping[str, Params],
    groups: Sequence[Group],
    config: LearnerConfig,
    tokenizer: Any,
) -> tuple[list[Group], dict[str, float]]:
    """Return copies of the groups whose turns have `golden_logprobs` under each policy, and metrics."""
    samples: dict[bytes, Sample] = {}  # by their tokens and the length of the answer
    logprobs: dict[bytes, dict[str, float]] = defaultdict(dict)  # by policy; filled below
    probed_groups: list[Group] = []
    probed: list[list[bytes]] = []  # keys of the turns of each trajectory that has probes
    for group in groups:
        if group.trajectories:  # the same for all of them; later turns continue as the second does
            continuations = [_continuation(group.trajectories[0], number, tokenizer) for number in (0, 1)]
        trajectories = []
        for trajectory in group.trajectories:
            turns, keys = list(trajectory.turns), []
            for number, prefix in enumerate(prefixes(trajectory)):
                beginning, answer = continuations[min(number, 1)]
                tokens = np.concatenate([prefix, beginning, answer])
                key = tokens.tobytes() + bytes([len(answer)])
                samples.setdefault(key, _sample(tokens, len(answer), len(trajectory.prompt_ids)))
                turns[number] = replace(turns[number], golden_logprobs=logprobs[key])
                keys.append(key)
            trajectories.append(replace(trajectory, turns=turns))
            if keys:
                probed.append(keys)
        probed_groups.append(replace(group, trajectories=trajectories))
    if any(len(sample.tokens) > config.pack_length for sample in samples.values()):
        config = replace(config, pack_length=config.pack_length + PROBE_TOKENS)
    for policy, params in policies.items():
        values = sample_logprobs(learner, params, list(samples.values()), config)
        for (key, sample), token_logprobs in zip(samples.items(), values, strict=True):
            logprobs[key][policy] = float(token_logprobs[sample.mask].mean(dtype=np.float64))
    metrics = {"advantage/golden/tokens": float(sum(len(sample.tokens) for sample in samples.values()))}
    if not probed:
        return probed_groups, metrics
    for policy in policies:
        for name, index in (("first", 0), ("last", -1)):
            mean = np.mean([np.exp(logprobs[keys[index]][policy]) for keys in probed])
            metrics[f"advantage/golden/{policy}/{name}"] = float(mean)
    return probed_groups, metrics


def prefixes(trajectory: Trajectory) -> list[np.ndarray]:
    """Return the tokens before each turn up to the last sampled one, int32 [P + …]."""
    before, parts = [], [trajectory.prompt_ids]
    for turn in sampled_turns(trajectory):
        before.append(np.concatenate(parts).astype(np.int32))
        parts += [turn.token_ids, turn.observation_ids]
    return before


def _continuation(trajectory: Trajectory, number: int, tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the beginning of an answer in a turn, and the first golden answer that has tokens; int32."""
    question = trajectory.question
    beginning = encode(tokenizer, behind_opening(trajectory.opening_of(number), BEGINNING))
    for golden in question.golden_answers:
        if answer := encode(tokenizer, f" {neutralise(golden)}")[: max(1, PROBE_TOKENS - len(beginning))]:
            return np.asarray(beginning, np.int32), np.asarray(answer, np.int32)
    raise UserError(
        f"question {question.id!r}: the tokenizer makes no token of its golden answers"
        f" {list(question.golden_answers)}: leave the question out, or choose another advantage.name"
    )


def _sample(tokens: np.ndarray, count: int, prompt: int) -> Sample:
    nothing = np.zeros(len(tokens), np.float32)
    return Sample(tokens, np.arange(len(tokens)) >= len(tokens) - count, nothing, nothing, prompt=prompt)
