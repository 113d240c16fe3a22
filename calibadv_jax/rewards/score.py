"""Scores of trajectories: answer reward times format validity, less a penalty on length."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from calibadv_jax.config import RewardConfig
from calibadv_jax.config.sections.credit import JUDGE, JUDGE_AGREEMENT
from calibadv_jax.config.sections.rollout import TOOL_CALLS
from calibadv_jax.core.answers import normalise_answer
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.registry import ANSWER_REWARDS
from calibadv_jax.core.tags import Grammar, text_with_opening, turn_flaw
from calibadv_jax.core.trajectory import Group, Trajectory, Turn
from calibadv_jax.core.user_functions import (
    describe_failure,
    import_user_function,
    is_address,
    load_function,
)
from calibadv_jax.rewards.evidence import Evidence, find_evidence, max_score

# --- Agreement of a text with the golden answers ---


def exact_match(prediction: str, golden_answers: Sequence[str]) -> float:
    """Return 1.0 if the normalised prediction equals any normalised golden answer, else 0.0.

    Args:
        prediction: the answer of the policy; it is normalised here.
        golden_answers: the accepted answers, one or more; they are normalised here.

    Returns:
        1.0 or 0.0. Two texts that are empty after normalisation are equal.
    """
    normalised = normalise_answer(prediction)
    return float(normalised in [normalise_answer(golden) for golden in golden_answers])


def cover_em(prediction: str, golden_answers: Sequence[str]) -> float:
    """Return 1.0 if any normalised golden answer is a substring of the normalised prediction, else 0.0.

    A golden answer that is empty after normalisation, such as "The", is a substring of every prediction. The
    CalibAdv authors' code does the same.

    Args:
        prediction: the answer of the policy; it is normalised here.
        golden_answers: the accepted answers, one or more; they are normalised here.

    Returns:
        1.0 or 0.0.
    """
    normalised = normalise_answer(prediction)
    return float(any(normalise_answer(golden) in normalised for golden in golden_answers))


def f1(prediction: str, golden_answers: Sequence[str]) -> float:
    """Return the best F1 between the words of the prediction and those of a golden answer.

    F1 is computed as 2 · common / (predicted + golden words), with a single rounding. So equal fractions are
    equal floating-point numbers, which is not so if it is computed from precision and recall.

    Args:
        prediction: the answer of the policy; it is normalised here.
        golden_answers: the accepted answers, one or more; they are normalised here.

    Returns:
        A number in [0, 1]; 0 if the prediction or every golden answer is empty after normalisation.
    """
    words = Counter(normalise_answer(prediction).split())
    best = 0.0
    for golden in golden_answers:
        golden_words = Counter(normalise_answer(golden).split())
        common = (words & golden_words).total()
        if common:
            best = max(best, 2 * common / (words.total() + golden_words.total()))
    return best


# Metrics of a trajectory, logged as reward/NAME.
METRICS = (
    *ANSWER_REWARDS,
    JUDGE,
    JUDGE_AGREEMENT,
    "format",
    "format_valid",
    "overlong_penalty",
    "evidence",
    "extra_searches",
)
# All names below reward/ that a user's own function may not have.
LOGGED_NAMES = (
    *METRICS,
    "mean",
    "max",
    "min",
)


# --- Format validity ---


def format_flaw(trajectory: Trajectory) -> str:
    """Return the first reason for which a trajectory breaks the protocol.

    A valid trajectory has one or more action turns and then one answer turn. An action turn sampled exactly a
    thought and the action that was executed, and got an observation; the answer turn sampled exactly a
    thought and the answer. A protocol tag inside a body, such as a forged observation or a second action, is
    a flaw. The opening that the environment or the prompt wrote counts as sampled. Only sampled text and the
    order of turns are judged, never a document.

    With tool calls a thought is not required, and text beside the calls is no flaw: an action turn has calls
    that can be read, of tools that are on, with arguments that fit their schemas. A thought that the
    environment closed (tool_calls.max_thinking_tokens) is no flaw.

    Args:
        trajectory: a finished trajectory.

    Returns:
        The reason, such as "turn 2: the action was not executed", with turns counted from 1; "" for a valid
        trajectory.
    """
    num_turns = len(trajectory.turns)
    flaws = turn_flaws(trajectory)
    for number, (turn, flaw) in enumerate(zip(trajectory.turns, flaws, strict=True), 1):
        if flaw:
            return f"turn {number}: {flaw}"
        if turn.is_action and not len(turn.observation_ids):
            return f"turn {number}: the action was not executed"
        if turn.kind == "answer" and number < num_turns:
            return f"turn {number}: an answer before the last turn"
    if trajectory.answer is None:
        return "the last turn is not an answer"
    if not any(turn.is_action for turn in trajectory.turns):
        return "an answer without any action before it"
    return ""


def turn_flaws(trajectory: Trajectory) -> list[str]:
    """Return for each turn why it is not exactly a thought and the element of its kind.

    Args:
        trajectory: a finished trajectory of K turns.

    Returns:
        K reasons; "" for a turn without a flaw. With tool calls they are those of the agent loop.
    """
    if trajectory.protocol == TOOL_CALLS:
        return [_flaw_of_calls(turn) for turn in trajectory.turns]
    grammar = Grammar(trajectory.actions)
    flaws = []
    for number, turn in enumerate(trajectory.turns):
        text = text_with_opening(trajectory.opening_of(number), turn.text)
        flaws.append(turn_flaw(text, turn.kind, grammar))
    return flaws


def _flaw_of_calls(turn: Turn) -> str:
    """Return why a turn of the protocol of tool calls is not valid."""
    return "" if turn.is_closed_thought else turn.flaw.rstrip(".")


# --- Scores ---


def score_trajectory(trajectory: Trajectory, config: RewardConfig) -> Trajectory:
    """Score a trajectory: rewards of answer and evidence times format validity, less the overlong penalty.

    Args:
        trajectory: a finished trajectory. If a judge is among the rewards, its verdict is in `metrics`.
        config: the section `reward`.

    Returns:
        A copy with `format_valid`, `answer_score`, `max_score`, and in `metrics` all of ANSWER_REWARDS,
        "format", "evidence" and "extra_searches" if the question names its supporting passages,
        "overlong_penalty" if it is on, and the scores of users' own functions. The metrics are not
        multiplied by format validity. A trajectory without an answer turn has 0 in all of ANSWER_REWARDS.

    Raises:
        ValueError: if the question has no golden answers.
        UserError: if a user's own function fails, or a verdict of the judge is missing.
    """
    if not trajectory.question.golden_answers:
        raise ValueError(f"question {trajectory.question.id!r} has no golden answers")
    rewards: dict[str, float] = {}
    for name, address in ANSWER_REWARDS.items():
        if trajectory.answer is None:
            rewards[name] = 0.0
        else:
            rewards[name] = load_function(address)(trajectory.answer, trajectory.question.golden_answers)
    for name in config.weights:
        if is_address(name):
            rewards[metric_name(name)] = own_score(name, trajectory, config.arguments_of(name))
    is_valid = not format_flaw(trajectory)
    metrics = trajectory.metrics | rewards
    evidence = find_evidence(trajectory)
    if evidence is not None:
        metrics["evidence"] = evidence.share
        metrics["extra_searches"] = float(evidence.extra_searches)
    score = 0.0
    if is_valid or not config.format:
        score = _answer_reward(trajectory, rewards, config)
        if evidence is not None:
            score = _with_evidence(score, evidence, config)
    if config.overlong_penalty:
        penalty = overlong_penalty(int(trajectory.mask.sum()), config)
        metrics["overlong_penalty"] = penalty
        score -= penalty
    metrics["format"] = float(is_valid)
    return replace(
        trajectory,
        format_valid=is_valid,
        answer_score=score,
        max_score=max_score(trajectory.question.supporting_ids, config),
        metrics=metrics,
    )


def _answer_reward(trajectory: Trajectory, rewards: Mapping[str, float], config: RewardConfig) -> float:
    """Return the weighted sum of an answer's rewards; a trajectory without an answer has the verdict 0."""
    has_answer = trajectory.answer is not None
    if JUDGE in config.weights and has_answer and JUDGE not in trajectory.metrics:
        raise UserError(
            "reward.answer names judge, but nobody has judged these trajectories: only a run with"
            " reward.judge.url asks, while it samples"
        )
    values = {JUDGE: trajectory.metrics.get(JUDGE, 0.0), **rewards}
    return math.fsum(weight * values[metric_name(name)] for name, weight in config.weights.items())


def _with_evidence(score: float, evidence: Evidence, config: RewardConfig) -> float:
    """Return an answer's reward plus that of the evidence, less the cost of searches that were not needed."""
    score += config.evidence * evidence.share
    cost = config.search_cost * evidence.extra_searches
    # The cost takes away a reward. It is no reason to prefer an invalid trajectory, which gets 0.
    return score - min(cost, max(score, 0.0))


def overlong_penalty(sampled: int, config: RewardConfig) -> float:
    """Return the penalty on the length of a trajectory (soft overlong punishment of DAPO, arXiv 2503.14476).

    Args:
        sampled: number of sampled tokens.
        config: the section `reward`.

    Returns:
        A number from 0 up to `overlong_from` tokens, growing linearly to `config.overlong_penalty` at
        `overlong_until` tokens and more.
    """
    share = (sampled - config.overlong_from) / (config.overlong_until - config.overlong_from)
    return config.overlong_penalty * min(1.0, max(0.0, share))


def text_scores(trajectory: Trajectory) -> dict[str, float]:
    """Score the answer or, if the trajectory has none, all sampled text.

    Args:
        trajectory: a finished trajectory. Without an answer, the texts of its turns are joined by spaces.

    Returns:
        The metrics "text_f1" and "text_cover_em", in [0, 1].
    """
    text = trajectory.answer
    if text is None:
        text = " ".join(turn.text for turn in trajectory.turns)
    golden_answers = trajectory.question.golden_answers
    return {
        "text_f1": f1(text, golden_answers),
        "text_cover_em": cover_em(text, golden_answers),
    }


def trajectory_scores(group: Group, config: RewardConfig) -> list[float]:
    """Return the score of each trajectory of a group, before `config.shuffle`.

    Args:
        group: a group of G finished trajectories; failed ones do not count.
        config: the section `reward`.

    Returns:
        G numbers, the `answer_score` of each trajectory.

    Raises:
        UserError: as `score_trajectory`.
    """
    return [score_trajectory(trajectory, config).answer_score for trajectory in group.trajectories]


def score_groups(groups: Sequence[Group], config: RewardConfig, rng: np.random.Generator) -> list[Group]:
    """Score every trajectory of a step that has not failed.

    Args:
        groups: the groups of the step.
        config: the section `reward`. With `shuffle`, a control experiment, answer_score, max_score and
            format_valid are permuted together over all trajectories of the step. Metrics do not change.
        rng: draws the permutation; unused without `shuffle`.

    Returns:
        Copies of the groups.

    Raises:
        UserError: as `score_trajectory`.
    """
    scored_groups = []
    for group in groups:
        trajectories = [score_trajectory(trajectory, config) for trajectory in group.trajectories]
        scored_groups.append(replace(group, trajectories=trajectories))
    if config.shuffle:
        return _shuffle_scores(scored_groups, rng)
    return scored_groups


def _shuffle_scores(groups: Sequence[Group], rng: np.random.Generator) -> list[Group]:
    """Permute answer_score, max_score and format_valid together over the trajectories of all groups."""
    scored = [trajectory for group in groups for trajectory in group.trajectories]
    permutation = rng.permutation(len(scored))
    shuffled_groups = []
    start = 0  # place of the group's first trajectory in `scored`
    for group in groups:
        trajectories = []
        for place, trajectory in enumerate(group.trajectories, start):
            source = scored[permutation[place]]
            trajectories.append(
                replace(
                    trajectory,
                    answer_score=source.answer_score,
                    format_valid=source.format_valid,
                    # Questions without supporting passages have a smaller one.
                    max_score=source.max_score,
                )
            )
        shuffled_groups.append(replace(group, trajectories=trajectories))
        start += len(trajectories)
    return shuffled_groups


# --- Users' own functions ---


def metric_name(reward: str) -> str:
    """Return the name of a reward in metrics, where it follows reward/.

    Args:
        reward: a name in `reward.answer`: a built-in one, or ``package.module:function``.

    Returns:
        The name itself, or that of the function.
    """
    _, _, function_name = reward.partition(":")
    return function_name or reward


def own_score(address: str, trajectory: Trajectory, arguments: Mapping[str, Any]) -> float:
    """Return the score that a user's own function gives a trajectory.

    Args:
        address: ``package.module:function``, which takes the trajectory.
        trajectory: a finished trajectory.
        arguments: further arguments of the function, by name (`reward.args`).

    Returns:
        A finite number.

    Raises:
        UserError: if the function cannot be imported or fails, or returns no finite number.
    """
    function = _load_own(address, arguments)
    question = trajectory.question.id
    try:
        score = float(function(trajectory, **arguments))
    except Exception as error:  # a function of the user's own may raise anything
        raise UserError(
            f"reward.answer: {address} failed on an answer to question {question!r}:"
            f" {describe_failure(error)};"
            " it must return a number for every trajectory"
        ) from error
    if not math.isfinite(score):
        raise UserError(
            f"reward.answer: {address} gave {score} for an answer to question {question!r};"
            " it must return a finite number"
        )
    return score


def _load_own(address: str, arguments: Mapping[str, Any]) -> Callable[..., float]:
    expected = "reward(trajectory) -> float"
    return import_user_function(address, "reward.answer", ("trajectory",), expected, tuple(arguments))


def check_reward(config: RewardConfig) -> list[str]:
    """Check the reward's functions, and describe the reward.

    Args:
        config: the section `reward`.

    Returns:
        Lines of text; none if the reward is a single built-in comparison and there is no judge.

    Raises:
        UserError: if a user's own function cannot be loaded, or has the name of another metric.
    """
    names = [metric_name(name) for name in config.weights]
    for address in config.weights:
        if not is_address(address):
            continue
        _load_own(address, config.arguments_of(address))
        name = metric_name(address)
        if name in LOGGED_NAMES or names.count(name) > 1:
            raise UserError(
                f"reward.answer: {address} would be logged as reward/{name}, which is another metric's name;"
                " rename the function"
            )
    lines = []
    if config.evidence or config.search_cost:
        lines.append(
            f"reward of a trajectory: answer + {config.evidence:g} × share of the supporting passages found -"
            f" {config.search_cost:g} × searches that were not needed"
        )
    if config.judge.url:
        lines.append(f"judge ON: {config.judge.model} at {config.judge.url} is asked about every answer")
    is_built_in = isinstance(config.answer, str) and config.answer in ANSWER_REWARDS
    if not is_built_in:
        terms = [f"{weight:g} × {name}" for name, weight in config.weights.items()]
        lines.append(f"reward of an answer: {' + '.join(terms)}")
    return lines
