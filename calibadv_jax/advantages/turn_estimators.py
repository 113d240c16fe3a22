"""Estimators that give turns, or tokens, credit of their own, in groups of whole trajectories.

docs/credit.md has their formulas and sources.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from calibadv_jax.advantages.credit import ByToken, sampled_turns, search_turns
from calibadv_jax.advantages.silver import judge_turns, silver_documents
from calibadv_jax.advantages.steps import (
    EPSILON,
    ByTurn,
    Estimate,
    OfGroup,
    beside_grpo,
    by_number,
    each_turn,
    grpo,
    is_tied,
    mean_and_std,
    scored_group,
    standardised,
    to_go,
    whiten,
)
from calibadv_jax.core.answers import holds_answer
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Group, Trajectory

if TYPE_CHECKING:
    from calibadv_jax.config import AdvantageConfig

_READERS = {"current": "igpo and a2tgpo", "initial": "tips"}  # of the log-probabilities under this policy
_FOUND_SHARE = 0.7  # querygroup: of a search's advantage; the rest is its trajectory's
_NOTHING_FOUND = 1e-6  # querygroup: correctness of a search that found nothing new


def _gigpo(group: Group, config: AdvantageConfig) -> ByTurn:
    """Compare discounted scores among turns before which the environment showed the same."""
    returns, states = [], []
    for trajectory in group.trajectories:
        turns = sampled_turns(trajectory)
        score = np.zeros(len(turns))
        score[-1:] = trajectory.answer_score
        returns.append(to_go(score, config.discount))
        states.append([None, *(turn.observation_ids.tobytes() for turn in turns[:-1])][: len(turns)])
    return standardised(returns, states, config)


def _mt_grpo(group: Group, config: AdvantageConfig) -> ByTurn:
    """Compare among turns of one number whether a turn shows a golden answer."""
    golden = group.question.golden_answers
    rewards = [
        np.array(
            [
                float(any(holds_answer(f"{page.title}\n{page.text}", golden) for page in turn.documents))
                for turn in sampled_turns(trajectory)[:-1]
            ]
        )
        for trajectory in group.trajectories
    ]
    return by_number(rewards, config)


def _stepsearch(group: Group, config: AdvantageConfig) -> ByTurn:
    """Compare gain less redundancy of a turn and of those after it, among turns of one number.

    Targets are the passages that the question names, or else the silver documents.
    """
    targets = set(group.question.supporting_ids or silver_documents(group, config.silver_threshold))
    rewards = [_gain_less_redundancy(trajectory, targets) for trajectory in group.trajectories]
    return by_number([to_go(turns, config.discount) for turns in rewards], config)


def _gain_less_redundancy(trajectory: Trajectory, targets: Collection[str]) -> np.ndarray:
    """Return by turn the share of the targets that is new, less the share of its documents that is not."""
    seen: set[str] = set()
    rewards = []
    for turn in sampled_turns(trajectory)[:-1]:
        shown = {document.id for document in turn.documents}
        gain = len((shown - seen) & set(targets)) / max(1, len(targets))
        rewards.append(gain - len(shown & seen) / max(1, len(shown)))
        seen |= shown
    return np.array(rewards)


def _a2tgpo(group: Group, config: AdvantageConfig) -> ByTurn:
    """Compare gains among turns of one number; divide sums over later turns by the root of their number."""
    logprobs = [_golden_logprobs(trajectory, "current") for trajectory in group.trajectories]
    gains = by_number([np.diff(np.exp(turns)) for turns in logprobs], config)
    return [to_go(turns, config.discount) / np.sqrt(np.arange(len(turns), 0, -1)) for turns in gains]


def _tips(group: Group, config: AdvantageConfig) -> ByTurn:
    """Compare among turns of one number how much a turn and those after it raise the potential."""
    gains = [np.diff(_golden_logprobs(trajectory, "initial")) for trajectory in group.trajectories]
    return by_number([to_go(turns, config.discount) for turns in gains], config)


gigpo = beside_grpo(_gigpo)
mt_grpo = beside_grpo(_mt_grpo)
stepsearch = beside_grpo(_stepsearch)
a2tgpo = beside_grpo(_a2tgpo)
tips = beside_grpo(_tips)


def igpo(groups: Sequence[Group], config: AdvantageConfig) -> Estimate:
    """Standardise the gains of all turns and the scores of a group together; sum over later turns."""
    return [_igpo(group, config) for group in groups]


def _igpo(group: Group, config: AdvantageConfig) -> ByTurn:
    rewards = []
    for trajectory, score in zip(group.trajectories, scored_group(group).scores, strict=True):
        logprobs = _golden_logprobs(trajectory, "current")
        rewards.append(np.append(np.diff(np.exp(logprobs)), score)[: len(logprobs)])
    spread = standardised(rewards, [[0] * len(turns) for turns in rewards], config)
    advantages = [np.zeros(len(trajectory.turns)) for trajectory in group.trajectories]
    for values, own in zip(advantages, spread, strict=True):
        values[: len(own)] = to_go(own, config.discount)
    return advantages


def _golden_logprobs(trajectory: Trajectory, policy: str) -> np.ndarray:
    """Return the golden answer's log-probability before each sampled turn, float64 [n]; up to 0.

    Raises:
        UserError: a log-probability was not kept.
    """
    logprobs = [turn.golden_logprobs.get(policy) for turn in sampled_turns(trajectory)]
    if None in logprobs:
        raise UserError(
            f"question {trajectory.question.id!r}: the golden answer's log-probabilities under the {policy}"
            f" policy were not kept, and {_READERS[policy]} cannot do without: train with"
            f" advantage.probes='[{policy}]', or choose another advantage.name"
        )
    return np.array(logprobs, np.float64)


def querygroup(groups: Sequence[Group], config: AdvantageConfig) -> Estimate:
    """Give a judged search 0.7 × (correctness - mean) / (std + 1e-6) + 0.3 × its trajectory's advantage.

    Mean and standard deviation are over the judged searches of the group, where there are two or more.
    Other turns get their trajectory's advantage, which is GRPO's. By CalibAdv's authors.
    """
    whole = grpo(groups, config)
    return [_querygroup(group, values, config) for group, values in zip(groups, whole, strict=True)]


def _querygroup(group: Group, whole: OfGroup, config: AdvantageConfig) -> ByTurn:
    silver = silver_documents(group, config.silver_threshold)
    advantages = each_turn(group, whole)
    places: list[tuple[int, int]] = []
    correctness: list[float] = []
    for position, trajectory in enumerate(group.trajectories):
        if not silver or not trajectory.format_valid:
            continue
        judged = judge_turns(trajectory, silver, config.correctness)
        for index in search_turns(trajectory):
            places.append((position, index))
            correctness.append(judged[index].correctness or _NOTHING_FOUND)
    if places:
        values = np.array(correctness)
        mean, std = mean_and_std(values)
        for (position, index), value in zip(places, values, strict=True):
            gain = 0.0 if is_tied(values) else (value - mean) / (std + EPSILON)
            turns = advantages[position]
            turns[index] = _FOUND_SHARE * gain + (1 - _FOUND_SHARE) * turns[index]
    return advantages


# Generalised advantage estimation: a score set against a critic's values, token by token. Only sampled tokens
# count: after the last one of a turn comes the first one of the next turn, whatever the environment showed in
# between. The score stands at the last sampled token.


def gae(groups: Sequence[Group], config: AdvantageConfig) -> list[list[ByToken]]:
    """Return the advantages of the sampled tokens, whitened over those of the step.

    Raises:
        UserError: the critic's values of a trajectory were not kept.
    """
    raw = [gae_and_returns(trajectory, config)[0] for group in groups for trajectory in group.trajectories]
    advantages = iter(whiten(raw, [np.ones(len(tokens), int) for tokens in raw]))
    return [
        [_cut_into_turns(trajectory, next(advantages)) for trajectory in group.trajectories]
        for group in groups
    ]


def gae_and_returns(trajectory: Trajectory, config: AdvantageConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return advantages before whitening, and the returns that the critic learns: both float64 [n].

    Raises:
        UserError: the critic's values were not kept.
    """
    values = critic_values(trajectory).astype(np.float64)
    rewards = np.zeros(len(values))
    rewards[-1:] = trajectory.answer_score
    advantages = token_advantages(rewards, values, config.discount, config.gae_lambda)
    return advantages, advantages + values


def critic_values(trajectory: Trajectory) -> np.ndarray:
    """Return the critic's values before the sampled tokens, float32 [n].

    Raises:
        UserError: they were not kept.
    """
    values = [turn.values for turn in trajectory.turns if turn.values is not None]
    if len(values) < len(trajectory.turns):
        raise UserError(
            f"question {trajectory.question.id!r}: no values of a critic were kept, and gae cannot"
            " do without: only a run with advantage.name=gae, or advantage.base=gae, has a critic; choose"
            " another advantage.name"
        )
    return np.concatenate([np.zeros(0, np.float32), *values])


def token_advantages(rewards: np.ndarray, values: np.ndarray, discount: float, decay: float) -> np.ndarray:
    """Return each token's temporal difference plus the discounted ones of the tokens after it: float64 [n].

    Args:
        rewards: float64 [n], after each sampled token.
        values: float64 [n], before each of them; after the last one nothing is expected.
        decay: lambda.
    """
    advantages = np.zeros(len(values))
    later = next_value = 0.0
    for index in reversed(range(len(values))):
        difference = rewards[index] + discount * next_value - values[index]
        later = advantages[index] = difference + discount * decay * later
        next_value = values[index]
    return advantages


def _cut_into_turns(trajectory: Trajectory, advantages: np.ndarray) -> ByToken:
    ends = np.cumsum([len(turn.token_ids) for turn in trajectory.turns])[:-1]
    return ByToken(np.split(advantages, ends) if trajectory.turns else [])
